"""FlexAttention that a model calls itself: measured as it is and compiled, against brute force."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import joma

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
compiled = torch.compile(flex_attention, backend="eager")
T, HEADS, WIDTH = 24, 4, 8


def no_change(score, b, h, q, k):
    return score


def alibi(score, b, h, q, k):
    return score - 0.3 * (h + 1) * (q - k)


def capped(score, b, h, q, k):
    return 2 * torch.tanh(score / 2)


def causal(b, h, q, k):
    return q >= k


def packed(b, h, q, k):
    return (q >= k) & (q // 7 == k // 7)


class Flex(nn.Module):
    """One attention; FlexAttention has no gradient on the CPU, so queries, keys and values are detached."""

    def __init__(self, call, score_mod, mask_mod, key_heads):
        super().__init__()
        self.call, self.score_mod, self.key_heads = call, score_mod, key_heads
        self.mask = (
            None
            if mask_mod is None
            else create_block_mask(mask_mod, None, None, T, T, device="cpu")
        )
        self.q = nn.Linear(16, HEADS * WIDTH)
        self.k = nn.Linear(16, key_heads * WIDTH)
        self.o = nn.Linear(HEADS * WIDTH, 16)
        self.held = flex_attention  # a reference on the module itself

    def heads(self, x):
        return x.detach().unflatten(-1, (-1, WIDTH)).transpose(1, 2)

    def forward(self, x):
        q, k = self.heads(self.q(x)), self.heads(self.k(x))
        options = {
            "score_mod": self.score_mod,
            "block_mask": self.mask,
            "enable_gqa": self.key_heads < HEADS,
        }
        if self.call == "here":
            states = flex_attention(q, k, k, **options)
        elif self.call == "attend":
            states = self.attend(q, k, k, **options)
        else:
            states = (compiled if self.call == "compiled" else self.held)(q, k, k, **options)
        return self.o(states.transpose(1, 2).flatten(2))


def entropies(model, x):
    """By brute force, per head and query."""
    q, k = (model.heads(m(x)).double() for m in (model.q, model.k))
    s = q @ k.repeat_interleave(HEADS // model.key_heads, dim=1).mT / WIDTH**0.5
    q_at, k_at = torch.arange(T)[:, None], torch.arange(T)
    head = torch.arange(HEADS)[:, None, None]
    s = s if model.score_mod is None else model.score_mod(s, 0, head, q_at, k_at)
    s = (
        s
        if model.mask is None
        else s.masked_fill(~model.mask.mask_mod(0, 0, q_at, k_at), -torch.inf)
    )
    return torch.special.entr(s.softmax(dim=-1)).sum(dim=-1).mean(dim=(0, 2))


CASES = [
    ("here", None, causal, 4), ("here", alibi, packed, 2), ("here", capped, None, 4), ("compiled", alibi, causal, 4),
    ("held", no_change, causal, 1),
]  # fmt: skip


def difference(model, x):
    """The largest one between entropies that a watch has measured and brute force."""
    before = model(x)
    with joma.watch(model, every=1, gauges="entropy") as w:
        assert torch.equal(model(x), before)
        functional.mse_loss(model(x), x).backward()
        w.step()
        values = w.frame().set_index("gauge").value["entropy"].to_numpy()
    return float((torch.tensor(values) - entropies(model, x)).abs().max())


@pytest.mark.parametrize(("call", "score_mod", "mask_mod", "key_heads"), CASES)
def test_entropy_is_that_of_brute_force_and_the_model_computes_the_same(
    call, score_mod, mask_mod, key_heads
):
    torch.manual_seed(0)
    model = Flex(call, score_mod, mask_mod, key_heads)
    assert difference(model, 3 * torch.randn(2, T, 16)) <= 1e-4
    assert model.held is flex_attention
    assert globals()["flex_attention"] is flex_attention.__globals__["flex_attention"]


class OnClass(Flex):
    """Keeps its function on the class, as torchtitan does, so that all layers share one compiled function."""

    flex: ClassVar[Callable] = compiled

    def attend(self, *given, **options):
        return OnClass.flex(*given, **options)


class OnBase(OnClass):
    """Finds the function on a base class."""


class Static(OnClass):
    flex = staticmethod(compiled)

    def attend(self, *given, **options):
        return self.flex(*given, **options)


class Partial(OnClass):
    flex = functools.partial(flex_attention, score_mod=alibi)

    def attend(self, *given, score_mod, **options):
        return self.flex(*given, **options)


class PartialOnModule(Flex):
    def attend(self, *given, score_mod, **options):
        if "partial" not in vars(self):
            self.partial = functools.partial(compiled, score_mod=alibi)
        return self.partial(*given, **options)


@pytest.mark.parametrize("kind", [OnClass, OnBase, Static, Partial, PartialOnModule])
def test_a_function_on_a_class_or_in_a_partial_is_seen_and_put_back(kind):
    torch.manual_seed(0)
    model = kind("attend", alibi, causal, 4)
    names = {
        name: value for base in kind.__mro__ for name, value in vars(base).items() if name == "flex"
    }
    assert difference(model, 3 * torch.randn(2, T, 16)) <= 1e-4
    assert names == {
        name: value for base in kind.__mro__ for name, value in vars(base).items() if name == "flex"
    }


def test_a_compiled_call_is_not_compiled_once_more():
    torch.manual_seed(0)
    model = Flex("compiled", None, causal, 4)
    x = torch.randn(2, T, 16)
    model(x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(2):
            functional.mse_loss(model(x), x).backward()
            w.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_look_that_fails_does_not_stop_the_model(monkeypatch):
    def fails(*given):
        raise RuntimeError("not again")

    monkeypatch.setattr("joma._measure.events.backends.flex._score_bias", fails)
    torch.manual_seed(0)
    model = Flex("here", alibi, None, 4)
    x = torch.randn(2, T, 16)
    with joma.watch(model, every=1, gauges="entropy") as w:
        functional.mse_loss(model(x), x).backward()
        with pytest.warns(joma.JomaWarning, match="not again"):
            w.step()


CELL = """
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

class LaterCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        q, k = (f(x).detach().unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k))
        return self.q(flex_attention(q, k, k).transpose(1, 2).flatten(2))
"""


@pytest.mark.parametrize("name", ["__main__", "a_module_that_imports_late"])
def test_a_name_that_an_imported_module_gets_after_an_earlier_watch_is_seen(monkeypatch, name):
    """A later cell of a notebook adds names to __main__, and imports nothing that is new."""
    notebook = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, notebook)
    torch.manual_seed(0)
    x = torch.randn(2, T, 16)
    assert difference(Flex("here", None, causal, 4), x) <= 1e-4  # of an earlier cell
    exec(CELL, vars(notebook))
    model = notebook.LaterCell()
    with joma.watch(model, every=1, gauges="entropy") as w:
        functional.mse_loss(model(x), x).backward()
        w.step()
        assert set(w.frame().gauge) >= {"entropy"}
    assert notebook.flex_attention is flex_attention


def test_a_name_of_a_notebook_that_is_assigned_anew_is_seen(monkeypatch):
    """The number of names stays what it was."""
    notebook = ModuleType("__main__")
    notebook.flex_attention = None
    exec(CELL.replace("import flex_attention", "import create_block_mask"), vars(notebook))
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    torch.manual_seed(0)
    x = torch.randn(2, T, 16)
    assert difference(Flex("here", None, causal, 4), x) <= 1e-4
    notebook.flex_attention = flex_attention
    model = notebook.LaterCell()
    with joma.watch(model, every=1, gauges="entropy") as w:
        functional.mse_loss(model(x), x).backward()
        w.step()
        assert set(w.frame().gauge) >= {"entropy"}
