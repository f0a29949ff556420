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

KINDS = {"T": "Theorem", "L": "Lemma", "E": "Eqn.", "S": "Section", "A": "Appendix A."}


def group_of(id: str) -> str:
    """T2.invariant -> Theorem 2."""
    head = id.split(".")[0]
    match = re.fullmatch(r"([A-Z])(\d+)", head)
    if match is None or match[1] not in KINDS:
        return {"CDAG": "Multi-layer appendix"}.get(head, head)
    return f"{KINDS[match[1]]}{'' if match[1] == 'A' else ' '}{match[2]}"


def claims_section(page: Page, results: list[Result] | None, error: str | None = None) -> str:
    """All claims with verdict, error and control, and both formulas where they differ; or why there are none."""
    page.contents.append(("claims", "Claims", "bad" if error else ""))
    rows = [(group_of(result.id), result) for result in results or []]
    groups = dict.fromkeys(group for group, _ in rows)
    verdicts, kinds = tally(r.verdict for _, r in rows), Counter(r.claim.kind for _, r in rows)
    return render(
        "claims.html", rows=rows, groups=groups, verdicts=verdicts, kinds=kinds, error=error
    )


def tally(verdicts: Iterable[Verdict]) -> dict[Verdict, int]:
    """How often each verdict occurs, the best first."""
    count = Counter(verdicts)
    return {verdict: count[verdict] for verdict in Verdict if count[verdict]}
