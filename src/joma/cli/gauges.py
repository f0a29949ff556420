"""`joma gauges`: what can be measured."""

from __future__ import annotations

import typer

from joma.cli.terminal import AsJson, console, escape, print_json, print_table


def _gauges(as_json: AsJson = False) -> None:
    """List the gauges by name, and the parts of a model that gauges of matrices and of charges can be measured on."""
    from joma._measure.gauges.registry import gauges as registered
    from joma.models.parts import CHARGES, PARTS

    table = [
        {"gauge": gauge.name, "on": gauge.on, "help": gauge.help} for gauge in registered().values()
    ]
    if as_json:
        print_json({"gauges": table, "parts": PARTS, "charges": CHARGES})
        return
    out = console()
    print_table(
        out,
        ("gauge", "measured on", "*what it is"),
        [list(map(escape, row.values())) for row in table],
    )
    about = {
        "weights; gradients, updates and changes (not qk, vo), as stable_rank.qk; mlp_in if none is named": PARTS,
        "charges, as charge.vo; qk if none is named": CHARGES,
    }
    for measured_on, parts in about.items():
        out.print(f"\n[bold]Parts[/bold] for gauges measured on {measured_on}\n")
        print_table(
            out, ("part", "*what it is"), [(part, escape(what)) for part, what in parts.items()]
        )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gauges")(_gauges)
