"""`joma reproduce`: a live table while exhibits are made, then a table of verdicts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import help
from joma.cli.terminal import (
    UNLIMITED,
    VERDICT_STYLE,
    AsJson,
    console,
    escape,
    print_json,
    print_table,
    say,
    styled,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from joma.paper.exhibits.base import ExhibitOutcome
    from joma.paper.exhibits.runner import Entry, Reproduction, Runner

_WIDE = 150  # columns from which on the last table has a column for everything


def _reproduce(
    exhibits: Annotated[
        list[str] | None,
        typer.Argument(
            help="fig2, fig3, folding, …; see --list.",
            show_default="all, and the claims",
            autocompletion=help.exhibits,
        ),
    ] = None,
    preset: Annotated[
        str,
        typer.Option(
            help="default (minutes; shows and spot-checks records of longer runs), laptop (hours; "
            "computes everything), or paper (the paper's own scale).",
            autocompletion=help.one_of("default", "laptop", "paper"),
        ),
    ] = "default",
    out: Annotated[Path, typer.Option(help="Folder for the exhibits, one folder each.")] = Path(
        "runs/reproduce"
    ),
    report: Annotated[
        Path | None, typer.Option(help="Where to write the page.", show_default="OUT/report.html")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another value for a setting of the preset; of one exhibit.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Exhibits at a time; results do not depend on it.", show_default="the cores"
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="processes (this machine) or ray.", autocompletion=help.ENGINES)
    ] = "processes",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster: ray://HOST:PORT.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Make exhibits again that are there already.")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the exhibits and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Reproduce the paper's figures with a verdict for each, and write one page that shows them all."""
    if list_:
        from joma.paper.exhibits import exhibits as registered

        known = registered().values()
        if as_json:
            print_json(
                [
                    {name: getattr(exhibit, name) for name in ("id", "title", "statement")}
                    for exhibit in known
                ]
            )
        else:
            rows = [(exhibit.id, escape(exhibit.statement)) for exhibit in known]
            print_table(console(), ("exhibit", "*the paper's statement"), rows)
        return
    from joma._show.pages.reproduce import runner_of, with_page

    start = time.monotonic()
    runner = runner_of(
        exhibits, out, preset=preset, seed=seed, settings=set_ or [], report=report, force=force, jobs=jobs,
        engine=engine, address=address,
    )  # fmt: skip
    with _shown(runner):
        reproduction = runner.run()
    if as_json:  # before the page, which a full disk may prevent
        print_json(_as_json(reproduction))
    else:
        _print(console(), reproduction)
    page = with_page(runner, reproduction).page
    say(f"report: {page}  ({_clock(time.monotonic() - start)} in all)", console(stderr=as_json))
    if not reproduction.ok:
        raise typer.Exit(1)


@contextmanager
def _shown(runner: Runner) -> Iterator[None]:
    """Show how a runner's entries stand: a live table on a terminal, elsewhere a plain line for each that ends."""
    told = console(stderr=True)
    if not (sys.stdout.isatty() and sys.stderr.isatty()) or told.is_dumb_terminal:

        def finished(entry: Entry) -> None:
            how = _clock(entry.seconds) if entry.fresh else "there"
            what = f": {entry.what}" if entry.what else ""
            print(f"{entry.id}: {entry.verdict} ({how}){what}", file=sys.stderr, flush=True)

        runner.finished = finished
        yield
        return
    from rich.live import Live

    with Live(console=told, transient=True, refresh_per_second=4) as live:
        runner.show = lambda entries, left: live.update(live_table(entries, left, time.monotonic()))
        yield


def live_table(entries: list[Entry], left: float, now: float) -> RenderableType:
    """How the entries stand, and the time left (seconds)."""
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, expand=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, min_width=18)
    table.add_column(no_wrap=True, justify="right", min_width=8)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
    for entry in entries:
        if entry.state == "waiting":
            table.add_row(entry.id, "[dim]waiting[/dim]", "", "")
        elif entry.state == "running":
            filled = round(10 * entry.share)
            bar = f"[cyan]{'━' * filled}[/cyan][dim]{'─' * (10 - filled)}[/dim] {entry.share:4.0%}"
            table.add_row(entry.id, bar, _clock(now - entry.started), escape(entry.what))
        else:
            style = VERDICT_STYLE.get(entry.verdict, "green")
            how = _clock(entry.seconds) if entry.fresh else "there"
            table.add_row(entry.id, f"[{style}]{entry.verdict}[/{style}]", how, escape(entry.what))
    done = sum(entry.state in ("done", "failed") for entry in entries)
    return Group(table, f"\n{done} of {len(entries)} done, about {_clock(left)} left")


def _as_json(reproduction: Reproduction) -> dict[str, Any]:
    """The verdicts with the numbers behind them."""
    exhibits = [
        {
            "id": outcome.exhibit.id, "statement": outcome.exhibit.statement, "path": outcome.path,
            **({} if outcome.verdict is None else asdict(outcome.verdict)), "error": outcome.error,
            "checks": [asdict(check) for check in outcome.checks],
            "seconds": outcome.seconds, "fresh": outcome.fresh,
        }
        for outcome in reproduction.outcomes
    ]  # fmt: skip
    claims = (
        None
        if reproduction.claims is None
        else [result.as_dict() for result in reproduction.claims]
    )
    return {
        "exhibits": exhibits,
        "claims": claims,
        "claims_error": reproduction.claims_error,
        "ok": reproduction.ok,
    }


def _print(out: Console, reproduction: Reproduction) -> None:
    """The verdicts: a column for everything where there is room, else two or three lines per exhibit."""
    from rich.padding import Padding

    if _WIDE <= out.width < UNLIMITED:
        rows = []
        for outcome in reproduction.outcomes:
            verdict, measured, paper = _cells(outcome)
            cells = (
                escape(outcome.exhibit.statement),
                styled(verdict),
                escape(measured),
                escape(paper),
            )
            rows.append((outcome.exhibit.id, *cells, _time(outcome)))
        columns = (
            "exhibit",
            "*the paper's statement",
            "verdict",
            "*measured",
            "*the paper",
            ">time",
        )
        print_table(out, columns, rows)
    else:
        width = max((len(outcome.exhibit.id) for outcome in reproduction.outcomes), default=0)
        for outcome in reproduction.outcomes:
            verdict, measured, paper = _cells(outcome)
            name, room = f"{outcome.exhibit.id:{width}}", " " * (24 - len(verdict))
            out.print(f"[bold]{name}[/bold]  {styled(verdict)}{room}{_time(outcome):>8}")
            numbers = f"{measured} (paper: {paper})" if paper else measured
            for text in (outcome.exhibit.statement, f"→ {numbers}", *map(str, outcome.checks)):
                out.print(Padding(escape(text), (0, 0, 0, 2), expand=False))
    for sentence in reproduction.failed_checks:
        out.print(f"\n[red]{escape(sentence)}[/red]")
    if reproduction.claims_error:
        out.print(f"\n[red]claims: {escape(reproduction.claims_error)}[/red]")
    elif reproduction.claims is not None:
        wrong = [result.id for result in reproduction.claims if not result.ok]
        said = (
            f"[red]wrong: {', '.join(wrong)}[/red]"
            if wrong
            else "all checks ran and rejected their controls"
        )
        how = _clock(reproduction.claims_seconds) if reproduction.claims_fresh else "there"
        out.print(f"\n{len(reproduction.claims)} claims ({how}): {said}. More: joma claims")


def _cells(outcome: ExhibitOutcome) -> tuple[str, str, str]:
    """Verdict, the deciding number, and the paper's."""
    if outcome.verdict is None:
        return "error", outcome.error or "", ""
    said = outcome.verdict
    measured = said.measured or said.summary
    measured += f". What would decide it: {said.would_decide}" if said.would_decide else ""
    return said.verdict, measured, said.paper


def _time(outcome: ExhibitOutcome) -> str:
    return _clock(outcome.seconds) if outcome.fresh else "there"


def _clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02} h"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce")(_reproduce)
