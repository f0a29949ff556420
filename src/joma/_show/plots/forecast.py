"""A forecast: one panel per gauge over the steps of a run that has not been made, one line per layer in its band."""

from __future__ import annotations

from typing import Any

import pandas as pd

from joma._show.plots import panels as p
from joma._show.plots.style import Chart
from joma._show.plots.watch import titled


def draw(frame: pd.DataFrame, heading: str) -> Chart:
    """Draw the table of a forecast: step, gauge, layer, value, low, high."""
    drawn: list[Any] = []
    for gauge in dict.fromkeys(frame.gauge):
        rows = frame[frame.gauge == gauge]
        rows = rows.assign(
            layer=rows.layer.fillna(0),
            low=rows.low.fillna(rows.value),
            high=rows.high.fillna(rows.value),
        )
        layers = 1 + int(rows.layer.max())
        x, y = p.step_axis(rows.step), p.y("low", titled(gauge), zero=gauge == "entropy")
        lines = p.bands(
            rows, x, y, p.by_layer(layers, legend=layers > 1), middle="value", opacity=0.12
        )
        drawn.append(p.panel(titled(gauge) if drawn else heading, lines))
    pairs = [p.row(*drawn[n : n + 2], shared=True) for n in range(0, len(drawn), 2)]
    return p.column(*pairs, shared=True)
