"""Read axes from the numbers of slices: a head is a slice of a projection's channels.

A projection gives y (B, T, W), and a query of d numbers is one of the G = W/d slices of a row of y.
Only the number of that slice counts, not the position it stands at:

    y (B=3, T=14, W=32) and queries (12, 14, 8): the queries [i, 7], i = 0 … 11, are the slices
        0 1 2 3 0 1 2 3 0 1 2 3     samples outside, heads inside: (samples · heads)
        0 0 0 1 1 1 2 2 2 3 3 3     heads outside, samples inside: (heads · samples)
    y (B=4, T=14, W=32) and queries (4, 4, 14, 8), as many samples as heads:
        0 0 0 0 along the first axis and 0 1 2 3 along the second: the second holds the heads

A slice that stays the same along an axis means samples, or windows and blocks of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from joma._measure.events.axes.features import have_same_direction
from joma._measure.events.axes.layout import Axis

MOST_NUMBERS = 1 << 23  # a larger output is not searched: 64 MB in float64
# Number of the slice of a row of zeros, which padding may be: it fits every slice.
ANY_SLICE = -1


def slices_of(positions: Tensor, head_size: int) -> list[Tensor]:
    """Return the ways to cut positions (…, W) into slices (P, G, d); none if it is too large."""
    # W = 6, d = 2: the heads are [0 1] [2 3] [4 5], or [0 3] [1 4] [2 5]
    if positions.numel() > MOST_NUMBERS:
        return []
    flat = positions.reshape(-1, positions.shape[-1])  # (P, W)
    ways = [flat.unflatten(1, (-1, head_size))]  # (P, G, d)
    if flat.shape[1] > head_size:
        ways.append(flat.unflatten(1, (head_size, -1)).transpose(1, 2))  # (P, d, G) -> (P, G, d)
    return ways


def slice_numbers(rows: Tensor, candidates: Tensor, tolerance: float) -> Tensor | None:
    """Return the slice (n,) of each of rows (n, f) among candidates (P, G, f), at any position.

    None if a row is found in no slice or in several.
    """
    matches = have_same_direction(rows, candidates, tolerance).any(dim=1)  # (n, P, G) -> (n, G)
    is_zero = (rows == 0).all(dim=1)
    is_in_one_slice = matches.sum(dim=1) == 1
    if matches.numel() == 0 or not bool((is_in_one_slice | is_zero).all()):
        return None
    return torch.where(is_zero, ANY_SLICE, matches.to(torch.uint8).argmax(dim=1))


def axis_of_slices(numbers: Tensor) -> Axis | None:
    """Return the meaning of an axis from the slices (n,) along it; None if they follow no rule."""
    size = len(numbers)
    is_certain = numbers != ANY_SLICE
    heads = len(numbers[is_certain].unique())
    # 0 0 0 0: samples. One number alone would fit heads as well.
    if heads == 1:
        if int(is_certain.sum()) > 1:
            return Axis(size, 1)
        return None
    # 0 1 2 3: heads
    if heads == size:
        return Axis(size, size)
    if heads == 0 or size % heads:
        return None
    # 0 1 0 1 0 1: samples outside, heads inside; 0 0 0 1 1 1: heads outside, samples inside
    is_inside = _is_one_slice_per_row(numbers.view(size // heads, heads).T)
    is_outside = _is_one_slice_per_row(numbers.view(heads, size // heads))
    if is_inside == is_outside:
        return None
    return Axis(size, heads, has_heads_first=is_outside)


def _is_one_slice_per_row(rows: Tensor) -> bool:
    """True if each row (heads, samples) holds one number, and each row another one."""
    highest = rows.amax(dim=1)
    lowest = torch.where(rows == ANY_SLICE, highest[:, None], rows).amin(dim=1)
    is_constant = bool((highest == lowest).all())
    return is_constant and len(highest.unique()) == len(rows) and int(highest.min()) >= 0
