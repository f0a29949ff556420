"""Attention that collapses onto single tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from joma._measure.watch.alarms.memory import PerPlace
from joma._measure.watch.alarms.rule import Alarm, loss_of
from joma._measure.watch.phases import PATIENCE, Phase, Phases, Stuck
from joma._measure.watch.readings import (
    HIGH_LEVEL,
    LOW,
    LOW_LEVEL,
    UNKNOWN_LEVEL,
    AttentionReading,
    Finding,
    Reading,
)

SPREAD_GAUGE = "normalised non-sink entropy"


@dataclass
class CollapseAlarm(Alarm):
    """Alarm for heads that attend to almost nothing but one token.

    The non-sink attention of a head is low (or all of its attention is on sinks) for `patience`
    measurements, and the loss reached no new best since it became low (NaN is not better). A single
    head may be sharp in a healthy model. So a head counts only if most heads of its layer are low
    as well, or if the loss is worse than it was before. A layer whose phase is `collapsed` counts
    as a whole. A head that parks most of its mass on a sink and attends elsewhere too is healthy.

    Readings decide which heads are low (`readings.level_of_head`), since run folders keep one
    letter per head. The alarm also follows the phases of all layers: most heads of a layer that
    collapse change its phase, and a phase that is `collapsed` is a finding.

    Attributes:
        phases: one per attention layer.
    """

    kind = "collapse"
    level = "critical"
    what_to_do = (
        "the usual cause is a learning rate that is too high: lower it, warm up longer, or "
        "normalise queries and keys; go back to a checkpoint before it"
    )

    patience: int = PATIENCE  # measurements; the phases have the same
    scatter: float = 2.0  # median deviations above its median that the loss reaches by chance
    phases: Phases = field(default_factory=Phases, init=False)
    _stuck: PerPlace[Stuck] = field(default_factory=lambda: PerPlace(Stuck), init=False, repr=False)
    _losses: list[float] = field(default_factory=list, init=False, repr=False)  # the last ones
    _best: float = field(default=math.inf, init=False, repr=False)  # loss so far

    def observe(self, reading: Reading) -> Iterator[Finding]:
        """Follow the phases of all layers and yield the heads and layers that have collapsed."""
        loss = loss_of(reading)
        self._take_loss(loss)
        usual_loss = self._usual_loss()
        recent_loss = self._recent_loss()
        while len(self.phases) < len(reading.layers):
            self.phases.append(Phase())
        for number, layer in enumerate(reading.layers):
            heads = self._follow_heads(number, layer, loss, usual_loss)
            low_heads = [head for head, stuck in heads.items() if stuck.count > 0]
            are_most_low = 2 * len(low_heads) > len(layer.levels)
            collapsed_heads = []
            for head, stuck in heads.items():
                is_loss_worse = recent_loss > stuck.usual
                if stuck.is_stuck(self.patience) and (are_most_low or is_loss_worse):
                    collapsed_heads.append(head)
            # Most heads that collapse by themselves make the phase of their layer `collapsed`.
            have_most_collapsed = 2 * len(collapsed_heads) > len(layer.levels)
            phase = self.phases[number]
            phase.update(
                reading.step,
                layer.entropy,
                layer.nonsink,
                loss,
                layer.possible,
                have_most_collapsed,
            )
            for head in collapsed_heads:
                spread = layer.spread[head]
                yield self.finding(SPREAD_GAUGE, spread, LOW, layer=number, head=head)
            if phase.has_collapsed and not collapsed_heads:
                yield self.finding(SPREAD_GAUGE, layer.nonsink, LOW, layer=number)

    def _follow_heads(
        self,
        number: int,
        layer: AttentionReading,
        loss: float,
        usual_loss: float,
    ) -> dict[int, Stuck]:
        """Update the heads of a layer that have numbers, and return them."""
        heads = {}
        for head, level in enumerate(layer.levels):
            if level == UNKNOWN_LEVEL:
                continue
            stuck = self._stuck[f"{number}:{head}"]
            is_low = level == LOW_LEVEL
            is_over = level == HIGH_LEVEL
            stuck.update(is_low, is_over, loss, self._best, usual_loss)
            heads[head] = stuck
        return heads

    def _take_loss(self, loss: float) -> None:
        if math.isfinite(loss):
            self._best = min(self._best, loss)
        self._losses = [*self._losses, loss][-self.patience - 1 :]

    def _recent_loss(self) -> float:
        """Return the median of the last losses. NaN counts as +inf."""
        losses = [loss if math.isfinite(loss) else math.inf for loss in self._losses]
        return median(losses[-self.patience :])

    def _usual_loss(self) -> float:
        """Return what the losses before this one exceed only by chance; +inf if there are few."""
        losses = [loss for loss in self._losses[:-1] if math.isfinite(loss)]
        if len(losses) < self.patience // 2:
            return math.inf
        middle = median(losses)
        deviation = median([abs(loss - middle) for loss in losses])
        return middle + self.scatter * deviation
