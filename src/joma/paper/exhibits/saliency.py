"""Saliency on real text (Section 3.1): Δ = discriminancy × frequency of the context words of a few query words.

The text is Python's own documentation, the target the next word; see ``joma.theory.saliency``. The control is the same
text with the targets' places shuffled, so that no context word tells anything: what the scores say then is chance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._data.words import words_of
from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._statistics import extent
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where, wide
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict
from joma.theory import saliency

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {
        "text": "pydoc",
        "queries": ["the", "a", "is", "of"],
        "window": 16,
        "min_count": 10,
    },
    "laptop": {
        "text": "wikitext-2",
        "queries": ["the", "united", "song", "he"],
        "window": 32,
        "min_count": 50,
    },
    "paper": {
        "text": "wikitext-2",
        "queries": ["the", "united", "song", "he"],
        "window": 64,
        "min_count": 50,
    },
}
KINDS = {"distinct": "#d55e00", "between": "#b07a00", "common": "#0072b2"}
SHOWN = 400  # words per panel, by saliency
NAMED = 10  # of them with their names
GAUGES = ("frequency", "discriminancy", "saliency", "score")
MOST_BY_CHANCE = 0.01  # of all words may count as distinct with the targets shuffled
TIMES_CHANCE = 5  # so many times its shuffled share, or 1 %, must a query's distinct share be
RULE = (
    f"with the targets shuffled ≤ {MOST_BY_CHANCE:.0%} of all words count as distinct; on the text, for each query, "
    f"at least {TIMES_CHANCE} times its shuffled share and {TIMES_CHANCE * MOST_BY_CHANCE:.0%}; and there are words "
    "in between distinct and common"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """The saliency of each query, on the text and on the text with shuffled targets."""
    words = np.array(words_of(settings["text"]), dtype=object)
    rng = np.random.default_rng((seed, 0))
    for n, query in enumerate(settings["queries"]):
        progress(n / len(settings["queries"]), f"query {query!r}")
        place = np.flatnonzero(words[:-1] == query) + 1
        place = place[words[place] != query]  # the queries stay where they are
        for case in ("text", "shuffled"):
            tokens = words
            if case == "shuffled":
                tokens = words.copy()
                tokens[place] = tokens[rng.permutation(place)]
            frame = saliency(
                tokens, query, window=settings["window"], min_count=settings["min_count"]
            )
            for rank, row in enumerate(frame.itertuples(index=False)):
                gauges = {name: float(getattr(row, name)) for name in GAUGES}
                labels = {"word": row.token, "favours": row.favours, "kind": row.kind}
                writer.write(rank, gauges, query=query, case=case, **labels)


def draw(run: Run) -> p.Chart:
    """Discriminancy against frequency, with the words of largest saliency named; lines of equal Δ fall."""
    frame = run.frame()
    table = wide(frame, ["step", "query", "case", "word", "favours", "kind"])
    table = table[(table.case == "text") & (table.step < SHOWN)]
    x = p.x(
        "frequency",
        "frequency P(l | m)",
        log=True,
        format="~g",
        ticks=[0.0003, 0.001, 0.003, 0.01, 0.03, 0.1],
    )
    y = p.y(
        "discriminancy",
        "discriminancy ‖E_l[g]‖",
        log=True,
        format="~g",
        ticks=[0.03, 0.1, 0.3, 1],
    )
    tip = dict.fromkeys(("word", "favours", "kind")) | dict.fromkeys(GAUGES, ".3g")
    panels = []
    for query in dict.fromkeys(frame["query"]):
        rows = where(table, query=query)
        points = p.dots(
            rows,
            x,
            y,
            p.by("kind", "words", colours=KINDS),
            tip=tip,
            size=22,
            filled=True,
            opacity=0.45,
        )
        named = _apart(where(rows, kind="distinct").sort_values("step"))
        labels = p.words(named, x, y, "label", align="left", dx=6, fontSize=12, color=p.INK)
        note = "named: large Δ, word → the next word that it favours"
        panels.append(
            p.panel(f"context words of “{query}”", points, labels, note=note, size=(410, 280))
        )
    return p.grid(*panels, columns=2, shared=True)


def _apart(rows: pd.DataFrame, count: int = NAMED) -> pd.DataFrame:
    """The first words of ``rows`` whose labels do not lie on each other."""
    x, y = (np.log(rows[name].to_numpy()) for name in ("frequency", "discriminancy"))
    kept: list[int] = []
    for i in range(len(rows)):
        if all(abs(y[i] - y[j]) > 0.2 or abs(x[i] - x[j]) > 2.4 for j in kept):
            kept.append(i)
        if len(kept) == count:
            break
    chosen = rows.iloc[kept]
    return chosen.assign(label=chosen.word + " → " + chosen.favours)


def judge(run: Run) -> Judgement:
    """Check that there are distinct words, and hardly any when the targets are shuffled."""
    frame = run.frame()
    scores = where(frame, gauge="score")
    queries: dict[str, dict[str, Any]] = {}
    for query in dict.fromkeys(frame["query"]):
        words = where(scores, query=query, case="text")
        shuffled = where(scores, query=query, case="shuffled")
        order = where(frame, query=query, case="text", gauge="saliency").sort_values("step").word
        queries[str(query)] = {
            **{kind: int((words.kind == kind).sum()) for kind in KINDS},
            "distinct_share": float((words.kind == "distinct").mean()),
            "shuffled_share": float((shuffled.kind == "distinct").mean()),
            "shuffled_mean_score": float(shuffled.value.mean()),
            "top": order.head(8).tolist(),
            "top_words": [word for word in order if str(word).isalpha()][:5],
        }
    by_chance = float((where(scores, case="shuffled").kind == "distinct").mean())
    between = sum(query["between"] for query in queries.values())
    first = next(iter(queries))
    is_clear = all(
        query["distinct_share"] >= TIMES_CHANCE * max(query["shuffled_share"], MOST_BY_CHANCE)
        for query in queries.values()
    )
    numbers = {
        "queries": queries,
        "distinct": extent(query["distinct_share"] for query in queries.values()),
        "by chance": by_chance,
        "between": between,
        "first": {"query": first, "top words": queries[first]["top_words"]},
    }
    if by_chance <= MOST_BY_CHANCE and is_clear and between:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict,
        numbers,
        "distinct {distinct.least:.0%} to {distinct.most:.0%} of the words, with shuffled targets "
        "{by chance:.2%}; {between} words in between; most salient for “{first.query}”: "
        "{first.top words}",
        "at least {distinct.least:.0%} of the words distinct (shuffled targets: {by chance:.2%})",
    )


EXHIBIT = Exhibit(
    id="saliency",
    title="Saliency on real text",
    statement="Δ = discriminancy × frequency covers more than distinct and common tokens (Section 3.1).",
    seconds=3,
    rule=RULE,
    experiment=Experiment(SETTINGS, run, draw, judge),
    messages={
        Verdict.HOLDS: "On real text there are distinct words, common words, and words in between",
        Verdict.FAILS: "On real text, distinct, common and in-between words are not there beyond chance",
    },
)
