"""A number that is not finite is never healthy, and one that was not measured is not a number."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

import joma
from joma._measure.watch.alarms import Alarms
from joma._measure.watch.readings import LayerReading, Reading
from joma._runs import Run
from joma.cli import app
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT

STEPS = 20
PLANTED = 8
BAD = pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])


def train(plant=None, *, steps=STEPS, every=1, spoil_loss=None, **options):
    """Train a small GPT under a watch; return the watch and the alerts that its callback got.

    `plant(model, step)` runs before a step's forward pass; `spoil_loss(loss, step)` returns the loss to report.
    """
    torch.manual_seed(0)
    model = HandWrittenGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    heard = []
    options.setdefault("on_alert", heard.append)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with joma.watch(model, every=every, live=False, **options) as watch:
            for step in range(1, steps + 1):
                if plant is not None:
                    plant(model, step)
                tokens = torch.randint(VOCABULARY, (4, LENGTH))
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                optimizer.zero_grad()
                loss.backward()
                for hook in getattr(model, "spoil_gradients", []):
                    hook(step)
                optimizer.step()
                watch.step(loss=loss if spoil_loss is None else spoil_loss(loss, step))
                if watch.should_stop:
                    break
    return watch, heard


def only_critical(alerts):
    (alert,) = [alert for alert in alerts if alert.kind == "not finite"]
    assert alert.level == "critical"
    return alert


@BAD
@pytest.mark.parametrize("every", [1, 5], ids=["measured", "between measurements"])
def test_a_loss_is_one_critical_alert_at_its_first_step(bad, every, tmp_path):
    def spoil(loss, step):
        return loss.detach() * 0 + bad if step >= PLANTED else loss

    watch, heard = train(spoil_loss=spoil, every=every, run=tmp_path / "run")
    alert = only_critical(heard)
    assert (alert.step, alert.gauge) == (PLANTED, "loss")
    assert math.isnan(alert.value) == math.isnan(bad)
    assert {phase.name for phase in watch.phases} == {"ended"}
    assert "ended since step" in str(watch.phases)
    assert only_critical(watch.alerts) == alert


@BAD
def test_activations_name_the_module_and_the_blocks_after_it(bad):
    def plant(model, step):
        if step == PLANTED:
            model.blocks[0].mlp[1].register_forward_hook(lambda module, args, output: output * bad)

    alert = only_critical(train(plant)[1])
    assert (alert.step, alert.gauge, alert.layer) == (PLANTED, "activations", 0)
    assert alert.module == "blocks.0.mlp.1"
    assert "blocks.1" in alert.later
    assert "the loss" in alert.later


@BAD
def test_a_weight_is_named(bad):
    def plant(model, step):
        if step == PLANTED:
            with torch.no_grad():
                model.blocks[1].mlp[0].weight[0, 0] = bad

    watch, heard = train(plant)
    alert = only_critical(heard)
    assert (alert.step, alert.gauge, alert.layer) == (PLANTED, "weights", 1)
    assert alert.module == "blocks.1.mlp.0.weight"
    assert {phase.name for phase in watch.phases} == {"ended"}


@BAD
def test_a_gradient_is_named_by_its_parameter_in_the_step_that_uses_it(bad):
    def plant(model, step):
        if step == 1:
            parameter = model.blocks[1].mlp[0].weight

            def spoil(at):
                if at == PLANTED:
                    parameter.grad[0, 0] = bad

            model.spoil_gradients = [spoil]

    alert = only_critical(train(plant)[1])
    assert (alert.step, alert.gauge) == (PLANTED, "gradients")
    assert alert.module == "blocks.1.mlp.0.weight"


def test_weights_alone_are_enough():
    def plant(model, step):
        if step == PLANTED:
            with torch.no_grad():
                model.blocks[0].mlp[0].weight[0, 0] = math.nan

    alert = only_critical(train(plant, gauges="stable_rank", spoil_loss=lambda loss, step: None)[1])
    assert alert.step == PLANTED
    assert "blocks.0.mlp.0.weight" in (alert.module, *alert.later)


def test_a_watch_can_ask_the_loop_to_stop():
    def spoil(loss, step):
        return math.nan if step >= PLANTED else loss

    watch, _ = train(spoil_loss=spoil, on_alert="stop", every=3)
    assert watch.should_stop
    assert watch.last_step == PLANTED
    healthy, _ = train(on_alert="stop")
    assert not healthy.should_stop


def test_status_and_page_are_red(tmp_path):
    folder = tmp_path / "run"
    train(spoil_loss=lambda loss, step: math.nan if step >= PLANTED else loss, run=folder)
    result = CliRunner().invoke(app, ["status", str(folder)])
    assert result.exit_code == 5
    assert "not finite" in result.output
    assert "no alerts" not in result.output
    assert "ended" in result.output
    page = joma.report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<span class="badge bad">done</span>' in page
    assert "not finite" in page
    assert "dip and bounce" not in page


def test_what_was_not_measured_has_no_row_and_is_null_in_the_file(tmp_path):
    """Layer 1 is skipped in every second step: its rows are missing then, and nothing is called not finite."""
    calls = []

    class Skipping(HandWrittenGPT):
        def forward(self, tokens):
            calls.append(len(tokens))
            skipped = self.blocks[1] if len(calls) % 2 == 0 else None
            x = self.embed(tokens)
            for block in self.blocks:
                if block is not skipped:
                    x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Skipping()
    with joma.watch(model, tmp_path / "run", every=1, gauges="entropy", live=False) as watch:
        for step in range(1, 7):
            tokens = torch.randint(VOCABULARY, (4, LENGTH))
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            metrics = watch.step(loss=loss)
            assert ("joma/entropy/layer_01" in metrics) == (step % 2 == 1)
    table = watch.frame()
    assert np.isfinite(table.value).all()
    entropy = table[(table.gauge == "entropy") & (table.layer == 1)]
    assert sorted(set(entropy.step)) == [1, 3, 5]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    second = next(line for line in lines if line["step"] == 2 and line["gauge"] == "entropy")
    assert second["value"][1] == [None] * len(second["value"][0])
    assert watch.alerts == []


def test_null_and_nan_come_back_apart(tmp_path):
    from joma._runs.writer import RunWriter

    with RunWriter.create(
        tmp_path / "run", kind="watch", config={}, axes={"g": ["layer", "head"]}
    ) as writer:
        writer.write(1, {"g": [[1.0, None], [math.nan, math.inf]]})
    table = Run(tmp_path / "run").frame()
    assert list(zip(table.layer, table["head"], strict=True)) == [(0, 0), (1, 0), (1, 1)]
    assert math.isnan(table.value.iloc[1])
    assert table.value.iloc[2] == math.inf


def test_a_dead_model_is_never_bouncing():
    """Its entropy dips and comes back while its loss goes through the roof."""
    alarms = Alarms()
    entropies = [2.4] * 10 + [1.0] * 10 + [2.0] * 30
    losses = [4.0] * 10 + [134.0] * 40
    for step, (entropy, loss) in enumerate(zip(entropies, losses, strict=True), 1):
        spread = entropy / 2.6
        alarms.update(Reading(step, loss, [LayerReading(entropy, 2.6, [spread], [0.1], [5.0])]))
    assert alarms.phases[0].name == "failing"
    assert "diverging" in str(alarms.phases[0])


def test_a_critical_alert_that_is_over_gives_the_phase_back():
    alarms = Alarms()
    for step in range(1, 30):
        loss = math.nan if 10 <= step < 15 else 2.0
        alarms.update(Reading(step, loss, [LayerReading(2.4, 2.6, [0.9], [0.1], [5.0])]))
        assert alarms.phases[0].name == ("ended" if 10 <= step < 15 else "dense")


def test_the_alert_of_a_block_lists_its_heads_and_reads_well():
    alarms = Alarms()
    alerts = []
    for step in range(1, 60):
        spread = [0.6] * 4 if step < 20 else [2.806e-32, 0.001, 0.002, 0.6]
        alerts += alarms.update(
            Reading(step, 2.0, [LayerReading(1.0, 2.6, spread, [0.1] * 4, [5.0] * 4)]), ["a"]
        )
    (alert,) = alerts
    assert alert.heads == (0, 1, 2)
    assert "e-" not in str(alert)
    assert str(alert).startswith("collapse in layer 0 (a), heads 0, 1 and 2: ")
