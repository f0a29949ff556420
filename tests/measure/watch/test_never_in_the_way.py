# ruff: noqa: NPY002 (models draw from NumPy's global generator, so it must be put back)
"""A watched training computes what it would compute without joma: compiled helpers, tracing, other libraries."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

import joma
from tests.measure.watch.models import (
    LENGTH,
    VOCABULARY,
    HandWrittenGPT,
    entropy_of,
    sharpen,
    tally_of,
)

CALL = nn.Module.__call__
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # dynamo's own
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    torch._dynamo.reset()
    counters.clear()
    border = torch._dynamo.eval_frame._maybe_set_eval_frame
    yield
    assert nn.Module.__call__ is CALL
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch._dynamo.eval_frame._maybe_set_eval_frame is border
    torch._dynamo.reset()


def tokens(seed: int = 0, batch: int = 3) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def build(how: str = "sdpa", **options) -> HandWrittenGPT:
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT(how, **options), 3)
    for block in model.blocks:
        block.attn.keep = False
    return model


def expected_entropy(model: HandWrittenGPT, x: torch.Tensor) -> list[float]:
    """By brute force, the mean over the heads of each layer."""
    for block in model.blocks:
        block.attn.keep = True
    with torch.no_grad():
        model(x)
    for block in model.blocks:
        block.attn.keep = False
    return [float(entropy_of(block.attn.last).mean()) for block in model.blocks]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def train(model: nn.Module, watched: bool, steps: int = 4, call=None, **options):
    """Train, and return the metrics of each step."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every": 1, "gauges": "entropy", "live": False} | options
    w = joma.watch(model, **options) if watched else None
    metrics = []
    for step in range(steps):
        loss = loss_of(call or model, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if w is not None:
            metrics.append(w.step(loss=loss))
    if w is not None:
        w.close()
    return metrics


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    for name, value in one.state_dict().items():
        assert torch.equal(value, expected[name]), name


# Compiled functions inside of a model that is not compiled


class CompiledHelper(HandWrittenGPT):
    """Calls a compiled function, and a compiled function that calls a module, between its blocks."""

    def __init__(self, fullgraph: bool, how: str = "sdpa") -> None:
        super().__init__(how)
        self.norm = nn.LayerNorm(16)
        self.runs = []  # of compiled graphs, and how many modes there were
        self.frames = []

        def backend(graph, inputs):
            self.frames.append(graph)

            def run(*args):
                self.runs.append(torch.overrides._len_torch_function_stack())
                return graph(*args)

            return run

        self.helper = torch.compile(
            lambda x: functional.gelu(x) * 2 + self.norm(x), backend=backend, fullgraph=fullgraph
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.helper(block(x))
        return self.head(x)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_function_in_the_model_stays_compiled(fullgraph, every):
    models = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = sharpen(CompiledHelper(fullgraph), 3)
        metrics = train(model, watched, steps=6, every=every)
        models.append(model)
    plain, watched = models
    assert len(watched.frames) == len(plain.frames) == 1
    assert (
        watched.runs == plain.runs == [0] * 12
    )  # two calls in each of six steps, without any mode around them
    assert_same_bits(watched, plain)
    assert [len(m) for m in metrics] == [
        2 if step in (1, *range(every, 7, every)) else 0 for step in range(1, 7)
    ]


def test_numbers_next_to_a_compiled_function_are_right():
    torch.manual_seed(0)
    model = sharpen(CompiledHelper(True, "softmax"), 3)
    x = tokens()
    with joma.watch(model, every=1, gauges="entropy") as w:
        loss_of(model, x).backward()
        values = list(w.step().values())
    with torch.no_grad():
        model(x)
    assert values == pytest.approx(
        [float(entropy_of(b.attn.last).mean()) for b in model.blocks], abs=1e-5
    )


def test_a_compiled_function_that_raises_leaves_the_measurement_in_order():
    class Fails(HandWrittenGPT):
        def forward(self, x):
            with pytest.raises(ValueError, match="on purpose"):
                fails(self.embed.weight)
            return super().forward(x)

    @torch.compile(backend="eager")
    def fails(x):
        raise ValueError("on purpose")

    model = Fails("sdpa")
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens())
        assert len(w.step()) == 2


# Compiled after the watch has begun


@pytest.mark.parametrize("how", ["torch.compile", "in place", "a block"])
@pytest.mark.parametrize("when", [0, 2])
def test_a_model_that_is_compiled_later_keeps_its_layers(how, when):
    """The same numbers under the same layers, and the same bits."""
    models = []
    metrics = []
    for watched in (False, True):
        torch._dynamo.reset()
        model = build()
        call = model
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        w = joma.watch(model, every=1, gauges="entropy") if watched else None
        for step in range(4):
            if step == when and how == "torch.compile":
                call = torch.compile(model, backend="aot_eager")
            elif step == when and how == "in place":
                model.compile(backend="aot_eager")
            elif step == when:
                model.blocks[1].compile(backend="aot_eager")
            loss = loss_of(call, tokens(step))
            loss.backward()
            if watched:
                metrics.append(w.step())
                assert list(metrics[-1].values()) == pytest.approx(
                    expected_entropy(model, tokens(step)), abs=1e-5
                )
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert w.layers == ["blocks.0.attn", "blocks.1.attn"]
    w.close()
    assert_same_bits(*models)
    before = counters["stats"]["unique_graphs"]
    loss_of(call, tokens(0))
    assert counters["stats"]["unique_graphs"] == before  # it is compiled still


def test_a_block_that_is_replaced_by_its_compiled_version_keeps_its_layer():
    model = build()
    with joma.watch(model, every=1, gauges="entropy") as w:
        loss_of(model, tokens(0)).backward()
        first = w.step()
        model.blocks[1].attn = torch.compile(model.blocks[1].attn, backend="aot_eager")
        loss_of(model, tokens(0)).backward()
        assert w.step() == pytest.approx(first, abs=1e-6)


def test_a_model_inside_of_a_compiled_function_is_named_as_the_cause():
    model = build()
    step = torch.compile(loss_of, backend="aot_eager")
    with joma.watch(model, every=1, gauges="entropy") as w:
        step(model, tokens(0)).backward()
        with pytest.warns(joma.JomaWarning, match=r"inside a compiled function.*probe"):
            assert w.step() == {}
        graphs = counters["stats"]["unique_graphs"]
        step(model, tokens(1)).backward()
        w.step()
    step(model, tokens(1)).backward()
    assert counters["stats"]["unique_graphs"] == graphs


# Tracing


def test_tracing_while_a_measured_step_is_awaited():
    model = build()
    with joma.watch(model, every=1, gauges="entropy") as w:
        traced = torch.jit.trace(model, (tokens(1),))  # with its own check
        assert torch.equal(traced(tokens(2)), model(tokens(2)))
        tally_of(w).clear()
        torch.jit.trace(model, (tokens(1),))
        assert not tally_of(w).combined  # not counted
        loss_of(model, tokens(0)).backward()
        assert list(w.step().values()) == pytest.approx(
            expected_entropy(model, tokens(0)), abs=1e-5
        )


@pytest.mark.parametrize("strict", [False, True])
def test_export_while_a_measured_step_is_awaited(strict):
    model = build()
    with joma.watch(model, every=1, gauges="entropy") as w:
        exported = torch.export.export(model, (tokens(1),), strict=strict).module()
        assert not tally_of(w).combined
        loss_of(model, tokens(0)).backward()
        assert list(w.step().values()) == pytest.approx(
            expected_entropy(model, tokens(0)), abs=1e-5
        )
    assert torch.allclose(exported(tokens(1)), model(tokens(1)), atol=1e-6)


def test_a_scripted_part_of_a_model_runs():
    class Scripted(HandWrittenGPT):
        def __init__(self) -> None:
            super().__init__("sdpa")
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.GELU()))

        def forward(self, x):
            return self.head(self.scripted(self.blocks[0](self.embed(x))))

    model = Scripted()
    with joma.watch(model, every=1, gauges="entropy") as w:
        loss_of(model, tokens()).backward()
        assert w.step()


# Other libraries that replace nn.Module.__call__


class Patch:
    """A library that counts calls of modules: it wraps whatever it finds, and puts that back."""

    def __init__(self) -> None:
        self.count = 0
        self.found = nn.Module.__call__
        patch = self

        def call(self, *args, **kwargs):
            patch.count += 1
            return patch.found(self, *args, **kwargs)

        self.call = call
        nn.Module.__call__ = call

    def remove(self) -> None:
        nn.Module.__call__ = self.found


def modules_called(model: nn.Module, patch: Patch) -> int:
    before = patch.count
    model(tokens())
    return patch.count - before


@pytest.mark.parametrize("first_to_leave", ["joma", "the library"])
@pytest.mark.parametrize("first_to_come", ["joma", "the library"])
def test_a_patch_of_another_library_survives(first_to_come, first_to_leave):
    model = build()
    plain = model(tokens())
    try:
        if first_to_come == "joma":
            w = joma.watch(model, every=1, gauges="entropy")
            patch = Patch()
        else:
            patch = Patch()
            w = joma.watch(model, every=1, gauges="entropy")
        calls = modules_called(model, patch)
        assert calls == 25
        assert len(w.step()) == 2
        assert modules_called(model, patch) == calls
        assert len(w.step()) == 2
        if first_to_leave == "joma":
            w.close()
            assert modules_called(model, patch) == calls
            patch.remove()
        else:
            patch.remove()
            assert torch.equal(model(tokens()), plain)
            assert patch.count == 2 * calls
            with pytest.warns(
                joma.JomaWarning, match=r"another library has put back nn\.Module\.__call__"
            ):
                w.step()
            model(tokens())
            assert len(w.step()) == 2  # from the next measured step on
            w.close()
        assert torch.equal(model(tokens()), plain)
        with joma.watch(
            model, every=1, gauges="entropy"
        ) as again:  # whatever is left of the first one is harmless
            model(tokens())
            assert len(again.step()) == 2
        assert nn.Module.__call__ is CALL
    finally:
        w.close()
        nn.Module.__call__ = CALL


def test_a_patch_between_two_watches_stays():
    model = build()
    with joma.watch(model, every=1, gauges="entropy"):
        model(tokens())
    patch = Patch()
    try:
        with joma.watch(model, every=1, gauges="entropy") as w:
            model(tokens())
            assert len(w.step()) == 2
        assert nn.Module.__call__ is patch.call
    finally:
        patch.remove()


# A pass that is made once more


class Draws(nn.Module):
    """Draws from every generator there is, and leaves traces on itself and on its modules."""

    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.inner = build()
        if compiled:
            for block in self.inner.blocks:
                block.compile(backend="aot_eager")
        self.calls = 0
        self.auxiliary = []
        self.history = {"norms": [], "seen": set()}
        self.register_buffer("average", torch.zeros(VOCABULARY))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.last_mean = torch.zeros(())
        self.array = np.zeros(2)
        self.own_numpy = np.random.default_rng(5)
        self.own_python = random.Random(5)
        self.own_torch = torch.Generator().manual_seed(5)

    def forward(self, x, log=None):
        keep = np.random.rand() < 0.7 and random.random() < 0.9 and self.own_numpy.random() < 0.9
        factor = self.own_python.random() + float(torch.rand((), generator=self.own_torch))
        logits = self.inner(x) * (0.5 + factor) * (1.0 if keep else 0.1)
        if not self.auxiliary:
            self.auxiliary.append(logits.square().mean())
        else:
            self.auxiliary[0] = self.auxiliary[0] + logits.square().mean()
        self.history["norms"].append(float(logits.detach().norm()))
        self.history["seen"].add(self.calls)
        self.calls += 1
        self.average.mul_(0.9).add_(logits.detach().mean((0, 1)))
        self.steps = self.steps + 1
        self.last_mean += logits.detach().mean()
        self.array += 1
        self.fresh = logits.detach().sum()
        if log is not None:
            log.append(float(logits.detach().sum()))
        return logits + 0 * self.average

    def take_auxiliary(self):
        loss = sum(self.auxiliary)
        self.auxiliary.clear()
        return loss


@pytest.mark.parametrize("way", ["compiled", "probe"])
def test_a_pass_that_is_made_once_more_changes_nothing(way):
    results = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = Draws(way == "compiled")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options = {"probe": tokens(9)} if way == "probe" else {}
        w = joma.watch(model, every=1, gauges="entropy", live=False, **options) if watched else None
        losses, log = [], []
        for step in range(4):
            x = tokens(step)
            logits = model(x, log=log)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            loss = loss + 0.1 * model.take_auxiliary()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if watched:
                assert len(w.step()) == 2
        if watched:
            w.close()
        state = (
            model.calls,
            model.history,
            model.array.tolist(),
            float(model.last_mean),
            float(model.fresh),
            log,
        )
        draws = (random.random(), np.random.rand(), float(torch.rand(())))
        results.append((model, losses, state, draws))
    plain, watched = results
    assert watched[1:] == plain[1:]
    assert_same_bits(watched[0], plain[0])


def test_an_input_that_is_changed_in_place_is_refused_and_stays_as_it_is():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()
            self.inner.compile(backend="aot_eager")

        def forward(self, x):
            x.add_(1)
            return self.inner(x)

    model = InPlace()
    x = tokens() % 10
    expected = x + 1
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(x)
        assert torch.equal(x, expected)
        with pytest.warns(joma.JomaWarning, match="changes its input in place"):
            w.step()


# Threads


@pytest.mark.parametrize("grad", [False, True])
def test_evaluation_in_another_thread_is_left_out(grad):
    model = build()
    plain = model.blocks[0].ln1.forward
    outputs = []

    def evaluate():
        with torch.set_grad_enabled(grad):
            outputs.append(model(tokens(7)).detach())

    def meanwhile(x):
        if not outputs:
            outputs.append(None)
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
        return plain(x)

    with torch.no_grad():
        expected = model(tokens(7))
    model.blocks[0].ln1.forward = meanwhile
    with (
        joma.watch(model, every=1, gauges="entropy") as w,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            outputs.clear()
            loss_of(model, tokens(0)).backward()
            values = list(w.step().values())
            assert torch.equal(outputs[1], expected)
            del model.blocks[0].ln1.forward
            assert values == pytest.approx(expected_entropy(model, tokens(0)), abs=1e-5)
            model.blocks[0].ln1.forward = meanwhile
    assert len(caught) == int(grad)  # one pass with gradients is left out: said once


def test_a_long_evaluation_in_another_thread_does_not_disturb_the_passes_of_training():
    """It begins before a pass of training and ends after it."""
    model = build()
    plain = model.blocks[0].ln1.forward
    inside, go_on = threading.Event(), threading.Event()
    home = threading.get_ident()

    def slow(x):
        if threading.get_ident() != home:
            inside.set()
            go_on.wait(20)
        return plain(x)

    def evaluate():
        with torch.no_grad():
            model(tokens(7))

    model.blocks[0].ln1.forward = slow
    with joma.watch(model, every=1, gauges="entropy") as w:
        thread = threading.Thread(target=evaluate)
        thread.start()
        assert inside.wait(20)
        loss_of(model, tokens(0)).backward()
        go_on.set()
        thread.join()
        values = list(w.step().values())
    del model.blocks[0].ln1.forward
    assert values == pytest.approx(expected_entropy(model, tokens(0)), abs=1e-5)
