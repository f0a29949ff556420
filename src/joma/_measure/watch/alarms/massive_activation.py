"""Activations that are far larger than the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from joma._measure.watch.alarms.memory import Growth, PerPlace
from joma._measure.watch.alarms.rule import Alarm
from joma._measure.watch.readings import Finding, Reading


@dataclass
class MassiveActivationAlarm(Alarm):
    """Alarm for `massive_activation`: above `limit` and above `onset_factor` times its first value.

    Two measurements in a row have to be above both. The limit is the definition of Sun et al.,
    "Massive activations in large language models" (2024).
    """

    kind = "massive activation"
    level = "notice"
    what_to_do = "healthy models have them too; mind them in low precision and quantisation"
    gauges = ("massive_activation",)

    limit: float = 1000.0  # times the median activation, after Sun et al. (2024)
    onset_factor: float = 10.0  # times the first value: a model may start with them
    _growths: PerPlace[Growth] = field(
        default_factory=lambda: PerPlace(Growth),
        init=False,
        repr=False,
    )

    def observe(self, reading: Reading) -> Iterator[Finding]:
        """Yield the layers with massive activations that came up in training."""
        for measured in self.layer_values(reading):
            growth = self._growths[measured.place]
            threshold = growth.passed_threshold(measured.value, self.limit, self.onset_factor)
            if threshold is not None:
                yield self.finding(measured.gauge, measured.value, threshold, layer=measured.layer)
