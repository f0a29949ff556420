"""What joma sees of a model, one row per attention and per MLP: the result of `joma.explain`.

`explain.json` in the run folder of a watch holds it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs.folder import RunError, write_json

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

EXPLANATION = "explain.json"
MEASURED = "measured"
LAYER_ONLY = "layer only"
PART_OF_QUERIES = "part of queries"
REFUSED = "refused"
_WIDTH_COLUMNS = 100  # of the printed table


@dataclass(frozen=True)
class ExplainedModule:
    """One attention or one MLP of a model, and how joma reads it.

    Attributes:
        module: its name in the model; "name/1" for a second attention in one call.
        kind: "attention" or "MLP".
        class_name: the class of the module.
        status: "measured", "layer only" (heads are not certain), "part of queries" or "refused".
        calls: how often it attends in one pass; more than once where layers share a module.
        backend: the function that computes the attention.
        axes: the axes of queries and keys in the module's own order, with their sizes.
        heads: the number of heads; None if they are not certain.
        evidence: what shows which axis holds the heads, or that two maps are an MLP.
        mask: the form in which the mask is applied.
        hides: which keys it hides.
        queries: the number of queries, samples × tokens.
        padded: how many of them are padding and left out.
        padding_evidence: what shows which they are.
        check: how it was verified.
        error: the largest difference found by that, relative to the largest number compared.
        matrices: the matrices that weight gauges can be measured on.
        code: why it is refused or measured in part, as a code of the documentation.
        reason: the same as a sentence.
    """

    module: str
    kind: str
    class_name: str
    status: str = MEASURED
    calls: int = 1
    backend: str = ""
    axes: str = ""
    heads: int | None = None
    evidence: str = ""
    mask: str = ""
    hides: str = ""
    queries: int | None = None
    padded: int | None = None
    padding_evidence: str = ""
    check: str = ""
    error: float | None = None
    matrices: str = ""
    code: str = ""
    reason: str = ""


COLUMNS = tuple(field.name for field in fields(ExplainedModule))


@dataclass(frozen=True)
class Explanation:
    """What joma sees of a model; made by `joma.explain` and `Watch.explain`.

    Attributes:
        model: the class of the model.
        rows: one per attention and per MLP, in the order of the model's modules.
        notes: sentences about the model as a whole.
    """

    model: str
    rows: tuple[ExplainedModule, ...]
    notes: tuple[str, ...] = ()

    def frame(self) -> pd.DataFrame:
        """Return the table with one column per attribute of `ExplainedModule`."""
        import pandas as pd

        table = pd.DataFrame([asdict(row) for row in self.rows], columns=list(COLUMNS))
        counts = ["calls", "heads", "queries", "padded"]
        return table.astype(dict.fromkeys(counts, "Int64") | {"error": "float64"})

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON's own types; values that a row has by default are left out."""
        defaults = {field.name: field.default for field in fields(ExplainedModule)}

        def without_defaults(row: ExplainedModule) -> dict[str, Any]:
            return {name: value for name, value in asdict(row).items() if value != defaults[name]}

        return {
            "model": self.model,
            "rows": list(map(without_defaults, self.rows)),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Explanation:
        """Return what `to_json` gave; columns of a later version are left out."""

        def row_of(values: Mapping[str, Any]) -> ExplainedModule:
            return ExplainedModule(**{name: values[name] for name in COLUMNS if name in values})

        return cls(
            str(stored["model"]), tuple(map(row_of, stored["rows"])), tuple(stored.get("notes", ()))
        )

    def __str__(self) -> str:
        from rich.console import Console, Group
        from rich.text import Text

        parts: list[Any] = [Text(self._headline())]
        groups = _grouped(self.rows)
        attentions = [
            group for group in groups if group[0].kind == "attention" and group[0].backend
        ]
        mlps = [group for group in groups if group[0].kind == "MLP"]
        if attentions:
            parts.append(_attention_table(attentions))
        if mlps:
            parts.append(_mlp_table(mlps))
        for group in groups:
            row = group[0]
            if row.reason:
                code = f" [{row.code}]" if row.code else ""
                parts.append(Text(f"{row.status}: {_title(group)}: {row.reason}{code}"))
        parts += map(Text, self.notes)
        console = Console(
            width=_WIDTH_COLUMNS, color_system=None, force_terminal=False, force_jupyter=False
        )
        with console.capture() as captured:
            console.print(Group(*parts))
        return "\n".join(line.rstrip() for line in captured.get().strip().splitlines())

    def _headline(self) -> str:
        attentions = [row for row in self.rows if row.kind == "attention"]
        refused = sum(row.status == REFUSED for row in attentions)
        mlps = sum(row.kind == "MLP" for row in self.rows)
        text = f"{self.model}: {_counted(len(attentions), 'attention')}, {_counted(mlps, 'MLP')}"
        return f"{text}; {refused} refused" if refused else text

    def _repr_html_(self) -> str:
        header = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        rows = []
        for row in self.rows:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells_of(row))
            rows.append(f"<tr>{cells}</tr>")
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        table = f"<table><tr>{header}</tr>{''.join(rows)}</table>"
        return f"<p>{escape(self._headline())}</p>{table}{notes}"


def cells_of(row: ExplainedModule) -> list[str]:
    """Return the values of a row as text."""
    cells = []
    for name, value in asdict(row).items():
        if value is None:
            cells.append("")
        elif name == "error":
            cells.append(f"{value:.1e}")
        else:
            cells.append(str(value))
    return cells


def write_explanation(folder: Path, explanation: Explanation) -> None:
    """Write the file, whole."""
    write_json(folder / EXPLANATION, explanation.to_json())


def read_explanation(folder: Path) -> Explanation | None:
    """Return what a run recorded; None if it recorded none."""
    path = folder / EXPLANATION
    if not path.exists():
        return None
    try:
        return Explanation.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged ({error}): delete it; the other files of the run do not need it"
        ) from None


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _grouped(rows: Sequence[ExplainedModule]) -> list[list[ExplainedModule]]:
    """Return groups of rows that differ in the numbers in their module's name and in their error only."""
    groups: dict[tuple[Any, ...], list[ExplainedModule]] = {}
    for row in rows:
        values = asdict(row)
        del values["error"]
        for name in ("module", "matrices"):
            values[name] = re.sub(r"\d+", "*", values[name])
        groups.setdefault(tuple(values.items()), []).append(row)
    return list(groups.values())


def _title(group: Sequence[ExplainedModule]) -> str:
    """Return the module's name with the class; of several, the first and the last."""
    name = group[0].module
    if len(group) > 1:
        name = f"{name} … {group[-1].module}, {len(group)} modules"
    return f"{name} ({group[0].class_name})"


def _attention_table(groups: Sequence[Sequence[ExplainedModule]]) -> Table:
    table = _table(("attention", 31), ("heads", 21), ("mask and padding", 25), ("verified", 15))
    for group in groups:
        row = group[0]
        calls = f"{row.calls} calls per pass" if row.calls > 1 else ""
        errors = [one.error for one in group if one.error is not None]
        error = f"within {max(errors):.1e}" if errors else ""
        heads = "not certain" if row.heads is None else str(row.heads)
        if row.status == REFUSED:
            heads = REFUSED
        mask = f"{row.mask}: hides {row.hides}" if row.hides else row.mask
        padded = "" if row.padded is None else f"padded: {row.padded:,} of {row.queries:,} queries"
        evidence = f"by {row.padding_evidence}" if row.padded else ""
        matrices = f"matrices {row.matrices}" if row.matrices else ""
        table.add_row(
            _lines(*_short_title(group), row.backend, calls, matrices),
            _lines(heads, row.evidence, row.axes),
            _lines(mask, padded, evidence),
            _lines(error, row.check),
        )
    return table


def _mlp_table(groups: Sequence[Sequence[ExplainedModule]]) -> Table:
    table = _table(("MLP", 30), ("lower → upper matrix", 44), ("found by", 23))
    for group in groups:
        row = group[0]
        evidence = REFUSED if row.status == REFUSED else row.evidence
        table.add_row(_lines(*_short_title(group)), row.matrices, evidence)
    return table


def _short_title(group: Sequence[ExplainedModule]) -> list[str]:
    title = [group[0].module]
    if len(group) > 1:
        title += [f"… {group[-1].module}", f"{len(group)} modules"]
    return [*title, group[0].class_name]


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _table(*columns: tuple[str, int]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_lines=False, highlight=False)
    for title, width in columns:
        table.add_column(title, max_width=width, overflow="fold")
    return table
