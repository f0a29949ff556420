"""The numbers of one measurement."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joma._runs.long_table import LongTable


@dataclass(frozen=True)
class NotFinite:
    """A number that was computed and is NaN or infinite.

    Attributes:
        gauge: its gauge.
        layer: its layer.
        module: the module or matrix of that layer.
        heads: the heads or experts that it was found in; () if the gauge has one number per layer.
        value: the first of the numbers.
    """

    gauge: str
    layer: int
    module: str
    heads: tuple[int, ...]
    value: float


@dataclass(frozen=True, eq=False)
class Measurement:
    """What the gauges gave at one step.

    Attributes:
        step: the step.
        table: the numbers of all gauges, one section each.
        names: gauge -> the module or matrix that each layer is.
        loss: of the step; None if it is not known.
        largest: gauges whose largest value over heads and experts, not the mean, is given to loggers.
    """

    step: int
    table: LongTable = field(repr=False)
    names: Mapping[str, Sequence[str]] = field(repr=False)
    loss: float | None
    largest: Collection[str] = field(default=(), repr=False)

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Gauge -> (layers, heads) or (layers,).

        NaN also stands for numbers that were not measured; `table` has no row for these.
        """
        return {gauge: torch.from_numpy(self.table.array(gauge)) for gauge in self.table.gauges}

    def metrics(self) -> dict[str, float]:
        """Return one number per gauge and layer, {"joma/entropy/layer_03": …}, for any logger."""
        metrics = {}
        for gauge in self.table.gauges:
            layers = self.table.by_layer(gauge)
            width = max(2, len(str(len(layers) - 1)))
            for layer, numbers in enumerate(layers):
                if len(numbers):
                    name = f"joma/{gauge}/layer_{layer:0{width}d}"
                    metrics[name] = self._reduced(gauge, numbers)
        return metrics

    def reduced(self, gauge: str, layer: int) -> float | None:
        """Return the mean over the heads or experts of a layer; for `largest` gauges, the maximum.

        It is NaN if one of the numbers is NaN, and None if nothing was measured.
        """
        numbers = self.table.by_layer(gauge)[layer]
        if not len(numbers):
            return None
        return self._reduced(gauge, numbers)

    def _reduced(self, gauge: str, numbers: NDArray[np.float64]) -> float:
        if gauge in self.largest:
            return float(numbers.max())
        if len(numbers) == 1:
            return float(numbers[0])
        # NumPy adds in another order than PyTorch, which can change the last bit.
        return float(torch.from_numpy(numbers).mean())

    def per_head(self, names: Collection[str]) -> dict[str, list[list[float]]]:
        """Return, by gauge and layer, one number per head; NaN for a head that was not measured.

        Each layer has its heads up to the last one that was measured, and one at least. ``names``
        are names of gauges, without the part that they are measured on.
        """
        numbers = {}
        for gauge in self.table.gauges:
            if gauge.split(".")[0] in names:
                array = self.table.array(gauge)  # (layers, heads) or (layers,)
                measured = self.table.measured(gauge)
                layers = array.reshape(len(array), -1)
                counts = _count_heads(measured.reshape(len(measured), -1))
                rows = zip(layers.tolist(), counts, strict=True)
                numbers[gauge] = [row[:count] for row, count in rows]
        return numbers

    def not_finite(self) -> Iterator[NotFinite]:
        """Yield, by gauge and layer, what was computed and is not finite."""
        bad_rows = np.flatnonzero(~np.isfinite(self.table.numbers)).tolist()
        places: dict[tuple[str, int], list[int]] = {}  # (gauge, layer) -> bad rows
        for row in bad_rows:
            gauge = self.table.gauges[int(self.table.codes[row])]
            layer = self.table.index(row)[0]
            places.setdefault((gauge, layer), []).append(row)
        for (gauge, layer), rows in places.items():
            # A gauge with one number per layer has no head in its index.
            heads = tuple(head for row in rows for head in self.table.index(row)[1:])
            value = float(self.table.numbers[rows[0]])
            yield NotFinite(gauge, layer, self.names[gauge][layer], heads, value)


def _count_heads(measured: NDArray[np.bool_]) -> list[int]:
    """Return per layer the number of heads up to the last measured one, 1 at least.

    ``measured`` is (layers, heads).
    """
    heads = np.arange(1, 1 + measured.shape[1])  # (heads,)
    counts: list[int] = np.where(measured, heads, 1).max(axis=1, initial=1).tolist()
    return counts
