"""`joma scan`: parse, call, print."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import help
from joma.cli.figures import save_figure, say_how_to_get_figures
from joma.cli.options import Change, options_of
from joma.cli.terminal import AsJson, console, escape, print_json, print_table, say, show_number

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from joma._checkpoints.scan import Scan

# Lines of the table; from longer series a log-spaced choice is shown.
_MOST_LINES = 40
# Models in the name of a run folder.
_MOST_NAMES = 4


@options_of(
    "scan",
    argument="source",
    without=["report"],
    changes={
        "source": Change(
            help="A folder of checkpoints or of models, one model, the id of a model on the hub, or "
            "smollm2, rxnfp, rxnmapper. Several models are compared."
        ),
        "run": Change(("--out",), "Run folder to write.", kind=Path, default_text="runs/scan-…"),
        "data": Change(
            help="Corpus for attention gauges: pydoc, wikitext-103, a path, …; or token ids: a .npy "
            "or .txt file of whole numbers."
        ),
        "gauges": Change(default="stable_rank", complete=help.gauges),
        "keep": Change(("--keep/--no-keep",)),
        "engine": Change(complete=help.ENGINES),
        "overwrite": Change(("--force",)),
    },
)
def _scan(
    page: Annotated[
        Path | None, typer.Option("--report", help="Also write its interactive page to this file.")
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """With other gauges it writes to another folder (NAME-2, …). The exit status is 0 if all gauges
    were measured on all checkpoints, 1 if one could not be, and 2 if the question was wrong.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from joma._checkpoints.budget import TRANSFER
    from joma._checkpoints.scan import scan
    from joma.cli.progress import bars_of

    if options["run"] is None:
        options["run"] = Path("runs") / f"scan-{_joined_name(options['source'])}"
    if page is not None:
        from joma._show.pages.document import check_place

        check_place(page)
    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with bars_of(*columns, console=console(stderr=True)) as bars:
        task = bars.add_task("", total=None)

        def report(done: int, total: int, text: str) -> None:
            if text.startswith(TRANSFER):
                say(text, bars.console)
            bars.update(task, completed=done, total=total, description=text)

        result = scan(**options, report=report)
    if _show(result, console(), as_json, page):
        raise typer.Exit(1)


def _joined_name(sources: list[str]) -> str:
    """Return a name for the folder of one or several sources: "bert+gpt2", "bert+gpt2+8-more"."""
    names = [folder_name(source) for source in sources]
    if len(names) > _MOST_NAMES:
        names = [*names[:2], f"{len(names) - 2}-more"]
    return "+".join(names)


def folder_name(source: str) -> str:
    """Return a name from a path or a model's id: "EleutherAI/pythia-70m" gives "pythia-70m"."""
    parts = [part for part in Path(source).parts if part not in (".", "..", "/")]
    return re.sub(r"[^\w.-]+", "-", parts[-1] if parts else "checkpoints")


def _show(result: Scan, out: Console, as_json: bool = False, page: Path | None = None) -> int:
    """Print table, notes and places of the output; return how many checkpoints are incomplete."""
    table = _ScanTable.of(result)
    files = ["run.json", "metrics.jsonl"]
    if table.can_be_drawn:
        files += save_figure(result.draw, result.path)
    if page is not None:
        from joma._show.pages.runs import report

        report(result.path, page)
    if as_json:
        print_json(table.as_json(result))
        if table.can_be_drawn:
            say_how_to_get_figures(console(stderr=True))
        return table.failed + table.partly
    table.print(out)
    for row in table.rows:
        if row["same_as"]:
            text = f"{row['checkpoint']}: identical to {_first_names(row['same_as'])}"
            say(text, out, "yellow")
    table.print_remarks(result.remarks(), out)
    if table.can_be_drawn:
        say(f"run: {result.path}/  ({', '.join(files)})", out)
        say_how_to_get_figures(out)
    say(f"page: {page or f'joma report {shlex.quote(str(result.path))}'}", out)
    say(table.last_line(), out)
    return table.failed + table.partly


@dataclass(frozen=True)
class _ScanTable:
    """What the terminal shows of a scan.

    Attributes:
        rows: one per checkpoint or model.
        means: (checkpoint, gauge) -> the mean over layers and heads.
        gauges: those with numbers.
        is_comparison: True if models are compared.
        can_be_drawn: True if there is at least one number.
        changes: a sentence per model: where it has changed most and least.
    """

    rows: list[dict[Any, Any]]
    means: dict[Any, float]
    gauges: list[str]
    is_comparison: bool
    can_be_drawn: bool
    changes: list[str]

    @classmethod
    def of(cls, result: Scan) -> _ScanTable:
        from joma._runs import Run

        points = result.checkpoints()
        frame = result.frame()
        if result.asked is not None:  # the run may have more, from other calls
            points = points[points.checkpoint.isin(result.asked)]
        means: dict[Any, float] = {}
        if len(frame):
            grouped = frame.groupby(["checkpoint", "gauge"], sort=False).value.mean()
            means = {key: float(mean) for key, mean in grouped.items()}
        measured = {gauge for _, gauge in means}
        asked_gauges = Run(result.path).info["config"]["gauges"]
        gauges = [gauge for gauge in asked_gauges if gauge in measured]
        can_be_drawn = bool(len(frame)) and bool(frame.value.notna().any())
        changes = []
        if can_be_drawn and result.is_comparison:
            changes = _largest_changes(frame)
        rows = points.to_dict("records")
        return cls(rows, means, gauges, result.is_comparison, can_be_drawn, changes)

    @property
    def failed(self) -> int:
        return sum(row["status"] == "failed" for row in self.rows)

    @property
    def partly(self) -> int:
        return sum(row["status"] == "partly" for row in self.rows)

    @property
    def noun(self) -> str:
        return "model" if self.is_comparison else "checkpoint"

    def as_json(self, result: Scan) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            means = {gauge: self.means.get((row["checkpoint"], gauge)) for gauge in self.gauges}
            rows.append({**row, "means": means})
        return {
            "run": str(result.path),
            "checkpoints": rows,
            "failed": self.failed,
            "partly": self.partly,
        }

    def print(self, out: Console) -> None:
        names = self._shown_names()
        captions = []
        if len(names) < len(self.rows):
            captions.append(f"{len(names)} of {len(self.rows)} checkpoints")
        if self.gauges:
            captions.append("gauges: means over layers and heads")
        lines = []
        has_gaps = False
        for row in self.rows:
            name = row["checkpoint"]
            if name not in names:
                continue
            cells = [escape(name)]
            if not self.is_comparison:
                cells.insert(0, f"{row['step']:,}")
            for gauge in self.gauges:
                number = show_number(self.means.get((name, gauge)))
                if number and gauge in row["problems"]:
                    number += "*"
                    has_gaps = True
                cells.append(number)
            style = {"ok": "green", "partly": "yellow"}.get(row["status"], "red")
            cells.append(f"[{style}]{row['status']}[/{style}]")
            lines.append(cells)
        if has_gaps:
            captions.append("*: without some layers, see below")
        columns = [self.noun, *(f">{gauge}" for gauge in self.gauges), "status"]
        if not self.is_comparison:
            columns.insert(0, ">step")
        print_table(out, columns, lines, "; ".join(captions))
        for text in self.changes:
            say(text, out)

    def _shown_names(self) -> set[str]:
        """Return the checkpoints that get a line; from a long series a log-spaced choice."""
        from joma._checkpoints.revision_choice import log_spaced

        if self.is_comparison or len(self.rows) <= _MOST_LINES:
            return {row["checkpoint"] for row in self.rows}
        return set(log_spaced([(row["checkpoint"], row["step"]) for row in self.rows], 20))

    def print_remarks(self, remarks: dict[str, list[str]], out: Console) -> None:
        """Print each remark once, with the checkpoints that it is about."""
        asked = {row["checkpoint"] for row in self.rows}
        for remark, checkpoints in remarks.items():
            names = [name for name in checkpoints if name in asked]
            if not names:
                continue
            if len(names) == len(asked) and len(names) > 1:
                subject = f"all {len(names)} {self.noun}s"
            elif self.is_comparison or len(names) == 1:
                subject = ", ".join(names)
            else:
                subject = f"{names[0]} and {len(names) - 1} more"
            say(f"{subject}: {remark}", out)

    def last_line(self) -> str:
        words = [f"{self.failed} failed"]
        if self.partly:
            words.append(f"{self.partly} measured in part")
        plural = "" if len(self.rows) == 1 else "s"
        text = f"{len(self.rows)} {self.noun}{plural}: {', '.join(words)}"
        if self.is_comparison and not self._has_common_gauge():
            text += "; no gauge was measured on two of them: there is nothing to compare"
        return text

    def _has_common_gauge(self) -> bool:
        """True if a gauge has numbers for two models; a change is already a comparison of two."""
        for gauge in self.gauges:
            models = [row for row in self.rows if (row["checkpoint"], gauge) in self.means]
            if len(models) > 1 or (models and gauge.startswith("change")):
                return True
        return False


def _largest_changes(frame: pd.DataFrame) -> list[str]:
    """Return a sentence per model: which block and part has changed most, and which least."""
    changes = frame[frame.gauge.str.partition(".")[0] == "change"].dropna(subset=["value"])
    sentences = []
    for model, rows in changes.groupby("checkpoint", sort=False):
        words = []
        for most, place in (("most", rows.value.argmax()), ("least", rows.value.argmin())):
            row = rows.iloc[int(place)]
            part = row.gauge.partition(".")[2] or "mlp_in"
            words.append(f"{most} in block {row.layer}, {part} ({show_number(row.value, 3)})")
        sentences.append(f"{model} has changed {', '.join(words)}")
    return sentences


def _first_names(names: str, most: int = 3) -> str:
    parts = names.split(", ")
    text = ", ".join(parts[:most])
    if len(parts) > most:
        text += f" and {len(parts) - most} more"
    return text


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("scan")(_scan)
