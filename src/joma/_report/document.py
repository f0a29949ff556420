"""The parts that every page is made of: the document, badges, figures, embedded files, commands, settings."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from joma._run import Run, RunError, check_writable, write_atomic

LABELS = {"holds under": "holds under a condition"}
TONE = {"holds": "good", "holds as corrected": "fair", "holds under": "fair", "fails": "bad", "error": "bad"}
# the browser itself refuses what would leave the page
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# a page has to stay under 15 MB, of which what is not embedded takes less than two: bytes up to which pictures and data are
# embedded, and figures; and what must be free to write a page
MOST, MOST_OF_ALL, ROOM = 11_000_000, 13_000_000, 15_000_000
PARTS = ("", "-title", "-chart", "-spec", "-svg", "-pdf", "-csv")  # ids that a section makes from its own


@dataclass
class Page:
    """A page that is being put together: what is embedded, and the list of contents."""

    path: Path  # where it will be: links to other files are relative to it
    contents: list[tuple[str, str, str]] = field(default_factory=list)  # id, title, tone
    files: list[str] = field(default_factory=list)
    size: int = 0
    ids: set[str] = field(default_factory=lambda: {"main", "theme"})

    def id(self, text: str) -> str:
        """An id for a section that no other part of the page has."""
        start = found = slug(text)
        number = 1
        while any(found + part in self.ids for part in PARTS):
            number += 1
            found = f"{start}-{number}"
        self.ids |= {found + part for part in PARTS}
        return found

    def embed(self, id: str, data: str | bytes, most: int | None = None) -> bool:
        """Embed a file under ``id``; False if it would be more than ``most`` bytes (``MOST`` by default) in all."""
        data = data.encode() if isinstance(data, str) else data
        text = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
        if self.size + len(text) > (MOST if most is None else most):
            return False
        self.size += len(text)
        self.files.append(f'<script type="text/plain" id="{escape(id)}">{text}</script>')
        return True

    def link(self, target: Path) -> str:
        """The address of a file, from the page."""
        from urllib.parse import quote

        return quote(os.path.relpath(target.absolute(), self.path.absolute().parent).replace(os.sep, "/"))


def slug(text: str) -> str:
    """An id for the page: letters, digits, dots and dashes."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "part"


def badge(verdict: str) -> str:
    """A verdict as a small coloured label."""
    return f'<span class="badge {TONE.get(verdict, "bad")}">{escape(LABELS.get(verdict, verdict))}</span>'


def command(text: str) -> str:
    """A command with a button that copies it."""
    return (
        f'<div class="command"><code tabindex="0">{escape(text)}</code>'
        '<button type="button" class="copy" aria-label="Copy the command">Copy</button></div>'
    )


def facts(items: Mapping[str, Any]) -> str:
    """Names and values; what is nested, as JSON."""
    rows = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(_plain(value))}</dd>" for name, value in items.items())
    return f'<dl class="facts">{rows}</dl>'


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value is None else json.dumps(value, ensure_ascii=False)


def more(title: str, body: str) -> str:
    """What is shown on request."""
    return f'<details class="more"><summary>{escape(title)}</summary>{body}</details>'


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

    live, series = interactive(spec)
    live["description"] = alt
    box, name = escape(f"{id}-chart"), escape(id)
    links = []
    height = 0.0  # of the picture: the page does not jump when the figure is drawn
    room = page.embed(f"{id}-spec", json.dumps(live, ensure_ascii=False, separators=(",", ":")), MOST_OF_ALL)
    for ending, kind, content in _pictures(spec, folder if pictures else None):
        if ending == "svg" and (found := re.search(rb'<svg[^>]* height="([\d.]+)', content)):
            height = float(found[1])
        file = folder / f"figure.{ending}" if folder is not None and pictures else None
        links.append(_link(page, name, ending, kind, content, file))
    if data is not None:
        link = _link(page, name, "csv", "text/csv", data, None)
        links += [link] if link or folder is None else [_metrics(page, path) for path in (folder, *Run(folder).members)]
    files = f'<span class="links">{" ".join(filter(None, links))}</span>'
    if not room:
        return f"<figure><p>There is no room for this figure on the page.</p><figcaption>{files}</figcaption></figure>"
    rows = []
    for one in series:
        values = "".join(
            f'<button type="button" data-switch="{box}" data-series="{one.name}" data-field="{escape(one.field)}" '
            f'data-value="{escape(json.dumps(value))}">{escape(str(value))}</button>'
            for value in one.values
        )
        rows.append(
            f'<div role="group" aria-label="{escape(one.title)}"><span>{escape(one.title)}</span>{values}</div>'
        )
    buttons = (
        f'<details class="more switches"><summary>Series on and off</summary>{"".join(rows)}</details>' if rows else ""
    )
    hint = "Hover for values; drag to move; Ctrl + scroll or pinch to zoom"
    return f"""<figure>
<div class="chart" id="{box}" data-spec="{name}-spec" style="min-height:{height:.0f}px" tabindex="0" role="region" aria-label="{escape(alt)}"><div></div></div>
<figcaption><span>{hint}{"; click the legend to turn a series off or on" if rows else ""}.
<button type="button" data-reset="{box}">Reset</button></span>{files}</figcaption>
{buttons}</figure>"""


def _link(page: Page, name: str, ending: str, kind: str, content: str | bytes, file: Path | None) -> str:
    """A link to what is embedded, and to the file itself where there is one; without room, to the file alone or ""."""
    stored = file is not None and file.exists()
    href = escape(page.link(file)) if file is not None and stored else "#"
    inside = page.embed(f"{name}-{ending}", content)
    if not inside and not stored:
        return ""
    embedded = f' data-file="{name}-{ending}"' if inside else ""
    return f'<a href="{href}" download="{name}.{ending}" type="{kind}"{embedded}>{ending.upper()}</a>'


def _metrics(page: Page, folder: Path) -> str:
    """A link to the numbers of a run whose table is too large for the page; "" if it has none of its own."""
    file = folder / "metrics.jsonl"
    if not (file.exists() and file.stat().st_size):
        return ""
    name = escape(f"metrics.jsonl of {folder.name} (too large for this page)")
    return f'<a href="{escape(page.link(file))}" type="application/jsonl">{name}</a>'


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


def _asset(name: str) -> str:
    return (resources.files("joma._report") / "assets" / name).read_text(encoding="utf-8")


def _script(code: str) -> str:
    code = re.sub(r"<(?=/script|!--)", r"\\x3c", code, flags=re.I)  # in strings and regular expressions, the same
    return f"<script>{code}</script>"


def document(page: Page, title: str, header: str, sections: Sequence[str], footer: str) -> str:
    """The whole page."""
    from joma import __version__

    contents = "".join(
        f'<li><span class="dot {tone}" aria-hidden="true"></span><a href="#{escape(id)}">{escape(text)}</a></li>'
        for id, text, tone in page.contents
    )
    return f"""<!doctype html>
<html lang="en" data-theme="light"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="joma {__version__}">
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head><body>
<a class="skip" href="#main">Skip to the content</a>
<div class="shell"><nav aria-label="Contents"><details><summary>Contents</summary><ol>{contents}</ol></details></nav>
<main id="main" tabindex="-1"><header class="top"><button type="button" id="theme" class="tool" aria-label="Change between light and dark">Dark</button>
<h1>{escape(title)}</h1>{header}</header>
<noscript><p class="meta">The figures need JavaScript; their pictures are linked below each.</p></noscript>
{"".join(sections)}
<footer>{footer}</footer></main></div>
{"".join(page.files)}
{_script(_vega())}
{_script(_asset("explorer.js"))}
{_script(_asset("page.js"))}
</body></html>
"""


def check_place(path: Path) -> None:
    """Refuse a place where the page cannot be written, before any work is done."""
    if path.is_dir():
        raise RunError(f"cannot write {path}: it is a folder; name a file, as {path / 'report.html'}")
    check_writable(path.parent, ROOM, "place for the report")


def write_page(page: Page, text: str) -> Path:
    """Write the page; whatever happens, the old one or the new one is there, whole."""
    write_atomic(page.path, text)
    return page.path
