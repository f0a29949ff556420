"""Phases of attention: `dense`, `sparsifying`, `bouncing`, `collapsed`, `failing`, `ended`.

The first three are phases of a healthy layer. While a critical alert holds, a layer is `ended` if
the alert is about numbers that are not finite, and otherwise `collapsed` or `failing`.

The rules look at s, the median of the last ``RULE.window`` entropies (nats, mean over heads and
queries), with the thresholds of `joma._runs.curve.Rule`:

    dense → sparsifying     s fell by RULE.least_fall(peak) below the peak
    sparsifying → bouncing  s rose by RULE.least_rise(deepest dip so far) above the trough
    bouncing → dense        s is back at the peak, up to a share RETURN_SHARE of the depth
    bouncing → sparsifying  s fell below the trough; or, a second dip, it fell below the crest by
                            RULE.least_fall(crest) and by SECOND_DIP_SHARE of the deepest dip so far
    any → collapsed         the layer's non-sink attention is low (`Stuck`); or it was low at the
                            last `PATIENCE` measurements, and the loss did not fall by LEAST_GAIN
                            over the last quarter of the run
    collapsed → sparsifying non-sink attention is above RECOVERED

Two things keep noise from making a phase flicker. The thresholds of a step back differ from those
of the step forward, and a fall or rise has to be NOISE_DEVIATIONS times the noise of the curve. The
noise is estimated from second differences, which do not see a trend.

A change of the largest possible entropy means that the sequences have another length: the entropies
so far are then scaled to it. Non-sink attention is the mean over heads that are not sinks: a head
that parks its mass on a sink is healthy, and so is a layer that is sparse while the loss falls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from joma._measure.watch.readings import LOW, RECOVERED
from joma._runs.curve import ONLINE

PHASES = ("dense", "sparsifying", "bouncing", "collapsed", "failing", "ended")
RULE = ONLINE

# Share of the depth of a dip. An entropy that stays this far below its peak counts as back.
RETURN_SHARE = 0.1

# Share of the deepest dip so far. A second fall that is smaller belongs to the bounce.
SECOND_DIP_SHARE = 0.25

# Standard deviations: white noise spans 7 of them in a thousand measurements.
NOISE_DEVIATIONS = 9.0

# Number of last measurements that the noise is estimated from.
NOISE_MEASUREMENTS = 64

# The standard deviation of a median of three values (RULE.window), in those of one value.
_MEDIAN_OF_THREE = 0.67

# 1.4826 times the median size of a normal variable is its standard deviation.
_DEVIATION_OF_MEDIAN = 1.4826

# Low measurements in a row before low means anything.
PATIENCE = 8

# Relative change of the largest possible entropy from which sequences have another length.
LENGTH_CHANGE = 0.02

# Share of the loss: a loss that falls by less over a quarter of the run stands still.
LEAST_GAIN = 0.005


@dataclass
class Stuck:
    """Counts the measurements in a row at which a number is low, and watches the loss meanwhile."""

    count: int = 0  # measurements in a row at which the number is low
    best: float = math.inf  # best loss when the number became low; inf if no loss was known
    better: bool = False  # True if a better loss was reached since then
    usual: float = math.inf  # loss that was exceeded only by chance when the number became low

    def is_stuck(self, patience: int = PATIENCE) -> bool:
        """Return True after ``patience`` low measurements without a new best loss."""
        return self.count >= patience and not self.better and math.isfinite(self.best)

    def update(
        self, is_low: bool, is_over: bool, loss: float, best: float, usual: float = math.inf
    ) -> None:
        """Take one measurement.

        Arguments:
            is_low: True if the number is low.
            is_over: True if the number has recovered. A number that is neither stays what it was.
            loss: of this measurement. NaN means unknown, and is not better.
            best: best loss so far, this one included.
            usual: loss that earlier measurements exceed only by chance.
        """
        if self.count > 0 and is_over:
            self.count = 0
            self.best = math.inf
            self.better = False
            self.usual = math.inf
        elif self.count > 0:
            self.count += 1
            self.better |= loss < self.best
        elif is_low:
            self.count = 1
            self.best = best
            self.better = False
            self.usual = usual


@dataclass
class Phase:
    """The phase of one layer, and the numbers behind it.

    Attributes:
        name: one of `PHASES`.
        peak: highest smoothed entropy before the dip.
        trough: lowest smoothed entropy of the dip.
        crest: highest smoothed entropy since the trough.
        deepest: depth of the deepest dip so far.
        entropy: smoothed entropy now, in nats.
        since: step of the first measurement in this phase.
        trouble: kind of the critical alert that holds; "" if none does.
    """

    name: str = "dense"
    peak: float = -math.inf
    trough: float = math.inf
    crest: float = -math.inf
    deepest: float = 0.0
    entropy: float = math.nan
    since: int = 0
    trouble: str = ""

    # The phase by the curve of entropy and by collapse, whatever alerts hold.
    _shape: str = field(default="dense", repr=False)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RULE.window), repr=False)
    # Sizes of the last second differences of entropy.
    _bends: deque[float] = field(
        default_factory=lambda: deque(maxlen=NOISE_MEASUREMENTS), repr=False
    )
    _possible: float = field(default=math.nan, repr=False)  # largest possible entropy
    _best: float = field(default=math.inf, repr=False)  # loss so far
    _stuck: Stuck = field(default_factory=Stuck, repr=False)
    # (step, loss) of each measurement while non-sink entropy is low.
    _low: list[tuple[int, float]] = field(default_factory=list, repr=False)

    @property
    def depth(self) -> float:
        """Fall of entropy from its peak, in nats; 0 before a dip."""
        if not math.isfinite(self.trough):
            return 0.0
        return max(0.0, self.peak - self.trough)

    @property
    def bounce(self) -> float:
        """Rise of entropy from its trough so far, in nats."""
        if not (math.isfinite(self.trough) and math.isfinite(self.crest)):
            return 0.0
        return max(0.0, self.crest - self.trough)

    def __str__(self) -> str:
        """Return words such as "sparsifying since step 300 (2.41 nats, 0.64 below its peak)"."""
        if self.name in ("ended", "failing"):
            return f"{self.name} since step {self.since:,} ({self.trouble})"
        if math.isnan(self.entropy):
            return "not measured"
        moved = ""
        if self.depth:
            moved += f", {self.depth:.2f} below its peak at the lowest"
        if self.bounce:
            moved += f", {self.bounce:.2f} up again"
        return f"{self.name} since step {self.since:,} ({self.entropy:.2f} nats{moved})"

    def state(self) -> dict[str, Any]:
        """Return all fields as plain numbers."""
        return {
            **vars(self),
            "_recent": list(self._recent),
            "_bends": list(self._bends),
            "_stuck": dict(vars(self._stuck)),
            "_low": [list(pair) for pair in self._low],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Phase:
        """Return the phase that a `state` describes."""
        fields = {
            **state,
            "_recent": deque(state["_recent"], maxlen=RULE.window),
            "_bends": deque(state["_bends"], maxlen=NOISE_MEASUREMENTS),
            "_stuck": Stuck(**state["_stuck"]),
            "_low": [(int(step), float(loss)) for step, loss in state["_low"]],
        }
        return cls(**fields)

    def update(
        self,
        step: int,
        entropy: float,
        nonsink: float = math.nan,
        loss: float = math.nan,
        possible: float = math.nan,
        has_collapsed_heads: bool = False,
    ) -> str:
        """Take one measurement and return the name of the phase.

        Arguments:
            step: of the measurement.
            entropy: in nats.
            nonsink: non-sink entropy as a share of the largest possible one; NaN if it has no
                meaning.
            loss: NaN if it is unknown.
            possible: largest possible entropy, in nats.
            has_collapsed_heads: True if most heads have collapsed by themselves.
        """
        name_before = None  # at the first measurement, the phase begins
        if math.isfinite(self.entropy):
            name_before = self.name
        self._rescale(possible)
        if math.isfinite(entropy):
            if len(self._recent) == RULE.window:
                self._bends.append(abs(entropy - 2 * self._recent[-1] + self._recent[-2]))
            self._recent.append(entropy)
            self.entropy = median(self._recent)
            self._turn(self.entropy)
        self._judge_collapse(step, nonsink, loss, has_collapsed_heads)
        self._settle(step, name_before)
        return self.name

    @property
    def has_collapsed(self) -> bool:
        """True if attention is collapsed by its own numbers, whatever alerts hold."""
        return self._shape == "collapsed"

    def judge(self, step: int, trouble: str) -> None:
        """Take the kind of the critical alert that holds at this layer; "" if none does."""
        self.trouble = trouble
        self._settle(step, self.name)

    def _settle(self, step: int, name_before: str | None) -> None:
        """Name the phase after its trouble, or else after the curve of entropy."""
        if self.trouble == "not finite":
            self.name = "ended"
        elif self.trouble and self._shape != "collapsed":
            self.name = "failing"
        else:
            self.name = self._shape
        if self.name != name_before:
            self.since = step

    def _rescale(self, possible: float) -> None:
        """Scale the entropies so far to those of the present length of sequences, if it changed."""
        if not possible > 0:
            return
        factor = 1.0
        if self._possible > 0:
            factor = possible / self._possible
        if math.isfinite(self._possible) and abs(factor - 1) <= LENGTH_CHANGE:
            return
        self._possible = possible
        for name in ("peak", "trough", "crest", "deepest", "entropy"):
            setattr(self, name, getattr(self, name) * factor)
        self._recent = deque((entropy * factor for entropy in self._recent), maxlen=RULE.window)

    @property
    def _noise(self) -> float:
        """The smallest change of the smoothed curve that noise does not explain."""
        if len(self._bends) < RULE.window:
            return 0.0
        # x₀ − 2x₁ + x₂ of white noise has √6 times the deviation of x.
        scale = NOISE_DEVIATIONS * _MEDIAN_OF_THREE * _DEVIATION_OF_MEDIAN
        return scale * median(self._bends) / math.sqrt(6)

    def _turn(self, entropy: float) -> None:
        """Follow the curve of the smoothed entropy."""
        noise = self._noise
        if self._shape == "dense":
            self.peak = max(self.peak, entropy)
            if entropy <= self.peak - max(RULE.least_fall(self.peak), noise):
                self._begin_dip(entropy)
        elif self._shape == "bouncing":
            self.crest = max(self.crest, entropy)
            second_dip = max(RULE.least_fall(self.crest), SECOND_DIP_SHARE * self.deepest, noise)
            if entropy < self.trough - noise:
                self._begin_dip(entropy)
            elif entropy >= self.peak - RETURN_SHARE * (self.peak - self.trough):
                self._shape = "dense"
                self.peak = entropy
            elif entropy <= self.crest - second_dip:
                self.peak = self.crest
                self._begin_dip(entropy)
        else:
            # Sparsifying. The trough of a collapsed layer is followed as well.
            self.trough = min(self.trough, entropy)
            self.deepest = max(self.deepest, self.peak - self.trough)
            least_rise = max(RULE.least_rise(self.deepest), noise)
            if self._shape == "sparsifying" and entropy >= self.trough + least_rise:
                self._shape = "bouncing"
                self.crest = entropy

    def _begin_dip(self, entropy: float) -> None:
        self._shape = "sparsifying"
        self.trough = entropy
        self.crest = -math.inf

    def _judge_collapse(
        self, step: int, nonsink: float, loss: float, has_collapsed_heads: bool
    ) -> None:
        if math.isfinite(loss):
            self._best = min(self._best, loss)
        is_known = not math.isnan(nonsink)
        if is_known:
            self._stuck.update(nonsink < LOW, nonsink > RECOVERED, loss, self._best)
        if self._shape == "collapsed":
            if nonsink > RECOVERED and not has_collapsed_heads:
                self._shape = "sparsifying"
                self.crest = -math.inf
                self._low.clear()
            return
        if nonsink >= LOW:
            self._low.clear()
        elif is_known and math.isfinite(loss):
            self._low.append((step, loss))
        is_lasting = len(self._low) >= PATIENCE and not loss_falls(self._low, step)
        if self._stuck.is_stuck() or is_lasting or has_collapsed_heads:
            self._shape = "collapsed"
            if not math.isfinite(self.trough):
                self.trough = self.entropy


class Phases(list[Phase]):
    """One `Phase` per layer: a list that prints one line per layer."""

    def state(self) -> list[dict[str, Any]]:
        """Return the states of all phases."""
        return [phase.state() for phase in self]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a `state`."""
        self[:] = [Phase.restored(phase) for phase in state]

    def __str__(self) -> str:
        if not self:
            return "no layer was measured yet"
        return "\n".join(f"layer {number}: {phase}" for number, phase in enumerate(self))

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"


def loss_falls(losses: Sequence[tuple[int, float]], step: int) -> bool:
    """Return True if the loss fell by `LEAST_GAIN` over the last quarter of the run.

    Arguments:
        losses: (step, loss) since something is low. At least the last `PATIENCE` of them count. If
            they do not reach back over that quarter, it is too early to judge, and the loss counts
            as falling.
        step: the last step of the run so far.
    """
    start = 0.75 * step
    if losses[0][0] > start:
        return True
    window = [loss for at, loss in losses if at >= start]
    if len(window) < PATIENCE:
        window = [loss for _, loss in losses[-PATIENCE:]]
    half = len(window) // 2
    before = median(window[:half])
    after = median(window[half:])
    return after <= before - LEAST_GAIN * abs(before)
