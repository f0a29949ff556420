"""What a curve did over training: it starts, falls to a trough, rises again ("dip and bounce").

The one rule for it, with its window and thresholds as arguments (`Rule`), and the one description (`Curve`). The
watch's phases apply the same rule to a curve that is still being measured. `str(rule)` is the sentence that tells it.

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
        window: measurements that each point is the median of.
        dip: the smallest dip, as a share of the start.
        bounce: the smallest bounce, as a share of the dip.
        least_dip: the smallest dip in the gauge's unit, however low the curve starts; 0 for none.
        least_bounce: likewise for the bounce.
        unit: of the gauge, for the sentence.
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
        """How far a curve from ``start`` must fall at least for a dip."""
        return max(self.least_dip, self.dip * start)

    def least_rise(self, depth: float) -> float:
        """How far a curve must rise at least after a dip of this depth for a bounce."""
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
        return f"max({f'{least:g} {self.unit}'.strip()}, {share})" if least else share

    def smoothed(self, of: str = "measurements") -> str:
        """The smoothing in words: "on the median of 5 measurements, "; nothing if there is none."""
        return f"on the median of {self.window} {of}, " if self.window > 1 else ""

    def __str__(self) -> str:
        dips = f"it dips if it falls by {self.fall} below its start"
        return f"{dips}, and bounces if it then rises by {self.rise} until the end"


ENTROPY = Rule(
    least_dip=0.1, least_bounce=0.05, unit="nats"
)  # of attention, measured often in training
RANK = Rule()  # of matrices; relative alone, since ranks differ by orders of magnitude
ONLINE = replace(ENTROPY, window=3)  # of the watch's phases, which must not lag behind
CHECKPOINTS = {
    "entropy": ONLINE,
    "stable_rank": replace(RANK, window=3),
}  # of scans, whose steps lie far apart
TRAINING = {
    "entropy": ENTROPY,
    "stable_rank": RANK,
}  # of watched trainings, which are measured often
EXACT = Rule(window=1, dip=0.1, bounce=0.2)  # of solutions that have no noise


@dataclass(frozen=True)
class Curve:
    """What one curve did, smoothed, and the rule it is told by."""

    start: float  # the highest value before the trough
    trough: float  # the lowest
    trough_step: float  # when
    end: float
    rule: Rule
    collapsed: bool = (
        False  # attention that turned sparse for good, by the watch's phase at the end
    )
    rise_step: float | None = (
        None  # when it had risen far enough to count as a bounce; None if it never did
    )
    trouble: str = ""  # the watch's phase at the end, if that is "failing" or "ended"

    @property
    def depth(self) -> float:
        """How far it fell from its start."""
        return self.start - self.trough

    @property
    def bounce(self) -> float:
        """How far it rose from its trough."""
        return self.end - self.trough

    @property
    def dipped(self) -> bool:
        """Whether it fell far enough to count."""
        return 0 < self.depth >= self.rule.least_fall(self.start)

    @property
    def bounced(self) -> bool:
        """Whether it dipped and rose far enough to count."""
        return self.dipped and 0 < self.bounce >= self.rule.least_rise(self.depth)

    @property
    def bounce_step(self) -> float | None:
        """When the bounce was first seen; None of a curve that does not bounce."""
        return self.rise_step if self.bounced else None

    @property
    def pattern(self) -> str:
        """In words: "failing", "ended", "collapse", "dip and bounce", "dip" or "flat"."""
        if self.trouble:
            return self.trouble
        if self.collapsed:
            return "collapse"
        return "dip and bounce" if self.bounced else "dip" if self.dipped else "flat"

    def __str__(self) -> str:
        return f"{self.start:.2f} → {self.trough:.2f} (step {self.trough_step:g}) → {self.end:.2f}"

    def numbers(self) -> dict[str, Any]:
        """All of it, for a verdict."""
        names = ("start", "trough", "trough_step", "end", "collapsed", "depth", "bounce", "pattern")
        return {name: getattr(self, name) for name in names} | {"least": self.rule.least_dip}


def describe(steps: ArrayLike, values: ArrayLike, rule: Rule, *, collapsed: bool = False) -> Curve:
    """Describe a curve by medians of ``rule.window`` values; its start is the highest of them before the trough.

    The first value is taken as it is, since a fast fall right after it is no noise. At both ends the window has fewer
    values. Values that are not finite are left out.

    Arguments:
        steps: when, in increasing order, (n,).
        values: the curve, (n,).
        rule: the window, and what counts as a dip and a bounce.
        collapsed: whether the watch found a collapse at the end.
    """
    import numpy as np
    import pandas as pd

    y = np.asarray(values, dtype=np.float64)
    known = np.isfinite(y)
    if not known.any():
        raise ValueError(f"a curve of {len(y)} values, none of them a number, cannot be described")
    y, at = y[known], np.asarray(steps)[known]
    smooth = pd.Series(y).rolling(rule.window, center=True, min_periods=1).median().to_numpy()
    low = int(np.argmin(smooth))
    start = max(float(y[0]), float(smooth[: low + 1].max()))
    risen = low + np.flatnonzero(
        smooth[low:] - smooth[low] >= max(rule.least_rise(start - smooth[low]), 1e-300)
    )
    rise_step = at[risen[0]].item() if len(risen) else None
    return Curve(
        start, float(smooth[low]), at[low].item(), float(smooth[-1]), rule, collapsed, rise_step
    )


def describe_all(
    table: pd.DataFrame,
    rule: Rule,
    by: Sequence[str] = ("layer",),
    collapsed: Container[tuple[Any, ...]] = (),
    over: str = "step",
) -> dict[tuple[Any, ...], Curve]:
    """Describe all curves of one gauge in the table of a run; heads, or whatever else shares a step, are averaged.

    Arguments:
        table: with the column value, that of ``over`` and those of ``by``.
        rule: as for `describe`.
        by: the columns that tell the curves apart.
        collapsed: the curves of which the watch found a collapse at the end.
        over: the column that says when a value was measured.

    Returns:
        Values of ``by`` -> the curve, in order; curves without a number are left out.
    """
    import numpy as np

    table = table[np.isfinite(table.value)]
    means = table.groupby([*by, over]).value.mean().reset_index()
    return {
        key: describe(rows[over], rows.value, rule, collapsed=key in collapsed)
        for key, rows in means.groupby([*by])
        if isinstance(key, tuple)  # always, but pandas-stubs does not know
    }
