"""The sentence of a run: what attention did in words, and whether anything is wrong."""

import math
from dataclasses import replace

import pytest

from joma import Run
from joma._runs.outcome import outcome
from joma._runs.story import by_block, figures, story
from joma._runs.writer import RunWriter


def run_of(path, entropies, alerts=(), kind="watch"):
    """The outcome of a run whose layers have these entropies, measured every ten steps."""
    with RunWriter.create(path, kind=kind, config={}, axes={"entropy": ["layer"]}) as writer:
        for n, values in enumerate(zip(*entropies, strict=True)):
            writer.write(10 * n, {"entropy": list(values)})
    return replace(outcome(Run(path)), phases=["dense"] * len(entropies))


def alert(kind, level, layer, step=30):
    return {"kind": kind, "level": level, "layer": layer, "step": step}


DIP = [math.log(16)] * 5 + [math.log(4)] * 5 + [math.log(8)] * 5
FLAT = [math.log(16)] * 15


def test_a_dip_and_bounce_is_told_in_tokens(tmp_path):
    now = run_of(tmp_path / "run", [FLAT, DIP])
    assert story(now, "watch") == (
        "Attention of layer 0 stayed at about 16 tokens. Attention of layer 1 fell from 16 to 4 tokens by step 50 "
        "and came back to 8. Healthy."
    )
    assert "words" in story(now, "train")


def test_numbers_behind_it_are_smoothed_and_the_lowest_raw_one_is_named(tmp_path):
    spike = [*DIP]
    spike[7] = math.log(2)
    now = run_of(tmp_path / "run", [spike])
    assert figures(now, 0) == (
        "entropy 2.77 → 1.39 (step 50) → 2.08 nats, medians of 5 measurements; the lowest single one is 0.69 at "
        "step 70: dip and bounce"
    )


@pytest.mark.parametrize(
    ("level", "end"),
    [("warning", "Warning: collapse in layer 1 from step 30."), ("critical", "Critical: collapse")],
)
def test_an_alert_is_not_healthy(tmp_path, level, end):
    now = replace(run_of(tmp_path / "run", [DIP]), alerts=[alert("collapse", level, 1)])
    assert end in story(now, "watch")
    assert "Healthy" not in story(now, "watch")


def test_alerts_are_grouped_by_block_and_the_worst_is_first():
    alerts = [
        alert("rank loss", "warning", 1),
        alert("diverging", "critical", None),
        alert("collapse", "critical", 1),
    ]
    grouped = by_block(alerts)
    assert [name for name, _ in grouped] == ["The whole model", "Block 1"]
    assert [one["kind"] for one in grouped[1][1]] == ["collapse", "rank loss"]


def test_of_many_layers_those_that_moved_most_are_told(tmp_path):
    now = run_of(tmp_path / "run", [FLAT, DIP, FLAT, FLAT])
    told = story(now, "watch")
    assert "Attention of layer 1 fell" in told
    assert "Of 4 layers 1 dipped, and 1 came back." in told
