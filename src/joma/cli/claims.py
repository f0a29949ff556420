"""`joma claims`: the paper's statements, checked."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from joma.cli.terminal import VERDICT_STYLE, escape, plain_table, styled


def _claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims or groups of them: T2.invariant, T4. All by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Check the paper's statements: verdict, deciding number, and a control that must be rejected."""
    from rich.console import Console

    from joma.theory import claims as registry

    chosen = registry.get(ids) if ids else registry.claims()
    console = Console(stderr=True)
    results = []
    with console.status("") as status:
        for n, claim in enumerate(chosen, 1):
            status.update(f"checking {claim.id} ({n} of {len(chosen)})")
            results.append(registry.check(claim))
    if as_json:
        typer.echo(json.dumps([result.as_dict() for result in results], indent=2, ensure_ascii=False))
    elif len(results) == 1:
        _explain(chosen[0], results[0])
    else:
        _claims_table(results)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _claims_table(results: list[Any]) -> None:
    from rich.console import Console

    table = plain_table("claim", "verdict", ">value", ">tolerance", "control")
    notes = plain_table("claim", "*note")
    notes.show_header = False
    for r in results:
        control = "rejected" if r.control_rejected else "[red]NOT REJECTED[/red]"
        table.add_row(r.id, styled(r.verdict), _number(r.value), _number(r.tolerance), control)
        if r.note:
            notes.add_row(r.id, escape(r.note))
    console = Console()
    console.print(table)
    if notes.row_count:
        console.print("\n[bold]Corrections and conditions[/bold]")
        console.print(notes)
    counts = {name: sum(r.verdict == name for r in results) for name in VERDICT_STYLE}
    console.print(f"\n{len(results)} claims: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    console.print(f"{sum(r.seconds for r in results):.1f} s. One in full: joma claims {results[0].id}", highlight=False)


def _explain(claim: Any, result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{claim.id}[/bold]  {styled(result.verdict)}   ({claim.source})\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)
    rows = {
        "statement": claim.statement, "correction": claim.correction, "condition": claim.condition,
        "derivation": claim.derivation,
        "measured": claim.measures, "value": f"{_number(result.value)}  (tolerance {_number(result.tolerance)})",
        "as printed": _number(result.printed_value),
        "control": f"{claim.control}: {_number(result.control_value)}, "
        + ("rejected" if result.control_rejected else "NOT REJECTED"),
        "error": result.error,
    }  # fmt: skip
    for name, text in rows.items():
        if text:
            table.add_row(name, escape(text))
    console.print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("claims")(_claims)
