"""A simulated task: logits, weights, attention entropy and the drift of the first integral over time."""

from __future__ import annotations

from typing import Any

import pandas as pd

from joma._runs import Run
from joma._show.plots import panels as p


def draw_run(run: Run) -> p.Chart:
    """From a ``simulate`` run."""
    config = run.info["config"]
    return draw(
        run.frame(), f"{config['task']}: {config['attention']} attention, {config['activation']}"
    )


def draw(frame: pd.DataFrame, title: str) -> p.Chart:
    """From the long frame of a ``simulate`` run; at most 12 tokens and the largest 12 weights are drawn."""
    z, v, entropy, drift = (frame[frame.gauge == gauge] for gauge in ("z", "v", "entropy", "drift"))
    largest = (
        v.assign(size=v.value.abs()).groupby(["token", "node"])["size"].max().nlargest(12).index
    )
    v = v.set_index(["token", "node"]).loc[largest].reset_index()
    v = v.assign(weight=[f"v[{a}, {b}]" for a, b in zip(v.token, v.node, strict=True)])
    logarithmic = {"log": True, "domain": None} if (drift.value > 0).any() else {}
    above = (
        _panel(z[z.token < 12], p.y("value", "attention logits z", zero=False), "token"),
        _panel(v, p.y("value", "largest weights v", zero=False), "weight"),
    )
    below = (
        _panel(entropy, p.y("value", "attention entropy (nats)", zero=True)),
        _panel(
            drift.assign(value=drift.value.clip(lower=1e-17)),
            p.y("value", "drift of the first integral", format=".0e", ticks=6, **logarithmic),
        ),
    )
    return p.column(p.row(*above), p.row(*below, shared=True), shared=True).properties(title=title)


def _panel(data: pd.DataFrame, y: Any, colour: str | None = None) -> Any:
    by = p.by(colour, colour, scheme=p.DEPTH) if colour else None
    tip = ["t", "value", *([colour] if colour else [])]
    return p.panel(None, p.lines(data, p.x("t", "t"), y, by, tip=tip), size=(330, 180))
