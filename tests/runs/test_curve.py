"""What a curve did: planted dips are found, and nothing but the thresholds decides what counts as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma._measure.watch.phases import Phase
from joma._runs.curve import CHECKPOINTS, ENTROPY, EXACT, ONLINE, RANK, Rule, describe, describe_all

RULES = [ENTROPY, RANK, ONLINE, *CHECKPOINTS.values(), EXACT]
levels = st.floats(0.5, 50.0)
lines = st.lists(levels, min_size=1, max_size=40)


def planted(start: float, trough: float, end: float, length: int = 20) -> np.ndarray:
    """Down, up, and a plateau at each corner as wide as the widest window."""
    corners = [np.full(5, x) for x in (start, trough, end)]
    falling, rising = np.linspace(start, trough, length), np.linspace(trough, end, length)
    return np.concatenate([corners[0], falling, corners[1], rising, corners[2]])


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None)
@given(start=levels, fall=st.floats(0, 0.99), rise=st.floats(0, 1.0), noise=st.integers(0, 1000))
def test_a_planted_dip_is_found_with_its_size(rule, start, fall, rise, noise):
    trough = start * (1 - fall)
    end = trough + rise * (start - trough)
    sigma = 1e-4 * start
    values = planted(start, trough, end)
    values = values + sigma * np.random.default_rng(noise).uniform(-1, 1, len(values))
    curve = describe(np.arange(len(values)), values, rule)
    assert curve.start == pytest.approx(start, abs=1.01 * sigma)
    assert curve.trough == pytest.approx(trough, abs=1.01 * sigma)
    assert curve.end == pytest.approx(end, abs=1.01 * sigma)
    depth, bounce = start - trough, end - trough
    dip, back = max(rule.least_dip, rule.dip * start), max(rule.least_bounce, rule.bounce * depth)
    if abs(depth - dip) > 4 * sigma and abs(bounce - back) > 4 * sigma:  # not at a threshold
        assert curve.dipped == (depth > dip)
        assert curve.bounced == (depth > dip and bounce > back)
        assert curve.pattern == (
            "flat" if depth < dip else "dip" if bounce < back else "dip and bounce"
        )


@settings(deadline=None)
@given(values=lines, scale=st.sampled_from([2.0**n for n in range(-8, 9)]))
def test_the_unit_does_not_matter_if_the_thresholds_have_the_same(values, scale):
    for rule in RULES:
        scaled = replace(
            rule, least_dip=scale * rule.least_dip, least_bounce=scale * rule.least_bounce
        )
        steps = np.arange(len(values))
        here, there = (
            describe(steps, values, rule),
            describe(steps, scale * np.array(values), scaled),
        )
        assert (scale * here.start, scale * here.trough, scale * here.end) == (
            there.start,
            there.trough,
            there.end,
        )
        assert (here.pattern, here.trough_step) == (there.pattern, there.trough_step)


@settings(deadline=None)
@given(values=lines, between=st.integers(1, 4))
def test_points_between_the_points_change_nothing(values, between):
    steps = np.arange(len(values)) * (between + 1)
    finer = np.arange(steps[-1] + 1)
    here, there = (
        describe(steps, values, EXACT),
        describe(finer, np.interp(finer, steps, values), EXACT),
    )
    assert (here.start, here.trough, here.end) == pytest.approx(
        (there.start, there.trough, there.end)
    )


@settings(deadline=None)
@given(values=lines)
def test_only_when_it_was_depends_on_the_steps(values):
    n = len(values)
    here, there = (
        describe(np.arange(n), values, ENTROPY),
        describe(2.0 ** np.arange(n), values, ENTROPY),
    )
    assert there.trough_step == 2.0**here.trough_step
    assert (there.rise_step is None) == (here.rise_step is None)
    if here.rise_step is not None:
        assert there.rise_step == 2.0**here.rise_step
    assert replace(there, trough_step=here.trough_step, rise_step=here.rise_step) == here


@settings(deadline=None)
@given(level=levels, at=st.integers(2, 17), size=st.floats(-0.99, 10))
def test_one_odd_measurement_is_neither_a_dip_nor_a_bounce(level, at, size):
    """But for the two at each end, where the window has fewer values."""
    values = np.full(20, level)
    values[at] += size * level
    for rule in RULES:
        if rule.window > 1:
            assert describe(np.arange(20), values, rule).pattern == "flat"


@settings(deadline=None)
@given(values=lines, gaps=st.lists(st.integers(0, 40), max_size=10))
def test_nan_are_left_out(values, gaps):
    steps = np.arange(len(values))
    at = [min(gap, len(values)) for gap in gaps]
    with_gaps = describe(np.insert(steps, at, -1), np.insert(values, at, np.nan), ENTROPY)
    assert with_gaps == describe(steps, values, ENTROPY)
    with pytest.raises(ValueError, match="3 values, none of them a number"):
        describe([0, 1, 2], [np.nan] * 3, ENTROPY)


def test_a_constant_curve_is_flat_even_at_zero():
    for rule in RULES:
        assert describe([0, 1, 2], [0.0, 0.0, 0.0], rule).pattern == "flat"


@settings(deadline=None)
@given(start=levels, fall=st.floats(0, 0.99), rise=st.floats(0, 1.0))
def test_the_phases_tell_the_same_story_as_the_finished_curve(start, fall, rise):
    trough = start * (1 - fall)
    values = planted(start, trough, trough + rise * (start - trough))
    curve = describe(np.arange(len(values)), values, ONLINE)
    phase = Phase()
    for step, value in enumerate(values):
        phase.update(step + 1, float(value))
    dipped = np.isfinite(phase.trough)
    online = "flat" if not dipped else "dip" if phase.name == "sparsifying" else "dip and bounce"
    margins = curve.depth - ONLINE.least_fall(start), curve.bounce - ONLINE.least_rise(curve.depth)
    if all(abs(margin) > 1e-9 for margin in margins):
        assert online == curve.pattern


@settings(deadline=None)
@given(
    window=st.integers(1, 9), dip=st.integers(0, 100), bounce=st.integers(0, 100),
    least_dip=st.integers(0, 50), least_bounce=st.integers(0, 50),
)  # fmt: skip
def test_the_sentence_is_made_of_the_arguments(window, dip, bounce, least_dip, least_bounce):
    rule = Rule(window, dip / 100, bounce / 100, least_dip / 10, least_bounce / 10, "nats")
    said = rule.smoothed() + str(rule)
    assert (f"median of {window} measurements" in said) == (window > 1)
    assert f"{dip} %" in rule.fall
    assert f"{bounce} % of the dip" in rule.rise
    assert (f"{least_dip / 10:g} nats" in rule.fall) == (least_dip > 0)
    assert (f"{least_bounce / 10:g} nats" in rule.rise) == (least_bounce > 0)


@pytest.mark.parametrize(
    ("name", "value"), [("window", 0), ("dip", -0.1), ("bounce", float("nan")), ("least_dip", -1.0)]
)
def test_thresholds_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match="or more"):
        replace(ENTROPY, **{name: value})


def test_rules_that_are_said_to_be_the_same_are():
    assert replace(ONLINE, window=ENTROPY.window) == ENTROPY
    assert replace(CHECKPOINTS["entropy"], window=ENTROPY.window) == ENTROPY
    assert replace(CHECKPOINTS["stable_rank"], window=RANK.window) == RANK


def test_the_guide_tells_the_rule_of_the_phases():
    guide = (Path(__file__).parents[2] / "docs/watch-reference.md").read_text(encoding="utf-8")
    assert f"entropy fell by {ONLINE.fall} below its peak" in guide
    assert (
        f"entropy rose by {ONLINE.rise.replace('the dip', 'the deepest dip so far')} above its trough"
        in guide
    )


def test_all_curves_of_a_table_are_those_of_its_means_over_heads():
    down, up = planted(2.5, 1.5, 2.0), planted(2.5, 1.5, 1.5)
    rows = [
        {"step": n, "layer": layer, "head": head, "value": line[n] + shift}
        for n in range(len(down))
        for layer, line in enumerate((down, up))
        for head, shift in enumerate((-0.25, 0.25))
    ]
    table = pd.DataFrame([*rows, {"step": 0, "layer": 2, "head": 0, "value": np.nan}])
    steps = np.arange(len(down))
    expected = {
        (0,): describe(steps, down, ENTROPY),
        (1,): describe(steps, up, ENTROPY, collapsed=True),
    }
    assert describe_all(table, ENTROPY, collapsed=[(1,)]) == expected
    assert [curve.pattern for curve in expected.values()] == ["dip and bounce", "collapse"]
