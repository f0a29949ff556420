"""The numbers of one measurement."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from joma._measure.watch.values import Values


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
        tables: gauge -> its numbers, and which of them were measured.
        names: gauge -> the module or matrix that each layer is.
        loss: of the step; None if it is not known.
        largest: gauges whose largest value over heads and experts, not the mean, is given to loggers.
    """

    step: int
    tables: Mapping[str, Values] = field(repr=False)
    names: Mapping[str, Sequence[str]] = field(repr=False)
    loss: float | None
    largest: Collection[str] = field(default=(), repr=False)

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Gauge -> (layers, heads) or (layers,).

        NaN also stands for numbers that were not measured; `tables` tells them apart.
        """
        return {gauge: table.numbers for gauge, table in self.tables.items()}

    def row(self, gauge: str, layer: int) -> Tensor:
        """Return the numbers that were measured in a layer, (heads measured,).

        A NaN among them was computed.
        """
        table = self.tables[gauge]
        return table.numbers[layer].reshape(-1)[table.measured[layer].reshape(-1)]

    def metrics(self) -> dict[str, float]:
        """Return one number per gauge and layer, {"joma/entropy/layer_03": …}, for any logger."""
        metrics = {}
        for gauge, table in self.tables.items():
            layers = len(table.numbers)
            width = max(2, len(str(layers - 1)))
            for layer in range(layers):
                number = self.reduced(gauge, layer)
                if number is not None:
                    metrics[f"joma/{gauge}/layer_{layer:0{width}d}"] = number
        return metrics

    def reduced(self, gauge: str, layer: int) -> float | None:
        """Return the mean over the heads or experts of a layer; for `largest` gauges, the maximum.

        It is NaN if one of the numbers is NaN, and None if nothing was measured.
        """
        row = self.row(gauge, layer)
        if not len(row):
            return None
        if gauge in self.largest:
            return float(row.max())
        return float(row.mean())

    def per_head(self, names: Collection[str]) -> dict[str, list[list[float]]]:
        """Return, by gauge and layer, one number per head; NaN for a head that was not measured.

        ``names`` are names of gauges, without the part that they are measured on.
        """
        numbers = {}
        for gauge, table in self.tables.items():
            if gauge.split(".")[0] in names:
                layers = range(len(table.numbers))
                numbers[gauge] = [self._heads(gauge, layer) for layer in layers]
        return numbers

    def _heads(self, gauge: str, layer: int) -> list[float]:
        """Return the numbers of a layer up to the last head that was measured, and one at least."""
        table = self.tables[gauge]
        heads = table.measured[layer].reshape(-1).nonzero().reshape(-1)
        count = 1
        if len(heads):
            count = int(heads[-1]) + 1
        return [float(number) for number in table.numbers[layer].reshape(-1)[:count]]

    def not_finite(self) -> Iterator[NotFinite]:
        """Yield, by gauge and layer, what was computed and is not finite."""
        for gauge, table in self.tables.items():
            bad = table.measured & ~table.numbers.isfinite()
            for layer in bad.reshape(len(bad), -1).any(dim=1).nonzero().reshape(-1).tolist():
                places = bad[layer].reshape(-1).nonzero().reshape(-1).tolist()
                value = float(table.numbers[layer].reshape(-1)[places[0]])
                heads: tuple[int, ...] = ()
                if bad.dim() == 2:
                    heads = tuple(places)
                yield NotFinite(gauge, layer, self.names[gauge][layer], heads, value)
