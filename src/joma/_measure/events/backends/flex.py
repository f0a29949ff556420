"""FlexAttention: the keys that its block mask leaves, and what ``score_mod`` does to scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from joma._measure.events.backends.backend import DotProductCall
from joma._measure.events.backends.kernel import KernelBackend


class FlexBackend(KernelBackend):
    """`torch.nn.attention.flex_attention.flex_attention`.

    It gives queries, keys, values, a block mask and a function of scores; its axes are fixed.
    """

    name = "flex"
    functions = ("torch.nn.attention.flex_attention.flex_attention",)

    def read(self, arguments: dict[str, Any], output: Tensor) -> DotProductCall:
        """Return the attention; what ``score_mod`` changes counts as an additive mask."""
        query = arguments["query"]
        samples = query.shape[0]
        # Keys of one sample may serve all queries.
        key = arguments["key"].expand(samples, -1, -1, -1)  # (B, Hk, Tk, d)
        value = arguments["value"].expand(samples, -1, -1, -1)
        scale = arguments["scale"]
        mask = None
        if arguments["block_mask"] is not None:
            mask = read_block_mask(arguments["block_mask"], query, key)
        if arguments["score_mod"] is not None:
            mask = _score_bias(arguments["score_mod"], mask, query, key, scale)
        return self.dot_product(query, key, value, output, mask=mask, scale=scale)


def read_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return the keys that each query sees by a `BlockMask`, (B or 1, H or 1, Tq, Tk)."""
    from torch.nn.attention.flex_attention import create_mask

    sizes = []
    for size in block_mask.shape[:2]:
        # None stands for "the same for all samples (or heads)".
        if not isinstance(size, int):
            size = 1
        sizes.append(size)
    samples, heads = sizes
    queries = query.shape[2]
    keys = key.shape[2]
    device = str(query.device)
    return create_mask(block_mask.mask_mod, samples, heads, queries, keys, device=device)


@torch.no_grad()
def _score_bias(
    score_mod: Callable[..., Tensor],
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    scale: float | None,
) -> Tensor:
    """Return what ``score_mod`` adds to scores, (B, H, Tq, Tk); −∞ where the mask hides a key.

    Uncompiled, FlexAttention itself makes a matrix of this size.
    """
    if scale is None:
        scale = query.shape[3] ** -0.5
    groups = query.shape[1] // key.shape[1]
    keys = key.float().repeat_interleave(groups, dim=1)  # (B, H, Tk, d)
    scores = query.float() @ keys.mT * scale  # (B, H, Tq, Tk)
    # score_mod(score, b, h, q, k) takes numbers. Mapped over one axis after the other, the
    # innermost (keys) first, it takes all scores and the numbers along each axis.
    mapped = score_mod
    for axis in (3, 2, 1, 0):
        index_dims: list[int | None] = [None, None, None, None]
        index_dims[axis] = 0
        mapped = torch.vmap(mapped, in_dims=(0, *index_dims))
    indices = [torch.arange(size, device=scores.device) for size in scores.shape]
    bias = mapped(scores, *indices).float() - scores
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf)
