"""What a layer's attention is doing: `dense`, `sparsifying`, `bouncing`, `collapsed`.

The rules, on the median s of the last three entropies (nats, mean over heads and queries):

    dense → sparsifying     s fell by max(0.1, 5 % of the peak) below the peak
    sparsifying → bouncing  s rose by max(0.05, 10 % of the deepest dip so far) above the trough
    bouncing → dense        s is back within 10 % of the depth of the peak
    bouncing → sparsifying  s fell below the trough; or, a second dip, below the crest by max(0.1, 5 % of the crest,
                            25 % of the deepest dip so far)
    any → collapsed         non-sink entropy below 0.1 nats at the last `PATIENCE` measurements, and over the last
                            quarter of the run (these measurements at least) the loss did not fall by 0.5 %
    collapsed → sparsifying non-sink entropy above 0.2 nats

What takes a step back differs from what takes it forward, so noise does not make a phase flicker. Non-sink entropy is
the mean over heads that are not sinks (mean mass on the first token at most 0.9): a head that parks its mass there is
healthy, and so is a layer that is sparse while the loss falls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

PHASES = ("dense", "sparsifying", "bouncing", "collapsed")
PATIENCE = 8
_LOW, _RECOVERED = 0.1, 0.2  # nats of non-sink entropy
_SINK = 0.9


@dataclass
class Phase:
    """The phase of one layer, and the numbers behind it."""

    name: str = "dense"
    peak: float = -math.inf  # before the dip
    trough: float = math.inf
    crest: float = -math.inf  # since the trough
    deepest: float = 0.0  # dip so far
    entropy: float = math.nan  # smoothed
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=3), repr=False)
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
        recent, low = deque(state["_recent"], maxlen=3), [(int(at), float(loss)) for at, loss in state["_low"]]
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
            if s <= self.peak - max(0.1, 0.05 * self.peak):
                self.name, self.trough, self.crest = "sparsifying", s, -math.inf
        elif self.name == "bouncing":
            self.crest = max(self.crest, s)
            if s < self.trough:
                self.name, self.trough, self.crest = "sparsifying", s, -math.inf
            elif s >= self.peak - 0.1 * (self.peak - self.trough):
                self.name, self.peak = "dense", s
            elif s <= self.crest - max(0.1, 0.05 * self.crest, 0.25 * self.deepest):
                self.name, self.peak, self.trough, self.crest = "sparsifying", self.crest, s, -math.inf
        else:  # sparsifying; and a collapsed layer's trough is followed as well
            self.trough = min(self.trough, s)
            self.deepest = max(self.deepest, self.peak - self.trough)
            if self.name == "sparsifying" and s >= self.trough + max(0.05, 0.1 * self.deepest):
                self.name, self.crest = "bouncing", s

    def _judge_collapse(self, step: int, nonsink: float, loss: float) -> None:
        if math.isnan(nonsink):
            return
        if self.name == "collapsed":
            if nonsink > _RECOVERED:
                self.name, self.crest = "sparsifying", -math.inf
                self._low.clear()
            return
        if nonsink >= _LOW:
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
    kept = [n for n, m in zip(nonsink, sink_mass, strict=True) if math.isfinite(n) and m <= _SINK]
    return sum(kept) / len(kept) if kept else math.nan
