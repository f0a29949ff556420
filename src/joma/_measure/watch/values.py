"""The numbers of one gauge at one measurement, and which of them were measured.

Two different things must never share one value. A number that was *not measured* (a layer that did
not run, a gauge that is not due or not defined) has no row. A number that was computed and is *not
finite* is NaN or infinite, and that is an alert. So every table of numbers comes with a mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Values:
    """A table of numbers with its mask.

    Attributes:
        numbers: float64, (layers,) or (layers, heads); NaN where nothing was measured.
        measured: bool, of the same shape.
    """

    numbers: Tensor
    measured: Tensor

    @classmethod
    def empty(cls, *shape: int) -> Values:
        """Return a table in which nothing was measured, to be filled with `put`."""
        numbers = torch.full(shape, math.nan, dtype=torch.float64)
        return cls(numbers, torch.zeros(shape, dtype=torch.bool))

    @classmethod
    def per_layer(cls, numbers: Sequence[float | None]) -> Values:
        """Return a table (layers,); None stands for a number that was not measured."""
        table = cls.empty(len(numbers))
        for layer, number in enumerate(numbers):
            table.put((layer,), number)
        return table

    @classmethod
    def where(cls, measured: Tensor, numbers: Tensor) -> Values:
        """Return the numbers, with NaN where ``measured`` is False."""
        return cls(torch.where(measured, numbers, math.nan), measured)

    def put(self, place: tuple[int, ...], number: float | None) -> None:
        """Write one number, unless it is None."""
        if number is None:
            return
        self.numbers[place] = number
        self.measured[place] = True

    def column(self, n: int) -> Values:
        """Return the table (layers,) of one column of (layers, heads)."""
        return Values(self.numbers[:, n], self.measured[:, n])

    def to_lists(self, *, is_exact: bool = False) -> list[object]:
        """Return nested lists, with None where nothing was measured, as run folders store them.

        Numbers have the precision of float32: as decimals they take half of the room of float64.
        With ``is_exact`` they keep all their digits.
        """
        if is_exact:
            numbers = self.numbers.numpy()
        else:
            numbers = _shortest(self.numbers)
        return _nested(numbers.tolist(), self.measured.tolist())


def _shortest(numbers: Tensor) -> NDArray[np.float64]:
    """Return the shortest decimals that equal ``numbers`` in float32.

    Numbers beyond the range of float32 stay as they are.
    """
    exact = numbers.numpy()
    with np.errstate(over="ignore", under="ignore"):
        narrow = exact.astype(np.float32)
    short = narrow.astype(str).astype(np.float64)
    is_in_range = np.abs(exact) >= np.finfo(np.float32).tiny
    is_in_range &= np.isfinite(narrow)
    return np.where(is_in_range, short, exact)


def _nested(numbers: list[object], measured: list[object]) -> list[object]:
    pairs = zip(numbers, measured, strict=True)
    return [_entry(number, is_measured) for number, is_measured in pairs]


def _entry(number: object, measured: object) -> object:
    if isinstance(number, list) and isinstance(measured, list):
        return _nested(number, measured)
    if measured:
        return number
    return None
