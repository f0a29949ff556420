"""`joma gauges`: what can be measured, and one gauge in full."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import help
from joma.cli.terminal import AsJson, console, escape, print_facts, print_json, print_table, say

if TYPE_CHECKING:
    from rich.console import Console

    from joma._measure.gauges.registry import Gauge

_PARTS_OF = {
    "matrices": "weights; gradients, updates and changes (not qk, vo), as stable_rank.qk; mlp_in if none is named",
    "charges": "charges, as charge.vo; qk if none is named",
}


def _gauges(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Explain this gauge: entropy, stable_rank.qk, …",
            show_default="a list of all",
            autocompletion=help.gauge,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the gauges, those in common use first, or explain one of them."""
    from joma._measure.gauges.registry import get

    if name is not None:
        (gauge,) = get([name])
        facts = _facts(gauge)
        if as_json:
            print_json(facts)
        else:
            _explain(facts, console())
        return
    rows = _rows()
    if as_json:
        from joma.models.parts import CHARGES, PARTS

        print_json({"gauges": rows, "parts": PARTS, "charges": CHARGES})
    else:
        _list(rows, console())


def defaults() -> dict[str, list[str]]:
    """Return gauge -> the commands that measure it unless they are told which; of `joma watch`, the function."""
    from joma._checkpoints.scan import DEFAULT_GAUGES as SCAN
    from joma._measure.watch.options import DEFAULT_GAUGES as WATCH
    from joma._train.settings import Settings

    commands: dict[str, list[str]] = {}
    for command, names in (("watch", WATCH), ("scan", SCAN), ("train", Settings().gauges)):
        for name in names:
            commands.setdefault(name, []).append(command)
    return commands


def _rows() -> list[dict[str, Any]]:
    """Return one row per gauge: what more commands measure by default first, then by what it is measured on."""
    from joma._measure.gauges.kinds import KINDS
    from joma._measure.gauges.registry import gauges

    default_of = defaults()
    kinds = list(KINDS)

    def place(gauge: Gauge) -> tuple[int, int]:
        return -len(default_of.get(gauge.name, ())), kinds.index(gauge.on)

    rows = []
    for gauge in sorted(gauges().values(), key=place):
        rows.append(
            {
                "gauge": gauge.name,
                "default": default_of.get(gauge.name, []),
                "on": gauge.on,
                "help": gauge.help,
            }
        )
    return rows


def _list(rows: list[dict[str, Any]], out: Console) -> None:
    from joma.models.parts import CHARGES, PARTS

    lines = []
    for row in rows:
        default = ", ".join(row["default"])
        lines.append([escape(cell) for cell in (row["gauge"], default, row["on"], row["help"])])
    print_table(out, ("gauge", "default of", "measured on", "*what it is"), lines)
    for parts, measured_on in zip((PARTS, CHARGES), _PARTS_OF.values(), strict=True):
        out.print(f"\n[bold]Parts[/bold] for gauges measured on {measured_on}\n")
        lines = [[part, escape(text)] for part, text in parts.items()]
        print_table(out, ("part", "*what it is"), lines)
    out.print("\nOne of them in full: joma gauges entropy", highlight=False)


def _facts(gauge: Gauge) -> dict[str, Any]:
    """Return all that is known of a gauge."""
    name = gauge.name.partition(".")[0]
    return {
        "gauge": gauge.name,
        "help": gauge.help,
        "details": inspect.getdoc(gauge.function) or "",
        "on": gauge.on,
        "receives": gauge.kind.receives,
        "part": gauge.part or None,
        "parts": dict(gauge.kind.parts),
        "per": "head" if gauge.per_head else "layer",
        "reduce": gauge.reduce,
        "is_averaged_over": gauge.kind.is_averaged_over or None,
        "default": defaults().get(name, []),
        "in_training": not gauge.kind.needs_two_checkpoints,
        "in_scans": not gauge.needs_steps,
    }


def _explain(facts: dict[str, Any], out: Console) -> None:
    name = facts["gauge"]
    measured_on = f"{facts['on']}: {facts['receives']}"
    averaged = ""
    if facts["is_averaged_over"]:
        reduced = "mean" if facts["reduce"] == "mean" else "largest value"
        averaged = f", {reduced} over {facts['is_averaged_over']}"
    uses = []
    if facts["in_training"]:
        uses.append(f'joma.watch(model, gauges="{name}")')
    if facts["in_scans"]:
        uses.append(f"joma scan checkpoints/ --gauges {name}")
    say(name, out, "bold")
    lines = {
        "what it is": escape(" ".join(facts["details"].split()) or facts["help"]),
        "measured on": escape(measured_on),
        "part": escape(facts["parts"].get(facts["part"], "")),
        "values": f"one per {facts['per']}{averaged}",
        "default of": ", ".join(facts["default"]),
        "use": escape(" or ".join(uses)),
    }
    print_facts(out, lines)
    if facts["parts"]:
        stem = name.partition(".")[0]
        example = list(facts["parts"])[1]
        out.print(f"\n[bold]Parts[/bold], as {stem}.{example}\n")
        rows = [(part, escape(text)) for part, text in facts["parts"].items()]
        print_table(out, ("part", "*what it is"), rows)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("gauges")(_gauges)
