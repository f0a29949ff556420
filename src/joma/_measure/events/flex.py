"""FlexAttention: the keys that its block mask leaves, and what its function does to the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def flex_fields(given: dict[str, Any], output: Tensor) -> dict[str, Any]:
    """Fields of the event, from the arguments of ``flex_attention``; what ``score_mod`` adds is taken as a bias."""
    query, key, value, scale = given["query"], given["key"], given["value"], given["scale"]
    key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    mask = None if given["block_mask"] is None else mask_of_blocks(given["block_mask"], query, key)
    if given["score_mod"] is not None:
        mask = _bias(given["score_mod"], mask, query, key, scale)
    return {
        "query": query, "key": key, "value": value, "mask": mask, "causal": False, "scale": scale,
        "output": output,
    }  # fmt: skip


def mask_of_blocks(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """The keys that each query sees by a `BlockMask`, (B or 1, H or 1, Tq, Tk)."""
    from torch.nn.attention.flex_attention import create_mask

    B, H = (size if isinstance(size, int) else 1 for size in block_mask.shape[:2])
    return create_mask(
        block_mask.mask_mod, B, H, query.shape[2], key.shape[2], device=str(query.device)
    )


@torch.no_grad()
def _bias(
    score_mod: Callable[..., Tensor],
    mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    scale: float | None,
) -> Tensor:
    """What ``score_mod`` changes scores by, (B, H, Tq, Tk), −∞ where the mask hides a key.

    Uncompiled, FlexAttention itself makes a matrix of this size.
    """
    keys = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.float() @ keys.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    changed = score_mod
    for axis in (3, 2, 1, 0):  # key, query, head, sample: the innermost axis first
        in_dims = (0, *(0 if other == axis else None for other in range(4)))
        changed = torch.vmap(changed, in_dims=in_dims)
    places = (torch.arange(size, device=scores.device) for size in scores.shape)
    bias = changed(scores, *places).float() - scores
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)
