"""The look that all figures share, and saving them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import altair as alt

from joma._runs import write_atomic

Chart = (
    alt.Chart
    | alt.LayerChart
    | alt.HConcatChart
    | alt.VConcatChart
    | alt.ConcatChart
    | alt.FacetChart
)

FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
INK, GRID = "#24292f", "#e7eaee"
# colour-blind safe (Okabe-Ito, the two lightest darkened to be seen on white), in the order in which they are used
COLOURS = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#b07a00", "#3d97d3", "#7f7f7f"]
# what a page puts in the place of colours, and of the scheme for depth, on a dark background
DARK = {
    "black": "#e6edf3", INK: "#e6edf3", "#57606a": "#a3adb8", "#f0f0f0": "#242c35", "#7f7f7f": "#9aa3ad",
    "#0072b2": "#3f9fe0", "#b07a00": "#e69f00", "#3d97d3": "#8fd0f7",
    "#332288": "#9d8df1", "#882255": "#d9719f", "#117733": "#4fbf73",
}  # fmt: skip
DARK_DEPTH = [0.42, 1.0]


def styled(chart: Chart) -> Chart:
    """``chart`` with the shared fonts, colours and lines."""
    axis: dict[str, Any] = {
        "labelFont": FONT, "titleFont": FONT, "labelFontSize": 11, "titleFontSize": 12, "titleFontWeight": "normal",
        "labelColor": INK, "titleColor": INK, "gridColor": GRID, "domainColor": "#9aa3ad", "tickColor": "#9aa3ad",
    }  # fmt: skip
    return (
        chart.configure(font=FONT, background="white", padding=12)
        .configure_axis(**axis)
        .configure_view(stroke=None)
        .configure_title(
            font=FONT,
            fontSize=13,
            fontWeight=600,
            color=INK,
            anchor="start",
            subtitleFont=FONT,
            subtitleColor="#57606a",
            subtitleFontSize=11,
        )
        .configure_legend(
            labelFont=FONT,
            titleFont=FONT,
            labelFontSize=11,
            titleFontSize=11,
            titleFontWeight="normal",
            labelLimit=260,
        )
        .configure_header(
            labelFont=FONT,
            titleFont=FONT,
            labelFontSize=12,
            labelFontWeight=600,
            labelAnchor="start",
            labelColor=INK,
        )
        .configure_range(category=COLOURS)
    )


def specification(chart: Chart) -> str:
    """The Vega-Lite JSON of ``chart`` in the shared look."""
    with alt.data_transformers.disable_max_rows():  # the limit is for pages that hold many charts
        return str(styled(chart).to_json(indent=None))


def compact(svg: str) -> str:
    """An SVG with its coordinates to a hundredth of a pixel."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", svg)


def save(chart: Chart, folder: Path) -> None:
    """Write ``figure.svg``, ``figure.pdf``, ``figure.png`` and the Vega-Lite ``figure.json`` into ``folder``."""
    import vl_convert

    drawn = specification(chart)
    write_atomic(folder / "figure.json", drawn)
    svg = compact(vl_convert.vegalite_to_svg(drawn))
    write_atomic(folder / "figure.pdf", vl_convert.svg_to_pdf(svg))
    # browsers show a <title> on hovering: the names of layers
    svg = re.sub(
        r'<path aria-label="(layer \d[^"]*)"([^>]*)/>', r"<path\2><title>\1</title></path>", svg
    )
    write_atomic(folder / "figure.svg", svg)
    write_atomic(folder / "figure.png", vl_convert.vegalite_to_png(drawn, scale=2))
