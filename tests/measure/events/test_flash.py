"""Functions with the signatures of flash_attn and of PyTorch's packed attention, computed on the CPU by brute force.

The packages themselves need a GPU and have not been run: what is tested is how their arguments are read.
"""

import inspect
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import varlen

import joma

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
LENGTHS = (7, 12, 5)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def attend(q, k, v, scale, causal, window, softcap, slopes):
    """(T, heads, d) each; output, and the attention (heads, Tq, Tk)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    ahead = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None] - (k.shape[0] - q.shape[0])
    if slopes is not None:
        s = s - slopes[:, None, None] * ahead.abs()
    s = s.masked_fill(ahead > 0, -torch.inf) if causal else s
    s = s.masked_fill(-ahead > window[0], -torch.inf) if window[0] >= 0 else s
    s = s.masked_fill(ahead > window[1], -torch.inf) if window[1] >= 0 else s
    p = s.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", p, v), p


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    rows = [
        attend(*sample, softmax_scale, causal, window_size, softcap, alibi_slopes)[0]
        for sample in zip(q, k, v, strict=True)
    ]
    return functional.dropout(torch.stack(rows), dropout_p)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    sizes = cu_seqlens_q.diff().tolist()
    parts = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
    return torch.cat(
        [attend(*p, softmax_scale, causal, window_size, softcap, alibi_slopes)[0] for p in parts]
    )


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_q,
        max_q,
        max_k,
        softmax_scale=scale,
        window_size=window_size,
    )


class Flash(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.q, self.kv = nn.Linear(16, HEADS * WIDTH), nn.Linear(16, KEY_HEADS * WIDTH)
        self.o, self.call = nn.Linear(HEADS * WIDTH, 16), call

    def heads(self, x):
        return (x.unflatten(-1, (-1, WIDTH)) for x in (self.q(x), self.kv(x)))

    def forward(self, x):
        return self.o(self.call(*self.heads(x)).flatten(-2))


def entropy(model, documents, **options):
    """Mean over all queries, per head, by brute force."""
    rows = []
    for x in documents:
        q, k = (y.double() for y in model.heads(x))
        settings = {
            "scale": None,
            "causal": False,
            "window": (-1, -1),
            "softcap": 0,
            "slopes": None,
        } | options
        rows.append(torch.special.entr(attend(q, k, k, **settings)[1]).sum(dim=-1))
    return torch.cat(rows, dim=1).mean(dim=1).detach().numpy()


def measured(model, x):
    before = model(x)
    with joma.watch(model, every=1, gauges="entropy") as w:
        state = torch.get_rng_state()
        output = model(x)
        functional.mse_loss(output, x).backward()
        assert torch.equal(state, torch.get_rng_state()) == torch.equal(
            output, before
        )  # unless there is dropout
        w.step()
    return w.frame().set_index("gauge").value["entropy"].to_numpy()


@pytest.fixture(autouse=True)
def package(monkeypatch):
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_func, flash.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    signature = inspect.signature(varlen.varlen_attn)
    assert list(inspect.signature(varlen_attn).parameters) == list(signature.parameters)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    torch.manual_seed(0)
    return flash


@pytest.mark.parametrize(
    ("given", "options"),
    [({}, {}), ({"causal": True}, {"causal": True}), ({"causal": True, "window_size": (5, 0)}, {"window": (5, 0)}),
     ({"window_size": (3, 2), "softmax_scale": 0.7}, {"window": (3, 2), "scale": 0.7}),
     ({"causal": True, "softcap": 1.5}, {"causal": True, "softcap": 1.5}),
     ({"causal": True, "alibi_slopes": SLOPES}, {"causal": True, "slopes": SLOPES}),
     ({"causal": True, "dropout_p": 0.3}, {"causal": True})],
)  # fmt: skip
def test_flash_attn(package, given, options):
    model = Flash(lambda q, k: package.flash_attn_func(q, k, k, **given))
    x = 3 * torch.randn(2, 12, 16)
    assert measured(model, x) == pytest.approx(entropy(model, x, **options), abs=1e-4)


@pytest.mark.parametrize("which", ["flash_attn", "torch"])
@pytest.mark.parametrize(("window", "causal"), [((-1, -1), True), ((4, 0), False)])
def test_sequences_one_after_the_other(package, which, window, causal):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    longest = max(LENGTHS)

    def packed(q, k):
        q, k = q[0], k[0]
        if which == "torch":
            size = (-1, 0) if causal else window
            return varlen.varlen_attn(q, k, k, ends, None, longest, longest, window_size=size)[None]
        options = {"causal": causal, "window_size": window}
        return package.flash_attn_varlen_func(q, k, k, ends, ends, longest, longest, **options)[
            None
        ]

    model = Flash(packed)
    x = 3 * torch.randn(1, sum(LENGTHS), 16)
    expected = entropy(model, x[0].split(LENGTHS), causal=causal, window=window)
    assert measured(model, x) == pytest.approx(expected, abs=1e-4)


def test_pages_are_refused(package):
    ends = torch.tensor([0, 6, 12]).int()

    def paged(q, k):
        return package.flash_attn_varlen_func(
            q[0], k[0], k[0], ends, ends, 6, 6, block_table=torch.zeros(1)
        )[None]

    model = Flash(paged)
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(torch.randn(1, 12, 16))
        with pytest.warns(joma.JomaWarning, match="block_table"):
            w.step()
