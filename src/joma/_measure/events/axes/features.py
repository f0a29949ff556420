"""Compare rows of queries with rows of a projection, whatever happened to them in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# 1 − cosine up to which two rows are the same one. Rounding by ε changes the cosine by ε²: 1e-14 in
# float32, 1e-5 in bfloat16. Both limits leave a wide margin, and two different rows of 8 random
# numbers are practically never so close.
EXACT_TOLERANCE = 1e-9
ROUNDED_TOLERANCE = 1e-4

# With fewer than four pairs of numbers, the energies of two different rows are too often the same.
MIN_PAIRED_NUMBERS = 8


@dataclass(frozen=True)
class RowFeature:
    """A quantity of rows (…, d) that scaling or rotating queries changes by a factor at most.

    Attributes:
        name: what is compared, in words.
        of: the quantity, (…, d) -> (…, f).
        needs_pairs: True if d must be even and at least `MIN_PAIRED_NUMBERS`.
    """

    name: str
    of: Callable[[Tensor], Tensor]
    needs_pairs: bool = True

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the feature (…, f) of rows (…, d); zeros, equal to nothing, if there is none."""
        size = rows.shape[-1]
        if self.needs_pairs and (size % 2 or size < MIN_PAIRED_NUMBERS):
            return torch.zeros_like(rows)
        return self.of(rows)


# Scaling (1/√d) and normalisation without weights keep the direction.
#     row [3, 4], query [0.6, 0.8]: cosine 1
def _numbers(rows: Tensor) -> Tensor:
    return rows


# Rotary positions turn the pairs (i, i + d/2), as in Llama, and keep the energy of each pair.
#     row [3, 1, 4, 2], pairs (3, 4) and (1, 2): energies [25, 5], whatever the angles
def _energy_of_half_pairs(rows: Tensor) -> Tensor:
    first, second = rows.unflatten(-1, (2, -1)).unbind(-2)  # (…, d/2) each
    return first.square() + second.square()


# Rotary positions of other models turn the pairs (2i, 2i + 1), as in GPT-J.
#     row [3, 4, 1, 2], pairs (3, 4) and (1, 2): energies [25, 5]
def _energy_of_neighbour_pairs(rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (-1, 2)).square().sum(dim=-1)  # (…, d) -> (…, d/2, 2) -> (…, d/2)


# Partial rotary positions turn the first numbers and leave the second half alone, as in GPT-NeoX …
def _second_half(rows: Tensor) -> Tensor:
    return rows[..., rows.shape[-1] // 2 :]


# … or they turn the last numbers and leave the first half alone.
def _first_half(rows: Tensor) -> Tensor:
    return rows[..., : rows.shape[-1] // 2]


ROW_FEATURES = (
    RowFeature("direction", _numbers, needs_pairs=False),
    RowFeature("energy of the pairs (i, i + d/2)", _energy_of_half_pairs),
    RowFeature("energy of the pairs (2i, 2i + 1)", _energy_of_neighbour_pairs),
    RowFeature("direction of the second half", _second_half),
    RowFeature("direction of the first half", _first_half),
)


def tolerance_of(*tensors: Tensor) -> float:
    """Return the 1 − cosine up to which rows of these tensors count as equal."""
    if any(torch.finfo(tensor.dtype).bits < 32 for tensor in tensors):
        return ROUNDED_TOLERANCE
    return EXACT_TOLERANCE


def have_same_direction(rows: Tensor, candidates: Tensor, tolerance: float) -> Tensor:
    """Compare each of rows (n, f) with each of candidates (…, f); return booleans (n, …)."""
    if rows.shape[-1] == 1:
        # all numbers of one sign have the same direction
        return torch.zeros(len(rows), *candidates.shape[:-1], dtype=torch.bool, device=rows.device)
    flat = _normed(candidates).reshape(-1, candidates.shape[-1])  # (P, f)
    is_same = _normed(rows) @ flat.T >= 1 - tolerance  # (n, P)
    return is_same.view(len(rows), *candidates.shape[:-1])


def _normed(rows: Tensor) -> Tensor:
    """Return rows of length 1; a row of zeros becomes NaN, which equals nothing."""
    norms = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, torch.nan)
