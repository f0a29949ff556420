"""Contexts of neurons as lines of text: tokens at their places, attended ones in bold, shaded by activation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import altair as alt
import pandas as pd

from joma._show.plots.panels import FAINT
from joma._show.plots.style import INK, Chart

WIDE = 74  # characters per line
LETTER = 7.6  # pixels, of a character of 12 pixels
LINE = 24  # pixels


def contexts(title: str, note: str, rows: Mapping[str, Mapping[str, Any]]) -> Chart:
    """One line per context: name -> context as in ``superpose.json``, from as far back as a line holds to its query."""
    tokens = [
        {"row": name, **token} for name, context in rows.items() for token in _tokens(context)
    ]
    frame = pd.DataFrame(
        tokens, columns=["row", "at", "end", "ink", "text", "shade", "bold", "query"]
    )
    y = alt.Y(
        "row:N",
        sort=list(rows),
        title=None,
        axis=alt.Axis(grid=False, ticks=False, domain=False, labelPadding=8),
    )
    x, ink = (
        alt.X(name, scale=alt.Scale(domain=[0, WIDE], nice=False), axis=None)
        for name in ("at:Q", "ink:Q")
    )
    base = alt.Chart(frame, title=alt.Title(title, subtitle=note))
    shade = alt.Opacity("shade:Q", scale=None, legend=None)
    shaded = base.mark_rect(height=LINE - 6).encode(
        x, alt.X2("end:Q"), y, shade, color=alt.value("#d55e00")
    )
    framed = base.transform_filter("datum.query").mark_rect(
        height=LINE - 6, fill=None, stroke=INK, strokeWidth=1.2
    )
    layers: list[Any] = [shaded, framed.encode(x, alt.X2("end:Q"), y)]
    for bold in (True, False):
        part = base.transform_filter(f"datum.bold == {str(bold).lower()}").mark_text(
            align="left", font="DejaVu Sans Mono, monospace", fontSize=12, baseline="middle",
            fontWeight="bold" if bold else "normal", color=INK if bold else FAINT,
        )  # fmt: skip
        layers.append(part.encode(ink, y, text="text:N"))
    return alt.layer(*layers).properties(width=LETTER * WIDE, height=LINE * max(1, len(rows)))


def _tokens(context: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Place and text of each token of the end of a window up to its query, as much as a line holds."""
    query = context["query"]
    strongest = max(context["along"][query], 1e-9)
    texts = [text.replace("\n", "⏎").replace("\t", " ") for text in context["tokens"]]
    first, room = query + 1, WIDE
    while first > 0 and room >= len(texts[first - 1]):
        first, room = first - 1, room - len(texts[first - 1])
    at = 0
    for n in range(first, query + 1):
        text = texts[n]
        yield {
            "at": at,
            "end": at + len(text),
            "ink": at + len(text) - len(text.lstrip()),  # pictures drop white space at the front
            "text": text.strip(),
            "shade": round(0.7 * max(0.0, min(1.0, context["along"][n] / strongest)), 3),
            "bold": n in context["attended"],
            "query": n == query,
        }
        at += len(text)
