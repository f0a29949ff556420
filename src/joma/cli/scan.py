"""`joma scan`: parse, call, print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import help
from joma.cli.terminal import AsJson, console, escape, print_json, print_table, say, show_number

if TYPE_CHECKING:
    from rich.console import Console

    from joma._checkpoints.scan import Scan

_MOST = (
    40  # lines of the table; of longer series a log-spaced choice is shown, and what needs a look
)


def _scan(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of checkpoints, one model, the id of a model on the hub, or smollm2."
        ),
    ],
    revisions: Annotated[
        str | None,
        typer.Option(
            help="step0,step1000 or 0..5000[:500] or pythia, all, log, log:20.",
            show_default="all in a folder",
        ),
    ] = None,
    gauges: Annotated[
        str,
        typer.Option(help="Names as in `joma gauges`, with commas.", autocompletion=help.gauges),
    ] = "stable_rank",
    data: Annotated[
        str, typer.Option(help="Corpus for attention gauges: pydoc, wikitext-103, a path, …")
    ] = "pydoc",
    tokens: Annotated[int, typer.Option(help="How many tokens of it.")] = 20_000,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence.", show_default="512, or what the model has"),
    ] = None,
    mlp: Annotated[
        str | None,
        typer.Option(
            help="Regular expression that whole names of tensors match: the lower MLP matrices."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="For attention gauges: a folder or id.", show_default="the model's own"),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="The model that LoRA adapters add to: a folder or id.", show_default="updates only"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write.", show_default="runs/scan-…")
    ] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep/--no-keep",
            help="Keep weights that were downloaded, or delete them once measured.",
        ),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Bytes that may be transferred from the hub, as 20GB; more is refused beforehand."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(help="Checkpoints at a time.")] = 1,
    engine: Annotated[
        str, typer.Option(help="processes (this machine) or ray.", autocompletion=help.ENGINES)
    ] = "processes",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster: ray://HOST:PORT.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Do again what failed before.")] = False,
    page: Annotated[
        Path | None, typer.Option("--report", help="Also write its interactive page to this file.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start again even if there is a run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure gauges on a series of checkpoints. The same command again goes on where it stopped.

    With other gauges it writes to another folder (NAME-2, …). The exit status is 0 if all gauges were
    measured on all checkpoints, 1 if one could not be, and 2 if the question was wrong.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from joma._checkpoints.budget import TRANSFER
    from joma._checkpoints.scan import scan
    from joma.cli.progress import bars_of

    folder = out or Path("runs") / f"scan-{folder_name(source)}"
    if page is not None:
        from joma._show.pages.document import check_place

        check_place(page)
    columns = (
        BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with bars_of(*columns, console=console(stderr=True)) as bars:
        task = bars.add_task("", total=None)

        def report(done: int, total: int, what: str) -> None:
            if what.startswith(TRANSFER):
                say(what, bars.console)
            bars.update(task, completed=done, total=total, description=what)

        result = scan(
            source, folder, revisions=revisions, gauges=gauges, data=data, tokens=tokens, length=length,
            mlp=mlp, tokenizer=tokenizer, base=base, keep=keep, budget=budget, workers=workers, engine=engine,
            address=address, retry=retry, overwrite=force, report=report,
        )  # fmt: skip
    if _show(result, console(), as_json, page):
        raise typer.Exit(1)


def folder_name(source: str) -> str:
    """A folder's name from a path or a model's id: "EleutherAI/pythia-70m" as "pythia-70m"."""
    parts = [part for part in Path(source).parts if part not in (".", "..", "/")]
    return re.sub(r"[^\w.-]+", "-", parts[-1] if parts else "checkpoints")


def _show(result: Scan, out: Console, as_json: bool = False, page: Path | None = None) -> int:
    """Print the table, the notes, where the picture is, and in the last line how many failed, which is returned."""
    from joma._show import plots

    points, frame = result.checkpoints(), result.frame()
    if result.asked is not None:  # the run may have more, of other calls
        points = points[points.checkpoint.isin(result.asked)]
    means: dict[Any, float] = {}  # checkpoint, gauge -> the mean over layers and heads
    if len(frame):
        grouped = frame.groupby(["checkpoint", "gauge"], sort=False).value.mean()
        means = {key: float(mean) for key, mean in grouped.items()}
        if frame.value.notna().any():
            plots.save(result.draw(), result.path)
    rows = points.to_dict("records")
    gauges = list(dict.fromkeys(gauge for _, gauge in means))
    failed, partly = (int((points.status == status).sum()) for status in ("failed", "partly"))
    if page is not None:
        from joma._show.pages.runs import report

        report(result.path, page)
    if as_json:
        told = [
            {**row, "means": {gauge: means.get((row["checkpoint"], gauge)) for gauge in gauges}}
            for row in rows
        ]
        print_json(
            {"run": str(result.path), "checkpoints": told, "failed": failed, "partly": partly}
        )
        return failed + partly
    _print_checkpoints(rows, means, gauges, out)
    for row in rows:
        if row["same_as"]:
            say(f"{row['checkpoint']}: identical to {_short(row['same_as'])}", out, "yellow")
    asked = {row["checkpoint"] for row in rows}
    for remark, checkpoints in result.remarks().items():
        names = [name for name in checkpoints if name in asked]
        if names:
            say(f"{_some(names, len(rows))}: {remark}", out)
    if len(frame) and frame.value.notna().any():
        say(f"run: {result.path}/  (run.json, metrics.jsonl, figure.svg, figure.png)", out)
    say(f"page: {page or f'joma report {shlex.quote(str(result.path))}'}", out)
    words = [f"{failed} failed"] + [f"{partly} measured in part"] * bool(partly)
    say(f"{len(points)} checkpoint{'s' * (len(points) != 1)}: {', '.join(words)}", out)
    return failed + partly


def _print_checkpoints(
    rows: list[dict[Any, Any]], means: dict[Any, float], gauges: list[str], out: Console
) -> None:
    from joma._checkpoints.checkpoints import log_spaced

    shown = {row["checkpoint"] for row in rows}
    caption = "gauges: means over layers and heads" if gauges else ""
    if len(rows) > _MOST:
        shown = set(log_spaced([(row["checkpoint"], row["step"]) for row in rows], 20))
        caption = f"{len(shown)} of {len(rows)} checkpoints; {caption}".rstrip("; ")
    lines = []
    for row in rows:
        name, status = row["checkpoint"], row["status"]
        style = {"ok": "green", "partly": "yellow"}.get(status, "red")
        numbers = [show_number(means.get((name, gauge))) for gauge in gauges]
        lines += [(f"{row['step']:,}", escape(name), *numbers, f"[{style}]{status}[/{style}]")] * (
            name in shown
        )
    print_table(
        out, (">step", "checkpoint", *(f">{gauge}" for gauge in gauges), "status"), lines, caption
    )


def _some(names: list[str], count: int) -> str:
    """Return which of ``count`` checkpoints a remark is of."""
    if len(names) == 1:
        return names[0]
    if len(names) == count:
        return f"all {count} checkpoints"
    return f"{names[0]} and {len(names) - 1} more"


def _short(names: str, most: int = 3) -> str:
    parts = names.split(", ")
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("scan")(_scan)
