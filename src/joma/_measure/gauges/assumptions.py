"""Gauges of what JoMA assumes, measured on a block of a real model between two measurements (`BlockMotion`).

Assumption 1 asks that expectations with back-propagated gradients stay as they are; Theorem 1 asks under softmax
that the mean attention b̄ does, and then has Eqn. 17, ż = Σ_k (v̇_k ∘ v_k − b̄ v̇_kᵀv_k). On a real block the paper's
letters are

    u_l   inputs of attention, of distinct tokens l      z_ml = (W_Q u_m + b_Q)·(W_K u_l)/√d_h
    v_lk = w_k·(W_O W_V u_l)                             b̄_m = softmax_l(z_ml)

per head, with w_k the rows of the lower MLP matrix. The inputs are held, as the theory holds embeddings: what moved is
the weights. The bias of keys shifts all keys of a query alike, and those of values and outputs are part of the theory's
ξ. The normalisation between attention and MLP, which the theory does not have, is left out of v: what it does counts as
missed. A layer whose logits are not z (rotary positions, say) has no value: see `share_missed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joma._measure.gauges.registry import gauge

PARTS = ("q", "k", "v", "o", "mlp_in")
QUERY_BIAS = "q_bias"  # b_Q, of blocks that have one
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class BlockMotion:
    """One block at the measurement before and now.

    Attributes:
        before, after: part -> matrix (out, in); q, k and v are (heads · d_h, d), o is (d, heads · d_h); "q_bias" is
            (heads · d_h), where there is one.
        states: (n, d) inputs of attention now, of n distinct tokens; None if they were not seen.
        heads: of the queries.
        earlier: mean gradient of the lower MLP matrix in the interval before the last; None if it is not known.
        halves: the same in the last interval, in its odd and in its even steps.
    """

    before: Weights = field(repr=False)
    after: Weights = field(repr=False)
    states: Tensor | None = field(default=None, repr=False)
    heads: int = 1
    earlier: Tensor | None = field(default=None, repr=False)
    halves: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def logits(self, weights: Weights) -> Tensor:
        """z (heads, n, n) of each token as a query to all of them."""
        assert self.states is not None
        u = self.states.double()
        q = u @ weights["q"].double().mT
        q = self._split(
            q + weights[QUERY_BIAS].double() if QUERY_BIAS in weights else q, self.heads
        )
        k = self._split(u @ weights["k"].double().mT, self.heads, q.shape[-1])
        return q @ k.mT / math.sqrt(q.shape[-1])

    def seen(self, weights: Weights) -> Tensor:
        """v (heads, n, K): what each token's value adds to each hidden neuron."""
        assert self.states is not None
        width = weights["o"].shape[1] // self.heads
        values = self._split(self.states.double() @ weights["v"].double().mT, self.heads, width)
        out = (weights["mlp_in"].double() @ weights["o"].double()).unflatten(1, (self.heads, width))
        return torch.einsum("hnd,khd->hnk", values, out)

    def _split(self, rows: Tensor, heads: int, width: int = 0) -> Tensor:
        """(n, heads · d_h) -> (heads, n, d_h); keys and values that several heads share are repeated."""
        width = width or rows.shape[1] // heads
        split = rows.unflatten(1, (-1, width)).transpose(0, 1)
        return split.repeat_interleave(heads // len(split), dim=0)


def share_missed(attention: Tensor, z: Tensor) -> float:
    """How much of the logits behind ``attention`` (…, keys) the logits ``z`` are not, as softmax sees both.

    That is the norm of the difference over the norm, centred over the keys of a query that have any attention.
    """
    seen = attention > 0
    a, b = (_centred(x, seen) for x in (attention.double().where(seen, 1.0).log(), z.double()))
    missed, size = float((a - b).norm()), float(a.norm())
    return missed / size if size > 0 else math.inf if missed > 0 else 0.0


def _centred(x: Tensor, seen: Tensor) -> Tensor:
    mean = (x * seen).sum(dim=-1, keepdim=True) / seen.sum(dim=-1, keepdim=True).clamp(min=1)
    return (x - mean) * seen


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Return the cosine of two tensors as vectors; None if one of them is zero, NaN if one is not finite."""
    a = a.double().flatten()
    b = b.double().flatten()
    size = float(a.norm() * b.norm())
    return None if size == 0 else float(a @ b) / size


@gauge("gradient_stationarity", on="block")
def gradient_stationarity(block: BlockMotion) -> float | None:
    """cos of the lower MLP's mean gradient E[g φ′ f] with that of the interval before: 1 is Assumption 1."""
    if block.earlier is None or block.halves is None:
        return None
    return cosine(block.earlier, block.halves[0] + block.halves[1])


@gauge("gradient_agreement", on="block")
def gradient_agreement(block: BlockMotion) -> float | None:
    """cos between that mean over the odd and the even steps of one interval: what noise leaves of stationarity."""
    return None if block.halves is None else cosine(*block.halves)


@gauge("attention_drift", on="block")
def attention_drift(block: BlockMotion) -> float | None:
    """Share of the mean attention b̄ that moved elsewhere since the last measurement: 0 is Theorem 1's premise."""
    if block.states is None:
        return None
    before, after = (block.logits(w).softmax(dim=-1) for w in (block.before, block.after))
    return float((after - before).abs().sum(dim=-1).mean() / 2)


@gauge("eqn17_residual", on="block")
def eqn17_residual(block: BlockMotion) -> float | None:
    """Share of the logits' motion that Eqn. 17 misses with its best factor: 0 is all predicted, 1 nothing."""
    if block.states is None:
        return None
    z, v = (
        [block.logits(w) for w in (block.before, block.after)],
        [block.seen(w) for w in (block.before, block.after)],
    )
    b = (z[0].softmax(dim=-1) + z[1].softmax(dim=-1)) / 2
    pull = ((v[1] - v[0]) * (v[1] + v[0]) / 2).sum(dim=-1)[:, None, :]  # Σ_k Δv ∘ v, (heads, 1, n)
    predicted = pull - b * pull.sum(dim=-1, keepdim=True)
    moved = z[1] - z[0]
    moved = moved - moved.mean(dim=-1, keepdim=True)  # softmax does not see what all keys share
    predicted = predicted - predicted.mean(dim=-1, keepdim=True)
    match = cosine(moved, predicted)
    if match is None or math.isnan(match):
        return match
    return math.sqrt(1 - min(1.0, match) ** 2) if match > 0 else 1.0
