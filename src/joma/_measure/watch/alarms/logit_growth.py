"""Attention logits that grow without bound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from joma._measure.watch.alarms.memory import Growth, PerPlace
from joma._measure.watch.alarms.rule import Alarm
from joma._measure.watch.phases import PATIENCE
from joma._measure.watch.readings import Finding, Reading


@dataclass
class LogitHistory(Growth):
    """The growth of a head's largest logit, and its last values."""

    recent: list[float] = field(default_factory=list)


@dataclass
class LogitGrowthAlarm(Alarm):
    """Alarm for the largest logit of a head (its largest logsumexp, without `max_logit`).

    There are three ways to raise it:

    - it *grows*: at two measurements in a row, the logit is above `limit` and above `grown` times
      its first value;
    - it *surges*: at two measurements in a row, it is above `strong` and above `surge` times the
      largest of the values that are `sudden` measurements old or older. That largest value has to
      be above `begun`, since the first growth of a head that has done nothing yet is healthy;
    - it *leaps*: it is above `limit` and above `leap` times all recent values. Once is enough.
    """

    kind = "logit growth"
    level = "warning"
    what_to_do = "clip queries and keys (QK-clip), normalise them, or lower the learning rate"
    gauges = ("max_logit",)

    limit: float = 100.0  # 100 is where QK-clip of Kimi K2 sets in
    grown: float = 2.0  # times the first value: a model may start with large logits
    strong: float = 15.0  # a softmax is all but one-hot at differences of 15
    surge: float = 2.5  # times all earlier values
    sudden: int = 6  # measurements that a surge takes at most
    begun: float = 2.0  # a head below it has done nothing yet
    leap: float = 10.0  # no batch is as odd as that
    patience: int = PATIENCE  # earlier values that a surge is compared with, at least
    memory: int = 32  # values
    _histories: PerPlace[LogitHistory] = field(
        default_factory=lambda: PerPlace(LogitHistory),
        init=False,
        repr=False,
    )

    def observe(self, reading: Reading) -> Iterator[Finding]:
        """Yield the heads whose logits grow, surge or leap."""
        if "max_logit" in reading.gauges:
            gauge = "max_logit"
            layers = reading.gauges["max_logit"]
        else:
            gauge = "max_logsumexp"
            layers = [layer.logsumexp for layer in reading.layers]
        for layer, values in enumerate(layers):
            for head, value in enumerate(values):
                history = self._histories[f"{gauge}:{layer}:{head}"]
                threshold = self._passed_threshold(history, value)
                if threshold is not None:
                    yield self.finding(gauge, value, threshold, layer=layer, head=head)

    def _passed_threshold(self, history: LogitHistory, value: float) -> float | None:
        # Both rules take every value, whatever the other one finds.
        grown = history.passed_threshold(value, self.limit, self.grown)
        surged = self._surged(history, value)
        if grown is not None:
            return grown
        return surged

    def _surged(self, history: LogitHistory, value: float) -> float | None:
        """Take a value; return the threshold if it surges or leaps."""
        if not math.isfinite(value):
            return None
        leap_threshold = max(self.limit, self.leap * max(history.recent, default=math.inf))
        history.recent = [*history.recent, value][-self.memory :]
        if value > leap_threshold:
            return leap_threshold
        past = history.recent[: -self.sudden]
        if len(past) < self.patience or max(past) < self.begun:
            return None
        threshold = max(self.strong, self.surge * max(past))
        if min(history.recent[-2:]) > threshold:
            return threshold
        return None
