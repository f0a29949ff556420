"""A simulated task: logits, weights, attention entropy and the drift of the first integral over time."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from joma._figures.style import Chart
from joma._run import Run


def draw_run(run: Run) -> Chart:
    """From a ``simulate`` run."""
    config = run.info["config"]
    return draw(run.frame(), f"{config['task']}: {config['attention']} attention, {config['activation']}")


def draw(frame: pd.DataFrame, title: str) -> Chart:
    """From the long frame of a ``simulate`` run; at most 12 tokens and the largest 12 weights are drawn."""
    t = alt.X("t:Q", title="t")
    panels: list[Any] = []
    z = frame[frame.gauge == "z"]
    panels.append(_lines(z[z.token < 12], t, "attention logits z", "token"))
    v = frame[frame.gauge == "v"]
    size = v.assign(size=v.value.abs()).groupby(["token", "node"])["size"].max().nlargest(12)
    v = v.set_index(["token", "node"]).loc[size.index].reset_index()
    panels.append(
        _lines(
            v.assign(weight=[f"v[{a}, {b}]" for a, b in zip(v.token, v.node, strict=True)]),
            t,
            "largest weights v",
            "weight",
        )
    )
    entropy = _lines(frame[frame.gauge == "entropy"], t, "attention entropy (nats)", None)
    drift = frame[frame.gauge == "drift"]
    scale = alt.Scale(type="log") if (drift.value > 0).any() else alt.Scale()
    floor = drift.assign(value=drift.value.clip(lower=1e-17))
    below = _lines(floor, t, "drift of the first integral", None, scale)
    return alt.vconcat(
        alt.hconcat(*panels).resolve_scale(color="independent"),
        alt.hconcat(entropy, below),
        title=alt.Title(title),
    )


def _lines(data: pd.DataFrame, x: alt.X, title: str, colour: str | None, scale: alt.Scale | None = None) -> alt.Chart:
    columns = ["t", "value"] + ([colour] if colour else [])
    y = alt.Y(
        "value:Q",
        title=title,
        scale=scale or alt.Scale(zero=False),
        axis=alt.Axis(format=".0e", tickCount=6) if scale else alt.Axis(),
    )
    chart = alt.Chart(data[columns]).mark_line(strokeWidth=1.8).encode(x, y, tooltip=[*columns])
    if colour:
        chart = chart.encode(alt.Color(f"{colour}:N", title=colour, scale=alt.Scale(scheme="tableau20")))
    return chart.properties(width=330, height=180)
