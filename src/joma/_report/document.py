"""What every page is made of: the document, figures, embedded files, links."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from joma._report.render import asset, render
from joma._run import Run, RunError, check_writable, write_atomic

# A page stays under 15 MB; what is not embedded takes less than 2 MB of it. In bytes:
MOST = 11_000_000  # pictures and data are embedded up to this size of all that is embedded
MOST_OF_ALL = 13_000_000  # figures are embedded up to this one
ROOM = 15_000_000  # must be free on the disk before a page is made
SCRIPTS = ("explorer.js", "page.js")
PARTS = ("", "-title", "-chart", "-spec", "-svg", "-pdf", "-csv")  # what the ids in a section end in


@dataclass
class Page:
    """A page that is being put together: what is embedded, and the list of contents."""

    path: Path  # where it will be: links to other files are relative to it
    contents: list[tuple[str, str, str]] = field(default_factory=list)  # id, title, tone
    files: list[tuple[str, str]] = field(default_factory=list)  # id, content in Base64
    size: int = 0
    ids: set[str] = field(default_factory=lambda: {"main", "theme"})

    def id(self, text: str) -> str:
        """An id for a section that no other part of the page has."""
        start = id = slug(text)
        number = 1
        while any(id + part in self.ids for part in PARTS):
            number += 1
            id = f"{start}-{number}"
        self.ids |= {id + part for part in PARTS}
        return id

    def embed(self, id: str, data: str | bytes, most: int | None = None) -> bool:
        """Embed a file under ``id``; False if it would be more than ``most`` bytes (``MOST`` by default) in all."""
        data = data.encode() if isinstance(data, str) else data
        text = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
        if self.size + len(text) > (MOST if most is None else most):
            return False
        self.size += len(text)
        self.files.append((id, text))
        return True

    def link(self, target: Path) -> str:
        """The address of a file, from the page."""
        from urllib.parse import quote

        return quote(os.path.relpath(target.absolute(), self.path.absolute().parent).replace(os.sep, "/"))


def slug(text: str) -> str:
    """An id for the page: letters, digits, dots and dashes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "part"


def figure(
    page: Page,
    id: str,
    spec: dict[str, Any],
    alt: str,
    data: str | None,
    folder: Path | None = None,
    *,
    pictures: bool = True,
) -> str:
    """An interactive figure with its switches, and links to the same as SVG, PDF and CSV.

    Arguments:
        page: takes the embedded files.
        id: of the section, unique in the page.
        spec: Vega-Lite, as drawn.
        alt: what a screen reader says.
        data: the numbers as CSV.
        folder: the run folder, for links; None if the figure is of no folder.
        pictures: whether the folder's ``figure.*`` are of this figure, if it has them; else they are made here.
    """
    from joma._figures.interactive import interactive

    live, switches = interactive(spec)
    live["description"] = alt
    room = page.embed(f"{id}-spec", json.dumps(live, ensure_ascii=False, separators=(",", ":")), MOST_OF_ALL)
    links = []
    height = 0.0  # of the picture: the page does not jump when the figure is drawn
    for ending, kind, content in _pictures(spec, folder if pictures else None):
        if ending == "svg" and (size := re.search(rb'<svg[^>]* height="([\d.]+)', content)):
            height = float(size[1])
        file = folder / f"figure.{ending}" if folder is not None and pictures else None
        links.append(_link(page, id, ending, kind, content, file))
    if data is not None:
        link = _link(page, id, "csv", "text/csv", data, None)
        links += [link] if link or folder is None else [_metrics(page, path) for path in (folder, *Run(folder).members)]
    return render(
        "figure.html",
        id=id,
        alt=alt,
        room=room,
        height=height,
        switches=switches,
        links=[link for link in links if link],
    )


def _link(page: Page, name: str, ending: str, kind: str, content: str | bytes, file: Path | None) -> dict[str, str]:
    """A link to what is embedded and to the file, if there is one; empty where neither can be linked."""
    stored = file is not None and file.exists()
    link = {"href": page.link(file) if file is not None and stored else "#", "type": kind, "text": ending.upper()}
    link["download"] = f"{name}.{ending}"
    if page.embed(f"{name}-{ending}", content):
        return link | {"embedded": f"{name}-{ending}"}
    return link if stored else {}


def _metrics(page: Page, folder: Path) -> dict[str, str]:
    """A link to the numbers of a run whose table is too large for the page; empty if it has no rows itself."""
    file = folder / "metrics.jsonl"
    if not (file.exists() and file.stat().st_size):
        return {}
    text = f"metrics.jsonl of {folder.name} (too large for this page)"
    return {"href": page.link(file), "type": "application/jsonl", "text": text}


def _pictures(spec: dict[str, Any], folder: Path | None) -> Iterator[tuple[str, str, bytes]]:
    """SVG and PDF: those of the folder, or made here."""
    import vl_convert

    stored = {ending: folder / f"figure.{ending}" for ending in ("svg", "pdf")} if folder is not None else {}
    read = {ending: file.read_bytes() for ending, file in stored.items() if file.exists()}
    svg = read.get("svg") or vl_convert.vegalite_to_svg(spec).encode()
    yield "svg", "image/svg+xml", svg
    yield "pdf", "application/pdf", read.get("pdf") or vl_convert.svg_to_pdf(svg.decode())


@lru_cache(maxsize=1)
def _vega() -> str:
    import vl_convert

    # the default snippet names two libraries that the bundle does not export
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def document(page: Page, title: str, sections: Sequence[str], made_by: str, header: str = "") -> str:
    """The text of the page."""
    from joma import __version__

    # "</script" and "<!--" in strings and regular expressions of JavaScript: written so, they mean the same
    code = [re.sub(r"<(?=/script|!--)", r"\\x3c", text, flags=re.I) for text in (_vega(), *map(asset, SCRIPTS))]
    return render(
        "document.html", page=page, title=title, header=header, sections=sections, made_by=made_by, version=__version__,
        style=asset("page.css"), scripts=code,
    )  # fmt: skip


def check_place(path: Path) -> None:
    """Refuse a place where the page cannot be written, before any work is done."""
    if path.is_dir():
        raise RunError(f"cannot write {path}: it is a folder; name a file, as {path / 'report.html'}")
    check_writable(path.parent, ROOM, "place for the report")


def write_page(page: Page, text: str) -> Path:
    """Write the page; whatever happens, the old page or the new one is there, complete."""
    write_atomic(page.path, text)
    return page.path
