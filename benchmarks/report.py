"""The report of everything, opened in headless Chromium from disk: seconds to all figures drawn, against 3 s.

The page is made from ``runs/figures``, which ``make figures`` fills; ``JOMA_REPORT=PAGE`` measures another one. Every
figure must be painted and take the pointer, and the console must stay empty.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._timing import row

FOLDER, PROMISE = Path("runs/figures"), 3.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--window-size=1400,1000",
)  # fmt: skip
# id, colours and marks of each figure
PAINTED = """return [...document.querySelectorAll('.chart')].map(box => {
  const canvas = box.querySelector('canvas');
  if (!canvas) return [box.id, 0, 0];
  const pixels = new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  let marks = 0;
  const visit = (item) => { for (const m of item.items || []) {
    if (m.role === 'mark') marks += m.items.length;
    for (const below of m.items || []) visit(below); } };
  for (const group of joma.views.get(box.id).scenegraph().root.items) visit(group);
  return [box.id, new Set(pixels).size, marks];
});"""


def paths() -> tuple[str, str]:
    """Chromium and its driver."""
    names = ("chromium", "chromium-browser", "google-chrome")
    binary, driver = (
        next(filter(None, map(shutil.which, names)), None),
        shutil.which("chromedriver"),
    )
    if binary is None or driver is None:
        raise RuntimeError(
            "chromium and chromedriver are needed (apt-get install chromium chromium-driver)"
        )
    return binary, driver


@contextmanager
def browser(binary: str, driver: str) -> Iterator[Any]:
    """A headless Chromium that logs its console and its requests."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    try:
        chrome.set_script_timeout(60)
        yield chrome
    finally:
        chrome.quit()


def until(driver: Any, condition: str, *arguments: Any) -> Any:
    """Wait until a JavaScript expression is true; what it was at last."""
    for _ in range(600):
        if value := driver.execute_script(f"return {condition}", *arguments):
            return value
        time.sleep(0.05)
    raise AssertionError(f"never true: {condition}")


def errors(driver: Any) -> list[str]:
    """What the console has said since it was last asked."""
    return [
        entry["message"]
        for entry in driver.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]


def opened(driver: Any, page: Path) -> float:
    """Open a page; seconds from the navigation until all its figures are drawn."""
    driver.get_log("browser")
    driver.get(page.absolute().as_uri())
    until(driver, "window.joma && joma.drawn")
    return float(driver.execute_script("return joma.drawn")) / 1000


def enliven(driver: Any) -> None:
    """Make all figures of the open page interactive, as if the reader had come near each of them."""
    driver.execute_async_script("joma.enliven().then(arguments[0])")


def check(driver: Any) -> int:
    """Whether each figure of the open page is painted, and takes a pointer without complaint; how many there are."""
    empty = [
        id for id, colours, marks in driver.execute_script(PAINTED) if colours < 5 or not marks
    ]
    if empty:
        raise AssertionError(f"not painted: {', '.join(empty)}")
    ids = driver.execute_script(
        "return [...document.querySelectorAll('.chart')].map(box => box.id)"
    )
    for id in ids:  # as a pointer that moves over it: values are read
        driver.execute_script(
            "const r = document.getElementById(arguments[0]).getBoundingClientRect();"
            "const place = {clientX: r.x + r.width / 3, clientY: r.y + r.height / 3, bubbles: true};"
            "document.querySelector(`#${arguments[0]} canvas`).dispatchEvent(new PointerEvent('pointermove', place))",
            id,
        )
    if said := errors(driver):
        raise AssertionError(f"the console said: {said}")
    return len(ids)


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Median seconds until all figures are drawn."""
    given = os.environ.get("JOMA_REPORT")
    with tempfile.TemporaryDirectory() as folder, browser(*paths()) as driver:
        page = Path(given or f"{folder}/report.html")
        if given is None:
            if not FOLDER.is_dir():
                raise FileNotFoundError(
                    f"{FOLDER} is not there: make figures fills it, or say JOMA_REPORT=PAGE"
                )
            subprocess.run(
                [sys.executable, "-m", "joma", "report", str(FOLDER), "--out", str(page)],
                check=True,
            )
        seconds = statistics.median([opened(driver, page) for _ in range(rounds)])
        enliven(driver)
        count = check(driver)
        size = page.stat().st_size / 1e6
    return [
        row(
            f"the report, {count} figures, opened in Chromium from disk", "all are drawn", f"{PROMISE:g} s promised",
            seconds, PROMISE, f"{size:.1f} MB; every figure painted, console empty", figures=count,
        )
    ]  # fmt: skip
