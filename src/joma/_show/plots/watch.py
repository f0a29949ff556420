"""A watched training: each gauge over the steps, one line per layer, phases marked, and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from joma._runs import Run, RunError
from joma._runs.outcome import has_clock
from joma._show.plots import clock as clocks
from joma._show.plots.panels import DASH, FAINT, FEW, by_layer, clock_axis, step_axis
from joma._show.plots.style import INK, Chart

MOST_OF_LINE, MOST_OF_PANEL = 400, 10_000  # points that are drawn at most: what a picture can show
TITLES = {
    "entropy": "attention entropy (nats)",
    "normalised_entropy": "attention entropy / uniform",
    "nonsink_entropy": "non-sink entropy (nats)",
    "sink_mass": "attention on the first token",
    "max_logsumexp": "largest logsumexp of scores",
    "max_logit": "largest logit",
    "largest_share": "largest attention received",
}
FROM_ZERO = (
    "entropy",
    "normalised_entropy",
    "nonsink_entropy",
    "sink_mass",
)  # 0 means something, and is near
SHAPES = {
    "dense": "circle",
    "sparsifying": "triangle-down",
    "bouncing": "triangle-up",
    "collapsed": "cross",
}
ALARM = "#d40000"  # of a collapse; other phases differ by shape alone, since colour is depth


def draw(run: Run, clock: bool = False) -> Chart:
    """A panel for each gauge that has layers, and one for the loss; steps over more than two decades on a log axis.

    Arguments:
        run: of a watch, a training or a scan.
        clock: over τ, the sum of learning rates, in the place of steps.
    """
    info, frame = run.info, run.frame()
    if frame.empty:
        raise RunError(f"{run.path} has no measurements yet; the first comes after the first step")
    if clock:
        clocks.check(run, frame)
    heading = _heading(run, frame)
    frame = clocks.only_told(frame) if clock else frame
    axes = [axis for axis in ("layer", "head", "expert") if axis in frame]
    frame = frame.drop_duplicates(
        ["step", "gauge", *axes], keep="last"
    )  # of steps that were run twice
    timed = has_clock(frame)
    frame = frame if timed else frame.drop(columns="tau", errors="ignore")
    means = _means(frame, info) if "layer" in frame else {}
    scan = info["kind"] == "scan"
    x = clock_axis() if clock else step_axis(frame.step, scan)
    when = [
        alt.Tooltip("step:Q", format=",d"),
        *([alt.Tooltip("tau:Q", title="τ", format=".4~g")] if timed else []),
    ]
    layers = {name: 1 + int(table.layer.max()) for name, table in means.items()}
    colour = by_layer(max(layers.values(), default=1))  # a number is the same block in all gauges
    changes, most = _changes(frame, info), uniform_levels(info)
    bearer = next((g for g in means if "head" in info["axes"][g]), None)  # phases are of attention
    panels: list[Any] = []
    for gauge, table in means.items():
        panel: Any = _lines(table, x, colour, gauge, layers[gauge], when)
        if gauge == bearer and len(changes):
            panel += _marks(changes, table, x, when)
        if (level := most.get(gauge)) is not None:
            panel += _uniform(level)
        panels.append(panel)
    loss = frame[frame.gauge == "loss"]
    if len(loss):
        panels.append(_loss(loss, x, when))
    if not panels:
        raise RunError(f"{run.path} has nothing to draw: neither a gauge with layers nor a loss")
    wide = 2 if len(panels) in (2, 4) else 3
    switch = clocks.both(frame.step, scan) if timed else alt.Undefined
    return alt.concat(*panels, columns=wide, spacing=24, title=heading, usermeta=switch)


def _means(frame: pd.DataFrame, info: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """Gauge -> its mean over heads, or the largest: step, layer, value, module, tau; entropy and stable rank first."""
    names = [g for g, axes in info["axes"].items() if "layer" in axes and g != "phase"]
    order = [g for g in info["config"].get("gauges", []) if g in names]
    first = [g for g in ("entropy", "stable_rank") if g in names]
    result = {}
    for gauge in dict.fromkeys([*first, *order, *names]):
        rows = frame[frame.gauge == gauge]
        if rows.value.notna().any():
            rows = rows.assign(module=rows["module"].fillna("") if "module" in rows else "")
            grouped = rows.groupby(["layer", "step"], as_index=False)
            over_heads = "max" if gauge in info.get("largest", ()) else "mean"
            columns = {"value": ("value", over_heads), "module": ("module", "first")}
            columns |= {"tau": ("tau", "first")} if "tau" in rows else {}
            result[gauge] = grouped.agg(**columns).astype({"layer": int})
    return result


def _thinned(table: pd.DataFrame, x: alt.X, lines: int = 1) -> pd.DataFrame:
    """The rows of as many steps as can be shown, evenly over the axis, with both ends."""
    column = x["shorthand"].partition(":")[0]
    steps = np.sort(table[column].unique())
    most = max(100, min(MOST_OF_LINE, MOST_OF_PANEL // lines))
    if len(steps) <= most:
        return table
    kind = x["scale"]["type"]
    places = (
        np.log(steps)
        if kind == "log"
        else np.log1p(steps)
        if kind == "symlog"
        else steps.astype(float)
    )
    wanted = np.linspace(places[0], places[-1], most)
    return table[table[column].isin(steps[np.searchsorted(places, wanted).clip(0, len(steps) - 1)])]


def titled(gauge: str) -> str:
    """The name of a gauge at an axis."""
    name, _, part = gauge.partition(".")
    return TITLES.get(name, name.replace("_", " ")) + (f" ({part})" if part else "")


def _lines(
    table: pd.DataFrame,
    x: alt.X,
    colour: alt.Color,
    gauge: str,
    layers: int,
    when: list[alt.Tooltip],
) -> alt.Chart:
    table = _thinned(table, x, layers)
    label = [f"layer {n}: {module}" for n, module in zip(table.layer, table.module, strict=True)]
    table = table.assign(label=label)
    return (
        alt.Chart(table)
        .mark_line(
            strokeWidth=1.8 if layers <= FEW else 1.2,
            strokeJoin="round",
            point=len(set(table.step)) == 1,
        )
        .encode(
            x,
            alt.Y(
                "value:Q",
                title=titled(gauge),
                scale=alt.Scale(zero=gauge in FROM_ZERO),
                axis=alt.Axis(tickCount=5),
            ),
            colour,
            detail="layer:N",
            description="label:N",
            tooltip=[alt.Tooltip("layer:Q"), alt.Tooltip("module:N"), *when],
        )
        .properties(width=270, height=210)
    )


def uniform_levels(info: Mapping[str, Any]) -> dict[str, float]:
    """Gauge -> what uniform attention would have, where the run knows it and all its layers have the same.

    A watch notes the mean of ln(visible keys) over queries; that of causal attention over T tokens is ln(T!)/T, which
    `joma train` has by its settings.
    """
    known = [level for level in info.get("uniform") or () if level is not None]
    length = info["config"].get("length") if info["kind"] == "train" else None
    if not known and isinstance(length, int) and length > 0:
        known = [math.lgamma(length + 1) / length]
    if not known or max(known) - min(known) > 1e-3 * max(known):
        return {}
    return {"entropy": known[0], "normalised_entropy": 1.0}


def _uniform(level: float) -> alt.LayerChart:
    """A dashed line at the entropy of uniform attention, with its name."""
    data = pd.DataFrame({"level": [level], "label": [f"uniform: {level:.3g}"]})
    base = alt.Chart(data).encode(alt.Y("level:Q"))
    text = base.mark_text(align="right", baseline="bottom", dy=-3, fontSize=10, color=FAINT)
    return base.mark_rule(strokeDash=DASH, color=FAINT, strokeWidth=1) + text.encode(
        alt.Text("label:N"), x=alt.value(270)
    )


def _changes(frame: pd.DataFrame, info: dict[str, Any]) -> pd.DataFrame:
    """Where a layer's phase became another: step, layer, phase."""
    names, rows = info.get("phases", []), frame[frame.gauge == "phase"]
    changes = []
    for layer in sorted(set(rows.layer)) if len(rows) and names else []:
        of_layer = rows[rows.layer == layer]
        codes, steps = of_layer.value.to_numpy(), of_layer.step.to_numpy()
        changes += [
            (steps[n], int(layer), names[int(codes[n])]) for n in 1 + np.flatnonzero(np.diff(codes))
        ]
    return pd.DataFrame(changes, columns=["step", "layer", "phase"])


def _marks(
    changes: pd.DataFrame, table: pd.DataFrame, x: alt.X, when: list[alt.Tooltip]
) -> alt.Chart:
    """A mark where a phase begins, on the line of its layer."""
    few = table.layer.max() < FEW
    at = changes.merge(table, on=["step", "layer"], how="left")
    parts = zip(at.layer, at.module, at.phase, at.step, strict=True)
    at["label"] = [
        f"layer {n}: {module}: {phase} at step {step}" for n, module, phase, step in parts
    ]
    phases = [phase for phase in SHAPES if phase in set(at.phase)]
    phases += sorted(set(at.phase) - set(phases))
    fill = alt.Scale(
        domain=phases, range=[ALARM if phase == "collapsed" else INK for phase in phases]
    )
    shape = alt.Scale(domain=phases, range=[SHAPES.get(phase, "square") for phase in phases])
    return (
        alt.Chart(at)
        .mark_point(
            size=70 if few else 25, stroke="white", strokeWidth=1 if few else 0.4, opacity=1
        )
        .encode(
            x,
            alt.Y("value:Q"),
            alt.Fill("phase:N", title="phase begins", scale=fill),
            alt.Shape("phase:N", title="phase begins", scale=shape),
            description="label:N",
            tooltip=["phase", *when, "layer", "module"],
        )
    )


def _loss(loss: pd.DataFrame, x: alt.X, when: list[alt.Tooltip]) -> alt.Chart:
    y = alt.Y("value:Q", title="loss", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    data = _thinned(loss[[name for name in ("step", "tau", "value") if name in loss]], x)
    line = alt.Chart(data).mark_line(strokeWidth=1.8, strokeJoin="round", color=INK)
    return line.encode(x, y, tooltip=when).properties(width=270, height=210)


def _heading(run: Run, frame: pd.DataFrame) -> alt.Title:
    info = run.info
    config, steps = info["config"], int(frame.step.max())
    parts = [f"{config['model']}" if "model" in config else "", f"step {steps:,}"]
    if isinstance(number := config.get("parameters"), int):
        parts.insert(1, f"{_short(number)} parameters")
    status = run.status
    if status != "done":
        parts.append(f"{status}: {info['reason']}" if info.get("reason") else status)
    return alt.Title(str(info.get("name", run.path.name)), subtitle=", ".join(filter(None, parts)))


def _short(number: int) -> str:
    """1,234,567 as 1.2M."""
    power = min(4, int(math.log10(max(number, 1)) // 3))
    return f"{number / 1000**power:.3g}{['', 'k', 'M', 'B', 'T'][power]}"
