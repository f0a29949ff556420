"""`joma report`: a page from any runs, the picture of one, or its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from joma._extras import has, require
from joma.cli.browser import NO_WINDOW, open_page
from joma.cli.options import Change, options_of
from joma.cli.runs import print_standings
from joma.cli.terminal import console, say, tell_newest

# Endings of files that are no pages, as in `joma._show.pages.runs`, which needs the extra `report`.
EXPORTS = (".svg", ".png", ".pdf", ".json", ".csv")


@options_of(
    "report",
    argument="runs",
    changes={
        "runs": Change(
            help="Run folders, or folders of them: of train, sweep, scan, watch, simulate, …",
            kind=list[Path],
        ),
        "out": Change(
            help="The file to write, several times if you like: a page (.html); of one run also its picture "
            "(.svg, .png, .pdf, .json for Vega-Lite) or its numbers (.csv).",
            kind=list[Path],
            default_text="RUN/report.html; report-A+B.html of several",
        ),
        "title": Change(help="Its heading."),
        "clock": Change(
            help="Over τ, the sum of learning rates, not over steps; the page can switch."
        ),
    },
)
def _report(
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
    **options: Any,
) -> None:
    """A page needs no network to be viewed."""
    files: list[Path] = options["out"] or []
    if live:
        if files:
            raise ValueError(
                f"--live serves a page and writes none: leave out --out {files[0]}, or --live"
            )
        _serve(options["runs"], options["title"], options["clock"], open_, port or 0)
        return
    if port is not None:
        raise ValueError(f"--port {port} is for --live")
    if not has("report"):
        _report_without_figures(options["runs"], files)
        return
    if open_ and files and all(map(_is_export, files)):
        raise ValueError("--open is for a page, and none is asked for: add --out report.html")
    from joma._show.pages.runs import report

    page = None
    places: list[Path | None] = [*files] or [None]
    for file in places:
        with console(stderr=True).status("drawing"):
            written = report(**options | {"out": file})
        _tell(written)
        if not _is_export(written):
            page = written
    first, *others = options["runs"]
    if not others and (first / "run.json").exists():
        tell_newest(first)
    if open_ and page is not None and not open_page(page.absolute().as_uri()):
        say(NO_WINDOW)


def _is_export(file: Path) -> bool:
    return file.suffix.lower() in EXPORTS


def _tell(file: Path) -> None:
    if file.suffix.lower() == ".csv":
        say(f"numbers: {file}")
    elif _is_export(file):
        say(f"picture: {file}")
    else:
        say(f"report: {file} ({file.stat().st_size / 1e6:.1f} MB)")


def _report_without_figures(runs: list[Path], files: list[Path]) -> None:
    """Write the numbers that were asked for, or print how the runs stand, without the extra `report`."""
    from joma._runs import Run, write_atomic
    from joma._runs.listing import standings

    tables = [file for file in files if file.suffix.lower() == ".csv"]
    if files and tables == files and len(runs) == 1:
        frame = Run(runs[0]).frame()
        for file in tables:
            write_atomic(file, frame.to_csv(index=False))
            _tell(file)
        return
    rows = []
    for run in runs:
        rows += standings(run)
    print_standings(rows, in_full=True)
    require("report", "a page or a picture")


def _serve(runs: list[Path], title: str | None, clock: bool, show: bool, port: int) -> None:
    from joma._show.pages.live import serve

    def ready(url: str) -> None:
        if show and not open_page(url):
            say(NO_WINDOW)

    def tell(line: str) -> None:
        print(line, flush=True)

    serve(runs, title, port=port, clock=clock, say=tell, ready=ready)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("report")(_report)
