"""`joma audit`: parse, call, print."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from joma._scan.audit import Audit

_MOST = 40  # lines of the table


def _audit(
    source: Annotated[str, typer.Argument(help="A folder of checkpoints, or the id of a model on the hub.")],
    revisions: Annotated[str | None, typer.Option(help="As for `joma scan`.  [default: all that have a step]")] = None,
    level: Annotated[
        str, typer.Option(help="hashes (of the hub no weight is read), slices (64 kB per tensor) or full.")
    ] = "slices",
    out: Annotated[Path | None, typer.Option(help="Folder to write the picture to.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="File for all facts and faults; - prints them.")] = None,
) -> None:
    """Check a series of checkpoints for copies, wrong shards, swapped steps and damage. The exit status is 1 if any."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from joma._run.names import harmless
    from joma._scan.audit import audit

    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total, description=harmless(what))

        result = audit(source, revisions=revisions, level=level, report=report)
    if json_ is not None:
        text = json.dumps(result.as_json(), indent=1)
        if str(json_) == "-":
            typer.echo(text)
        else:
            json_.write_text(text + "\n", encoding="utf-8")
    console = Console(highlight=False, stderr=str(json_) == "-")
    _show(result, console)
    if out is not None:
        from joma import _figures

        out.mkdir(parents=True, exist_ok=True)
        _figures.save(result.draw(), out)
        console.print(f"picture: {out}/figure.svg, figure.png", soft_wrap=True, markup=False)
    if not result.ok:
        raise typer.Exit(1)


def _show(result: Audit, console: Console) -> None:
    """The table of checkpoints, then a line for each fault, and the number of them last."""
    from joma._run.names import harmless
    from joma._scan.budget import show_bytes
    from joma.cli.terminal import escape, plain_table

    points = result.checkpoints()
    table = plain_table(">step", "checkpoint", ">files", ">tensors", ">bytes", ">change", "faults")
    shown = points
    if len(points) > _MOST:
        shown = points[points.faults != ""].head(_MOST)
    for row in shown.to_dict("records"):
        change = "" if math.isnan(row["change"]) else f"{row['change']:.2g}"
        name, faults = escape(harmless(row["checkpoint"])), f"[red]{row['faults']}[/red]" if row["faults"] else ""
        counts = (str(row["files"]), str(row["tensors"] or ""), f"{row['bytes']:,}")
        table.add_row(f"{row['step']:,}", name, *counts, change, faults)
    if len(shown) < len(points):
        table.caption = f"{len(shown)} of {len(points)} checkpoints"
    console.print(table)
    for fault in result.faults:
        console.print(harmless(f"{fault.kind}: {fault.text}"), style="yellow", soft_wrap=True, markup=False)
    moved = show_bytes(int(points.transferred.sum()))
    many = f"{len(points)} checkpoints by {result.level}, {moved} transferred"
    console.print(f"{many}: {len(result.faults) or 'no'} fault{'s' * (len(result.faults) != 1)} found")
    if result.not_judged:
        console.print(f"not judged: {result.not_judged}", soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(_audit)
