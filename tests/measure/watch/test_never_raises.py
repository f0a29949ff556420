"""Whatever goes wrong in a measurement is one warning and a line in `Watch.problems`, and the next one looks again."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import joma
from joma._measure.watch.measurement import Measurement
from tests.measure.watch.models import (
    LENGTH,
    VOCABULARY,
    Block,
    HandWrittenGPT,
    entropy_of,
    sharpen,
    tally_of,
)


def tokens(seed: int = 0, batch: int = 3) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def build() -> HandWrittenGPT:
    torch.manual_seed(0)
    return sharpen(HandWrittenGPT("sdpa"), 3)


def expected_entropy(model: HandWrittenGPT) -> list[float]:
    """By brute force, of the last pass."""
    return [float(entropy_of(block.attn.last).mean()) for block in model.blocks]


def train(w: joma.types.Watch, steps: int = 2) -> list[dict[str, float]]:
    """Make steps of training; return the metrics of each."""
    metrics = []
    for step in range(steps):
        w.model(tokens(step)).square().mean().backward()
        metrics.append(w.step(loss=1.0))
    return metrics


def test_layer_dropout_that_drops_all_layers_in_the_first_step():
    class Drops(HandWrittenGPT):
        steps = 0

        def forward(self, x):
            self.steps += 1
            if self.steps == 1:
                return self.head(self.embed(x))
            return super().forward(x)

    model = Drops("sdpa")
    with joma.watch(model, every=1, gauges="entropy") as w:
        with pytest.warns(joma.JomaWarning, match=r"no attention was seen") as said:
            assert train(w, 1) == [{}]
        assert len(said) == 1
        assert len(w.problems) == 1
        assert "no attention was seen in Drops" in w.problems[0]
        (metrics,) = train(w, 1)
        assert list(metrics.values()) == pytest.approx(expected_entropy(model), abs=1e-5)
        assert len(w.problems) == 1


def test_blocks_that_a_script_calls_under_a_reentrant_checkpoint_are_measured():
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.block = Block(16, 2, "sdpa", 40, 0.0)

    torch.manual_seed(0)
    model = Parts()
    x = torch.randn(3, LENGTH, 16)
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(2):
            checkpoint(model.block, model.first(x), use_reentrant=True).square().mean().backward()
            values = list(w.step().values())
            assert values == pytest.approx(
                [float(entropy_of(model.block.attn.last).mean())], abs=1e-5
            )
        with (
            torch.no_grad(),
            warnings.catch_warnings(),
        ):  # validation under the same function is none of training
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            checkpoint(model.block, model.first(x), use_reentrant=True)
        with pytest.warns(
            joma.JomaWarning, match="are no training, and are not measured: 2 without gradients"
        ):
            w.step()
    assert len(w.problems) == 1


class Quantised(torch.Tensor):
    """Weights of another type, as libraries for int8 have them: they know a linear map, and raise at anything else."""

    @staticmethod
    def __new__(cls, plain):
        return torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, dtype=plain.dtype, requires_grad=False
        )

    def __init__(self, plain):
        self.scale = plain.abs().max() / 127
        self.int8 = (plain / self.scale).round().to(torch.int8)

    def plain(self):
        return self.int8 * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is functional.linear:
            x, weight, *bias = args
            return func(x, weight.plain(), *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{func} is not implemented for Quantised")


def test_weights_of_a_type_that_cannot_be_read():
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Quantised(module.weight.detach()), requires_grad=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with joma.watch(model, every=1, live=False) as w:
            metrics = train(w, 2)
    assert len(metrics[0]) == 2
    assert list(metrics[1].values()) == pytest.approx(expected_entropy(model), abs=1e-5)
    assert any("Quantised" in problem for problem in w.problems)
    assert len(said) == len({str(one.message) for one in said})


PARTS = {
    "weights": "joma._measure.watch.meters.WeightMeter.measure",
    "tally": "joma._measure.watch.tally.Tally.values",
    "alarms": "joma._measure.watch.alarms.Alarms.update",
    "record": "joma._measure.watch.record.Record.write",
    "kept readings": "joma._measure.watch.record.Record.write_reading",
    "clock": "joma._measure.watch.clock.Clock.advance",
    "search": "joma._measure.watch.loop.find_not_finite",
}


@pytest.mark.parametrize("part", PARTS)
def test_an_exception_anywhere_in_a_measurement_is_one_warning(part, monkeypatch):
    model = build()
    with joma.watch(model, every=1, live=False) as w:
        train(w, 1)

        def fails(*args, **kwargs):
            raise RuntimeError("on purpose")

        monkeypatch.setattr(PARTS[part], fails)
        with pytest.warns(joma.JomaWarning, match="on purpose") as said:
            train(w, 3)
        assert len(said) == 1
        assert [
            problem
            for problem in w.problems
            if "RuntimeError: on purpose; training goes on" in problem
        ]
        monkeypatch.undo()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (metrics,) = train(w, 1)
        assert len(metrics) == 4  # it measures again


def test_an_exception_in_one_part_keeps_what_the_others_measured(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("on purpose")

    monkeypatch.setattr("joma._measure.watch.meters.WeightMeter.measure", fails)
    with joma.watch(build(), every=1, live=False) as w:
        with pytest.warns(joma.JomaWarning, match="weights failed in step 1"):
            (metrics,) = train(w, 1)
        assert len(metrics) == 2
        assert isinstance(w.latest, Measurement)


def test_an_end_that_fails_is_a_warning(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("on purpose")

    w = joma.watch(build(), every=1, live=False)
    train(w, 1)
    monkeypatch.setattr("joma._measure.watch.record.Record.finish", fails)
    with pytest.warns(joma.JomaWarning, match="the end of the run failed"):
        w.close()
    w.close()


def test_mistakes_in_arguments_are_raised():
    with joma.watch(build(), every=1, gauges="entropy", padding="maks") as w:
        w.model(tokens())
        with pytest.raises(ValueError, match="maks"):
            w.step()
    with joma.watch(build(), every=5, gauges="entropy") as w:
        train(w, 1)
        for wrong, error in ((torch.ones(2), ValueError), ("much", TypeError), ([1.0], TypeError)):
            with pytest.raises(error):
                w.step(loss=wrong)
            with pytest.raises(error):
                w.step(accuracy=wrong)
        assert w.last_step == 1  # nothing was made of them
        train(w, 1)
        assert w.last_step == 2
    with pytest.raises(RuntimeError, match="closed"):
        w.step()


def test_problems_of_a_watch_without_any():
    with joma.watch(build(), every=1) as w:
        train(w)
        assert w.problems == []


# What counts as training


def generate(model: nn.Module, count: int) -> None:
    with torch.no_grad():
        for n in range(1, count):
            model(tokens(n)[:, :n])


class Cached(HandWrittenGPT):
    """Attends from one token to the keys of those before."""

    def __init__(self) -> None:
        super().__init__("sdpa")
        self.caches = [[] for _ in self.blocks]
        self.uses_cache = False

    def forward(self, x):
        x = self.embed(x)
        for block, cache in zip(self.blocks, self.caches, strict=True):
            if not self.uses_cache:
                x = block(x)
                continue
            attn = block.attn
            q, k, v = (
                attn.qkv(block.ln1(x)).view(*x.shape[:2], 3, attn.heads, -1).permute(2, 0, 3, 1, 4)
            )
            cache.append((k, v))
            k, v = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
            x = x + attn.proj(y.transpose(1, 2).reshape(x.shape))
            x = x + block.mlp(block.ln2(x))
        return self.head(x)

    def generate(self, prompt, count: int) -> None:
        self.uses_cache = True
        with torch.no_grad():
            self(prompt)
            for n in range(count):
                self(tokens(n)[:, :1])
        self.uses_cache = False


def measured_passes(w: joma.types.Watch, monkeypatch) -> list[int]:
    """Count the passes that are looked at."""
    count = [0]
    run = type(w._loop.instruments.passes.source)._run_pass

    def counting(self, *args, **kwargs):
        count[0] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(type(w._loop.instruments.passes.source), "_run_pass", counting)
    return count


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_generation_before_the_first_training_step_is_not_measured_token_by_token(
    with_optimizer, monkeypatch
):
    torch.manual_seed(0)
    model = sharpen(Cached(), 3)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} if with_optimizer else {}
    with joma.watch(model, every=1, gauges="entropy", **options) as w:
        count = measured_passes(w, monkeypatch)
        model.generate(tokens(), 20)
        assert count[0] == (
            0 if with_optimizer else 2
        )  # the prompt, and one token that shows what this is
        (metrics,) = train(w, 1)
        assert [metrics[f"joma/entropy/layer_0{n}"] for n in range(2)] == pytest.approx(
            expected_entropy(model), abs=1e-5
        )


@pytest.mark.parametrize("mode", ["eval mode", "train mode"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_evaluation_with_gradients_between_two_steps_is_left_out(mode, order):
    """The gradients of training are used, those of evaluation are not."""
    model = build()

    def evaluate():
        model.train(mode == "train mode")
        for n in range(3):
            model(tokens(10 + n))
        model.train()

    with joma.watch(model, every=1, gauges=["entropy", "stream_rms"]) as w:
        values = []
        for evaluated in (True, True, False):
            if evaluated and order == "before":
                evaluate()
            for n in range(2):  # micro-batches
                model(tokens(n)).square().mean().backward()
            if evaluated and order == "after":
                evaluate()
            values.append(w.step())
    assert values[0] == values[1] == values[2]


def test_passes_in_eval_mode_are_left_out_and_reported_if_no_gradients_are_computed():
    model = build()
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens(0))
        expected = w.step()
        model.eval()
        model(tokens(1))
        model(tokens(2))
        model.train()
        model(tokens(0))
        with pytest.warns(
            joma.JomaWarning, match="2 passes in eval mode since the last step.. are not measured"
        ):
            assert w.step() == expected


def test_losses_of_evaluation_are_left_out():
    class WithLoss(HandWrittenGPT):
        def forward(self, x):
            logits = super().forward(x)
            return {"logits": logits, "loss": logits.square().mean()}

    model = WithLoss("sdpa")
    with joma.watch(model, every=1, gauges="entropy") as w:
        loss = model(tokens(0))["loss"]
        model(tokens(1))
        loss.backward()
        w.step()
        assert w.latest.loss == pytest.approx(loss.item())


def test_passes_in_eval_mode_count_if_there_are_no_others():
    model = build().eval()
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens())
        assert len(w.step()) == 2
        train(w, 2)
    assert w.problems == []


def test_very_many_passes_between_two_steps(monkeypatch):
    """Sums of passes are not kept apart without end."""
    monkeypatch.setattr("joma._measure.watch.tally._APART", 4)
    model = build()
    with joma.watch(model, every=1, gauges="entropy") as w:
        for n in range(12):
            model(tokens(n)).square().mean().backward()
        folded = w.step()
        assert len(tally_of(w)._passes) == 0
        for n in range(3):
            model(tokens(n)).square().mean().backward()
        w.step()
        model(torch.cat([tokens(n) for n in range(12)])).square().mean().backward()
        assert w.step() == pytest.approx(folded, abs=1e-6)


def test_generate_without_a_cache_is_left_out_once_training_has_begun():
    model = build()
    with joma.watch(model, every=1, gauges="entropy") as w:
        train(w, 1)
        generate(model, 5)
        model(tokens(3)).square().mean().backward()
        metrics = w.step()
        assert list(metrics.values()) == pytest.approx(expected_entropy(model), abs=1e-5)
