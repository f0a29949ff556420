"""What commands print with: verdicts in colour, and plain tables."""

from __future__ import annotations

from typing import Any

VERDICT_STYLE = {
    "holds": "green",
    "holds as corrected": "yellow",
    "holds under": "yellow",
    "reproduces; does not discriminate": "yellow",
    "not decided here": "bright_black",
    "fails": "red",
    "error": "bold red",
}


def plain_table(*columns: str) -> Any:
    """A plain table; a column that begins with ">" is flushed right, one with "*" takes what room there is."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        justify: Any = "right" if column[0] == ">" else "left"
        table.add_column(
            column.lstrip(">*"), justify=justify, no_wrap=column[0] != "*", ratio=1 if column[0] == "*" else None
        )
    return table


def escape(text: str) -> str:
    """Text that rich prints as it is."""
    from rich.markup import escape as escaped

    return escaped(text)


def styled(verdict: str) -> str:
    """A verdict in its colour."""
    return f"[{VERDICT_STYLE[verdict]}]{verdict}[/]"
