"""The parts of every page: the document, figures, embedded files, links."""

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
from typing import TYPE_CHECKING

from markupsafe import Markup

from joma._runs import Run, RunError, check_writable, write_atomic
from joma._show.pages.render import asset, render
from joma._show.pages.stills import Styles, still

if TYPE_CHECKING:
    from joma._show.plots.style import Drawing

# A page stays under 15 MB; what is not embedded takes less than 2 MB of it. In bytes:
MOST = 11_000_000  # pictures and data are embedded up to this size of all that is embedded
MOST_OF_ALL = 13_000_000  # figures are embedded up to this one
ROOM = 15_000_000  # must be free on the disk before a page is made
SCRIPTS = ("explorer.js", "layout.js", "hover.js", "runs.js", "page.js")
LIVE = ("live.js",)
STYLES = ("page.css", "runs.css")
PARTS = ("", "-title", "-chart", "-spec", "-csv")  # what the ids in a section end in


@dataclass
class Page:
    """A page that is being put together: what is embedded, and the list of contents."""

    path: Path  # where it will be: links to other files are relative to it
    contents: list[tuple[str, str, str]] = field(default_factory=list)  # id, title, tone
    files: list[tuple[str, str]] = field(default_factory=list)  # id, content in Base64
    size: int = 0
    ids: set[str] = field(default_factory=lambda: {"main", "theme", "live", "vega"})
    styles: Styles = field(default_factory=Styles)  # of the still pictures
    mark: str = ""  # what it shows; see `joma._show.pages.place`
    live: bool = False  # served while a run goes on: without stills, and it may ask for changes

    def id(self, text: str) -> str:
        """Return an id for a section that no other part of the page has."""
        start = slug(text)
        id = start
        number = 1
        while any(id + part in self.ids for part in PARTS):
            number += 1
            id = f"{start}-{number}"
        self.ids |= {id + part for part in PARTS}
        return id

    def embed(self, id: str, data: str | bytes, most: int | None = None) -> bool:
        """Embed a file under ``id``; False if the page would have more than ``most`` bytes of files (`MOST`)."""
        if most is None:
            most = MOST
        if isinstance(data, str):
            data = data.encode()
        text = packed(data)
        if self.size + len(text) > most:
            return False
        self.size += len(text)
        self.files.append((id, text))
        return True

    def link(self, target: Path) -> str:
        """Return the address of a file, from the page."""
        from urllib.parse import quote

        return quote(
            os.path.relpath(target.absolute(), self.path.absolute().parent).replace(os.sep, "/")
        )


def packed(data: bytes) -> str:
    """Return data as the page's script unpacks them: gzip, in Base64."""
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def slug(text: str) -> str:
    """Return a text as an id: letters, digits, dots and dashes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "part"


def figure(
    page: Page,
    id: str,
    drawing: Drawing,
    alt: str,
    data: str | None,
    folder: Path | None = None,
) -> str:
    """Return a figure: its still picture, what makes it interactive, and links to the picture and its numbers.

    Arguments:
        page: takes the embedded files, and the styles of the still.
        id: of the section, unique in the page.
        drawing: the figure as drawn.
        alt: for screen readers.
        data: the numbers as CSV.
        folder: the run folder, for links; None if the figure is of no folder.
    """
    from joma._show.plots.interactive import interactive

    live, switches = interactive(json.loads(drawing.specification))
    live["description"] = alt
    text = json.dumps(live, ensure_ascii=False, separators=(",", ":"))
    has_room = page.embed(f"{id}-spec", text, MOST_OF_ALL)
    still_picture = ""
    if has_room and not page.live:
        still_picture = still(drawing.svg, page.styles, id)
    links: list[dict[str, str]] = []
    if has_room:
        links.append(
            {
                "href": "#",
                "type": "image/svg+xml",
                "text": "SVG",
                "download": f"{id}.svg",
                "picture": id,
            }
        )
    if data is not None:
        links += _tables(page, id, data, folder)
    return render(
        "figure.html",
        id=id,
        alt=alt,
        has_room=has_room,
        still=Markup(still_picture),
        switches=switches,
        links=links,
    )


def _tables(page: Page, id: str, data: str, folder: Path | None) -> list[dict[str, str]]:
    """Return links to the numbers of a figure: in the page, or in the run folders if they are too large."""
    if page.embed(f"{id}-csv", data):
        link = {"href": "#", "type": "text/csv", "text": "CSV", "download": f"{id}.csv"}
        return [{**link, "embedded": f"{id}-csv"}]
    if folder is None:
        return []
    links = [_metrics(page, path) for path in (folder, *Run(folder).members)]
    return [link for link in links if link]


def _metrics(page: Page, folder: Path) -> dict[str, str]:
    """Return a link to the numbers of a run whose table is too large for the page; {} if it has none."""
    file = folder / "metrics.jsonl"
    if not (file.exists() and file.stat().st_size):
        return {}
    text = f"metrics.jsonl of {folder.name} (too large for this page)"
    return {"href": page.link(file), "type": "application/jsonl", "text": text}


@lru_cache(maxsize=1)
def _vega() -> str:
    import vl_convert

    # the default snippet names two libraries that the bundle does not export
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def document(
    page: Page, title: str, sections: Sequence[str], made_by: str, header: str = ""
) -> str:
    """Return the text of the page."""
    from joma import __version__
    from joma._show.plots.style import DARK, DARK_DEPTH, DARK_PAPER

    names = list(SCRIPTS)
    if page.live:
        names += LIVE
    return render(
        "document.html",
        page=page,
        title=title,
        header=header,
        sections=sections,
        made_by=made_by,
        version=__version__,
        style=Markup("".join(map(asset, STYLES)) + page.styles.css()),
        scripts=[_script(name) for name in names],
        files=[("vega", packed(_vega().encode())), *page.files],
        dark={"colours": DARK, "depth": DARK_DEPTH, "paper": DARK_PAPER},
    )


def _script(name: str) -> Markup:
    """A script of the page.

    "</script" and "<!--" in its strings and regular expressions would end it for the browser. Written with the
    number of the bracket, they mean the same.
    """
    return Markup(re.sub(r"<(?=/script|!--)", r"\\x3c", asset(name), flags=re.I))


def check_place(path: Path) -> None:
    """Refuse a place where the page cannot be written, before any work is done."""
    if path.is_dir():
        raise RunError(
            f"cannot write {path}: it is a folder; name a file, as {path / 'report.html'}"
        )
    check_writable(path.parent, ROOM, "place for the report, with --out (out= in Python)")


def write_page(page: Page, text: str) -> Path:
    """Write the page. If writing fails, the old page stays, complete."""
    write_atomic(page.path, text)
    return page.path
