"""Gauges of kinds that read what they need from the model (`GaugeKind.read`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from joma._measure.gauges.registry import Gauge, number_or_none
from joma._measure.watch.meters.meter import Meter, MeterResult
from joma._measure.watch.watched import WatchedModel
from joma._runs.long_table import LongTable


class ReadMeter(Meter):
    """Measures gauges on what their kind reads from the model, after the step."""

    title = "kinds of your own"
    kinds = ()

    def __init__(self, watched: WatchedModel) -> None:
        super().__init__(watched)
        self.gauges = [gauge for gauge in watched.gauges if gauge.kind.read is not None]
        # Kind -> the names of its layers. A layer keeps its number when others come or go.
        self._layers: dict[str, list[str]] = {gauge.on: [] for gauge in self.gauges}

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        return {gauge.name: self._layers[gauge.on] for gauge in self.gauges}

    def measure(self, step: int, due: Collection[str]) -> MeterResult:
        self.due = due
        result = MeterResult()
        for gauge in self.due_gauges:
            try:
                result.tables[gauge.name] = self._measure_gauge(gauge)
            except Exception as error:  # a gauge must not stop the training
                reason = f"{type(error).__name__}: {error}"
                message = f"step {step}: {gauge.name} could not be measured: {reason}"
                result.report((gauge.on, gauge.name), message)
        return result

    def _measure_gauge(self, gauge: Gauge) -> LongTable:
        assert gauge.kind.read is not None
        layers = self._layers[gauge.on]
        with torch.no_grad():
            received = gauge.kind.read(self.watched.model)
            for name in received:
                if name not in layers:
                    layers.append(name)
            numbers: list[float | None] = []
            for name in layers:
                number = None
                if name in received:
                    number = number_or_none(gauge.function(received[name]))
                numbers.append(number)
        return LongTable.per_layer(gauge.name, numbers, gauge.precision)
