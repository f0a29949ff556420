"""The table of backends: what may be registered, and that a new backend is measured or refused."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import joma
from joma._measure.events.backends.backend_table import (
    BUILTIN,
    all_backends,
    find_backend,
    remove_backend,
)
from tests.snippets import snippets

PAGE = (Path(__file__).parents[3] / "docs/extend.md").read_text()
KERNEL = next(snippet.code for snippet in snippets(PAGE) if snippet.title == "tiled.py")


@pytest.fixture(autouse=True)
def _table_as_before():
    before = all_backends()
    yield
    for backend in all_backends():
        if backend not in before:
            remove_backend(backend.name)


@pytest.fixture
def tiled(tmp_path, monkeypatch):
    """The module of the documentation, which registers its backend."""
    (tmp_path / "tiled.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("tiled")
    sys.modules.pop("tiled", None)


class SelfAttention(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = [module]  # not a submodule
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(-3)  # (B, T, H, d) each

    def forward(self, x):
        return self.out(self.module[0].tiled_attention(*self.heads(x)).flatten(-2))


def build(module):
    torch.manual_seed(0)
    model = nn.Sequential(SelfAttention(module), SelfAttention(module))
    for attention in model:
        attention.qkv.weight.data *= 4
    return model


@torch.no_grad()
def entropies(model, x):
    """Mean entropy per layer, by brute force."""
    values = []
    for attention in model:
        query, key, _ = (y.transpose(1, 2).double() for y in attention.heads(x))
        scores = query @ key.mT / 8**0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        p = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        values.append(float(torch.special.entr(p).sum(dim=-1).mean()))
        x = attention(x)
    return values


@pytest.mark.parametrize("is_boolean", [True, False])
def test_a_mask_and_the_causal_flag_together_hide_what_either_hides(is_boolean):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 8)  # (B, H, T, d) each
    keep = torch.rand(2, 1, 1, 5) > 0.3
    keep[..., 0] = True
    mask = keep if is_boolean else torch.where(keep, 0.0, -torch.inf)
    call = find_backend("flash").dot_product(query, key, value, value, mask=mask, causal=True)
    assert not call.causal
    hidden = ~keep | torch.ones(5, 5, dtype=torch.bool).triu(1)
    if is_boolean:
        assert torch.equal(call.mask, ~hidden)
    else:
        assert torch.equal(call.mask == -torch.inf, hidden)


def test_the_kernel_of_the_documentation_is_measured(tiled):
    model = build(tiled)
    x = torch.randn(2, 14, 32)
    function = tiled.tiled_attention
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(2):
            output = model(x)
            output.sum().backward()
            values = list(w.step().values())
            assert values == pytest.approx(entropies(model, x), abs=1e-5)
    assert torch.equal(output, model(x))
    assert tiled.tiled_attention is function  # nothing is left behind


def test_the_example_is_shorter_than_40_lines():
    assert len([line for line in KERNEL.splitlines() if line]) < 40


def test_without_its_backend_the_kernel_is_refused(tiled):
    remove_backend("tiled")
    row = joma.explain(build(tiled), (torch.randn(2, 14, 32),)).rows[0]
    assert row.code == "no-softmax"


def test_a_backend_that_reads_its_arguments_wrongly_is_refused(tiled, monkeypatch):
    def read(self, arguments, output):
        q, k, v = (arguments[name].transpose(1, 2) for name in ("q", "k", "v"))
        return self.dot_product(q, k, v, output.transpose(1, 2), causal=False)

    monkeypatch.setattr(tiled.TiledBackend, "read", read)
    model = build(tiled)
    x = torch.randn(2, 14, 32)
    row = joma.explain(model, (x,)).rows[0]
    assert (row.backend, row.code) == ("tiled", "guard")


def test_a_backend_that_raises_does_not_stop_the_model(tiled, monkeypatch):
    def read(self, arguments, output):
        raise LookupError("no such argument")

    monkeypatch.setattr(tiled.TiledBackend, "read", read)
    model = build(tiled)
    x = torch.randn(2, 14, 32)
    expected = model(x)
    with joma.watch(model, every=1, gauges="entropy") as w:
        assert torch.equal(model(x), expected)
        with pytest.warns(joma.JomaWarning, match="no such argument"):
            w.step()


def define(**attributes):
    def read(self, arguments, output):
        raise NotImplementedError

    members = {"name": "odd", "functions": ("package.odd",), "read": read} | attributes
    return type("OddBackend", (joma.KernelBackend,), members)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": None}, "needs a text name"),
        ({"name": "sdpa"}, "there is a backend 'sdpa' already"),
        ({"functions": "package.odd"}, "must be a tuple"),
        ({"functions": ("odd",)}, "like 'package.module.function'; got 'odd'"),
        ({"functions": (len,)}, "like 'package.module.function'; got <built-in"),
    ],
)
def test_what_is_no_backend_is_named(attributes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        joma.backend(define(**attributes))


def test_a_class_of_another_kind_and_one_without_read_are_refused():
    with pytest.raises(TypeError, match=r"subclass of joma\.KernelBackend; got <class 'int'>"):
        joma.backend(int)
    incomplete = type("Incomplete", (joma.KernelBackend,), {"name": "a", "functions": ("a.b",)})
    with pytest.raises(TypeError, match="cannot be created without arguments"):
        joma.backend(incomplete)


def test_a_class_that_is_defined_again_in_a_notebook_takes_the_place_of_the_first():
    joma.backend(define())
    again = joma.backend(define())
    assert type(find_backend("odd")) is again
    assert all_backends()[: len(BUILTIN)] == list(BUILTIN)


def test_the_page_lists_the_backends_of_joma():
    table = re.search(r"<!-- backends -->\n(.*?)<!-- /backends -->", PAGE, flags=re.S)[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    assert [row[0] for row in rows] == [backend.name for backend in BUILTIN]
    for row, backend in zip(rows, BUILTIN, strict=True):
        assert row[3] == ("fixed" if backend.has_fixed_axes else "open")
