"""Numbers and verdicts of results in the text of pages: fields that are filled in, never typed.

A field is a template in a comment, and the text that it gave between the comment and `<!-- / -->`:

    Eqn. 6 rebounds by <!-- = {fig4.rebound:.2f} -->0.85<!-- / --> nats.

A template reads the numbers of an exhibit's judgement, by the exhibit's id, and besides them `verdict`, `measured`, `summary`,
`message` and `rests` (on what). `foresight` has the pooled distances of the forecasts, `claims` how many claims are of which
kind. Templates are those of judgements (`joma.paper.exhibits.judgement`).

Recorded exhibits are judged from their records whenever a page is filled. What the default preset computes is in
`docs/results.json`, which `python docs/make_figures.py tables` writes. An exhibit with neither has only its verdict.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import results

from joma._runs import write_json
from joma.paper.claims import Kind, claims
from joma.paper.claims.roots import counts_in_words
from joma.paper.exhibits import exhibits
from joma.paper.exhibits.judgement import Judgement, render
from joma.paper.records import FOLDER

ROOT = Path(__file__).parents[2]
COMPUTED = ROOT / "docs/results.json"
FIELD = re.compile(r"<!-- = (?P<template>.*?) -->(?P<text>.*?)<!-- / -->", flags=re.S)
SOURCE_LR = 1e-4  # of the forecasts that are pooled
DIGITS = 6  # of numbers in results.json


def pages() -> Iterator[Path]:
    """Yield the pages that may have fields."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def store(found: Mapping[str, results.Finding | None]) -> None:
    """Write what was computed into `docs/results.json`; what was not computed now stays as it is."""
    stored = json.loads(COMPUTED.read_text(encoding="utf-8")) if COMPUTED.exists() else {}
    kept = {}
    for id in exhibits():
        finding = found[id]
        if finding is None and id in stored:
            kept[id] = stored[id]
        elif finding is not None and finding.basis == results.COMPUTED:
            kept[id] = _rounded(finding.judgement.as_dict())
    write_json(COMPUTED, kept)
    findings.cache_clear()
    facts.cache_clear()


@cache
def findings() -> dict[str, results.Finding]:
    """Return what the default preset shows of every exhibit."""
    stored = json.loads(COMPUTED.read_text(encoding="utf-8"))
    found = {}
    for id, exhibit in exhibits().items():
        finding = results.finding(exhibit, Path("nowhere"))
        if finding is None:
            finding = results.Finding(Judgement.from_dict(stored[id]), results.COMPUTED)
        found[id] = finding
    return found


def verdicts() -> dict[str, str]:
    """Return the verdict of every exhibit, by id."""
    return {id: str(finding.judgement.verdict) for id, finding in findings().items()}


@cache
def facts() -> dict[str, Any]:
    """Return everything that a field can name."""
    known: dict[str, Any] = {}
    for id, finding in findings().items():
        judgement = finding.judgement
        known[id] = {
            **judgement.numbers,
            "verdict": str(judgement.verdict),
            "measured": judgement.measured,
            "summary": judgement.summary,
            "message": exhibits()[id].message(judgement.verdict),
            "rests": finding.basis,
        }
    stored = json.loads((FOLDER / "foresight.json").read_text(encoding="utf-8"))
    known["foresight"] = _forecasts(stored["foresight.json"])
    kinds = Counter(claim.kind for claim in claims())
    known["claims"] = {
        "printed": kinds[Kind.PRINTED],
        "unsaid": kinds[Kind.UNSAID],
        "by root": counts_in_words(claims()),
    }
    return known


def _forecasts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pooled distances, and how far the authors' rates lie apart on the clock, over their seeds."""
    ratios: dict[str, list[float]] = {"entropy": [], "valid_loss": []}
    for row in stored["clock"]:
        ratios[row["gauge"]].append(row["rates"] / row["seeds"])
    apart = {gauge: {"least": min(found), "most": max(found)} for gauge, found in ratios.items()}
    worst = max(row["rms"] for row in stored["forecast"] if row["source"] == SOURCE_LR)
    return {**stored["pooled"], "apart": apart, "worst": worst}


def filled(text: str) -> str:
    """Return a page with all fields filled in; a field that names nothing known is a ValueError."""

    def fill(match: re.Match[str]) -> str:
        template = match["template"]
        return f"<!-- = {template} -->{render(template, facts())}<!-- / -->"

    return FIELD.sub(fill, text)


def fill_all() -> None:
    """Fill in the fields of all pages."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
