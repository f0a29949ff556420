"""Several models next to each other: each gauge over the depth of the layers, one colour per model."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from joma._runs import Run, RunError
from joma._show.plots.style import COLOURS, Chart
from joma._show.plots.watch import FROM_ZERO, titled

# The shared colours, and five darker ones (Paul Tol's "muted") for comparisons of up to twelve models.
_MORE_COLOURS = [*COLOURS, "#332288", "#882255", "#117733", "#44aa99", "#999933"]
# Colours that come close to each other differ in the shape of their points.
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]
# Lines of more layers than this are drawn without points.
_MOST_POINTS = 40
_PANEL = {"width": 270, "height": 210}


def draw(frame: pd.DataFrame, run: Run) -> Chart:
    """Return one panel per gauge: its mean over heads in every layer, one line per model.

    Arguments:
        frame: the table of the scan, as `Scan.frame` gives it.
        run: the run of the scan.
    """
    frame = frame[frame.value.notna()]
    if frame.empty:
        raise RunError(f"{run.path} has nothing to draw: no gauge was measured on any model")
    names = [name for name in run.info["models"] if (frame.checkpoint == name).any()]
    means = _means(frame, run.info.get("largest", ()))
    has_equal_depths = means.groupby("gauge").layers.nunique().max() == 1
    x = _layer_axis() if has_equal_depths else _depth_axis()
    # In the order in which the gauges were asked for.
    gauges = [gauge for gauge in run.info["config"]["gauges"] if (means.gauge == gauge).any()]
    panels = [_panel(means[means.gauge == gauge], gauge, x, names) for gauge in gauges]
    columns = 2 if len(panels) in (2, 4) else 3
    title = alt.Title(
        str(run.info.get("name", run.path.name)), subtitle=f"{len(names)} models, {_axis_text(x)}"
    )
    return alt.concat(*panels, columns=columns, spacing=24, title=title)


def _means(frame: pd.DataFrame, largest: Any) -> pd.DataFrame:
    """Return checkpoint, gauge, layer, value (the mean over heads, or the largest), layers, depth."""
    keys = ["checkpoint", "gauge", "layer"]
    grouped = frame.groupby(keys, sort=False, as_index=False)
    means = grouped.agg(value=("value", "mean"), module=("module", "first"))
    is_largest = means.gauge.isin(largest)
    if is_largest.any():
        maxima = grouped.agg(value=("value", "max"))
        means.loc[is_largest, "value"] = maxima.value[is_largest]
    # The number of layers of a gauge differs between models, and from gauge to gauge: a mixture of
    # experts has one matrix per expert.
    last = means.groupby(["checkpoint", "gauge"]).layer.transform("max")
    means["layers"] = last + 1
    # 0 is the first layer and 1 the last one; a single layer is drawn at 0.
    means["depth"] = means.layer / last.clip(lower=1)
    return means.astype({"layer": int, "layers": int, "depth": float})


def _layer_axis() -> alt.X:
    axis = alt.Axis(tickMinStep=1, format="d", grid=False)
    return alt.X("layer:Q", title="layer", scale=alt.Scale(nice=False), axis=axis)


def _depth_axis() -> alt.X:
    axis = alt.Axis(tickCount=5, format="~g", grid=False)
    title = "depth (0: first layer, 1: last)"
    return alt.X("depth:Q", title=title, scale=alt.Scale(nice=False, domain=[0, 1]), axis=axis)


def _axis_text(x: alt.X) -> str:
    if x["shorthand"].startswith("layer"):
        return "layer by layer"
    return "by relative depth: they differ in the number of layers"


def _panel(table: pd.DataFrame, gauge: str, x: alt.X, names: list[str]) -> alt.Chart:
    y = alt.Y(
        "value:Q",
        title=titled(gauge),
        scale=alt.Scale(zero=gauge in FROM_ZERO),
        axis=alt.Axis(tickCount=5),
    )
    points: Any = False
    if table.layers.max() <= _MOST_POINTS:
        points = alt.OverlayMarkDef(size=22, filled=True)
    shown = table[["checkpoint", "layer", "depth", "value", "module"]]
    chart = (
        alt.Chart(shown)
        .mark_line(strokeWidth=1.8, strokeJoin="round", point=points)
        .encode(
            x,
            y,
            _colour(names),
            tooltip=[
                alt.Tooltip("checkpoint:N", title="model"),
                alt.Tooltip("layer:Q"),
                alt.Tooltip("module:N"),
                alt.Tooltip("value:Q", format=".4~g"),
            ],
        )
        .properties(**_PANEL)
    )
    if points and len(names) > len(COLOURS):
        shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(names))]
        scale = alt.Scale(domain=names, range=shapes)
        chart = chart.encode(alt.Shape("checkpoint:N", scale=scale, legend=_legend(names)))
    return chart


def _colour(names: list[str]) -> alt.Color:
    if len(names) <= len(_MORE_COLOURS):
        scale = alt.Scale(domain=names, range=_MORE_COLOURS[: len(names)])
    else:
        # More models than colours that can be told apart: the shapes of the points help.
        scale = alt.Scale(domain=names, scheme="turbo")
    return alt.Color("checkpoint:N", title=None, sort=names, scale=scale, legend=_legend(names))


def _legend(names: list[str]) -> alt.Legend:
    longest = max(len(name) for name in names)
    columns = 1 if longest > 40 else 3
    return alt.Legend(orient="top", columns=columns, labelLimit=480, title=None, symbolLimit=60)
