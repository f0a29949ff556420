"""What a layer's attention is doing: `dense`, `sparsifying`, `bouncing`, `collapsed`, `failing`, `ended`.

While a critical alert stands, a layer is never called by one of the first three names, which healthy layers have: it is
`ended` if the alert is about numbers that are not finite, else `collapsed` or `failing`.

The rules, on the median s of the last ``RULE.window`` entropies (nats, mean over heads and queries), with the
thresholds of `joma._run.curve.Rule`:

    dense → sparsifying     s fell by RULE.least_fall(peak) below the peak
    sparsifying → bouncing  s rose by RULE.least_rise(deepest dip so far) above the trough
    bouncing → dense        s is back at the peak, but for a share BACK of the depth
    bouncing → sparsifying  s fell below the trough; or, a second dip, below the crest by RULE.least_fall(crest) and by
                            a share SECOND of the deepest dip so far
    any → collapsed         the layer's non-sink attention is low (`Stuck`); or low at the last `PATIENCE` measurements
                            while over the last quarter of the run the loss did not fall by 0.5 %
    collapsed → sparsifying it is above RECOVERED

What takes a step back differs from what takes it forward, and a fall or rise must be NOISE times the noise of the
curve (by its second differences, which do not see a trend), so that noise does not make a phase flicker. Where the
largest possible entropy changes, the sequences have another length: what was seen so far is scaled to it. Non-sink
attention is the mean over heads that are not sinks: a head that parks its mass there is healthy, and so is a layer that
is sparse while the loss falls.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from joma._run.curve import ONLINE
from joma._watch.readings import LOW, RECOVERED

PHASES = ("dense", "sparsifying", "bouncing", "collapsed", "failing", "ended")
RULE = ONLINE
BACK, SECOND = 0.1, 0.25  # of the depth of the dip
NOISE = 9.0  # standard deviations: white noise spans 7 in a thousand measurements
SCATTER = 64  # last measurements that noise is told from
PATIENCE = 8
LENGTH = 0.02  # a relative change of the largest possible entropy that is one of the length


@dataclass
class Stuck:
    """Something is low for PATIENCE measurements in a row, and there was no new best loss since it became so."""

    count: int = 0  # measurements that it is low for
    best: float = math.inf  # loss when it became low, or before; inf if none is known
    better: bool = False  # a new best loss was reached since
    usual: float = math.inf  # what the loss did not exceed by its scatter alone when it became low

    @property
    def told(self) -> bool:
        """Is it so?"""
        return self.count >= PATIENCE and not self.better and math.isfinite(self.best)

    def update(self, low: bool, over: bool, loss: float, best: float, usual: float = math.inf) -> None:
        """One measurement: is it low, is it over, its loss, the best loss so far (this one included), the usual one."""
        if self.count and over:
            self.count, self.best, self.better, self.usual = 0, math.inf, False, math.inf
        elif self.count:
            self.count += 1
            self.better |= loss < self.best  # NaN is not better
        elif low:
            self.count, self.best, self.better, self.usual = 1, best, False, usual


@dataclass
class Phase:
    """The phase of one layer, and the numbers behind it."""

    name: str = "dense"
    peak: float = -math.inf  # before the dip
    trough: float = math.inf
    crest: float = -math.inf  # since the trough
    deepest: float = 0.0  # dip so far
    entropy: float = math.nan  # smoothed
    since: int = 0  # the step of the first measurement in this phase
    trouble: str = ""  # the kind of the critical alert that stands, if one does
    _shape: str = field(default="dense", repr=False)  # the phase by the curve of entropy alone
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RULE.window), repr=False)
    _bends: deque[float] = field(
        default_factory=lambda: deque(maxlen=SCATTER), repr=False
    )  # sizes of second differences
    _possible: float = field(default=math.nan, repr=False)
    _best: float = field(default=math.inf, repr=False)  # loss so far
    _stuck: Stuck = field(default_factory=Stuck, repr=False)
    _low: list[tuple[int, float]] = field(
        default_factory=list, repr=False
    )  # (step, loss) while non-sink entropy is low

    @property
    def depth(self) -> float:
        """How far entropy fell from its peak, in nats; 0 before a dip."""
        return max(0.0, self.peak - self.trough) if math.isfinite(self.trough) else 0.0

    @property
    def bounce(self) -> float:
        """How far entropy rose from its trough so far."""
        return max(0.0, self.crest - self.trough) if math.isfinite(self.trough) and math.isfinite(self.crest) else 0.0

    def __str__(self) -> str:
        """In words: "sparsifying since step 300 (2.41 nats, 0.64 below its peak)"."""
        if self.name in ("ended", "failing"):
            return f"{self.name} since step {self.since:,} ({self.trouble})"
        if math.isnan(self.entropy):
            return "not measured"
        moved = f", {self.depth:.2f} below its peak at the lowest" if self.depth else ""
        moved += f", {self.bounce:.2f} up again" if self.bounce else ""
        return f"{self.name} since step {self.since:,} ({self.entropy:.2f} nats{moved})"

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        plain = {"_recent": list(self._recent), "_bends": list(self._bends), "_stuck": dict(vars(self._stuck))}
        return {**vars(self), **plain, "_low": [list(pair) for pair in self._low]}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Phase:
        """The phase that `state` told of."""
        recent, bends = deque(state["_recent"], maxlen=RULE.window), deque(state["_bends"], maxlen=SCATTER)
        low = [(int(at), float(loss)) for at, loss in state["_low"]]
        return cls(**{**state, "_recent": recent, "_bends": bends, "_stuck": Stuck(**state["_stuck"]), "_low": low})

    def update(
        self, step: int, entropy: float, nonsink: float = math.nan, loss: float = math.nan, possible: float = math.nan,
        collapsed: bool = False,
    ) -> str:  # fmt: skip
        """Take one measurement; returns the phase.

        Arguments:
            step: of the measurement.
            entropy: in nats.
            nonsink: non-sink entropy over the largest possible one; NaN if it says nothing.
            loss: NaN if it is not known.
            possible: the largest possible entropy, in nats.
            collapsed: most heads have collapsed by themselves.
        """
        before = self.name if math.isfinite(self.entropy) else None  # None before the first measurement
        self._rescale(possible)
        if math.isfinite(entropy):
            if len(self._recent) == RULE.window:
                self._bends.append(abs(entropy - 2 * self._recent[-1] + self._recent[-2]))
            self._recent.append(entropy)
            self.entropy = median(self._recent)
            self._turn(self.entropy)
        self._judge_collapse(step, nonsink, loss, collapsed)
        self._settle(step, before)
        return self.name

    @property
    def has_collapsed(self) -> bool:
        """True if attention is collapsed by its own numbers, whatever alerts stand."""
        return self._shape == "collapsed"

    def judge(self, step: int, trouble: str) -> None:
        """Take the kind of the critical alert that stands at this layer; "" if none does."""
        self.trouble = trouble
        self._settle(step, self.name)

    def _settle(self, step: int, before: str | None) -> None:
        """Name the phase by its trouble, or else by the curve of entropy."""
        if self.trouble == "not finite":
            self.name = "ended"
        elif self.trouble and self._shape != "collapsed":
            self.name = "failing"
        else:
            self.name = self._shape
        if self.name != before:
            self.since = step

    def _rescale(self, possible: float) -> None:
        """Sequences have another length now: entropies of before are taken to what they would be at this one."""
        if not possible > 0:
            return
        factor = possible / self._possible if self._possible > 0 else 1.0
        if math.isfinite(self._possible) and abs(factor - 1) <= LENGTH:
            return
        self._possible = possible
        for name in ("peak", "trough", "crest", "deepest", "entropy"):
            setattr(self, name, getattr(self, name) * factor)
        self._recent = deque((x * factor for x in self._recent), maxlen=RULE.window)

    @property
    def _noise(self) -> float:
        """NOISE standard deviations of the smoothed curve: a second difference of white noise has √6 of one."""
        if len(self._bends) < RULE.window:
            return 0.0
        return NOISE * 0.67 * 1.4826 * median(self._bends) / math.sqrt(6)

    def _turn(self, s: float) -> None:
        noise = self._noise
        if self._shape == "dense":
            self.peak = max(self.peak, s)
            if s <= self.peak - max(RULE.least_fall(self.peak), noise):
                self._shape, self.trough, self.crest = "sparsifying", s, -math.inf
        elif self._shape == "bouncing":
            self.crest = max(self.crest, s)
            if s < self.trough - noise:
                self._shape, self.trough, self.crest = "sparsifying", s, -math.inf
            elif s >= self.peak - BACK * (self.peak - self.trough):
                self._shape, self.peak = "dense", s
            elif s <= self.crest - max(RULE.least_fall(self.crest), SECOND * self.deepest, noise):
                self._shape, self.peak, self.trough, self.crest = "sparsifying", self.crest, s, -math.inf
        else:  # sparsifying; and a collapsed layer's trough is followed as well
            self.trough = min(self.trough, s)
            self.deepest = max(self.deepest, self.peak - self.trough)
            if self._shape == "sparsifying" and s >= self.trough + max(RULE.least_rise(self.deepest), noise):
                self._shape, self.crest = "bouncing", s

    def _judge_collapse(self, step: int, nonsink: float, loss: float, collapsed: bool) -> None:
        if math.isfinite(loss):
            self._best = min(self._best, loss)
        known = not math.isnan(nonsink)
        if known:
            self._stuck.update(nonsink < LOW, nonsink > RECOVERED, loss, self._best)
        if self._shape == "collapsed":
            if known and nonsink > RECOVERED and not collapsed:
                self._shape, self.crest = "sparsifying", -math.inf
                self._low.clear()
            return
        if known and nonsink >= LOW:
            self._low.clear()
        elif known and math.isfinite(loss):
            self._low.append((step, loss))
        lasting = len(self._low) >= PATIENCE and not loss_falls(self._low, step)
        if self._stuck.told or lasting or collapsed:
            self._shape = "collapsed"
            if not math.isfinite(self.trough):
                self.trough = self.entropy


class Phases(list[Phase]):
    """One `Phase` per layer: a list that is printed in words, one line per layer."""

    def __str__(self) -> str:
        return "\n".join(f"layer {n}: {phase}" for n, phase in enumerate(self)) or "no layer was measured yet"

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"


def loss_falls(low: Sequence[tuple[int, float]], step: int) -> bool:
    """Did the loss fall by 0.5 % over the last quarter of the run, and over the last PATIENCE measurements at least?"""
    if low[0][0] > 0.75 * step:  # not low for that long yet
        return True
    window = [loss for at, loss in low if at >= 0.75 * step]
    window = window if len(window) >= PATIENCE else [loss for _, loss in low[-PATIENCE:]]
    half = len(window) // 2
    before, after = median(window[:half]), median(window[half:])
    return after <= before - 0.005 * abs(before)
