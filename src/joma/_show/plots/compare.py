"""Several runs over each other: one panel per gauge, one colour per run; which layer is shown can be chosen."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from joma._runs import Run, RunError
from joma._runs.measured import not_alike
from joma._runs.outcome import has_clock
from joma._show.plots import clock as clocks
from joma._show.plots.panels import DEPTH, clock_axis, step_axis
from joma._show.plots.style import COLOURS, Chart
from joma._show.plots.watch import MOST_OF_LINE, titled

MEAN = "mean of all"
MOST, FEWEST = 100_000, 20  # points in all, and of a line
MOST_NAMES = 40  # in the legend
NO_PANEL = ("phase", "tau", "seconds", "bytes_read")  # words in numbers, an axis, what it cost


def draw(runs: Mapping[str, Run], clock: bool = False) -> Chart:
    """Gauges of layers, heads (their mean) and plain numbers, over t if all runs have it.

    Steps of scans, which begin at 0 and are spaced by their logarithm, get a symlog axis.

    Arguments:
        runs: label -> run.
        clock: over τ, the sum of learning rates, in the place of steps; all runs must have it.
    """
    tables = {label: run.frame() for label, run in runs.items()}
    if clock:
        for label, run in runs.items():
            clocks.check(run, tables[label])
    means = [_means(run, tables[label]).assign(run=label) for label, run in runs.items()]
    together = pd.concat([part for part in means if len(part)] or means, ignore_index=True)
    together = _fewer(clocks.only_told(together) if clock else together)
    if together.empty:
        raise RunError(
            f"{', '.join(runs)}: nothing to compare, no gauge of layers and no plain number"
        )
    scan = {run.info["kind"] for run in runs.values()} == {"scan"}
    timed = all(
        clocks.why_not(run, has_clock(tables[label])) is None for label, run in runs.items()
    )
    x, over = clock_axis() if clock else step_axis(together.step, scan), "tau" if clock else "step"
    if together.t.notna().all():
        axis = alt.Axis(tickCount=5, format="~s", labelOverlap="greedy")
        x, over = alt.X("t:Q", title="t", scale=alt.Scale(nice=False, zero=False), axis=axis), "t"
    times = ["step", "tau"] if timed else [over]
    layers = sorted({int(n) for n in together.layer.dropna()})
    names: list[str] = [MEAN, *(f"layer {n}" for n in layers)]
    choice = alt.param(
        name="layer_shown", value=MEAN, bind=alt.binding_select(options=names, name="Layers: ")
    )
    columns = 1 if max(map(len, runs)) > 24 else 2
    legend = alt.Legend(orient="top", columns=columns, labelLimit=480, symbolLimit=MOST_NAMES)
    colours = alt.Scale(domain=list(runs))
    if len(runs) > len(COLOURS):  # in their order, rather than the same colours twice
        colours = alt.Scale(domain=list(runs), scheme=DEPTH)
    colour = alt.Color("run:N", title=None, sort=list(runs), scale=colours, legend=legend)
    panels: list[Any] = []
    for gauge in dict.fromkeys(together.gauge):
        rows = together[together.gauge == gauge].dropna(subset=["value"])
        if rows.empty:
            continue
        rows = rows.assign(which=[MEAN if pd.isna(n) else f"layer {int(n)}" for n in rows.layer])
        has_layers = rows.layer.notna().any()
        chart = (
            alt.Chart(rows[[*times, "run", "which", "value"]])
            .mark_line(strokeWidth=1.8, strokeJoin="round")
            .encode(
                x,
                alt.Y(
                    "value:Q",
                    title=titled(gauge),
                    scale=alt.Scale(zero=False),
                    axis=alt.Axis(tickCount=5),
                ),
                colour,
                tooltip=["run:N", "which:N", *_when(times), alt.Tooltip("value:Q", format=".4~g")],
            )
            .properties(width=270, height=210)
        )
        panels.append(chart.transform_filter("datum.which == layer_shown") if has_layers else chart)
    switch = clocks.both(together.step) if timed else alt.Undefined
    caution = not_alike({label: run.info for label, run in runs.items()})
    title: Any = alt.Undefined
    if caution:
        title = alt.TitleParams(
            "Not measured alike", subtitle=textwrap.wrap(caution, 110), anchor="start"
        )
    columns = 2 if len(panels) in (2, 4) else 3
    chart = alt.concat(*panels, columns=columns, spacing=24, usermeta=switch, title=title)
    return chart.add_params(choice) if layers else chart


def _when(times: list[str]) -> list[alt.Tooltip]:
    formats = {"step": ",d", "tau": ".4~g", "t": ".4~g"}
    return [
        alt.Tooltip(f"{name}:Q", title="τ" if name == "tau" else name, format=formats[name])
        for name in times
    ]


def _means(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """step, tau, t, gauge, layer, value: the mean over heads (or the largest); over all layers where layer is missing.

    Gauges with other axes (tokens, nodes) are left out: they are of one task only.
    """
    columns = ["step", "tau", "t", "gauge", "layer", "value"]
    axes = run.info["axes"]
    if frame.empty:
        return pd.DataFrame(columns=columns)
    frame = frame.reindex(columns=[*dict.fromkeys([*frame, "t", "tau", "layer"])])
    usable = [
        g
        for g in frame.gauge.unique()
        if g not in NO_PANEL and set(axes.get(g, ())) <= {"layer", "head", "expert"}
    ]
    wide = frame[frame.gauge.isin(usable)]
    keys = ["gauge", "step"]
    steps = {g: _kept(rows.step) for g, rows in wide.groupby("gauge")}
    wide = wide[[s in steps[g] for g, s in zip(wide.gauge, wide.step, strict=True)]]
    time = {"t": ("t", "first"), "tau": ("tau", "first")}
    mean = time | {"value": ("value", "mean")}
    if (largest := wide.gauge.isin(run.info.get("largest", ()))).any():
        heads = wide[largest].groupby(["gauge", "step", "layer"], as_index=False)
        wide = pd.concat([wide[~largest], heads.agg(**time, value=("value", "max"))])
    by_layer = wide[wide.layer.notna()].groupby([*keys, "layer"], as_index=False).agg(**mean)
    overall = wide.groupby(keys, as_index=False).agg(**mean).reindex(columns=columns)
    parts = [part[columns].astype(object) for part in (overall, by_layer) if len(part)]
    result = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)
    result = result.astype({"value": float, "step": int, "tau": float})
    order = {gauge: n for n, gauge in enumerate(["loss", "valid_loss", "entropy", "stable_rank"])}
    return result.sort_values(
        "gauge", key=lambda names: names.map(lambda g: (order.get(g, 9), g)), kind="stable"
    )


def _kept(steps: pd.Series[Any], most: int = MOST_OF_LINE) -> set[int]:
    """At most so many steps, evenly and with both ends: as many as a picture can show."""
    values = sorted(set(steps))
    if len(values) <= most:
        return set(values)
    return {*values[:: -(-len(values) // (most - 1))], values[-1]}


def _fewer(table: pd.DataFrame) -> pd.DataFrame:
    """At most about ``MOST`` points: fewer of each line, and if that is not enough, no single layers."""
    if len(table) <= MOST:
        return table
    lines = table.groupby(["run", "gauge", "layer"], dropna=False).ngroups
    if lines * FEWEST > MOST:
        table = table[table.layer.isna()]
        lines = table.groupby(["run", "gauge"]).ngroups
    most = max(FEWEST, MOST // lines)
    parts = [
        rows[rows.step.isin(_kept(rows.step, most))]
        for _, rows in table.groupby(["run", "gauge"], sort=False)
    ]
    return pd.concat(parts, ignore_index=True)
