"""docs/claims.md and docs/errata.md, made from the results of all claims."""

from __future__ import annotations

from joma.paper.claims import Kind, Result
from joma.paper.verdict import Verdict

LISTS = {
    Kind.WRONG: (
        "Wrong as printed",
        "Formulas of the paper that a counterexample refutes, each with the place where it stands, the counterexample, and the "
        "formula that the derivation gives. One and the same check is applied to both.",
    ),
    Kind.UNSAID: (
        "Conditions left unsaid",
        "Statements that hold under a condition which the paper does not name.",
    ),
    Kind.EXTENSION: (
        "Extensions of ours",
        "Not errata: what holds beyond the paper's setting (many queries, heads, trained embeddings, rates and temperature, tokens "
        "that share only the class, softmax's exact laws, the end of training, optimisers, blocks trained without attention, a lemma of GaLore that builds on JoMA). The paper says nothing to the contrary.",
    ),
}


def cell(text: str | None) -> str:
    """``text`` for a Markdown table."""
    return (text or "").replace("|", "\\|")


def sentence(text: str) -> str:
    """``text`` with one full stop at its end."""
    return text.rstrip(".") + "."


def full_table(results: list[Result]) -> str:
    """docs/claims.md: each claim with its statement, verdict, correction, derivation and control."""
    lines = [
        "# Claims",
        "",
        "Made by `make figures` from `joma claims`. Every check must also reject its control, a deliberately wrong "
        "variant of the statement, and all mutants of it that the claim declares (`make mutate`). The kind says what a "
        "claim is about: a statement that holds *as printed*, a formula that is *wrong as printed*, a *condition left "
        "unsaid*, or an *extension of ours*; the [errata](errata.md) keep the last three apart.",
        "",
        *short_table(results),
        "",
    ]
    for r in results:
        claim = r.claim
        lines += [f'<a id="{r.id}"></a>', "", f"## {r.id}: {r.verdict}", ""]
        lines += [f"*{claim.source}; {claim.kind}.* {claim.statement}", ""]
        texts = {
            "Corrected": claim.correction,
            "Under": claim.condition,
            "Remark": claim.remark,
            "Counterexample": claim.counterexample,
            "Why": claim.derivation,
        }
        lines += [part for name, text in texts.items() if text for part in (f"**{name}.** {sentence(text)}", "")]
        lines += [
            f"Measured: {claim.measures}: **{r.value:.2g}** "
            f"(tolerance {claim.tolerance:.2g}; as stated {r.printed_value:.2g}). "
            f"Control: {claim.control}: {r.control_value:.2g}, {'rejected' if r.control_rejected else 'NOT REJECTED'}. "
            f"Mutants: {len(claim.all_mutants())}.",
            "",
        ]
    return "\n".join(lines)


def errata(results: list[Result]) -> str:
    """docs/errata.md, in three lists: wrong as printed, conditions left unsaid, extensions of ours."""
    counts = {kind: sum(r.claim.kind is kind for r in results) for kind in Kind}
    lines = [
        "# Errata",
        "",
        "Made by `make figures` from the claims. Of the paper's statements that joma checks, "
        f"{counts[Kind.PRINTED]} hold as printed ([the claims](claims.md)), {counts[Kind.WRONG]} are wrong as printed and "
        f"{counts[Kind.UNSAID]} hold under a condition that is left unsaid; {counts[Kind.EXTENSION]} claims extend the paper.",
        "",
    ]
    for kind, (title, text) in LISTS.items():
        lines += [f"## {title}", "", text, ""]
        for r in results:
            if r.claim.kind is kind:
                lines += _entry(r)
    return "\n".join(lines)


def _entry(r: Result) -> list[str]:
    """One claim's part of the errata."""
    claim, kind = r.claim, r.claim.kind
    lines = [f"### {claim.source} (`{r.id}`): {r.verdict}", ""]
    first = "In the paper" if kind is Kind.EXTENSION else "Printed"
    second = {Kind.WRONG: "Correct", Kind.UNSAID: "Under the condition", Kind.EXTENSION: "Beyond it"}[kind]
    lines += [f"**{first}.** {claim.paper_formula}", ""]
    if claim.counterexample:
        lines += [f"**Counterexample.** {sentence(claim.counterexample)} Run it: `joma claims {r.id}`.", ""]
    lines += [f"**{second}.** {claim.corrected_formula}", "", f"**Derivation.** {claim.derivation}", ""]
    decides = f"{claim.measures}: "
    if kind is Kind.EXTENSION:
        decides += f"**{r.value:.2g}**, tolerance {claim.tolerance:.2g}; control ({claim.control}) {r.control_value:.2g}"
    else:
        name = "corrected" if r.verdict is Verdict.CORRECTED else "under the condition"
        decides += f"as printed **{r.printed_value:.2g}**, {name} **{r.value:.2g}**, tolerance {claim.tolerance:.2g}"
    return [*lines, f"**Decides.** {decides}.", ""]


def short_table(results: list[Result]) -> list[str]:
    """One line per claim."""
    lines = ["| claim | verdict | kind | error / tolerance |", "|---|---|---|--:|"]
    for r in results:
        numbers = f"{r.value:.2g} / {r.claim.tolerance:.2g}"
        lines.append(f"| [`{r.id}`](#{r.id}) | {r.verdict} | {r.claim.kind} | {numbers} |")
    return lines
