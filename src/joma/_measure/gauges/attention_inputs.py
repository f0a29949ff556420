"""The arguments of scaled_dot_product_attention, checked, with four dimensions each."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from joma._measure.gauges.masks import Mask


def checked_inputs(
    q: Tensor, k: Tensor, attn_mask: Tensor | Mask | None, is_causal: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Mask | None]:
    """Return q and k with four dimensions, and what the mask says."""
    if q.dim() < 2 or k.dim() != q.dim() or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "q must be (…, Tq, d) and k (…, Tk, d) with the same d; "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if is_causal and attn_mask is not None:
        raise ValueError(
            "give attn_mask or is_causal, not both (as in scaled_dot_product_attention)"
        )
    lead = (None,) * max(0, 4 - q.dim())
    q = q.detach()[lead].flatten(0, -4)  # (B, H, Tq, d)
    k = k.detach()[lead].flatten(0, -4)  # (B, Hk, Tk, d)
    H = q.shape[1]
    Hk = k.shape[1]
    if k.shape[0] == 1 and q.shape[0] > 1:
        k = k.expand(q.shape[0], -1, -1, -1)
    heads_fit = Hk in (H, 1) or (enable_gqa and Hk > 0 and H % Hk == 0)
    if q.shape[0] != k.shape[0] or not heads_fit:
        hint = ""
        if not enable_gqa:
            hint = "; grouped-query heads need enable_gqa=True"
        raise ValueError(
            f"batch and heads do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}{hint}"
        )
    mask: Mask | None
    if isinstance(attn_mask, Tensor):
        mask = mask_of(attn_mask, q, k)
    else:
        mask = attn_mask
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
    """Return what a mask says of queries (B, H, Tq, d) and keys (B, Hk, Tk, d)."""
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
    """Return the scale, or 1/√d if it is None."""
    if scale is None and d > 0:
        return 1 / math.sqrt(d)
    return float(scale or 1.0)


def visible_keys(
    mask: Mask | None, is_causal: bool, Tq: int, Tk: int, device: torch.device
) -> Tensor:
    """Return the number of keys that each query sees, broadcastable to (B, H, Tq)."""
    if mask is not None:
        return mask.visible
    if is_causal:
        return torch.arange(1, Tq + 1, device=device).clamp(max=Tk)[None, None]
    return torch.full((1, 1, 1), Tk, device=device)
