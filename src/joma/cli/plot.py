"""`joma plot`: the picture of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from joma.cli.terminal import say, tell_newest


def _plot(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figure.", show_default="RUN")
    ] = None,
    clock: Annotated[
        bool, typer.Option("--clock", help="Over τ, the sum of learning rates, not over steps.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Also write the numbers, as a table, to this file.")
    ] = None,
) -> None:
    """Draw a run: of a watched training, each gauge over the steps, one line per layer, with phases and the loss."""
    from joma._runs import Run, write_atomic
    from joma._show.pages.plot import plot as draw

    folder = draw(run, out, clock=clock)
    if csv is not None:
        write_atomic(csv, Run(run).frame().to_csv(index=False))
    say(f"{folder}/figure.svg, figure.png, figure.json")
    tell_newest(run)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plot")(_plot)
