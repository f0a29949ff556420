"""What a run came to, as far as it is: its last step and losses, the phase of each layer, alerts, dips and bounces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from joma._runs.alerts import read_alerts
from joma._runs.curve import CHECKPOINTS, TRAINING, Curve, Rule, describe_all

if TYPE_CHECKING:
    import pandas as pd

    from joma._runs.reader import Run


@dataclass(frozen=True)
class Outcome:
    """Numbers of one run; None where it has none.

    Attributes:
        status: as of `Run.status`.
        step: the last one that was measured.
        loss: at the last step that has one; NaN if that is no number.
        valid_loss: the smallest validation loss that is finite; NaN without one.
        valid_step: when that was.
        phases: of each layer at its last measurement; None where a layer has no attention.
        alerts: as a watch told them.
        curves: gauge -> layer -> what its mean over heads did over the steps.
        rules: gauge -> the rule that tells dip and bounce.
        clock: step -> τ, the sum of learning rates; empty if they are not known.
    """

    status: str
    step: int
    loss: float | None
    valid_loss: float
    valid_step: int | None
    phases: list[str | None]
    alerts: list[dict[str, Any]]
    curves: dict[str, dict[int, Curve]]
    rules: dict[str, Rule]
    clock: Mapping[Any, float] = field(repr=False)


def outcome(run: Run, table: pd.DataFrame | None = None) -> Outcome:
    """The outcome of a run; ``table`` is its `Run.frame`, if it was read already."""
    info, table = run.info, run.frame() if table is None else table
    losses, valid = (table[table.gauge == name] for name in ("loss", "valid_loss"))
    valid = valid.dropna(subset=["value"])
    best = valid.iloc[int(valid.value.argmin())] if len(valid) else None
    phases = _phases(table, info)
    rules = CHECKPOINTS if info["kind"] == "scan" else TRAINING
    clock = (
        {}
        if not has_clock(table)
        else table.dropna(subset=["tau"]).groupby("step").tau.last().to_dict()
    )
    return Outcome(
        status=run.status,
        step=int(table.step.max()) if len(table) else 0,
        loss=float(losses.value.iloc[-1]) if len(losses) else None,
        valid_loss=math.nan if best is None else float(best.value),
        valid_step=None if best is None else int(best.step),
        phases=phases,
        alerts=read_alerts(run.path),
        curves={
            gauge: curves
            for gauge, rule in rules.items()
            if (curves := _curves(table, gauge, rule, phases))
        },
        rules=rules,
        clock=clock,
    )


def has_clock(table: pd.DataFrame) -> bool:
    """Whether learning rates were recorded, so that τ is known."""
    return "tau" in table and bool(table.tau.notna().any())


def _phases(table: pd.DataFrame, info: Mapping[str, Any]) -> list[str | None]:
    """Of each layer, in order."""
    rows = table[table.gauge == "phase"].dropna(subset=["value"])
    if rows.empty:
        return []
    last = rows.groupby("layer").value.last()
    return [
        info["phases"][int(last[n])] if n in last else None
        for n in range(1 + int(last.index.max()))
    ]


def _curves(
    table: pd.DataFrame, gauge: str, rule: Rule, phases: list[str | None]
) -> dict[int, Curve]:
    rows = table[table.gauge == gauge]
    if rows.empty or "layer" not in rows:
        return {}
    collapsed = {
        (n,) for n, phase in enumerate(phases) if phase == "collapsed" and gauge == "entropy"
    }
    curves = {
        int(n): curve for (n,), curve in describe_all(rows, rule, collapsed=collapsed).items()
    }
    for n, phase in enumerate(phases):
        if n in curves and phase in ("failing", "ended"):
            curves[n] = replace(curves[n], trouble=phase)
    return curves
