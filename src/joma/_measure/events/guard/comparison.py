"""Comparisons that verify an attention, and the differences that rounding explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COMPARED_ROWS = 16  # rows of each attention that are computed again

# How far two numbers may be apart, relative to the largest of those compared. Kernels differ by the
# rounding of their type, and by TF32 in float32.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 2e-3}
_LOW_PRECISION_TOLERANCE = 3e-2  # 16-bit types


@dataclass(frozen=True)
class Comparison:
    """The check of an attention.

    Attributes:
        compared: what was compared with what, as `joma.explain` words it.
        error: the largest difference, relative to the largest number compared; None if no number
            could be compared.
    """

    compared: str
    error: float | None = None


NOT_COMPARED = Comparison("")
FUNCTION_CHECK = Comparison("certain from the function")
OUTPUT_CHECK = "output against softmax(s)·V"
WEIGHTS_CHECK = "weights against softmax(s)"


def relative_tolerance(tensor: Tensor) -> float:
    """Return the relative difference up to which results of this type are the same."""
    return _TOLERANCES.get(tensor.dtype, _LOW_PRECISION_TOLERANCE)


def spread_rows(count: int, device: torch.device) -> Tensor:
    """Return the numbers of up to `COMPARED_ROWS` rows, spread over all of them."""
    return torch.linspace(0, count - 1, min(count, COMPARED_ROWS), device=device).long()
