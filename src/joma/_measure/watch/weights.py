"""Weight gauges on a model's matrices, from where the measurement before left off."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from joma._measure.gauges.kinds import WEIGHT
from joma._measure.gauges.rank import TopSingular, top_singular
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.processes import Processes
from joma._measure.watch.values import Values
from joma.models.blocks import Blocks
from joma.models.matrices import Matrix


class Weights:
    """Measures weight gauges; each matrix is read once per measurement, and decomposed once for all its gauges.

    Attributes:
        due: names of the gauges that the next measurement is of.
        reasons: (part, matrix) -> why a value of the last measurement is 0, or is not there.
    """

    def __init__(
        self,
        gauges: Sequence[Gauge],
        matrices: Mapping[str, Sequence[Matrix]],
        processes: Processes,
        blocks: Blocks,
    ) -> None:
        self.gauges = [gauge for gauge in gauges if gauge.kind is WEIGHT]
        self.due: Collection[str] = [gauge.name for gauge in self.gauges]
        self.reasons: dict[tuple[str, str], str] = {}
        self._processes, self._blocks = processes, blocks
        self._rows: dict[
            str, list[list[Matrix]]
        ] = {}  # part -> by layer, its matrices: none, one, or one per expert
        # part -> what each layer is: the number of a block, or the name of what is in no block or not alone in it
        self._layers: dict[str, list[int | str]] = {}
        self._starts: dict[
            str, Tensor
        ] = {}  # leading singular vectors, "part:matrix|head" -> (block, n)
        self.renew(matrices)

    def renew(self, matrices: Mapping[str, Sequence[Matrix]]) -> None:
        """Measure these from now on; a layer keeps its number, which stays empty if the layer is gone."""
        for part in dict.fromkeys((*self._rows, *matrices)):
            chosen = matrices.get(part, ())
            rows = self._blocks.rows(
                chosen, [m.name for m in chosen], experts=part.startswith("mlp")
            )
            in_blocks = len(self._blocks.names)
            row_of: dict[int | str, list[Matrix]] = dict(enumerate(rows[:in_blocks]))
            row_of |= {
                self._blocks.name_of(0, [m.name for m in row]): row for row in rows[in_blocks:]
            }
            layers = self._layers.setdefault(part, [])
            layers += [layer for layer in row_of if layer not in layers]
            self._rows[part] = [row_of.get(layer, []) for layer in layers]
        self._starts.clear()

    @property
    def names(self) -> dict[str, list[str]]:
        """Gauge -> by layer, the name of its matrix; of its block, if it has none."""
        names_of: dict[str, list[str]] = {}
        for part, rows in self._rows.items():
            names_of[part] = [
                layer
                if isinstance(layer, str)
                else self._blocks.name_of(layer, [matrix.name for matrix in row])
                for layer, row in zip(self._layers[part], rows, strict=True)
            ]
        return {gauge.name: names_of[gauge.part] for gauge in self.gauges}

    @property
    def widths(self) -> dict[str, list[int]]:
        """Gauge -> how many heads or experts each layer has; 0 for a block without such a matrix."""
        return {
            g.name: [sum(matrix.heads for matrix in row) for row in self._rows[g.part]]
            for g in self.gauges
        }

    def axes(self) -> dict[str, list[str]]:
        """Gauge -> the axes of its values."""
        inner = {g.name: ["head"] if g.per_head else [] for g in self.gauges}
        inner |= {
            g.name: ["expert"]
            for g in self.gauges
            if any(len(row) > 1 for row in self._rows[g.part])
        }
        return {name: ["layer", *more] for name, more in inner.items()}

    def measure(self) -> dict[str, Values]:
        """Gauge -> (layers,), (layers, heads) for products of projections, or (layers, experts)."""
        values = {
            name: Values.empty(len(widths), max(1, *widths))
            for name, widths in self.widths.items()
            if name in self.due
        }
        self.reasons.clear()
        if self._processes.computes_weights:
            with torch.no_grad():
                for part in dict.fromkeys(
                    gauge.part for gauge in self.gauges if gauge.name in self.due
                ):
                    for n, row in enumerate(self._rows[part]):
                        column = 0
                        for matrix in row:
                            # One matrix that cannot be read (a quantised one) costs its own values only, and no process
                            # is left waiting for this one.
                            try:
                                self._measure_one(part, (n, column), matrix, values)
                            except Exception as error:
                                reason = (
                                    f"it could not be measured: {type(error).__name__}: {error}"
                                )
                                self.reasons[part, matrix.name] = reason
                            column += matrix.heads
        values = {name: self._processes.sum_whole_values(value) for name, value in values.items()}
        axes = self.axes()
        return {
            name: value if len(axes[name]) > 1 else value.column(0)
            for name, value in values.items()
        }

    def _measure_one(
        self, part: str, at: tuple[int, int], matrix: Matrix, values: dict[str, Values]
    ) -> None:
        """Write the values of a matrix, from (layer, column) on."""
        layer, column = at
        chosen = [gauge for gauge in self.gauges if gauge.part == part and gauge.name in self.due]
        for head, w in enumerate(matrix.read()):
            top: TopSingular | None = None
            if any(gauge.given == "top" for gauge in chosen):
                key = f"{part}:{matrix.name}|{head}"
                top = top_singular(w, self._starts.get(key))
                if top.vectors is not None:
                    self._starts[key] = top.vectors
                if top.reason and not math.isnan(
                    top.sigma
                ):  # weights that are not finite are an alert
                    self.reasons[part, matrix.name] = top.reason
            for gauge in chosen:
                values[gauge.name].put((layer, column + head), gauge.measure(w, top))

    def state(self) -> dict[str, Tensor]:
        """What the next measurement starts from."""
        return dict(self._starts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._starts = {
            key: value for key, value in state.items() if "|" in key
        }  # others' keys have none
