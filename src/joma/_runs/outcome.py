"""The outcome of a run so far: last step, losses, the phase of each layer, alerts, dips and bounces."""

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
        status: `Run.status`.
        step: the last measured step.
        loss: the last recorded loss, which may be NaN.
        valid_loss: the smallest validation loss; NaN without one.
        valid_step: the step of that loss.
        phases: the last phase of each layer; None for a layer without attention.
        alerts: the alerts of the watch.
        curves: gauge -> layer -> the course of its mean over heads.
        rules: gauge -> the rule for dip and bounce.
        clock: step -> τ, the sum of learning rates; empty if they were not recorded.
        lowest: layer -> step and value of the lowest entropy that was measured, without smoothing.
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
    lowest: Mapping[int, tuple[int, float]] = field(default_factory=dict, repr=False)


def outcome(run: Run, table: pd.DataFrame | None = None) -> Outcome:
    """Return the outcome of a run; ``table`` is its `Run.frame`, if that was read already."""
    info = run.info
    if table is None:
        table = run.frame()
    last_step = 0
    if len(table):
        last_step = int(table.step.max())
    losses = table[table.gauge == "loss"]
    last_loss = None
    if len(losses):
        last_loss = float(losses.value.iloc[-1])
    valid_losses = table[table.gauge == "valid_loss"].dropna(subset=["value"])
    valid_loss = math.nan
    valid_step = None
    if len(valid_losses):
        best = valid_losses.iloc[int(valid_losses.value.argmin())]
        valid_loss = float(best.value)
        valid_step = int(best.step)
    clock = {}
    if has_clock(table):
        clock = table.dropna(subset=["tau"]).groupby("step").tau.last().to_dict()
    rules = TRAINING
    if info["kind"] == "scan":
        rules = CHECKPOINTS
    phases = _phases(table, info)
    curves = {}
    for gauge, rule in rules.items():
        gauge_curves = _curves(table, gauge, rule, phases)
        if gauge_curves:
            curves[gauge] = gauge_curves
    return Outcome(
        status=run.status,
        step=last_step,
        loss=last_loss,
        valid_loss=valid_loss,
        valid_step=valid_step,
        phases=phases,
        alerts=read_alerts(run.path),
        curves=curves,
        rules=rules,
        clock=clock,
        lowest=_lowest(table),
    )


def _lowest(table: pd.DataFrame) -> dict[int, tuple[int, float]]:
    """Return the step and the value of the lowest entropy of each layer, a mean over heads."""
    rows = table[table.gauge == "entropy"].dropna(subset=["value"])
    if rows.empty or "layer" not in rows:
        return {}
    means = rows.groupby(["layer", "step"]).value.mean()
    lowest = {}
    by_layer = means.reset_index()
    for layer, rows_of_layer in by_layer.groupby("layer"):
        first = rows_of_layer.value.to_numpy().argmin()
        row = rows_of_layer.iloc[int(first)]
        lowest[int(str(layer))] = (int(row["step"]), float(row["value"]))
    return lowest


def has_clock(table: pd.DataFrame) -> bool:
    """True if learning rates were recorded, so that τ can be computed."""
    return "tau" in table and bool(table.tau.notna().any())


def _phases(table: pd.DataFrame, info: Mapping[str, Any]) -> list[str | None]:
    """Return the last phase of each layer, in order."""
    rows = table[table.gauge == "phase"].dropna(subset=["value"])
    if rows.empty:
        return []
    last = rows.groupby("layer").value.last()
    phases: list[str | None] = [None] * (1 + int(last.index.max()))
    for layer, code in last.items():
        phases[int(layer)] = info["phases"][int(code)]  # type: ignore[call-overload]
    return phases


def _curves(
    table: pd.DataFrame, gauge: str, rule: Rule, phases: list[str | None]
) -> dict[int, Curve]:
    rows = table[table.gauge == gauge]
    if rows.empty or "layer" not in rows:
        return {}
    collapsed = set()
    if gauge == "entropy":  # phases are those of attention
        collapsed = {(layer,) for layer, phase in enumerate(phases) if phase == "collapsed"}
    curves = {}
    for (layer,), curve in describe_all(rows, rule, collapsed=collapsed).items():
        curves[int(layer)] = curve
    for layer, phase in enumerate(phases):
        if layer in curves and phase in ("failing", "ended"):
            curves[layer] = replace(curves[layer], trouble=phase)
    return curves
