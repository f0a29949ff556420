"""The rule for a loss that rises for good.

It looks at the median of the last WINDOW losses, *the level*. Its start is the first level, its best the lowest. The
rule asks for a stretch of max(PATIENCE, SHARE of all losses so far) in which the level never left one of these ranges:

    climbing   above the best by CLIMB of the way back to the start (and by RELATIVE of the best), and the second half
               of the stretch is higher than the first by more than a standard deviation of the losses, and a new high
    stalled    above the start by MARGIN of it, and the second half of the stretch is not lower than the first
    far off    above FAR times the start, for twice the stretch, whatever the trend

Each range also begins NOISE standard deviations of the losses above its mark; they are measured
before the rise, and those of the trend in the stretch itself as well, since noisier data may be
what made the loss jump. A curriculum, a restart of the learning rate or a fresh optimiser makes a
healthy loss jump as well, but it then falls, and it stays below the start or comes back soon. The
rule was written before the runs that score it (`benchmarks/divergence.py`) were made. It then found
8 of 10 diverging runs, with one false alert of 20. CLIMB was 0.5, and noise was measured before the
rise alone; both were changed after that look, and the rule is scored on other seeds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any

WINDOW = 5  # losses: a single odd batch, or two, do not move their median
PATIENCE = 6  # levels
SHARE = 0.04  # of all losses so far: late in a long run, a rise may take its time
CLIMB = 0.25
RELATIVE = 0.2
MARGIN = 0.05
FAR = 1.5
NOISE = 6.0
RECENT = 64  # losses that noise is measured on


class Divergence:
    """Judges a series of losses, one at a time.

    Attributes:
        since: the step at which the rise began, while the loss diverges; else None.
        level: the median of the last losses.
        start: the first level.
    """

    def __init__(self) -> None:
        self.since: int | None = None
        self.level = math.nan
        self.start = math.nan
        self._best = math.inf
        self._count = 0
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._last_loss = math.nan
        self._jumps: deque[float] = deque(maxlen=RECENT)  # sizes of the differences of losses in a row, before a rise
        self._jumps_in_rise: deque[float] = deque(maxlen=RECENT)
        self._levels: list[tuple[int, float]] = []  # (step, level) of the stretch that may become a rise

    def update(self, step: int, loss: float) -> bool:
        """Take the loss of a step; return True while it diverges."""
        if not math.isfinite(loss):  # an alert of its own
            return self.since is not None
        self._count += 1
        if math.isfinite(self._last_loss):
            jumps = self._jumps_in_rise if self._levels else self._jumps
            jumps.append(abs(loss - self._last_loss))
        self._last_loss = loss
        self._window.append(loss)
        if len(self._window) < WINDOW:
            return False
        self.level = median(self._window)
        if math.isnan(self.start):
            self.start = self.level
        self._best = min(self._best, self.level)
        if self.level <= self._mark():
            self._levels.clear()
            self._jumps_in_rise.clear()
            self.since = None
            return False
        self._levels.append((step, self.level))
        if self.since is None and self._rises():
            self.since = self._levels[0][0]
        return self.since is not None

    @property
    def threshold(self) -> float:
        """The level below which the rise would be over."""
        return self._mark()

    def _mark(self) -> float:
        """Return the level from which on a rise is possible: where *climbing* begins."""
        climb = CLIMB * (self.start - self._best)
        return self._best + max(climb, RELATIVE * abs(self._best), NOISE * _deviation(self._jumps))

    def _rises(self) -> bool:
        stretch = max(PATIENCE, math.ceil(SHARE * self._count))
        levels = [level for _, level in self._levels]
        if len(levels) < stretch:
            return False
        last = levels[-stretch:]
        first_half = last[: stretch // 2]
        second_half = last[stretch // 2 :]
        has_new_high = max(second_half) > max(levels[: -len(second_half)])
        climb = median(second_half) - median(first_half)
        deviation = _deviation(self._jumps)
        climbing = has_new_high and climb > max(deviation, _deviation(self._jumps_in_rise))
        stalled_mark = self.start + max(MARGIN * abs(self.start), NOISE * deviation)
        stalled = min(last) > stalled_mark and median(second_half) >= median(first_half)
        far_mark = self.start + max((FAR - 1) * abs(self.start), NOISE * deviation)
        is_far_off = len(levels) >= 2 * stretch and min(levels[-2 * stretch :]) > far_mark
        return climbing or stalled or is_far_off

    def state(self) -> dict[str, Any]:
        """Return all of it as plain numbers."""
        return {
            "since": self.since,
            "level": self.level,
            "start": self.start,
            "best": self._best,
            "count": self._count,
            "window": list(self._window),
            "last_loss": self._last_loss,
            "jumps": list(self._jumps),
            "jumps_in_rise": list(self._jumps_in_rise),
            "levels": [list(pair) for pair in self._levels],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Divergence:
        """Return the rule as it was when `state` was made."""
        rule = cls()
        rule.since = state["since"]
        rule.level = float(state["level"])
        rule.start = float(state["start"])
        rule._best = float(state["best"])
        rule._count = int(state["count"])
        rule._window.extend(state["window"])
        rule._last_loss = float(state["last_loss"])
        rule._jumps.extend(state["jumps"])
        rule._jumps_in_rise.extend(state["jumps_in_rise"])
        rule._levels = [(int(step), float(level)) for step, level in state["levels"]]
        return rule


def _deviation(jumps: Collection[float]) -> float:
    """Return the standard deviation of one loss, from the differences of two in a row, which have √2 of it."""
    if not jumps:
        return 0.0
    return 1.4826 * median(jumps) / math.sqrt(2)
