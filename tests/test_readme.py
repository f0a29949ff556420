"""Every command and every Python block of the README runs and prints what it says, and its numbers are true."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from joma.cli import demo
from joma.paper.claims import Kind, claims
from joma.paper.claims.roots import counts_in_words
from joma.paper.exhibits import ORDER
from joma.paper.records import FOLDER
from tests.snippets import agrees, execute, snippets

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs/_build"))

import found  # noqa: E402

TEXT = (ROOT / "README.md").read_text()
SNIPPETS = snippets(TEXT)
TABLE = re.compile(r"(?:^\|.*\n)+", flags=re.M)


def run(command, cwd):
    words = command if isinstance(command, list) else shlex.split(command)
    done = subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", "MAKEFLAGS": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_short():
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.S | re.M)
    (table,) = TABLE.findall(prose)
    prose = prose.replace(table, "")
    prose = re.sub(r"(!?\[[^\]]*\])\([^)]*\)", r"\1", prose)  # addresses are not read
    assert len(re.findall(r"\w[\w'’.-]*", prose)) <= 750


def test_there_is_something_to_run():
    commands = {
        command for snippet in SNIPPETS if snippet.kind == "console" for command in snippet.commands
    }
    assert {"make reproduce", "make test", "joma demo"} <= commands
    assert [snippet for snippet in SNIPPETS if snippet.kind == "python" and snippet.printed]


def test_what_a_block_prints_is_compared():
    (block,) = snippets("```python\nprint(1 / 3)\n```\n\nIt prints (1 s):\n\n```text\n0.335\n```\n")
    assert execute(block, {}).startswith("0.333")
    with pytest.raises(AssertionError, match="prints"):
        execute(replace(block, code="print(1 / 4)\n"), {})


@pytest.mark.parametrize(
    ("printed", "shown", "about", "expected"),
    [
        ("a 1.04 b", "a 1.00 b", False, True),
        ("a 1.20 b", "a 1.00 b", False, False),
        ("a 1.20 b", "a 1.00 b", True, True),
        ("a 1.60 b", "a 1.00 b", True, False),
        ("step 31", "step 30", False, False),
        ("step 31", "step 30", True, True),
        ("layer_01", "layer_00", True, False),
        ("step-20", "step-30", False, False),
        ("drift 4e-16", "drift 2e-16", False, True),
        ("drift 4e-10", "drift 2e-16", False, False),
        ("one two 3", "one … 3", False, True),
        ("one two 4", "one … 3", False, False),
        ("1 a 2 b 2", "1 … 2", False, True),
        ("nan", "1.0", True, False),
    ],
)
def test_numbers_agree_to_a_tolerance_and_words_exactly(printed, shown, about, expected):
    assert agrees(printed, shown, about) is expected


def test_no_number_of_an_output_is_cut_off():
    """What a page shows is real: "3.…" would be true of 3.0 and of 3.999."""
    pages = {path: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    shown = {(path.name, s.printed) for path, text in pages.items() for s in snippets(text)}
    cut = [(name, text) for name, text in shown if text and re.search(r"\d\.?…|…e-", text)]
    assert cut == []


@pytest.mark.timeout(600)  # ten seconds of one core, and more than it looks on a busy machine
def test_python_blocks_and_joma_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        demo, "SETTINGS", replace(demo.SETTINGS, vocabulary=200, width=16, hidden=16, steps=6)
    )
    scope = {"__name__": "__main__"}
    for snippet in SNIPPETS:  # in the order of the README: each may use what those before it wrote
        if not snippet.code.startswith("$ make"):
            assert execute(snippet, scope)


def test_make_reproduce(tmp_path):
    # the environment this test runs in is the one that make would build
    # and two exhibits stand for all, whose verdicts tests/paper/exhibits looks at
    chosen = ("folding", "fig3")
    make = f"make -o {sys.prefix}/.ready VENV={sys.prefix} OUT={tmp_path}/out REPORT={tmp_path}/report.html"
    out = run(f"{make} 'EXHIBITS={' '.join(chosen)}' reproduce", ROOT)
    rows = (ROOT / "docs/results.md").read_text()
    shown = dict(
        re.findall(
            r"^\| `(\w+)` \| .*? \| (holds(?: as corrected| under a condition)?|fails) \|",
            rows,
            flags=re.M,
        )
    )
    assert set(chosen) <= set(shown)
    for id in chosen:
        assert re.search(rf"^{id}\s+{shown[id]}\b", out, flags=re.M), (
            f"docs/results.md says {id}: {shown[id]}"
        )
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_make_test_runs_this_suite():
    # running it from within itself would not end: look at what it would do
    assert "-m pytest" in run(f"make -n -o {sys.prefix}/.ready VENV={sys.prefix} test", ROOT)


def test_make_help_lists_every_target():
    out = run("make help", ROOT)
    assert all(
        f"make {target}" in out for target in ("reproduce", "test", "lint", "bench", "docs", "help")
    )


def test_every_picture_and_page_it_points_to_is_there():
    targets = re.findall(r"\]\(([^)]+)\)", TEXT)
    missing = [
        target
        for target in targets
        if not target.startswith("http") and not (ROOT / target).exists()
    ]
    assert targets
    assert missing == []
    sizes = {name: (ROOT / f"docs/figures/{name}.png").stat().st_size for name in ("demo", "page")}
    assert sizes["demo"] <= 150_000
    assert sizes["page"] <= 200_000


def test_an_environment_of_yours_keeps_its_libraries():
    """The constraints pin PyTorch's CPU build: they are for `make` only, which has an environment of its own."""
    texts = {path: path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    lines = [
        (path.name, line)
        for path, text in texts.items()
        for line in text.splitlines()
        if "pip install" in line
    ]
    commands = {line.partition("#")[0].strip() for name, line in lines if name == "README.md"}
    assert commands == {"pip install .", "pip install '.[all]'"}
    assert [(name, line) for name, line in lines if "constraints" in line] == []


def test_findings_and_the_last_line_are_those_of_the_results():
    assert found.filled(TEXT) == TEXT, "if not: python docs/make_figures.py tables"
    kinds = Counter(claim.kind for claim in claims())
    assert (
        f"{kinds[Kind.PRINTED]} hold as printed and {kinds[Kind.UNSAID]} need a condition" in TEXT
    )
    assert f"By root cause, {counts_in_words(claims())}" in TEXT
    shown = re.search(r"^(\d+) statements: ", TEXT, flags=re.M)[1]
    assert int(shown) == len(claims()) + len(ORDER)


def test_what_a_finding_says_of_claims_is_their_verdict():
    verdicts = dict(
        re.findall(r"^## (\S+): (.+)$", (ROOT / "docs/claims.md").read_text(), flags=re.M)
    )
    assert {verdicts[id] for id in found.HOLD_AS_PRINTED} == {"holds"}


WHAT = ("top layer, nats", "validation loss")


def test_a_forecast_is_praised_next_to_what_their_other_seeds_would_do():
    pooled = json.loads((FOLDER / "foresight.json").read_text())["foresight.json"]["pooled"]
    other_seeds = "the target's other seeds"
    seeds = [f"{pooled[f'{what}, {other_seeds}']:.2f}" for what in WHAT]
    forecast = [f"{pooled[what]:.2f}" for what in WHAT]
    (sentence,) = re.findall(r"^- \*\*Steps are the wrong clock.*$", TEXT, flags=re.M)
    assert f"off by {forecast[0]} nats, the validation loss by {forecast[1]}." in sentence
    assert f"other seeds would be off by {seeds[0]} and {seeds[1]}" in sentence
