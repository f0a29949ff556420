"""Exact attention statistics without an attention matrix.

For scores s_ij = scale · q_i·k_j and p = softmax(s), the entropy of row i is logsumexp_i − Σ_j p_ij s_ij, and
Σ_j p_ij s_ij = scale · q_i · (Σ_j p_ij k_j): one fused attention call with the keys in the place of the values. The
mass on one key is exp(s_ij − logsumexp_i). Memory is O(T).

Four things keep it exact. The first key of a document, on which attention may rest nearly all its weight, is left out
of that call and put back by its score: what is next to such a sink then has all its digits. Keys are centred first,
since softmax does not see a common offset and float32 does. Everything is accumulated in float32 whatever the input
type, since the kernels round Σ p k to it. Heads whose scores are so large that the difference of two large numbers
loses digits are multiplied in float64 (`joma._measure.gauges.tiles`).

What the kernels cannot do (finite biases, soft-capping, other devices) goes through the same tiles of scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._measure.gauges.kernels import (
    fused_attention,
    groups,
    has_kernel,
    key_heads,
    part_of,
    widened,
)
from joma._measure.gauges.masks import Mask, lowest_seen
from joma._measure.gauges.tiles import combined, stats_of_scores, stats_of_softmax

if TYPE_CHECKING:
    from joma._measure.gauges.logits import Logits

# |logsumexp| of centred scores above which float32 may miss the entropy by more than about 1e-5 nats
_LARGE = 60.0
# queries of each head by which it is guessed whether its scores are large
_GUESS = 16


@dataclass(frozen=True, eq=False)
class AttentionStats:
    """Statistics of each query's attention, (B, H, Tq) each, in nats where that applies.

    Rows that see no key have entropy 0 and are left out of ``mean``.
    """

    entropy: Tensor
    logsumexp: Tensor = field(repr=False)  # −inf for a row that sees no key
    sink_mass: Tensor = field(
        repr=False
    )  # attention on sinks: the first key of the document, and a learned sink
    visible: Tensor = field(repr=False)  # how many keys a query sees, broadcastable to the others
    nonsink_entropy: Tensor = field(
        repr=False
    )  # of what is not on sinks; 0 where there is nothing else
    logits: Logits | None = field(
        default=None, repr=False
    )  # the scores, where they can be looked through again

    @property
    def effective_tokens(self) -> Tensor:
        """exp(entropy): over how many keys attention is spread."""
        return self.entropy.exp()

    @property
    def normalised_entropy(self) -> Tensor:
        """Entropy over that of uniform attention to the visible keys; NaN where fewer than two are visible."""
        largest = self.visible.clamp(min=1).log()
        return torch.where(self.visible > 1, self.entropy / largest.clamp(min=1e-30), math.nan)

    @property
    def max_logit(self) -> Tensor:
        """The largest score of each query, after scaling, soft-capping and bias; −inf for one that sees no key."""
        if self.logits is None:
            raise ValueError(
                "these statistics were made without their scores, which the largest logit needs"
            )
        return self.logits.largest.value

    def mean(self, values: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Mean of ``values`` (the entropy by default) over the real queries, (H,); NaN where there are none.

        Real queries see at least one key and, with ``rows`` (broadcastable to (B, H, Tq), True for real), are not
        padding. Where a value is not defined (NaN though the entropy is a number), the query is left out.
        """
        total, count = self.total(self.entropy if values is None else values, rows)
        return torch.where(count > 0, total / count.clamp(min=1), math.nan).float()

    def total(self, values: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum of ``values`` over the real queries and their number, (H,) each, in the widest type of the device."""
        real = self.is_real(values, rows)
        return widened(torch.where(real, values, 0.0)).sum(dim=(0, 2)), widened(
            real.sum(dim=(0, 2))
        )

    def largest(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """Largest of ``values`` over the real queries, (H,); −inf where there are none."""
        low = torch.where(self.is_real(values, rows), values, -math.inf)
        return (
            widened(low).amax(dim=(0, 2))
            if low.numel()
            else widened(low.new_full(low.shape[1:2], -math.inf))
        )

    def is_real(self, values: Tensor, rows: Tensor | None) -> Tensor:
        """Which of the values count: of queries that see a key, are not padding, and where the value is defined."""
        real = (self.visible > 0).expand_as(values) & ~(values.isnan() & ~self.entropy.isnan())
        return real if rows is None else real & rows


def attention_stats(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> AttentionStats:
    """Statistics of ``scaled_dot_product_attention(q, k, …)``, whose arguments these are.

    Arguments:
        q: (B, H, Tq, d), or with fewer leading dimensions.
        k: (B, Hk, Tk, d), likewise.
        attn_mask: boolean (True takes part) or an additive float bias, broadcastable to (B, H, Tq, Tk).
        is_causal: query i sees keys 0 … i (aligned top left, also for Tq ≠ Tk).
        scale: of the scores, 1/√d by default.
        enable_gqa: H may be a multiple of Hk; without it, Hk is H, or 1 for keys that all heads share.
        softcap: scores become softcap · tanh(score / softcap) before masking (Gemma 2).
        cu_seqlens: of packed documents, without a mask: q is (tokens, H, d), k (tokens, Hk, d), and document n has the
            tokens from cu_seqlens[n] to cu_seqlens[n + 1], as in ``flash_attn_varlen_func``. Statistics are those of
            each document alone, (1, H, tokens). Nested tensors (B, H, jagged, d) are packed documents, too.

    Returns:
        Entropy, logsumexp and sink mass of each query, (B, H, Tq) each; no (Tq, Tk) matrix is made.
    """
    if q.is_nested or k.is_nested:
        if cu_seqlens is not None:
            raise ValueError(
                "give nested tensors or cu_seqlens, not both: nested tensors have their own"
            )
        q, k, cu_seqlens = _unnested(q, k)
    if cu_seqlens is not None:
        if attn_mask is not None:
            raise ValueError(
                "give attn_mask or cu_seqlens, not both: packed documents see their own tokens only"
            )
        return _packed(q, k, cu_seqlens, is_causal, scale, enable_gqa, softcap)
    return stats_with_mask(q, k, attn_mask, is_causal, scale, enable_gqa, softcap=softcap)


def _unnested(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nested q (B, H, jagged, d) and k (B, Hk, jagged, d) as packed documents, and where these begin and end."""
    if not (
        q.is_nested
        and k.is_nested
        and q.layout == k.layout == torch.jagged
        and q.dim() == k.dim() == 4
    ):
        raise ValueError(
            "nested q and k must both be (B, heads, jagged, d) in the layout torch.jagged"
        )
    by_token: list[Any] = [x.detach().transpose(1, 2) for x in (q, k)]  # (B, jagged, heads, d)
    bounds, of_keys = (x.offsets() for x in by_token)
    if not torch.equal(bounds, of_keys):
        raise ValueError(
            "nested q and k must have the same lengths: documents that attend to themselves"
        )
    return by_token[0].values(), by_token[1].values(), bounds


def _packed(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool,
    softcap: float | None,
) -> AttentionStats:  # fmt: skip
    """Statistics (1, H, tokens) of documents one after the other, q (tokens, H, d) and k (tokens, Hk, d)."""
    bounds = [int(n) for n in cu_seqlens]
    if q.dim() != 3 or k.dim() != 3 or len(q) != len(k):
        raise ValueError(
            f"packed q and k are (tokens, heads, d); got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(q) or sorted(bounds) != bounds:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {len(q)}; got {bounds}"
        )
    documents = [
        stats_with_mask(
            q[None, start:stop].transpose(1, 2), k[None, start:stop].transpose(1, 2), None, is_causal, scale,
            enable_gqa, softcap,
        )
        for start, stop in pairwise(bounds) if stop > start
    ]  # fmt: skip
    if not documents:
        return stats_with_mask(
            q[None].transpose(1, 2), k[None].transpose(1, 2), enable_gqa=enable_gqa
        )

    def joined(name: str) -> Tensor:
        return torch.cat(
            [getattr(stats, name).expand_as(stats.entropy) for stats in documents], dim=-1
        )

    of_all = {
        name: joined(name)
        for name in ("entropy", "logsumexp", "sink_mass", "visible", "nonsink_entropy")
    }
    return AttentionStats(**of_all, logits=None)


def stats_with_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | Mask | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, softcap: float | None = None,
) -> AttentionStats:  # fmt: skip
    """`attention_stats`; a mask that many layers share may come as a `Mask`, so that it is looked at once."""
    q, k, mask = checked_inputs(q, k, attn_mask, is_causal, enable_gqa)
    B, H, Tq, d = q.shape
    Tk = k.shape[2]
    scale = default_scale(scale, d)
    visible = visible_keys(mask, is_causal, Tq, Tk, q.device)
    shape = (B, H, Tq)
    if q.numel() == 0 or Tk == 0:
        zero = torch.zeros(shape, device=q.device)
        return AttentionStats(
            zero, torch.full(shape, -math.inf, device=q.device), zero, visible.expand(shape), zero
        )
    out = torch.empty((4, *shape), dtype=torch.float32, device=q.device)
    fused = (mask is None or not mask.biased) and softcap is None and has_kernel(q.device)
    additive = None if mask is None else mask.additive
    sink = None if mask is None else mask.sink
    for b, heads in groups(B, H, max(Tq, Tk) * d):
        keys = k[b, key_heads(heads, H, k.shape[1])]
        work = _Work(
            q[b, heads],
            keys,
            part_of(additive, b, heads),
            is_causal,
            scale,
            softcap,
            part_of(sink, b, heads),
        )
        if fused:
            out[:, b, heads] = work.fused(None if mask is None else _Others.of(mask, b, heads))
        else:
            out[:, b, heads] = work.in_tiles(wide=work.guess())
    return _finish(out, visible, shape)


def attention_stats_from_scores(
    scores: Tensor, *, is_probability: bool = False, probabilities: Tensor | None = None,
    learned_sink: int | None = None,
) -> AttentionStats:  # fmt: skip
    """The same statistics from the scores (B, H, Tq, Tk) or the probabilities that eager attention computes.

    Entries of −inf, large finite masks (−1e9, −65504, −1e4) and the type's lowest numbers count as masked; so do
    probabilities of 0 (a key with exactly no attention cannot be told from a masked one).

    Arguments:
        scores: (B, H, Tq, Tk), or with fewer leading dimensions.
        is_probability: they are probabilities, after the softmax.
        probabilities: the softmax of the scores, if it is there: that saves the exponentials.
        learned_sink: the first or last column, if it is no key but a sink that the model has learnt (GPT-OSS).

    Returns:
        Entropy, logsumexp and sink mass of each query, (B, H, Tq) each.
    """
    if scores.dim() < 2:
        raise ValueError(f"scores must be (…, Tq, Tk), got shape {tuple(scores.shape)}")
    columns = scores.shape[-1]
    if learned_sink not in (None, 0, columns - 1, -1):
        raise ValueError(
            f"a learned sink is the first or the last of {columns} columns, not {learned_sink}"
        )
    lowest = -math.inf if is_probability else lowest_seen(scores.dtype)
    if is_probability:
        scores, probabilities = (
            (scores if scores.dtype == torch.float64 else scores.float()).log(),
            scores,
        )
    scores = scores.detach()[(None,) * max(0, 4 - scores.dim())].flatten(0, -4)
    B, H, Tq, _ = scores.shape
    if scores.numel() == 0:
        zero = torch.zeros(B, H, Tq, device=scores.device)
        return AttentionStats(zero, torch.full_like(zero, -math.inf), zero, zero.long(), zero)
    flat = scores.flatten(0, 1)  # (N, Tq, columns)
    softmax = None if probabilities is None else probabilities.detach().reshape(flat.shape)
    learned = None if learned_sink is None else learned_sink % columns
    out, visible = stats_of_softmax(flat, softmax, lowest, learned)
    return _finish(out.unflatten(1, (B, H)).float(), visible.unflatten(0, (B, H)), (B, H, Tq))


def _finish(out: Tensor, visible: Tensor, shape: tuple[int, ...]) -> AttentionStats:
    """Clamp to what is possible, and settle rows that see nothing by the mask and not by the kernel's answer."""
    seen = visible > 0
    mass = torch.where(seen, out[2].clamp(0.0, 1.0), 0.0)
    others = visible - (mass > 0).long()  # a window may not reach the sink
    entropy, nonsink = (
        torch.minimum(x.clamp(min=0.0), n.clamp(min=1).log())
        for x, n in ((out[0], visible), (out[3], others))
    )
    return AttentionStats(
        torch.where(seen, entropy, 0.0), torch.where(seen, out[1], -math.inf), mass, visible.expand(shape),
        torch.where(seen, nonsink, 0.0),
    )  # fmt: skip


def checked_inputs(
    q: Tensor, k: Tensor, attn_mask: Tensor | Mask | None, is_causal: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Mask | None]:
    """q and k with four dimensions, and what the mask says."""
    if q.dim() < 2 or k.dim() != q.dim() or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q must be (…, Tq, d) and k (…, Tk, d) with the same d; got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if is_causal and attn_mask is not None:
        raise ValueError(
            "give attn_mask or is_causal, not both (as in scaled_dot_product_attention)"
        )
    lead = (None,) * max(0, 4 - q.dim())
    q, k = q.detach()[lead].flatten(0, -4), k.detach()[lead].flatten(0, -4)
    H, Hk = q.shape[1], k.shape[1]
    if k.shape[0] == 1 and q.shape[0] > 1:
        k = k.expand(q.shape[0], -1, -1, -1)
    if q.shape[0] != k.shape[0] or (Hk not in (H, 1) and not (enable_gqa and Hk and H % Hk == 0)):
        hint = "" if enable_gqa else "; grouped-query heads need enable_gqa=True"
        raise ValueError(
            f"batch and heads do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}{hint}"
        )
    mask = mask_of(attn_mask, q, k) if isinstance(attn_mask, Tensor) else attn_mask
    return q, _without_unseen(k, mask, is_causal, q.shape[2]), mask


def _without_unseen(k: Tensor, mask: Mask | None, is_causal: bool, queries: int) -> Tensor:
    """Return keys (B, Hk, Tk, d) with the mean of the others in place of those that no query sees.

    They may hold anything, as a cache does that is not filled yet: attention does not depend on
    them, but the centre that is taken from all keys would. NaN and infinities behind a mask still
    show, since they make the attention of the model NaN, too; a causal kernel does not read them.
    """
    if is_causal:
        unseen = k.shape[2] - queries
        if unseen <= 0 or not queries:
            return k
        used = k[:, :, :queries]
        return torch.cat([used, used.mean(dim=2, keepdim=True).expand(-1, -1, unseen, -1)], dim=2)
    if mask is None or mask.seen_keys is None:
        return k
    seen = _by_key_head(mask.seen_keys, k.shape[1])  # (B or 1, Hk or 1, Tk)
    counts = seen.sum(dim=-1).clamp(min=1)[..., None, None]
    mean = (seen[..., None, :].float() @ k.float()) / counts  # (B, Hk, 1, d); 0 · NaN is NaN
    return torch.where(seen[..., None], k, mean.to(k.dtype))


def _by_key_head(seen: Tensor, key_heads: int) -> Tensor:
    """Return (B, Hk or 1, Tk) from (B, H or 1, Tk): a key is seen if one of its query heads sees it."""
    if seen.shape[1] in (1, key_heads):
        return seen
    return seen.unflatten(1, (key_heads, -1)).any(dim=2)


def mask_of(attn_mask: Tensor, q: Tensor, k: Tensor) -> Mask:
    """What a mask says of queries (B, H, Tq, d) and keys (B, Hk, Tk, d)."""
    mask = attn_mask.detach()[(None,) * max(0, 4 - attn_mask.dim())]
    if mask.dim() > 4:
        mask = mask.flatten(0, -4)
    target = (*q.shape[:3], k.shape[2])
    try:
        torch.broadcast_shapes(mask.shape, target)
    except RuntimeError:
        raise ValueError(
            f"attn_mask {tuple(attn_mask.shape)} does not broadcast to {target}"
        ) from None
    return Mask(mask, q.shape[2], k.shape[2])


def default_scale(scale: float | None, d: int) -> float:
    """1/√d if none is given."""
    return 1 / math.sqrt(d) if scale is None and d > 0 else float(scale or 1.0)


def visible_keys(
    mask: Mask | None, is_causal: bool, Tq: int, Tk: int, device: torch.device
) -> Tensor:
    """How many keys each query sees, broadcastable to (B, H, Tq)."""
    if mask is not None:
        return mask.visible
    if is_causal:
        return torch.arange(1, Tq + 1, device=device).clamp(max=Tk)[None, None]
    return torch.full((1, 1, 1), Tk, device=device)


@dataclass(frozen=True, eq=False)
class _Others:
    """What a mask leaves of the keys that are no sinks, for a group of heads."""

    additive: Tensor
    some: Tensor  # does a query see any of them?
    sees_sink: Tensor

    @staticmethod
    def of(mask: Mask, batch: slice, heads: slice) -> _Others:
        """Of the mask of all heads."""
        some = mask.visible > mask.sees_sink.long()
        return _Others(
            *(part_of(x, batch, heads) for x in (mask.additive_without_sinks, some, mask.sees_sink))
        )


@dataclass(frozen=True, eq=False)
class _Work:
    """Some heads of some samples: q (b, h, Tq, d), k (b, h, Tk, d), additive and sink broadcastable to them."""

    q: Tensor
    k: Tensor
    additive: Tensor | None
    is_causal: bool
    scale: float
    softcap: float | None
    sink: Tensor | None  # (…, Tq or 1, 1); None for key 0

    def guess(self) -> bool:
        """Are scores of some head likely to be so large that float32 loses digits? By a few queries."""
        Tq = self.q.shape[2]
        keys = self.k[:, :, 1:] if self.sink is None and self.k.shape[2] > 1 else self.k
        few = self.q[:, :, :: max(1, Tq // _GUESS)].float() @ keys.float().mT
        centred = few - few.mean(dim=-1, keepdim=True)
        return has_kernel(self.q.device) and bool(centred.abs().amax() * abs(self.scale) > _LARGE)

    def fused(self, others: _Others | None) -> Tensor:
        """(4, b, h, Tq) through one fused call; large scores in float64, on a CPU."""
        wide = self.q.device.type == "cpu"
        if wide and self.guess():  # saves the call in float32
            return self.in_tiles(wide=True)
        out, largest = self._by_kernel(others)
        large = largest > _LARGE  # (b, h)
        if wide and bool(large.any()):
            for b, h in large.nonzero().tolist():
                out[:, b, h] = self._head(b, h, wide=True)
        return out

    def _by_kernel(self, others: _Others | None) -> tuple[Tensor, Tensor]:
        """The statistics, computed in float32, and the largest |logsumexp| of each head, (b, h)."""
        q, k = self.q.float(), self.k.float()
        # without a mask the sink is key 0, and the keys after it are seen as all were: causally, by later queries
        first = 0 if others is not None or not self.is_causal else 1
        rest = k if others is not None else k[:, :, 1:]
        centre = (rest if rest.shape[2] else k).mean(dim=2, keepdim=True)
        lse = q.new_full(q.shape[:3], -math.inf)
        nonsink = torch.zeros_like(lse)
        if rest.shape[2] and q.shape[2] > first:
            queries, additive = q[:, :, first:], None if others is None else others.additive.float()
            attended, logsumexp = fused_attention(
                queries, rest - centre, additive, self.is_causal, self.scale
            )
            lse[:, :, first:] = logsumexp
            nonsink[:, :, first:] = logsumexp - attended.mul_(queries).sum(dim=-1).mul_(self.scale)
        sinks = self._sink_keys(k) - centre
        if sinks.shape[2] == 1:  # scores at two keys, the sink and the centre, in one product
            at_sink, shift = (
                (q @ torch.cat([sinks, centre], dim=2).mT).mul_(self.scale).unbind(dim=-1)
            )
        else:
            at_sink, shift = (q * sinks).sum(-1) * self.scale, (q @ centre.mT)[..., 0] * self.scale
        if others is not None:
            at_sink = torch.where(others.sees_sink, at_sink, -math.inf)
            lse, nonsink = (
                torch.where(others.some, lse, -math.inf),
                torch.where(others.some, nonsink, 0.0),
            )
        out = combined(nonsink, lse, at_sink)
        out[1] += shift
        return out.float(), torch.where(lse.isfinite(), lse, 0.0).abs().amax(dim=2)

    def _sink_keys(self, k: Tensor) -> Tensor:
        """The keys of the sinks, (b, h, Tq or 1, d)."""
        if self.sink is None:
            return k[:, :, :1]
        return k.gather(2, self.sink.expand(*k.shape[:2], -1, k.shape[3]))

    def in_tiles(self, wide: bool) -> Tensor:
        """(4, b, h, Tq) by tiles of scores."""
        B, H, Tq, _ = self.q.shape
        out = torch.empty((4, B, H, Tq), dtype=torch.float32, device=self.q.device)
        for b in range(B):
            for h in range(H):
                out[:, b, h] = self._head(b, h, wide)
        return out

    def _head(self, b: int, h: int, wide: bool) -> Tensor:
        one_b, one_h = slice(b, b + 1), slice(h, h + 1)
        additive, sink = (part_of(tensor, one_b, one_h) for tensor in (self.additive, self.sink))
        q, k = (
            widened(self.q[b, h]) if wide else self.q[b, h].float(),
            self.k[b, h].to(torch.float32),
        )
        centre = (
            k.mean(dim=0) if self.softcap is None else torch.zeros_like(k[0])
        )  # capping sees a common offset
        out = stats_of_scores(
            q, (k - centre).to(q.dtype), None if additive is None else additive[0, 0], self.is_causal, self.scale,
            self.softcap, 0 if sink is None else sink[0, 0],
        )  # fmt: skip
        out[1] += (q @ centre.to(q.dtype)) * self.scale
        return out
