"""One name, one number: a run says what it was measured on, and runs that differ in it are not compared silently."""

from __future__ import annotations

import json

import pytest
import torch

import joma
from joma._forecast.known import caveats
from joma._runs import Run
from joma._runs.measured import measured_on, not_alike
from tests.measure.watch.models import VOCABULARY, HandWrittenGPT

PROBE = "a probe in eval mode"
TRAINING = "training batches in train mode"


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def watched(path, *, steps=3, mode=True, probe=False, compiled=False):
    torch.manual_seed(0)
    model = HandWrittenGPT(layers=1, dropout=0.3).train(mode)
    called = torch.compile(model, backend="eager") if compiled else model
    given = {"probe": tokens()} if probe else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with joma.watch(called, path, every=1, live=False, optimizer=optimizer, **given) as w:
        for _ in range(steps):
            loss = called(tokens()).square().mean()
            loss.backward()
            optimizer.step()
            w.step(loss)
    return Run(path)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, TRAINING),
        ({"mode": False}, "training batches in eval mode"),
        ({"probe": True}, PROBE),
        ({"compiled": True}, f"{TRAINING}, replayed outside the compiled model"),
        ({"compiled": True, "probe": True}, PROBE),
    ],
)
def test_a_run_says_what_it_was_measured_on_and_in_which_mode(how, expected, tmp_path):
    run = watched(tmp_path / "run", **how)
    assert run.info["measured"] == [expected]
    assert measured_on(run.info) == (expected,)


def test_a_mode_that_changes_in_mid_run_is_recorded(tmp_path):
    model = HandWrittenGPT(layers=1)
    with joma.watch(model, tmp_path / "run", every=1, live=False) as w:
        for mode in (True, False, True):
            model.train(mode)
            model(tokens()).sum().backward()
            w.step()
    assert Run(tmp_path / "run").info["measured"] == [TRAINING, "training batches in eval mode"]


def test_runs_that_were_measured_in_different_ways_are_not_compared_silently(tmp_path):
    a = watched(tmp_path / "a")
    b = watched(tmp_path / "b", probe=True)
    c = watched(tmp_path / "c")
    sentence = f"These runs were not measured alike (a: {TRAINING}; b: {PROBE})"
    page = joma.report([a.path, b.path], tmp_path / "page.html").read_text()
    assert sentence in page
    assert (
        "These runs were not measured alike"
        not in joma.report([a.path, c.path], tmp_path / "same.html").read_text()
    )
    assert any("not measured alike" in caveat for caveat in caveats([a, b], 1e-5, 10, 1))
    assert not any("not measured alike" in caveat for caveat in caveats([a, c], 1e-5, 10, 1))

    from joma._show.plots.compare import draw

    assert "Not measured alike" in json.dumps(draw({"a": a, "b": b}).to_dict())
    assert "Not measured alike" not in json.dumps(draw({"a": a, "c": c}).to_dict())


def test_runs_that_did_not_record_their_mode():
    old = {"config": {"measured on": "training batches"}}
    old_probe = {"config": {"measured on": "probe"}}
    new = {"config": {"measured on": "training batches"}, "measured": [TRAINING]}
    assert not_alike({"a": old, "b": new}) == ""
    assert not_alike({"a": old_probe, "b": {"measured": [PROBE]}}) == ""
    assert "not measured alike" in not_alike({"a": old_probe, "b": old})
    assert "not measured alike" in not_alike({"a": old_probe, "b": new})
    assert not_alike({"a": {"config": {"lr": 1.0}}, "b": new}) == ""


def test_the_gauge_says_that_a_learned_sink_is_a_key():
    assert "A learned sink counts as one key" in joma.gauges()["entropy"].help
