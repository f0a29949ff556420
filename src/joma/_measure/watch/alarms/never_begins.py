"""Training that never begins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from joma._measure.watch.alarms.collapse import SPREAD_GAUGE
from joma._measure.watch.alarms.rule import Alarm, loss_of
from joma._measure.watch.phases import PATIENCE, loss_falls
from joma._measure.watch.readings import LOW, Finding, Reading


@dataclass
class NeverBeginsAlarm(Alarm):
    """Alarm for a model whose first layer collapses before the other layers begin to learn.

    The attention of the first layer is low and that of all others is uniform for `patience`
    measurements, and over the last quarter of the run the loss did not fall.
    """

    kind = "never begins"
    level = "critical"
    what_to_do = "lower the learning rate, warm up longer, or begin with fewer layers"

    low: float = LOW  # of the largest possible non-sink entropy, as for a collapse
    uniform: float = 0.95  # of the largest possible entropy
    patience: int = PATIENCE  # measurements
    # (step, loss) of each measurement since nothing begins
    _since: list[tuple[int, float]] = field(
        default_factory=list,
        init=False,
        repr=False,
    )

    def observe(self, reading: Reading) -> Iterator[Finding]:
        """Yield one finding, at the first layer, while nothing begins."""
        layers = reading.layers
        measured = [number for number, layer in enumerate(layers) if not math.isnan(layer.entropy)]
        if len(measured) < 2:
            return
        first = layers[measured[0]]
        others = [layers[number] for number in measured[1:]]
        shares = [layer.entropy / layer.possible for layer in others if layer.possible > 0]
        are_others_uniform = bool(shares) and min(shares) > self.uniform
        if not (first.nonsink < self.low and are_others_uniform):
            self._since.clear()
            return
        self._since.append((reading.step, loss_of(reading)))
        losses = [(step, loss) for step, loss in self._since if math.isfinite(loss)]
        if len(losses) >= self.patience and not loss_falls(losses, reading.step):
            yield self.finding(
                SPREAD_GAUGE,
                first.nonsink,
                self.low,
                layer=measured[0],
                is_everywhere=True,
            )
