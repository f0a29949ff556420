"""Weight gauges on the matrices of a model.

Each matrix is read once per measurement, and decomposed once for all its gauges. Nothing is kept from
the measurement before: a number depends on the weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from joma._measure.events.events import Observer
from joma._measure.gauges.kinds import WEIGHT
from joma._measure.gauges.rank import TopSingular, top_singular
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.meters.meter import Meter, MeterResult
from joma._measure.watch.passes import StepPasses
from joma._measure.watch.watched import WatchedModel
from joma._runs.long_table import LongTable
from joma.models.matrices import Matrix

# (layer, head or expert) -> a number that was measured.
Entries = dict[tuple[int, ...], float]


class WeightMeter(Meter):
    """Measures weight gauges after the step."""

    title = "weights"
    kinds = (WEIGHT,)

    def __init__(self, watched: WatchedModel) -> None:
        super().__init__(watched)
        # Part -> by layer, its matrices: none, one, or one per expert.
        self._rows: dict[str, list[list[Matrix]]] = {}
        # Part -> what each layer is: the number of a block, or the name of a matrix that is in no
        # block or not alone in it.
        self._layers: dict[str, list[int | str]] = {}
        self._names: dict[str, list[str]] = {}
        self._widths: dict[str, list[int]] = {}
        self._axes: dict[str, list[str]] = {}
        self.renew()

    # Which matrices

    def renew(self) -> None:
        """Measure the matrices that the model has now; the number of a layer that is gone stays."""
        matrices = self.watched.matrices
        for part in dict.fromkeys((*self._rows, *matrices)):
            row_of = self._find_rows(part)
            layers = self._layers.setdefault(part, [])
            for layer in row_of:
                if layer not in layers:
                    layers.append(layer)
            self._rows[part] = [row_of.get(layer, []) for layer in layers]
        # They change with the model only, and every measurement asks for them.
        self._names = {gauge.name: self._names_of(gauge.part) for gauge in self.gauges}
        self._widths = {gauge.name: self._widths_of(gauge.part) for gauge in self.gauges}
        self._axes = {gauge.name: self._axes_of(gauge) for gauge in self.gauges}

    def _find_rows(self, part: str) -> dict[int | str, list[Matrix]]:
        """Return the matrices of each layer."""
        blocks = self.watched.blocks
        matrices = self.watched.matrices.get(part, [])
        names = [matrix.name for matrix in matrices]
        rows = blocks.rows(matrices, names, experts=part.startswith("mlp"))
        row_of: dict[int | str, list[Matrix]] = {}
        for number, row in enumerate(rows):
            if number < len(blocks.names):
                row_of[number] = row
            else:
                row_of[blocks.name_of(0, [matrix.name for matrix in row])] = row
        return row_of

    def _names_of(self, part: str) -> list[str]:
        """Return the name of each layer's matrix; of its block, if it has none."""
        names = []
        for layer, row in zip(self._layers[part], self._rows[part], strict=True):
            name = layer
            if isinstance(name, int):
                name = self.watched.blocks.name_of(name, [matrix.name for matrix in row])
            names.append(name)
        return names

    def _widths_of(self, part: str) -> list[int]:
        return [sum(matrix.heads for matrix in row) for row in self._rows[part]]

    def _axes_of(self, gauge: Gauge) -> list[str]:
        if any(len(row) > 1 for row in self._rows[gauge.part]):
            return ["layer", "expert"]
        return gauge.axes

    @property
    def names(self) -> Mapping[str, list[str]]:
        return self._names

    @property
    def widths(self) -> Mapping[str, list[int]]:
        return self._widths

    @property
    def axes(self) -> Mapping[str, list[str]]:
        return self._axes

    # Maps around attention

    @property
    def observers(self) -> list[Observer]:
        """Looks for maps around attention, if there is a pair whose role is not certain."""
        return list(self.watched.order.observers)

    def attach(self, passes: StepPasses) -> None:
        self.watched.order.ran = passes.source.ran

    # A measurement

    def measure(self, step: int, due: Collection[str]) -> MeterResult:
        self.due = due
        result = MeterResult()
        left_out = self.watched.leave_out_projections()
        if left_out:
            self.renew()
        for lower, sentence in left_out.items():
            result.report(("order", lower), f"step {step}: {sentence}", is_remark=True)
        gauges = self.due_gauges
        entries: dict[str, Entries] = {gauge.name: {} for gauge in gauges}
        reasons: dict[tuple[str, str], str] = {}
        if self.watched.processes.computes_weights:
            with torch.no_grad():
                for part in dict.fromkeys(gauge.part for gauge in gauges):
                    self._measure_part(part, entries, reasons)
        for (part, name), reason in reasons.items():
            result.report(("weight", part, name), f"step {step}: {name} ({part}): {reason}")
        for gauge in gauges:
            name = gauge.name
            widths = self._widths[name]
            shape = (len(widths), max(1, *widths))  # (layers, heads or experts)
            table = LongTable.of_entries(name, shape, entries[name], gauge.precision)
            table = self.watched.processes.sum_whole_values(table)
            if len(self._axes[name]) == 1:
                table = table.first_column()  # (layers,)
            result.tables[name] = table
        return result

    def _measure_part(
        self, part: str, entries: dict[str, Entries], reasons: dict[tuple[str, str], str]
    ) -> None:
        for layer, row in enumerate(self._rows[part]):
            column = 0
            for matrix in row:
                # A matrix that cannot be read (a quantised one) loses its own values only, and no
                # process is left waiting for this one.
                try:
                    reason = self._measure_matrix(part, layer, column, matrix, entries)
                except Exception as error:
                    reason = f"it could not be measured: {type(error).__name__}: {error}"
                if reason is not None:
                    reasons[part, matrix.name] = reason
                column += matrix.heads

    def _measure_matrix(
        self, part: str, layer: int, column: int, matrix: Matrix, entries: dict[str, Entries]
    ) -> str | None:
        """Write the values of a matrix; return why one of them is 0, if so."""
        gauges = [gauge for gauge in self.due_gauges if gauge.part == part]
        needs_decomposition = any(gauge.given == "top" for gauge in gauges)
        reason = None
        for head, weights in enumerate(matrix.read()):
            top: TopSingular | None = None
            if needs_decomposition:
                top = top_singular(weights)
                # Weights that are not finite are an alert, and need no other reason.
                if top.reason and not math.isnan(top.sigma):
                    reason = top.reason
            for gauge in gauges:
                number = gauge.measure(weights, top)
                if number is not None:
                    entries[gauge.name][layer, column + head] = number
        return reason
