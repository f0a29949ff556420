"""`joma scan`: parse, call, print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from joma._scan.scan import Scan

_MOST = 40  # lines of the table; of longer series a log-spaced choice is shown, and what needs a look


def _scan(
    source: Annotated[
        str, typer.Argument(help="A folder of checkpoints, one model, or the id of a model on the Hugging Face hub.")
    ],
    revisions: Annotated[
        str | None,
        typer.Option(help="step0,step1000 or 0..5000[:500] or pythia, all, log, log:20.  [default: all in a folder]"),
    ] = None,
    gauges: Annotated[str, typer.Option(help="Names as in `joma gauges`, with commas.")] = "stable_rank",
    data: Annotated[str, typer.Option(help="Corpus for attention gauges: pydoc, wikitext-103, a path, …")] = "pydoc",
    tokens: Annotated[int, typer.Option(help="How many tokens of it.")] = 20_000,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence.  [default: 512, or what the model has]")
    ] = None,
    mlp: Annotated[
        str | None, typer.Option(help="Regular expression that whole names of tensors match: the lower MLP matrices.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="For attention gauges: a folder or id.  [default: the model's own]")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The model that LoRA adapters add to: a folder or id.  [default: updates only]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to write.  [default: runs/scan-…]")] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep weights that were downloaded, or delete them once measured.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(help="Bytes that may be transferred from the hub, as 20GB; more is refused beforehand."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Checkpoints at a time.")] = 1,
    engine: Annotated[str, typer.Option(help="processes (this machine) or ray.")] = "processes",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster: ray://HOST:PORT.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Do again what failed before.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start again even if there is a run.")] = False,
) -> None:
    """Measure gauges on a series of checkpoints. The same command again goes on where it stopped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from joma._scan.budget import TRANSFER
    from joma._scan.scan import scan

    folder = out or Path("runs") / f"scan-{_name(source)}"
    columns = (
        BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(done: int, total: int, what: str) -> None:
            if what.startswith(TRANSFER):
                bars.console.print(what, markup=False, highlight=False)
            bars.update(task, completed=done, total=total, description=what)

        result = scan(
            source, folder, revisions=revisions, gauges=gauges, data=data, tokens=tokens, length=length,
            mlp=mlp, tokenizer=tokenizer, base=base, keep=keep, budget=budget, workers=workers, engine=engine,
            address=address, retry=retry, overwrite=force, report=report,
        )  # fmt: skip
    if _show(result, Console(highlight=False)):
        raise typer.Exit(1)


def _name(source: str) -> str:
    """A folder's name from a path or a model's id: "EleutherAI/pythia-70m" as "pythia-70m"."""
    parts = [part for part in Path(source).parts if part not in (".", "..", "/")]
    return re.sub(r"[^\w.-]+", "-", parts[-1] if parts else "checkpoints")


def _show(result: Scan, console: Console) -> int:
    """Print the table, the notes, where the picture is, and in the last line how many failed, which is returned."""
    from joma import _figures

    points, frame = result.checkpoints(), result.frame()
    if result.asked is not None:  # the run may have more, of other calls
        points = points[points.checkpoint.isin(result.asked)]
    means = frame.groupby(["checkpoint", "gauge"], sort=False).value.mean().unstack() if len(frame) else None
    console.print(_table(points, means))
    if means is not None:
        console.print("gauges: means over layers and heads", style="dim")
    for row in points.itertuples():
        if row.same_as:
            same = f"{row.checkpoint}: identical to {_short(str(row.same_as))}"
            console.print(same, style="yellow", soft_wrap=True, markup=False)
    for note, names in points[points.note != ""].groupby("note", sort=False).checkpoint:
        many = f"{names.iloc[0]} and {len(names) - 1} more" if len(names) > 1 else names.iloc[0]
        console.print(f"{many}: {note}", soft_wrap=True, markup=False)
    if len(frame) and frame.value.notna().any():
        _figures.save(result.draw(), result.path)
        where = f"run: {result.path}/  (run.json, metrics.jsonl, figure.svg, figure.png)"
        console.print(where, soft_wrap=True, markup=False)
    failed, partly = (int((points.status == status).sum()) for status in ("failed", "partly"))
    words = [f"{failed} failed"] + [f"{partly} measured in part"] * bool(partly)
    console.print(f"{len(points)} checkpoint{'s' * (len(points) != 1)}: {', '.join(words)}")
    return failed + partly


def _table(points: Any, means: Any) -> Any:
    from rich.table import Table

    from joma._scan.checkpoints import log_spaced
    from joma.cli.terminal import escape

    table = Table(box=None, header_style="bold", pad_edge=False)
    gauges = [] if means is None else list(means.columns)
    for column in ("step", "checkpoint", *gauges, "status"):
        table.add_column(column, justify="left" if column in ("checkpoint", "status") else "right", no_wrap=True)
    shown = set(points.checkpoint)
    if len(points) > _MOST:
        shown = set(log_spaced(list(zip(points.checkpoint, points.step, strict=True)), 20))
    for row in points.itertuples():
        if row.checkpoint not in shown:
            continue
        cells = [means[g].get(row.checkpoint, float("nan")) for g in gauges]
        style = {"ok": "green", "partly": "yellow"}.get(row.status, "red")
        numbers = ("" if x != x else f"{x:.4g}" for x in cells)
        table.add_row(f"{row.step:,}", escape(row.checkpoint), *numbers, f"[{style}]{row.status}[/{style}]")
    if len(shown) < len(points):
        table.caption = f"{len(shown)} of {len(points)} checkpoints"
    return table


def _short(names: str, most: int = 3) -> str:
    parts = names.split(", ")
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("scan")(_scan)
