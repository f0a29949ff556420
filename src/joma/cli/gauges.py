"""`joma gauges`: what can be measured."""

from __future__ import annotations

import typer

from joma.cli.terminal import escape, plain_table


def _gauges() -> None:
    """List the gauges by name, and the parts of a model that gauges of matrices and of charges can be measured on."""
    from rich.console import Console

    from joma._gauges.registry import CHARGES, PARTS
    from joma._gauges.registry import gauges as registered

    console = Console(highlight=False)
    table = plain_table("gauge", "measured on", "*what it is")
    for gauge in registered().values():
        table.add_row(gauge.name, gauge.on, escape(gauge.help))
    console.print(table)
    about = {
        "weights, gradients (not qk) and updates (not qk), as stable_rank.qk; mlp_in if none is named": PARTS,
        "charges, as charge.vo; qk if none is named": CHARGES,
    }
    for measured_on, parts in about.items():
        console.print(f"\n[bold]Parts[/bold] for gauges measured on {measured_on}\n")
        table = plain_table("part", "*what it is")
        for part, what in parts.items():
            table.add_row(part, escape(what))
        console.print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gauges")(_gauges)
