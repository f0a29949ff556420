"""The panels that figures are made of: channels (x, y, colour), marks, and how they are put together.

A figure is a column of rows of panels; a panel is a title around one or more marks over each other:

>>> import pandas as pd
>>> table = pd.DataFrame({"step": [0, 1, 2], "loss": [3.0, 2.0, 1.5]})
>>> drawn = panel(
...     "Loss", lines(table, x("step"), y("loss", "nats per token")), note="one line per run"
... )
>>> row(drawn, drawn).to_dict()["hconcat"][0]["mark"]["type"]
'line'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from joma._show.plots.style import INK as INK
from joma._show.plots.style import LIGHT_DEPTH
from joma._show.plots.style import Chart as Chart

FAINT, ACCENT = "#57606a", "#0072b2"
DEPTH = alt.SchemeParams(
    name="plasma", extent=list(LIGHT_DEPTH)
)  # layers and time, dark to light, all seen on white
FEW = 12  # layers that a legend names
THUMBNAIL = (150, 105)  # pixels
DASH = [5, 4]
Tip = (
    Sequence[str] | Mapping[str, str | None]
)  # fields, or fields with the formats of their numbers


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def decades(values: pd.Series[float]) -> list[float]:
    """Return the powers of ten within some positive values, for the ticks of a logarithmic axis.

    >>> decades(pd.Series([0.03, 12.0]))
    [0.1, 1.0, 10.0]
    """
    first = math.ceil(math.log10(values.min()))
    last = math.floor(math.log10(values.max()))
    return [10.0**power for power in range(first, last + 1)]


# channels


def _position(
    field: str, title: str | None = None, *, kind: str = "Q", log: bool = False, domain: Sequence[Any] | None = None,
    format: str | None = None, ticks: int | Sequence[float] | None = None, labels: bool = True,
    zero: bool | None = None, clamp: bool | None = None, angle: float = 0, sort: Any = "ascending",
    axis: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A position on an axis.

    Arguments:
        field: the column.
        title: beside the axis; none by default.
        kind: "Q" for numbers, "O" and "N" for categories, ordered and by name.
        log: a logarithmic scale.
        domain: the first and the last value, or the categories.
        format: of the labels.
        ticks: how many, or where.
        labels: whether there are any.
        zero: whether 0 has to be on the axis.
        clamp: draw what is outside of the domain at its edge.
        angle: of the labels of categories.
        sort: the order of categories; None is that of the data.
        axis: more of `alt.Axis`.
    """
    scale = _given(
        domain=domain and list(domain), zero=zero, clamp=clamp, type="log" if log else None
    )
    if log and domain is None:
        scale["nice"] = False
    shown = _given(format=format) | (
        {"tickCount": ticks} if isinstance(ticks, int) else _given(values=ticks)
    )
    if not labels:
        shown |= {"labels": False, "ticks": False}
    elif kind != "Q":
        shown["labelAngle"] = angle
    shown |= dict(axis or {})
    options: dict[str, Any] = {"shorthand": f"{field}:{kind}", "title": title}
    if kind != "Q":
        options["sort"] = sort
    return options | _given(
        axis=alt.Axis(**shown) if shown else None, scale=alt.Scale(**scale) if scale else None
    )


def x(field: str, title: str | None = None, **options: Any) -> alt.X:
    """The horizontal axis; options as in `_position`. Of numbers it has few ticks: their labels stand side by side."""
    if options.get("kind", "Q") == "Q" and not options.get("log") and "axis" not in options:
        options.setdefault("ticks", 6)
    return alt.X(**_position(field, title, **options))


def y(field: str, title: str | None = None, **options: Any) -> alt.Y:
    """The vertical axis; options as in `_position`."""
    return alt.Y(**_position(field, title, **options))


def by(
    field: str, title: str | None = None, *, kind: str = "N", order: Sequence[Any] | None = None,
    colours: Mapping[Any, str] | None = None, scheme: Any = None, domain: Sequence[Any] | None = None,
    legend: bool | Mapping[str, Any] = True,
) -> alt.Color:  # fmt: skip
    """Colour by a column: categories in an ``order`` or with ``colours``, or by a ``scheme``, as numbers (kind "Q")."""
    scale = _given(scheme=scheme, domain=domain and list(domain))
    if colours:
        scale |= {"domain": list(colours), "range": list(colours.values())}
    shown = legend if isinstance(legend, Mapping) else {} if kind == "Q" else {"symbolOpacity": 1}
    return alt.Color(
        f"{field}:{kind}", title=title, legend=alt.Legend(**shown) if legend else None,
        **_given(scale=alt.Scale(**scale) if scale else None, sort=order and list(order)),
    )  # fmt: skip


def dash(field: str, order: Sequence[Any]) -> alt.StrokeDash:
    """Kinds of dashes by a column, without a legend: beside colours that have one."""
    return alt.StrokeDash(f"{field}:N", sort=list(order), legend=None)


def offset(field: str, order: Sequence[Any]) -> alt.XOffset:
    """Marks of one x beside each other, by a column."""
    return alt.XOffset(f"{field}:N", sort=list(order))


def shape(field: str, shapes: Mapping[Any, str]) -> alt.Shape:
    """The shape of points by a column: value -> Vega's name of a shape; merged into the legend of the colours."""
    scale = alt.Scale(domain=list(shapes), range=list(shapes.values()))
    return alt.Shape(f"{field}:N", title=None, sort=list(shapes), scale=scale)


def by_layer(layers: int, *, legend: bool = True) -> alt.Color:
    """Colour by depth, dark to light; the legend names all layers, or some of many."""
    scale = alt.Scale(scheme=DEPTH, domain=list(range(layers)))
    named = (
        range(layers)
        if layers <= FEW
        else sorted({round(n * (layers - 1) / (FEW - 1)) for n in range(FEW)})
    )
    return alt.Color(
        "layer:O",
        scale=scale,
        legend=alt.Legend(title="layer", values=list(named)) if legend else None,
    )


def step_axis(steps: pd.Series[Any], scan: bool = False) -> alt.X:
    """Steps; of a scan always on a log axis, which shows step 0 too."""
    if scan and steps.max() > 0:
        ticks = [0, *(10**n for n in range(1 + int(math.log10(steps.max()))))]
        if (
            sum(steps.min() <= tick <= steps.max() for tick in ticks) < 3
        ):  # of a series within two decades
            ticks = sorted({0, *(digit * tick for tick in ticks for digit in (1, 2, 5))})
        label = "format(datum.value, '~s')"  # one by one: the axis' own format gives all of them one prefix
        axis = alt.Axis(
            labelExpr=label, grid=False, values=ticks, labelOverlap="greedy", labelFlush=False
        )
        return alt.X(
            "step:Q",
            title="step",
            scale=alt.Scale(type="symlog", constant=1, nice=False),
            axis=axis,
        )
    log = bool(steps.min() > 0 and steps.max() > 100 * steps.min())
    scale = (
        alt.Scale(type="log", nice=False)
        if log
        else alt.Scale(type="linear", nice=False, zero=False)
    )
    axis = alt.Axis(format="~s", grid=not log, tickCount=5, labelOverlap="greedy", labelFlush=False)
    return alt.X("step:Q", title="step", scale=scale, axis=axis)


def clock_axis() -> alt.X:
    """The optimiser's clock, under which runs at different rates can be compared."""
    axis = alt.Axis(format="~g", tickCount=5, labelOverlap="greedy", labelFlush=False)
    return alt.X(
        "tau:Q",
        title="τ, sum of learning rates",
        scale=alt.Scale(type="linear", nice=False),
        axis=axis,
    )


# marks


def _mark(
    data: pd.DataFrame,
    *channels: Any,
    tip: Tip | None = None,
    detail: str | None = None,
    more: Sequence[str] = (),
) -> alt.Chart:
    """A chart with these channels and, of the data, the columns that are used; ``more`` are those of other marks."""
    channels = tuple(channel for channel in channels if channel is not None)
    used = [str(channel.shorthand).rpartition(":")[0] for channel in channels]
    chart = alt.Chart(
        data[list(dict.fromkeys([*used, *([detail] if detail else []), *(tip or ()), *more]))]
    )
    chart = chart.encode(*channels, **({"detail": f"{detail}:N"} if detail else {}))
    if not tip:
        return chart
    formats: dict[str, str | None] = dict(tip) if isinstance(tip, Mapping) else dict.fromkeys(tip)
    return chart.encode(
        tooltip=[alt.Tooltip(name, **_given(format=form)) for name, form in formats.items()]
    )


def lines(
    data: pd.DataFrame, x: alt.X, y: alt.Y, by: Any = None, *, tip: Tip | None = None, detail: str | None = None,
    width: float = 1.8, colour: str | None = None, dashed: bool = False, dash: alt.StrokeDash | None = None,
    points: bool | float = False, bold: str | None = None, order: str | None = None, **mark: Any,
) -> alt.Chart:  # fmt: skip
    """Curves, one per colour and per value of the column ``detail``.

    Arguments:
        dash: what the kind of dashes tells.
        points: mark the points; a number is their size.
        bold: the condition under which a line is bold; the others are thin and faint.
        order: the column along which a line is drawn, where it is not that of x.
        mark: more of Altair's line mark.
    """
    dots = alt.OverlayMarkDef(size=points) if isinstance(points, float) else points or None
    mark |= _given(strokeDash=DASH if dashed else None, color=colour, point=dots)
    chart = _mark(
        data, x, y, by, dash, alt.Order(f"{order}:Q") if order else None, tip=tip, detail=detail
    )
    if bold is None:
        return chart.mark_line(strokeWidth=width, **mark)
    return chart.mark_line(**mark).encode(
        strokeWidth=alt.condition(bold, alt.value(2.6), alt.value(1)),
        opacity=alt.condition(bold, alt.value(1), alt.value(0.6)),
    )


def layer_lines(
    data: pd.DataFrame, x: alt.X, y: alt.Y, layers: int, *, legend: bool = True, **mark: Any
) -> alt.Chart:
    """The column ``value`` over steps, one line per layer, coloured by depth."""
    tip = {"step": None, "layer": None, "value": ".3f"}
    width = 1.8 if layers <= FEW else 1.2
    return lines(
        data, x, y, by_layer(layers, legend=legend), detail="layer", tip=tip, width=width, **mark
    )


def reference(data: pd.DataFrame, x: alt.X, y: alt.Y) -> alt.Chart:
    """A dashed black curve: what is expected."""
    return lines(data, x, y, width=1.5, colour="black", dashed=True)


def levels(*values: float) -> alt.Chart:
    """Dashed horizontal lines."""
    rule = alt.Chart(pd.DataFrame({"level": values})).mark_rule(
        strokeDash=DASH, color="black", strokeWidth=1.2
    )
    return rule.encode(alt.Y("level:Q"))


def bands(
    data: pd.DataFrame, x: alt.X, y: alt.Y, by: alt.Color, *, low: str = "low", middle: str = "mid", high: str = "high",
    tip: Tip | None = None, points: bool = False, opacity: float = 0.18,
) -> Chart:  # fmt: skip
    """Curves (the column ``middle``) in bands from ``low``, which is the column of y, to ``high``."""
    base = _mark(data, x, y, by, tip=tip, more=[middle, high])
    band = base.encode(alt.Y2(f"{high}:Q"), tooltip=alt.Undefined).mark_area(opacity=opacity)
    return alt.layer(
        band,
        base.encode(alt.Y(f"{middle}:Q")).mark_line(strokeWidth=2, **_given(point=points or None)),
    )


def dots(
    data: pd.DataFrame, x: alt.X, y: alt.Y, *channels: Any, tip: Tip | None = None, size: float = 28,
    filled: bool = False, **mark: Any,
) -> alt.Chart:  # fmt: skip
    """Points: rings, or discs if ``filled``; further channels are colour and shape."""
    mark |= {} if filled else {"strokeWidth": 1.4}
    return _mark(data, x, y, *channels, tip=tip).mark_point(size=size, filled=filled, **mark)


def strokes(data: pd.DataFrame, x: alt.X, y: alt.Y, by: alt.Color) -> alt.Chart:
    """Short upright strokes at their places."""
    return _mark(data, x, y, by).mark_tick(orient="vertical", thickness=2, size=12)


def intervals(data: pd.DataFrame, x: alt.X, y: alt.Y, *channels: Any, high: str) -> alt.Chart:
    """Upright strokes from y to the column ``high``."""
    return (
        _mark(data, x, y, *channels, more=[high])
        .encode(alt.Y2(f"{high}:Q"))
        .mark_rule(strokeWidth=1.5)
    )


def heat(
    data: pd.DataFrame, x: alt.X, y: alt.Y, by: alt.Color, *, tip: Tip | None = None, text: str | None = None,
    white: str = "false",
) -> Chart:  # fmt: skip
    """Cells coloured by a number; the column ``text`` is written into them, in ``white`` where that condition holds."""
    base = _mark(data, x, y, by, tip=tip, more=[text] if text else [])
    if text is None:
        return base.mark_rect()
    ink = alt.condition(white, alt.value("white"), alt.value(INK))
    return alt.layer(
        base.mark_rect(stroke="white"),
        base.encode(alt.Text(f"{text}:Q", format=".2f"), color=ink).mark_text(fontSize=10),
    )


def bars(
    data: pd.DataFrame, x: alt.X, y: alt.Y, by: alt.Color, *, tip: Tip | None = None,
    chance: tuple[float, float] | None = None,
) -> Chart:  # fmt: skip
    """Bars, those of one x beside each other; ``chance`` (mean and sd) is a dashed line in a band of ± 2 sd."""
    drawn = _mark(data, x, y, by, alt.XOffset(str(by.shorthand), sort=None), tip=tip).mark_bar()
    if chance is None:
        return drawn
    mean, sd = chance
    level = alt.Chart(
        pd.DataFrame({"mean": [mean], "low": [max(0.0, mean - 2 * sd)], "high": [mean + 2 * sd]})
    )
    band = level.mark_rect(color=FAINT, opacity=0.25).encode(alt.Y("low:Q"), alt.Y2("high:Q"))
    line = level.mark_rule(color=INK, strokeDash=DASH, strokeWidth=1.5).encode(alt.Y("mean:Q"))
    return alt.layer(drawn, band, line)


def words(
    data: pd.DataFrame, x: alt.X, y: alt.Y, text: str, by: Any = None, *, tip: Tip | None = None,
    accent: str | None = None, **mark: Any,
) -> alt.Chart:  # fmt: skip
    """Words at their places; in another colour where the condition ``accent`` holds."""
    chart = _mark(data, x, y, by, alt.Text(f"{text}:N"), tip=tip, more=[accent] if accent else [])
    if accent:
        chart = chart.encode(
            color=alt.condition(f"datum.{accent}", alt.value(ACCENT), alt.value(FAINT))
        )
    return chart.mark_text(**{"fontSize": 11, **mark})


def apart(values: pd.Series[Any], least: float) -> list[float]:
    """Places for labels of values in ascending order, each above the one before by ``least`` at least.

    >>> apart(pd.Series([0.0, 0.05, 2.0]), 0.5)
    [0.0, 0.5, 2.0]
    """
    places: list[float] = []
    for value in values:
        places.append(max(float(value), places[-1] + least) if places else float(value))
    return places


# together


def panel(
    title: Any, *marks: Any, note: str | None = None, size: tuple[float, float] = (330, 200)
) -> Any:
    """Marks over each other, with a title, a line below it, and a size in pixels."""
    chart = marks[0] if len(marks) == 1 else alt.layer(*marks)
    chart = chart.properties(width=size[0], height=size[1])
    return (
        chart
        if title is None
        else chart.properties(title=alt.Title(title, **_given(subtitle=note)))
    )


def thumbnail(*marks: Any) -> Any:
    """Marks over each other in a small panel without a title: the picture of a finding."""
    return panel(None, *marks, size=THUMBNAIL)


def row(*panels: Any, shared: bool = False) -> alt.HConcatChart:
    """Panels beside each other; colours have the same meaning in all of them only if they are ``shared``."""
    chart = alt.hconcat(*panels)
    return chart if shared else chart.resolve_scale(color="independent", strokeDash="independent")


def grid(*panels: Any, columns: int, shared: bool = False) -> alt.ConcatChart:
    """Panels in rows of so many, with their axes in line; as `row`."""
    chart = alt.concat(*panels, columns=columns)
    return chart if shared else chart.resolve_scale(color="independent", strokeDash="independent")


def column(*panels: Any, shared: bool = False) -> alt.VConcatChart:
    """Panels, or rows of them, below each other; as `row`."""
    chart = alt.vconcat(*panels)
    return chart if shared else chart.resolve_scale(color="independent", strokeDash="independent")
