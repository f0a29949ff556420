"""Alarms on runs whose story is known: what is told, when, of which head; and what is done about it."""

from __future__ import annotations

import json
import math
import threading
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

import joma
from joma._measure.watch.alarms import Alarms
from joma._measure.watch.phases import PATIENCE
from joma._measure.watch.readings import LayerReading, Reading
from joma.cli import app
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT

POSSIBLE = 2.6  # nats


def layer(spread, sink=None, logsumexp=None, possible=POSSIBLE):
    spread = list(spread)
    return LayerReading(
        float(np.mean(spread)) * possible,
        possible,
        spread,
        sink or [0.1] * len(spread),
        logsumexp or [5.0] * len(spread),
    )


def told(readings):
    """All alerts of a run, which is interrupted half-way and goes on from its state."""
    alarms, alerts = Alarms(), []
    for n, reading in enumerate(readings):
        if n == len(readings) // 2:
            alarms = Alarms.restored(json.loads(json.dumps(alarms.state())))
        kept = Reading.from_json(json.loads(json.dumps(reading.to_json())))
        alerts += alarms.update(kept, ["a", "b", "c"])
    return alerts


def run(spreads, losses, **more):
    return [
        Reading(10 * n, loss, [layer(spread, **more)])
        for n, (spread, loss) in enumerate(zip(spreads, losses, strict=True), 1)
    ]


@pytest.mark.parametrize("at", [10, 100, 700])
def test_a_collapse_is_told_after_eight_measurements_however_late_it_comes(at):
    losses = [*np.linspace(6, 3, at), *[3.2] * 40]
    alerts = told(run([[0.6, 0.7]] * at + [[0.001, 0.002]] * 40, losses))
    assert [(a.kind, a.layer, a.heads) for a in alerts] == [("collapse", 0, (0, 1))]
    assert {a.step for a in alerts} == {10 * (at + PATIENCE)}
    assert all(a.value < a.threshold and a.level == "critical" and a.module == "a" for a in alerts)


@pytest.mark.parametrize("after", [[519.0, 60.0, *np.linspace(10, 3.8, 38)], [math.nan] * 40])
def test_a_loss_that_falls_from_its_own_spike_or_is_not_a_number_does_not_silence_it(after):
    alerts = told(run([[0.6, 0.7]] * 30 + [[0.0, 0.0]] * 40, [*np.linspace(4, 1.9, 30), *after]))
    assert [a.step for a in alerts if a.kind == "collapse"] == [10 * (30 + PATIENCE)]


def test_seven_of_eight_heads():
    alerts = told(
        run([[0.6] * 8] * 30 + [[0.001] * 7 + [0.6]] * 40, [*np.linspace(4, 2, 30), *[2.1] * 40])
    )
    assert [a.heads for a in alerts] == [tuple(range(7))]


def test_all_on_a_sink():
    healthy = Reading(1, 2.0, [layer([0.5] * 4, [0.5] * 4)])
    on_sinks = [Reading(n, 2.1, [layer([0.0] * 4, [0.999] * 4)]) for n in range(2, 30)]
    assert [a.heads for a in told([healthy, *on_sinks])] == [(0, 1, 2, 3)]
    elsewhere_too = [Reading(n, 2.1, [layer([0.02] * 4, [0.95] * 4)]) for n in range(2, 30)]
    assert told([healthy, *elsewhere_too]) == []  # heads that park their mass are healthy


def test_sharp_heads_of_a_healthy_run_are_not_told():
    """They become sharp while the loss falls; later it is flat for ever, and another head becomes sharp."""
    rng = np.random.default_rng(0)
    losses = [*np.linspace(6, 2, 50), *[2.0] * 400] + 0.05 * rng.standard_normal(450)
    spreads = [[0.6] * 4] * 30 + [[0.001, 0.6, 0.6, 0.6]] * 170 + [[0.001, 0.01, 0.6, 0.6]] * 250
    assert told(run(spreads, losses)) == []


def test_one_head_that_collapses_is_told_if_the_loss_is_worse():
    rng = np.random.default_rng(0)
    losses = [*[2.0] * 100, *[2.4] * 30] + 0.05 * rng.standard_normal(130)
    alerts = told(run([[0.6] * 4] * 100 + [[0.6, 0.001, 0.6, 0.6]] * 30, losses))
    collapses = [(a.heads, a.step) for a in alerts if a.kind == "collapse"]
    assert collapses == [((1,), 10 * (100 + PATIENCE))]


def test_without_a_loss_there_is_no_alarm_of_a_collapse():
    assert told(run([[0.6] * 2] * 10 + [[0.0] * 2] * 40, [None] * 50)) == []


def test_it_is_told_again_only_after_it_was_over():
    spreads = ([[0.6] * 2] * 10 + [[0.0] * 2] * 20) * 2
    assert [a.step for a in told(run(spreads, [2.0] * 60))] == [180, 480]


@pytest.mark.parametrize("seed", range(5))
def test_a_flat_noisy_curve_keeps_its_phase(seed):
    rng, alarms, names = np.random.default_rng(seed), Alarms(), []
    for n in range(1000):
        alarms.update(Reading(n, 2.0, [layer([0.6 + 0.1 * rng.standard_normal()])]))
        names.append(alarms.phases[0].name)
    assert sum(a != b for a, b in pairwise(names)) <= 5


def test_another_sequence_length_is_no_change_of_phase():
    alarms = Alarms()
    for n, tokens in enumerate([64] * 20 + [512] * 20 + [32] * 20 + [64, 512] * 10):
        alarms.update(Reading(n, 2.0, [layer([0.98], possible=math.lgamma(tokens + 1) / tokens)]))
        assert alarms.phases[0].name == "dense"


def gauges(values, loss=2.0):
    return [
        Reading(n, loss, [], {name: [[x]] for name, x in at.items()})
        for n, at in enumerate(values, 1)
    ]


def test_logit_growth():
    grown = [
        Reading(n, 2.0, [layer([0.6] * 2, logsumexp=[5.0, 4.0 * 1.2**n])]) for n in range(1, 40)
    ]
    (alert,) = told(grown)
    assert (alert.kind, alert.heads, alert.gauge) == ("logit growth", (1,), "max_logsumexp")
    assert 4.0 * 1.2 ** (alert.step - 2) < 100 < alert.value
    exact = [
        Reading(n, 2.0, [], {"max_logit": [[5.0, 60.0 if n < 10 else 130.0]]}) for n in range(1, 20)
    ]
    (alert,) = told(exact)
    assert (alert.heads, alert.step, alert.threshold) == ((1,), 11, 120.0)  # twice the first value


def of_logits(values):
    return told([Reading(n, 2.0, [], {"max_logit": [[x]]}) for n, x in enumerate(values, 1)])


def test_logits_that_surge_are_told_below_a_hundred():
    calm = [5.0, 6.0] * 6
    (alert,) = of_logits([*calm, 8.0, 11.0, 14.0, 18.0, 22.0, 26.0])
    assert (alert.step, alert.threshold) == (
        17,
        15.0,
    )  # the second above 2.5 · 6; past is what was six before or more
    assert of_logits([*calm, 20.0, *calm]) == []  # one odd batch
    assert (
        of_logits([*calm, *(6.0 * 1.05**n for n in range(30))]) == []
    )  # growth that takes its time
    assert of_logits([0.5] * 12 + [8.0, 12.0, 18.0, 20.0]) == []  # a head that begins


def test_a_leap_of_logits_is_told_at_once():
    (alert,) = of_logits([5.0, 6.0, 6.0, 300.0])
    assert (alert.step, alert.threshold) == (4, 100.0)
    assert of_logits([300.0]) == []  # nothing is known before it


def test_massive_activations():
    (alert,) = told(
        gauges([{"massive_activation": x} for x in [20.0] * 5 + [3000.0, 20.0] + [2000.0] * 5])
    )
    assert (alert.kind, alert.step, alert.level) == ("massive activation", 9, "notice")


def test_rank_loss():
    values = [{"stable_rank.q": 8.0, "hidden_rank": 1.0}] * 5 + [
        {"stable_rank.q": 1.01, "hidden_rank": 1.0}
    ] * 20
    (alert,) = told(gauges(values))
    assert (alert.kind, alert.gauge, alert.step) == ("rank loss", "stable_rank.q", 5 + PATIENCE)
    improving = [
        Reading(n, 3.0 - 0.01 * n, [], {k: [[x]] for k, x in at.items()})
        for n, at in enumerate(values)
    ]
    assert told(improving) == []


def test_update_spikes():
    rng = np.random.default_rng(0)
    usual = [{"update_ratio": 1e-3 * math.exp(0.3 * x)} for x in rng.standard_normal(100)]
    assert told(gauges(usual)) == []
    alerts = told(gauges([*usual, {"update_ratio": 0.05}, *usual]))
    assert [(a.kind, a.step) for a in alerts] == [("update spike", 101)]
    assert told(gauges([{"update_ratio": 1e-6}] * 20 + [{"update_ratio": 1e-4}])) == []


def test_layers_that_never_begin():
    def at(n, others):
        return Reading(
            n, max(5.0, 8.0 - 0.1 * n), [layer([0.0] * 2), layer([others] * 2), layer([1.0] * 2)]
        )

    kinds = {(a.kind, a.layer) for a in told([at(n, 0.99) for n in range(1, 200)])}
    assert ("never begins", 0) in kinds
    assert "never begins" not in {a.kind for a in told([at(n, 0.5) for n in range(1, 200)])}


# In a training


def collapsed_model():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.mul_(300)
    return model


def train(model, w, steps=3 * PATIENCE):
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        w.step(loss=4.0)


def test_alerts_reach_the_callback_the_folder_and_the_command_line(tmp_path):
    model, heard = collapsed_model(), []

    def on_alert(alert):
        heard.append(alert)
        raise RuntimeError("no network")

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with joma.watch(model, tmp_path / "run", 1, "entropy", on_alert=on_alert) as w:
            train(model, w)
    said = [str(warning.message) for warning in record]
    assert (
        sum("on_alert raised RuntimeError: no network; training goes on" in text for text in said)
        == 1
    )
    assert len(said) == 2
    assert heard == w.alerts
    assert [(a.kind, a.layer, a.heads) for a in heard] == [("collapse", 1, (0, 1))]
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "alerts.jsonl").read_text().splitlines()
    ]
    assert rows == json.loads(json.dumps([alert.to_json() for alert in heard]))
    assert {*rows[0]} >= {"step", "layer", "heads", "kind", "value", "threshold", "what_to_do"}
    result = CliRunner().invoke(app, ["status", str(tmp_path / "run"), "--json"])
    facts = json.loads(result.stdout)
    assert result.exit_code == 5
    assert facts["worst"] == "critical"
    assert facts["alerts"] == rows
    assert facts["phases"] == ["dense", "collapsed"]
    assert (facts["step"], facts["loss"], facts["status"]) == (3 * PATIENCE, 4.0, "done")
    told = CliRunner().invoke(app, ["status", str(tmp_path / "run")])
    assert "critical: step 8: collapse in layer 1 (blocks.1.attn), heads 0 and 1: " in told.stdout


def test_a_healthy_run_has_exit_status_0(tmp_path):
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, tmp_path / "run", 1, "entropy") as w:
        train(model, w, 2)
    result = CliRunner().invoke(app, ["status", str(tmp_path / "run")])
    assert (result.exit_code, "no alerts" in result.stdout) == (0, True)


@pytest.mark.filterwarnings("ignore:joma.watch")
def test_a_resumed_run_has_the_alerts_of_an_unbroken_one(tmp_path):
    rows = []
    for name, parts in (("unbroken", [(1, 24)]), ("resumed", [(1, 12), (5, 24)])):
        model = collapsed_model()
        for first, last in parts:
            with joma.watch(model, tmp_path / name, 1, "entropy", resume=True) as w:
                for step in range(first, last + 1):
                    model(torch.arange(LENGTH)[None] % VOCABULARY)
                    w.step(loss=4.0, step=step)
        rows.append((tmp_path / name / "alerts.jsonl").read_text())
    assert rows[0] == rows[1] != ""


def test_what_is_no_function_is_refused():
    with pytest.raises(
        TypeError, match="on_alert must be 'stop' or a function of an alert; got 'halt'"
    ):
        joma.watch(HandWrittenGPT("sdpa"), on_alert="halt")


def test_an_unreduced_loss_is_refused():
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, gauges="entropy") as w:
        model(torch.randint(VOCABULARY, (2, LENGTH)))
        with pytest.raises(
            ValueError,
            match=r"the loss has shape \(2, 14\): give one number, for example loss.mean",
        ):
            w.step(loss=torch.zeros(2, LENGTH))


def test_one_model_watched_from_two_threads_is_refused():
    model, refused = HandWrittenGPT("sdpa"), []

    def second():
        try:
            joma.watch(model)
        except ValueError as error:
            refused.append(str(error))

    with joma.watch(model):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "is watched already" in refused[0]
