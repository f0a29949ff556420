"""Each head of each layer over the steps: one heat map per gauge."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import altair as alt

from joma._show.plots.style import Chart
from joma._show.plots.watch import titled

if TYPE_CHECKING:
    import pandas as pd

MOST_GAUGES = 4
MOST_HEADS = 160  # rows that can be told apart
MOST_STEPS = 60  # columns
HEIGHT = 11  # of a row, in pixels
TALLEST = 420


def draw(table: pd.DataFrame, largest: Collection[str] = ()) -> Chart | None:
    """Return a heat map per gauge of heads; None if no layer has two heads, or there are too many to show.

    Arguments:
        table: `Run.frame` of a watched training.
        largest: gauges that grow by orders of magnitude, drawn on a logarithmic scale.
    """
    if "head" not in table or "layer" not in table or "step" not in table:
        return None
    rows = table[table["head"].notna() & table["layer"].notna()].dropna(subset=["value"])
    panels = []
    for gauge in list(dict.fromkeys(rows.gauge))[:MOST_GAUGES]:
        panel = _panel(rows[rows.gauge == gauge], gauge, is_logarithmic=gauge in largest)
        if panel is not None:
            panels.append(panel)
    if not panels:
        return None
    return alt.concat(*panels, columns=2, spacing=28).resolve_scale(color="independent")


def _panel(rows: pd.DataFrame, gauge: str, *, is_logarithmic: bool) -> Any:
    means = rows.groupby(["layer", "head", "step"])["value"].mean().reset_index()
    heads = means[["layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
    steps = sorted(means.step.unique())
    if not len(heads) > heads["layer"].nunique() or len(heads) > MOST_HEADS or len(steps) < 2:
        return None
    shown = steps[:: -(-len(steps) // MOST_STEPS)]
    means = means[means.step.isin(shown)]
    means["place"] = [
        f"{int(n)}.{int(m)}" for n, m in zip(means["layer"], means["head"], strict=True)
    ]
    order = [f"{int(n)}.{int(m)}" for n, m in heads.itertuples(index=False)]
    scale = alt.Scale(scheme="viridis")
    if is_logarithmic and means.value.min() > 0:
        scale = alt.Scale(scheme="viridis", type="log")
    every = max(1, len(shown) // 6)
    axis = alt.Axis(values=[int(step) for step in shown[::every]], labelAngle=0, ticks=False)
    return (
        alt.Chart(means[["place", "step", "value"]])
        .mark_rect()
        .encode(
            alt.X("step:O", title="step", axis=axis),
            alt.Y("place:N", title="layer.head", sort=order, axis=alt.Axis(labelOverlap=True)),
            alt.Color("value:Q", title=titled(gauge), scale=scale, legend=alt.Legend(orient="top")),
            tooltip=[
                alt.Tooltip("place:N", title="layer.head"),
                alt.Tooltip("step:O"),
                alt.Tooltip("value:Q", format=".4~g"),
            ],
        )
        .properties(width=300, height=min(TALLEST, max(60, HEIGHT * len(order))))
    )
