"""The clock of a training, τ = Σ lr, and the learning rates that it adds up.

Rates come from the optimisers, if they are watched, or from the user with every step. With Adam a
step moves each parameter by about its learning rate. So runs of different rates are compared at
equal τ rather than at equal steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from joma._measure.events.optimiser import Steps
from joma._measure.watch.alarms.notices import Notices


@dataclass(frozen=True)
class StatedRate:
    """The last learning rate that the user gave, and the sum of the rates so far."""

    rate: float
    tau: float


class Clock:
    """Learning rates and τ of a watch; both are empty until a rate is known.

    Arguments:
        steps: steps of the optimisers that are watched; None if rates come from the user.
        is_grouped: True to record one rate and one τ per parameter group. Otherwise those of the
            first group stand for all.
        notices: takes messages to the user.
    """

    def __init__(self, steps: Steps | None, is_grouped: bool, notices: Notices) -> None:
        self._steps = steps
        self._is_grouped = is_grouped
        self._notices = notices
        self._stated: StatedRate | None = None
        self._is_restored = False

    @property
    def rates(self) -> list[float]:
        """Learning rates of the last step, per group; empty if none is known."""
        if self._steps is not None:
            return self._steps.rates
        if self._stated is not None:
            return [self._stated.rate]
        return []

    @property
    def tau(self) -> list[float]:
        """Sums of the learning rates so far, per group; empty if none is known."""
        if self._steps is not None:
            return self._steps.tau
        if self._stated is not None:
            return [self._stated.tau]
        return []

    def advance(self, rate: float | None, last_step: int, step: int) -> None:
        """Count the steps last_step + 1, …, step.

        Arguments:
            rate: learning rate of these steps, if the user gave one; None for the last one given.
            last_step: the step that was counted last.
            step: the step that was just made.
        """
        if self._steps is not None:
            self._check_optimisers(self._steps, rate)
        elif rate is not None or self._stated is not None:
            self._add_stated(rate, last_step, step)

    def _check_optimisers(self, steps: Steps, rate: float | None) -> None:
        for name, problem in steps.problems.items():
            self._notices.once(("optimiser", name), f"{name} could not be followed: {problem}")
        if not self._is_grouped and len(set(steps.rates)) > 1:
            self._notices.once(
                "groups",
                "the parameter groups no longer have one learning rate: that of the first is "
                "recorded",
            )
        if rate is not None:
            self._notices.once(
                "lr", "step(lr=…) is ignored: the learning rates come from the optimizer"
            )

    def _add_stated(self, rate: float | None, last_step: int, step: int) -> None:
        if self._stated is not None:
            last_rate = self._stated.rate
            tau = self._stated.tau
        else:
            last_rate = math.nan
            tau = 0.0
            if last_step >= 1:  # the rates of earlier steps are unknown
                tau = math.nan
        if rate is None:
            rate = last_rate
        self._stated = StatedRate(rate, tau + rate * max(1, step - last_step))
        if math.isnan(tau):
            self._notices.once(
                "tau", f"τ is unknown: no learning rate was given before step {step}"
            )

    def rows(self) -> dict[str, Any]:
        """Return what is recorded as gauges."""
        rates = self.rates
        if not rates:
            return {}
        if self._is_grouped:
            return {"lr": rates, "tau": self.tau}
        return {"lr": rates[0]}

    def columns(self) -> dict[str, float]:
        """Return what is recorded with every gauge: τ of the first group."""
        if not self.rates:
            return {}
        return {"tau": self.tau[0]}

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        stated = None
        if self._stated is not None:
            stated = (self._stated.rate, self._stated.tau)
        optimisers = None
        if self._steps is not None:
            optimisers = self._steps.state()
        return {"stated": stated, "optimisers": optimisers}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._stated = None
        if state["stated"] is not None:
            rate, tau = state["stated"]
            self._stated = StatedRate(float(rate), float(tau))
        if self._steps is not None and state["optimisers"] is not None:
            self._steps.restore(state["optimisers"])
        self._is_restored = True

    def continue_from_rows(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Continue a run after ``step`` from the rows of its folder alone.

        τ is the one recorded at that step, or else unknown.
        """
        if self._is_restored or step < 1:
            return
        last_rows = []
        for row in rows:
            if row["step"] == step and row.get("tau") is not None:
                last_rows.append(row)
        recorded = _recorded_tau(last_rows)
        if self._steps is not None:
            self._continue_optimisers(self._steps, recorded, step)
        elif recorded:
            rates = [row["value"] for row in last_rows if row["gauge"] == "lr"]
            self._stated = None
            if rates:
                self._stated = StatedRate(float(rates[-1]), recorded[0])

    def _continue_optimisers(self, steps: Steps, recorded: list[float], step: int) -> None:
        groups = len(steps.tau)
        if not self._is_grouped:
            recorded = recorded * groups  # groups of one rate have one τ
        if len(recorded) == groups:
            steps.add(recorded)
            return
        self._add_unknown(steps)
        self._notices.once(
            "tau",
            f"τ is unknown: nothing was recorded at step {step}, after which the run continues. "
            "Load the watch's state_dict() from the checkpoint to keep it",
        )

    def _add_unknown(self, steps: Steps) -> None:
        steps.add([math.nan] * len(steps.tau))


def _recorded_tau(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return τ per group from the rows of one step; empty if they have none."""
    tau: list[float] = []
    groups: list[float] = []
    for row in rows:
        tau = [float(row["tau"])]
        if row["gauge"] == "tau":
            groups = [float(value) for value in row["value"]]
    return groups or tau
