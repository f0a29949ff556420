"""Exact attention statistics without an attention matrix.

For scores s_ij = scale · q_i·k_j and p = softmax(s), the entropy of row i is
logsumexp_i − Σ_j p_ij s_ij, and Σ_j p_ij s_ij = scale · q_i · (Σ_j p_ij k_j): one fused attention
call with the keys in place of the values. The mass on one key is exp(s_ij − logsumexp_i). Memory is
O(T).

Four things keep it exact. The first key of a document, on which attention may rest nearly all its
weight, is left out of that call and put back by its score: what is next to such a sink then has all
its digits. Keys are centred first, since softmax does not see a common offset and float32 does.
Everything is accumulated in float32 whatever the input type, since the kernels round Σ p k to it.
Heads whose scores are so large that the difference of two large numbers loses digits are multiplied
in float64 (`joma._measure.gauges.tiles`).

What the kernels cannot do (finite biases, soft-capping, other devices) goes through the same tiles
of scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._measure.gauges.attention_inputs import checked_inputs, default_scale, visible_keys
from joma._measure.gauges.head_group import HeadGroup, ShownKeys
from joma._measure.gauges.kernels import groups, has_kernel, key_heads, part_of, widened
from joma._measure.gauges.masks import Mask, lowest_seen
from joma._measure.gauges.scores import AttentionScores
from joma._measure.gauges.tiles import stats_of_softmax

if TYPE_CHECKING:
    from joma._measure.gauges.logits import Logits


@dataclass(frozen=True, eq=False)
class AttentionStats:
    """Statistics of each query's attention, (B, H, Tq) each, in nats where that applies.

    Queries that see no key have entropy 0 and are left out of ``mean``.

    Attributes:
        entropy: of attention.
        logsumexp: of the scores; −inf for a query that sees no key.
        sink_mass: attention on sinks: the first key of the document, and a learned sink.
        visible: the number of keys that a query sees, broadcastable to the others.
        nonsink_entropy: of the attention that is not on sinks; 0 where there is nothing else.
        logits: the scores, if they can be read again.
    """

    entropy: Tensor
    logsumexp: Tensor = field(repr=False)
    sink_mass: Tensor = field(repr=False)
    visible: Tensor = field(repr=False)
    nonsink_entropy: Tensor = field(repr=False)
    logits: Logits | None = field(default=None, repr=False)

    @property
    def effective_tokens(self) -> Tensor:
        """exp(entropy): the number of keys that attention is spread over."""
        return self.entropy.exp()

    @property
    def normalised_entropy(self) -> Tensor:
        """Entropy over that of uniform attention; NaN where fewer than two keys are visible."""
        largest = self.visible.clamp(min=1).log()
        return torch.where(self.visible > 1, self.entropy / largest.clamp(min=1e-30), math.nan)

    @property
    def max_logit(self) -> Tensor:
        """The largest score of each query, after scaling, soft-capping and bias.

        It is −inf for a query that sees no key.
        """
        if self.logits is None:
            raise ValueError(
                "these statistics were made without their scores, which the largest logit needs"
            )
        return self.logits.largest.value

    def mean(self, values: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Return the mean of ``values`` (the entropy by default) over the real queries, (H,).

        Real queries see at least one key and, with ``rows`` (broadcastable to (B, H, Tq), True for
        real), are not padding. A query is left out where its value is not defined (NaN though the
        entropy is a number). The mean is NaN where no query is left.
        """
        if values is None:
            values = self.entropy
        total, count = self.total(values, rows)
        return torch.where(count > 0, total / count.clamp(min=1), math.nan).float()

    def total(self, values: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of ``values`` over the real queries and their number, (H,) each.

        Both have the widest type of the device.
        """
        is_real = self.is_real(values, rows)
        total = widened(torch.where(is_real, values, 0.0)).sum(dim=(0, 2))
        return total, widened(is_real.sum(dim=(0, 2)))

    def largest(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the largest of ``values`` over the real queries, (H,); −inf where there are none."""
        low = widened(torch.where(self.is_real(values, rows), values, -math.inf))
        if not low.numel():
            return low.new_full(low.shape[1:2], -math.inf)
        return low.amax(dim=(0, 2))

    def is_real(self, values: Tensor, rows: Tensor | None) -> Tensor:
        """Return which of the values (…, B, H, Tq) count.

        Their queries see a key and are not padding, and the value is defined.
        """
        # A number that is not equal to itself is NaN.
        is_real = (values == values).logical_or_(self._is_nan).logical_and_(self._sees_key)
        if rows is None:
            return is_real
        return is_real & rows

    @cached_property
    def _is_nan(self) -> Tensor:
        return self.entropy.isnan()

    @cached_property
    def _sees_key(self) -> Tensor:
        return self.visible > 0


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
    """Return statistics of ``scaled_dot_product_attention(q, k, …)``, whose arguments these are.

    Arguments:
        q: (B, H, Tq, d), or with fewer leading dimensions.
        k: (B, Hk, Tk, d), likewise.
        attn_mask: boolean (True takes part) or an additive float bias, broadcastable to (B, H, Tq, Tk).
        is_causal: query i sees keys 0 … i (aligned top left, also for Tq ≠ Tk).
        scale: of the scores, 1/√d by default.
        enable_gqa: H may be a multiple of Hk; without it, Hk is H, or 1 for keys that all heads share.
        softcap: scores become softcap · tanh(score / softcap) before masking (Gemma 2).
        cu_seqlens: of packed documents, without a mask: q is (tokens, H, d), k (tokens, Hk, d), and
            document n has the tokens from cu_seqlens[n] to cu_seqlens[n + 1], as in
            ``flash_attn_varlen_func``. Statistics are those of each document alone,
            (1, H, tokens). Nested tensors (B, H, jagged, d) are packed documents, too.

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
    """Return nested q (B, H, jagged, d) and k (B, Hk, jagged, d) as packed documents.

    The third tensor holds where the documents begin and end.
    """
    for tensor in (q, k):
        if not tensor.is_nested or tensor.layout != torch.jagged or tensor.dim() != 4:
            raise ValueError(
                "nested q and k must both be (B, heads, jagged, d) in the layout torch.jagged"
            )
    queries: Any = q.detach().transpose(1, 2)  # (B, jagged, H, d)
    keys: Any = k.detach().transpose(1, 2)  # (B, jagged, Hk, d)
    bounds = queries.offsets()
    if not torch.equal(bounds, keys.offsets()):
        raise ValueError(
            "nested q and k must have the same lengths: documents that attend to themselves"
        )
    return queries.values(), keys.values(), bounds


def _packed(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float | None,
) -> AttentionStats:
    """Return statistics (1, H, tokens) of documents, q (tokens, H, d) and k (tokens, Hk, d)."""
    bounds = [int(n) for n in cu_seqlens]
    if q.dim() != 3 or k.dim() != 3 or len(q) != len(k):
        raise ValueError(
            f"packed q and k are (tokens, heads, d); got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(q) or sorted(bounds) != bounds:
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {len(q)}; got {bounds}"
        )
    queries = q[None].transpose(1, 2)  # (1, H, tokens, d)
    keys = k[None].transpose(1, 2)  # (1, Hk, tokens, d)
    documents = []
    for start, stop in pairwise(bounds):
        if stop > start:
            document = stats_with_mask(
                queries[:, :, start:stop],
                keys[:, :, start:stop],
                None,
                is_causal,
                scale,
                enable_gqa,
                softcap,
            )
            documents.append(document)
    if not documents:
        return stats_with_mask(queries, keys, enable_gqa=enable_gqa)

    def joined(name: str) -> Tensor:
        parts = [getattr(stats, name).expand_as(stats.entropy) for stats in documents]
        return torch.cat(parts, dim=-1)

    return AttentionStats(
        entropy=joined("entropy"),
        logsumexp=joined("logsumexp"),
        sink_mass=joined("sink_mass"),
        visible=joined("visible"),
        nonsink_entropy=joined("nonsink_entropy"),
    )


def stats_with_mask(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
) -> AttentionStats:
    """Return `attention_stats`; a mask that layers share may come as a `Mask`, to be read once."""
    q, k, mask = checked_inputs(q, k, attn_mask, is_causal, enable_gqa)
    B, H, Tq, d = q.shape
    Tk = k.shape[2]
    scale = default_scale(scale, d)
    visible = visible_keys(mask, is_causal, Tq, Tk, q.device)
    shape = (B, H, Tq)
    if q.numel() == 0 or Tk == 0:
        zero = torch.zeros(shape, device=q.device)
        nothing = torch.full(shape, -math.inf, device=q.device)
        return AttentionStats(zero, nothing, zero, visible.expand(shape), zero)
    out = torch.empty((4, *shape), dtype=torch.float32, device=q.device)
    additive = None
    sink = None
    has_bias = False
    if mask is not None:
        additive = mask.additive
        sink = mask.sink
        has_bias = mask.biased
    is_fused = not has_bias and softcap is None and has_kernel(q.device)
    for b, heads in groups(B, H, max(Tq, Tk) * d):
        scores = AttentionScores(
            q=q[b, heads],
            k=k[b, key_heads(heads, H, k.shape[1])],
            additive=part_of(additive, b, heads),
            is_causal=is_causal,
            scale=scale,
            softcap=softcap,
        )
        group = HeadGroup(scores, part_of(sink, b, heads))
        if is_fused:
            shown = None
            if mask is not None:
                shown = ShownKeys.of(mask, b, heads)
            out[:, b, heads] = group.fused(shown)
        else:
            out[:, b, heads] = group.in_tiles(is_wide=group.has_large_scores())
    return _finish(out, visible, shape, can_see_nothing=mask is not None)


def attention_stats_from_scores(
    scores: Tensor,
    *,
    is_probability: bool = False,
    probabilities: Tensor | None = None,
    learned_sink: int | None = None,
) -> AttentionStats:
    """Return the same statistics from the scores or the probabilities of eager attention.

    Entries of −inf, large finite masks (−1e9, −65504, −1e4) and the type's lowest numbers count as
    masked; so do probabilities of 0 (a key with exactly no attention cannot be told from a masked
    one).

    Arguments:
        scores: (B, H, Tq, Tk), or with fewer leading dimensions.
        is_probability: they are probabilities, after the softmax.
        probabilities: the softmax of the scores, if it exists: that saves the exponentials.
        learned_sink: the first or last column, if it is not a key but a sink that the model has
            learnt (GPT-OSS).

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
    if columns == 1 and learned_sink is not None:
        raise ValueError("the only column is a learned sink: there is no key to attend to")
    lowest = lowest_seen(scores.dtype)
    if is_probability:
        lowest = -math.inf
        probabilities = scores
        if scores.dtype != torch.float64:
            scores = scores.float()
        scores = scores.log()
    scores = scores.detach()[(None,) * max(0, 4 - scores.dim())].flatten(0, -4)
    B, H, Tq, _ = scores.shape
    if scores.numel() == 0:
        zero = torch.zeros(B, H, Tq, device=scores.device)
        return AttentionStats(zero, torch.full_like(zero, -math.inf), zero, zero.long(), zero)
    flat = scores.flatten(0, 1)  # (B · H, Tq, columns)
    softmax = None
    if probabilities is not None:
        softmax = probabilities.detach().reshape(flat.shape)
    learned = None
    if learned_sink is not None:
        learned = learned_sink % columns
    out, visible = stats_of_softmax(flat, softmax, lowest, learned)
    shape = (B, H, Tq)
    return _finish(out.unflatten(1, (B, H)).float(), visible.unflatten(0, (B, H)), shape)


def _finish(
    out: Tensor, visible: Tensor, shape: tuple[int, ...], can_see_nothing: bool = True
) -> AttentionStats:
    """Clamp statistics (4, B, H, Tq) to what is possible.

    Queries that see nothing are settled by the mask and not by the answer of the kernel. Without a
    mask there are none.
    """
    entropy, logsumexp, sink_mass, nonsink = out
    sink_mass = sink_mass.clamp_(0.0, 1.0)
    some_visible = visible
    if can_see_nothing:
        sink_mass = torch.where(visible > 0, sink_mass, 0.0)
        some_visible = visible.clamp(min=1)
    others = visible - (sink_mass > 0).long()  # a window may not reach the sink
    entropy = torch.minimum(entropy.clamp(min=0.0), some_visible.log())
    nonsink = torch.minimum(nonsink.clamp(min=0.0), others.clamp(min=1).log())
    if can_see_nothing:
        entropy = torch.where(visible > 0, entropy, 0.0)
        logsumexp = torch.where(visible > 0, logsumexp, -math.inf)
        nonsink = torch.where(visible > 0, nonsink, 0.0)
    return AttentionStats(entropy, logsumexp, sink_mass, visible.expand(shape), nonsink)
