"""The claims as a table that can be filtered, corrections typeset."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from joma._show.pages.document import Page
from joma._show.pages.render import render
from joma.paper.verdict import Verdict

if TYPE_CHECKING:
    from joma.paper.claims import Result

KINDS = {"T": "Theorem ", "L": "Lemma ", "E": "Eqn. ", "S": "Section ", "A": "Appendix A."}


def group_of(id: str) -> str:
    """Return where the paper states a claim: "Theorem 2" for T2.invariant."""
    head = id.split(".")[0]
    match = re.fullmatch(r"([A-Z])(\d+)", head)
    if match is None or match[1] not in KINDS:
        return {"CDAG": "Multi-layer appendix"}.get(head, head)
    kind, number = match.groups()
    return f"{KINDS[kind]}{number}"


def claims_section(page: Page, results: list[Result] | None, error: str | None = None) -> str:
    """Return the table of all claims, with both formulas where they differ; or why there are none."""
    tone = ""
    if error:
        tone = "bad"
    page.contents.append(("claims", "Claims", tone))
    rows = [(group_of(result.id), result) for result in results or []]
    return render(
        "claims.html",
        rows=rows,
        groups=dict.fromkeys(group for group, _ in rows),
        verdicts=tally(result.verdict for _, result in rows),
        kinds=Counter(result.claim.kind for _, result in rows),
        error=error,
    )


def tally(verdicts: Iterable[Verdict]) -> dict[Verdict, int]:
    """Count each verdict, the best first."""
    count = Counter(verdicts)
    return {verdict: count[verdict] for verdict in Verdict if count[verdict]}
