"""The table of `joma.explain`: one row per attention and per MLP of a model.

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

from joma._runs.files import write_json
from joma._runs.folder import RunError

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

EXPLANATION = "explain.json"

MEASURED = "measured"
LAYER_ONLY = "layer only"
PART_OF_QUERIES = "part of queries"
REFUSED = "refused"

_PRINTED_WIDTH = 100  # columns of a terminal

# Titles and widths of the printed tables. A column takes two more for the space around it.
_ATTENTION_COLUMNS = {"attention": 28, "heads": 21, "mask and padding": 25, "verified": 15}
_MLP_COLUMNS = {"MLP": 37, "lower → upper matrix": 36, "found by": 21}


@dataclass(frozen=True)
class ExplainedModule:
    """One attention or one MLP of a model, and how joma reads it.

    Attributes:
        module: its name in the model; "name/1" for a second attention in one call.
        kind: "attention" or "MLP".
        class_name: the class of the module.
        status: "measured", "layer only" (heads are not certain), "part of queries" or "refused".
        calls: number of its attentions in one pass; more than one if layers share a module.
        backend: the function that computes the attention.
        axes: the axes of queries and keys in the module's own order, with their sizes.
        heads: the number of heads; None if they are not certain.
        evidence: what shows which axis holds the heads, or that two maps are an MLP.
        mask: the form in which the mask is applied.
        hides: the keys that it hides.
        queries: the number of queries, samples × tokens.
        padded: the number of queries that are padding and left out.
        padding_evidence: what shows which queries are padding.
        check: how the attention was verified; "" if it could not be.
        error: the largest difference in that check, relative to the largest number compared.
        matrices: the matrices that weight gauges can be measured on.
        code: the reason for a refusal or a measurement in part, as a code of the documentation.
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

    @property
    def is_attention(self) -> bool:
        """True for an attention, False for an MLP."""
        return self.kind == "attention"

    def to_json(self) -> dict[str, Any]:
        """Return the values that differ from the defaults."""
        values = {}
        for column in fields(self):
            value = getattr(self, column.name)
            if value != column.default:
                values[column.name] = value
        return values

    def cells(self) -> list[str]:
        """Return all values as text, in the order of `COLUMNS`."""
        cells = []
        for name in COLUMNS:
            value = getattr(self, name)
            if value is None:
                cells.append("")
            elif name == "error":
                cells.append(f"{value:.1e}")
            else:
                cells.append(str(value))
        return cells


COLUMNS = tuple(column.name for column in fields(ExplainedModule))


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
        types = dict.fromkeys(["calls", "heads", "queries", "padded"], "Int64")
        return table.astype({**types, "error": "float64"})

    def to_json(self) -> dict[str, Any]:
        """Return the table in JSON's own types."""
        rows = [row.to_json() for row in self.rows]
        return {"model": self.model, "rows": rows, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Explanation:
        """Return what `to_json` gave; columns of a later version are left out."""
        rows = []
        for values in stored["rows"]:
            rows.append(
                ExplainedModule(**{name: values[name] for name in COLUMNS if name in values})
            )
        return cls(str(stored["model"]), tuple(rows), tuple(stored.get("notes", ())))

    def __str__(self) -> str:
        from rich.console import Console, Group
        from rich.text import Text

        groups = _grouped(self.rows)
        attentions = [group for group in groups if group.first.is_attention and group.first.backend]
        mlps = [group for group in groups if not group.first.is_attention]
        parts: list[Any] = [Text(self._headline())]
        if attentions:
            parts.append(_attention_table(attentions))
        if mlps:
            parts.append(_mlp_table(mlps))
        parts += [Text(group.sentence()) for group in groups if group.first.reason]
        parts += [Text(note) for note in self.notes]
        console = Console(
            width=_PRINTED_WIDTH, color_system=None, force_terminal=False, force_jupyter=False
        )
        with console.capture() as captured:
            console.print(Group(*parts))
        return "\n".join(line.rstrip() for line in captured.get().strip().splitlines())

    def _headline(self) -> str:
        attentions = [row for row in self.rows if row.is_attention]
        mlps = len(self.rows) - len(attentions)
        refused = sum(row.status == REFUSED for row in attentions)
        text = f"{self.model}: {_counted(len(attentions), 'attention')}, {_counted(mlps, 'MLP')}"
        if refused:
            text += f"; {_counted(refused, 'attention')} refused"
        return text

    def _repr_html_(self) -> str:
        header = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        rows = []
        for row in self.rows:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells())
            rows.append(f"<tr>{cells}</tr>")
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        table = f"<table><tr>{header}</tr>{''.join(rows)}</table>"
        return f"<p>{escape(self._headline())}</p>{table}{notes}"


def write_explanation(folder: Path, explanation: Explanation) -> None:
    """Replace the file of a run folder."""
    write_json(folder / EXPLANATION, explanation.to_json())


def read_explanation(folder: Path) -> Explanation | None:
    """Return the table that a run recorded; None if it recorded none."""
    path = folder / EXPLANATION
    if not path.exists():
        return None
    try:
        return Explanation.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} is damaged ({error}): delete it; the other files of the run do not need it"
        ) from None


# The printed table


@dataclass(frozen=True)
class ModuleGroup:
    """Rows that differ only in the numbers in their names and in their errors."""

    rows: list[ExplainedModule]

    @property
    def first(self) -> ExplainedModule:
        return self.rows[0]

    @property
    def name(self) -> str:
        """The name of all modules, as "layers.0–11.attn"."""
        return _merged_names([row.module for row in self.rows])

    @property
    def class_name(self) -> str:
        """The class with the number of modules; "" if it would repeat the name of one module."""
        if len(self.rows) > 1:
            return f"{len(self.rows)} × {self.first.class_name}"
        if self.first.class_name == self.first.module:
            return ""
        return self.first.class_name

    def sentence(self) -> str:
        """Return status, name and reason."""
        title = self.name
        if self.class_name:
            title += f" ({self.class_name})"
        sentence = f"{self.first.status}: {title}: {self.first.reason}"
        if self.first.code:
            sentence += f" [{self.first.code}]"
        return sentence


def _grouped(rows: Sequence[ExplainedModule]) -> list[ModuleGroup]:
    groups: dict[tuple[Any, ...], ModuleGroup] = {}
    for row in rows:
        values = asdict(row)
        values["error"] = row.error is None
        for name in ("module", "matrices", "reason"):
            values[name] = re.sub(r"\d+", "*", values[name])
        groups.setdefault(tuple(values.values()), ModuleGroup([])).rows.append(row)
    return list(groups.values())


def _merged_names(names: Sequence[str]) -> str:
    """Return one name for names that differ in their numbers only.

    >>> _merged_names(["layers.0.attn", "layers.1.attn", "layers.2.attn"])
    'layers.0–2.attn'
    >>> _merged_names(["blocks.1", "blocks.3", "blocks.5"])
    'blocks.1,3,5'
    """
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(_merged_part(list(dict.fromkeys(column))) for column in columns)


def _merged_part(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    numbers = [int(part) for part in parts]
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}–{numbers[-1]}"
    if len(numbers) > 6:  # a longer list says less than its ends
        return f"{numbers[0]}…{numbers[-1]}"
    return ",".join(parts)


def _attention_table(groups: Sequence[ModuleGroup]) -> Table:
    table = _empty_table(_ATTENTION_COLUMNS)
    for group in groups:
        row = group.first
        name = _broken_name(group.name, _ATTENTION_COLUMNS["attention"])
        table.add_row(
            _lines(name, group.class_name, row.backend, _calls(row), _matrices(row)),
            _lines(_heads(row), row.evidence, row.axes),
            _lines(_mask(row), _padding(row)),
            _verified(group),
        )
    return table


def _calls(row: ExplainedModule) -> str:
    if row.calls == 1:
        return ""
    return f"{row.calls} calls per pass"


def _matrices(row: ExplainedModule) -> str:
    if not row.matrices:
        return ""
    return f"matrices {row.matrices}"


def _heads(row: ExplainedModule) -> str:
    if row.status == REFUSED:
        return REFUSED
    if row.heads is None:
        return "not certain"
    return str(row.heads)


def _mask(row: ExplainedModule) -> str:
    if not row.hides:
        return row.mask
    return f"{row.mask}: hides {row.hides}"


def _padding(row: ExplainedModule) -> str:
    if row.padded is None:
        return ""
    text = f"padded: {row.padded:,} of {row.queries:,} queries"
    if row.padded:
        text += f"\nby {row.padding_evidence}"
    return text


def _verified(group: ModuleGroup) -> str:
    row = group.first
    if not row.check:
        return "not verified"
    errors = [other.error for other in group.rows if other.error is not None]
    if not errors:
        return row.check
    largest = max(errors)
    if largest == 0:
        return f"exact\n{row.check}"
    return f"within {largest:.1e}\n{row.check}"


def _mlp_table(groups: Sequence[ModuleGroup]) -> Table:
    table = _empty_table(_MLP_COLUMNS)
    for group in groups:
        row = group.first
        evidence = row.evidence
        if row.status == REFUSED:
            evidence = REFUSED
        name = _broken_name(group.name, _MLP_COLUMNS["MLP"])
        # Names inside the module, which the first column already names.
        matrices = [part.removeprefix(f"{row.module}.") for part in row.matrices.split(" → ")]
        table.add_row(_lines(name, group.class_name), " → ".join(matrices), evidence)
    return table


def _empty_table(columns: Mapping[str, int]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_lines=False, highlight=False)
    for title, width in columns.items():
        table.add_column(title, max_width=width, overflow="fold")
    return table


def _broken_name(name: str, width: int) -> str:
    """Return the name of a module with line breaks behind dots, so that no line is too long."""
    lines = [""]
    for part in re.findall(r"[^.]+\.?|\.", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _counted(count: int, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}s"
