"""Recorded exhibits as a user meets them: what is printed, what the page and the exit code say, what is refused."""

import dataclasses
import math
import re
import sys
from contextlib import nullcontext

import altair as alt
import pytest
import torch

import joma
from joma._jobs import InProcess
from joma.cli import main
from joma.paper import records
from joma.paper.exhibits import Exhibit, Experiment, Judgement, index
from joma.paper.exhibits.base import FRESH_SEED
from joma.paper.exhibits.runner import ExhibitObserver, expected_seconds
from joma.paper.make_record import make_record
from joma.paper.records import load
from joma.paper.verdict import Verdict


def run(writer, settings, seed, progress):
    for step in range(settings["steps"]):
        writer.write(step, {"value": math.exp(-step / settings["scale"])})


def draw(run):
    return alt.Chart(run.frame("value")).mark_line().encode(x="step", y="value")


def judge(run):
    start = run.frame("value").value.iloc[0]
    return Judgement(Verdict.HOLDS, {"start": start}, "from {start:.3f}")


def biased(writer, settings, seed, progress):
    run(writer, settings | {"scale": 2 * settings["scale"]}, seed, progress)


RECORDED = Exhibit(
    id="decay",
    title="Decay",
    statement="A curve falls.",
    rule="holds if the curve falls",
    experiment=Experiment(
        {"laptop": {"steps": 50, "scale": 7.0}},
        run,
        draw,
        judge,
        code_slice={"steps": 5, "scale": 3.0},
        record_slice={"steps": 4},
    ),
)
COMPUTED = dataclasses.replace(
    RECORDED,
    id="growth",
    experiment=Experiment({"default": {"steps": 3, "scale": -1.0}}, run, draw, judge),
)


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """A recorded and a computed exhibit, in the list that the commands use."""
    folder = tmp_path / "recorded"
    monkeypatch.setattr(records, "FOLDER", folder)
    monkeypatch.setattr(records.load, "__defaults__", (folder,))
    make_record(RECORDED, tmp_path / "runs", folder)
    monkeypatch.setattr(index, "_registered", {"decay": RECORDED, "growth": COMPUTED})
    monkeypatch.setattr(
        "joma.paper.exhibits.runner.open_engine", lambda *args, **kwargs: nullcontext(InProcess())
    )
    return folder / "decay.zip"


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["joma", "reproduce", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "1000")  # a sentence on one line, wherever the tests run
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    return end.value.code or 0, printed.out, printed.err


def use(monkeypatch, run):
    changed = dataclasses.replace(RECORDED.experiment, run=run)
    exhibit = dataclasses.replace(RECORDED, experiment=changed)
    monkeypatch.setitem(index._registered, "decay", exhibit)


def test_terminal_and_page_say_what_was_recorded_and_what_was_checked_here(
    registered, tmp_path, monkeypatch, capsys
):
    code, out, _ = command(monkeypatch, capsys, "decay", "--out", tmp_path / "out")
    record = load("decay")
    agrees = r"agree (exactly|to \de-\d)"
    checked = f"code checked: steps 0–4 {agrees}; record checked: steps 0–3 {agrees}"
    assert code == 0
    assert re.search(f"R{re.escape(record.origin[1:])}; {checked}", out)
    assert out.splitlines()[-1].startswith("1 statement: 1 holds; ")
    page = (tmp_path / "out/report.html").read_text()
    assert record.origin[1:] in page
    assert re.search(checked, page)


def test_a_slice_that_disagrees_is_an_error_on_page_and_in_the_exit_code(
    registered, tmp_path, monkeypatch, capsys
):
    use(monkeypatch, biased)
    code, out, _ = command(monkeypatch, capsys, "decay", "--out", tmp_path / "out")
    assert code == 1
    sentence = (
        "spot check failed (code): value at step 4 is 0.513417 here and 0.263597 in the record"
    )
    assert f"decay: {sentence}" in out
    assert sentence in (tmp_path / "out/report.html").read_text()
    # The same when the folder is there already.
    code, out, _ = command(monkeypatch, capsys, "decay", "--out", tmp_path / "out")
    assert code == 1


def test_with_another_torch_a_disagreement_is_not_an_error(
    registered, tmp_path, monkeypatch, capsys
):
    use(monkeypatch, biased)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    code, out, _ = command(monkeypatch, capsys, "decay", "--out", tmp_path / "out")
    assert code == 0
    assert "not comparable (code; other versions of torch or NumPy)" in out


def test_a_record_that_cannot_be_read_is_the_error_of_its_exhibit_alone(
    registered, tmp_path, monkeypatch, capsys
):
    registered.write_bytes(b"no zip")
    code, out, _ = command(monkeypatch, capsys, "decay", "growth", "--out", tmp_path / "out")
    assert code == 1
    assert "decay.zip is damaged" in out
    assert out.splitlines()[-1].startswith("2 statements: 1 holds; 1 could not be made (decay); ")
    assert not (tmp_path / "out/decay").exists()
    assert (tmp_path / "out/growth/verdict.json").exists()
    assert "decay.zip is damaged" in (tmp_path / "out/report.html").read_text()


def test_without_record_and_computation_an_exhibit_is_inconclusive_and_nothing_is_drawn(
    registered, tmp_path, monkeypatch, capsys
):
    registered.unlink()
    code, out, _ = command(monkeypatch, capsys, "decay", "growth", "--out", tmp_path / "out")
    assert code == 0
    assert "no record of a longer run" in out
    assert "What would decide it: joma reproduce decay --preset laptop" in out
    assert "2 statements: 1 holds; 1 is inconclusive (decay); " in out.splitlines()[-1]
    assert not (tmp_path / "out/decay").exists()
    page = (tmp_path / "out/report.html").read_text()
    section = re.search(r'<section id="decay".*?</section>', page, flags=re.DOTALL)[0]
    assert "Inconclusive: Decay</h2>" in section
    assert "joma reproduce decay --preset laptop" in section
    assert "<figure" not in section
    # --force has nothing to make either.
    code, out, _ = command(monkeypatch, capsys, "decay", "--force", "--out", tmp_path / "out")
    assert code == 0
    assert not (tmp_path / "out/decay").exists()


def test_a_record_that_is_dropped_into_the_folder_is_shown_instead_of_a_computation(
    registered, tmp_path
):
    """A record decides what is shown, also of an exhibit that minutes of computing decide."""
    make_record(RECORDED, tmp_path / "runs", tmp_path / "elsewhere")
    growth = dataclasses.replace(
        COMPUTED.experiment, settings={"default": {"steps": 3, "scale": -1.0}}
    )
    index._registered["decay"] = dataclasses.replace(RECORDED, experiment=growth)
    shown = joma.reproduce("decay", tmp_path / "out").outcomes[0]
    assert shown.recorded == load("decay").origin
    assert len(joma.Run(shown.path).frame()) == 50
    # Settings of one's own are computed.
    changed = joma.reproduce("decay", tmp_path / "changed", settings={"steps": 4}).outcomes[0]
    assert changed.recorded == ""
    assert len(joma.Run(changed.path).frame()) == 4
    registered.unlink()
    computed = joma.reproduce("decay", tmp_path / "computed").outcomes[0]
    assert computed.recorded == ""
    assert len(joma.Run(computed.path).frame()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "lapptop"], "unknown preset 'lapptop'. Did you mean 'laptop'"),
        (["--set", "steps=3"], "decay is not computed at the preset default"),
        (["--set", "stesp=3", "--preset", "laptop"], "Did you mean 'steps'"),
        (["--seed", "-1"], "the seed must be a whole number of at least 0"),
        (["--seed", str(10**30)], "at most 1,000,000,000,000,000,000, got 1000"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    registered, tmp_path, monkeypatch, capsys, arguments, message
):
    code, _, error = command(monkeypatch, capsys, "decay", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert message in error
    assert not (tmp_path / "out").exists()


def test_what_was_interrupted_is_made_by_the_next_call(registered, tmp_path, monkeypatch):
    def interrupted(exhibit, record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("joma.paper.exhibits.making.spot_checks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            joma.reproduce("decay", tmp_path / "out")
    assert not (tmp_path / "out/decay").exists()
    assert joma.reproduce("decay", tmp_path / "out").ok


def test_a_long_preset_says_beforehand_how_long_it_takes(registered, tmp_path, monkeypatch, capsys):
    seconds = expected_seconds(RECORDED, "laptop")
    assert seconds == 60 * load("decay").core_minutes
    forecasts = []

    class Kept(ExhibitObserver):
        def planned(self, entries, seconds):
            forecasts.append(([entry.id for entry in entries], seconds))

    made = joma.reproduce(
        "decay", tmp_path / "out", preset="laptop", seed=FRESH_SEED, observer=Kept()
    )
    assert made.ok
    assert forecasts == [(["decay"], seconds)]
    monkeypatch.setattr("joma.cli.reproduce._LONG", 0.0)
    _, _, error = command(
        monkeypatch, capsys, "decay", "--preset", "laptop", "--out", tmp_path / "again"
    )
    assert error.startswith("1 exhibit to compute: about ")


def test_the_conclusion_counts_statements_and_names_what_fails(registered, tmp_path):
    made = joma.reproduce(["decay", "growth"], tmp_path / "out")
    outcome = made.outcomes[0]
    failing = dataclasses.replace(outcome, verdict=Judgement(Verdict.FAILS))
    open_question = dataclasses.replace(outcome, verdict=Judgement(Verdict.INCONCLUSIVE))
    other = dataclasses.replace(
        open_question, exhibit=dataclasses.replace(RECORDED, id="other", would_decide="more")
    )
    made.outcomes = [failing, made.outcomes[1], other]
    assert made.conclusion == ("3 statements: 1 holds; 1 fails (decay); 1 is inconclusive (other)")
