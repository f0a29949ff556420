"""What a mask says: which keys a query sees, how many, finite biases, and where its document begins.

A document begins at a query such that neither it nor any later one sees an earlier key: so it is with packed documents
(block-diagonal masks, causal or not), and never inside a sliding window. The sink of a query is the first key that
anyone in its document sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

_PART = 1 << 18  # entries of a mask that are looked at together, so that they stay in the cache

# Masks are written as −inf, as the lowest number of the type, or as a large finite number: −1e9, −65504, −1e4. A key
# that is hidden by such a number is not a visible key, though softmax gives it "some" attention on paper.
_NEVER = -1e8  # lower than any logit or bias: hidden, whatever the rest of the row is
_BIAS_GAP = 5e3  # a bias so far below the largest of its row is a mask; ALiBi gets there after 10,000 tokens at most
_SCORE_GAP = (
    8e3  # likewise for scores, which are a mask plus logits: −1e4 with logits of up to ±1,000
)


def lowest_seen(dtype: torch.dtype) -> float:
    """The number of this type up to which a bias or a score is always a mask."""
    return max(torch.finfo(dtype).min / 2, _NEVER)


def hidden_scores(scores: Tensor, largest: Tensor, lowest: float) -> Tensor:
    """True where a key is masked, for scores (…, Tk) and the largest of each row (…, 1).

    Worked example, a causal mask of −1e4: the row [0.3, −1.2, −9999.1] has the largest score 0.3, and −9999.1 lies more
    than 8,000 below it: two keys are visible. A row without a mask and with sharp attention, [310, −45, 12], has three.
    A score that is not a number is not masked: it has to show.
    """
    return scores <= (largest - _SCORE_GAP).clamp(min=lowest)


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask (B or 1, H or 1, Tq or 1, Tk or 1), boolean (True takes part) or additive, and what it says."""

    given: Tensor = field(repr=False)
    queries: int
    keys: int

    @cached_property
    def keep(self) -> Tensor:
        """Boolean; −inf, "as low as can be" and large finite numbers (−1e9, −1e4) all mean masked.

        Worked example: the row [0, 0, −1e4, −1e4] keeps two keys. The row [−1e4, −1e4, −1e4, −1e4] keeps all four,
        since softmax does not see a common offset: such a query attends as if there were no mask.
        """
        given = self.given
        if given.dtype == torch.bool:
            return given
        largest = given.amax(dim=-1, keepdim=True)  # (…, Tq, 1)
        return given > (largest - _BIAS_GAP).clamp(min=lowest_seen(given.dtype))

    @cached_property
    def biased(self) -> bool:
        """Is there a finite bias?"""
        if self.given.dtype == torch.bool:
            return False
        rows, keep = self.given.flatten(0, 2), self.keep.flatten(0, 2)
        step = max(1, _PART // rows.shape[-1])
        parts = zip(rows.split(step), keep.split(step), strict=True)
        return any(not torch.equal(part == 0, kept) for part, kept in parts)

    @cached_property
    def additive(self) -> Tensor:
        """What is added to the scores, in float32 or wider, with four dimensions and all keys."""
        if self.given.dtype == torch.bool:
            shape = (*self.given.shape[:3], self.keys)
            return torch.zeros(shape, device=self.given.device).masked_fill_(~self.keep, -math.inf)
        given = self.given if self.given.dtype == torch.float64 else self.given.float()
        return given.expand(-1, -1, -1, self.keys)

    @cached_property
    def visible(self) -> Tensor:
        """How many keys each query sees, broadcastable to (B, H, Tq)."""
        if self.keep.shape[-1] == self.keys:
            return count(self.keep)
        return self.keep[..., 0].long() * self.keys

    @cached_property
    def seen_keys(self) -> Tensor | None:
        """True for keys that some query sees, (B or 1, H or 1, Tk); None if all are seen."""
        if self.keep.shape[-1] == 1:
            return None
        seen = self.keep.view(torch.uint8).amax(dim=-2) > 0  # 15 times as fast as any()
        return None if bool(seen.all()) else seen

    @cached_property
    def sink(self) -> Tensor | None:
        """The sink of each query, (B or 1, H or 1, Tq or 1, 1); None for key 0 everywhere."""
        if self.keep.shape[-1] == 1 or bool(self.keep[..., 0].all()):
            return None
        return sinks(first_seen(self.keep), self.keys)

    @cached_property
    def sees_sink(self) -> Tensor:
        """Does a query see its sink? Broadcastable to (B, H, Tq)."""
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
        """Of some queries (n,); their sinks are those of all."""
        one = self.given.shape[2] == 1
        part = Mask(self.given if one else self.given[:, :, queries], len(queries), self.keys)
        sink = self.sink
        vars(part)["sink"] = sink if sink is None or sink.shape[2] == 1 else sink[:, :, queries]
        return part


def causal_mask(queries: Tensor, keys: int) -> Mask:
    """Of queries at these positions (n,), each of which sees the keys up to its own."""
    keep = torch.arange(keys, device=queries.device) <= queries[:, None]
    return Mask(keep[None, None], len(queries), keys)


def count(keep: Tensor) -> Tensor:
    """How many are True along the last axis; ten times as fast as `torch.count_nonzero`."""
    return keep.view(torch.uint8).sum(dim=-1, dtype=torch.int32).long()


def first_seen(keep: Tensor) -> Tensor:
    """The first key that each query sees, (…, Tq) of (…, Tq, Tk); Tk if it sees none."""
    first = keep.view(torch.uint8).argmax(dim=-1)
    return torch.where(keep.gather(-1, first[..., None])[..., 0], first, keep.shape[-1])


def sinks(first: Tensor, keys: int) -> Tensor | None:
    """The sink (…, Tq or 1, 1) of each query from the first key that it sees, (…, Tq); None for key 0 everywhere."""
    anyone = first.amin(dim=-1, keepdim=True)
    if first.shape[-1] == keys > 1:
        later = (
            first.flip(-1).cummin(dim=-1).values.flip(-1)
        )  # the first key that this query or a later one sees
        begins = later >= torch.arange(keys, device=first.device)
        if bool((begins[..., 1:] & (first[..., 1:] < keys)).any()):
            document = begins.long().cumsum(dim=-1) - 1  # of each query
            lowest = torch.full_like(first, keys).scatter_reduce(-1, document, first, "amin")
            sink = lowest.gather(-1, document)
            return torch.where(sink < keys, sink, 0)[..., None]
    anyone = torch.where(anyone < keys, anyone, 0)
    return anyone[..., None] if bool(anyone.any()) else None


def key_columns(learned_sink: int | None) -> slice:
    """Return the columns of eager scores that are keys: the first or last may be a learned sink."""
    if learned_sink is None:
        return slice(None)
    if learned_sink == 0:
        return slice(1, None)
    return slice(0, -1)
