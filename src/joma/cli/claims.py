"""`joma claims`: the paper's statements, checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from joma.cli.terminal import escape, plain_table, styled

if TYPE_CHECKING:
    from joma.theory.claims import Result


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
        _explain(results[0])
    else:
        _claims_table(results)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _counts(words: Iterable[str]) -> str:
    """How often each word occurs: "29 holds, 1 fails"."""
    return ", ".join(f"{n} {word}" for word, n in Counter(words).items())


def _claims_table(results: list[Result]) -> None:
    from rich.console import Console

    table = plain_table("claim", "verdict", "kind", ">value", ">tolerance", "control")
    notes = plain_table("claim", "*note")
    notes.show_header = False
    for r in results:
        control = "rejected" if r.control_rejected else "[red]NOT REJECTED[/red]"
        numbers = (_number(r.value), _number(r.claim.tolerance))
        table.add_row(r.id, styled(r.verdict), r.claim.kind.value, *numbers, control)
        if r.note:
            notes.add_row(r.id, escape(r.note))
    console = Console()
    console.print(table)
    if notes.row_count:
        console.print("\n[bold]Corrections, conditions and remarks[/bold]")
        console.print(notes)
    console.print(f"\n{len(results)} claims: " + _counts(r.verdict for r in results))
    console.print("of kind: " + _counts(r.claim.kind for r in results))
    console.print(f"{sum(r.seconds for r in results):.1f} s. One in full: joma claims {results[0].id}", highlight=False)


def _explain(result: Result) -> None:
    from rich.console import Console
    from rich.table import Table

    claim, console = result.claim, Console(highlight=False)
    console.print(f"[bold]{claim.id}[/bold]  {styled(result.verdict)}, {claim.kind}   ({claim.source})\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)
    rows = {
        "statement": claim.statement, "correction": claim.correction, "condition": claim.condition,
        "remark": claim.remark, "counterexample": claim.counterexample, "derivation": claim.derivation,
        "measured": claim.measures,
        "value": f"{_number(result.value)}  (tolerance {_number(claim.tolerance)}; {result.cases} cases)",
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
