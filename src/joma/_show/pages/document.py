"""What every page is made of: the document, figures, embedded files, links."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from joma._runs import Run, RunError, check_writable, write_atomic
from joma._show.pages.render import asset, render

# A page stays under 15 MB; what is not embedded takes less than 2 MB of it. In bytes:
MOST = 11_000_000  # pictures and data are embedded up to this size of all that is embedded
MOST_OF_ALL = 13_000_000  # figures are embedded up to this one
ROOM = 15_000_000  # must be free on the disk before a page is made
SCRIPTS = ("explorer.js", "layout.js", "hover.js", "runs.js", "page.js")
LIVE = ("live.js",)
STYLES = ("page.css", "runs.css")
PARTS = ("", "-title", "-chart", "-spec", "-svg", "-csv")  # what the ids in a section end in


@dataclass
class Page:
    """A page that is being put together: what is embedded, and the list of contents."""

    path: Path  # where it will be: links to other files are relative to it
    contents: list[tuple[str, str, str]] = field(default_factory=list)  # id, title, tone
    files: list[tuple[str, str]] = field(default_factory=list)  # id, content in Base64
    size: int = 0
    ids: set[str] = field(default_factory=lambda: {"main", "theme", "live", "vega"})
    mark: str = ""  # what it shows; see `joma._show.pages.place`
    live: bool = False  # served while a run goes on: without pictures to download, and it may ask for changes

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
        text = packed(data)
        if self.size + len(text) > (MOST if most is None else most):
            return False
        self.size += len(text)
        self.files.append((id, text))
        return True

    def link(self, target: Path) -> str:
        """The address of a file, from the page."""
        from urllib.parse import quote

        return quote(
            os.path.relpath(target.absolute(), self.path.absolute().parent).replace(os.sep, "/")
        )


def packed(data: bytes) -> str:
    """What the page's script unpacks: gzip, in Base64."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


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
    """An interactive figure with its switches, and links to the same as SVG and CSV.

    Arguments:
        page: takes the embedded files.
        id: of the section, unique in the page.
        spec: Vega-Lite, as drawn.
        alt: what a screen reader says.
        data: the numbers as CSV.
        folder: the run folder, for links; None if the figure is of no folder.
        pictures: whether the folder's ``figure.*`` are of this figure, if it has them; else they are made here.
    """
    from joma._show.plots.interactive import interactive, skeleton

    live, switches = interactive(spec)
    live["description"] = alt
    room = page.embed(
        f"{id}-spec", json.dumps(live, ensure_ascii=False, separators=(",", ":")), MOST_OF_ALL
    )
    stored = folder / "figure.svg" if folder is not None and pictures else None
    svg = b"" if page.live else _picture(spec, stored)
    links = [_link(page, id, "svg", "image/svg+xml", svg, stored)] if svg else []
    if data is not None:
        link = _link(page, id, "csv", "text/csv", data, None)
        links += (
            [link]
            if link or folder is None
            else [_metrics(page, path) for path in (folder, *Run(folder).members)]
        )
    return render(
        "figure.html",
        id=id,
        alt=alt,
        room=room,
        size=[
            _length(svg, name) for name in ("width", "height")
        ],  # of the picture: by it the page reserves room
        skeleton=skeleton(spec),
        picture=f"{id}-svg" if svg and "embedded" in links[0] else None,
        switches=switches,
        links=[link for link in links if link],
    )


def _link(
    page: Page, name: str, ending: str, kind: str, content: str | bytes, file: Path | None
) -> dict[str, str]:
    """A link to what is embedded and to the file, if there is one; empty where neither can be linked."""
    stored = file is not None and file.exists()
    link = {
        "href": page.link(file) if file is not None and stored else "#",
        "type": kind,
        "text": ending.upper(),
    }
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


def _picture(spec: dict[str, Any], stored: Path | None) -> bytes:
    """The figure as SVG: that of the folder, or made here."""
    import vl_convert

    from joma._show.plots.style import compact

    if stored is not None and stored.exists():
        return stored.read_bytes()
    return compact(vl_convert.vegalite_to_svg(spec)).encode()


def _length(svg: bytes, name: str) -> int:
    size = re.search(rf'<svg[^>]* {name}="([\d.]+)'.encode(), svg)
    return round(float(size[1])) if size else 0


@lru_cache(maxsize=1)
def _vega() -> str:
    import vl_convert

    # the default snippet names two libraries that the bundle does not export
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def document(
    page: Page, title: str, sections: Sequence[str], made_by: str, header: str = ""
) -> str:
    """The text of the page."""
    from joma import __version__
    from joma._show.plots.style import DARK, DARK_DEPTH

    # "</script" and "<!--" in strings and regular expressions of JavaScript: written so, they mean the same
    scripts = SCRIPTS + LIVE * page.live
    code = [re.sub(r"<(?=/script|!--)", r"\\x3c", asset(name), flags=re.I) for name in scripts]
    files = [("vega", packed(_vega().encode())), *page.files]
    return render(
        "document.html", page=page, title=title, header=header, sections=sections, made_by=made_by, version=__version__,
        style="".join(map(asset, STYLES)), scripts=code, files=files, dark={"colours": DARK, "depth": DARK_DEPTH},
    )  # fmt: skip


def check_place(path: Path) -> None:
    """Refuse a place where the page cannot be written, before any work is done."""
    if path.is_dir():
        raise RunError(
            f"cannot write {path}: it is a folder; name a file, as {path / 'report.html'}"
        )
    check_writable(path.parent, ROOM, "place for the report, with --out (out= in Python)")


def write_page(page: Page, text: str) -> Path:
    """Write the page; whatever happens, the old page or the new one is there, complete."""
    write_atomic(page.path, text)
    return page.path
