"""What a layer's attention is doing: `dense`, `sparsifying`, `bouncing`, `collapsed`.

The rules, on the median s of the last ``RULE.window`` entropies (nats, mean over heads and queries), with the
thresholds of `joma._run.curve.Rule`:

    dense → sparsifying     s fell by RULE.least_fall(peak) below the peak
    sparsifying → bouncing  s rose by RULE.least_rise(deepest dip so far) above the trough
    bouncing → dense        s is back at the peak, but for a share BACK of the depth
    bouncing → sparsifying  s fell below the trough; or, a second dip, below the crest by RULE.least_fall(crest) and by
                            a share SECOND of the deepest dip so far
    any → collapsed         non-sink entropy below LOW at the last `PATIENCE` measurements, and over the last quarter
                            of the run (these measurements at least) the loss did not fall by 0.5 %
    collapsed → sparsifying non-sink entropy above RECOVERED

What takes a step back differs from what takes it forward, so noise does not make a phase flicker. Non-sink entropy is
the mean over heads that are not sinks (mean mass on the first token at most SINK): a head that parks its mass there is
healthy, and so is a layer that is sparse while the loss falls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from joma._run.curve import ONLINE

PHASES = ("dense", "sparsifying", "bouncing", "collapsed")
RULE = ONLINE
BACK, SECOND = 0.1, 0.25  # of the depth of the dip
PATIENCE = 8
LOW, RECOVERED = 0.1, 0.2  # nats of non-sink entropy
SINK = 0.9


@dataclass
class Phase:
    """The phase of one layer, and the numbers behind it."""

    name: str = "dense"
    peak: float = -math.inf  # before the dip
    trough: float = math.inf
    crest: float = -math.inf  # since the trough
    deepest: float = 0.0  # dip so far
    entropy: float = math.nan  # smoothed
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RULE.window), repr=False)
    _low: list[tuple[int, float]] = field(
        default_factory=list, repr=False
    )  # (step, loss) while non-sink entropy is low

    @property
    def depth(self) -> float:
        """How far entropy fell from its peak, in nats; 0 before a dip."""
        return max(0.0, self.peak - self.trough) if self.name != "dense" or math.isfinite(self.trough) else 0.0

    @property
    def bounce(self) -> float:
        """How far entropy rose from its trough so far."""
        return max(0.0, self.crest - self.trough) if math.isfinite(self.trough) and math.isfinite(self.crest) else 0.0

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        return {**vars(self), "_recent": list(self._recent), "_low": [list(pair) for pair in self._low]}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Phase:
        """The phase that `state` told of."""
        recent = deque(state["_recent"], maxlen=RULE.window)
        low = [(int(at), float(loss)) for at, loss in state["_low"]]
        return cls(**{**state, "_recent": recent, "_low": low})

    def update(self, step: int, entropy: float, nonsink: float = math.nan, loss: float = math.nan) -> str:
        """Take one measurement; returns the phase."""
        if math.isfinite(entropy):
            self._recent.append(entropy)
            self.entropy = median(self._recent)
            self._turn(self.entropy)
        self._judge_collapse(step, nonsink, loss)
        return self.name

    def _turn(self, s: float) -> None:
        if self.name == "dense":
            self.peak = max(self.peak, s)
            if s <= self.peak - RULE.least_fall(self.peak):
                self.name, self.trough, self.crest = "sparsifying", s, -math.inf
        elif self.name == "bouncing":
            self.crest = max(self.crest, s)
            if s < self.trough:
                self.name, self.trough, self.crest = "sparsifying", s, -math.inf
            elif s >= self.peak - BACK * (self.peak - self.trough):
                self.name, self.peak = "dense", s
            elif s <= self.crest - max(RULE.least_fall(self.crest), SECOND * self.deepest):
                self.name, self.peak, self.trough, self.crest = "sparsifying", self.crest, s, -math.inf
        else:  # sparsifying; and a collapsed layer's trough is followed as well
            self.trough = min(self.trough, s)
            self.deepest = max(self.deepest, self.peak - self.trough)
            if self.name == "sparsifying" and s >= self.trough + RULE.least_rise(self.deepest):
                self.name, self.crest = "bouncing", s

    def _judge_collapse(self, step: int, nonsink: float, loss: float) -> None:
        if math.isnan(nonsink):
            return
        if self.name == "collapsed":
            if nonsink > RECOVERED:
                self.name, self.crest = "sparsifying", -math.inf
                self._low.clear()
            return
        if nonsink >= LOW:
            self._low.clear()
        elif math.isfinite(loss):
            self._low.append((step, loss))
            if len(self._low) >= PATIENCE and not _falls(self._low, step):
                self.name = "collapsed"
                if not math.isfinite(self.trough):
                    self.trough = self.entropy


def _falls(low: Sequence[tuple[int, float]], step: int) -> bool:
    """Did the loss fall by 0.5 % over the last quarter of the run, and over the last PATIENCE measurements at least?"""
    if low[0][0] > 0.75 * step:  # not low for that long yet
        return True
    window = [loss for at, loss in low if at >= 0.75 * step]
    window = window if len(window) >= PATIENCE else [loss for _, loss in low[-PATIENCE:]]
    half = len(window) // 2
    before, after = median(window[:half]), median(window[half:])
    return after <= before - 0.005 * abs(before)


def nonsink_of_layer(nonsink: Sequence[float], sink_mass: Sequence[float]) -> float:
    """Mean non-sink entropy over the heads that are not sinks; NaN if all are."""
    kept = [n for n, m in zip(nonsink, sink_mass, strict=True) if math.isfinite(n) and m <= SINK]
    return sum(kept) / len(kept) if kept else math.nan
