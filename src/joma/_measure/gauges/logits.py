"""The largest attention logit of each query, and the attention that each key receives, without an attention matrix.

On a CPU both come from one pass over tiles of scores that fit the cache (`joma._measure.gauges.tiles`): the maximum
is exact
but for the rounding of a dot product, of which the certificate tells. On CUDA the maximum comes from one call of the
fused kernel at a large inverse temperature β: of n keys,

    lse_β/β − ln n/β  ≤  max  ≤  lse_β/β        with lse_β = ln Σ_j exp(β s_j),

both sides widened by the rounding bound (d + 4)·2⁻²⁴·|scale|·‖q‖·max‖k‖. β is a power of two, which costs no digits.
Heads whose certificate is wider than 0.1 % of max(1, |max|) are computed again in float64.

The attention that key j receives, Σ_i w_i p_ij over queries with weights w, is column j of the gradient of
Σ_i w_i·out_i by the values: on CUDA, the vector–Jacobian product of the fused kernel.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from joma._measure.gauges.attention import checked_inputs, default_scale, visible_keys
from joma._measure.gauges.kernels import fused_attention, groups, key_heads, part_of, widened
from joma._measure.gauges.masks import Mask, hidden_scores, key_columns, lowest_seen
from joma._measure.gauges.tiles import below, tiles

_SHARP = 2.0**16  # β: ln n/β is 2e-4 at a million keys; 2¹³ would leave 1e-3 at 3,600
_WIDTH = 1e-3  # the widest certificate, relative to max(1, |max|), that is not computed again
_OFTEN = 0.5  # of the queries that see the key seen most: keys that fewer see (the last ones) make no sinks
SINK = 0.3  # the share from which a key is called a sink, as in Gu et al., "When attention sink emerges" (2024)


@dataclass(frozen=True, eq=False)
class Bounds:
    """A maximum and its certificate: the exact number lies between ``lower`` and ``upper``, rounding included."""

    lower: Tensor
    upper: Tensor

    @property
    def value(self) -> Tensor:
        """The middle of both; where both are −inf, or not a number, so is this."""
        return torch.where(self.lower == self.upper, self.upper, (self.lower + self.upper) / 2)

    def per_head(self) -> Bounds:
        """Of each head (B, H): the largest over the queries (B, H, Tq)."""
        return Bounds(self.lower.amax(dim=-1), self.upper.amax(dim=-1))


class Logits(ABC):
    """Scores that can be looked through again."""

    @property
    @abstractmethod
    def largest(self) -> Bounds:
        """Of each query, (B, H, Tq), over the keys that it sees; −inf if it sees none."""

    @abstractmethod
    def weights(self, rows: Tensor | None) -> Tensor:
        """(B, H, Tq): 1 for queries that see a key and are real (in ``rows``, broadcastable to this), 0 for others."""

    @abstractmethod
    def mass(self, weights: Tensor) -> Tensor:
        """Σ of weights (B, H, Tq) times attention, by key (B, H, Tk)."""

    @abstractmethod
    def seen_by(self, weights: Tensor) -> Tensor:
        """Σ of the weights (B, H, Tq) of the queries that see a key, (B, H, Tk)."""

    def received(self, rows: Tensor | None = None) -> Received:
        """What each key receives from the real queries, which ``rows`` (broadcastable to (B, H, Tq)) are."""
        return Received(self, self.weights(rows))


@dataclass(frozen=True, eq=False)
class Received:
    """Attention by key, (B, H, Tk) each, from queries with weights (B, H, Tq): 1 for real ones, 0 for others."""

    logits: Logits = field(repr=False)
    weights: Tensor = field(repr=False)

    @cached_property
    def mass(self) -> Tensor:
        """Σ of p_ij over real queries."""
        return self.logits.mass(self.weights)

    @cached_property
    def seen_by(self) -> Tensor:
        """How many real queries see the key."""
        return self.logits.seen_by(self.weights)

    @property
    def share(self) -> Tensor:
        """The mean attention of the queries that see the key; NaN where none does."""
        return torch.where(self.seen_by > 0, self.mass / self.seen_by.clamp(min=1), math.nan)

    @property
    def largest_share(self) -> Tensor:
        """(B, H): over keys seen by at least half as many queries as the key seen most; NaN where there is none."""
        most = self.seen_by.amax(dim=-1, keepdim=True)
        often = (self.seen_by > 0) & (self.seen_by >= _OFTEN * most)
        largest = torch.where(often, self.share, -math.inf).amax(dim=-1)
        return torch.where(most[..., 0] > 0, largest, math.nan)


@dataclass(frozen=True, eq=False)
class DotProductLogits(Logits):
    """Scores of queries (B, H, Tq, d) and keys (B, Hk, Tk, d); and the values (B, Hk, Tk, dv), for their norms."""

    query: Tensor = field(repr=False)
    key: Tensor = field(repr=False)
    mask: Mask | None = field(repr=False)
    is_causal: bool
    scale: float
    softcap: float | None = None
    learned_sinks: Tensor | None = field(
        default=None, repr=False
    )  # logits (H,): they take attention, and are no keys
    value: Tensor | None = field(default=None, repr=False)

    @cached_property
    def largest(self) -> Bounds:
        """Of each query, (B, H, Tq), over the keys that it sees."""
        if self._kernel_can:
            return self._bounded(self._largest_fused(), wide=False)
        wide = self.query.dtype == torch.float64
        return self._bounded(self._in_tiles(None, wide)[0], wide)

    def weights(self, rows: Tensor | None) -> Tensor:
        """(B, H, Tq): 1 for queries that see a key and are real, 0 for others."""
        seen = self._visible > 0
        return (seen if rows is None else seen & rows).to(torch.float32)

    def mass(self, weights: Tensor) -> Tensor:
        """Σ of weights times attention, by key; on the way through tiles, the largest logits are found too."""
        if self._kernel_can:
            return self._received_fused(weights)
        wide = self.query.dtype == torch.float64 or self._is_large
        largest, mass = self._in_tiles(weights, wide)
        vars(self).setdefault("largest", self._bounded(largest, wide))
        return mass

    @property
    def _shape(self) -> tuple[int, int, int]:
        B, H, Tq, _ = self.query.shape
        return B, H, Tq

    @property
    def _kernel_can(self) -> bool:
        plain = (
            self.softcap is None
            and (self.mask is None or not self.mask.biased)
            and self.learned_sinks is None
        )
        return plain and self.query.device.type == "cuda"

    @cached_property
    def _visible(self) -> Tensor:
        Tq, Tk = self.query.shape[2], self.key.shape[2]
        return visible_keys(self.mask, self.is_causal, Tq, Tk, self.query.device).expand(
            self._shape
        )

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        """‖q‖ (B, H, Tq) and the largest ‖k‖ (B, H, 1) of each head."""
        H, Hk = self.query.shape[1], self.key.shape[1]
        keys = widened(self.key).norm(dim=-1).amax(dim=-1, keepdim=True)
        return widened(self.query).norm(dim=-1), keys.repeat_interleave(H // Hk, dim=1)

    @property
    def _is_large(self) -> bool:
        """May scores be so large that float32 loses digits of a probability?"""
        queries, keys = self._norms
        return bool((queries.amax(dim=-1, keepdim=True) * keys).amax() * abs(self.scale) > 60.0)

    # The largest logit

    def _bounded(self, largest: Tensor, wide: bool) -> Bounds:
        """Bounds from values (B, H, Tq), or from a lower and an upper one of each; too wide ones are computed again.

        ``wide``: they were computed in float64.
        """
        bounds = self._widened(largest, wide)
        head = bounds.per_head()
        coarse = head.upper - head.lower > _WIDTH * head.value.abs().clamp(min=1.0)  # (B, H)
        if not wide and bool(coarse.any()) and widened(largest).dtype == torch.float64:
            chosen = coarse.nonzero().tolist()
            again = self._widened(self._in_tiles(None, wide=True, heads=chosen)[0], wide=True)
            bounds = Bounds(*(torch.where(coarse[..., None], new, old) for new, old in
                              zip((again.lower, again.upper), (bounds.lower, bounds.upper), strict=True)))  # fmt: skip
        seen = self._visible > 0
        return Bounds(*(torch.where(seen, x, -math.inf) for x in (bounds.lower, bounds.upper)))

    def _widened(self, largest: Tensor, wide: bool) -> Bounds:
        """The rounding of scores that were computed in float64 or float32."""
        queries, keys = self._norms
        lower, upper = largest if largest.dim() == 4 else (largest, largest)
        unit = 2.0**-53 if wide else 2.0**-24
        d = self.query.shape[3]
        error = (d + 4) * unit * abs(self.scale) * queries * keys
        error = (
            error
            + 4 * unit * (self.softcap or 0.0)
            + unit * torch.where(upper.isfinite(), upper.abs(), 0.0)
        )
        return Bounds(lower - error, upper + error)

    def _largest_fused(self) -> Tensor:
        """(2, B, H, Tq): a lower and an upper bound, rounding apart, through one fused call per group of heads."""
        B, H, Tq = self._shape
        Tk, d = self.key.shape[2:]
        out = torch.empty((2, B, H, Tq), dtype=torch.float64, device=self.query.device)
        additive = None if self.mask is None else self.mask.additive.float()
        for b, heads in groups(B, H, max(Tq, Tk) * d):
            q, k = (
                self.query[b, heads].float(),
                self.key[b, key_heads(heads, H, self.key.shape[1])].float(),
            )
            sharp = fused_attention(
                q, k, part_of(additive, b, heads), self.is_causal, self.scale * _SHARP
            )[1]
            out[1, b, heads] = sharp.double() / _SHARP
        out[0] = out[1] - self._visible.clamp(min=1).log() / _SHARP
        return out

    # Tiles

    def _in_tiles(
        self, weights: Tensor | None, wide: bool, heads: list[list[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The largest score of each query (B, H, Tq), and Σ of weights (B, H, Tq) times attention by key (B, H, Tk).

        Arguments:
            weights: None if attention is not asked for.
            wide: compute in float64.
            heads: (sample, head) of those to look at; all by default.
        """
        B, H, Tq = self._shape
        Tk = self.key.shape[2]
        largest = widened(torch.full((B, H, Tq), -math.inf, device=self.query.device))
        mass = torch.zeros((B, H, Tk), device=self.query.device)
        if Tk == 0:
            return largest, mass
        additive = None if self.mask is None else self.mask.additive
        for b, h in heads or [[b, h] for b in range(B) for h in range(H)]:
            q, k = self.query[b, h], self.key[b, h // (H // self.key.shape[1])]
            q, k = (widened(q), widened(k)) if wide else (q.float(), k.float())
            added = part_of(additive, slice(b, b + 1), slice(h, h + 1))
            bias = None if added is None else added[0, 0]
            learned = None if self.learned_sinks is None else self.learned_sinks[h].to(q.dtype)
            for rows, s in tiles(q, k, bias, self.is_causal, self.scale, self.softcap):
                top = s.amax(dim=-1)
                largest[b, h, rows] = top.to(largest.dtype)
                if weights is not None:
                    _add_received(mass[b, h, : s.shape[1]], s, top, weights[b, h, rows], learned)
        return largest, mass

    # Attention received

    def _received_fused(self, weights: Tensor) -> Tensor:
        """Σ of weights (B, H, Tq) times attention, by key (B, H, Tk): a vector–Jacobian product of the fused kernel."""
        B, H, Tq = self._shape
        Tk, d = self.key.shape[2:]
        mass = torch.empty((B, H, Tk), device=self.query.device)
        mask = None if self.mask is None else self.mask.additive.float()
        for b, heads in groups(B, H, max(Tq, Tk) * d):
            q, k = (
                self.query[b, heads].float(),
                self.key[b, key_heads(heads, H, self.key.shape[1])].float(),
            )
            k = k - k.mean(
                dim=2, keepdim=True
            )  # softmax does not see a common offset, float32 does
            with torch.enable_grad():
                values = torch.zeros_like(k, requires_grad=True)
                out = functional.scaled_dot_product_attention(
                    q * math.copysign(1.0, self.scale),
                    k,
                    values,
                    part_of(mask, b, heads),
                    is_causal=self.is_causal,
                    scale=abs(self.scale),
                )
                given = weights[b, heads, :, None].expand_as(out).contiguous()
                (gradient,) = torch.autograd.grad(out, values, given)
            mass[b, heads] = gradient[..., 0]
        return mass

    def seen_by(self, weights: Tensor) -> Tensor:
        """Σ of the weights of the queries that see a key, (B, H, Tk)."""
        B, H, Tq = self._shape
        Tk = self.key.shape[2]
        if self.is_causal:  # key j is seen by the queries from j on
            later = weights.flip(-1).cumsum(dim=-1).flip(-1)
            return functional.pad(later, (0, max(0, Tk - Tq)))[..., :Tk]
        if self.mask is None or self.mask.keep.shape[2] == 1:
            counted = weights.sum(dim=-1, keepdim=True).expand(B, H, Tk)
            return counted if self.mask is None else counted * self.mask.keep[:, :, 0]
        seen = torch.empty((B, H, Tk), device=weights.device)
        for b in range(B):
            for h in range(H):
                keep = part_of(self.mask.keep, slice(b, b + 1), slice(h, h + 1))
                assert keep is not None
                seen[b, h] = (keep[0, 0].float() * weights[b, h, :, None]).sum(dim=0)
        return seen


@dataclass(frozen=True, eq=False)
class EagerLogits(Logits):
    """Scores (B, H, Tq, columns) that eager attention made, and their softmax; a learned sink may be a column."""

    scores: Tensor = field(repr=False)
    learned_sink: int | None = None

    @property
    def _keys(self) -> slice:
        return key_columns(self.learned_sink)

    @cached_property
    def largest(self) -> Bounds:
        """Of each query, (B, H, Tq), over the keys that it sees: exact, for the scores are there."""
        top = widened(self.scores[..., self._keys].amax(dim=-1))
        top = torch.where(top <= self._lowest, -math.inf, top)
        return Bounds(top, top)

    @property
    def _lowest(self) -> float:
        """What is not above this is masked; what is not a number is not."""
        return lowest_seen(self.scores.dtype)

    def weights(self, rows: Tensor | None) -> Tensor:
        """(B, H, Tq): 1 for queries that see a key and are real, 0 for others."""
        seen = ~(self.scores[..., self._keys].amax(dim=-1) <= self._lowest)
        return (seen if rows is None else seen & rows).to(torch.float32)

    def mass(self, weights: Tensor) -> Tensor:
        """Σ of weights times attention, by key (B, H, Tk)."""
        B, H, _, columns = self.scores.shape
        mass = torch.zeros((B, H, columns), device=self.scores.device)
        for b in range(B):
            for h in range(H):
                s = self.scores[b, h]
                s = s if s.dtype in (torch.float32, torch.float64) else s.float()
                _add_received(mass[b, h], s, s.amax(dim=-1), weights[b, h], None)
        return mass[..., self._keys]

    def seen_by(self, weights: Tensor) -> Tensor:
        """Σ of the weights of the queries that see a key, (B, H, Tk)."""
        B, H, _, columns = self.scores.shape
        counted = torch.empty((B, H, columns), device=self.scores.device)
        for b in range(B):
            for h in range(H):
                scores = self.scores[b, h]  # (Tq, columns)
                hidden = hidden_scores(scores, scores.amax(dim=-1, keepdim=True), self._lowest)
                counted[b, h] = weights[b, h] @ (~hidden).float()
        return counted[..., self._keys]


def _add_received(
    mass: Tensor, s: Tensor, top: Tensor, weights: Tensor, learned: Tensor | None
) -> None:
    """Add Σ weights · softmax of rows s (rows, keys) to mass (keys,); ``top`` is their maximum."""
    if learned is not None:
        top = torch.maximum(top, learned)
    top = torch.where(top == -math.inf, 0.0, top)
    e = below(s, top, s.dtype).exp_()
    total = e.sum(dim=-1)
    if learned is not None:
        total = total + (learned - top).exp()
    # a row that sees nothing has no weight
    mass += (torch.where(weights > 0, weights / total, 0.0).to(e.dtype) @ e).to(mass.dtype)


def logits_of(
    q: Tensor, k: Tensor, attn_mask: Tensor | Mask | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, softcap: float | None = None,
) -> DotProductLogits:  # fmt: skip
    """The scores of ``scaled_dot_product_attention`` with these arguments; a mask may come as a `Mask`."""
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
    """The largest score of each head of ``scaled_dot_product_attention(q, k, …)``, with a certificate.

    For QK-clip and its like. Scores are those of the softmax: after scaling, soft-capping and the mask's bias.

    Arguments:
        q, k, attn_mask, is_causal, scale, enable_gqa, softcap: as of `attention_stats`.

    Returns:
        ``lower`` and ``upper``, (B, H) each: the exact maximum lies between them, at most 0.1 % of max(1, |max|) apart;
        ``value`` is their middle. −inf for a head that sees no key.
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
    """The attention that each key of ``scaled_dot_product_attention(q, k, …)`` receives, in O(T) memory.

    Arguments:
        q, k, attn_mask, is_causal, scale, enable_gqa, softcap: as of `attention_stats`.
        rows: which queries are real, broadcastable to (B, H, Tq); all by default.

    Returns:
        ``mass``, Σ_i p_ij over real queries; ``seen_by``, how many of them see the key; ``share``, their quotient, (B,
        H, Tk) each; and ``largest_share`` (B, H) over keys that are seen often.
    """
    return logits_of(q, k, attn_mask, is_causal, scale, enable_gqa, softcap).received(rows)
