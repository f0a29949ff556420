"""The claims as a table that can be filtered, corrections typeset."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from joma._report.document import LABELS, TONE, Page, badge, command
from joma._report.typeset import typeset
from joma.theory.verdict import Verdict

if TYPE_CHECKING:
    from joma.theory.claims import Result

KINDS = {"T": "Theorem", "L": "Lemma", "E": "Eqn.", "S": "Section", "A": "Appendix A."}


def group_of(id: str) -> str:
    """T2.invariant -> Theorem 2."""
    head = id.split(".")[0]
    match = re.fullmatch(r"([A-Z])(\d+)", head)
    if match is None or match[1] not in KINDS:
        return {"CDAG": "Multi-layer appendix"}.get(head, head)
    return f"{KINDS[match[1]]}{'' if match[1] == 'A' else ' '}{match[2]}"


def claims_section(page: Page, results: list[Result]) -> str:
    """All claims with verdict, error and control; printed and derived formula where they differ."""
    page.contents.append(("claims", "Claims", ""))
    verdicts = [verdict for verdict in TONE if any(r.verdict == verdict for r in results)]
    buttons = "".join(
        f'<button type="button" data-verdict="{v}" aria-pressed="false">{LABELS.get(v, v)} '
        f"{sum(r.verdict == v for r in results)}</button>"
        for v in verdicts
    )
    groups = dict.fromkeys(group_of(r.id) for r in results)
    options = "".join(f"<option>{escape(g)}</option>" for g in groups)
    rows = "".join(_row(r) for r in results)
    return f"""<section id="claims" aria-labelledby="claims-title"><h2 id="claims-title">Claims</h2>
<p>Each numbered statement of the paper, checked by a number. The same check must also reject its control, a deliberately
wrong variant of the statement.</p>
<div class="filter" role="search" aria-label="Filter the claims">
<input type="search" placeholder="Filter: words, ids, formulas …" aria-label="Filter by text">
<select aria-label="Part of the paper"><option value="">All of the paper</option>{options}</select>
<div class="set" role="group" aria-label="Verdict"><button type="button" data-verdict="" aria-pressed="true">all
{len(results)}</button>{buttons}</div></div>
<p class="meta" role="status"></p>
<table><thead><tr><th scope="col">claim</th><th scope="col">the paper says</th><th scope="col">verdict, error / tolerance</th></tr></thead><tbody>{rows}</tbody></table></section>"""


def claims_failure(page: Page, error: str) -> str:
    """The part of the page in place of the claims, if checking them failed."""
    page.contents.append(("claims", "Claims", "bad"))
    return f"""<section id="claims" aria-labelledby="claims-title"><h2 id="claims-title">Claims</h2>
<p>{badge("error")} The claims could not be checked: {escape(error)}</p>{command("joma claims")}</section>"""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _row(r: Result) -> str:
    claim, formulas, note = r.claim, "", ""
    if r.verdict != "holds" and claim.paper_formula:
        pairs = {"printed": claim.paper_formula, "derived": claim.corrected_formula}
        formulas = "".join(f"<dt>{name}</dt><dd>{typeset(text)}</dd>" for name, text in pairs.items() if text)
        formulas = f'<dl class="formulas">{formulas}</dl>'
    if r.note:
        names = {Verdict.HOLDS: "Remark", Verdict.UNDER: "Under"}
        name = "Error" if r.error else names.get(r.verdict, "Corrected")
        note = f"<p><em>{name}:</em> {typeset(r.note)}</p>"
    control = f"{claim.control}: {_number(r.control_value)}, {'rejected' if r.control_rejected else 'NOT REJECTED'}"
    why = f"<p><em>Why:</em> {typeset(claim.derivation)}</p>" if claim.derivation else ""
    printed = f"<p><em>As printed:</em> {_number(r.printed_value)}</p>" if r.verdict != "holds" else ""
    return f"""<tr data-verdict="{escape(r.verdict)}" data-group="{escape(group_of(r.id))}">
<th scope="row">{escape(r.id)}<small>{typeset(claim.source)}</small></th>
<td>{typeset(claim.statement)}{note}{formulas}<details class="more"><summary>How it is decided</summary>{why}
<p><em>Measured:</em> {typeset(claim.measures)}</p>{printed}<p><em>Control:</em> {typeset(control)}</p></details></td>
<td class="n">{badge(r.verdict)}<small>{_number(r.value)} / {_number(claim.tolerance)}</small></td></tr>"""
