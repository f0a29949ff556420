"""Looks at a page as its readers do: `python -m benchmarks.page report.html --out FOLDER`.

In headless Chromium, at 1400, 900 and 390 pixels, light and dark, and printed: figures painted, console empty, nothing
cut, no words over each other, links that land, contrast of words and curves, the findings on the first screen, pages of
the PDF, seconds to the first screen and to all figures. Writes a screenshot per width and scheme, and the PDF. What is
wrong is listed, and the exit status is 1. The tests use the same checks (tests/show/pages/test_browser.py).
"""

from __future__ import annotations

import argparse
import base64
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import browser, check, enliven, errors, opened, paths, until

WIDTHS, SCHEMES, HEIGHT = (1400, 900, 390), ("light", "dark"), 900
MOST_PAGES, MOST_BYTES, FIRST_SCREEN, ALL_FIGURES = 30, 6e6, 1.0, 3.0
PAPER = {"light": (255, 255, 255), "dark": (15, 20, 25)}

CUT = """const wide = [];
  for (const e of document.querySelectorAll('main *')) {
    if (e.closest('.scroll, .chart, svg, math, pre, code, .formulas, thead, details:not([open])') || !e.getClientRects().length) continue;
    const r = e.getBoundingClientRect();
    if (r.right > innerWidth + 1 || r.left < -1) wide.push(e.tagName + '.' + e.className);
  }
  for (const box of document.querySelectorAll('.chart')) {
    if (box.querySelector('canvas').offsetWidth > box.clientWidth) wide.push(box.id);
  }
  return wide;"""  # noqa: E501
OVERLAP = """const blocks = [...document.querySelectorAll('main > section, main > header')].map(e => e.getBoundingClientRect());
  return blocks.slice(1).filter((r, n) => r.top < blocks[n].bottom - 1).length;"""
# words of a figure that stand over each other: axis labels and titles of its panels
WORDS = """const found = [];
  const visit = (mark, x, y) => { for (const item of mark.items) {
    if (mark.marktype === 'group') { for (const below of item.items) visit(below, x + (item.x || 0), y + (item.y || 0)); continue; }
    if (mark.marktype !== 'text' || !item.text || item.opacity === 0 || !/title|legend-label/.test(mark.role)) continue;
    const b = item.bounds; found.push([x + b.x1, y + b.y1, x + b.x2, y + b.y2, String(item.text)]); } };
  visit(joma.views.get(arguments[0]).scenegraph().root, 0, 0);
  return found;"""  # noqa: E501
# [element, its colour, the colour behind it], each pair once
INKS = """
  const parse = (text) => text.match(/[\\d.]+/g).map(Number), seen = new Map();
  for (const e of document.querySelectorAll('main *, nav *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.closest('script, style')) continue;
    let back = e, colour;
    while (back && (colour = parse(getComputedStyle(back).backgroundColor)).length === 4 && colour[3] === 0) back = back.parentElement;
    const pair = [parse(getComputedStyle(e).color).slice(0, 3), back ? colour.slice(0, 3) : [255, 255, 255]];
    seen.set(JSON.stringify(pair), [e.tagName + '.' + e.className, ...pair]);
  }
  return [...seen.values()];"""  # noqa: E501
STROKES = """const found = new Map();
  const visit = (mark, id) => { for (const item of mark.items) {
    if (mark.marktype === 'line' && item.stroke && (item.opacity ?? 1) === 1) found.set(item.stroke, id);
    if (mark.marktype === 'group') item.items.forEach(below => visit(below, id)); } };
  for (const [id, view] of joma.views) visit(view.scenegraph().root, id);
  const context = document.createElement('canvas').getContext('2d');
  return [...found].map(([s, id]) => { context.fillStyle = s; context.fillRect(0, 0, 1, 1);
    return [id, [...context.getImageData(0, 0, 1, 1).data].slice(0, 3)]; })"""


def show(
    driver: Any, page: Path, width: int = 1400, scheme: str = "light", *, drawn: bool = True
) -> None:
    """Open a page at a width and in a scheme, and wait until all figures are interactive, or do not."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get_log("browser"), driver.get_log("performance")
    driver.get("about:blank")  # else an address that differs by its hash alone is not loaded again
    driver.get(page.absolute().as_uri())
    if drawn:
        until(driver, "window.joma && joma.drawn")
        enliven(driver)


def luminance(colour: Any) -> float:
    """Of an sRGB colour, as the guidelines for accessible pages (WCAG) define it."""
    channel = np.array(colour) / 255
    channel = np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)
    return float(channel @ [0.2126, 0.7152, 0.0722])


def contrast(one: Any, other: Any) -> float:
    """Between 1 and 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def pale_words(driver: Any) -> Iterator[str]:
    """Words with a contrast below 4.5 : 1."""
    pairs = driver.execute_script(INKS)
    assert len(pairs) > 5
    for what, ink, paper in pairs:
        if contrast(ink, paper) < 4.5:
            yield f"{what} has a contrast of {contrast(ink, paper):.1f}"


def pale_curves(driver: Any, scheme: str) -> Iterator[str]:
    """Curves with a contrast below 3 : 1."""
    for id, stroke in driver.execute_script(STROKES):
        if contrast(stroke, PAPER[scheme]) < 3:
            yield f"a curve of {id} has a contrast of {contrast(stroke, PAPER[scheme]):.1f}"


def cut(driver: Any) -> Iterator[str]:
    """What is wider than the page, sections over each other, words of figures over each other."""
    yield from (f"{what} is cut" for what in driver.execute_script(CUT))
    if count := driver.execute_script(OVERLAP):
        yield f"{count} sections stand over others"
    for chart in driver.execute_script("return [...joma.views.keys()]"):
        words = driver.execute_script(WORDS, chart)
        for (a, b, c, d, one), (e, f, g, h, other) in itertools.combinations(words, 2):
            if min(c, g) - max(a, e) > 2 and min(d, h) - max(b, f) > 2:
                yield f"{chart}: {one!r} stands over {other!r}"


def missed_links(driver: Any, page: Path, width: int, ids: list[str]) -> Iterator[str]:
    """Links of the contents that do not land within 50 pixels, clicked while figures are still being drawn."""
    for id in ids:
        show(driver, page, width, drawn=False)
        until(driver, "document.querySelector(`a[href='#${arguments[0]}']`)", id)
        driver.execute_script("document.querySelector(`a[href='#${arguments[0]}']`).click()", id)
        until(driver, "window.joma && joma.drawn")
        top = driver.execute_script(
            "return document.getElementById(arguments[0]).getBoundingClientRect().top", id
        )
        room = driver.execute_script(
            "return document.documentElement.scrollHeight - scrollY - innerHeight"
        )
        if abs(top) > 50 and room > 1:  # at the end of the page nothing can come to the top
            yield f"the link to {id} lands {top:.0f} pixels away"


def printed(driver: Any) -> bytes:
    """The PDF of the open page."""
    done = driver.execute_cdp_cmd(
        "Page.printToPDF", {"printBackground": True, "preferCSSPageSize": True}
    )
    return base64.b64decode(done["data"])


def pages(pdf: bytes) -> int:
    """How many a PDF has."""
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


def look(driver: Any, page: Path, out: Path) -> Iterator[str]:
    """All that is wrong with a page; screenshots and the PDF are in ``out``."""
    show(driver, page)
    seconds = [opened(driver, page) for _ in range(3)]
    enliven(driver)
    first = "return performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
    print(f"first screen {driver.execute_script(first):.2f} s, all figures {min(seconds):.2f} s (best of 3), "
          f"{page.stat().st_size / 1e6:.2f} MB, {check(driver)} figures")  # fmt: skip
    if driver.execute_script(first) > FIRST_SCREEN or min(seconds) > ALL_FIGURES:
        yield f"slow: {FIRST_SCREEN:g} s and {ALL_FIGURES:g} s are promised"
    if page.stat().st_size > MOST_BYTES:
        yield f"larger than {MOST_BYTES / 1e6:g} MB"
    pdf = printed(driver)
    (out / "page.pdf").write_bytes(pdf)
    print(f"printed on {pages(pdf)} pages")
    if pages(pdf) > MOST_PAGES:
        yield f"{pages(pdf)} pages in print: {MOST_PAGES} at most are promised"
    for width, scheme in itertools.product(WIDTHS, SCHEMES):
        show(driver, page, width, scheme)
        found = [*errors(driver), *cut(driver), *pale_words(driver), *pale_curves(driver, scheme)]
        if driver.execute_script("return document.documentElement.scrollWidth") > width:
            found.append("it scrolls sideways")
        if driver.execute_script("return document.querySelectorAll('.findings').length"):
            bottom = "return document.querySelector('.findings li').getBoundingClientRect().bottom"
            if driver.execute_script(bottom) > HEIGHT:
                found.append("the first findings are below the first screen")
        yield from (f"{width}, {scheme}: {what}" for what in found)
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        (out / f"{width}-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))
    ids = driver.execute_script(
        "return [...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))"
    )
    for width in WIDTHS:
        chosen = sorted({ids[n * (len(ids) - 1) // 3] for n in range(4)}, key=ids.index)
        yield from (f"{width}: {what}" for what in missed_links(driver, page, width, chosen))


def main() -> None:
    """Look at one page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/page"), help="folder of screenshots and the PDF"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with browser(*paths()) as driver:
        for complaint in look(driver, options.page, options.out):
            wrong += 1
            print(complaint, flush=True)
    print(f"{wrong} complaints; screenshots in {options.out}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
