"""`joma.forecast`: entropy, stable rank and loss of a run that has not been made, from runs at another learning rate.

A step of the new run is put on the clock, τ = Σ lr, and gets the mean of what the known runs had at that τ. Its band is
that of one more run: the seeds' standard deviation, pooled over the clock, times 2 · √(1 + 1/n). Where the clock is
known not to hold, the forecast says so (`Forecast.warnings`); beyond the τ that the runs reach there is none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from joma._forecast import clock
from joma._forecast.clock import Floats, Key, OnClock
from joma._forecast.known import caveats
from joma._runs import Run, RunError
from joma._runs.curve import TRAINING, Curve, describe

if TYPE_CHECKING:
    import pandas as pd

    from joma._show.plots import Chart

POINTS = 200  # of a forecast, about
BAND = 2.0  # standard deviations
# settings in which the runs of one forecast may differ; all others make another model or another training
FREE = {
    "lr",
    "seed",
    "steps",
    "every",
    "threads",
    "valid_windows",
    "valid_every",
    "gauges",
    "processes",
}


@dataclass(frozen=True)
class Forecast:
    """A run that has not been made, as runs at other rates foretell it."""

    lr: float
    steps: int
    sources: tuple[str, ...]  # the runs it is made from
    known: Mapping[Key, Sequence[OnClock]]  # the curves of each of these runs
    warnings: tuple[str, ...]  # where the clock is known not to hold
    pace: float = (
        1.0  # how much a learning rate counts for on the clock: 1 / (1 − β) under momentum
    )

    @property
    def tau(self) -> float:
        """The clock at the end."""
        return self.pace * self.lr * self.steps

    @property
    def curves(self) -> dict[Key, list[OnClock]]:
        """The curves of the known runs, up to the last τ of the forecast."""
        return {
            key: [curve.until(self.tau) for curve in members] for key, members in self.known.items()
        }

    def frame(self, every: int | None = None) -> pd.DataFrame:
        """One row per curve and step: step, tau, gauge, layer, value, low, high; low and high are NaN of one run.

        Arguments:
            every: steps between rows; by default such that there are about 200.
        """
        import pandas as pd

        every = every or max(1, self.steps // POINTS)
        step = np.unique(np.append(np.arange(every, self.steps + 1, every), self.steps))
        tau = self.pace * self.lr * step
        parts = [
            pd.DataFrame(
                {
                    "step": step,
                    "tau": tau,
                    "gauge": key.gauge,
                    "layer": key.layer,
                    **self._at(key, step),
                }
            )
            for key in self.known
        ]
        return pd.concat([part.astype({"layer": "Int64"}) for part in parts], ignore_index=True)

    def _at(self, key: Key, step: Any) -> dict[str, Floats]:
        members = self.known[key]
        value = np.mean([member.at(self.pace * self.lr * step) for member in members], axis=0)
        spread = clock.spread([member.until(self.tau) for member in members])
        width = BAND * spread * math.sqrt(1 + 1 / len(members))
        return {"value": value, "low": value - width, "high": value + width}

    def _shape(self, key: Key, curve: OnClock) -> Curve:
        return describe(
            np.round(curve.tau / (self.pace * self.lr)), curve.value, TRAINING[key.gauge]
        )

    def shapes(self) -> dict[Key, Curve]:
        """What each curve of entropy and stable rank will do, in steps of the new run: dip, trough, bounce."""
        return {
            key: self._shape(key, clock.mean(runs))
            for key, runs in self.curves.items()
            if key.gauge in TRAINING
        }

    def table(self) -> pd.DataFrame:
        """One row per curve: gauge, layer, start, trough, its step, the step of the bounce, end, and its band.

        ``earliest`` and ``latest`` are the steps of the trough by single runs. What does not dip, or is still falling
        at the end, has no trough, and what does not rise again by the end no bounce.
        """
        import pandas as pd

        shapes, rows = self.shapes(), []
        for key, members in self.curves.items():
            end = {
                name: float(values[0])
                for name, values in self._at(key, np.array([self.steps])).items()
            }
            row: dict[str, Any] = {
                "gauge": key.gauge,
                "layer": key.layer,
                **end,
                "end": end["value"],
            }
            row["start"] = float(np.mean([member.value[0] for member in members]))
            if key in shapes:
                told = shapes[key]
                last = round(members[0].tau[-1] / (self.pace * self.lr))
                falling = told.dipped and told.trough_step >= last
                row |= {"start": told.start, "bounce_step": told.bounce_step}
                row |= {"pattern": "still falling" if falling else told.pattern}
                if told.dipped and not falling:
                    troughs = [self._shape(key, member).trough_step for member in members]
                    row |= {"trough": told.trough, "trough_step": told.trough_step}
                    row |= {"earliest": min(troughs), "latest": max(troughs)}
            rows.append(row)
        columns = ["gauge", "layer", "start", "trough", "trough_step", "earliest", "latest", "bounce_step", "end",
                   "low", "high", "pattern"]  # fmt: skip
        return pd.DataFrame(rows).reindex(columns=columns).astype({"layer": "Int64"})

    def score(self, truth: pd.DataFrame) -> pd.DataFrame:
        """How far the forecast is from a run that was made since, one row per curve, beside two plain guesses.

        Arguments:
            truth: the table of that run (`Run.frame`): step, gauge, layer, value.

        Returns:
            gauge, layer, points, rms (forecast − measured), last (of the guess that the last value of the known runs
            stays), same_step (that it is as in the known runs at the same step), inside (share of points that are in
            the band; NaN of one run).
        """
        import pandas as pd

        layer = truth.layer if "layer" in truth else pd.Series(pd.NA, index=truth.index)
        rows = []
        for key, members in self.known.items():
            own = layer.isna() if key.layer is None else layer == key.layer
            measured = truth[
                (truth.gauge == key.gauge) & own & (truth.step > 0) & (truth.step <= self.steps)
            ]
            means = measured.dropna(subset=["value"]).groupby("step").value.mean()
            if means.empty:
                continue
            step, value = means.index.to_numpy(dtype=np.float64), means.to_numpy()
            told = self._at(key, step)
            last = np.mean([member.value[-1] for member in members])
            same = np.mean([member.at_step(step) for member in members], axis=0)
            inside = (
                float(np.mean((told["low"] <= value) & (value <= told["high"])))
                if len(members) > 1
                else math.nan
            )
            errors = {"rms": told["value"] - value, "last": last - value, "same_step": same - value}
            rows.append(
                {"gauge": key.gauge, "layer": key.layer, "points": len(value)}
                | {name: clock.rms(error) for name, error in errors.items()}
                | {"inside": inside}
            )
        if not rows:
            raise ValueError(
                "nothing to score: the run that was made has none of the forecast's gauges and layers"
            )
        return pd.DataFrame(rows).astype({"layer": "Int64"})

    def draw(self) -> Chart:
        """One panel per gauge over the steps of the new run, one line per layer, with its band."""
        from joma._show.plots.forecast import draw

        return draw(
            self.frame(),
            f"lr {self.lr:g}, {self.steps:,} steps, foretold from {len(self.sources)} run(s)",
        )


def forecast(
    runs: str | os.PathLike[str] | Run | Iterable[str | os.PathLike[str] | Run],
    *,
    lr: float,
    steps: int,
    layers: int | None = None,
    gauges: str | Sequence[str] = clock.GAUGES,
) -> Forecast:
    """Foretell a run at another learning rate, from runs that differ by their seeds (and rates) only.

    Arguments:
        runs: run folders whose learning rates are known: of `joma train`, or of `joma.watch` with an optimizer.
        lr: the learning rate of the new run.
        steps: how long the new run is.
        layers: its depth, if it is to be checked: a run of another depth cannot be foretold.
        gauges: what to foretell: names, or one string with commas between them.

    Returns:
        The forecast: ``frame()``, ``table()``, ``draw()``, ``warnings``; ``score()`` once the run has been made.
    """
    if not 0 < lr < math.inf:
        raise ValueError(f"the learning rate must be a positive number, got {lr!r}")
    if not isinstance(steps, (int, np.integer)) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    given = [runs] if isinstance(runs, (str, os.PathLike, Run)) else list(runs)
    opened = [run if isinstance(run, Run) else Run(run) for run in given]
    if not opened:
        raise ValueError("no run to make a forecast from")
    folders = [run.path.resolve() for run in opened]
    if twice := [
        run.path for run, folder in zip(opened, folders, strict=True) if folders.count(folder) > 1
    ]:
        raise ValueError(f"{twice[0]} is given twice: the band is how far different runs are apart")
    _check_alike(opened)
    if isinstance(gauges, str):
        gauges = [name.strip() for name in gauges.split(",")]
    members = [clock.curves(run, gauges) for run in opened]
    keys = [key for key in members[0] if all(key in curves for curves in members)]
    if not keys:
        raise RunError(
            f"{', '.join(str(run.path) for run in opened)}: no gauge of {', '.join(gauges)} is in all runs"
        )
    depths = [
        1 + max((key.layer for key in curves if key.layer is not None), default=-1)
        for curves in members
    ]
    if len(set(depths)) > 1 or (layers is not None and layers != depths[0]):
        wanted = "" if layers is None else f"; a model of {layers} is asked for"
        raise RunError(
            f"the runs have {', '.join(map(str, depths))} layers{wanted}: curves differ by depth, and a forecast is "
            "made from runs of the depth that it is for"
        )
    pace = clock.pace(opened[0].info.get("config", {}))
    ends = [
        (curves[key].tau[-1], key, run.path)
        for run, curves in zip(opened, members, strict=True)
        for key in keys
    ]
    reach, key, path = min(ends, key=lambda end: end[0])
    if pace * lr * steps > reach * (1 + clock.ROUNDING):
        most = math.floor(reach * (1 + clock.ROUNDING) / (pace * lr))
        raise RunError(
            f"{steps:,} steps at {lr:g} are τ = {pace * lr * steps:.3g} on the clock, and the numbers end at "
            f"{reach:.3g} ({key}, of {path}): ask for {most:,} steps at most, or train them further"
        )
    told = Forecast(
        lr, steps, tuple(str(run.path) for run in opened), {key: [curves[key] for curves in members] for key in keys},
        caveats(opened, lr, steps, depths[0]), pace,
    )  # fmt: skip
    if starved := [
        key for key, cut in told.curves.items() if min(len(curve.tau) for curve in cut) < 2
    ]:
        raise RunError(
            f"up to τ = {pace * lr * steps:.3g} the runs have fewer than two measurements of "
            f"{', '.join(map(str, starved))}: ask for more steps, or measure more often"
        )
    return told


def _check_alike(runs: Sequence[Run]) -> None:
    """Refuse runs of different models or trainings."""
    first = runs[0].info.get("config") or {}
    for other in runs[1:]:
        config = other.info.get("config") or {}
        differing = [
            key
            for key in {**first, **config}
            if key not in FREE and first.get(key) != config.get(key)
        ]
        if differing:
            words = ", ".join(
                f"{key} ({first.get(key)!r} and {config.get(key)!r})" for key in differing[:5]
            )
            raise RunError(
                f"{runs[0].path} and {other.path} are no runs of one model: they differ in {words}"
            )
