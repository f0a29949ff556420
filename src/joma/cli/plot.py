"""`joma plot`: the picture of a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _plot(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figure.  [default: RUN]")] = None,
) -> None:
    """Draw a run: of a watched training, each gauge over the steps, a line a layer, with phases and the loss."""
    from rich.console import Console

    from joma._report.plot import plot as draw

    folder = draw(run, out)
    Console(highlight=False).print(f"{folder}/figure.svg, figure.png, figure.json", soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plot")(_plot)
