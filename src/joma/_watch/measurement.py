"""The numbers of one measurement."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Measurement:
    """What the gauges gave at one step.

    Attributes:
        step: the step.
        values: gauge -> (layers, heads) or (layers,); NaN where a layer has fewer heads than the widest.
        names: gauge -> the module or matrix that each layer is.
        heads: gauge -> how many heads of each layer were seen, for gauges of attention.
        loss: of the step; NaN if it is not known.
        largest: gauges of which a logger is told the largest over heads and experts, not the mean.
        absent: gauge -> layers that have nothing to measure: blocks without attention, or without an MLP.
    """

    step: int
    values: Mapping[str, Tensor] = field(repr=False)
    names: Mapping[str, Sequence[str]] = field(repr=False)
    heads: Mapping[str, Sequence[int]] = field(repr=False)
    loss: float
    largest: Collection[str] = field(default=(), repr=False)
    absent: Mapping[str, Collection[int]] = field(default_factory=dict, repr=False)

    def row(self, gauge: str, layer: int) -> Tensor:
        """The values of the heads that a layer has, without what pads it; NaN among them is meant."""
        row = self.values[gauge][layer]
        if row.dim() == 0:
            return row
        if seen := self._seen(gauge, layer):
            return row[:seen]
        return row if row.isnan().all() else row[~row.isnan()]

    def metrics(self) -> dict[str, float]:
        """One number per gauge and layer, {"joma/entropy/layer_03": …}, for any logger."""
        metrics = {}
        for gauge, value in self.values.items():
            width = max(2, len(str(len(value) - 1)))
            for n in self._present(gauge):
                metrics[f"joma/{gauge}/layer_{n:0{width}d}"] = self.reduced(gauge, n)
        return metrics

    def reduced(self, gauge: str, layer: int) -> float:
        """Mean over the heads or experts of a layer; the largest, where the gauge says so. NaN if one of them is."""
        row = self.row(gauge, layer)
        return float(row.max() if gauge in self.largest else row.mean())

    def per_head(self, names: Collection[str]) -> dict[str, list[list[float]]]:
        """Gauge -> per layer its values, for gauges with these names, whatever part they are measured on."""
        chosen = [gauge for gauge in self.values if gauge.split(".")[0] in names]
        return {
            gauge: [self.row(gauge, n).reshape(-1).tolist() for n in range(len(self.values[gauge]))] for gauge in chosen
        }

    def not_numbers(self) -> Iterator[tuple[str, int, str]]:
        """Gauge, layer and its name, where a layer that was seen has a NaN."""
        for gauge in self.values:
            for n in self._present(gauge):
                seen = gauge not in self.heads or self._seen(gauge, n)
                if seen and bool(self.row(gauge, n).isnan().any()):
                    yield gauge, n, self.names[gauge][n]

    def _present(self, gauge: str) -> list[int]:
        return [n for n in range(len(self.values[gauge])) if n not in self.absent.get(gauge, ())]

    def _seen(self, gauge: str, layer: int) -> int:
        heads = self.heads.get(gauge, ())
        return heads[layer] if layer < len(heads) else 0
