"""What stands first on the paper's page: five sentences made from the verdicts at hand, and a picture of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from joma._exhibits.messages import message
from joma._report.claims import tally
from joma._report.render import render
from joma.theory.verdict import Verdict

if TYPE_CHECKING:
    from joma._exhibits import Exhibit
    from joma._exhibits.recorded import Recorded
    from joma.theory.claims import Result

ROWS = {"T": "Theorems", "L": "Lemmas", "E": "Equations", "S": "Sections", "F": "Figures", "A": "Appendix"}
REST = "Further ones"
NAMED = 3  # exhibits, or claims, that a sentence names; the others are counted


@dataclass(frozen=True)
class Shown:
    """An exhibit on the page: where it stands, its verdict here, and the record of a longer run, which counts more."""

    exhibit: Exhibit
    id: str  # of its section
    here: Verdict  # of this run; ERROR if it was not made
    recorded: Recorded | None = None
    short: bool = True  # whether this run is at the quick preset

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
        return message(self.exhibit, self.verdict)


def findings(shown: Sequence[Shown], claims: Sequence[Result] | None, claims_error: str | None) -> Markup:
    """The section: what the paper claims, what is exact, corrected, refuted and not tested; all verdicts as marks."""
    results = list(claims or [])
    sentences = {
        "The paper": Markup(
            "<p>Attention and MLP of a Transformer move together, so that attention can be integrated out (JoMA); what "
            "is left explains why attention turns sparse, then dense, and how hierarchies are learned.</p>"
        ),
        "Exact": _sentence(shown, results, [Verdict.HOLDS], "Nothing on this page holds exactly as printed."),
        "Corrected": _sentence(shown, results, [Verdict.CORRECTED, Verdict.UNDER], "Nothing had to be corrected."),
        "Does not hold": _sentence(
            shown, results, [Verdict.FAILS, Verdict.INDISTINCT], "Nothing that was tested fails."
        ),
        "Not tested here": _untested(shown, results, claims is None, claims_error) + _sources(shown),
    }
    rows = {name: [result for result in results if _row(result) == name] for name in (*ROWS.values(), REST)}
    marks = {name: row for name, row in rows.items() if row}
    counts = tally([one.verdict for one in shown] + [result.verdict for result in results])
    return render("findings.html", sentences=sentences, marks=marks, shown=shown, counts=counts)


def _row(result: Result) -> str:
    """The row of the picture: the kind of statement, as its id begins: T2.invariant is of a theorem."""
    head = result.id.partition(".")[0]
    return ROWS.get(head[0], REST) if head[1:].isdigit() else REST


def _sentence(shown: Sequence[Shown], results: Sequence[Result], verdicts: Sequence[Verdict], none: str) -> Markup:
    """How many claims and exhibits have one of the verdicts, the first of them by name."""
    parts: list[Markup] = []
    for verdict in verdicts:
        claims = [result for result in results if result.verdict is verdict]
        exhibits = [one for one in shown if one.verdict is verdict]
        counted = [_count(len(claims), "claim")] * bool(claims) + [_count(len(exhibits), "exhibit")] * bool(exhibits)
        if not counted:
            continue
        one = len(claims) + len(exhibits) == 1
        word = str(verdict) if one else _plural(verdict)
        named = _join([_link(e.id, e.message) for e in exhibits[:NAMED]], "; ", len(exhibits) - NAMED)
        if not exhibits:
            named = _join([_link(f"claim-{r.id}", r.id) for r in claims[:NAMED]], ", ", len(claims) - NAMED)
        parts.append(Markup("{} {}: {}").format(" and ".join(counted), word, named))
    return Markup("<p>{}.</p>").format(Markup(". ").join(parts)) if parts else Markup("<p>{}</p>").format(none)


def _untested(
    shown: Sequence[Shown], results: Sequence[Result], without_claims: bool, claims_error: str | None
) -> Markup:
    """What is not decided, what could not be made, and whether the claims were checked."""
    parts: list[Markup] = []
    for verdict, words in ((Verdict.UNDECIDED, "not decided at these settings"), (Verdict.ERROR, "not made")):
        exhibits = [one for one in shown if one.verdict is verdict]
        if exhibits:
            names = _join([_link(one.id, one.exhibit.title.split(":")[0]) for one in exhibits], ", ", 0)
            parts.append(Markup("{} {}: {}").format(_count(len(exhibits), "exhibit"), words, names))
    broken = [result for result in results if result.verdict is Verdict.ERROR]
    if broken:
        names = _join([_link(f"claim-{r.id}", r.id) for r in broken[:NAMED]], ", ", len(broken) - NAMED)
        parts.append(Markup("{} could not be checked: {}").format(_count(len(broken), "claim"), names))
    if claims_error:
        parts.append(Markup("The claims could not be checked: {}").format(claims_error))
    elif without_claims:
        parts.append(Markup("The claims were not checked"))
    if not parts:
        return Markup("<p>Nothing on this page was left undecided.</p>")
    return Markup("<p>{}.</p>").format(Markup(". ").join(parts))


def _sources(shown: Sequence[Shown]) -> Markup:
    """Which verdicts are of longer runs, and where those of this run differ: neither hides the other."""
    longer = [one for one in shown if one.by_record]
    if not longer:
        return Markup("")
    differ = [one for one in longer if one.here is not one.verdict]
    text = Markup(
        "{} of {} exhibits have a longer run, recorded with the source, which counts more than this one"
    ).format(len(longer), len(shown))
    if differ:
        names = _join([_link(one.id, one.exhibit.title.split(":")[0]) for one in differ], ", ", 0)
        text += Markup("; this one comes to another verdict in {}").format(names)
    return Markup("<p>{}.</p>").format(text)


def _join(items: Iterable[Markup], between: str, more: int) -> Markup:
    listed = Markup(escape(between)).join(items)
    return listed + Markup("{}and {} more").format(between, more) if more > 0 else listed


def _link(id: str, text: str) -> Markup:
    return Markup('<a href="#{}">{}</a>').format(id, text)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _plural(verdict: Verdict) -> str:
    """The word for several statements: they hold, fail, reproduce."""
    first, _, rest = str(verdict).partition(" ")
    plural = {"holds": "hold", "fails": "fail", "reproduces;": "reproduce;"}.get(first, first)
    return f"{plural} {rest.replace('does not', 'do not')}".strip()
