"""`joma demo`: train a small language model with a watch attached, and look at its page. No data, half a minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joma._extras import require
from joma._train.settings import Settings
from joma.cli.browser import open_page

if TYPE_CHECKING:
    from joma._runs import Run

# Found on seeds 10 to 14 and scored once on 0 to 4 (`python -m benchmarks.demo`). The number of steps was fixed before
# that: a run is not stopped where it looks best. One thread, since the matrices are small.
SETTINGS = Settings(
    data="pydoc", vocabulary=1000, layers=1, width=128, hidden=128, lr=2e-3, steps=400, every=10,
    gauges=("entropy", "stable_rank"), valid_windows=4, valid_every=100, threads=1,
)  # fmt: skip
ROOM = 20_000_000  # bytes that the run folder and its page may take


def _demo(
    seed: Annotated[int, typer.Option(help="Seed of the model's start.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder to write.", show_default="runs/demo, runs/demo-2, …"),
    ] = None,
    open_: Annotated[
        bool, typer.Option("--open/--no-open", help="Show the page in the browser.")
    ] = True,
) -> None:
    """See it work: train a tiny language model for half a minute, watch its attention, and look at the page."""
    from dataclasses import replace

    from joma._runs import check_writable
    from joma.cli.progress import progress_bar
    from joma.cli.terminal import console, say

    require("report", "joma demo")
    settings = replace(SETTINGS, seed=seed).checked()
    folder = _free(out)
    check_writable(folder, ROOM, "--out")
    screen = console(stderr=True)
    say(
        f"{settings.steps} steps of a {settings.layers}-layer Transformer on Python's own reference, into {folder}",
        screen,
    )
    from joma._show.pages.runs import report
    from joma._train.language import train

    with progress_bar(screen, settings.steps) as show:
        run = train(
            settings, folder, checkpoint_every=settings.steps, say=lambda line: None, show=show
        )
    with screen.status("drawing"):
        page = report([folder], folder / "report.html", "joma demo")
    for line in (*story(run), f"page: {page}", _NEXT):
        say(line)
    if open_ and sys.stdout.isatty():  # not in a script
        open_page(page.absolute().as_uri())


_NEXT = """
Next, your own model. Around any PyTorch training loop:
    with joma.watch(model, run="runs/mine") as w:
        ...                # forward, backward, optimizer.step()
        w.step(loss=loss)
then: joma report runs/mine --open. More: joma docs getting-started; the curves: joma docs reading"""


def story(run: Run) -> list[str]:
    """Return what attention did, in the sentence of the run's page, and the numbers behind it."""
    from joma._runs.outcome import outcome
    from joma._runs.story import figures
    from joma._runs.story import story as sentence

    frame = run.frame()
    now = outcome(run, frame)
    loss = frame[frame.gauge == "loss"].value
    lines = [sentence(now, run.info["kind"])]
    lines += [f"  {figures(now, layer)}" for layer in now.curves.get("entropy", {})]
    lines.append(f"  loss {loss.iloc[0]:.2f} → {loss.iloc[-5:].mean():.2f}")
    return lines


def _free(out: Path | None) -> Path:
    """The folder of the run: ``out`` if nothing is in it, else the first of runs/demo, runs/demo-2, … that is free."""
    from joma._runs import RunError
    from joma._runs.folder import existing, numbered

    if out is None:
        return numbered(Path("runs/demo"), "train")
    if existing(out) is not None:
        raise RunError(f"{out} holds a run already, which stays as it is: choose another --out")
    return out


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(_demo)
