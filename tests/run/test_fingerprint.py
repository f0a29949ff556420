"""The fingerprint of results: changes with all that decides a number, and with nothing else."""

from __future__ import annotations

import ast
import importlib
import shutil
import sys
from pathlib import Path

import pytest

import joma
from joma._run import fingerprint as module
from joma._run.fingerprint import fingerprint, sources

SOURCE = Path(joma.__file__).parent


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of joma's source that may be changed."""
    shutil.copytree(SOURCE, tmp_path / "joma", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    monkeypatch.setattr(module, "_HOME", str(tmp_path))
    return tmp_path / "joma"


def append(path):
    path.write_text(path.read_text() + "\n# changed\n")


@pytest.mark.parametrize(
    ("exhibit", "file", "stale"),
    [
        ("fig6", "_exhibits/fig6.py", True),
        ("fig6", "_run/curve.py", True),  # the rule
        ("fig6", "_gauges/attention.py", True),
        ("fig6", "_exhibits/fig3.py", False),
        ("fig6", "_figures/style.py", False),
        ("fig6", "_report/page.py", False),
        ("fig3", "theory/flows.py", True),
        ("fig3", "_figures/watch.py", False),
        ("fig3", "theory/isotropic/__init__.py", False),
        ("fig3", "_train/language.py", False),
    ],
)
def test_a_changed_rule_makes_a_result_stale_and_a_changed_picture_does_not(copy, exhibit, file, stale):
    before = fingerprint([f"joma._exhibits.{exhibit}"])
    append(copy / file)
    assert (fingerprint([f"joma._exhibits.{exhibit}"]) != before) is stale


def test_settings_and_versions_count(monkeypatch):
    before = fingerprint(["joma._exhibits.fig3"], {"steps": 1})
    assert fingerprint(["joma._exhibits.fig3"], {"steps": 1}) == before
    assert fingerprint(["joma._exhibits.fig3"], {"steps": 2}) != before
    monkeypatch.setattr(module, "_versions", lambda: {"numpy": "9.9"})
    assert fingerprint(["joma._exhibits.fig3"], {"steps": 1}) != before


def imports(tree):
    """By Python's own parser: what a module imports when it runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node = ast.Module(node.orelse)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)
        else:
            yield from imports(node)


def test_imports_are_those_that_the_parser_finds():
    for path in SOURCE.rglob("*.py"):
        expected = {pair for pair in imports(ast.parse(path.read_text())) if pair[0] != "joma"}
        assert {(name, part) for name, part in module._parsed(str(path))[1] if name not in ("joma", "")} == expected, (
            path
        )


def test_a_users_module_counts_with_what_it_imports_of_its_own_and_of_joma(tmp_path, monkeypatch):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rule.py").write_text("LEAST = 0.1\n")
    (package / "study.py").write_text(
        "import joma\nimport numpy\nfrom .rule import LEAST\n\ndef run(w):\n    return joma.stable_rank(w)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("mine.study")
    assert {"mine.study", "mine.rule", "joma._gauges.rank"} <= set(sources(["mine.study"]))
    assert not [name for name in sources(["mine.study"]) if name.startswith(("numpy", "joma._scan"))]
    before = fingerprint(["mine.study"])
    append(package / "rule.py")
    assert fingerprint(["mine.study"]) != before
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_what_cannot_be_checked_never_counts_as_done():
    assert fingerprint(["of_a_notebook"]) != fingerprint(["of_a_notebook"])
