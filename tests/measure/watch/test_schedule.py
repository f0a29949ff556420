"""When a watch measures: multiples reached or passed, whatever the increments of the step are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import joma
from joma._measure.gauges.registry import remove
from joma._measure.watch.schedule import Schedule
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT


def train_step(model, optimizer=None):
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    model.zero_grad()
    functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    if optimizer is not None:
        optimizer.step()


def measured(every, steps):
    schedule, due = Schedule({"entropy": every}), []
    for step in steps:
        schedule.arm()
        if schedule.advance(step):
            due.append(schedule.step)
    return due


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (10, range(1, 31), [1, 10, 20, 30]),
        (10, [None] * 21, [1, 10, 20]),
        (10, range(5, 41, 5), [5, 10, 20, 30, 40]),
        (10, range(4, 41, 4), [4, 12, 20, 32, 40]),
        (10, range(50, 201, 50), [50, 100, 150, 200]),
        (
            10,
            [1, 2, 3, 13, 14, 15, 16],
            [1, 14],
        ),  # 10 was passed unexpectedly: made up for in the next step
        (10, [501, 502, 510, 511], [501, 511]),
        (10, [501, *range(502, 511)], [501, 510]),
        (3, [0, 1, 2, 3], [0, 1, 3]),
        ("log", range(1, 11), [1, 2, 3, 4, 5, 6, 7, 8, 10]),
        ("log", range(8, 41, 8), [8, 16, 24, 32, 40]),
        (lambda step: step % 10 == 0, range(5, 31, 5), [10, 20, 30]),
    ],
)
def test_multiples_that_are_reached_or_passed_are_due(every, steps, expected):
    assert measured(every, steps) == expected


def test_steps_made_again_are_measured_again():
    assert measured(2, [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]) == [1, 2, 4, 6, 4, 6]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_restored_schedule_goes_on_as_an_unbroken_one(cut):
    steps = [5 * n for n in range(1, 13)]
    expected = [step for step in measured(15, steps) if step > 5 * cut]
    schedule = Schedule({"entropy": 15})
    for step in steps[:cut]:
        schedule.arm()
        schedule.advance(step)
    other, due = Schedule({"entropy": 15}), []
    other.restore(schedule.state())
    for step in steps[cut:]:
        other.arm()
        if other.advance(step):
            due.append(step)
    assert due == expected


def test_each_gauge_has_its_own_schedule(tmp_path):
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gauges = {
        "entropy": 4,
        "sink_mass": 2,
        "stable_rank": 3,
        "update_ratio": None,
        "coherence": 5,
        "charge.qk": 7,
    }
    with joma.watch(model, tmp_path / "run", 6, gauges, optimizer=optimizer) as w:
        for step in range(1, 13):
            train_step(model, optimizer)
            metrics = w.step()
            told = {name.split("/")[1] for name in metrics} - {"tau"}
            periods = {name: period or 6 for name, period in gauges.items()}
            assert told == {
                name for name, period in periods.items() if step == 1 or step % period == 0
            }
            assert set(w.latest.values) == told or not told
    steps = {gauge: sorted(set(rows.step)) for gauge, rows in w.frame().groupby("gauge")}
    assert {name: steps[name] for name in gauges} == {
        name: [1, *range(period, 13, period)] for name, period in periods.items()
    }
    in_passes = sorted({1, *steps["entropy"], *steps["sink_mass"], *steps["coherence"]})
    assert steps["phase"] == in_passes
    assert joma.Run(tmp_path / "run").info["config"]["every"] == periods


def test_gauges_that_are_not_due_are_neither_measured_nor_listened_for():
    model = HandWrittenGPT("sdpa")
    asked = []
    pristine = nn.Module.__call__

    def counted(stats):
        asked.append(1)
        return stats.entropy

    joma.gauge("counted", on="attention")(counted)
    try:
        with joma.watch(model, gauges={"counted": 10, "stable_rank": 2, "entropy": 5}) as w:
            for step in range(1, 11):
                heard = nn.Module.__call__ is not pristine
                assert heard == (step in (1, 5, 10))
                train_step(model)
                w.step()
                assert len(asked) == {1: 2, 10: 4}.get(step, 2)  # two layers
    finally:
        remove("counted")


def test_the_same_numbers_whatever_the_others_schedules_are():
    frames = []
    for gauges in (
        ("entropy", "stable_rank"),
        {"entropy": 1, "stable_rank": 2},
        {"entropy": 3, "stable_rank": 1},
    ):
        torch.manual_seed(0)
        model = HandWrittenGPT("sdpa")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with joma.watch(model, every=None if isinstance(gauges, dict) else 1, gauges=gauges) as w:
            for _ in range(6):
                train_step(model, optimizer)
                w.step()
        frames.append(w.frame())
    whole = frames[0].set_index(["gauge", "step", "layer", "head"]).value
    for frame in frames[1:]:
        frame = (
            frame[frame.gauge.isin(["entropy", "stable_rank"])]
            .set_index(["gauge", "step", "layer", "head"])
            .value
        )
        both = frame.to_frame("some").join(whole.rename("all"))
        assert (both.some == both["all"]).all()


@pytest.mark.parametrize(
    ("every", "gauges", "message"),
    [
        (None, {"entropi": 10}, "unknown gauge 'entropi'. Did you mean 'entropy'"),
        (
            None,
            {"entropy": 0},
            r"gauges\['entropy'\]: every must be a positive number of steps.* got 0",
        ),
        (None, {"entropy": 2.5}, "got 2.5"),
        (None, {"entropy": True}, "got True"),
        (None, {"entropy": "lg"}, "got 'lg'"),
        (100, {"entropy": 10}, "leave out every=100"),
        (None, {}, "no gauges to measure"),
        (None, {"attention_drift": 5, "eqn17_residual": 10}, "give them the same schedule"),
        (0, "entropy", "got 0"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(every, gauges, message):
    with pytest.raises(ValueError, match=message):
        joma.watch(HandWrittenGPT("sdpa"), every=every, gauges=gauges)


def test_a_logger_is_told_the_largest_head_of_a_maximum():
    """One exploding head does not hide in a mean."""
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[:4].mul_(50)
    with joma.watch(model, gauges=("max_logsumexp", "entropy", "spectral_norm.qk")) as w:
        train_step(model)
        metrics = w.step()
    for gauge, one in (
        ("max_logsumexp", torch.max),
        ("spectral_norm.qk", torch.max),
        ("entropy", torch.mean),
    ):
        for layer in range(2):
            heads = w.latest.values[gauge][layer]
            assert len(heads) > 1
            assert metrics[f"joma/{gauge}/layer_0{layer}"] == pytest.approx(
                float(one(heads)), rel=1e-12
            )
    assert joma.Run(w._loop.record.writer.path).info["largest"] == [
        "max_logsumexp",
        "spectral_norm.qk",
    ]


def test_a_schedule_that_raises_leaves_the_model_alone():
    model = HandWrittenGPT("sdpa")
    pristine = nn.Module.__call__

    def fails_after_the_first_step(step):
        if step > 1:
            raise RuntimeError("planted")
        return True

    with joma.watch(model, every=fails_after_the_first_step) as w:
        train_step(model)
        with pytest.warns(joma.JomaWarning, match="planted"):
            w.step()
        assert nn.Module.__call__ is pristine
