"""The fingerprint of results: changes with everything that decides a number, and with nothing else."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

import joma
from joma._runs import fingerprint as module
from joma._runs.fingerprint import fingerprint

SOURCE = Path(joma.__file__).parent


@pytest.fixture
def new_process():
    """Return a function that forgets what is read once per process."""
    yield module._joma_digest.cache_clear
    module._joma_digest.cache_clear()


@pytest.fixture
def copy(tmp_path, monkeypatch, new_process):
    """Return a copy of joma's source that may be changed, next to another library as in site-packages."""
    home = tmp_path / "site-packages"
    shutil.copytree(SOURCE, home / "joma", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (home / "library").mkdir()
    (home / "library/__init__.py").write_text("")
    monkeypatch.setattr(module, "_JOMA", home / "joma")
    new_process()
    return home / "joma"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Return the folder of a user's code, which can be imported."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "script", "helper"):
            del sys.modules[name]


def append(path):
    path.write_text(path.read_text() + "\n# changed\n")


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("file", "is_stale"),
    [
        ("paper/exhibits/fig6.py", True),
        ("_runs/curve.py", True),  # the rule
        ("_measure/gauges/attention.py", True),
        ("theory/flows.py", True),
        ("__init__.py", True),
        ("_show/plots/style.py", False),
        ("_show/pages/page.py", False),
        ("cli/demo.py", False),
        ("paper/recorded/fig3.json", False),
        ("../library/__init__.py", False),
    ],
)
def test_a_changed_rule_makes_a_result_stale_and_a_changed_picture_does_not(
    copy, new_process, file, is_stale
):
    before = fingerprint(["joma.paper.exhibits.fig6"])
    append(copy / file)
    new_process()
    assert (fingerprint(["joma.paper.exhibits.fig6"]) != before) is is_stale


def test_the_source_of_joma_is_read_once_per_process(copy):
    before = fingerprint(["joma.paper.exhibits.fig3"])
    shutil.rmtree(copy)
    assert fingerprint(["joma.paper.exhibits.fig3"]) == before


def test_settings_and_versions_count(monkeypatch):
    before = fingerprint(["joma.paper.exhibits.fig3"], {"steps": 1})
    assert fingerprint(["joma.paper.exhibits.fig3"], {"steps": 1}) == before
    assert fingerprint(["joma.paper.exhibits.fig3"], {"steps": 2}) != before
    monkeypatch.setattr(module, "_versions", lambda: {"numpy": "9.9"})
    assert fingerprint(["joma.paper.exhibits.fig3"], {"steps": 1}) != before


def test_the_package_of_a_users_module_counts_and_what_lies_around_it_does_not(mine):
    write(
        mine,
        {
            "mine/__init__.py": "",
            "mine/deep/__init__.py": "",
            "mine/deep/study.py": "import numpy\n\nfrom mine.rule import LEAST\n",
            "mine/rule.py": "LEAST = 0.1\n",
            "mine/data/notes/old.py": "",  # below a folder without Python files: data
            "mine/.venv/lib/site-packages/other.py": "",
            "unrelated.py": "",
        },
    )
    importlib.import_module("mine.deep.study")
    before = fingerprint(["mine.deep.study"])
    assert fingerprint(["mine.deep.study"]) == before
    for name in ("unrelated.py", "mine/data/notes/old.py", "mine/.venv/lib/site-packages/other.py"):
        append(mine / name)
        assert fingerprint(["mine.deep.study"]) == before
    append(mine / "mine/rule.py")
    assert fingerprint(["mine.deep.study"]) != before


def test_a_module_without_a_package_counts_with_those_next_to_it(mine):
    write(mine, {"script.py": "import helper\n", "helper.py": "LEAST = 0.1\n"})
    importlib.import_module("script")
    before = fingerprint(["script"])
    append(mine / "helper.py")
    assert fingerprint(["script"]) != before


def test_an_installed_module_counts_without_its_neighbours(mine, monkeypatch):
    write(mine, {"site-packages/script.py": "", "site-packages/numpy.py": ""})
    monkeypatch.syspath_prepend(mine / "site-packages")
    importlib.import_module("script")
    before = fingerprint(["script"])
    append(mine / "site-packages/numpy.py")
    assert fingerprint(["script"]) == before
    append(mine / "site-packages/script.py")
    assert fingerprint(["script"]) != before


def test_packages_that_hand_each_other_a_name_are_harmless(mine):
    """Each says that the other one has it: followed import by import, there would be no end."""
    write(
        mine,
        {
            "mine/__init__.py": "",
            "mine/a/__init__.py": "def __getattr__(name):\n    from mine.b import rule\n    return rule\n",
            "mine/b/__init__.py": "def __getattr__(name):\n    from mine.a import rule\n    return rule\n",
            "mine/study.py": "def run():\n    from mine.a import rule\n    return rule\n",
        },
    )
    importlib.import_module("mine.study")
    before = fingerprint(["mine.study"])
    assert fingerprint(["mine.study"]) == before
    append(mine / "mine/b/__init__.py")
    assert fingerprint(["mine.study"]) != before


def test_what_cannot_be_checked_never_counts_as_done():
    assert fingerprint(["of_a_notebook"]) != fingerprint(["of_a_notebook"])
