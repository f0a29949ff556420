"""`joma audit`: parse, call, print."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import help
from joma.cli.figures import save_figure, say_how_to_get_figures
from joma.cli.options import Change, options_of
from joma.cli.terminal import AsJson, console, escape, print_json, print_table, say, show_number

if TYPE_CHECKING:
    from rich.console import Console

    from joma._checkpoints.audit.audit import Audit

# Lines of the table; of longer series only checkpoints with faults are shown.
_MOST_LINES = 40


@options_of(
    "audit",
    argument="source",
    without=["report"],
    changes={
        "source": Change(help="A folder of checkpoints, or the id of a model on the hub."),
        "run": Change(("--out",), "Run folder to write.", kind=Path, default_text="runs/audit-…"),
        "level": Change(complete=help.one_of("hashes", "slices", "full")),
        "overwrite": Change(("--force",)),
    },
)
def _audit(as_json: AsJson = False, **options: Any) -> None:
    """The exit status is 1 if there is a fault. The same command again continues where it stopped."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from joma._checkpoints.audit.audit import audit
    from joma._checkpoints.budget import TRANSFER
    from joma._runs.names import harmless
    from joma.cli.progress import bars_of
    from joma.cli.scan import folder_name

    if options["run"] is None:
        name = f"audit-{folder_name(options['source'])}-{options['level']}"
        options["run"] = Path("runs") / name
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with bars_of(*columns, console=console(stderr=True)) as bars:
        task = bars.add_task("", total=None)

        def report(done: int, total: int, text: str) -> None:
            if text.startswith(TRANSFER):
                bars.console.print(text, markup=False, highlight=False)
            bars.update(task, completed=done, total=total, description=harmless(text))

        result = audit(**options, report=report)
    out_console = console(stderr=as_json)
    if as_json:
        print_json(result.as_json())
    else:
        _show(result, out_console)
    files = ["run.json", "metrics.jsonl", "gathered/"]
    has_changes = bool((result.changes().change > 0).any())
    if has_changes:
        assert result.path is not None  # it was given a folder
        files += save_figure(result.draw, result.path)
    say(f"run: {result.path}/  ({', '.join(files)})", out_console)
    if has_changes:
        say_how_to_get_figures(out_console)
    if not result.ok:
        raise typer.Exit(1)


def _show(result: Audit, out: Console) -> None:
    """Print the table of checkpoints, a line per fault, and the number of faults last."""
    from joma._checkpoints.budget import show_bytes
    from joma._runs.names import harmless

    points = result.checkpoints()
    visible = points
    caption = ""
    if len(points) > _MOST_LINES:
        visible = points[points.faults != ""].head(_MOST_LINES)
        caption = f"{len(visible)} of {len(points)} checkpoints"
    rows = []
    for row in visible.to_dict("records"):
        change = "" if math.isnan(row["change"]) else show_number(row["change"], digits=2)
        faults = f"[red]{row['faults']}[/red]" if row["faults"] else ""
        cells = (
            f"{row['step']:,}",
            escape(harmless(row["checkpoint"])),
            str(row["files"]),
            str(row["tensors"] or ""),
            f"{row['bytes']:,}",
            change,
            faults,
        )
        rows.append(cells)
    columns = (">step", "checkpoint", ">files", ">tensors", ">bytes", ">change", "faults")
    print_table(out, columns, rows, caption)
    for fault in result.faults:
        say(harmless(f"{fault.kind}: {fault.text}"), out, "yellow")
    transferred = show_bytes(int(points.transferred.sum()))
    read = f"{len(points)} checkpoints by {result.level}, {transferred} transferred"
    plural = "" if len(result.faults) == 1 else "s"
    out.print(f"{read}: {len(result.faults) or 'no'} fault{plural} found")
    if result.not_judged:
        say(f"not judged: {result.not_judged}", out)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(_audit)
