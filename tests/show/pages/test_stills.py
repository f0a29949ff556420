"""Still pictures have the marks of the drawn figure, to a tenth of a pixel, in a fraction of the bytes."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from joma._show.pages.stills import TOLERANCE, Styles, path, simplified, still
from joma._show.plots import drawing
from joma._show.plots import panels as p
from joma._show.plots.style import DARK_DEPTH, LIGHT_DEPTH, on_dark

COORDINATE = st.floats(-500, 500)


@pytest.fixture(scope="module")
def drawn():
    t = np.linspace(0, 1, 400)
    table = pd.DataFrame({"t": np.tile(t, 2), "y": np.r_[np.sin(9 * t), np.cos(9 * t)]})
    table["kind"] = np.repeat(["a & b", "ẑ"], 400)
    curves = p.lines(table, p.x("t", "time"), p.y("y", "value"), p.by("kind"))
    points = p.dots(table, p.x("t"), p.y("y"), p.by("t", kind="Q", scheme=p.DEPTH))
    return drawing(p.row(p.panel("Curves <1>", curves), p.panel("Points", points)))


def texts(root):
    return [element.text for element in root.iter() if element.tag.endswith("text")]


def test_a_still_has_the_words_and_marks_of_the_figure(drawn):
    whole = ET.fromstring(drawn.svg)
    small = ET.fromstring(still(drawn.svg, Styles(), "x"))
    assert texts(small) == texts(whole)
    assert len(list(small.iter("circle"))) == 800
    assert len(still(drawn.svg, Styles(), "x")) < 0.35 * len(drawn.svg)
    ids = [element.get("id") for element in small.iter() if "id" in element.attrib]
    assert ids
    assert all(id.startswith("x-") for id in ids)


def test_numbers_in_texts_keep_all_their_digits():
    """Coordinates are shortened; a learning rate of 0.0001 that reads 0.00 would be a wrong number."""
    table = pd.DataFrame({"x": [0.0001, 1.0], "y": [0, 1], "name": ["lr 0.0001: 4.0062", "b"]})
    rates = p.x("x", "0.12345", log=True, ticks=[0.0001, 0.001], format="~g")
    curves = p.lines(table, rates, p.y("y"), p.by("name"), points=True)
    shown = drawing(p.panel("loss 3.14159", curves, note="τ = 0.0625"))
    for svg in (shown.svg, still(shown.svg, Styles(), "x")):
        words = texts(ET.fromstring(svg))
        for word in (
            "0.0001",
            "0.001",
            "0.12345",
            "lr 0.0001: 4.0062",
            "loss 3.14159",
            "τ = 0.0625",
        ):
            assert word in words
    coordinates = re.findall(r' (?:d|transform|x|y)="([^"]*)"', shown.svg)
    assert not any(re.search(r"\.\d{3}", text) for text in coordinates)


@given(st.lists(st.tuples(COORDINATE, COORDINATE), min_size=2, max_size=40))
def test_no_point_is_far_from_the_simplified_curve(points):
    kept = simplified(points)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    remaining = iter(points)
    assert all(point in remaining for point in kept)  # in their order
    for point in points:
        nearest = min(away(point, a, b) for a, b in itertools.pairwise(kept))
        assert nearest <= TOLERANCE + 1e-9


def away(point, a, b):
    a, b, point = np.array(a), np.array(b), np.array(point)
    length = (b - a) @ (b - a)
    along = 0.0 if length == 0 else float(np.clip((point - a) @ (b - a) / length, 0, 1))
    return float(np.linalg.norm(point - a - along * (b - a)))


@given(st.lists(st.tuples(COORDINATE, COORDINATE), min_size=2, max_size=40))
def test_a_path_is_where_it_was(points):
    d = "M" + "L".join(f"{x:.2f},{y:.2f}" for x, y in points)
    numbers = [float(n) for n in re.findall(r"-?\d*\.?\d+", path(d).replace("-", " -"))]
    x, y = numbers[:2]
    steps = list(zip(numbers[2::2], numbers[3::2], strict=True))
    ends = [(x, y)]
    for dx, dy in steps:
        ends.append((ends[-1][0] + dx, ends[-1][1] + dy))
    for (a, b), (c, d) in ((ends[0], points[0]), (ends[-1], points[-1])):
        assert math.dist((a, b), (c, d)) < 0.1  # rounding does not add up along the curve


def test_colours_of_depth_on_a_dark_page_are_those_that_vega_draws():
    def drawn_with(extent):
        spec = {
            "data": {"values": [{"t": n} for n in range(40)]},
            "mark": "rect",
            "encoding": {
                "x": {"field": "t", "type": "ordinal", "axis": None},
                "color": {
                    "field": "t",
                    "type": "quantitative",
                    "legend": None,
                    "scale": {"scheme": {"name": "plasma", "extent": list(extent)}},
                },
            },
        }
        return re.findall(r'fill="(rgb[^"]*)"', vl_convert.vegalite_to_svg(json.dumps(spec)))

    light, dark = drawn_with(LIGHT_DEPTH), drawn_with(DARK_DEPTH)
    assert len(light) == len(dark) == 40
    for before, after in zip(light, dark, strict=True):
        ours = on_dark("stroke", before)
        assert ours is not None
        red, green, blue = (int(ours[n : n + 2], 16) for n in (1, 3, 5))
        expected = [int(n) for n in re.findall(r"\d+", after)]
        assert math.dist((red, green, blue), expected) < 14


def test_colours_that_are_seen_on_both_stay():
    assert on_dark("fill", "#d55e00") is None
    assert on_dark("fill", "white") is None
    assert on_dark("stroke", "white") is not None  # the edge of a mark is the colour of the page
