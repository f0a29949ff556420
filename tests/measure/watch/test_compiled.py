"""Compiled models: bits unchanged, still compiled afterwards, at most one more compilation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import joma
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT, entropy_of, sharpen

BACKEND = "aot_eager"  # what inductor does to the kernels is not the matter here, and it wants a C++ compiler


def build(dropout: float = 0.0) -> HandWrittenGPT:
    """A model without the side effect that brute force wants: a compiler would have to keep it."""
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT("sdpa", dropout=dropout), 3)
    for block in model.blocks:
        block.attn.keep = False
    return model


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(seed))


def compile_as(how: str, model: nn.Module) -> nn.Module:
    if how == "whole":
        return torch.compile(model, backend=BACKEND)
    if how == "in place":
        model.compile(backend=BACKEND)
    else:
        for block in model.blocks:
            block.compile(backend=BACKEND)
    return model


def train(model, step_function, watched: bool, steps: int = 6):
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = []
    w = joma.watch(model, every=2, gauges="entropy") if watched else None
    for step in range(steps):
        loss = step_function(model, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if w is not None:
            metrics.append(w.step(loss=loss))
    if w is not None:
        w.close()
    return metrics, torch.get_rng_state()


def loss_of(model, x):
    return nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own
@pytest.mark.parametrize("how", ["whole", "in place", "blocks"])
def test_compiled_models(how):
    model, other = build(dropout=0.2), build(dropout=0.2)
    compiled = compile_as(how, other)
    _, state = train(compiled, loss_of, watched=False)
    plain = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    metrics, watched_state = train(compile_as(how, model), loss_of, watched=True)
    assert counters["stats"]["unique_graphs"] <= plain + 1
    assert torch.equal(state, watched_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert [bool(m) for m in metrics] == [True, True, False, True, False, True]
    assert list(metrics[0]) == ["joma/entropy/layer_00", "joma/entropy/layer_01"]
    # and it is compiled still: another pass makes no new graph, and none is run by hand
    before = counters["stats"]["unique_graphs"]
    loss_of(model if how != "whole" else torch.compile(model, backend=BACKEND), tokens(0))
    assert counters["stats"]["unique_graphs"] <= before + (how == "whole")


def test_values_of_a_compiled_model():
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT("sdpa"))
    compiled = torch.compile(Wrapper(model), backend=BACKEND)
    with joma.watch(compiled, every=1, gauges="entropy") as w:
        compiled(tokens(0))
        values = list(w.step().values())
    with torch.no_grad():
        model(tokens(0))
    assert values == pytest.approx(
        [float(entropy_of(b.attn.last).mean()) for b in model.blocks], abs=1e-5
    )
    assert w.layers == ["inner.blocks.0.attn", "inner.blocks.1.attn"]


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_compiled_training_step():
    """The model itself is not compiled, what calls it is: left alone, and the message says what to do."""
    model = build()
    step = torch.compile(loss_of, backend=BACKEND)
    step(model, tokens(0))
    before = counters["stats"]["unique_graphs"]
    with joma.watch(model, every=1, gauges="entropy") as w:
        expected = loss_of(model, tokens(1)).detach()
        w.step()
        w._loop.instruments.watched.layers.layers.clear()
        assert torch.equal(step(model, tokens(1)).detach(), expected)
        with pytest.warns(UserWarning, match="did not run"):
            w.step()
    assert counters["stats"]["unique_graphs"] <= before + 1
    with joma.watch(model, every=1, gauges="entropy", probe=tokens(5)) as w:
        step(model, tokens(1))
        assert len(w.step()) == 2
    assert counters["stats"]["unique_graphs"] <= before + 1
