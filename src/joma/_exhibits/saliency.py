"""Saliency on real text (Section 3.1): Δ = discriminancy × frequency of the context words of a few query words.

The text is Python's own documentation, the target the next word; see ``joma.theory.saliency``. The control is the same
text with the targets' places shuffled, so that no context word tells anything: what the scores say then is chance.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from joma._exhibits._text import words_of
from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory import saliency
from joma.theory.verdict import Verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"text": "pydoc", "queries": ["the", "a", "is", "of"], "window": 16, "min_count": 10},
    "laptop": {"text": "wikitext-2", "queries": ["the", "united", "song", "he"], "window": 32, "min_count": 50},
    "paper": {"text": "wikitext-2", "queries": ["the", "united", "song", "he"], "window": 64, "min_count": 50},
}
AXES: dict[str, list[str]] = {}
KINDS = {"distinct": "#d55e00", "between": "#e3b778", "common": "#0072b2"}
SHOWN = 1500  # words a panel, by saliency
GAUGES = ("frequency", "discriminancy", "saliency", "score")


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
            frame = saliency(tokens, query, window=settings["window"], min_count=settings["min_count"])
            for rank, row in enumerate(frame.itertuples(index=False)):
                gauges = {name: float(getattr(row, name)) for name in GAUGES}
                labels = {"word": row.token, "favours": row.favours, "kind": row.kind}
                writer.write(rank, gauges, query=query, case=case, **labels)


def draw(run: Run) -> Chart:
    """Discriminancy against frequency, with the words of largest saliency named; lines of equal Δ fall."""
    frame = run.frame()
    keys = ["step", "query", "case", "word", "favours", "kind"]
    wide = frame.pivot(index=keys, columns="gauge", values="value").reset_index()  # noqa: PD010
    wide = wide[(wide.case == "text") & (wide.step < SHOWN)]
    panels: list[Any] = []
    for query in dict.fromkeys(frame["query"]):
        rows = wide[wide["query"] == query]
        log = alt.Scale(type="log", nice=False)
        note = "named: large Δ, word → the next word that it favours"
        base = alt.Chart(rows, title=alt.Title(f"context words of “{query}”", subtitle=note)).encode(
            alt.X("frequency:Q", scale=log, title="frequency P(l | m)", axis=alt.Axis(format=".0e", tickCount=4)),
            alt.Y("discriminancy:Q", scale=log, title="discriminancy ‖E_l[g]‖"),
        )
        points = base.mark_circle(size=26, opacity=0.6).encode(
            alt.Color("kind:N", title=None, scale=alt.Scale(domain=list(KINDS), range=list(KINDS.values()))),
            tooltip=["word", "favours", "kind", *(alt.Tooltip(g, format=".3g") for g in GAUGES)],
        )
        named = _apart(rows[rows.kind == "distinct"].sort_values("step"))
        text = base.mark_text(align="left", dx=5, fontSize=10, color="#24292f").encode(text="label:N")
        text.data = named
        panels.append((points + text).properties(width=330, height=230))
    rows_of_two = [alt.hconcat(*panels[i : i + 2]) for i in range(0, len(panels), 2)]
    return alt.vconcat(*rows_of_two)


def _apart(rows: pd.DataFrame, count: int = 8) -> pd.DataFrame:
    """The first words of ``rows`` whose labels do not lie on each other."""
    x, y = (np.log(rows[name].to_numpy()) for name in ("frequency", "discriminancy"))
    kept: list[int] = []
    for i in range(len(rows)):
        if all(abs(y[i] - y[j]) > 0.16 or abs(x[i] - x[j]) > 1.6 for j in kept):
            kept.append(i)
        if len(kept) == count:
            break
    chosen = rows.iloc[kept]
    return chosen.assign(label=chosen.word + " → " + chosen.favours)


def judge(run: Run) -> Judgement:
    """Distinct words there must be, and hardly any when the targets are shuffled."""
    frame = run.frame()
    scores = frame[frame.gauge == "score"]
    numbers: dict[str, Any] = {}
    for query in dict.fromkeys(frame["query"]):
        rows = scores[scores["query"] == query]
        text, shuffled = rows[rows.case == "text"], rows[rows.case == "shuffled"]
        order = frame[(frame["query"] == query) & (frame.case == "text") & (frame.gauge == "saliency")]
        numbers[str(query)] = {
            **{kind: int((text.kind == kind).sum()) for kind in KINDS},
            "distinct_share": float((text.kind == "distinct").mean()),
            "shuffled_share": float((shuffled.kind == "distinct").mean()),
            "shuffled_mean_score": float(shuffled.value.mean()),
            "top": order.nsmallest(8, "step").word.tolist(),
            "top_words": [w for w in order.sort_values("step").word if str(w).isalpha()][:5],
        }
    share = [n["distinct_share"] for n in numbers.values()]
    by_chance = scores[scores.case == "shuffled"].kind == "distinct"
    between = sum(n["between"] for n in numbers.values())
    clear = all(n["distinct_share"] >= 5 * max(n["shuffled_share"], 0.01) for n in numbers.values())
    rule = (
        "with the targets shuffled ≤ 1 % of all words count as distinct; on the text, for each query, at least five "
        "times its shuffled share and 5 %; and there are words in between distinct and common"
    )
    first = next(iter(numbers))
    text = (
        f"distinct {min(share):.0%} to {max(share):.0%} of the words, with shuffled targets {by_chance.mean():.2%}; "
        f"{between} words in between; most salient for “{first}”: {', '.join(numbers[first]['top_words'])}"
    )
    measured = (
        f"{min(share):.0%} to {max(share):.0%} distinct (shuffled {by_chance.mean():.2%}), {between} words in between"
    )
    if by_chance.mean() > 0.01 or not clear or between == 0:
        return Judgement(Verdict("fails"), rule, text, numbers, measured)
    return Judgement(Verdict("holds"), rule, text, numbers, measured)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
