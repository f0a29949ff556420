"""Exhibits of users' own: registered, refused with the reason, made again after a change; the contract of joma's."""

import json
import subprocess
import sys
from pathlib import Path

import altair as alt
import pandas as pd
import pytest

import joma
from joma.paper.exhibits import ORDER, PRESETS, Experiment, Judgement, get, make_exhibit
from joma.paper.exhibits.base import DEFAULT, FRESH_SEED
from joma.paper.exhibits.index import remove
from joma.paper.exhibits.making import plan
from joma.paper.records import load
from joma.paper.verdict import Verdict


def run(writer, settings, seed, progress):
    writer.write(0, {"answer": float(settings.get("answer", 42))})


def draw(run):
    return alt.Chart(pd.DataFrame({"x": [1, 2]})).mark_point().encode(x="x:Q")


def judge(run):
    return Judgement(Verdict.HOLDS, {"answer": run.frame("answer").value.item()}, "{answer:g}")


VERBS = {"run": run, "draw": draw, "judge": judge}


@pytest.fixture
def answer():
    yield joma.exhibit(
        "answer",
        "The answer",
        "It is 42.",
        rule="holds",
        **VERBS,
        settings={p: {"answer": 42} for p in PRESETS},
    )
    remove("answer")


def test_a_registered_exhibit_is_listed_and_made(answer, tmp_path):
    assert joma.exhibits()["answer"] is answer
    outcome = make_exhibit(get(["answer"])[0], out=tmp_path)
    assert (outcome.verdict.verdict, outcome.verdict.summary) == (Verdict.HOLDS, "42")
    assert joma.Run(outcome.path).info["config"]["settings"] == {"answer": 42}


def test_what_other_code_has_made_does_not_count_as_done(answer, tmp_path):
    path = make_exhibit(answer, out=tmp_path).path
    assert plan(answer, "default", tmp_path, FRESH_SEED).stored() is not None
    assert not make_exhibit(answer, out=tmp_path).fresh
    info = json.loads((path / "run.json").read_text())
    info["config"]["fingerprint"] = "of another version"
    (path / "run.json").write_text(json.dumps(info))
    assert plan(answer, "default", tmp_path, FRESH_SEED).stored() is None
    assert make_exhibit(answer, out=tmp_path).fresh


def test_functions_that_no_module_holds_are_run_anew_each_time(tmp_path):
    names = {"Judgement": Judgement, "Verdict": Verdict}
    code = "def run(writer, settings, seed, progress): writer.write(0, {'a': 1.0})\n"
    exec(code + "def judge(run): return Judgement(Verdict.HOLDS, {}, 'done')", names)
    made = joma.exhibit(
        "made", "Made", "It runs.", rule="holds", run=names["run"], draw=draw, judge=names["judge"]
    )
    try:
        assert [make_exhibit(made, out=tmp_path).fresh for _ in range(2)] == [True, True]
    finally:
        remove("made")


@pytest.mark.parametrize(
    ("id", "settings", "message"),
    [
        ("fig3", None, "there is an exhibit 'fig3' already; choose another id"),
        ("my figure", None, "must be an identifier such as 'fig3', got 'my figure'"),
        ("mine", {"default": {}}, "'mine' has no settings for the preset laptop, paper"),
    ],
)
def test_bad_registrations_are_refused(id, settings, message):
    with pytest.raises(ValueError, match=message):
        joma.exhibit(id, "title", "statement", rule="holds", **VERBS, settings=settings)
    assert get(["fig3"])[0].is_jomas


@pytest.mark.parametrize("id", ORDER)
def test_every_exhibit_of_joma_keeps_the_contract(id):
    experiment = get([id])[0].experiment
    assert isinstance(experiment, Experiment)
    assert {"laptop", "paper"} <= set(experiment.settings) <= set(PRESETS)
    if DEFAULT not in experiment.settings or load(id) is not None:
        assert experiment.code_slice is not None
    assert get([id])[0].seconds > 0


def test_exhibits_leave_drawing_to_the_panels():
    package = Path(joma.__file__).parent
    imports = {
        path.parent.name for path in package.rglob("*.py") if "import altair" in path.read_text()
    }
    assert imports == {"plots"}


def test_the_names_of_exhibits_are_completed_without_loading_a_large_library():
    heavy = (
        "[name for name in ('numpy', 'scipy', 'pandas', 'torch', 'altair') if name in sys.modules]"
    )
    complete = "from joma.cli.help import exhibits; assert exhibits('fig1') == [('fig10', '')]"
    code = f"import sys; {complete}; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)
