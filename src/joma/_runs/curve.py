"""The course of a curve over training: it starts, falls to a trough, rises again ("dip and bounce").

`Rule` holds the window and the thresholds, and `Curve` the description. The phases of a watch apply the
same rule to a curve that is still being measured. `str(rule)` states the rule as a sentence.

>>> curve = describe([0, 10, 20, 30, 40], [2.5, 1.6, 1.6, 1.9, 1.9], replace(ENTROPY, window=1))
>>> curve.pattern, curve.trough_step, round(curve.depth, 2), round(curve.bounce, 2)
('dip and bounce', 10, 0.9, 0.3)
>>> print(RANK)
it dips if it falls by 5 % below its start, and bounces if it then rises by 10 % of the dip until the end
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import pandas as pd
    from numpy.typing import ArrayLike

__all__ = [
    "CHECKPOINTS",
    "ENTROPY",
    "EXACT",
    "ONLINE",
    "RANK",
    "TRAINING",
    "Curve",
    "Rule",
    "describe",
    "describe_all",
]


@dataclass(frozen=True)
class Rule:
    """When a fall counts as a dip, and a rise after it as a bounce.

    Attributes:
        window: number of measurements whose median is one point.
        dip: the smallest dip, as a share of the start.
        bounce: the smallest bounce, as a share of the dip.
        least_dip: the smallest dip in the unit of the gauge, however low the curve starts; 0 for none.
        least_bounce: the smallest bounce in the same unit.
        unit: the unit of the gauge, for the sentence.
    """

    window: int = 5
    dip: float = 0.05
    bounce: float = 0.1
    least_dip: float = 0.0
    least_bounce: float = 0.0
    unit: str = ""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"a median of {self.window} measurements: the window is 1 or more")
        for name in ("dip", "bounce", "least_dip", "least_bounce"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: thresholds are 0 or more")

    def least_fall(self, start: float) -> float:
        """Return the smallest fall from ``start`` that counts as a dip."""
        return max(self.least_dip, self.dip * start)

    def least_rise(self, depth: float) -> float:
        """Return the smallest rise after a dip of this depth that counts as a bounce."""
        return max(self.least_bounce, self.bounce * depth)

    @property
    def fall(self) -> str:
        """The smallest dip in words: "max(0.1 nats, 5 %)"."""
        return self._amount(self.least_dip, f"{100 * self.dip:g} %")

    @property
    def rise(self) -> str:
        """The smallest bounce in words: "max(0.05 nats, 10 % of the dip)"."""
        return self._amount(self.least_bounce, f"{100 * self.bounce:g} % of the dip")

    def _amount(self, least: float, share: str) -> str:
        if not least:
            return share
        amount = f"{least:g} {self.unit}".strip()
        return f"max({amount}, {share})"

    def smoothed(self, of: str = "measurements") -> str:
        """Return the smoothing in words, as "on the median of 5 measurements, "; "" for none."""
        if self.window == 1:
            return ""
        return f"on the median of {self.window} {of}, "

    def __str__(self) -> str:
        dips = f"it dips if it falls by {self.fall} below its start"
        return f"{dips}, and bounces if it then rises by {self.rise} until the end"


# Entropy of attention, measured often in training.
ENTROPY = Rule(least_dip=0.1, least_bounce=0.05, unit="nats")
# Ranks of matrices. Thresholds are relative only, since ranks differ by orders of magnitude.
RANK = Rule()
# Phases of a watch: a longer window would report a change later.
ONLINE = replace(ENTROPY, window=3)
# Scans: their steps lie far apart, so a longer window would smooth a dip away.
CHECKPOINTS = {"entropy": ONLINE, "stable_rank": replace(RANK, window=3)}
# Watched trainings, which are measured often.
TRAINING = {"entropy": ENTROPY, "stable_rank": RANK}
# Solutions without noise need no median.
EXACT = Rule(window=1, dip=0.1, bounce=0.2)
# The smallest rise that counts, so that a constant curve never rises.
_LEAST_RISE = 1e-300


@dataclass(frozen=True)
class Curve:
    """Description of one smoothed curve by a rule.

    Attributes:
        start: the highest value before the trough.
        trough: the lowest value.
        trough_step: the step of the trough.
        end: the last value.
        rule: the rule for dip and bounce.
        collapsed: True if attention turned sparse for good, by the phase at the end of a watch.
        rise_step: the first step with a rise that counts as a bounce; None without one.
        trouble: the phase at the end of a watch, if it is "failing" or "ended".
    """

    start: float
    trough: float
    trough_step: float
    end: float
    rule: Rule
    collapsed: bool = False
    rise_step: float | None = None
    trouble: str = ""

    @property
    def depth(self) -> float:
        """The fall from start to trough."""
        return self.start - self.trough

    @property
    def bounce(self) -> float:
        """The rise from trough to end."""
        return self.end - self.trough

    @property
    def dipped(self) -> bool:
        """True if the fall is large enough to count."""
        return 0 < self.depth >= self.rule.least_fall(self.start)

    @property
    def bounced(self) -> bool:
        """True if the curve dipped, and then rose far enough to count."""
        return self.dipped and 0 < self.bounce >= self.rule.least_rise(self.depth)

    @property
    def margin(self) -> float:
        """By how much dip and bounce exceed what counts, the smaller of the two; below 0 it does not bounce."""
        fall = self.depth - self.rule.least_fall(self.start)
        rise = self.bounce - self.rule.least_rise(self.depth)
        return min(fall, rise)

    @property
    def bounce_step(self) -> float | None:
        """The first step of the bounce; None if the curve does not bounce."""
        if not self.bounced:
            return None
        return self.rise_step

    @property
    def pattern(self) -> str:
        """The name of the course: "failing", "ended", "collapse", "dip and bounce", "dip" or "flat"."""
        if self.trouble:
            return self.trouble
        if self.collapsed:
            return "collapse"
        if self.bounced:
            return "dip and bounce"
        if self.dipped:
            return "dip"
        return "flat"

    def __str__(self) -> str:
        return f"{self.start:.2f} → {self.trough:.2f} (step {self.trough_step:g}) → {self.end:.2f}"

    def numbers(self) -> dict[str, Any]:
        """Return all numbers, for a verdict."""
        names = ("start", "trough", "trough_step", "end", "collapsed", "depth", "bounce", "pattern")
        return {name: getattr(self, name) for name in names} | {"least": self.rule.least_dip}


def describe(steps: ArrayLike, values: ArrayLike, rule: Rule, *, collapsed: bool = False) -> Curve:
    """Describe a curve by medians of ``rule.window`` values; its start is the highest before the trough.

    The first value is not smoothed, since a fast fall right after it is not noise. At both ends the
    window has fewer values. Values that are not finite are left out.

    Arguments:
        steps: the steps in increasing order, (n,).
        values: the curve, (n,).
        rule: the window and the thresholds.
        collapsed: True if the watch ended in a collapse.
    """
    import numpy as np
    import pandas as pd

    raw = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(raw)
    if not is_finite.any():
        raise ValueError(
            f"a curve of {len(raw)} values, none of them a number, cannot be described"
        )
    raw = raw[is_finite]
    finite_steps = np.asarray(steps)[is_finite]
    smooth = pd.Series(raw).rolling(rule.window, center=True, min_periods=1).median().to_numpy()
    low = int(np.argmin(smooth))
    start = max(float(raw[0]), float(smooth[: low + 1].max()))
    least_rise = max(rule.least_rise(start - smooth[low]), _LEAST_RISE)
    risen = low + np.flatnonzero(smooth[low:] - smooth[low] >= least_rise)
    rise_step = None
    if len(risen):
        rise_step = finite_steps[risen[0]].item()
    return Curve(
        start=start,
        trough=float(smooth[low]),
        trough_step=finite_steps[low].item(),
        end=float(smooth[-1]),
        rule=rule,
        collapsed=collapsed,
        rise_step=rise_step,
    )


def describe_all(
    table: pd.DataFrame,
    rule: Rule,
    by: Sequence[str] = ("layer",),
    collapsed: Container[tuple[Any, ...]] = (),
    over: str = "step",
) -> dict[tuple[Any, ...], Curve]:
    """Describe all curves of one gauge in the table of a run, averaged over heads.

    Arguments:
        table: rows with the columns value, ``over`` and ``by``.
        rule: the window and the thresholds.
        by: the columns that distinguish the curves.
        collapsed: the curves that ended in a collapse.
        over: the column of steps or times.

    Returns:
        Values of ``by`` -> the curve, in order; curves without a number are left out.
    """
    import numpy as np

    table = table[np.isfinite(table.value)]
    means = table.groupby([*by, over]).value.mean().reset_index()
    curves: dict[tuple[Any, ...], Curve] = {}
    for key, rows in means.groupby([*by]):
        assert isinstance(
            key, tuple
        )  # always for a list of columns, but pandas-stubs does not say so
        curves[key] = describe(rows[over], rows.value, rule, collapsed=key in collapsed)
    return curves
