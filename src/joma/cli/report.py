"""`joma report`: a page from any runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of them: of train, sweep, scan, watch, simulate, …")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its heading.")] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """One interactive page from any runs; several are drawn over each other. It needs no network to be viewed."""
    from rich.console import Console

    from joma._report.runs import report

    with Console(stderr=True).status("drawing"):
        page = report(runs, out, title)
    Console(highlight=False).print(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB)", soft_wrap=True, markup=False)
    if open_:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("report")(_report)
