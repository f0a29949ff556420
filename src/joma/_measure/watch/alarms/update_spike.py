"""Single steps that change far more than the steps before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from joma._measure.watch.alarms.rule import Alarm, GaugeValue
from joma._measure.watch.phases import PATIENCE
from joma._measure.watch.readings import Finding, Reading


@dataclass
class UpdateSpikeAlarm(Alarm):
    """Alarm for a step whose `update_ratio` or `gradient_norm` is far above those before.

    The value is above `spike` times the median of the last `memory` values of its layer. An update
    also has to move the weights by `least_update` of their size.
    """

    kind = "update spike"
    level = "warning"
    what_to_do = "clip gradients, look at the batch of this step, or lower the learning rate"
    gauges = ("update_ratio", "gradient_norm")

    spike: float = 10.0  # times the median
    least_update: float = 1e-3  # smaller updates raise no alarm, however sudden
    patience: int = PATIENCE  # values that the median needs
    memory: int = 32  # values
    # place -> its last values
    _recent: dict[str, list[float]] = field(
        default_factory=dict,
        init=False,
        repr=False,
    )

    def observe(self, reading: Reading) -> Iterator[Finding]:
        """Yield the layers in which this step is a spike."""
        for measured in self.layer_values(reading):
            recent = self._recent.get(measured.place, [])
            threshold = self._threshold(measured, recent)
            if math.inf > measured.value > threshold:
                yield self.finding(measured.gauge, measured.value, threshold, layer=measured.layer)
            elif math.isfinite(measured.value):
                # A spike itself is left out: it would raise the median of the next values.
                self._recent[measured.place] = [*recent, measured.value][-self.memory :]

    def _threshold(self, measured: GaugeValue, recent: list[float]) -> float:
        if len(recent) < self.patience:
            return math.inf
        threshold = self.spike * median(recent)
        if measured.gauge.split(".")[0] == "update_ratio":
            return max(threshold, self.least_update)
        return threshold
