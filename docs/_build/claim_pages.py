"""docs/claims.md, docs/errata.md and the README's table of claims, made from the results of all claims."""

from __future__ import annotations

from joma.theory.claims import Result
from joma.theory.verdict import Verdict


def cell(text: str | None) -> str:
    """``text`` for a Markdown table."""
    return (text or "").replace("|", "\\|")


def full_table(results: list[Result]) -> str:
    """docs/claims.md: each claim with its statement, verdict, correction, derivation and control."""
    lines = [
        "# Claims",
        "",
        "Made by `make figures` from `joma claims`. Every check must also reject its control, a deliberately wrong "
        "variant of the statement.",
        "",
    ]
    for r in results:
        claim = r.claim
        lines += [f'<a id="{r.id}"></a>', "", f"## {r.id}: {r.verdict}", "", f"*{claim.source}.* {claim.statement}", ""]
        texts = {
            "Corrected": claim.correction,
            "Under": claim.condition,
            "Remark": claim.remark,
            "Why": claim.derivation,
        }
        for name, text in texts.items():
            if text:
                lines += [f"**{name}.** {text}.".replace("..", "."), ""]
        lines += [
            f"Measured: {claim.measures}: **{r.value:.2g}** "
            f"(tolerance {claim.tolerance:.2g}; as printed {r.printed_value:.2g}). "
            f"Control: {claim.control}: {r.control_value:.2g}, {'rejected' if r.control_rejected else 'NOT REJECTED'}.",
            "",
        ]
    return "\n".join(lines)


def errata(results: list[Result]) -> str:
    """docs/errata.md: where the printed formula and the derivation differ, and the number that decides."""
    lines = [
        "# Errata",
        "",
        "Made by `make figures` from the claims: every place where the paper's formula and the derivation differ. The "
        "numbers come from one and the same check, applied to both formulas.",
        "",
    ]
    for r in results:
        claim = r.claim
        if r.verdict is Verdict.HOLDS or not claim.paper_formula:
            continue
        lines += [f"## {claim.source} (`{r.id}`): {r.verdict}", ""]
        lines += [f"**Printed.** {claim.paper_formula}", "", f"**Derived.** {claim.corrected_formula}", ""]
        lines += [f"**Derivation.** {claim.derivation}", ""]
        decides = f"{claim.measures}: as printed **{r.printed_value:.2g}**, tolerance {claim.tolerance:.2g}"
        if r.verdict is not Verdict.FAILS:
            decides += f", as derived **{r.value:.2g}**"
        lines += [f"**Decides.** {decides}.", ""]
    return "\n".join(lines)


def short_table(results: list[Result]) -> str:
    """The README's table."""
    lines = ["| claim | the paper says | verdict | error / tolerance |", "|---|---|---|--:|"]
    for r in results:
        numbers = f"{r.value:.2g} / {r.claim.tolerance:.2g}"
        lines.append(f"| `{r.id}` | {cell(r.claim.statement)} | {r.verdict} | {numbers} |")
    return "\n".join(lines)
