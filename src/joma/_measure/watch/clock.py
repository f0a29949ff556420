"""The clock of a training, τ = Σ lr, and the learning rates that it adds up.

Rates come from the optimisers, if they are watched, or are told with every step. With Adam a step moves each parameter
by about its learning rate, so that runs of different rates are compared at equal τ rather than at equal steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from joma._measure.events.optimiser import Steps
from joma._measure.watch.alarms.notices import Notices


class Clock:
    """Learning rates and τ of a watch; nothing until there is an optimiser or a rate was told.

    Arguments:
        steps: of the optimisers that are watched.
        grouped: record one rate and one τ per parameter group, not only those of the first, which stand for all.
    """

    def __init__(self, steps: Steps | None, grouped: bool, notices: Notices) -> None:
        self._steps, self._grouped, self._notices = steps, grouped, notices
        self._told: tuple[float, float] | None = None  # rate and τ
        self._restored = False

    @property
    def rates(self) -> list[float]:
        """The learning rates of the last step, per group; empty if none is known."""
        return (
            self._steps.rates
            if self._steps is not None
            else []
            if self._told is None
            else [self._told[0]]
        )

    @property
    def tau(self) -> list[float]:
        """The sums of the learning rates so far, per group; empty if none is known."""
        return (
            self._steps.tau
            if self._steps is not None
            else []
            if self._told is None
            else [self._told[1]]
        )

    def tell(self, rate: float | None, after: int, upto: int) -> None:
        """The steps after + 1, …, upto were made at this rate; without one, at the last that was told."""
        if self._steps is not None:
            for name, problem in self._steps.problems.items():
                self._notices.once(("optimiser", name), f"{name} could not be followed: {problem}")
            if not self._grouped and len(set(self._steps.rates)) > 1:
                self._notices.once(
                    "groups",
                    "the learning rates of the parameter groups have come apart: those of the first are recorded",
                )
            if rate is not None:
                self._notices.once(
                    "lr", "step(lr=…) is left aside: the rates are those of the optimiser given"
                )
        elif rate is not None or self._told is not None:
            last, tau = self._told or (math.nan, 0.0 if after < 1 else math.nan)
            rate = last if rate is None else rate
            self._told = rate, tau + rate * max(1, upto - after)
            if math.isnan(tau):
                self._notices.once(
                    "tau", f"τ is not known: the learning rate was not told before step {upto}"
                )

    def rows(self) -> dict[str, Any]:
        """What is recorded as gauges."""
        rates, tau = self.rates, self.tau
        if not rates:
            return {}
        return {"lr": rates, "tau": tau} if self._grouped else {"lr": rates[0]}

    def columns(self) -> dict[str, float]:
        """What is recorded with every gauge: τ of the first group."""
        return {"tau": self.tau[0]} if self.rates else {}

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {
            "told": self._told,
            "optimisers": self._steps.state() if self._steps is not None else None,
        }

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Go on from a `state` after ``step``; None is that of a watch that kept no clock: then τ is not known."""
        if state is None:
            if self._steps is not None and step > 0:
                self._steps.add([math.nan] * len(self._steps.tau))
            return
        rate_and_tau = state["told"]
        self._told = (
            None if rate_and_tau is None else (float(rate_and_tau[0]), float(rate_and_tau[1]))
        )
        if self._steps is not None and state["optimisers"] is not None:
            self._steps.restore(state["optimisers"])
        self._restored = True

    def go_on(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """A run is resumed from its folder alone, after ``step``: τ is what was recorded there, or not known."""
        if self._restored or step < 1:
            return
        found = [row for row in rows if row["step"] == step and row.get("tau") is not None]
        groups = [row["value"] for row in found if row["gauge"] == "tau"]
        base = (
            [float(x) for x in groups[-1]] if groups else [float(row["tau"]) for row in found[-1:]]
        )
        if self._steps is not None:
            base = (
                base if self._grouped else base * len(self._steps.tau)
            )  # groups of one rate have one τ
            known = len(base) == len(self._steps.tau)
            self._steps.add(base if known else [math.nan] * len(self._steps.tau))
            if not known:
                self._notices.once(
                    "tau",
                    f"τ is not known: nothing was recorded at step {step}, from which the run goes on. Load the "
                    "watch's state_dict() from the checkpoint to keep it",
                )
        elif base:
            rates = [row["value"] for row in found if row["gauge"] == "lr"]
            self._told = (float(rates[-1]), base[0]) if rates else None
