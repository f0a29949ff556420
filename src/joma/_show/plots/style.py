"""The look that all figures share, and saving them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
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
# What a page shows instead of a colour on a dark background.
DARK = {
    "black": "#e6edf3", "#000": "#e6edf3", INK: "#e6edf3", "#57606a": "#a3adb8", "#7f7f7f": "#9aa3ad",
    "#f0f0f0": "#242c35", GRID: "#232a32", "#9aa3ad": "#6b7682",
    "#0072b2": "#3f9fe0", "#b07a00": "#e69f00", "#3d97d3": "#8fd0f7",
    "#332288": "#9d8df1", "#882255": "#d9719f", "#117733": "#4fbf73",
}  # fmt: skip
DARK_PAPER = "#0f1419"
# Depth and time are drawn in a part of Vega's scheme "plasma": the dark part on white, the light part
# on a dark background. Vega interpolates between 256 colours; these are within 4 of 255 of them.
_PLASMA = (
    "#0d0887", "#2f0595", "#4902a0", "#6101a7", "#7901a8", "#8e0ca5", "#a21d9a", "#b42e8d", "#c43e7f",
    "#d25072", "#df6064", "#e97358", "#f3854b", "#fa993d", "#fdaf31", "#fdc727", "#f8df25", "#f0f921",
)  # fmt: skip
LIGHT_DEPTH = (0.0, 0.62)
DARK_DEPTH = (0.42, 1.0)
# Colours that are farther apart than this, in steps of 255, are no longer of the scheme for depth.
_SAME_COLOUR = 8.0
_PLACES = 200
# Attributes of SVG elements that hold coordinates.
_COORDINATES = re.compile(
    r' (?:d|transform|points|x|y|x1|x2|y1|y2|cx|cy|r|width|height|viewBox)="[^"]*"'
)
_LONG_NUMBER = re.compile(r"(\d\.\d\d)\d+")


def on_dark(kind: str, colour: str) -> str | None:
    """Return the colour on a dark background; None if it is the same.

    Arguments:
        kind: "fill", "stroke" or "stop-color". A white stroke separates marks, and takes the colour of the page.
        colour: as Vega writes it.

    >>> on_dark("fill", "#0072b2"), on_dark("fill", "#d55e00")
    ('#3f9fe0', None)
    """
    if kind == "stroke" and colour == "white":
        return DARK_PAPER
    return DARK.get(colour) or _dark_depth(colour)


@lru_cache(maxsize=4096)
def _dark_depth(colour: str) -> str | None:
    """The colour of the same depth on a dark background; None for a colour that shows no depth."""
    wanted = _rgb(colour)
    if wanted is None:
        return None
    distances = {place: math.dist(wanted, rgb) for place, rgb in _light_colours().items()}
    nearest = min(distances, key=distances.__getitem__)
    if distances[nearest] > _SAME_COLOUR:
        return None
    red, green, blue = _plasma(_within(DARK_DEPTH, nearest))
    return f"#{round(red):02x}{round(green):02x}{round(blue):02x}"


@lru_cache(maxsize=1)
def _light_colours() -> dict[float, tuple[float, float, float]]:
    """Places between 0 and 1, and the colours of depth there on white."""
    places = [n / _PLACES for n in range(_PLACES + 1)]
    return {place: _plasma(_within(LIGHT_DEPTH, place)) for place in places}


def _within(extent: tuple[float, float], place: float) -> float:
    return extent[0] + place * (extent[1] - extent[0])


def _plasma(place: float) -> tuple[float, float, float]:
    """The colour at a place between 0 and 1."""
    along = place * (len(_PLASMA) - 1)
    n = min(int(along), len(_PLASMA) - 2)
    start = _rgb(_PLASMA[n])
    end = _rgb(_PLASMA[n + 1])
    assert start is not None
    assert end is not None
    red, green, blue = (a + (along - n) * (b - a) for a, b in zip(start, end, strict=True))
    return red, green, blue


def _rgb(colour: str) -> tuple[int, int, int] | None:
    """Red, green and blue of "#0d0887" or "rgb(13, 8, 135)"; None for names and references."""
    numbers = re.fullmatch(r"rgb\((\d+), ?(\d+), ?(\d+)\)", colour)
    if numbers is not None:
        return int(numbers[1]), int(numbers[2]), int(numbers[3])
    if re.fullmatch("#[0-9a-f]{6}", colour):
        return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
    return None


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
            labelColor=INK,
            titleColor=INK,
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
    """Return an SVG with its coordinates to a hundredth of a pixel.

    Texts and labels keep their digits: they are numbers that somebody reads.

    >>> compact('<g transform="translate(1.23456,2)"><text>lr 0.0001</text></g>')
    '<g transform="translate(1.23,2)"><text>lr 0.0001</text></g>'
    """
    return _COORDINATES.sub(lambda match: _LONG_NUMBER.sub(r"\1", match[0]), svg)


@dataclass(frozen=True)
class Drawing:
    """A figure as it was drawn: its Vega-Lite specification, and its picture."""

    specification: str  # JSON
    svg: str


def drawing(chart: Chart) -> Drawing:
    """Return the specification of ``chart`` in the shared look, and its picture."""
    import vl_convert

    text = specification(chart)
    return Drawing(text, compact(vl_convert.vegalite_to_svg(text)))


def stored_drawing(folder: Path) -> Drawing:
    """Return the figure that `save` wrote into ``folder``."""
    text = (folder / "figure.json").read_text(encoding="utf-8")
    return Drawing(text, (folder / "figure.svg").read_text(encoding="utf-8"))


def write(chart: Chart, file: Path) -> None:
    """Write a figure to one file: .svg, .pdf, .png or the Vega-Lite specification, .json."""
    import vl_convert

    drawn = drawing(chart)
    ending = file.suffix.lower()
    if ending == ".svg":
        write_atomic(file, _with_titles(drawn.svg))
    elif ending == ".pdf":
        write_atomic(file, vl_convert.svg_to_pdf(drawn.svg))
    elif ending == ".png":
        write_atomic(file, vl_convert.vegalite_to_png(drawn.specification, scale=2))
    elif ending == ".json":
        write_atomic(file, drawn.specification)
    else:
        raise ValueError(f"{file}: figures are .svg, .pdf, .png or .json")


def _with_titles(svg: str) -> str:
    """Return a picture in which browsers show the names of layers on hovering: a <title> each."""
    return re.sub(
        r'<path aria-label="(layer \d[^"]*)"([^>]*)/>', r"<path\2><title>\1</title></path>", svg
    )


def save(chart: Chart, folder: Path) -> None:
    """Write ``figure.svg``, ``figure.pdf``, ``figure.png`` and the Vega-Lite ``figure.json`` into ``folder``."""
    import vl_convert

    drawn = drawing(chart)
    write_atomic(folder / "figure.json", drawn.specification)
    write_atomic(folder / "figure.pdf", vl_convert.svg_to_pdf(drawn.svg))
    write_atomic(folder / "figure.svg", _with_titles(drawn.svg))
    write_atomic(folder / "figure.png", vl_convert.vegalite_to_png(drawn.specification, scale=2))
