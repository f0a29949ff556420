"""Who attends to whom: attention on one sequence at the start, at the sparsest and at the end, a heat map per layer."""

from __future__ import annotations

import json
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from joma._runs.patterns import Pattern, Patterns
from joma._show.plots.panels import row
from joma._show.plots.style import Chart

MOST_CELLS = 24_000  # in all panels: what a page draws quickly
MOST_WORDS = 40  # that can be read along an axis
MOST_LETTERS = 12  # of a word at an axis; hovering shows all of it
SIZE = 250  # of a panel, in pixels


def draw(patterns: Patterns, *, top: bool = False, size: int = SIZE) -> Chart:
    """One row per layer, at most as many as can be shown, or the top layer alone; one column per step.

    Arguments:
        top: the top layer alone.
        size: of a panel, in pixels.
    """
    kept = patterns.kept
    names = _names(kept)
    rows = []
    for place in [len(patterns.layers) - 1] if top else _places(patterns):
        table = _table(patterns, place)
        panels = [
            _panel(table[table.step == one.step], name, size)
            for one, name in zip(kept, names, strict=True)
        ]
        rows.append(row(*panels, shared=True))
    return alt.vconcat(*rows)


def shown_layers(patterns: Patterns) -> list[int]:
    """The numbers of the layers that `draw` shows."""
    return [list(patterns.layers)[place] for place in _places(patterns)]


def _names(kept: list[Pattern]) -> list[str]:
    lowest = min(kept, key=lambda one: one.entropy)
    names = {kept[-1].step: "end", lowest.step: "sparsest", kept[0].step: "start"}
    return [names[one.step] for one in kept]


def _places(patterns: Patterns) -> list[int]:
    """Among the layers that are kept: the first, the last, and some between, as the cells allow."""
    count = len(patterns.layers)
    cells = sum(int((weights > 0).sum()) for one in patterns.kept for weights in one.weights) / max(
        1, count
    )
    most = max(1, min(count, int(MOST_CELLS / max(1.0, cells))))
    return sorted(
        {round(n * (count - 1) / max(1, most - 1)) if most > 1 else count - 1 for n in range(most)}
    )


def _table(patterns: Patterns, place: int) -> pd.DataFrame:
    """Step, query, key, their words, the weight; without keys that a query attends to at no step."""
    seen = np.any([one.weights[place] > 0 for one in patterns.kept], axis=0)
    query, key = np.nonzero(seen)
    words = _words(patterns, max(seen.shape))
    parts = []
    for one in patterns.kept:
        weight = one.shares(place)[query, key].round(4)
        parts.append(pd.DataFrame({"step": one.step, "query": query, "key": key, "weight": weight}))
    table = pd.concat(parts, ignore_index=True)
    table["from"], table["to"] = (
        [words[n] for n in table["query"]],
        [words[n] for n in table["key"]],
    )
    number, name = list(patterns.layers.items())[place]
    return table.assign(layer=number, module=name)


def _words(patterns: Patterns, size: int) -> list[str]:
    """What each position is called: its word, or its number."""
    given = patterns.words or []
    return [given[n] if n < len(given) else str(n) for n in range(size)]


def _panel(table: pd.DataFrame, name: str, size: int) -> Any:
    tokens = 1 + int(max(table["query"].max(), table["key"].max()))
    words = {int(n): word for n, word in zip(table["key"], table["to"], strict=True)}
    words |= {int(n): word for n, word in zip(table["query"], table["from"], strict=True)}
    first = table.iloc[0]
    axis: dict[str, Any] = {
        "grid": False,
        "ticks": False,
        "domain": False,
        "labels": tokens <= MOST_WORDS,
    }
    axis |= {"labelFontSize": 6.5 if tokens > 24 else 8, "labelOverlap": False, "labelPadding": 2}
    shown = [words.get(n, "")[:MOST_LETTERS] for n in range(tokens)]
    axis |= {"labelExpr": f"{json.dumps(shown)}[datum.value]"} if tokens <= MOST_WORDS else {}
    places = alt.Scale(domain=list(range(tokens)), paddingInner=0, paddingOuter=0)
    colour = alt.Color(
        "weight:Q", title="weight", scale=alt.Scale(type="sqrt", domain=[0, 1], scheme="viridis"),
        legend=alt.Legend(format=".2~f", gradientLength=120, values=[0, 0.01, 0.1, 0.25, 0.5, 1]),
    )  # fmt: skip
    tips = [alt.Tooltip("from:N", title="query"), alt.Tooltip("to:N", title="key")]
    tips += [
        alt.Tooltip("weight:Q", format=".3f"),
        alt.Tooltip("query:Q", title="query at", format="d"),
    ]
    tips += [alt.Tooltip("key:Q", title="key at", format="d")]
    return (
        alt.Chart(table[["query", "key", "from", "to", "weight"]])
        .mark_rect()
        .encode(
            alt.X("key:O", title="key", scale=places, axis=alt.Axis(**axis, labelAngle=-90)),
            alt.Y("query:O", title="query", scale=places, axis=alt.Axis(**axis)),
            colour,
            tooltip=tips,
        )
        .properties(
            width=size, height=size, title=f"layer {first.layer}, {name} (step {first.step:,})"
        )
    )
