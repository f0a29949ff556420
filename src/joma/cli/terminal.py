"""What commands print with: one console, one table, one JSON.

A table shows all of every cell at any width. Names and numbers stand on one line; prose is wrapped; where that is too
wide for the terminal, each row becomes a list of its cells. A pipe has no width, unless ``COLUMNS`` gives it one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNLIMITED = 100_000  # columns: the width of a pipe
_KINDS = ">*~"  # of columns
_PROSE = 24  # columns that prose is readable in
_GAP = 2  # columns between two columns of a table

AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, with all digits, instead of text.")
]

VERDICT_STYLE = {
    "holds": "green",
    "wrong as printed, corrected": "yellow",
    "holds under a condition": "yellow",
    "reproduces; does not discriminate": "yellow",
    "inconclusive": "bright_black",
    "fails": "red",
    "error": "bold red",
}


def console(*, stderr: bool = False) -> Console:
    """What a command prints to: without control characters in a pipe and under ``NO_COLOR``."""
    from rich.console import Console

    out = Console(
        highlight=False, stderr=stderr, color_system=None if os.environ.get("NO_COLOR") else "auto"
    )
    if not out.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        out.width = UNLIMITED
    return out


def say(text: str, out: Console | None = None, style: str | None = None) -> None:
    """Print a line as it is, without markup, and without line breaks that would be copied with it."""
    (out or console()).print(text, style=style, markup=False, soft_wrap=True)


def tell_newest(run: Path) -> None:
    """Say so if a later run of the same name was given a number."""
    from joma._runs.folder import newest

    if (last := newest(run)) != run:
        say(f"the newest run of this name is {last}")


def print_json(value: object) -> None:
    """JSON on standard output; NaN and infinities are strings, as in run folders."""
    from joma._runs.files import plain

    typer.echo(json.dumps(plain(value), indent=1, ensure_ascii=False))


def print_table(
    out: Console, columns: Sequence[str], rows: Iterable[Sequence[str] | str], caption: str = ""
) -> None:
    """Print rows of cells, which may have markup; columns in which all cells are empty are left out.

    Arguments:
        out: where to.
        columns: their names: ">name" is flushed right, for numbers; "*name" is prose and "~name" a few words, which
            may be wrapped.
        rows: a cell per column each, the first one names the row; or a string, which is a heading for those below it.
        caption: a line below.
    """
    parts: list[tuple[str, list[Sequence[str]]]] = [("", [])]  # heading, rows
    for row in rows:
        if isinstance(row, str):
            parts.append((row, []))
        else:
            parts[-1][1].append(row)
    cells = [row for _, below in parts for row in below]
    shown = [n for n in range(len(columns)) if n == 0 or any(row[n] for row in cells)]
    columns = [columns[n] for n in shown]
    widths = _widths(columns, [[row[n] for n in shown] for row in cells], out.width)
    if widths is not None:
        _print(out, _across(columns, [], widths, header=True))
    for number, (heading, below) in enumerate(parts):
        if heading:
            out.print("\n" * (number > 1 or widths is not None) + f"[bold]{heading}[/bold]")
        chosen = [[row[n] for n in shown] for row in below]
        if widths is not None:
            _print(out, _across(columns, chosen, widths, header=False))
            continue
        for n, table in enumerate(_down(columns, chosen)):
            out.print("\n" * (n > 0), end="")
            _print(out, table)
    if caption:
        out.print(caption, style="dim", markup=False)


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """The width of each column: all that it asks for, or what wrapping leaves; None if there is not room enough."""
    from rich.cells import cell_len
    from rich.text import Text

    asked, least = [], []
    for n, column in enumerate(columns):
        texts = [column.lstrip(_KINDS), *(Text.from_markup(row[n]).plain for row in cells)]
        asked.append(max(map(cell_len, texts)))
        words = max((cell_len(word) for text in texts for word in text.split()), default=0)
        least.append({"*": min(asked[-1], _PROSE), "~": words}.get(column[0], asked[-1]))
    left = room - _GAP * (len(columns) - 1) - sum(least)
    if left < 0:
        return None
    wraps = sorted(
        (n for n in range(len(columns)) if asked[n] > least[n]), key=lambda n: asked[n] - least[n]
    )
    for done, n in enumerate(wraps):  # the smallest wishes first; what they leave is for the others
        given = min(asked[n] - least[n], left // (len(wraps) - done))
        least[n], left = least[n] + given, left - given
    return least


def _across(
    columns: Sequence[str], cells: Sequence[Sequence[str]], widths: Sequence[int], *, header: bool
) -> Table:
    """A line per row."""
    from rich.table import Table

    table = Table(
        box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0), show_header=header
    )
    for column, width in zip(columns, widths, strict=True):
        justify: Any = "right" if column[0] == ">" else "left"
        table.add_column(column.lstrip(_KINDS), justify=justify, width=width, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def _down(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[Table]:
    """A list per row."""
    names = [column.lstrip(_KINDS) for column in columns]
    names[1:] = [f"  {name}" for name in names[1:]]
    for row in cells:
        yield _list(dict(zip(names, row, strict=True)))


def _list(facts: Mapping[str, str]) -> Table:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(no_wrap=True, style="bold", min_width=max(map(len, facts), default=0))
    table.add_column(overflow="fold")
    for name, text in facts.items():
        if text:
            table.add_row(name, text)
    return table


def print_facts(out: Console, facts: Mapping[str, str]) -> None:
    """Print names with what there is to say of them, which may have markup; empty ones are left out."""
    _print(out, _list(facts))


def _print(out: Console, table: Table) -> None:
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    # in a pipe, without the blanks that fill up the last column
    out.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def show_number(value: float | None, digits: int = 4) -> str:
    """A number as tables show it; empty where there is none."""
    return "" if value is None else "NaN" if value != value else f"{value:.{digits}g}"


def escape(text: str) -> str:
    """Text that rich prints as it is."""
    from rich.markup import escape as escaped

    return escaped(text)


def styled(verdict: str) -> str:
    """A verdict in its colour."""
    return f"[{VERDICT_STYLE[verdict]}]{verdict}[/]"
