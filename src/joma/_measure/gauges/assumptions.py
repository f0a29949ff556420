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
from functools import cached_property

from torch import Tensor

from joma._measure.gauges.kernels import gram_matrix
from joma._measure.gauges.registry import gauge

PARTS = ("q", "k", "v", "o", "mlp_in")
QUERY_BIAS = "q_bias"  # b_Q, of blocks that have one
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class BlockMotion:
    """One block at the measurement before and now.

    Attributes:
        before, after: part -> matrix (out, in); q, k and v are (heads · d_h, d), o is
            (d, heads · d_h); "q_bias" is (heads · d_h), where there is one.
        states: (n, d) inputs of attention now, of n distinct tokens; None if they were not seen.
        heads: the number of query heads.
        earlier: mean gradient of the lower MLP matrix in the interval before the last; None if it
            is not known.
        halves: the same in the last interval, in its odd and in its even steps.
    """

    before: Weights = field(repr=False)
    after: Weights = field(repr=False)
    states: Tensor | None = field(default=None, repr=False)
    heads: int = 1
    earlier: Tensor | None = field(default=None, repr=False)
    halves: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    # Two gauges need both: computed once.

    @cached_property
    def logits_before(self) -> Tensor:
        """z (heads, n, n) with the weights before."""
        return self.logits(self.before)

    @cached_property
    def logits_after(self) -> Tensor:
        """z (heads, n, n) with the weights now."""
        return self.logits(self.after)

    def logits(self, weights: Weights) -> Tensor:
        """Return z (heads, n, n) of each token as a query to all of them."""
        states = self._wide_states
        q = states @ weights["q"].double().mT  # (n, heads · d_h)
        if QUERY_BIAS in weights:
            q = q + weights[QUERY_BIAS].double()
        q = self._split(q, q.shape[1] // self.heads)  # (heads, n, d_h)
        k = self._split(states @ weights["k"].double().mT, q.shape[-1])
        return q @ k.mT / math.sqrt(q.shape[-1])

    def seen(self, weights: Weights) -> Tensor:
        """Return v (heads, n, K): what each token's value adds to each hidden neuron."""
        return self._attended(weights) @ weights["mlp_in"].double().mT

    def squared_seen(self, weights: Weights) -> Tensor:
        """Return Σ_k v² (heads, n), without v.

        v = W a has the square aᵀ(WᵀW)a, and WᵀW (d, d) is smaller than v.
        1536 × 384, 6 heads, 64 tokens: 8 instead of 10 ms of processor time, WᵀW included.
        """
        # What is "after" now is "before" at the next measurement, but nothing is remembered until
        # then: a matrix may change without a trace (through ``.data``, say), and a wrong number
        # costs more than the product.
        gram = gram_matrix(weights["mlp_in"].double())  # (d, d)
        attended = self._attended(weights)
        return (attended @ gram).mul_(attended).sum(dim=-1)

    def _attended(self, weights: Weights) -> Tensor:
        """Return what the value of each token adds to the residual stream, (heads, n, d)."""
        width = weights["o"].shape[1] // self.heads
        values = self._split(self._wide_states @ weights["v"].double().mT, width)  # (heads, n, d_h)
        out = weights["o"].double().unflatten(1, (self.heads, width))  # (d, heads, d_h)
        return values @ out.permute(1, 2, 0)

    @property
    def _wide_states(self) -> Tensor:
        assert self.states is not None
        return self.states.double()

    def _split(self, rows: Tensor, width: int) -> Tensor:
        """Turn (n, heads · d_h) into (heads, n, d_h); repeat keys and values that heads share."""
        split = rows.unflatten(1, (-1, width)).transpose(0, 1)
        return split.repeat_interleave(self.heads // len(split), dim=0)


def share_missed(attention: Tensor, z: Tensor) -> float:
    """Return how much of the logits behind ``attention`` (…, keys) the logits ``z`` are not.

    That is the norm of the difference over the norm, as softmax sees both: centred over the keys of
    a query that have any attention.
    """
    is_seen = attention > 0
    expected = _centred(attention.double().where(is_seen, 1.0).log(), is_seen)
    missed = float((expected - _centred(z.double(), is_seen)).norm())
    size = float(expected.norm())
    if size > 0:
        return missed / size
    if missed > 0:
        return math.inf
    return 0.0


def _centred(x: Tensor, is_seen: Tensor) -> Tensor:
    count = is_seen.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = (x * is_seen).sum(dim=-1, keepdim=True) / count
    return (x - mean) * is_seen


def cosine(first: Tensor, second: Tensor) -> float | None:
    """Return the cosine of two tensors as vectors; None if one is zero, NaN if one is not finite."""
    first = first.double().flatten()
    second = second.double().flatten()
    size = float(first.norm() * second.norm())
    if size == 0:
        return None
    return float(first @ second) / size


@gauge("gradient_stationarity", on="block")
def gradient_stationarity(block: BlockMotion) -> float | None:
    """cos of the lower MLP's mean gradient E[g φ′ f] with that of the interval before: 1 is Assumption 1."""
    if block.earlier is None or block.halves is None:
        return None
    return cosine(block.earlier, block.halves[0] + block.halves[1])


@gauge("gradient_agreement", on="block")
def gradient_agreement(block: BlockMotion) -> float | None:
    """cos between that mean over the odd and the even steps of one interval: what noise leaves of stationarity."""
    if block.halves is None:
        return None
    return cosine(*block.halves)


@gauge("attention_drift", on="block")
def attention_drift(block: BlockMotion) -> float | None:
    """Share of the mean attention b̄ that moved elsewhere since the last measurement: 0 is Theorem 1's premise."""
    if block.states is None:
        return None
    before = block.logits_before.softmax(dim=-1)
    after = block.logits_after.softmax(dim=-1)
    return float((after - before).abs().sum(dim=-1).mean() / 2)


@gauge("eqn17_residual", on="block")
def eqn17_residual(block: BlockMotion) -> float | None:
    """Share of the logits' motion that Eqn. 17 misses with its best factor: 0 is all predicted, 1 nothing."""
    if block.states is None:
        return None
    b = (block.logits_before.softmax(dim=-1) + block.logits_after.softmax(dim=-1)) / 2
    # Σ_k Δv ∘ v with v halfway between both, (heads, 1, n)
    pull = (block.squared_seen(block.after) - block.squared_seen(block.before))[:, None, :] / 2
    predicted = pull - b * pull.sum(dim=-1, keepdim=True)
    moved = block.logits_after - block.logits_before
    # Softmax does not see what all keys share.
    moved = moved - moved.mean(dim=-1, keepdim=True)
    predicted = predicted - predicted.mean(dim=-1, keepdim=True)
    match = cosine(moved, predicted)
    if match is None or math.isnan(match):
        return match
    if match <= 0:
        return 1.0
    return math.sqrt(1 - min(1.0, match) ** 2)
