"""`joma runs`: a list of runs; and the table of how runs stand, which other commands print too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from joma.cli.terminal import AsJson, console, escape, print_json, print_table, show_number

RUNS = Path("runs")  # where commands write runs, unless they are given another folder

# Key of a row -> its column. The short table answers which runs there are, the other how they went.
_SHORT = {
    "run": "run",
    "kind": "kind",
    "status": "status",
    "step": ">step",
    "loss": ">loss",
    "alert": "worst alert",
}
_IN_FULL = {
    "run": "run",
    "status": "status",
    "step": ">step",
    "steps": ">steps",
    "loss": ">loss",
    "valid_loss": ">valid_loss",
    "entropy": ">entropy",
    "alert": "worst alert",
    "phases": "*phases",
    "reason": "*reason",
}
_STYLES = {
    "done": "green",
    "running": "cyan",
    "failed": "red",
    "diverged": "red",
    "unreadable": "red",
    "critical": "red",
    "warning": "yellow",
}


def _runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, or of folders of them.")] = RUNS,
    as_json: AsJson = False,
) -> None:
    """List runs: kind, status, last step, loss and worst alert of each."""
    from joma._runs.listing import standings

    rows = standings(folder)
    if as_json:
        print_json(rows)
    else:
        print_standings(rows)


def print_standings(rows: list[dict[str, Any]], *, in_full: bool = False) -> None:
    """Print one line per run: the last numbers too, if ``in_full``."""
    columns = _IN_FULL if in_full else _SHORT
    lines = [[_cell(row[key]) for key in columns] for row in rows]
    print_table(console(), list(columns.values()), lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return show_number(value)
    text = escape(f"{value:,}" if isinstance(value, int) else str(value))
    if value in _STYLES:
        return f"[{_STYLES[value]}]{text}[/]"
    return text


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("runs")(_runs)
