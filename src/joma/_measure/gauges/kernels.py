"""Kernels of a device: fused attention, how heads are cut into parts for it, and WᵀW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import torch
from torch import Tensor

# Elements of (heads, T, d) that one call works on: 16 MiB in float32. More heads at once would only
# need more memory.
CHUNK_ELEMENTS = 1 << 22
# Columns of WᵀW that are computed together. Parts below the diagonal are copied: 1536 × 384 in
# float64 takes 7.5 ms instead of 9.5 ms as one product.
GRAM_COLUMNS = 96


def has_kernel(device: torch.device) -> bool:
    """True if there is a fused kernel for this device."""
    return device.type in ("cpu", "cuda")


def fused_attention(
    q: Tensor, k: Tensor, additive: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return Σ p k (B, H, Tq, d) and logsumexp (B, H, Tq) from the fused kernel of the device."""
    if scale < 0:
        # The kernels multiply masked scores, −inf, with the scale, which would make them +inf.
        q = -q
        scale = -scale
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attended, logsumexp = flash(q, k, k, 0.0, is_causal, attn_mask=additive, scale=scale)
        return attended, logsumexp
    if additive is not None:
        additive = additive.expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    attended, logsumexp, *_ = efficient(q, k, k, additive, True, 0.0, is_causal, scale=scale)
    # The CUDA kernel pads the rows.
    return attended, logsumexp[..., : q.shape[2]]


def groups(B: int, H: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (batch, heads) of about CHUNK_ELEMENTS at most, for ``size`` elements per head."""
    heads = max(1, min(H, CHUNK_ELEMENTS // max(1, size)))
    samples = 1
    if heads == H:
        samples = max(1, min(B, CHUNK_ELEMENTS // max(1, size * H)))
    for b in range(0, B, samples):
        for h in range(0, H, heads):
            yield slice(b, min(B, b + samples)), slice(h, min(H, h + heads))


def key_heads(heads: slice, H: int, Hk: int) -> slice | list[int]:
    """Return the key heads of these query heads, repeated as in scaled_dot_product_attention.

    Query heads 2 to 5 of 8, which share 4 key heads, have the key heads [1, 1, 2, 2].
    """
    if Hk == H:
        return heads
    return [h // (H // Hk) for h in range(heads.start, heads.stop)]


@overload
def part_of(tensor: Tensor, batch: slice, heads: slice) -> Tensor: ...
@overload
def part_of(tensor: Tensor | None, batch: slice, heads: slice) -> Tensor | None: ...
def part_of(tensor: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """Return the part of a broadcastable tensor (B or 1, H or 1, …) that belongs to a group."""
    if tensor is None:
        return None
    if tensor.shape[0] > 1:
        tensor = tensor[batch]
    if tensor.shape[1] > 1:
        tensor = tensor[:, heads]
    return tensor


def gram_matrix(w: Tensor) -> Tensor:
    """Return WᵀW (n, n) of W (m, n), in its type.

    NumPy computes half of a product with the transpose, too, in 5.7 ms instead of 7.5 ms. But its
    threads spin for some 26 ms after each product, which costs 35 ms of processor time in all and
    takes a processor from the training.
    """
    n = w.shape[1]
    gram = w.new_empty((n, n))
    for start in range(0, n, GRAM_COLUMNS):
        stop = min(n, start + GRAM_COLUMNS)
        rows = w[:, start:stop].T @ w[:, start:]  # (columns, n − start)
        gram[start:stop, start:] = rows
        gram[stop:, start:stop] = rows[:, stop - start :].T
    return gram


def widest_type(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, else float32."""
    if device.type in ("cpu", "cuda"):
        return torch.float64
    return torch.float32


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest type of its device."""
    return tensor.to(widest_type(tensor.device))
