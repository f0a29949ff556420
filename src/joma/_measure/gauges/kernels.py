"""The fused attention kernel of a device, and how heads are cut into parts for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import torch
from torch import Tensor

# how many elements of (heads, T, d) are worked on at once: 16 MiB in float32
_CHUNK = 1 << 22


def has_kernel(device: torch.device) -> bool:
    """Is there a fused kernel for this device?"""
    return device.type in ("cpu", "cuda")


def fused_attention(
    q: Tensor, k: Tensor, additive: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Σ p k (B, H, Tq, d) and logsumexp (B, H, Tq) from the fused kernel of the device."""
    if scale < 0:  # the kernels multiply what is masked, −inf, with it
        q, scale = -q, -scale
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, k, 0.0, is_causal, attn_mask=additive, scale=scale)
        return out, lse
    if additive is not None:
        additive = additive.expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(q, k, k, additive, True, 0.0, is_causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # the CUDA kernel pads the rows


def groups(B: int, H: int, size: int) -> Iterator[tuple[slice, slice]]:
    """(batch, heads) slices that hold at most about _CHUNK elements of ``size`` a head."""
    heads = max(1, min(H, _CHUNK // max(1, size)))
    batch = max(1, min(B, _CHUNK // max(1, size * H))) if heads == H else 1
    for b in range(0, B, batch):
        for h in range(0, H, heads):
            yield slice(b, min(B, b + batch)), slice(h, min(H, h + heads))


def key_heads(heads: slice, H: int, Hk: int) -> slice | list[int]:
    """The key heads that belong to these query heads, repeated as scaled_dot_product_attention repeats them."""
    if Hk == H:
        return heads
    return [h // (H // Hk) for h in range(heads.start, heads.stop)]


@overload
def part_of(tensor: Tensor, batch: slice, heads: slice) -> Tensor: ...
@overload
def part_of(tensor: Tensor | None, batch: slice, heads: slice) -> Tensor | None: ...
def part_of(tensor: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """The part of a broadcastable (B or 1, H or 1, …) tensor that belongs to a group."""
    if tensor is None:
        return None
    tensor = tensor[batch] if tensor.shape[0] > 1 else tensor
    return tensor[:, heads] if tensor.shape[1] > 1 else tensor


def widest_type(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, else float32."""
    if device.type in ("cpu", "cuda"):
        return torch.float64
    return torch.float32


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest type of its device."""
    return tensor.to(widest_type(tensor.device))
