"""What stands first on the paper's page: sentences made from the verdicts at hand, a picture and a table of all.

Three things are never added up: claims, exhibits of this run and recorded longer runs. Each is counted for the paper's
statements and for those beyond it, joma's own for the most part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from joma._show.pages.render import render
from joma.paper.exhibits.base import packaged_model
from joma.paper.verdict import Verdict

if TYPE_CHECKING:
    from joma.paper.claims import Result
    from joma.paper.exhibits import Exhibit
    from joma.paper.recorded import Recorded

ROWS = {
    "T": "Theorems",
    "L": "Lemmas",
    "E": "Equations",
    "S": "Sections",
    "F": "Figures",
    "A": "Appendix",
}
REST = "Further ones"
NAMED = {
    "The paper's": 3,
    "Ours": 1,
}  # exhibits, or claims, that a sentence names; the others are counted
MOST_BROKEN = 3  # claims that could not be checked and are named


@dataclass(frozen=True)
class Shown:
    """An exhibit on the page: where it stands, its verdict here, and the record of a longer run, which counts more."""

    exhibit: Exhibit
    id: str  # of its section
    here: Verdict  # of this run; ERROR if it was not made
    recorded: Recorded | None = None
    short: bool = True  # whether this run is at the quick preset
    settings: Mapping[str, Any] = field(default_factory=dict)  # of this run

    @property
    def by_record(self) -> bool:
        """Whether the recorded run is the one that counts."""
        return self.recorded is not None and self.short and self.here is not Verdict.ERROR

    @property
    def verdict(self) -> Verdict:
        """The one that counts."""
        return self.recorded.judgement.verdict if self.recorded and self.by_record else self.here

    @property
    def message(self) -> str:
        """What that verdict says, as a heading."""
        return self.exhibit.message(self.verdict)

    @property
    def model(self) -> str:
        """The model in a package that the verdict rests on alone, described; "" if there is none."""
        settings = self.recorded.settings if self.recorded and self.by_record else self.settings
        model = packaged_model(settings)
        return model.about if model else ""


@dataclass(frozen=True)
class StatementGroup:
    """The paper's statements, or those beyond it."""

    name: str
    claims: list[Result]
    exhibits: list[Shown]

    def counts(self, verdict: Verdict) -> list[int]:
        """How many claims, exhibits of this run and longer runs have the verdict."""
        return [
            sum(result.verdict is verdict for result in self.claims),
            sum(one.here is verdict for one in self.exhibits),
            sum(record.judgement.verdict is verdict for record in _records(self.exhibits)),
        ]


def findings(
    shown: Sequence[Shown], claims: Sequence[Result] | None, claims_error: str | None
) -> Markup:
    """The section: what the paper claims, what holds, was corrected, fails and is inconclusive; all verdicts."""
    results = list(claims or [])
    groups = _groups(shown, results)
    sentences = {
        "The paper": Markup(
            "<p>Attention and MLP of a Transformer move together, so that attention can be integrated out (JoMA); what "
            "is left explains why attention turns sparse, then dense, and how hierarchies are learned.</p>"
        ),
        "Holds": _sentences(groups, [Verdict.HOLDS], "Nothing on this page holds as stated."),
        "Does not hold": _sentences(
            groups, [Verdict.FAILS, Verdict.INDISTINCT], "Nothing that was tested fails."
        ),
        "One model": _models(shown),
        "Inconclusive": _untested(shown, results, claims is None, claims_error) + _sources(shown),
        "Corrected": _sentences(
            groups, [Verdict.CORRECTED, Verdict.UNDER], "Nothing had to be corrected."
        ),
    }
    sentences = {
        label: text for label, text in sentences.items() if text
    }  # "One model": on few pages
    rows = {
        name: [result for result in results if _row(result) == name]
        for name in (*ROWS.values(), REST)
    }
    marks = {name: row for name, row in rows.items() if row}
    beyond = {result.id for result in groups[1].claims}
    counts = {verdict: _columns(groups, verdict) for verdict in Verdict}
    counts = {verdict: row for verdict, row in counts.items() if any(row)}
    return render(
        "findings.html", sentences=sentences, marks=marks, shown=shown, beyond=beyond, counts=counts
    )


def _groups(shown: Sequence[Shown], results: Sequence[Result]) -> list[StatementGroup]:
    """The paper's statements, then those beyond it."""
    from joma.paper.claims import Kind

    papers = StatementGroup("The paper's", [], [])
    ours = StatementGroup("Ours", [], [])
    for result in results:
        group = ours if result.claim.kind is Kind.EXTENSION else papers
        group.claims.append(result)
    for one in shown:
        group = papers if one.exhibit.is_from_paper else ours
        group.exhibits.append(one)
    return [papers, ours]


def _columns(groups: Sequence[StatementGroup], verdict: Verdict) -> list[int]:
    """A row of the table: claims, this run and longer runs, each of the paper and beyond it."""
    papers, ours = (group.counts(verdict) for group in groups)
    return [number for pair in zip(papers, ours, strict=True) for number in pair]


def _records(shown: Iterable[Shown]) -> list[Recorded]:
    return [one.recorded for one in shown if one.recorded is not None]


def _row(result: Result) -> str:
    """The row of the picture: the kind of statement, as its id begins: T2.invariant is of a theorem."""
    head = result.id.partition(".")[0]
    return ROWS.get(head[0], REST) if head[1:].isdigit() else REST


def _sentences(groups: Sequence[StatementGroup], verdicts: Sequence[Verdict], none: str) -> Markup:
    """Return one paragraph per group: how many have each of the verdicts, the first of them by name."""
    paragraphs: list[Markup] = []
    for group in groups:
        clauses = [_part(group, verdict) for verdict in verdicts]
        parts = [clause for clause in clauses if clause]
        if parts:
            paragraphs.append(
                Markup("<p><b>{}:</b> {}.</p>").format(group.name, Markup(". ").join(parts))
            )
    return Markup("").join(paragraphs) or Markup("<p>{}</p>").format(none)


def _part(group: StatementGroup, verdict: Verdict) -> Markup:
    """Return a clause such as "21 claims and 3 exhibits of this run hold: …"; nothing if none has the verdict."""
    claims, here, longer = group.counts(verdict)
    counted = []
    if claims:
        counted.append(_count(claims, "claim"))
    if here:
        counted.append(f"{_count(here, 'exhibit')} of this run")
    if longer:
        counted.append(_count(longer, "longer run"))
    if not counted:
        return Markup("")
    verb = _predicate(verdict, claims + here + longer)
    exhibits = [one for one in group.exhibits if one.verdict is verdict]
    most = NAMED[group.name]
    names = _join([_named(one) for one in exhibits[:most]], "; ", len(exhibits) - most)
    if not here and not longer:
        results = [result for result in group.claims if result.verdict is verdict]
        names = _join([_claim(result) for result in results[:most]], ", ", len(results) - most)
    text = Markup("{} {}").format(_listed(counted), verb)
    return Markup("{}: {}").format(text, names) if names else text


def _untested(
    shown: Sequence[Shown],
    results: Sequence[Result],
    without_claims: bool,
    claims_error: str | None,
) -> Markup:
    """What is inconclusive in this run and in longer runs, what could not be made, and whether claims were checked."""
    longer = [one for one in shown if one.recorded is not None]
    undecided = [
        one
        for one in longer
        if one.recorded and one.recorded.judgement.verdict is Verdict.INCONCLUSIVE
    ]
    parts = [
        _inconclusive(
            [one for one in shown if one.here is Verdict.INCONCLUSIVE],
            len(shown),
            "exhibit",
            " of this run",
        ),
        _inconclusive(undecided, len(longer), "longer run", ""),
    ]
    if missing := [one for one in shown if one.here is Verdict.ERROR]:
        names = _join([_link(one.id, _short(one)) for one in missing], ", ", 0)
        parts.append(Markup("{} not made: {}").format(_count(len(missing), "exhibit"), names))
    broken = [result for result in results if result.verdict is Verdict.ERROR]
    if broken:
        names = _join(
            [_claim(result) for result in broken[:MOST_BROKEN]], ", ", len(broken) - MOST_BROKEN
        )
        parts.append(
            Markup("{} could not be checked: {}").format(_count(len(broken), "claim"), names)
        )
    if claims_error:
        parts.append(Markup("The claims could not be checked: {}").format(claims_error))
    elif without_claims:
        parts.append(Markup("The claims were not checked"))
    if not any(parts):
        return Markup("<p>Nothing on this page is inconclusive.</p>")
    return Markup("<p>{}.</p>").format(Markup(". ").join(part for part in parts if part))


def _inconclusive(exhibits: Sequence[Shown], total: int, noun: str, of: str) -> Markup:
    """Return a clause such as "14 of 30 exhibits of this run are inconclusive: …"; nothing if none is."""
    if not exhibits:
        return Markup("")
    verb = "is" if len(exhibits) == 1 else "are"
    names = _join([_link(one.id, _short(one)) for one in exhibits], ", ", 0)
    return Markup("{} of {}{} {} inconclusive: {}").format(
        len(exhibits), _count(total, noun), of, verb, names
    )


def _sources(shown: Sequence[Shown]) -> Markup:
    """Where headings are of longer runs, and where this run decides otherwise: neither hides the other."""
    longer = [one for one in shown if one.by_record]
    if not longer:
        return Markup("")
    # what is inconclusive in this run has been named
    differ = [
        one
        for one in longer
        if one.here is not one.verdict and one.here is not Verdict.INCONCLUSIVE
    ]
    text = Markup(
        "Longer runs are recorded with the source; {} of {} exhibits are headed by theirs"
    ).format(len(longer), len(shown))
    if differ:
        names = _join([_link(one.id, _short(one)) for one in differ], ", ", 0)
        text += Markup("; this run comes to another verdict in {}").format(names)
    return Markup("<p>{}.</p>").format(text)


def _models(shown: Sequence[Shown]) -> Markup:
    """Which verdicts rest on one model alone, by model."""
    by_model: dict[str, list[Shown]] = {}
    for one in shown:
        if one.model and one.verdict is not Verdict.ERROR:
            by_model.setdefault(one.model, []).append(one)
    paragraphs = []
    for model, exhibits in by_model.items():
        verb = "rests" if len(exhibits) == 1 else "rest"
        links = [
            Markup("{} ({})").format(_link(one.id, _short(one)), one.verdict) for one in exhibits
        ]
        names = _join(links, ", ", 0)
        count = _count(len(exhibits), "verdict")
        paragraphs.append(
            Markup("<p>{} {} on one model, {}: {}.</p>").format(count, verb, model, names)
        )
    return Markup("").join(paragraphs)


def _named(one: Shown) -> Markup:
    """The heading of an exhibit as a link, and whether it rests on one model."""
    link = _link(one.id, one.message)
    return link + " (one model)" if one.model else link


def _short(one: Shown) -> str:
    return one.exhibit.title.split(":")[0]


def _claim(result: Result) -> Markup:
    return _link(f"claim-{result.id}", result.id)


def _join(items: Iterable[Markup], between: str, more: int) -> Markup:
    listed = Markup(escape(between)).join(items)
    return listed + Markup("{}and {} more").format(between, more) if more > 0 else listed


def _listed(words: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _link(id: str, text: str) -> Markup:
    return Markup('<a href="#{}">{}</a>').format(id, text)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _predicate(verdict: Verdict, count: int) -> str:
    """Return the verdict as a predicate: one statement holds, two hold, one is wrong as printed."""
    if verdict is Verdict.CORRECTED:
        return f"{'is' if count == 1 else 'are'} {verdict}"
    if count == 1:
        return str(verdict)
    first, _, rest = str(verdict).partition(" ")
    plural = {"holds": "hold", "fails": "fail", "reproduces;": "reproduce;"}.get(first, first)
    return f"{plural} {rest.replace('does not', 'do not')}".strip()
