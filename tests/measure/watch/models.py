"""Small models of many families, and what their attention is by brute force."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from joma._measure.watch.meters import AttentionMeter

VOCABULARY, LENGTH = 61, 14


def sharpen(model: nn.Module, factor: float = 6.0) -> nn.Module:
    """Attention of a fresh model is uniform, which tells little."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                any(word in name.lower() for word in ("attn", "attention", "in_proj", "qkv"))
                and parameter.dim() == 2
            ):
                parameter.mul_(factor)
    return model


class HandWrittenAttention(nn.Module):
    def __init__(self, d: int, heads: int, how: str) -> None:
        super().__init__()
        self.heads, self.how = heads, how
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.keep, self.last = True, None  # the scores, for brute force

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.keep:
            self.last = scores.detach().masked_fill(~causal, -torch.inf)
        if self.how == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k).mul(q.shape[-1] ** -0.5)
            y = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        else:
            y = functional.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, d))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, how: str, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attn = HandWrittenAttention(d, heads, how)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(
            nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class HandWrittenGPT(nn.Module):
    def __init__(
        self,
        how: str = "sdpa",
        d: int = 16,
        heads: int = 2,
        layers: int = 2,
        hidden: int = 40,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, d)
        self.blocks = nn.ModuleList(Block(d, heads, how, hidden, dropout) for _ in range(layers))
        self.head = nn.Linear(d, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Head(nn.Module):
    """One head a module, as in a well-known lecture."""

    def __init__(self, d: int, size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(d, size, bias=False) for _ in range(3))
        self.last: torch.Tensor | None = None

    def forward(self, x):
        q, k = self.query(x), self.key(x)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(~causal, -torch.inf)
        self.last = scores.detach()[:, None]
        return functional.softmax(scores, dim=-1) @ self.value(x)


class ManyHeads(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(d, d // heads) for _ in range(heads))
        self.proj = nn.Linear(d, d)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


def entropy_of(scores: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over real queries, (H,), of scores (B, H, Tq, Tk), in float64, by the formula."""
    p = torch.softmax(scores.double(), -1)
    return entropy_of_probabilities(p, real)


def entropy_of_probabilities(p: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    p = p.detach().double()
    rows = -torch.special.xlogy(p, p).sum(-1)  # (B, H, Tq)
    keep = (
        torch.ones(rows.shape[0], rows.shape[2], dtype=torch.bool) if real is None else real.bool()
    )
    return torch.stack([rows[:, h][keep].mean() for h in range(rows.shape[1])])


def meter_of(watch, kind):
    """The meter of a watch that is of this class."""
    (meter,) = (meter for meter in watch._loop.instruments.meters if isinstance(meter, kind))
    return meter


def tally_of(watch):
    """What a watch keeps of the attention of a step."""
    return meter_of(watch, AttentionMeter).tally
