"""The exhibits' results in docs/results.md and docs/reproduce.md: one verdict per exhibit, and what it rests on.

An exhibit with a record is judged from its record. One that is computed is read from the folder of exhibits; if it is not
there, the page keeps its line. One with neither is inconclusive.
"""

from __future__ import annotations

import re
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
TITLES = ("exhibit", "the paper says", "its number", "verdict", "measured", "rests on", "a longer run found")
# Columns of a row that are kept from the page: verdict and measured.
KEPT = slice(3, 5)


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


def table(all_findings: Mapping[str, Finding | None], page: str) -> str:
    """Return the table of results. An exhibit that would have to be computed keeps verdict and number of the page."""
    rows = [f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|"]
    for id, exhibit in exhibits().items():
        found = all_findings[id]
        if found is None:
            outcome = [*_kept_cells(page, id), COMPUTED]
        else:
            outcome = [found.judgement.verdict, cell(found.judgement.measured), found.basis]
        cells = [f"`{id}`", cell(exhibit.statement), cell(exhibit.paper), *outcome, _longer(id)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _kept_cells(page: str, id: str) -> list[str]:
    row = re.search(rf"^\| `{id}` \| (.*)$", page, flags=re.M)
    if row is None:
        raise SystemExit(f"neither the folder of exhibits nor the page has {id}: make it with joma reproduce {id}")
    return row[0].removeprefix("| ").split(" | ")[KEPT]


def _longer(id: str) -> str:
    run = longer_run(id)
    if run is None:
        return ""
    return f"{run.verdict}: {cell(run.measured)} (`{run.preset}`, {run.day})"


def sections(all_findings: Mapping[str, Finding | None], page: str) -> str:
    """Return one section per exhibit. One that would have to be computed keeps its sentence of the page."""
    lines = []
    for id, exhibit in exhibits().items():
        found = all_findings[id]
        lines += ["", f"### {exhibit.title}", "", f"`joma reproduce {id}`. *{exhibit.statement}*", ""]
        if found is None:
            lines += _kept_sentence(page, exhibit)
        elif found.basis == NOTHING:
            lines += [f"**No record: {found.judgement.verdict}.** `joma reproduce {id} --preset laptop` computes it.", ""]
        else:
            basis = COMPUTED
            if found.basis != COMPUTED:
                basis = found.basis
            judgement = found.judgement
            lines += [f"**{judgement.verdict.capitalize()}** ({basis}). {sentence(judgement.summary)}", ""]
        run = longer_run(id)
        if run is not None:
            lines += [f"A longer run found: {run.verdict}. {sentence(run.summary)} (`{run.preset}`, {run.day})", ""]
        if found is None or found.basis != NOTHING:
            lines.append(f"![{exhibit.title}](figures/{id}.png)")
    return "\n".join([*lines, ""])


def _kept_sentence(page: str, exhibit: Exhibit) -> list[str]:
    """Return the lines of an exhibit's section that report its computation."""
    section = re.search(rf"^### {re.escape(exhibit.title)}$(.*?)(?=^### |^<!-- /exhibits -->)", page, flags=re.M | re.S)
    if section is None:
        return []
    kept = [line for line in section[1].splitlines() if f"** ({COMPUTED}). " in line]
    return [line for sentence_line in kept for line in (sentence_line, "")]


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
