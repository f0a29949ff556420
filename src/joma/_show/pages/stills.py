"""Still pictures: every figure stands in the page as an inline SVG, before a script has run and without one.

Vega writes an SVG for a viewer of its own: each mark repeats its colours, its font and its role. In a page of forty
figures that is most of the bytes. A still has the same marks, with

- one class per style, shared by all stills of a page (`Styles`). A class has a colour for light and one for dark;
- coordinates to a tenth of a pixel, relative along a curve, and no points that a curve passes anyway;
- ticks and grid lines of an axis in one path, points as circles, and no empty groups.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from joma._show.plots.style import FONT, on_dark

Point = tuple[float, float]

# A point that is closer to the line between its neighbours is left out. In pixels: a third of what a screen with
# double resolution can show.
TOLERANCE = 0.15
NOWHERE = "translate(0,0)"  # a transform that does nothing
_SVG = "{http://www.w3.org/2000/svg}"
_PAINT = ("fill", "stroke", "stop-color")
_STYLE = (
    *_PAINT,
    "stroke-width",
    "stroke-dasharray",
    "stroke-linejoin",
    "stroke-linecap",
    "stroke-miterlimit",
    "opacity",
    "fill-opacity",
    "stroke-opacity",
    "font-size",
    "font-weight",
    "font-style",
    "font-family",
    "text-anchor",
)
# The values of a browser, and the font of the page.
_DEFAULTS = {
    ("opacity", "1"),
    ("fill-opacity", "1"),
    ("stroke-opacity", "1"),
    ("font-weight", "normal"),
    ("font-family", FONT),
    ("text-anchor", "start"),
}
_GEOMETRY = ("d", "x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "width", "height", "transform")
_NUMBER = re.compile(r"-?\d*\.?\d+(?:e-?\d+)?")
_TRANSLATION = re.compile(r"translate\(([-\d.e]+),([-\d.e]+)\)")
_POLYLINE = re.compile(r"[MLZ\d.,\se-]+")
_CIRCLE = re.compile(r"M([\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0Z?")


@dataclass
class Styles:
    """The classes of all stills of a page, by what they declare."""

    names: dict[str, str] = field(default_factory=dict)

    def name(self, declarations: str) -> str:
        """Return the class with these declarations."""
        return self.names.setdefault(declarations, f"k{len(self.names)}")

    def css(self) -> str:
        """Return the style sheet of all classes so far."""
        return "".join(f".{name}{{{text}}}" for text, name in self.names.items())


@dataclass
class _Item:
    """An element of a still: its tag, its class, its geometry, its text, and what is inside."""

    tag: str
    style: str = ""
    geometry: dict[str, str] = field(default_factory=dict)
    text: str = ""
    inside: list[_Item] = field(default_factory=list)

    def write(self, styles: Styles) -> Iterator[str]:
        yield f"<{self.tag}"
        if self.style:
            yield f' class="{styles.name(self.style)}"'
        for name, value in self.geometry.items():
            yield f' {name}="{escape(value)}"'
        if not self.inside and not self.text:
            yield "/>"
            return
        yield f">{escape(self.text, quote=False)}"
        for item in self.inside:
            yield from item.write(styles)
        yield f"</{self.tag}>"


def still(svg: str, styles: Styles, id: str) -> str:
    """Return a picture for the page.

    Arguments:
        svg: as Vega writes it.
        styles: takes the classes that are new.
        id: of the section; clip paths and gradients are named after it.
    """
    root = ET.fromstring(svg)
    width = _number(float(root.get("width", "0")))
    height = _number(float(root.get("height", "0")))
    items: list[_Item] = []
    for place, element in enumerate(root):
        is_background = place == 0 and element.tag == f"{_SVG}rect"
        if not is_background:
            items += _items(element, id)
    text = "".join(part for item in items for part in item.write(styles))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg class="still" {size} aria-hidden="true">{text}</svg>'


def _items(element: ET.Element, id: str) -> list[_Item]:
    """The items of an element of Vega's SVG; none for what cannot be seen."""
    tag = element.tag.removeprefix(_SVG)
    if element.get("display") == "none" or element.get("opacity") == "0":
        return []
    if element.get("class") in ("background", "foreground") and not _is_painted(element):
        return []
    if tag in ("defs", "clipPath", "linearGradient"):
        return [_definition(element, tag, id)]
    inside = [item for child in element for item in _items(child, id)]
    geometry = _geometry(element, id)
    style = _declarations(element, id)
    if tag != "g":
        return [_shape(tag, style, geometry, element.text or "", inside)]
    if not inside:
        return []
    if geometry.get("transform") == NOWHERE:
        del geometry["transform"]
    inside = _joined(inside)
    style = style or _common(inside)
    if not geometry and not style:
        return inside
    return [_Item("g", style, geometry, inside=inside)]


def _is_painted(element: ET.Element) -> bool:
    return element.get("fill") is not None or element.get("stroke") is not None


def _definition(element: ET.Element, tag: str, id: str) -> _Item:
    """A clip path or a gradient, under a name that no other figure of the page has."""
    geometry = {name: value for name, value in element.attrib.items() if name != "id"}
    if "id" in element.attrib:
        geometry = {"id": f"{id}-{element.get('id')}", **geometry}
    inside: list[_Item] = []
    for child in element:
        name = child.tag.removeprefix(_SVG)
        if name == "stop":
            stop = {"offset": child.get("offset", "0")}
            inside.append(_Item("stop", _declarations(child, id), stop))
        elif name in ("clipPath", "linearGradient"):
            inside.append(_definition(child, name, id))
        else:
            inside.append(_Item(name, "", _geometry(child, id)))
    return _Item(tag, "", geometry, inside=inside)


def _geometry(element: ET.Element, id: str) -> dict[str, str]:
    """Where an element is, to a tenth of a pixel."""
    geometry: dict[str, str] = {}
    for name in _GEOMETRY:
        value = element.get(name)
        if value is None:
            continue
        if name == "d":
            geometry[name] = path(value)
        else:
            geometry[name] = _rounded(value)
    clip = element.get("clip-path")
    if clip is not None:
        geometry["clip-path"] = _renamed(clip, id)
    return geometry


def _declarations(element: ET.Element, id: str) -> str:
    """The style of an element as CSS, with both colours where dark has another one."""
    parts: list[str] = []
    for name in _STYLE:
        value = element.get(name)
        if value is None or (name, value) in _DEFAULTS:
            continue
        if value.startswith("url("):
            value = _renamed(value, id)
        parts.append(f"{name}:{value}")
        if name not in _PAINT:
            continue
        dark = on_dark(name, value)
        if dark is not None:
            # The first declaration is for browsers that do not know `light-dark`.
            parts.append(f"{name}:light-dark({value},{dark})")
    return ";".join(parts)


def _renamed(reference: str, id: str) -> str:
    """A reference such as "url(#clip0)", to the name in the page."""
    return reference.replace("#", f"#{id}-", 1)


def _shape(tag: str, style: str, geometry: dict[str, str], text: str, inside: list[_Item]) -> _Item:
    """A mark: a point as a circle, a line as a path, text at its place."""
    place = _TRANSLATION.fullmatch(geometry.get("transform", ""))
    if tag == "line":
        return _Item("path", style, {"d": _segment(geometry, place)})
    if tag == "path" and place is not None:
        circle = _CIRCLE.fullmatch(geometry["d"])
        if circle is not None:
            return _Item("circle", style, {"cx": place[1], "cy": place[2], "r": circle[1]})
    if tag == "text" and place is not None:
        del geometry["transform"]
        geometry = {"x": place[1], "y": place[2], **geometry}
    if geometry.get("transform") == NOWHERE:
        del geometry["transform"]
    return _Item(tag, style, geometry, text, inside)


def _segment(geometry: dict[str, str], place: re.Match[str] | None) -> str:
    """The path of a line from its place by (x2, y2)."""
    start = "0 0"
    if place is not None:
        start = _pair(place[1], place[2])
    dx = geometry.get("x2", "0")
    dy = geometry.get("y2", "0")
    if dx == "0":
        return f"M{start}v{dy}"
    if dy == "0":
        return f"M{start}h{dx}"
    return f"M{start}l{_pair(dx, dy)}"


def _joined(items: Sequence[_Item]) -> list[_Item]:
    """Neighbours that are straight lines of one style, as one path."""
    joined: list[_Item] = []
    for item in items:
        if joined and _are_alike(joined[-1], item):
            joined[-1].geometry["d"] += item.geometry["d"]
        else:
            joined.append(item)
    return joined


def _are_alike(first: _Item, second: _Item) -> bool:
    return _is_rule(first) and _is_rule(second) and first.style == second.style


def _is_rule(item: _Item) -> bool:
    """True for lines of an axis, which do not overlap; translucent ones that do would look different."""
    if item.tag != "path" or set(item.geometry) != {"d"} or "opacity" in item.style:
        return False
    return re.fullmatch(r"(M[-\d. ]+[hvl][-\d. ]+)+", item.geometry["d"]) is not None


def _common(items: Sequence[_Item]) -> str:
    """The style that all items share, taken from them for their group; "" if they have none or differ.

    The opacity of a group is not that of its marks: it stays with them.
    """
    styles = {item.style for item in items}
    if len(items) < 2 or len(styles) > 1 or not items[0].style:
        return ""
    (style,) = styles
    if re.search(r"(^|;)opacity:", style):
        return ""
    for item in items:
        item.style = ""
    return style


def path(d: str) -> str:
    """Return a path with as many digits, and of a curve as many points, as a screen can show.

    >>> path("M0,0L10.04,0.01L20,0L20,10.26")
    'M0 0l20 0 0 10.3'
    """
    if "L" not in d or not _POLYLINE.fullmatch(d):
        return _rounded(d)
    pieces: list[str] = []
    for part in d.split("M"):
        if part:
            pieces.append(_polyline(part))
    return "".join(pieces)


def _polyline(part: str) -> str:
    is_closed = part.endswith("Z")
    numbers = [float(number) for number in _NUMBER.findall(part)]
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    remaining = [_tenths(point) for point in simplified(points)]
    x, y = remaining[0]
    text = f"M{_pair(_number(x / 10), _number(y / 10))}"
    for place, (to_x, to_y) in enumerate(remaining[1:]):
        step = _pair(_number((to_x - x) / 10), _number((to_y - y) / 10))
        if place == 0:
            text += f"l{step}"
        elif step.startswith("-"):
            text += step
        else:
            text += f" {step}"
        x = to_x
        y = to_y
    if is_closed:
        text += "z"
    return text


def simplified(points: Sequence[Point], tolerance: float = TOLERANCE) -> list[Point]:
    """Return the points of a curve that it cannot do without (Ramer, Douglas and Peucker).

    No point that is left out is farther than ``tolerance`` from the curve that remains.
    """
    is_kept = [False] * len(points)
    is_kept[0] = True
    is_kept[-1] = True
    waiting = [(0, len(points) - 1)]
    while waiting:
        first, last = waiting.pop()
        farthest = 0.0
        place = first
        for n in range(first + 1, last):
            away = _distance(points[n], points[first], points[last])
            if away > farthest:
                farthest = away
                place = n
        if farthest > tolerance:
            is_kept[place] = True
            waiting.append((first, place))
            waiting.append((place, last))
    return [point for point, keep in zip(points, is_kept, strict=True) if keep]


def _distance(point: Point, start: Point, end: Point) -> float:
    """The distance of a point from the segment between two others."""
    dx = end[0] - start[0]
    dy = end[1] - start[1]
    square = dx * dx + dy * dy
    if square == 0:
        return math.dist(point, start)
    along = ((point[0] - start[0]) * dx + (point[1] - start[1]) * dy) / square
    along = min(1.0, max(0.0, along))
    return math.dist(point, (start[0] + along * dx, start[1] + along * dy))


def _tenths(point: Point) -> tuple[int, int]:
    return round(point[0] * 10), round(point[1] * 10)


def _rounded(text: str) -> str:
    return _NUMBER.sub(lambda match: _number(float(match[0])), text)


def _number(value: float) -> str:
    """A number to a tenth, without what can be left out.

    >>> _number(0.04), _number(-0.26), _number(12.0)
    ('0', '-.3', '12')
    """
    text = f"{value:.1f}".removesuffix(".0")
    if text in ("-0", "0"):
        return "0"
    if text.lstrip("-").startswith("0."):
        return text.replace("0.", ".", 1)
    return text


def _pair(x: str, y: str) -> str:
    """Two numbers; a minus sign separates them as well as a space does."""
    if y.startswith("-"):
        return x + y
    return f"{x} {y}"
