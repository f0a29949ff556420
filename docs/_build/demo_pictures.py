"""The README's two pictures of `joma demo`: its attention, with what happens in plain words, and its page."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import altair as alt
import pandas as pd

from joma import Run
from joma._show.plots import Chart, save
from joma._show.plots.style import COLOURS, INK
from joma._runs.curve import ENTROPY, describe_all

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CAMERA = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
)
SIZE = (1280, 900)
FAINT = "#57606a"


def attention(run: Run) -> Chart:
    """Attention entropy over the steps (faint), its running median, a sentence at its start, trough and end."""
    frame = run.frame()
    entropy = frame[frame.gauge == "entropy"]
    ((_, curve),) = describe_all(entropy, ENTROPY).items()
    table = entropy.groupby("step").value.mean().reset_index()
    last = int(table.step.max())
    least, most = curve.trough, curve.start
    notes = pd.DataFrame(
        [
            (1, most, f"every word looks at about {math.exp(most):.0f} words before it", 12, -9),
            (
                curve.trough_step,
                least,
                f"after {curve.trough_step} steps: at {math.exp(least):.0f} of them",
                10,
                16,
            ),
            (last, curve.end, f"after {last}: at {math.exp(curve.end):.0f}, more again", -190, 28),
        ],
        columns=["step", "value", "text", "dx", "dy"],
    )
    x = alt.X(
        "step:Q",
        title="training step",
        scale=alt.Scale(domain=[0, last]),
        axis=alt.Axis(grid=False, tickCount=5),
    )
    y = alt.Y(
        "value:Q",
        title="attention entropy (nats)",
        scale=alt.Scale(domain=[0, 3]),
        axis=alt.Axis(tickCount=4),
    )
    smooth = table.assign(
        value=table.value.rolling(ENTROPY.window, center=True, min_periods=1).median()
    )
    raw = alt.Chart(table).mark_line(strokeWidth=1, color=COLOURS[1], opacity=0.4).encode(x, y)
    line = (
        alt.Chart(smooth)
        .mark_line(strokeWidth=2.4, strokeJoin="round", color=COLOURS[1])
        .encode(x, y)
    )
    dots = (
        alt.Chart(notes).mark_point(filled=True, size=70, opacity=1, color=COLOURS[0]).encode(x, y)
    )
    words = [
        alt.Chart(notes.iloc[[n]])
        .mark_text(align="left", dx=note.dx, dy=note.dy, fontSize=13, color=INK)
        .encode(x, y, text="text:N")
        for n, note in enumerate(notes.itertuples())
    ]
    floor = alt.Chart(pd.DataFrame({"step": [last], "value": [0], "text": ["0: one word only"]}))
    ground = floor.mark_text(align="right", dy=-8, fontSize=11, color=FAINT).encode(
        x, y, text="text:N"
    )
    return alt.layer(raw, line, dots, *words, ground).properties(width=640, height=240)


def photograph(page: Path, picture: Path) -> None:
    """A picture of the top of a page, as a browser shows it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"a picture of {page.name} needs one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser, *CAMERA, f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}",
                "--virtual-time-budget=10000", f"--screenshot={picture.absolute()}", page.absolute().as_uri(),
            ],
            check=True, capture_output=True, timeout=300,
        )  # fmt: skip


def make(runs: Path, figures: Path) -> None:
    """Run the demo below ``runs`` if it is not there, and make ``demo.png`` and ``page.png`` in ``figures``."""
    folder = runs / "demo"
    if not (folder / "report.html").exists():
        subprocess.run(
            [sys.executable, "-m", "joma", "demo", "--no-open", "--out", str(folder)], check=True
        )
    with tempfile.TemporaryDirectory() as made:
        save(attention(Run(folder)), Path(made))
        shutil.copy(Path(made) / "figure.png", figures / "demo.png")
    from joma._show.pages.runs import report

    photograph(report([folder], folder / "report.html", "joma demo"), figures / "page.png")
