"""Runs side by side: what they came to, by layer, over steps and over the optimiser's clock."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from joma._runs import Run, RunError, RunWriter
from joma._runs.curve import ENTROPY, describe
from joma._runs.outcome import outcome
from joma._show.pages.outcomes import by_layer, numbers, worst
from joma._show.pages.runs import report
from joma._show.plots import specification
from joma._show.plots.compare import draw as compare
from joma.cli import app

from .pages import watch_run

PHASES = ["dense", "sparsifying", "bouncing", "collapsed"]
STEPS = np.arange(1, 41)
DIP = 2.5 - np.exp(-(((STEPS - 15) / 5) ** 2))  # down to 1.5 at step 15, and back


def dipping_run(path, lr, curves, valid=None, alerts=()):
    """A training whose layers' entropies are the curves, at a constant learning rate."""
    axes = {"entropy": ["layer", "head"], "phase": ["layer"]}
    with RunWriter.create(
        path, kind="train", config={"lr": lr, "layers": len(curves)}, axes=axes, seed=0
    ) as writer:
        writer.note(phases=PHASES)
        for n, step in enumerate(STEPS):
            row = {
                "entropy": [[curve[n] - 0.1, curve[n] + 0.1] for curve in curves],
                "phase": [2] * len(curves),
            }
            row |= {"loss": 3.0 - 0.01 * step, "valid_loss": valid[n] if valid is not None else 4.0}
            writer.write(step, row, tau=lr * step)
    (path / "alerts.jsonl").write_text("".join(json.dumps(alert) + "\n" for alert in alerts))
    return Run(path)


def alert(level, step=7):
    names = ("layer", "heads", "module", "gauge", "value", "threshold", "later")
    facts = dict(zip(names, (1, [0], "h.1", "entropy", 0.01, 0.1, []), strict=True))
    return {"step": step, "kind": "collapse", "level": level, "what_to_do": "lower <it>", **facts}


def test_the_outcome_of_a_run_is_what_its_rows_say(tmp_path):
    valid = 5.0 + (STEPS - 12) ** 2 / 100
    run = dipping_run(
        tmp_path / "a", 0.5, [DIP, np.full(40, 2.5)], valid, [alert("notice"), alert("critical")]
    )
    now = outcome(run)
    assert (now.step, now.loss, now.valid_loss, now.valid_step) == (40, pytest.approx(2.6), 5.0, 12)
    assert now.phases == ["bouncing", "bouncing"]
    assert now.curves["entropy"] == {
        0: describe(STEPS, DIP, ENTROPY),
        1: describe(STEPS, np.full(40, 2.5), ENTROPY),
    }
    assert now.clock[15] == 7.5
    assert worst(now) == "critical"
    assert numbers(now)["phases"] == "0–1: bouncing"
    assert numbers(now)["best validation loss"] == "5 (step 12)"
    assert numbers(now)["alerts"] == "1 notice, 1 critical"


def test_a_layer_that_only_one_run_has_leaves_the_others_cell_empty(tmp_path):
    a, b = (
        dipping_run(tmp_path / name, 0.5, curves)
        for name, curves in (("a", [DIP, DIP]), ("b", [DIP]))
    )
    (table,) = by_layer([outcome(a), outcome(b)])
    assert [[cell is not None for cell in row] for row in table.rows.values()] == [
        [True, True],
        [True, False],
    ]
    curve, tau = table.rows[0][0]
    assert curve.pattern == "dip and bounce"
    assert tau == 0.5 * curve.trough_step
    assert table.rules == [f"{ENTROPY.smoothed()}{ENTROPY}"]


def test_the_page_of_two_runs_has_their_numbers_and_their_alerts(tmp_path):
    runs = [dipping_run(tmp_path / name, lr, [DIP], alerts=found).path
            for name, lr, found in (("slow", 0.25, ()), ("fast", 0.5, [alert("critical")]))]  # fmt: skip
    text = report(runs, tmp_path / "page.html").read_text()
    flat = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", text.split("<script")[0]))
    assert flat.count("dip and bounce , trough at step") == 2
    trough = describe(STEPS, DIP, ENTROPY).trough_step
    assert f"step {trough}, τ {0.25 * trough:.3g}" in flat
    assert "Settings in which they differ run lr slow 0.25 fast 0.5" in flat
    assert "1 critical" in flat
    assert "Lower &lt;it&gt;" in text
    assert text.count('data-clock="tau"') == 3  # over each other, and of each


def test_over_tau_runs_stand_at_their_sums_of_rates_and_the_page_can_switch(tmp_path):
    runs = {n: Run(watch_run(tmp_path / n, n, lr=lr)) for n, lr in (("a", 0.5), ("b", 0.25))}
    for clock, field in ((False, "step"), (True, "tau")):
        drawn = json.loads(specification(compare(runs, clock)))
        assert {panel["encoding"]["x"]["field"] for panel in drawn["concat"]} == {field}
        assert set(drawn["usermeta"]["clocks"]) == {"step", "tau"}
        rows = pd.DataFrame([row for rows in drawn["datasets"].values() for row in rows])
        assert (rows.tau == rows.step * rows.run.map({"a": 0.5, "b": 0.25})).all()


def test_a_run_without_rates_is_named_and_refused_only_if_the_clock_was_asked_for(tmp_path):
    with_rates, without = watch_run(tmp_path / "a", "a", lr=0.5), watch_run(tmp_path / "b", "b")
    text = report([with_rates, without], tmp_path / "page.html").read_text()
    assert "no switch to τ = Σ lr" in text
    assert "b has no learning rates, and so no clock" in text
    assert text.count('data-clock="tau"') == 1  # of the run that has them
    with pytest.raises(RunError, match="b has no learning rates, and so no clock"):
        report([with_rates, without], tmp_path / "other.html", clock=True)
    assert not (tmp_path / "other.html").exists()
    scan = watch_run(tmp_path / "s", "s", kind="scan")
    with pytest.raises(RunError, match="kind 'scan', which has no optimiser"):
        report([scan], tmp_path / "other.html", clock=True)


def test_the_command_draws_one_run_over_the_clock(tmp_path):
    path, out = watch_run(tmp_path / "a", "a", lr=0.5), tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(path), "--clock", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert 'data-clock="tau" aria-pressed="true"' in out.read_text()
    assert "--out figure.svg" in out.read_text()
    assert "--clock" in out.read_text()
