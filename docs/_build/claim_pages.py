"""docs/claims.md and docs/errata.md, made from the results of all claims."""

from __future__ import annotations

from joma.paper.claims import Kind, Result
from joma.paper.claims.roots import by_weight, counts_in_words
from joma.paper.verdict import Verdict

LISTS = {
    Kind.UNSAID: (
        "Conditions left unsaid",
        "Statements that hold under a condition which the paper does not name.",
    ),
    Kind.DRAFT: (
        "The appendix on graphs of nodes: a draft, and what it needs",
        "The multi-layer appendix is marked as a draft by its author, with notes on what is missing, so nothing in it is "
        "counted as an erratum. This is what its statements need.",
    ),
    Kind.EXTENSION: (
        "Extensions of ours",
        "Not errata: what holds beyond the paper's setting (many queries, heads, trained embeddings, rates and temperature, "
        "tokens that share only the class, softmax's exact laws, the end of training, optimisers, blocks trained without "
        "attention). The paper says nothing to the contrary.",
    ),
}
# What the two formulas of an entry are called.
FIRST = {
    Kind.WRONG: "Printed",
    Kind.UNSAID: "Printed",
    Kind.DRAFT: "In the draft",
    Kind.EXTENSION: "In the paper",
    Kind.OTHER: "In that paper",
}
SECOND = {
    Kind.WRONG: "Correct",
    Kind.UNSAID: "Under the condition",
    Kind.DRAFT: "What it needs",
    Kind.EXTENSION: "Beyond it",
    Kind.OTHER: "Correct",
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
        "unsaid*, an *extension of ours*, the *author's draft* of an appendix, or *another paper's* lemma; the "
        "[errata](errata.md) keep them apart.",
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
        lines += [
            part
            for name, text in texts.items()
            if text
            for part in (f"**{name}.** {sentence(text)}", "")
        ]
        lines += [
            f"Measured: {claim.measures}: **{r.value:.2g}** "
            f"(tolerance {claim.tolerance:.2g}; as stated {r.printed_value:.2g}). "
            f"Control: {claim.control}: {r.control_value:.2g}, {'rejected' if r.control_rejected else 'NOT REJECTED'}. "
            f"Mutants: {len(claim.all_mutants())}.",
            "",
        ]
    return "\n".join(lines)


def errata(results: list[Result]) -> str:
    """Return docs/errata.md: wrong as printed by root cause, conditions left unsaid, the draft appendix, extensions."""
    kinds = {kind: [r for r in results if r.claim.kind is kind] for kind in Kind}
    words = counts_in_words(r.claim for r in results)
    lines = [
        "# Errata",
        "",
        "Made by `make figures` from the claims. Errata are counted by root cause, since one slip can make several formulas "
        f"wrong. {words[0].upper()}{words[1:]}. {len(kinds[Kind.UNSAID])} statements need a condition that is left unsaid. "
        f"{len(kinds[Kind.PRINTED])} statements hold as printed ([the claims](claims.md)).",
        "",
        *_roots(kinds[Kind.WRONG]),
    ]
    for kind, (title, text) in LISTS.items():
        lines += [f"## {title}", "", text, ""]
        for r in kinds[kind]:
            lines += _entry(r)
    return "\n".join(lines)


def _roots(results: list[Result]) -> list[str]:
    """Return what is wrong as printed: one heading per weight, one per root cause, the claims below it."""
    lines = []
    for weight, roots in by_weight(r.claim for r in results).items():
        lines += [f"## Wrong as printed: {weight}", ""]
        for root in roots:
            lines += [f"### {root.title}", "", root.consequence, ""]
            for r in results:
                if r.claim.root == root.id:
                    lines += _entry(r)
    return lines


def galore(results: list[Result]) -> str:
    """Return docs/galore.md: a lemma of another paper."""
    lines = [
        "# A lemma of GaLore",
        "",
        "GaLore ([arXiv 2403.03507](https://arxiv.org/abs/2403.03507)) takes Theorem 2 of JoMA over to many nodes, in its Lemma "
        "B.6. The equations below are quoted from its first version on arXiv as they are known here. **They have not been "
        "checked against the printed text**, which is not at hand. They are no errata of JoMA and are not counted as such.",
        "",
    ]
    for r in results:
        if r.claim.kind is Kind.OTHER:
            lines += _entry(r)
    lines += [
        "The exhibit [`lowrank`](reproduce.md) measures on language models what the lemma is used for."
    ]
    return "\n".join(lines) + "\n"


def _entry(r: Result) -> list[str]:
    """One claim's part of the errata."""
    claim, kind = r.claim, r.claim.kind
    lines = [f"#### {claim.source} (`{r.id}`): {r.verdict}", ""]
    first = FIRST[kind]
    second = SECOND[kind]
    lines += [f"**{first}.** {claim.paper_formula}", ""]
    if claim.counterexample:
        lines += [
            f"**Counterexample.** {sentence(claim.counterexample)} Run it: `joma claims {r.id}`.",
            "",
        ]
    lines += [
        f"**{second}.** {claim.corrected_formula}",
        "",
        f"**Derivation.** {claim.derivation}",
        "",
    ]
    decides = f"{claim.measures}: "
    if kind in (Kind.EXTENSION, Kind.OTHER) or r.verdict is Verdict.HOLDS:
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
