"""The first section of the paper's page: five findings, then the map and the count of all statements.

A finding is one sentence and one picture. Its words and numbers are those of the stored verdict. Statements are counted
in groups that are never added up: the paper's, our corrections of them, our own results, and others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from joma._show.pages.render import render
from joma.paper.exhibits.base import packaged_model
from joma.paper.verdict import Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from joma._show.pages.document import Page
    from joma.paper.claims import Result
    from joma.paper.exhibits import Exhibit
    from joma.paper.exhibits.judgement import Judgement

MOST_FINDINGS = 5
# Exhibits that can be findings, in the order of preference, with the sentence of each: of its heading (`message`), its
# deciding number (`measured`), that of the paper (`paper`), and all numbers of the verdict (`numbers`).
SENTENCES = {
    "folding": "{message}: {measured}.",
    "fig4": (
        "{message}: entropy falls by {numbers[cases][eqn6][depth]:.2f} nats and rises again by "
        "{numbers[cases][eqn6][rebound]:.2f}."
    ),
    "fig6": "{message}: {measured}.",
    "cdag": "{message}: {measured}.",
    "sinks": "{message}: {measured}.",
    "orthogonality": "{message}: {measured}.",
    "foretold": "{message}: {measured}.",
    "fig2": "{message}: {measured}.",
}
# Rows of the map: how the ids of claims begin.
ROWS = {
    "T": "Theorems",
    "L": "Lemmas",
    "E": "Equations",
    "S": "Sections",
    "F": "Figures",
    "A": "Appendix",
}
REST = "Further ones"
OURS = "our own"  # of the authors of statements, `joma.paper.exhibits.base.AUTHORS`
CORRECTIONS = (Verdict.CORRECTED, Verdict.UNDER)
UNDECIDED = (Verdict.INCONCLUSIVE, Verdict.ERROR)


@dataclass(frozen=True)
class Shown:
    """An exhibit on the page."""

    exhibit: Exhibit
    id: str  # of its section
    folder: Path
    judgement: Judgement | None  # None if it was not made
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_run: bool = True  # False if the judgement rests on no run

    @property
    def verdict(self) -> Verdict:
        """The stored verdict: of the run that is shown, whether it was computed or recorded."""
        if self.judgement is None:
            return Verdict.ERROR
        return self.judgement.verdict

    @property
    def message(self) -> str:
        """The verdict as a heading."""
        return self.exhibit.message(self.verdict)

    @property
    def short_title(self) -> str:
        """The title without what it is about: "Figure 7"."""
        return self.exhibit.title.split(":")[0]

    @property
    def model(self) -> str:
        """The one packaged model that the verdict rests on, described; "" if there is none."""
        model = packaged_model(self.settings)
        if model is None:
            return ""
        return model.about


@dataclass(frozen=True)
class PageFinding:
    """One sentence and one picture."""

    shown: Shown
    sentence: str
    picture: Markup


@dataclass(frozen=True)
class Mark:
    """A statement on the map."""

    address: str
    name: str
    verdict: Verdict
    is_papers: bool


@dataclass(frozen=True)
class StatementGroup:
    """Statements that are counted together: how many claims and exhibits have each verdict."""

    name: str
    about: str
    claims: Counter[Verdict] = field(default_factory=Counter)
    exhibits: Counter[Verdict] = field(default_factory=Counter)


def findings_section(
    page: Page,
    exhibits: Sequence[Shown],
    claims: Sequence[Result] | None,
    claims_error: str | None,
) -> Markup:
    """Return the first section of the page."""
    results = list(claims or [])
    return render(
        "findings.html",
        findings=findings(page, exhibits),
        rows=map_rows(exhibits, results),
        groups=groups(exhibits, results),
        inconclusive=[one for one in exhibits if one.verdict is Verdict.INCONCLUSIVE],
        missing=[one for one in exhibits if one.verdict is Verdict.ERROR],
        broken=[result for result in results if result.verdict is Verdict.ERROR],
        models=by_model(exhibits),
        claims_error=claims_error,
        has_claims=claims is not None,
    )


def findings(page: Page, exhibits: Sequence[Shown]) -> list[PageFinding]:
    """Return the findings of the exhibits at hand: those with a verdict before those without."""
    by_id = {one.exhibit.id: one for one in exhibits if one.exhibit.is_jomas}
    drawn = {id: one for id, one in by_id.items() if one.judgement is not None and one.has_run}
    present = [drawn[id] for id in SENTENCES if id in drawn]
    decided = [one for one in present if one.verdict not in UNDECIDED]
    open_ones = [one for one in present if one.verdict is Verdict.INCONCLUSIVE]
    first = [*decided, *open_ones][:MOST_FINDINGS]
    return [PageFinding(one, sentence(one), picture(page, one)) for one in first]


def sentence(one: Shown) -> str:
    """Return the sentence of a finding, from the stored verdict."""
    assert one.judgement is not None
    template = SENTENCES[one.exhibit.id]
    if one.message.endswith("?"):
        template = template.replace("{message}:", "{message}")
    return template.format(
        message=one.message,
        measured=one.judgement.measured,
        paper=one.exhibit.paper,
        numbers=one.judgement.numbers,
    )


def picture(page: Page, one: Shown) -> Markup:
    """Return the picture of a finding, drawn from the run of its exhibit; empty if the exhibit has none."""
    from joma._runs import Run
    from joma._show.pages.stills import still
    from joma._show.plots import drawing

    draw = one.exhibit.experiment.headline
    if draw is None:
        return Markup("")
    drawn = drawing(draw(Run(one.folder)))
    return Markup(still(drawn.svg, page.styles, page.id(f"finding-{one.exhibit.id}")))


def map_rows(exhibits: Sequence[Shown], results: Sequence[Result]) -> dict[str, list[Mark]]:
    """Return the marks of the map by row: exhibits, then claims by the kind of their source."""
    rows: dict[str, list[Mark]] = {"Exhibits": []}
    for one in exhibits:
        is_papers = one.exhibit.is_from_paper
        rows["Exhibits"].append(Mark(one.id, one.exhibit.title, one.verdict, is_papers))
    for name in (*ROWS.values(), REST):
        rows[name] = []
    for result in results:
        name = f"Claim {result.id}"
        mark = Mark(f"claim-{result.id}", name, result.verdict, result.claim.kind.is_papers)
        rows[_row(result)].append(mark)
    return {name: marks for name, marks in rows.items() if marks}


def _row(result: Result) -> str:
    """The row of a claim: T2.invariant is of a theorem."""
    head = result.id.partition(".")[0]
    if not head[1:].isdigit():
        return REST
    return ROWS.get(head[0], REST)


def groups(exhibits: Sequence[Shown], results: Sequence[Result]) -> list[StatementGroup]:
    """Return the paper's statements, our corrections, our own results and others; each statement is in one of them."""
    from joma.paper.claims import Kind

    papers = StatementGroup("The paper's statements", "as stated")
    corrections = StatementGroup(
        "Our corrections", "statements of the paper that need another formula, or a condition"
    )
    ours = StatementGroup("Our own results", "beyond the paper")
    others = StatementGroup("Others", "the author's draft, other papers, exhibits of your own")

    def group_of(verdict: Verdict, is_papers: bool, is_ours: bool) -> StatementGroup:
        if is_papers and verdict in CORRECTIONS:
            return corrections
        if is_papers:
            return papers
        if is_ours:
            return ours
        return others

    for result in results:
        kind = result.claim.kind
        group = group_of(result.verdict, kind.is_papers, kind is Kind.EXTENSION)
        group.claims[result.verdict] += 1
    for one in exhibits:
        author, _ = one.exhibit.author_and_statement
        is_ours = one.exhibit.is_jomas and author == OURS
        group = group_of(one.verdict, one.exhibit.is_from_paper, is_ours)
        group.exhibits[one.verdict] += 1
    return [
        group for group in (papers, corrections, ours, others) if group.claims or group.exhibits
    ]


def by_model(exhibits: Iterable[Shown]) -> dict[str, list[Shown]]:
    """Return the exhibits whose verdict rests on one packaged model alone, by that model."""
    resting: dict[str, list[Shown]] = {}
    for one in exhibits:
        if one.model and one.verdict is not Verdict.ERROR:
            resting.setdefault(one.model, []).append(one)
    return resting
