"""Attention masks: the keys that each query sees, their number, finite biases, and sinks.

A document begins at a query if neither it nor any later query sees an earlier key. Packed documents
(block-diagonal masks, causal or not) begin so, and no query inside a sliding window does. The sink
of a query is the first key that any query of its document sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# Entries of a mask that are compared together, so that they stay in the cache.
_PART_ENTRIES = 1 << 18

# Masks are written as −inf, as the lowest number of the type, or as a large finite number: −1e9,
# −65504, −1e4. A key that is hidden by such a number is not a visible key, though softmax gives it
# "some" attention on paper.
#
# Lower than any logit or bias: hidden, whatever the rest of the row is.
_ALWAYS_HIDDEN = -1e8
# A bias so far below the largest of its row is a mask. ALiBi gets there after 10,000 tokens at
# most.
_BIAS_GAP = 5e3
# Likewise for scores, which are a mask plus logits: −1e4 with logits of up to ±1,000.
_SCORE_GAP = 8e3


def lowest_seen(dtype: torch.dtype) -> float:
    """Return the number of this type up to which a bias or a score is always a mask."""
    return max(torch.finfo(dtype).min / 2, _ALWAYS_HIDDEN)


def hidden_scores(scores: Tensor, largest: Tensor, lowest: float) -> Tensor:
    """Return True where a key is masked, for scores (…, Tk) and the largest of each row (…, 1).

    Worked example, a causal mask of −1e4: the row [0.3, −1.2, −9999.1] has the largest score 0.3,
    and −9999.1 lies more than 8,000 below it: two keys are visible. A row without a mask and with
    sharp attention, [310, −45, 12], has three. A NaN is not masked: it has to show.
    """
    return scores <= (largest - _SCORE_GAP).clamp(min=lowest)


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask (B or 1, H or 1, Tq or 1, Tk or 1), boolean (True takes part) or additive."""

    values: Tensor = field(repr=False)
    queries: int
    keys: int

    @cached_property
    def keep(self) -> Tensor:
        """The mask as booleans: −inf, the lowest number of the type, −1e9 and −1e4 all mean masked.

        Worked example: the row [0, 0, −1e4, −1e4] keeps two keys. The row [−1e4, −1e4, −1e4, −1e4]
        keeps all four, since softmax does not see a common offset: such a query attends as if there
        were no mask.
        """
        values = self.values
        if values.dtype == torch.bool:
            return values
        largest = values.amax(dim=-1, keepdim=True)  # (…, Tq, 1)
        return values > (largest - _BIAS_GAP).clamp(min=lowest_seen(values.dtype))

    @cached_property
    def biased(self) -> bool:
        """True if a key that is not masked has a bias."""
        if self.values.dtype == torch.bool:
            return False
        rows = self.values.flatten(0, 2)  # (rows, Tk)
        keep = self.keep.flatten(0, 2)  # (rows, Tk)
        step = max(1, _PART_ENTRIES // rows.shape[-1])
        parts = zip(rows.split(step), keep.split(step), strict=True)
        return any(not torch.equal(values == 0, is_visible) for values, is_visible in parts)

    @cached_property
    def additive(self) -> Tensor:
        """The summand of the scores, in float32 or wider, with four dimensions and all keys."""
        values = self.values
        if values.dtype == torch.bool:
            shape = (*values.shape[:3], self.keys)
            return torch.zeros(shape, device=values.device).masked_fill_(~self.keep, -math.inf)
        if values.dtype != torch.float64:
            values = values.float()
        return values.expand(-1, -1, -1, self.keys)

    @cached_property
    def visible(self) -> Tensor:
        """The number of keys that each query sees, broadcastable to (B, H, Tq)."""
        if self.keep.shape[-1] == self.keys:
            return count(self.keep)
        return self.keep[..., 0].long() * self.keys

    @cached_property
    def seen_keys(self) -> Tensor | None:
        """True for keys that some query sees, (B or 1, H or 1, Tk); None if all are seen."""
        if self.keep.shape[-1] == 1:
            return None
        is_seen = self.keep.view(torch.uint8).amax(dim=-2) > 0  # 15 times as fast as any()
        if bool(is_seen.all()):
            return None
        return is_seen

    @cached_property
    def sink(self) -> Tensor | None:
        """The sink of each query, (B or 1, H or 1, Tq or 1, 1); None for key 0 everywhere."""
        if self.keep.shape[-1] == 1 or bool(self.keep[..., 0].all()):
            return None
        return sinks(first_seen(self.keep), self.keys)

    @cached_property
    def sees_sink(self) -> Tensor:
        """True for queries that see their sink, broadcastable to (B, H, Tq)."""
        if self.sink is None or self.keep.shape[-1] == 1:
            return self.keep[..., 0]
        shape = torch.broadcast_shapes(self.keep.shape[:3], self.sink.shape[:3])
        return self.keep.expand(*shape, -1).gather(-1, self.sink.expand(*shape, 1))[..., 0]

    @cached_property
    def additive_without_sinks(self) -> Tensor:
        """`additive`, with −inf at the sinks."""
        if self.sink is None:
            without = self.additive.clone()
            without[..., 0] = -math.inf
            return without
        shape = torch.broadcast_shapes(self.additive.shape[:3], self.sink.shape[:3])
        return self.additive.expand(*shape, -1).scatter(-1, self.sink.expand(*shape, 1), -math.inf)

    def at(self, queries: Tensor) -> Mask:
        """Return the mask of some queries (n,)."""
        values = self.values
        if values.shape[2] > 1:
            values = values[:, :, queries]
        sink = self.sink
        if sink is not None and sink.shape[2] > 1:
            sink = sink[:, :, queries]
        part = Mask(values, len(queries), self.keys)
        # The other queries of a document decide on its sink, too.
        vars(part)["sink"] = sink
        return part


def causal_mask(queries: Tensor, keys: int) -> Mask:
    """Return the mask of queries at these positions (n,), which see the keys up to their own."""
    keep = torch.arange(keys, device=queries.device) <= queries[:, None]
    return Mask(keep[None, None], len(queries), keys)


def count(keep: Tensor) -> Tensor:
    """Count what is True along the last axis, ten times as fast as `torch.count_nonzero`."""
    return keep.view(torch.uint8).sum(dim=-1, dtype=torch.int32).long()


def first_seen(keep: Tensor) -> Tensor:
    """Return the first key that each query sees, (…, Tq) of (…, Tq, Tk); Tk if it sees none."""
    first = keep.view(torch.uint8).argmax(dim=-1)
    return torch.where(keep.gather(-1, first[..., None])[..., 0], first, keep.shape[-1])


def sinks(first: Tensor, keys: int) -> Tensor | None:
    """Return the sink (…, Tq or 1, 1) of each query from the first key that it sees, (…, Tq).

    None stands for key 0 everywhere.
    """
    if first.shape[-1] == keys > 1:
        # The first key that this query or a later one sees.
        later = first.flip(-1).cummin(dim=-1).values.flip(-1)
        is_begin = later >= torch.arange(keys, device=first.device)
        if bool((is_begin[..., 1:] & (first[..., 1:] < keys)).any()):
            document = is_begin.long().cumsum(dim=-1) - 1  # (…, Tq)
            lowest = torch.full_like(first, keys).scatter_reduce(-1, document, first, "amin")
            sink = lowest.gather(-1, document)  # (…, Tq)
            return torch.where(sink < keys, sink, 0)[..., None]
    sink = first.amin(dim=-1, keepdim=True)  # (…, 1)
    sink = torch.where(sink < keys, sink, 0)
    if not bool(sink.any()):
        return None
    return sink[..., None]


def key_columns(learned_sink: int | None) -> slice:
    """Return the columns of eager scores that are keys: the first or last may be a learned sink."""
    if learned_sink is None:
        return slice(None)
    if learned_sink == 0:
        return slice(1, None)
    return slice(0, -1)
