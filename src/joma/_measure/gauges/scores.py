"""The scores of attention, computed some queries of one head at a time, so that they fit the cache.

The largest logit, the attention that keys receive, and the exact statistics where no fused kernel
can be used all read the same tiles of scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import overload

import torch
from torch import Tensor

from joma._measure.gauges.kernels import part_of, widened
from joma._measure.gauges.masks import lowest_seen

# Entries of a tile: 512 KiB in float32, which stays in the cache. Reading scores in such tiles costs
# eager attention 1.25 × its time, and 4.1 × as one matrix in float64.
TILE_ELEMENTS = 1 << 17


# Not frozen: a frozen dataclass takes several microseconds to make, which short sequences show.
@dataclass(eq=False, slots=True)
class HeadScores:
    """The scores of one head of one sample, before they are computed.

    Attributes:
        q: (Tq, d).
        k: (Tk, d).
        additive: (Tq or 1, Tk), added to the scores after soft-capping; None for nothing.
        is_causal: True if query i sees keys 0 … i.
        scale: factor of the scores.
        softcap: limit of the scores, or None.
    """

    q: Tensor
    k: Tensor
    additive: Tensor | None
    is_causal: bool
    scale: float
    softcap: float | None

    def cast(self, is_wide: bool) -> None:
        """Change queries and keys to the widest type of the device, or to float32."""
        if is_wide:
            self.q = widened(self.q)
            self.k = widened(self.k)
        else:
            self.q = self.q.float()
            self.k = self.k.float()

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the scores, computed in the type of queries and keys, some queries at a time.

        Yields:
            Which queries, and their scores (rows, keys). The last keys are missing where no query of
            the tile sees them. The caller may overwrite the scores.
        """
        Tq = len(self.q)
        Tk = len(self.k)
        keys = (self.k * self.scale).T.contiguous()  # (d, Tk)
        tile_rows = max(1, TILE_ELEMENTS // Tk)
        for start in range(0, Tq, tile_rows):
            stop = min(Tq, start + tile_rows)
            bias = self.additive  # (rows or 1, Tk)
            if bias is not None and len(bias) > 1:
                bias = bias[start:stop]
            if self.is_causal:
                visible = min(Tk, stop)
            else:
                visible = _visible_keys(bias, Tk)
            scores = self.q[start:stop] @ keys[:, :visible]  # (rows, visible)
            if self.softcap is not None:
                scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
            if bias is not None:
                scores += bias[:, :visible]
            if self.is_causal and visible > start:
                # All rows of the tile see the keys before its first row: only the rest needs a mask.
                position = torch.arange(start, stop, device=self.q.device)
                is_later = (
                    position[: visible - start] > position[:, None]
                )  # (rows, visible − start)
                scores[:, start:].masked_fill_(is_later, -math.inf)
            yield slice(start, stop), scores


@dataclass(frozen=True, eq=False)
class AttentionScores:
    """The scores of all heads, before they are computed.

    Attributes:
        q: (B, H, Tq, d).
        k: (B, Hk, Tk, d).
        additive: (B or 1, H or 1, Tq or 1, Tk), added after soft-capping; None for nothing.
        is_causal: True if query i sees keys 0 … i.
        scale: factor of the scores.
        softcap: limit of the scores, or None.
    """

    q: Tensor
    k: Tensor
    additive: Tensor | None
    is_causal: bool
    scale: float
    softcap: float | None

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield (sample, head) of all heads."""
        B, H = self.q.shape[:2]
        return product(range(B), range(H))

    def head(self, b: int, h: int) -> HeadScores:
        """Return those of one head of one sample, in the types of the model."""
        group = self.q.shape[1] // self.k.shape[1]
        additive = part_of_head(self.additive, b, h)
        q = self.q[b, h]
        k = self.k[b, h // group]
        return HeadScores(q, k, additive, self.is_causal, self.scale, self.softcap)


@overload
def part_of_head(tensor: Tensor, b: int, h: int) -> Tensor: ...
@overload
def part_of_head(tensor: Tensor | None, b: int, h: int) -> Tensor | None: ...
def part_of_head(tensor: Tensor | None, b: int, h: int) -> Tensor | None:
    """Return what belongs to one head, of a tensor (B or 1, H or 1, …) or of None."""
    if tensor is None:
        return None
    return part_of(tensor, slice(b, b + 1), slice(h, h + 1))[0, 0]


def _visible_keys(bias: Tensor | None, keys: int) -> int:
    """Return how many of the first keys are enough for all queries of a tile, at least one."""
    # On other devices the answer would have to be waited for.
    if bias is None or bias.device.type != "cpu":
        return keys
    visible = (bias.amax(dim=0) > lowest_seen(bias.dtype)).nonzero()
    if not len(visible):
        return 1
    return int(visible[-1]) + 1
