"""The same figure for a page: hover for values, click the legend to turn a series off and on, drag and zoom.

Works on a Vega-Lite specification, so that every figure gets it and none has to know; pictures for papers are made
from the specification as it was drawn. Of curves the page shows all values at the pointer's x at once: each gets a
name, and `USERMETA` tells the page's script (``hover.js``) which fields to read.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

CONCAT = ("hconcat", "vconcat", "concat")
CONTINUOUS, DISCRETE = ("quantitative", "temporal"), ("nominal", "ordinal")
FAINT = ("point", "circle", "square", "tick")  # marks that Vega-Lite draws with opacity 0.7
MOST_SERIES = 40
DIGITS = 5  # of numbers that are drawn: more than any screen shows
USERMETA = "curves"  # name of a mark -> its fields
# a wheel alone scrolls the page; a pinch on a trackpad comes as a wheel with Ctrl
ZOOM = "wheel![event.ctrlKey || event.metaKey]"


@dataclass
class _Unit:
    """One mark: its node, the data it sees, the view it is drawn in, and which colour scale it shares."""

    node: Spec
    data: str | None
    view: Spec
    scale: tuple[int, ...]
    zoomable: bool


@dataclass
class Switch:
    """What the reader can turn off: the selection's name, the field, and its values in the order of the legend."""

    name: str
    field: str
    title: str
    values: list[Any] = dataclasses.field(default_factory=list)


def interactive(spec: Spec) -> tuple[Spec, list[Switch]]:
    """A copy of ``spec`` with tooltips, switches and zoom, and the switches of its series."""
    spec = copy.deepcopy(spec)
    datasets: dict[str, list[Spec]] = spec.get("datasets", {})
    units = list(_units(spec, None, None, (), True))
    for unit in units:
        mark = unit.node["mark"]
        unit.node["mark"] = {"type": mark} if isinstance(mark, str) else mark
    taken = "bind" in str(
        spec.get("params", "")
    )  # a figure that brings its own interaction keeps it
    if not taken:
        _zoom(units)
    switches = _switches(units, datasets)
    curves = {}
    for number, unit in enumerate(units):
        rows = datasets.get(unit.data or "", [])
        if unit.node["mark"]["type"] == "line" and _continuous(unit):
            name = unit.node.setdefault("name", f"curve_{number}")
            curves[name] = _fields(unit.node["encoding"], rows)
        else:
            _hover(unit, rows)
    spec.setdefault("usermeta", {})[USERMETA] = curves
    spec["datasets"] = {name: [_rounded(row) for row in rows] for name, rows in datasets.items()}
    return spec, switches


def _rounded(row: Spec) -> Spec:
    """A row with its numbers to `DIGITS` digits; whole ones, as steps, stay as they are."""
    return {
        key: float(f"{value:.{DIGITS}g}")
        if isinstance(value, float) and not value.is_integer()
        else value
        for key, value in row.items()
    }


def _units(
    node: Spec, data: str | None, view: Spec | None, scale: tuple[int, ...], zoom: bool
) -> Iterator[_Unit]:
    data = node.get("data", {}).get("name", data)
    resolve = node.get("resolve", {}).get("scale", {})
    children: list[Spec] = next((node[key] for key in (*CONCAT, "layer") if key in node), [])
    if "layer" in node:
        view = view if view is not None else node
    for n, child in enumerate(children):
        colour_scale = (*scale, id(node), n) if resolve.get("color") == "independent" else scale
        yield from _units(child, data, view, colour_scale, zoom)
    if "spec" in node:  # facets; a zoom needs scales that they share
        shared = "independent" not in (resolve.get("x"), resolve.get("y")) and "facet" in node
        colour_scale = (*scale, id(node)) if resolve.get("color") == "independent" else scale
        yield from _units(node["spec"], data, None, colour_scale, zoom and shared)
    if "mark" in node:
        facets = {"row", "column", "facet"} & node.get("encoding", {}).keys()
        yield _Unit(node, data, view if view is not None else node, scale, zoom and not facets)


def _continuous(unit: _Unit) -> bool:
    encoding = unit.node.get("encoding", {})
    return all(
        encoding.get(c, {}).get("type") in CONTINUOUS
        and "field" in encoding[c]
        and not encoding[c].get("bin")
        for c in "xy"
    )


def _zoom(units: list[_Unit]) -> None:
    done: set[int] = set()
    for number, unit in enumerate(units):
        if not unit.zoomable or id(unit.view) in done or not _continuous(unit):
            continue
        done.add(id(unit.view))
        select = {"type": "interval", "zoom": ZOOM}
        unit.node.setdefault("params", []).append(
            {"name": f"zoom_{number}", "select": select, "bind": "scales"}
        )
        for other in units:
            if (
                other.view is unit.view
            ):  # marks and labels may stand over the edge, as drawn, until the reader zooms
                other.node["mark"].setdefault(
                    "clip", {"expr": f"length(data('zoom_{number}_store')) > 0"}
                )


def _switches(units: list[_Unit], datasets: dict[str, list[Spec]]) -> list[Switch]:
    """One switch for each colour legend: the marks of a series that is off are not drawn."""
    groups: dict[tuple[tuple[int, ...], str], list[_Unit]] = {}
    for unit in units:
        colour = unit.node.get("encoding", {}).get("color", {})
        if colour.get("type") in DISCRETE and "field" in colour:
            groups.setdefault((unit.scale, colour["field"]), []).append(unit)
    switches: list[Switch] = []
    for (_, name), members in groups.items():
        colours = [unit.node["encoding"]["color"] for unit in members]
        bearer = next(
            (u for u, c in zip(members, colours, strict=True) if c.get("legend", {}) is not None),
            None,
        )
        rows = (row for unit in members for row in datasets.get(unit.data or "", []))
        values = list(dict.fromkeys(row[name] for row in rows if row.get(name) is not None))
        values = sorted(values) if all(isinstance(v, (int, float)) for v in values) else values
        order: list[Any] = next((c["sort"] for c in colours if isinstance(c.get("sort"), list)), [])
        values = [v for v in order if v in values] + [v for v in values if v not in order]
        if bearer is None or not 2 <= len(values) <= MOST_SERIES:
            continue
        title = next((c["title"] for c in colours if c.get("title")), None) or name
        switch = Switch(f"series_{len(switches)}", name, str(title), values)
        switches.append(switch)
        # all are selected at first, and a click takes one out: on and off, as the legend shows
        select = {"type": "point", "fields": [name], "toggle": "true", "clear": False}
        param = {
            "name": switch.name,
            "select": select,
            "bind": "legend",
            "value": [{name: v} for v in values],
        }
        bearer.node.setdefault("params", []).append(param)
        for unit in members:
            unit.node["_switch"] = switch.name
            if "opacity" not in unit.node["encoding"]:
                mark = unit.node["mark"]
                full = mark.get("opacity", 0.7 if mark["type"] in FAINT else 1)
                unit.node["encoding"]["opacity"] = {
                    "condition": {"param": switch.name, "value": full},
                    "value": 0,
                }
    return switches


def _hover(unit: _Unit, rows: list[Spec]) -> None:
    """A tooltip for marks that stand alone: points, bars, cells."""
    encoding = unit.node.get("encoding", {})
    if unit.node["mark"]["type"] in ("line", "area", "rule", "text") and "tooltip" not in encoding:
        return
    encoding["tooltip"] = _tooltip(encoding, rows)


def _fields(encoding: Spec, rows: list[Spec]) -> Spec:
    """What the page shows of a curve at the pointer: x, y, the series' name, and what else tells curves apart."""
    encoding.pop("tooltip", None)  # of a line it would be its first point's
    fields: Spec = {}
    for channel in ("x", "y"):
        item = encoding[channel]
        numbers = [row.get(item["field"]) for row in rows]
        fields[channel] = {"field": item["field"], "title": str(item.get("title") or item["field"])}
        fields[channel]["format"] = _format(numbers)
    named = [encoding.get(channel) for channel in ("color", "detail", "strokeDash")]
    series = [item["field"] for item in named if isinstance(item, dict) and "field" in item]
    return fields | {"series": list(dict.fromkeys(series))}


def _tooltip(encoding: Spec, rows: list[Spec]) -> list[Spec]:
    given = encoding.get("tooltip", [])
    shown: list[Spec] = [dict(item) for item in (given if isinstance(given, list) else [given])]
    have = {item.get("field") for item in shown}
    for channel in ("color", "x", "y"):
        item = encoding.get(channel, {})
        if "field" in item and item["field"] not in have and not item.get("aggregate"):
            title = item.get("title") or item["field"]
            shown.append({"field": item["field"], "type": item["type"], "title": str(title)})
    for item in shown:
        if item.get("type") == "quantitative" and "format" not in item and "field" in item:
            item["format"] = _format([row.get(item["field"]) for row in rows])
    return shown


def _format(values: list[Any]) -> str:
    numbers = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    return ",d" if numbers and all(float(v).is_integer() for v in numbers) else ".4~g"
