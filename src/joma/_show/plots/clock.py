"""Steps, or the optimiser's clock τ = Σ lr: what the curves of a training are drawn over.

A figure whose rows have both says so in ``usermeta``, from which the page makes a switch between the two.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from joma._runs import Run, RunError
from joma._runs.outcome import has_clock
from joma._show.plots.panels import clock_axis, step_axis

__all__ = ["both", "check", "only_told", "why_not"]


def why_not(run: Run, timed: bool) -> str | None:
    """Why a run cannot be drawn over τ; None if it can. ``timed``: its learning rates were recorded (`has_clock`)."""
    if (kind := run.info["kind"]) not in ("watch", "train"):
        return f"{run.path} is a run of kind {kind!r}, which has no optimiser and so no clock"
    if timed:
        return None
    return (
        f"{run.path} has no learning rates, and so no clock: watch with joma.watch(model, optimizer=…), or tell "
        "each step's rate with w.step(lr=…)"
    )


def check(run: Run, table: pd.DataFrame) -> None:
    """Refuse a run, with this table, that cannot be drawn over τ."""
    if (reason := why_not(run, has_clock(table))) is not None:
        raise RunError(reason)


def only_told(table: pd.DataFrame) -> pd.DataFrame:
    """The rows whose τ is known: a rate that was told late leaves the others without."""
    return table[table.tau.notna()]


def both(steps: pd.Series[Any], scan: bool = False) -> dict[str, Any]:
    """For the figure's ``usermeta``: the two axes between which a page can switch."""
    return {"clocks": {"step": step_axis(steps, scan).to_dict(), "tau": clock_axis().to_dict()}}
