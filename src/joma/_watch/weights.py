"""Weight gauges on a model's matrices, from where the measurement before left off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from joma._gauges.matrices import Matrix
from joma._gauges.rank import TopSingular, top_singular
from joma._gauges.registry import Gauge
from joma._watch.processes import Processes


class Weights:
    """Measures weight gauges; each matrix is read once per measurement, and decomposed once for all its gauges.

    Attributes:
        reasons: (part, matrix) -> why a value of the last measurement is 0 or NaN.
    """

    def __init__(self, gauges: Sequence[Gauge], matrices: Mapping[str, Sequence[Matrix]], processes: Processes) -> None:
        self.gauges = [gauge for gauge in gauges if gauge.on == "weight"]
        self.reasons: dict[tuple[str, str], str] = {}
        self._matrices, self._processes = matrices, processes
        self._starts: dict[str, Tensor] = {}  # leading singular vectors, "part:matrix|head" -> (block, n)

    @property
    def names(self) -> dict[str, list[str]]:
        """Gauge -> names of the matrices that it is measured on, by layer."""
        return {gauge.name: [matrix.name for matrix in self._matrices[gauge.part]] for gauge in self.gauges}

    @property
    def widths(self) -> dict[str, list[int]]:
        """Gauge -> how many heads each layer has, for products of projections."""
        return {g.name: [matrix.heads for matrix in self._matrices["qk"]] for g in self.gauges if g.part == "qk"}

    def measure(self) -> dict[str, Tensor]:
        """Gauge -> (layers,), or (layers, heads) for products of projections."""
        widths = {g.name: max(matrix.heads for matrix in self._matrices[g.part]) for g in self.gauges}
        values = {
            g.name: torch.full((len(self._matrices[g.part]), widths[g.name]), math.nan, dtype=torch.float64)
            for g in self.gauges
        }
        self.reasons.clear()
        if self._processes.computes_weights:
            with torch.no_grad():
                for part in dict.fromkeys(gauge.part for gauge in self.gauges):
                    for n, matrix in enumerate(self._matrices[part]):
                        self._measure_one(part, n, matrix, values)
        else:
            values = {name: torch.zeros_like(value) for name, value in values.items()}
        values = {name: self._processes.sum_whole_(value) for name, value in values.items()}
        return {g.name: values[g.name] if g.part == "qk" else values[g.name][:, 0] for g in self.gauges}

    def _measure_one(self, part: str, layer: int, matrix: Matrix, values: dict[str, Tensor]) -> None:
        chosen = [gauge for gauge in self.gauges if gauge.part == part]
        for head, w in enumerate(matrix.read()):
            top: TopSingular | None = None
            if any(gauge.given == "top" for gauge in chosen):
                key = f"{part}:{matrix.name}|{head}"
                top = top_singular(w, self._starts.get(key))
                if top.vectors is not None:
                    self._starts[key] = top.vectors
                if top.reason:
                    self.reasons[part, matrix.name] = top.reason
            for gauge in chosen:
                values[gauge.name][layer, head] = gauge.measure(w, top)

    def state(self) -> dict[str, Tensor]:
        """What the next measurement starts from."""
        return dict(self._starts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._starts = {key: value for key, value in state.items() if "|" in key}  # others' keys have none
