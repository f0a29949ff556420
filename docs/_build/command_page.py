"""The table of commands in docs/commands.md, from the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from joma.cli import app
from joma.cli.help import EXAMPLES

PANELS = ("Start", "Watch", "Measure", "Theory", "Paper")
# Every command has these, or they are explained once above the table.
COMMON = ("--help", "--json", "--force", "--open")
MAX_OPTIONS = 6


def commands() -> dict[str, Any]:
    """Return all commands by name, in the order of `joma --help`."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def options(command: Any) -> Iterator[Any]:
    """Yield the options of a command that are not common to all."""
    for param in command.params:
        if param.param_type_name == "option" and not set(param.opts) & set(COMMON):
            yield param


def words(text: str) -> str:
    """Return help as a cell of a table: one line."""
    return " ".join(text.split()).replace("|", r"\|")


def described(option: Any) -> str:
    """Return the name of an option with the first sentence of its help."""
    name = option.opts[0]
    text = words(option.help or "").rstrip(".")
    sentence = text.split(". ")[0]
    return f"`{name}`: {sentence}"


def row(name: str, command: Any) -> str:
    """Return a command with its sentence, its example and its main options."""
    all_options = list(options(command))
    cells = [described(option) for option in all_options[:MAX_OPTIONS]]
    left_out = len(all_options) - len(cells)
    if left_out:
        cells.append(f"{left_out} more in `joma {name} --help`")
    summary = words((command.help or "").split("\n\n")[0])
    return f"| `joma {name}` | {summary} | `{EXAMPLES[name]}` | {'<br>'.join(cells) or '–'} |"


def table() -> str:
    """Return one table per group of commands."""
    by_panel: dict[str, list[str]] = {panel: [] for panel in PANELS}
    for name, command in commands().items():
        by_panel[command.rich_help_panel].append(row(name, command))
    lines = []
    for panel, rows in by_panel.items():
        lines += [f"## {panel}", "", "| command | what it does | for example | main options |"]
        lines += ["|---|---|---|---|", *rows, ""]
    return "\n".join(lines).rstrip()
