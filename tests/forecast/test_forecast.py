"""Forecasts on the clock: exact where the clock is, told where it is not, refused where nothing is known."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import joma
from joma._forecast import clock
from joma._forecast.clock import Key, OnClock
from joma._runs import Run, RunError, RunWriter
from joma.cli import app


def entropy(tau):
    """Falls from 2.5 to 1.5 at τ = 0.2 and rises to 2 at 0.6."""
    return np.where(tau < 0.2, 2.5 - 5 * tau, 1.5 + 1.25 * (tau - 0.2))


def made(path, *, lr=1e-3, steps=600, every=10, shift=0.0, layers=2, seed=0, tau=True, status="done",
         collapsed=None, spoilt=(0, 0, 0.0), **config):  # fmt: skip
    """A run whose curves are functions of τ alone; layer n has n more nats. Spoilt: from, to, what there is instead."""
    axes = {"entropy": ["layer", "head"], "phase": ["layer"]}
    config = {"lr": lr, "seed": seed, "layers": layers, **config}
    writer = RunWriter.create(path, kind="train", config=config, axes=axes)
    writer.note(phases=["dense", "sparsifying", "bouncing", "collapsed"])
    for step in range(every, steps + 1, every):
        t = lr * step
        heads = entropy(t) + shift + np.arange(layers)[:, None] + [[-0.1, 0.1]]
        phase = np.where(np.arange(layers) == collapsed, 3.0, 0.0)
        values = {
            "entropy": heads,
            "valid_loss": 5 - t + shift,
            "loss": 5 - t,
            "phase": phase,
            "lr": lr,
        }
        if spoilt[0] <= step < spoilt[1] + 1:
            values |= {
                name: np.full(np.shape(values[name]), spoilt[2])
                for name in ("entropy", "valid_loss", "loss")
            }
        writer.write(step, values, **({"tau": t} if tau else {}))
    writer.finish(status)
    return path


@pytest.fixture
def two(tmp_path):
    return [made(tmp_path / "a", shift=0.05, seed=1), made(tmp_path / "b", shift=-0.05, seed=2)]


def test_where_curves_are_functions_of_the_clock_the_forecast_is_exact(two):
    told = joma.forecast(two, lr=1e-5, steps=60_000)
    frame = told.frame(every=1000)
    assert set(frame.gauge) == {"entropy", "valid_loss", "loss"}
    for layer in (0, 1):
        rows = frame[(frame.gauge == "entropy") & (frame.layer == layer)]
        # linear between measurements, so exact but beside the kink
        np.testing.assert_allclose(rows.value, entropy(1e-5 * rows.step) + layer, atol=1e-9)
    loss = frame[frame.gauge == "valid_loss"]
    np.testing.assert_allclose(loss.value, 5 - loss.tau, atol=1e-9)
    # ± 2 sd √(1 + 1/2) of one more run; the sd of two runs ± 0.05 apart is 0.05 √2
    np.testing.assert_allclose(
        loss.high - loss.value, 2 * 0.05 * math.sqrt(2) * math.sqrt(1.5), rtol=1e-6
    )


def test_trough_and_bounce_are_told_in_steps_of_the_new_run(two):
    row = (
        joma.forecast(two, lr=1e-5, steps=60_000)
        .table()
        .set_index(["gauge", "layer"])
        .loc[("entropy", 0)]
    )
    assert row.pattern == "dip and bounce"
    assert row.trough_step == pytest.approx(20_000, abs=1000)
    assert row.earliest <= row.trough_step <= row.latest
    # a bounce counts from max(0.05 nats, a tenth of the dip of 1) on: 0.08 of τ after the trough
    assert row.bounce_step == pytest.approx(28_000, abs=2000)
    assert row.end == pytest.approx(2.0, abs=1e-9)
    falling = (
        joma.forecast(two, lr=1e-5, steps=15_000)
        .table()
        .set_index(["gauge", "layer"])
        .loc[("entropy", 0)]
    )
    assert falling.pattern == "still falling"
    assert math.isnan(falling.trough_step)


def test_scores_are_those_of_brute_force(two):
    told = joma.forecast(two, lr=1e-4, steps=6000)
    rng = np.random.default_rng(0)
    steps = np.arange(1000, 6001, 1000)
    noise = rng.normal(0, 0.3, len(steps))
    truth = pd.DataFrame(
        {"step": steps, "gauge": "entropy", "layer": 0, "value": entropy(1e-4 * steps) + noise}
    )
    row = told.score(truth).iloc[0]
    assert row.points == 6
    assert row.rms == pytest.approx(np.sqrt(np.mean(noise**2)))
    held = entropy(0.6)
    assert row["last"] == pytest.approx(np.sqrt(np.mean((held - truth.value) ** 2)))
    same = entropy(np.minimum(steps, 600) * 1e-3)  # the known runs had ended by then
    assert row.same_step == pytest.approx(np.sqrt(np.mean((same - truth.value) ** 2)))
    width = 2 * 0.05 * math.sqrt(2) * math.sqrt(1.5)
    assert row.inside == pytest.approx(np.mean(np.abs(noise) <= width))
    # cut short, it is still the known runs' own values that are guessed by
    early = joma.forecast(two, lr=1e-4, steps=1000).score(truth).iloc[0]
    assert early["last"] == pytest.approx(abs(held - truth.value[0]))
    assert early.same_step == pytest.approx(abs(entropy(0.6) - truth.value[0]))
    with pytest.raises(ValueError, match="nothing to score"):
        told.score(truth.assign(gauge="sink_mass"))


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"tau": False}, {}, "does not know its learning rates"),
        ({}, {"layers": 5}, "the runs have 2 layers; a model of 5 is asked for"),
        ({}, {"steps": 70_000}, "ask for 60,000 steps at most"),
        ({}, {"steps": 1}, "fewer than two measurements"),
        ({}, {"lr": 0.0}, "must be a positive number, got 0.0"),
        ({}, {"steps": 0}, "at least 1, got 0"),
        (
            {},
            {"gauges": ("sink_mass",)},
            "no measurements to go by of sink_mass: it has entropy, valid_loss",
        ),
        ({"lr": 0.0}, {}, "does not go forward, from 0 to 0"),
        ({"lr": -1e-3}, {}, "does not go forward, from -0.01 to -0.6"),
        ({"optimiser": "sgd", "momentum": 1.0}, {}, "momentum is from 0 to below 1"),
        (
            {"spoilt": (10, 600, math.nan)},
            {},
            "no value of entropy, valid_loss, loss is a finite number",
        ),
        (
            {"spoilt": (200, 600, math.nan)},
            {"steps": 50_000},
            r"end at 0.19 \(entropy, layer 0, of .*19,000",
        ),
        ({"spoilt": (200, 600, math.inf)}, {"steps": 50_000}, r"end at 0.19 .*: ask for 19,000"),
        ({"spoilt": (200, 210, math.nan)}, {"steps": 50_000}, r"end at 0.19 .*: ask for 19,000"),
    ],
)
def test_what_cannot_be_foretold_is_refused_with_the_reason(tmp_path, changes, options, words):
    path = made(tmp_path / "a", **changes)
    with pytest.raises((RunError, ValueError), match=words):
        joma.forecast(path, **{"lr": 1e-5, "steps": 1000, **options})


def test_runs_of_different_models_are_refused(tmp_path):
    one, other = made(tmp_path / "a", width=8), made(tmp_path / "b", width=16)
    with pytest.raises(RunError, match=r"differ in width \(8 and 16\)"):
        joma.forecast([one, other], lr=1e-5, steps=1000)
    deeper = made(tmp_path / "c", layers=3)
    with pytest.raises(RunError, match="differ in layers"):
        joma.forecast([one, deeper], lr=1e-5, steps=1000)


def test_the_known_limits_of_the_clock_are_told(tmp_path, two):
    slow = [
        made(tmp_path / f"slow-{seed}", lr=1e-4, steps=6000, every=100, seed=seed)
        for seed in (1, 2)
    ]
    assert joma.forecast(slow, lr=1e-5, steps=60_000).warnings == ()

    def told(runs, words, **options):
        return any(words in warning for warning in joma.forecast(runs, **options).warnings)

    assert told(slow, "fewer than 1,000 steps", lr=1e-5, steps=5000)
    assert told(two, "rates up to 0.001", lr=1e-4, steps=6000)
    assert told(two, "0.01 is outside", lr=1e-2, steps=60)
    assert told(two, "more than 30 times away", lr=1e-5, steps=60_000)
    assert told(made(tmp_path / "y", collapsed=1), "attention of layer 1 of", lr=1e-4, steps=1000)
    alone = made(tmp_path / "x", status="diverged")
    assert told(alone, "no spread", lr=1e-4, steps=1000)
    assert told(alone, "diverged", lr=1e-4, steps=1000)
    assert joma.forecast(alone, lr=1e-4, steps=1000).frame().low.isna().all()


def test_one_run_given_twice_is_refused_since_its_band_would_be_nothing(two):
    with pytest.raises(ValueError, match="is given twice"):
        joma.forecast([two[0], two[0].parent / "b" / ".." / "a"], lr=1e-5, steps=1000)


def test_runs_of_one_seed_and_rate_are_told_to_make_the_band_too_narrow(tmp_path, two):
    again = made(tmp_path / "again", seed=1)
    assert any(
        "seed 1 at 0.001" in line
        for line in joma.forecast([*two, again], lr=1e-5, steps=10_000).warnings
    )
    assert not any(
        "too narrow" in line for line in joma.forecast(two, lr=1e-5, steps=10_000).warnings
    )


def scheduled(path, rates, **config):
    """A run with a schedule; of several groups, ``rates`` has a row for each step."""
    axes = {"entropy": ["layer"]} | ({"lr": ["group"]} if np.ndim(rates) > 1 else {})
    writer = RunWriter.create(path, kind="watch", config=config, axes=axes)
    for step, tau in enumerate(np.cumsum(rates, axis=0), 1):
        tau = np.atleast_1d(tau)[0]
        writer.write(step, {"entropy": [entropy(tau)], "lr": rates[step - 1]}, tau=tau)
    writer.finish()
    return path


def test_a_schedule_is_integrated_and_its_peak_is_its_rate(tmp_path):
    """Linear warm-up from 0, then half a cosine to 0: τ is their sum, not lr · step."""
    step = np.arange(1200)
    rates = 1e-3 * np.minimum(1, step / 100) * (1 + np.cos(np.pi * step / 1200)) / 2
    told = joma.forecast(scheduled(tmp_path / "cosine", rates), lr=1e-4, steps=5000)
    frame = told.frame(every=500)
    np.testing.assert_allclose(frame.value, entropy(1e-4 * frame.step), atol=2e-3)
    assert not any("times away" in line for line in told.warnings)


def test_rates_of_several_groups_or_of_none_are_no_obstacle(tmp_path):
    rates = np.full((600, 2), [1e-3, 5e-3])
    told = joma.forecast(scheduled(tmp_path / "groups", rates), lr=1e-5, steps=60_000)
    assert any("rates from 0.001 to 0.001" in line for line in told.warnings)
    writer = RunWriter.create(tmp_path / "no-lr", kind="watch", config={}, axes={})
    for step in range(1, 100):
        writer.write(step, {"loss": 5.0 - step}, tau=step * 1e-4)
    writer.finish()
    assert joma.forecast(
        tmp_path / "no-lr", lr=1e-5, steps=500, gauges="loss"
    ).tau == pytest.approx(5e-3)


def test_momentum_in_the_known_run_counts_for_both(tmp_path):
    run = made(
        tmp_path / "a", optimiser="sgd", momentum=0.9
    )  # its curves are those of Σ lr, a tenth of its clock
    told = joma.forecast(run, lr=1e-4, steps=6000)
    assert told.tau == pytest.approx(6.0)
    rows = told.frame(every=1000).query("gauge == 'entropy' and layer == 0")
    np.testing.assert_allclose(rows.value, entropy(1e-4 * rows.step), atol=1e-9)
    assert not any("Adam" in line for line in told.warnings)


def test_momentum_counts_on_the_clock():
    assert clock.pace({"optimiser": "sgd", "momentum": 0.9}) == pytest.approx(10)


def curve(tau, value):
    return OnClock(tau, np.round(tau / 1e-4), value)


def test_rates_that_agree_on_the_clock_have_the_power_one():
    rng = np.random.default_rng(1)

    def family(lr, power):
        steps = np.arange(1, 2001)
        return [curve(lr * steps, entropy(lr**power * steps * 1e-4 ** (1 - power)) + rng.normal(0, 0.05))
                for _ in range(3)]  # fmt: skip

    for power in (1.0, 0.5):
        groups = [(lr, family(lr, power)) for lr in (1e-4, 2e-4, 4e-4)]
        assert clock.best_power(groups) == pytest.approx(power, abs=0.06)
    steady = clock.apart([(lr, family(lr, 1.0)) for lr in (1e-4, 2e-4, 4e-4)])
    assert steady.ratio < 2
    assert clock.apart([(lr, family(lr, 0.0)) for lr in (1e-4, 4e-4)]).between > 4 * steady.between


def test_one_rate_is_nothing_to_compare():
    with pytest.raises(ValueError, match="two at least"):
        clock.apart([(1e-4, [curve(np.linspace(0.1, 1, 9), np.ones(9))])])


def test_a_curve_leaves_another_where_it_says(tmp_path):
    tau = np.linspace(0.01, 1, 100)
    common, leaving = curve(tau, np.ones(100)), curve(tau, np.where(tau > 0.5, 2.0, 1.0))
    assert clock.leaves(leaving, common, spread=0.1) == pytest.approx(0.5, abs=0.03)
    assert clock.leaves(common, common, spread=0.1) is None


def test_heads_are_averaged_and_gauges_of_the_model_have_no_layer(two):
    curves = clock.curves(Run(two[0]))
    assert set(curves) == {
        Key("entropy", 0),
        Key("entropy", 1),
        Key("valid_loss", None),
        Key("loss", None),
    }
    assert str(Key("entropy", 1)) == "entropy, layer 1"
    one = curves[Key("entropy", 0)]
    assert one.at(0.3) == pytest.approx(entropy(0.3) + 0.05)
    assert np.isnan(one.at(0.7))


def test_the_command_prints_draws_and_gives_json(two, tmp_path):
    base = ["forecast", *map(str, two), "--lr", "1e-4", "--steps", "6000"]
    shown = CliRunner().invoke(app, [*base, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert "dip and bounce" in shown.output
    assert (tmp_path / "out/figure.svg").exists()
    assert len(pd.read_csv(tmp_path / "out/forecast.csv")) == len(
        joma.forecast(two, lr=1e-4, steps=6000).frame()
    )
    facts = json.loads(CliRunner().invoke(app, [*base, "--json"]).output)
    assert facts["tau"] == pytest.approx(0.6)
    assert {row["gauge"] for row in facts["curves"]} == {"entropy", "valid_loss", "loss"}
