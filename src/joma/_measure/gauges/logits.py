"""The largest attention logit of each query, and the attention that each key receives.

Both come from one pass over tiles of scores that fit the cache (`joma._measure.gauges.scores`), so
that no attention matrix is made. A maximum is exact but for the rounding of a dot product, which is
bounded by (d + 4)·2⁻²⁴·|scale|·‖q‖·max‖k‖. Heads whose bounds are wider than 0.1 % of max(1, |max|)
are computed again in float64.

Other devices than the CPU take the same path. It was never run on a GPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from joma._measure.gauges.attention_inputs import checked_inputs, default_scale, visible_keys
from joma._measure.gauges.kernels import widened
from joma._measure.gauges.masks import Mask, hidden_scores, key_columns, lowest_seen
from joma._measure.gauges.scores import AttentionScores, part_of_head
from joma._measure.gauges.tiles import below

# Width of the bounds of a maximum, relative to max(1, |max|), above which it is computed again.
WIDEST_BOUNDS = 1e-3
# |score| above which float32 loses digits of a probability.
LARGE_SCORE = 60.0
# A key counts for `largest_share` if at least this share of the queries that see the key seen most
# see it too. Otherwise the last keys, which hardly any query sees, would be sinks.
OFTEN_SEEN = 0.5
# Mean attention above which a key is a sink, as in Gu et al., "When attention sink emerges" (2024).
SINK = 0.3


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds of a maximum: the exact number lies between ``lower`` and ``upper``, rounding included."""

    lower: Tensor
    upper: Tensor

    @property
    def value(self) -> Tensor:
        """The middle of both bounds; −inf or NaN where both are."""
        middle = (self.lower + self.upper) / 2
        # −inf − inf would be NaN
        return torch.where(self.lower == self.upper, self.upper, middle)

    def per_head(self) -> Bounds:
        """Return the largest over the queries: (B, H) from (B, H, Tq)."""
        return Bounds(self.lower.amax(dim=-1), self.upper.amax(dim=-1))

    def where(self, condition: Tensor, other: Bounds) -> Bounds:
        """Return these bounds where the condition holds, and others elsewhere."""
        lower = torch.where(condition, self.lower, other.lower)
        upper = torch.where(condition, self.upper, other.upper)
        return Bounds(lower, upper)


class Logits(ABC):
    """Scores that can be read more than once."""

    @property
    @abstractmethod
    def largest(self) -> Bounds:
        """The largest score (B, H, Tq) of each query over the keys that it sees; −inf if it sees none."""

    @abstractmethod
    def weights(self, rows: Tensor | None) -> Tensor:
        """Return 1 for queries that see a key and are real, and 0 for others, (B, H, Tq).

        ``rows``, broadcastable to that shape, is True for real queries. All are real by default.
        """

    @abstractmethod
    def mass(self, weights: Tensor) -> Tensor:
        """Return Σ of weights (B, H, Tq) times attention for each key, (B, H, Tk)."""

    @abstractmethod
    def seen_by(self, weights: Tensor) -> Tensor:
        """Return Σ of the weights (B, H, Tq) of the queries that see a key, (B, H, Tk)."""

    def received(self, rows: Tensor | None = None) -> Received:
        """Return what each key receives from the real queries."""
        return Received(self, self.weights(rows))


@dataclass(frozen=True, eq=False)
class Received:
    """Attention that each key receives, (B, H, Tk), from queries with weights (B, H, Tq)."""

    logits: Logits = field(repr=False)
    weights: Tensor = field(repr=False)  # 1 for real queries, 0 for others

    @cached_property
    def mass(self) -> Tensor:
        """Σ of p_ij over real queries."""
        return self.logits.mass(self.weights)

    @cached_property
    def seen_by(self) -> Tensor:
        """The number of real queries that see the key."""
        return self.logits.seen_by(self.weights)

    @property
    def share(self) -> Tensor:
        """The mean attention of the queries that see the key; NaN where none does."""
        return torch.where(self.seen_by > 0, self.mass / self.seen_by.clamp(min=1), math.nan)

    @property
    def largest_share(self) -> Tensor:
        """The largest share (B, H) of a key that is seen often; NaN where no key is seen."""
        most = self.seen_by.amax(dim=-1, keepdim=True)  # (B, H, 1)
        is_often_seen = (self.seen_by > 0) & (self.seen_by >= OFTEN_SEEN * most)
        largest = torch.where(is_often_seen, self.share, -math.inf).amax(dim=-1)
        return torch.where(most[..., 0] > 0, largest, math.nan)


@dataclass(frozen=True, eq=False)
class DotProductLogits(Logits):
    """Scores of queries (B, H, Tq, d) and keys (B, Hk, Tk, d).

    Attributes:
        query: (B, H, Tq, d).
        key: (B, Hk, Tk, d).
        mask: which keys a query sees, and biases.
        is_causal: True if query i sees keys 0 … i.
        scale: factor of the scores.
        softcap: limit of the scores, or None.
        learned_sinks: logits (H,) that take attention and are no keys.
        value: (B, Hk, Tk, dv), for its norms.
    """

    query: Tensor = field(repr=False)
    key: Tensor = field(repr=False)
    mask: Mask | None = field(repr=False)
    is_causal: bool
    scale: float
    softcap: float | None = None
    learned_sinks: Tensor | None = field(default=None, repr=False)
    value: Tensor | None = field(default=None, repr=False)

    @cached_property
    def largest(self) -> Bounds:
        is_wide = self.query.dtype == torch.float64
        largest, _ = self._in_tiles(None, is_wide)
        return self._bounded(largest, is_wide)

    def weights(self, rows: Tensor | None) -> Tensor:
        is_real = self._visible > 0
        if rows is not None:
            is_real = is_real & rows
        return is_real.to(torch.float32)

    def mass(self, weights: Tensor) -> Tensor:
        is_wide = self.query.dtype == torch.float64 or self._has_large_scores
        largest, mass = self._in_tiles(weights, is_wide)
        # The maxima come for free: a later `largest` need not go through the tiles once more.
        vars(self).setdefault("largest", self._bounded(largest, is_wide))
        return mass

    def seen_by(self, weights: Tensor) -> Tensor:
        B, H, Tq = self._shape
        Tk = self.key.shape[2]
        if self.is_causal:
            # The queries from j on see key j.
            later = weights.flip(-1).cumsum(dim=-1).flip(-1)  # (B, H, Tq)
            return functional.pad(later, (0, max(0, Tk - Tq)))[..., :Tk]
        if self.mask is None:
            return weights.sum(dim=-1, keepdim=True).expand(B, H, Tk)
        if self.mask.keep.shape[2] == 1:
            # All queries see the same keys.
            total = weights.sum(dim=-1, keepdim=True).expand(B, H, Tk)
            return total * self.mask.keep[:, :, 0]
        counts = torch.empty((B, H, Tk), device=weights.device)
        for b in range(B):
            for h in range(H):
                keep = part_of_head(self.mask.keep, b, h)  # (Tq, Tk)
                counts[b, h] = (keep.float() * weights[b, h, :, None]).sum(dim=0)
        return counts

    @cached_property
    def _scores(self) -> AttentionScores:
        additive = None
        if self.mask is not None:
            additive = self.mask.additive
        return AttentionScores(
            self.query, self.key, additive, self.is_causal, self.scale, self.softcap
        )

    @property
    def _shape(self) -> tuple[int, int, int]:
        B, H, Tq, _ = self.query.shape
        return B, H, Tq

    @cached_property
    def _visible(self) -> Tensor:
        Tq = self.query.shape[2]
        Tk = self.key.shape[2]
        visible = visible_keys(self.mask, self.is_causal, Tq, Tk, self.query.device)
        return visible.expand(self._shape)

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        """‖q‖ (B, H, Tq) and the largest ‖k‖ (B, H, 1) of each head."""
        group = self.query.shape[1] // self.key.shape[1]
        queries = widened(self.query).norm(dim=-1)
        keys = widened(self.key).norm(dim=-1).amax(dim=-1, keepdim=True)  # (B, Hk, 1)
        return queries, keys.repeat_interleave(group, dim=1)

    @property
    def _has_large_scores(self) -> bool:
        """True if scores may be so large that float32 loses digits of a probability."""
        queries, keys = self._norms
        largest = (queries.amax(dim=-1, keepdim=True) * keys).amax()
        return bool(largest * abs(self.scale) > LARGE_SCORE)

    def _bounded(self, largest: Tensor, is_wide: bool) -> Bounds:
        """Return bounds of maxima (B, H, Tq) from tiles; heads with wide bounds are computed again.

        ``is_wide`` is True if they were computed in float64.
        """
        bounds = self._with_rounding(largest, is_wide)
        head = bounds.per_head()
        is_coarse = head.upper - head.lower > WIDEST_BOUNDS * head.value.abs().clamp(
            min=1.0
        )  # (B, H)
        can_widen = not is_wide and widened(largest).dtype == torch.float64
        if can_widen and bool(is_coarse.any()):
            exact, _ = self._in_tiles(None, is_wide=True, heads=is_coarse.nonzero().tolist())
            bounds = self._with_rounding(exact, is_wide=True).where(is_coarse[..., None], bounds)
        nothing = torch.full_like(bounds.upper, -math.inf)
        return bounds.where(self._visible > 0, Bounds(nothing, nothing))

    def _with_rounding(self, largest: Tensor, is_wide: bool) -> Bounds:
        """Widen maxima (B, H, Tq) by the rounding of scores in float64 or float32."""
        queries, keys = self._norms
        unit = 2.0**-24
        if is_wide:
            unit = 2.0**-53
        d = self.query.shape[3]
        of_product = (d + 4) * unit * abs(self.scale) * queries * keys
        of_softcap = 4 * unit * (self.softcap or 0.0)
        of_result = unit * torch.where(largest.isfinite(), largest.abs(), 0.0)
        error = of_product + of_softcap + of_result
        return Bounds(largest - error, largest + error)

    def _in_tiles(
        self, weights: Tensor | None, is_wide: bool, heads: list[list[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the largest score of each query, and Σ of weights times attention for each key.

        Arguments:
            weights: (B, H, Tq); None if attention is not needed.
            is_wide: compute in float64.
            heads: (sample, head) of those to look at; all by default.

        Returns:
            (B, H, Tq) and (B, H, Tk).
        """
        B, H, Tq = self._shape
        Tk = self.key.shape[2]
        largest = widened(torch.full((B, H, Tq), -math.inf, device=self.query.device))
        mass = torch.zeros((B, H, Tk), device=self.query.device)
        if Tk == 0:
            return largest, mass
        for b, h in heads or self._scores.places():
            head = self._scores.head(b, h)
            head.cast(is_wide)
            learned = None
            if self.learned_sinks is not None:
                learned = self.learned_sinks[h].to(head.q.dtype)
            for rows, scores in head.tiles():
                top = scores.amax(dim=-1)  # (rows,)
                largest[b, h, rows] = top.to(largest.dtype)
                if weights is not None:
                    in_tile = mass[b, h, : scores.shape[1]]
                    _add_received(in_tile, scores, top, weights[b, h, rows], learned)
        return largest, mass


@dataclass(frozen=True, eq=False)
class EagerLogits(Logits):
    """Scores (B, H, Tq, columns) that eager attention made; one column may be a learned sink."""

    scores: Tensor = field(repr=False)
    learned_sink: int | None = None

    @cached_property
    def largest(self) -> Bounds:
        top = widened(self._largest_score)
        top = torch.where(top <= self._lowest, -math.inf, top)
        return Bounds(top, top)  # exact: the scores are those of the model

    def weights(self, rows: Tensor | None) -> Tensor:
        # NaN is not masked: it has to show.
        is_real = ~(self._largest_score <= self._lowest)
        if rows is not None:
            is_real = is_real & rows
        return is_real.to(torch.float32)

    def mass(self, weights: Tensor) -> Tensor:
        B, H, _, columns = self.scores.shape
        mass = torch.zeros((B, H, columns), device=self.scores.device)
        for b, h in product(range(B), range(H)):
            scores = self.scores[b, h]  # (Tq, columns)
            if scores.dtype not in (torch.float32, torch.float64):
                scores = scores.float()
            _add_received(mass[b, h], scores, scores.amax(dim=-1), weights[b, h], None)
        return mass[..., self._keys]

    def seen_by(self, weights: Tensor) -> Tensor:
        B, H, _, columns = self.scores.shape
        counts = torch.empty((B, H, columns), device=self.scores.device)
        for b, h in product(range(B), range(H)):
            scores = self.scores[b, h]  # (Tq, columns)
            is_hidden = hidden_scores(scores, scores.amax(dim=-1, keepdim=True), self._lowest)
            counts[b, h] = weights[b, h] @ (~is_hidden).float()
        return counts[..., self._keys]

    @property
    def _keys(self) -> slice:
        return key_columns(self.learned_sink)

    @property
    def _largest_score(self) -> Tensor:
        """(B, H, Tq), masked keys included."""
        return self.scores[..., self._keys].amax(dim=-1)

    @property
    def _lowest(self) -> float:
        """Scores up to this are masked."""
        return lowest_seen(self.scores.dtype)


def _add_received(
    mass: Tensor, scores: Tensor, top: Tensor, weights: Tensor, learned: Tensor | None
) -> None:
    """Add Σ weights · softmax of rows of scores (rows, keys) to mass (keys,).

    ``top`` (rows,) is the largest score of each row, and ``learned`` the logit of a learned sink.
    """
    if learned is not None:
        top = torch.maximum(top, learned)
    top = torch.where(top == -math.inf, 0.0, top)
    exponentials = below(scores, top, scores.dtype).exp_()  # (rows, keys)
    total = exponentials.sum(dim=-1)
    if learned is not None:
        total = total + (learned - top).exp()
    # A row that sees nothing has no weight.
    factors = torch.where(weights > 0, weights / total, 0.0).to(exponentials.dtype)
    mass += (factors @ exponentials).to(mass.dtype)


def logits_of(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> DotProductLogits:
    """Return the scores of ``scaled_dot_product_attention`` with these arguments."""
    q, k, mask = checked_inputs(q, k, attn_mask, is_causal, enable_gqa)
    return DotProductLogits(q, k, mask, is_causal, default_scale(scale, q.shape[-1]), softcap)


def max_logit(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
) -> Bounds:
    """Return the largest score of each head of ``scaled_dot_product_attention(q, k, …)``, with bounds.

    For QK-clip and similar methods. Scores are those of the softmax: after scaling, soft-capping and
    the mask's bias.

    Arguments:
        q, k, attn_mask, is_causal, scale, enable_gqa, softcap: as of `attention_stats`.

    Returns:
        ``lower`` and ``upper``, (B, H) each: the exact maximum lies between them, at most 0.1 % of
        max(1, |max|) apart; ``value`` is their middle. −inf for a head that sees no key.
    """
    return logits_of(q, k, attn_mask, is_causal, scale, enable_gqa, softcap).largest.per_head()


def attention_received(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    rows: Tensor | None = None,
) -> Received:
    """Return the attention that each key of ``scaled_dot_product_attention(q, k, …)`` receives.

    Memory is O(T).

    Arguments:
        q, k, attn_mask, is_causal, scale, enable_gqa, softcap: as of `attention_stats`.
        rows: which queries are real, broadcastable to (B, H, Tq); all by default.

    Returns:
        ``mass``, Σ_i p_ij over real queries; ``seen_by``, how many of them see the key; ``share``,
        their quotient, (B, H, Tk) each; and ``largest_share`` (B, H) over keys that are seen often.
    """
    return logits_of(q, k, attn_mask, is_causal, scale, enable_gqa, softcap).received(rows)
