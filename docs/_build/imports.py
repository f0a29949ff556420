"""The picture and the table of rooms in docs/architecture.md, from the imports as they are in the source.

The rows of the picture are the layers of the import contract in ``pyproject.toml``. An arrow is an import, also one inside
a function; an import that others imply (a room reaches the same one by a chain of arrows) is not drawn.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterable
from fractions import Fraction
from html import escape
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).parents[2]
W, H, GAP, DROP = (
    150,
    42,
    30,
    72,
)  # a box, the least space between two of a row, and that between rows
PUBLIC = (
    "cli",
    "integrations",
    "models",
    "nn",
    "paper",
    "theory",
)  # what users call or import; the others are joma's own


def layers() -> list[list[str]]:
    """The rooms, as the import contract orders them: the top row first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (rows,) = (
        contract["layers"] for contract in contracts if contract.get("containers") == ["joma"]
    )
    return [row.replace(":", "|").replace(" ", "").split("|") for row in rows if row != "__main__"]


def rooms() -> nx.DiGraph:
    """Which room imports from which."""
    graph = grimp.build_graph("joma", cache_dir=None)
    between = nx.DiGraph()
    between.add_nodes_from(room for row in layers() for room in row)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            importer = room_of(module, between)
            other = room_of(imported, between)
            if importer and other and importer != other:
                between.add_edge(importer, other)
    return between


def room_of(module: str, names: Iterable[str]) -> str | None:
    """Return the room that a module lies in, or None for the package itself."""
    for room in names:
        if f"{module}.".startswith(f"joma.{room}."):
            return room
    return None


def places(arrows: nx.DiGraph) -> dict[str, tuple[int, int]]:
    """Return the centre of each box: above the middle of what it imports from, in the order of its row.

    In fractions, which are exact: Python 3.12 and later add floats in another way than 3.11, and a centre that lies
    half-way between two pixels would go to one or the other.
    """
    rows = layers()
    at: dict[str, tuple[Fraction, int]] = {}
    for number, row in reversed(list(enumerate(rows))):
        wanted: list[Fraction] = []
        for n, room in enumerate(row):
            below = [at[other][0] for other in arrows[room]]
            free_place = n * Fraction(W + GAP) * 27 / 20
            wanted.append(sum(below, Fraction()) / len(below) if below else free_place)
        apart = list(wanted)
        for n in range(1, len(row)):
            apart[n] = max(apart[n], apart[n - 1] + W + GAP)
        back = (sum(apart, Fraction()) - sum(wanted, Fraction())) / len(
            row
        )  # the row as a whole stays where it wanted to be
        at |= {room: (x - back, number * (H + DROP)) for room, x in zip(row, apart, strict=True)}
    left = min(x for x, _ in at.values()) - W // 2 - 20
    return {room: (round(x - left), y + H // 2 + 20) for room, (x, y) in at.items()}


def svg() -> str:
    """The whole picture; readable on light and dark pages."""
    arrows = nx.transitive_reduction(rooms())
    at = places(arrows)
    width, height = (
        max(place[axis] for place in at.values()) + half + 20
        for axis, half in ((0, W / 2), (1, H / 2))
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">',
        "<title>The rooms of joma; an arrow points to what is imported</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#5b6b7f"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#ffffff"/>',
    ]
    for a, b in sorted(arrows.edges):
        (x, y), (X, Y) = at[a], at[b]
        y, Y = y + H / 2, Y - H / 2
        bend = (Y - y) / 2
        parts.append(
            f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {X:.0f} {Y - bend:.0f} {X:.0f} {Y:.0f}" fill="none" '
            'stroke="#5b6b7f" stroke-width="1.4" marker-end="url(#head)"/>'
        )
    for room, (x, y) in at.items():
        fill, stroke = ("#dbe9f8", "#1f5fa8") if room in PUBLIC else ("#eef2f7", "#5b6b7f")
        parts.append(
            f'<rect x="{x - W / 2:.0f}" y="{y - H / 2:.0f}" width="{W}" height="{H}" rx="6" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x:.0f}" y="{y + 5:.0f}" font-size="15" text-anchor="middle" fill="#1b2430">{escape(room)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def table() -> str:
    """One row per room: what its docstring says first, and what it imports from."""
    between = rooms()
    lines = ["| room | what it is | imports from |", "|---|---|---|"]
    for room in (room for row in layers() for room in row):
        first = (
            str(importlib.import_module(f"joma.{room}").__doc__)
            .split("\n\n")[0]
            .replace("\n", " ")
            .strip()
        )
        lines.append(
            f"| `{room}` | {first} | {', '.join(f'`{other}`' for other in sorted(between[room]))} |"
        )
    return "\n".join(lines)
