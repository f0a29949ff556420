"""The exhibits' results in docs/results.md and docs/reproduce.md: one verdict per exhibit, and what it rests on.

An exhibit with a record is judged from its record. One that is computed is read from the folder of exhibits, or from
`docs/results.json` (`facts.findings`). One with neither is inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from claim_pages import cell
from joma.paper.exhibits import Exhibit, exhibits
from joma.paper.exhibits.base import DEFAULT
from joma.paper.exhibits.judgement import Judgement
from joma.paper.exhibits.making import NO_EVIDENCE, judge_record, load_verdict
from joma.paper.recorded import longer_run
from joma.paper.records import load

SENTENCE = 240  # characters of a summary in the guide
COMPUTED = "computed"
NOTHING = "no record"
TITLES = (
    "exhibit",
    "the paper says",
    "its number",
    "verdict",
    "measured",
    "rests on",
    "a longer run found",
)


@dataclass(frozen=True)
class Finding:
    """What the default preset shows of an exhibit."""

    judgement: Judgement
    basis: str  # COMPUTED, NOTHING, or date and cost of the record


def finding(exhibit: Exhibit, folder: Path) -> Finding | None:
    """Return what the default preset shows; None if it would have to be computed."""
    record = load(exhibit.id)
    if record is not None:
        return Finding(judge_record(exhibit, record), record.origin)
    if DEFAULT not in exhibit.experiment.settings:
        return Finding(NO_EVIDENCE, NOTHING)
    if (folder / exhibit.id / "verdict.json").exists():
        return Finding(load_verdict(folder / exhibit.id), COMPUTED)
    return None


def findings(folder: Path) -> dict[str, Finding | None]:
    """Return the findings of all exhibits, by id."""
    return {id: finding(exhibit, folder) for id, exhibit in exhibits().items()}


def table(all_findings: Mapping[str, Finding]) -> str:
    """Return the table of results."""
    rows = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for id, exhibit in exhibits().items():
        found = all_findings[id]
        outcome = [found.judgement.verdict, cell(found.judgement.measured), found.basis]
        cells = [f"`{id}`", cell(exhibit.statement), cell(exhibit.paper), *outcome, _longer(id)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _longer(id: str) -> str:
    run = longer_run(id)
    if run is None:
        return ""
    return f"{run.verdict}: {cell(run.measured)} (`{run.preset}`, {run.day})"


def sections(all_findings: Mapping[str, Finding]) -> str:
    """Return one section per exhibit."""
    lines = []
    for id, exhibit in exhibits().items():
        found = all_findings[id]
        lines += [
            "",
            f"### {exhibit.title}",
            "",
            f"`joma reproduce {id}`. *{exhibit.statement}*",
            "",
        ]
        judgement = found.judgement
        if found.basis == NOTHING:
            lines += [
                f"**No record: {judgement.verdict}.** `joma reproduce {id} --preset laptop` computes it.",
                "",
            ]
        else:
            lines += [
                f"**{judgement.verdict.capitalize()}** ({found.basis}). {sentence(judgement.summary)}",
                "",
            ]
        run = longer_run(id)
        if run is not None:
            lines += [
                f"A longer run found: {run.verdict}. {sentence(run.summary)} (`{run.preset}`, {run.day})",
                "",
            ]
        if found.basis != NOTHING:
            lines.append(f"![{exhibit.title}](figures/{id}.png)")
    return "\n".join([*lines, ""])


def sentence(summary: str) -> str:
    """Return a summary as one sentence: its conclusion, or as many of its clauses as are easily read.

    >>> sentence("pairs: Laplace; none: Gaussian. So: under heavy tails")
    'Under heavy tails.'
    """
    _, concluded, conclusion = summary.rpartition(". So: ")
    text = conclusion if concluded else summary
    clauses = text.split("; ")
    shown = clauses[0]
    for clause in clauses[1:]:
        if len(shown) + len(clause) > SENTENCE:
            break
        shown = f"{shown}; {clause}"
    return f"{shown[:1].upper()}{shown[1:]}".rstrip(".") + "."
