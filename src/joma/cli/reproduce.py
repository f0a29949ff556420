"""`joma reproduce`: a live table while exhibits are made, then a table of verdicts."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma._extras import require
from joma.cli import help
from joma.cli.options import Change, options_of
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

    from joma.paper.exhibits.making import ExhibitOutcome
    from joma.paper.exhibits.runner import Entry, ExhibitObserver, Reproduction

_WIDE = 150  # columns from which on the last table has a column for everything
_CACHED = "cached"  # instead of a time: made earlier, by the same code and settings
_LONG = 600.0  # seconds; how long it takes is announced before anything that takes longer


@options_of(
    "reproduce",
    argument="exhibits",
    without=["observer"],
    changes={
        "exhibits": Change(
            help="fig2, fig3, folding, …; see --list.",
            kind=list[str],
            default_text="all, and the claims",
            complete=help.exhibits,
        ),
        "out": Change(kind=Path),
        "preset": Change(complete=help.one_of("default", "laptop", "paper")),
        "settings": Change(
            ("--set",),
            "Another value for a setting of the preset; of one exhibit.",
            kind=list[str],
            metavar="KEY=VALUE",
        ),
        "report": Change(
            help="Where to write the page.", kind=Path, default_text="OUT/report.html"
        ),
        "engine": Change(complete=help.ENGINES),
    },
)
def _reproduce(
    list_: Annotated[bool, typer.Option("--list", help="List the exhibits and exit.")] = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """The exit status is 0 if all of them could be made and agree with their records."""
    require("paper", "joma reproduce")
    if list_:
        _list(as_json=as_json)
        return
    from joma._show.pages.reproduce import reproduce

    start = time.monotonic()
    reproduction = reproduce(**options, observer=_observer(as_json=as_json))
    messages = console(stderr=as_json)
    say(f"report: {reproduction.page}", messages)
    say(f"{reproduction.conclusion}; {_clock(time.monotonic() - start)}", messages)
    if not reproduction.ok:
        raise typer.Exit(1)


def _list(*, as_json: bool) -> None:
    from joma.paper.exhibits import exhibits

    listed = exhibits().values()
    if as_json:
        print_json(
            [{"id": one.id, "title": one.title, "statement": one.statement} for one in listed]
        )
        return
    rows = [(exhibit.id, escape(exhibit.statement)) for exhibit in listed]
    print_table(console(), ("exhibit", "*the paper's statement"), rows)


def _observer(*, as_json: bool) -> ExhibitObserver:
    """Return what shows the entries: a live table on a terminal, elsewhere a line for each that ends."""
    from joma.paper.exhibits.runner import ExhibitObserver

    messages = console(stderr=True)
    is_live = sys.stdout.isatty() and sys.stderr.isatty() and not messages.is_dumb_terminal

    class Lines(ExhibitObserver):
        def planned(self, entries: list[Entry], seconds: float) -> None:
            if seconds > _LONG:
                count = f"{len(entries)} exhibit{'' if len(entries) == 1 else 's'}"
                say(f"{count} to compute: about {_clock(seconds)}", messages)

        def finished(self, entry: Entry) -> None:
            seconds = _clock(entry.seconds) if entry.fresh else _CACHED
            text = f": {entry.what}" if entry.what else ""
            print(f"{entry.id}: {entry.verdict} ({seconds}){text}", file=sys.stderr, flush=True)

        def concluded(self, reproduction: Reproduction) -> None:
            # Before the page, which a full disk may prevent.
            if as_json:
                print_json(_as_json(reproduction))
            else:
                _print(console(), reproduction)

    if not is_live:
        return Lines()

    from rich.live import Live

    class LiveTable(Lines):
        def __init__(self) -> None:
            self.live = Live(console=messages, transient=True, refresh_per_second=4)

        def planned(self, entries: list[Entry], seconds: float) -> None:
            super().planned(entries, seconds)
            self.live.start()

        def tick(self, entries: list[Entry], seconds: float) -> None:
            self.live.update(live_table(entries, seconds, time.monotonic()))

        def finished(self, entry: Entry) -> None:
            pass  # the table shows it

        def ended(self) -> None:
            self.live.stop()

    return LiveTable()


def live_table(entries: list[Entry], left: float, now: float) -> RenderableType:
    """Return a table of how the entries stand, with the time left in seconds."""
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
            how = _clock(entry.seconds) if entry.fresh else _CACHED
            table.add_row(entry.id, f"[{style}]{entry.verdict}[/{style}]", how, escape(entry.what))
    done = sum(entry.state in ("done", "failed") for entry in entries)
    return Group(table, f"\n{done} of {len(entries)} done, about {_clock(left)} left")


def _as_json(reproduction: Reproduction) -> dict[str, Any]:
    """Return the verdicts with the numbers behind them."""
    exhibits = []
    for outcome in reproduction.outcomes:
        exhibit = outcome.exhibit
        row: dict[str, Any] = {
            "id": exhibit.id,
            "statement": exhibit.statement,
            "rule": exhibit.rule,
            "paper": exhibit.paper,
            "path": outcome.path,
        }
        if outcome.verdict is not None:
            row |= outcome.verdict.as_dict()
            row["would_decide"] = outcome.would_decide
        row["error"] = outcome.error
        row["recorded"] = outcome.recorded
        row["unchecked"] = outcome.unchecked
        row["checks"] = [asdict(check) for check in outcome.checks]
        row["seconds"] = outcome.seconds
        row["fresh"] = outcome.fresh
        exhibits.append(row)
    claims = None
    if reproduction.claims is not None:
        claims = [result.as_dict() for result in reproduction.claims]
    return {
        "exhibits": exhibits,
        "claims": claims,
        "claims_error": reproduction.claims_error,
        "ok": reproduction.ok,
        "conclusion": reproduction.conclusion,
    }


def _print(out: Console, reproduction: Reproduction) -> None:
    """Print the verdicts: in columns where there is room, else in two or three lines per exhibit."""
    if _WIDE <= out.width < UNLIMITED:
        _print_table(out, reproduction.outcomes)
    else:
        _print_paragraphs(out, reproduction.outcomes)
    for sentence in reproduction.failed_checks:
        out.print(f"\n[red]{escape(sentence)}[/red]")
    if reproduction.claims_error:
        out.print(f"\n[red]claims: {escape(reproduction.claims_error)}[/red]")
    elif reproduction.claims is not None:
        wrong = [result.id for result in reproduction.claims if not result.ok]
        text = "all checks ran and rejected their controls"
        if wrong:
            text = f"[red]wrong: {', '.join(wrong)}[/red]"
        seconds = _clock(reproduction.claims_seconds) if reproduction.claims_fresh else _CACHED
        out.print(f"\n{len(reproduction.claims)} claims ({seconds}): {text}. More: joma claims")


def _print_table(out: Console, outcomes: list[ExhibitOutcome]) -> None:
    rows = []
    for outcome in outcomes:
        verdict, measured = _cells(outcome)
        rows.append(
            (
                outcome.exhibit.id,
                escape(outcome.exhibit.statement),
                styled(verdict),
                escape(measured),
                escape(outcome.exhibit.paper),
                _time(outcome),
            )
        )
    columns = ("exhibit", "*the paper's statement", "verdict", "*measured", "*the paper", ">time")
    print_table(out, columns, rows)


def _print_paragraphs(out: Console, outcomes: list[ExhibitOutcome]) -> None:
    from rich.padding import Padding

    width = max((len(outcome.exhibit.id) for outcome in outcomes), default=0)
    for outcome in outcomes:
        verdict, measured = _cells(outcome)
        exhibit = outcome.exhibit
        gap = " " * (24 - len(verdict))
        out.print(f"[bold]{exhibit.id:{width}}[/bold]  {styled(verdict)}{gap}{_time(outcome):>8}")
        if exhibit.paper:
            measured = f"{measured} (paper: {exhibit.paper})"
        for text in (exhibit.statement, f"→ {measured}"):
            out.print(Padding(escape(text), (0, 0, 0, 2), expand=False))


def _cells(outcome: ExhibitOutcome) -> tuple[str, str]:
    """Return the verdict and the deciding number, with what would decide it or its record."""
    from joma.paper.exhibits.spot_check import record_line

    judgement = outcome.verdict
    if judgement is None:
        return "error", outcome.error or ""
    parts = [judgement.measured]
    if outcome.would_decide:
        parts.append(f"What would decide it: {outcome.would_decide}")
    if outcome.recorded:
        parts.append(record_line(outcome.recorded, outcome.checks, outcome.unchecked))
    return judgement.verdict, ". ".join(parts)


def _time(outcome: ExhibitOutcome) -> str:
    if not outcome.has_run:
        return ""
    if outcome.fresh:
        return _clock(outcome.seconds)
    return _CACHED


def _clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02} h"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("reproduce")(_reproduce)
