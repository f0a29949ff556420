"""Runs on the optimiser's clock: curves over τ = Σ lr, how far apart they are, and where one leaves the others.

Under Adam a step moves each parameter by about its learning rate, whatever the gradient's size, so that runs of
different rates pass through the same states at the same τ as long as rates are small. With heavy-ball momentum β a
rate lr works as lr / (1 − β) without. How well that holds is measured, not assumed: single runs of different rates are
compared with single runs of one rate, which differ by their seeds alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma._runs import Run, RunError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
GAUGES = ("entropy", "stable_rank", "valid_loss", "loss")
ROUNDING = 1e-9  # of τ, a sum of many rates
NOISY = (
    5  # measurements that a point of the training loss, which is of one minibatch, is the median of
)


class Key(NamedTuple):
    """What a curve is of; ``layer`` is None for what the model has as a whole, such as its loss."""

    gauge: str
    layer: int | None

    def __str__(self) -> str:
        return self.gauge if self.layer is None else f"{self.gauge}, layer {self.layer}"


@dataclass(frozen=True)
class OnClock:
    """One curve over τ."""

    tau: Floats  # (n,), increasing
    step: Floats  # (n,), of the run that it was measured in
    value: Floats  # (n,)

    def at(self, tau: ArrayLike) -> Floats:
        """Linear between measurements; before the first, that one; NaN after the last."""
        end = self.tau[-1] * (1 + ROUNDING)
        wanted = np.asarray(tau, dtype=np.float64)
        return np.where(wanted <= end, np.interp(wanted, self.tau, self.value), np.nan)

    def at_step(self, step: ArrayLike) -> Floats:
        """By the run's own steps; after the last, that one."""
        return np.interp(np.asarray(step, dtype=np.float64), self.step, self.value)

    def until(self, tau: float) -> OnClock:
        """The part up to τ."""
        kept = self.tau <= tau * (1 + ROUNDING)
        return OnClock(self.tau[kept], self.step[kept], self.value[kept])


Curves = dict[Key, OnClock]


def curves(run: Run, gauges: Iterable[str] = GAUGES) -> Curves:
    """The curves of a run, means over heads; the training loss is smoothed. A run without τ is refused."""
    frame, gauges = run.frame(), list(gauges)
    if not frame.empty and not frame.gauge.isin(gauges).any():
        names = ", ".join(frame.gauge.unique())
        raise RunError(
            f"{run.path} has no measurements to go by of {', '.join(gauges)}: it has {names}"
        )
    return curves_of(
        frame[frame.gauge.isin(gauges)], str(run.path), pace(run.info.get("config", {}))
    )


def pace(config: Mapping[str, Any]) -> float:
    """How much a learning rate counts for: 1 / (1 − β) under momentum β, by the settings of a run of `joma train`.

    >>> (
    ...     pace({"optimiser": "sgd", "momentum": 0.9}) == 1 / (1 - 0.9),
    ...     pace({"optimiser": "adam"}),
    ...     pace({}),
    ... )
    (True, 1.0, 1.0)
    """
    momentum = (config.get("momentum") or 0.0) if config.get("optimiser") == "sgd" else 0.0
    if not isinstance(momentum, (int, float)) or not 0 <= momentum < 1:
        raise RunError(f"momentum is from 0 to below 1, and the run's settings have {momentum!r}")
    return 1 / (1 - momentum)


def curves_of(frame: pd.DataFrame, name: str, pace: float = 1.0) -> Curves:
    """The curves in the table of a run called ``name``; one ends before its first value that is not a finite number."""
    import pandas as pd

    if frame.empty:
        raise RunError(f"{name} has no measurements to go by yet")
    if "tau" not in frame or frame.tau.isna().any():
        raise RunError(
            f"{name} does not know its learning rates, so its clock τ = Σ lr is not known: record them with "
            "joma.watch(model, optimizer=…) or w.step(lr=…)"
        )
    times = np.asarray(frame.groupby("step").tau.max(), dtype=np.float64)
    if not np.isfinite(times[-1]) or times[-1] <= 0 or (np.diff(times) < 0).any():
        raise RunError(
            f"{name} has a clock τ = Σ lr that does not go forward, from {times[0]:g} to {times[-1]:g}: its learning "
            "rates were 0, negative or infinite"
        )
    if "layer" not in frame:
        frame = frame.assign(layer=None)
    by_key: Curves = {}
    keys: Any
    for keys, rows in frame.groupby(["gauge", "layer"], dropna=False):
        gauge, layer = keys
        means = rows.groupby("tau")[["step", "value"]].mean().sort_index()
        number = np.isfinite(rows.value).groupby(rows.tau).all()  # of all heads
        begun = number.cummax()
        means = means[begun & (number | ~begun).cummin()]
        if means.empty:
            continue
        if gauge == "loss":
            means["value"] = means.value.rolling(NOISY, center=True, min_periods=1).median()
        tau, step, value = (
            np.asarray(x, dtype=np.float64) for x in (means.index, means.step, means.value)
        )
        by_key[Key(str(gauge), None if pd.isna(layer) else int(layer))] = OnClock(
            pace * tau, step, value
        )
    if not by_key:
        raise RunError(f"{name}: no value of {', '.join(frame.gauge.unique())} is a finite number")
    return by_key


def grid(members: Iterable[OnClock], points: int = 60) -> Floats:
    """Evenly spaced τ that all of the curves have."""
    ends = [curve.tau[-1] for curve in members]
    return np.linspace(0, min(ends), points + 1)[1:]


def rms(values: ArrayLike) -> float:
    """Root of the mean square of what is a number.

    >>> rms([3.0, 4.0, float("nan")]) == 12.5**0.5
    True
    """
    x = np.asarray(values, dtype=np.float64)
    x = x[~np.isnan(x)]
    return float(np.sqrt(np.mean(x**2))) if len(x) else float("nan")


@dataclass(frozen=True)
class Apart:
    """How far single runs lie from each other on the clock: of different rates, and of one rate but other seeds."""

    between: float  # rms over τ and pairs of runs
    within: float  # likewise; NaN where no rate has two runs

    @property
    def ratio(self) -> float:
        """1 if rates differ no more than seeds."""
        return self.between / self.within


Groups = Iterable[
    tuple[float, Sequence[OnClock]]
]  # (learning rate, the same curve of its runs, one per seed)


def apart(groups: Groups, power: float = 1.0) -> Apart:
    """Compare runs of several rates on the clock, or on that of lr^power · step.

    Arguments:
        groups: two of one rate may differ in something else, such as momentum.
        power: 1 is the clock, 0 is equal steps.
    """
    groups = list(groups)
    if len(groups) < 2:
        raise ValueError(f"runs of {len(groups)} learning rate: two at least are compared")
    slowest = min(lr for lr, _ in groups)
    # τ = lr · step; in units in which the slowest rate's τ stays as it is
    scaled = [
        [replace(run, tau=run.tau * (lr / slowest) ** (power - 1)) for run in runs]
        for lr, runs in groups
    ]
    tau = grid([run for runs in scaled for run in runs])
    values = [[run.at(tau) for run in runs] for runs in scaled]
    between = [
        a - b
        for one, other in itertools.combinations(values, 2)
        for a, b in itertools.product(one, other)
    ]
    within = [a - b for runs in values for a, b in itertools.combinations(runs, 2)]
    return Apart(rms(between), rms(within) if within else float("nan"))


def best_power(groups: Groups) -> float:
    """The exponent a for which the curves are closest over lr^a · step, to 0.02 between 0 and 2."""
    groups, powers = list(groups), np.arange(0, 2.001, 0.02)
    return float(powers[int(np.argmin([apart(groups, power).between for power in powers]))])


def leaves(
    curve: OnClock, common: OnClock, spread: float, times: float = 3.0, lasting: int = 5
) -> float | None:
    """The τ from which a curve is away from the common one by ``times`` the spread, ``lasting`` points in a row."""
    tau = grid([curve, common])
    away = np.abs(curve.at(tau) - common.at(tau)) > times * spread
    runs_of_points = np.convolve(away, np.ones(lasting), mode="valid") == lasting
    return float(tau[int(np.argmax(runs_of_points))]) if runs_of_points.any() else None


def mean(members: Sequence[OnClock]) -> OnClock:
    """The mean of runs, at the τ of the first as far as all of them go."""
    first = members[0].until(min(member.tau[-1] for member in members))
    return replace(first, value=np.mean([member.at(first.tau) for member in members], axis=0))


def spread(members: Sequence[OnClock]) -> float:
    """The standard deviation of single runs around their mean, pooled over τ; NaN of one run."""
    if len(members) < 2:
        return float("nan")
    tau = grid(members)
    return rms(np.std([member.at(tau) for member in members], axis=0, ddof=1))
