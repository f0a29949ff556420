"""A loss that rises for good."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

from joma._measure.watch.alarms.rule import LossAlarm
from joma._measure.watch.readings import Finding


@dataclass
class DivergingAlarm(LossAlarm):
    """Alarm for a loss that rises and does not come back.

    The rule looks at the median of the last `window` losses, the *smoothed loss*. Its start is the
    first smoothed loss, its best the lowest. The rule needs a stretch of `patience` smoothed
    losses, or `share` of all losses so far if that is longer, that never left one of these ranges:

    - *climbing*: above the best by `climb` of the way back to the start (and by `relative` of the
      best). The second half of the stretch is higher than the first by more than a standard
      deviation of the losses, and reaches a new high;
    - *stalled*: above the start by `margin` of it, and the second half of the stretch is not lower
      than the first;
    - *far off*: above `far` times the start, for twice the stretch, whatever the trend.

    Each range also begins `noise` standard deviations of the losses above its mark. They are
    measured before the rise. Those of the trend are measured in the stretch as well, since noisier
    data may be what made the loss jump. A curriculum, a restart of the learning rate or a fresh
    optimiser makes a healthy loss jump as well, but it then falls, and it stays below the start or
    comes back soon.

    The rule was written before the runs that score it (`benchmarks/divergence.py`) were made. It
    then found 8 of 10 diverging runs, with one false alert of 20. After that look, `climb` was
    changed from 0.5 to 0.25, and noise is measured in the stretch too. The rule is scored on other
    seeds.

    Attributes:
        since: step at which the rise began, while the loss diverges; else None.
        smoothed: median of the last losses.
        start: the first smoothed loss.
    """

    kind = "diverging"
    level = "critical"
    what_to_do = (
        "lower the learning rate or warm up longer, and go back to a checkpoint before the rise; "
        "if that does not help, check the sign and the scale of loss and gradients"
    )

    window: int = 5  # losses: one odd batch, or two, do not move their median
    patience: int = 6  # smoothed losses
    share: float = 0.04  # of all losses so far: late in a long run, a rise may take its time
    climb: float = 0.25  # of the way from the best back to the start; 0.5 at first
    relative: float = 0.2  # of the best
    margin: float = 0.05  # of the start
    far: float = 1.5  # times the start
    noise: float = 6.0  # standard deviations
    recent: int = 64  # differences of losses that noise is measured on
    since: int | None = field(default=None, init=False)
    smoothed: float = field(default=math.nan, init=False)
    start: float = field(default=math.nan, init=False)
    _best: float = field(default=math.inf, init=False, repr=False)
    _count: int = field(default=0, init=False, repr=False)  # losses so far
    _last_losses: list[float] = field(default_factory=list, init=False, repr=False)
    # Sizes of the differences of two losses in a row, before a rise and in it.
    _jumps: list[float] = field(default_factory=list, init=False, repr=False)
    _jumps_in_rise: list[float] = field(default_factory=list, init=False, repr=False)
    # (step, smoothed loss) of the stretch that may become a rise.
    _stretch: list[tuple[int, float]] = field(default_factory=list, init=False, repr=False)

    def take_loss(self, step: int, loss: float) -> None:
        """Take the loss of a step. A loss that is not finite is an alert of its own."""
        if not math.isfinite(loss):
            return
        self._count += 1
        self._take_jump(loss)
        self._last_losses = [*self._last_losses, loss][-self.window :]
        if len(self._last_losses) < self.window:
            return
        self.smoothed = median(self._last_losses)
        if math.isnan(self.start):
            self.start = self.smoothed
        self._best = min(self._best, self.smoothed)
        if self.smoothed <= self.threshold:
            self._stretch.clear()
            self._jumps_in_rise.clear()
            self.since = None
            return
        self._stretch.append((step, self.smoothed))
        if self.since is None and self._is_rising():
            self.since = self._stretch[0][0]

    def findings(self) -> list[Finding]:
        """Return one finding while the loss diverges."""
        if self.since is None:
            return []
        return [self.finding("loss", self.smoothed, self.threshold, is_everywhere=True)]

    def onset(self, step: int) -> int:
        """Return the step at which the rise began."""
        if self.since is None:
            return step
        return self.since

    @property
    def threshold(self) -> float:
        """The smoothed loss above which a rise is possible: where *climbing* begins."""
        climb = self.climb * (self.start - self._best)
        noise = self.noise * _deviation(self._jumps)
        return self._best + max(climb, self.relative * abs(self._best), noise)

    def _take_jump(self, loss: float) -> None:
        if not self._last_losses:
            return
        jump = abs(loss - self._last_losses[-1])
        if self._stretch:
            self._jumps_in_rise = [*self._jumps_in_rise, jump][-self.recent :]
        else:
            self._jumps = [*self._jumps, jump][-self.recent :]

    def _is_rising(self) -> bool:
        length = max(self.patience, math.ceil(self.share * self._count))
        losses = [loss for _, loss in self._stretch]
        if len(losses) < length:
            return False
        last = losses[-length:]
        first_half = last[: length // 2]
        second_half = last[length // 2 :]
        rise = median(second_half) - median(first_half)
        deviation = _deviation(self._jumps)

        has_new_high = max(second_half) > max(losses[: -len(second_half)])
        is_climbing = has_new_high and rise > max(deviation, _deviation(self._jumps_in_rise))

        stalled_mark = self.start + max(self.margin * abs(self.start), self.noise * deviation)
        is_stalled = min(last) > stalled_mark and rise >= 0

        far_mark = self.start + max((self.far - 1) * abs(self.start), self.noise * deviation)
        is_far_off = len(losses) >= 2 * length and min(losses[-2 * length :]) > far_mark
        return is_climbing or is_stalled or is_far_off


def _deviation(jumps: Collection[float]) -> float:
    """Return the standard deviation of one loss, from the differences of two in a row.

    A difference has √2 times the deviation of one loss. 1.4826 times the median size of a normal
    variable is its standard deviation.
    """
    if not jumps:
        return 0.0
    return 1.4826 * median(jumps) / math.sqrt(2)
