"""`joma claims`: the paper's statements, checked."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from joma._extras import require
from joma.cli import help
from joma.cli.maths import plain_maths
from joma.cli.terminal import (
    AsJson,
    console,
    escape,
    print_facts,
    print_json,
    print_table,
    show_number,
    styled,
)

if TYPE_CHECKING:
    from joma.paper.claims import Claim, Result


def _claims(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            help="Claims or groups of them: T2.invariant, T4.",
            show_default="all",
            autocompletion=help.claims,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the paper's statements: verdict, deciding number, and a control that must be rejected."""
    require("theory", "joma claims")
    from joma.paper import claims as registry

    chosen = registry.get(ids) if ids else registry.claims()
    results = []
    with console(stderr=True).status("") as status:
        for n, claim in enumerate(chosen, 1):
            status.update(f"checking {claim.id} ({n} of {len(chosen)})")
            results.append(registry.check(claim))
    if as_json:
        print_json([result.as_dict() for result in results])
    elif len(results) == 1:
        _explain(results[0])
    else:
        _claims_table(results)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def _number(value: float | None) -> str:
    return show_number(value, digits=2) or "–"


def _counts(words: Iterable[str]) -> str:
    """How often each word occurs: "29 holds, 1 fails"."""
    return ", ".join(f"{n} {word}" for word, n in Counter(words).items())


def _claims_table(results: list[Result]) -> None:
    rows: list[Sequence[str] | str] = []
    notes: list[Sequence[str]] = []
    about = ""
    for r in results:
        if (subject := _subject(r.claim)) != about:
            about = subject
            rows.append(escape(subject))
        control = "rejected" if r.control_rejected else "[red]NOT REJECTED[/red]"
        numbers = (_number(r.value), _number(r.claim.tolerance))
        rows.append((r.id, styled(r.verdict), r.claim.kind.value, *numbers, control))
        if r.note:
            notes.append((r.id, escape(r.note)))
    out = console()
    print_table(out, ("claim", "~verdict", "~kind", ">value", ">tolerance", "control"), rows)
    if notes:
        out.print("\n[bold]Corrections, conditions and remarks[/bold]")
        print_table(out, ("claim", "*note"), notes)
    out.print(f"\n{len(results)} claims: " + _counts(r.verdict for r in results))
    out.print("of kind: " + _counts(r.claim.kind for r in results))
    out.print(f"{sum(r.seconds for r in results):.1f} s. One in full: joma claims {results[0].id}")


def _subject(claim: Claim) -> str:
    """What a claim is about: the first line of its module, "Theorem 2: linear activations, winner takes all"."""
    module = sys.modules.get(getattr(claim.check, "__module__", ""))
    line = ((module and module.__doc__) or "").strip().split("\n")[0].rstrip(".")
    line = re.sub(r"\bon (?=Theorem|Eqn)", "", re.sub(r"^Claims (on )?", "", line))
    return line[:1].upper() + line[1:]


def _explain(result: Result) -> None:
    claim, out = result.claim, console()
    out.print(
        f"[bold]{claim.id}[/bold]  {styled(result.verdict)}, {claim.kind}   ({escape(claim.source)})\n"
    )
    rows = {
        "about": _subject(claim), "statement": claim.statement, "correction": claim.correction,
        "condition": claim.condition, "remark": claim.remark, "counterexample": claim.counterexample,
        "derivation": claim.derivation, "measured": claim.measures,
        "value": f"{_number(result.value)}  (tolerance {_number(claim.tolerance)}; {result.cases} cases)",
        "as printed": _number(result.printed_value),
        "control": f"{claim.control}: {_number(result.control_value)}, "
        + ("rejected" if result.control_rejected else "NOT REJECTED"),
        "error": result.error,
    }  # fmt: skip
    print_facts(out, {name: escape(plain_maths(text)) for name, text in rows.items() if text})


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("claims")(_claims)
