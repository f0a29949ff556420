"""`joma report`: a page from any runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from joma.cli.browser import NO_WINDOW, open_page
from joma.cli.terminal import console, say


def _report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders of them: of train, sweep, scan, watch, simulate, …"
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write.", show_default="RUN/report.html; report-A+B.html of several"
        ),
    ] = None,
    title: Annotated[str | None, typer.Option(help="Its heading.")] = None,
    clock: Annotated[
        bool,
        typer.Option(
            "--clock",
            help="Over τ, the sum of learning rates, not over steps; the page can switch.",
        ),
    ] = False,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Serve the page of runs in training to this machine; it follows them."
        ),
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="With --live: of 127.0.0.1.", show_default="any that is free")
    ] = None,
) -> None:
    """One interactive page from any runs; several are drawn over each other. It needs no network to be viewed."""
    if live:
        if out is not None:
            raise ValueError(
                f"--live serves a page and writes none: leave out --out {out}, or --live"
            )
        _serve(runs, title, clock, open_, port or 0)
        return
    if port is not None:
        raise ValueError(f"--port {port} is for --live")
    from joma._show.pages.runs import report

    with console(stderr=True).status("drawing"):
        page = report(runs, out, title, clock=clock)
    say(f"report: {page} ({page.stat().st_size / 1e6:.1f} MB)")
    if open_ and not open_page(page.absolute().as_uri()):
        say(NO_WINDOW)


def _serve(runs: list[Path], title: str | None, clock: bool, show: bool, port: int) -> None:
    from joma._show.pages.live import serve

    def ready(url: str) -> None:
        if show and not open_page(url):
            say(NO_WINDOW)

    serve(
        runs, title, port=port, clock=clock, say=lambda line: print(line, flush=True), ready=ready
    )


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("report")(_report)
