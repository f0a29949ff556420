"""Which words attention turns to, and when: the Introduction's order of entrance, on a language model.

The paper says that attention “only attends to tokens that frequently co-occur with the query” at first and later
“gradually includes tokens with less frequent co-occurrence”. A language model of one layer is trained by SGD and by
Adam. At several steps, and for the most frequent words as queries, the *lift* of a context word (the attention that it
gets over what it would get if all words of the context got the same) is compared with how often it co-occurs with the
query, by rank. Next to it: the lift over all queries, compared with the frequency of the word.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from joma._runs import Run, RunWriter
from joma._runs.curve import ENTROPY, Curve, describe
from joma._show.plots import panels as p
from joma.paper.exhibits._statistics import bounds, mean_interval
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.labs.entering import EnteringRun, EnteringSettings, EnteringText
from joma.paper.verdict import Verdict

# Rates at which attention dips and comes back, chosen by its entropy alone.
RATES = {"SGD": 1.5, "Adam": 1e-3}
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {
        "text": "wikitext-2",
        "vocabulary": 1000,
        "width": 128,
        "length": 35,
        "batch": 20,
        "steps": 2400,
        "every": 75,
        "probe": 20,
        "queries": 50,
        "least": 10,
        "seeds": 6,
    },
    "paper": {
        "text": "wikitext-2",
        "vocabulary": 10_000,
        "width": 200,
        "length": 35,
        "batch": 20,
        "steps": 20_000,
        "every": 200,
        "probe": 100,
        "queries": 200,
        "least": 10,
        "seeds": 8,
    },
}
RANKS = {
    "pair_rank": "with co-occurrence with the query",
    "word_rank": "with the word's frequency",
}
RULE = (
    "per optimiser, with rank correlations of the lift of context words and their co-occurrence with the query, mean "
    f"over queries, in each seed: {ENTROPY.smoothed()}the mean attention entropy dips by {ENTROPY.fall} and rises again "
    f"by {ENTROPY.rise}, otherwise the optimiser decides nothing. First: the correlation at the trough is above 0 with "
    "its 95 % interval over seeds. Later: from the trough to the end it falls, by a difference whose 95 % interval is "
    "below 0. Holds: both under both optimisers; holds under a condition: both under one of them; fails: under none, "
    "and under one at least the interval at the trough is below 0, or that of the difference above 0; else "
    "inconclusive. The correlation with the frequency of the word is reported and does not decide"
)
WOULD_DECIDE = (
    "more seeds, or a longer training in which attention dips and comes back: --preset paper"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one model per seed and optimiser, and write entropy and rank correlations over training."""
    seeds = settings["seeds"]
    trained = EnteringSettings(**{key: settings[key] for key in settings if key != "seeds"})
    text = EnteringText(trained)
    for n in range(seeds):
        for k, (optimiser, lr) in enumerate(RATES.items()):
            one = EnteringRun(text, optimiser.lower(), lr, seed + n)
            for step, numbers in one.measurements():
                share = (k + step / trained.steps) / len(RATES)
                progress((n + share) / seeds, f"{optimiser}, seed {n + 1} of {seeds}, step {step}")
                writer.write(step, numbers, optimiser=optimiser, member=n)


def entropy_curve(frame: pd.DataFrame, optimiser: str) -> Curve:
    """Return what the attention entropy did, in the mean over seeds."""
    entropy = where(frame, gauge="entropy", optimiser=optimiser).groupby("step").value.mean()
    return describe(entropy.index, entropy.to_numpy(), ENTROPY)


def _by_seed(frame: pd.DataFrame, gauge: str, optimiser: str, step: int) -> pd.Series[float]:
    """Return the values at one step, one per seed."""
    rows = where(frame, gauge=gauge, optimiser=optimiser, step=step)
    return rows.set_index("member").value.sort_index()


def draw(run: Run) -> p.Chart:
    """Entropy over training, and both correlations with their intervals over seeds."""
    frame = run.frame()
    step = p.x("step", "step")
    colour = p.by("optimiser", order=list(RATES))
    tip = {"optimiser": None, "step": None, "value": ".3f"}
    entropy = where(frame, gauge="entropy")
    nats = p.y("value", "attention entropy (nats)")
    lines = p.lines(entropy, step, nats, colour, detail="member", tip=tip, width=1.2)
    panels = [p.panel("Attention entropy", lines, note="one line per seed", size=(240, 210))]
    for gauge, name in RANKS.items():
        spans = []
        for optimiser in RATES:
            for at in sorted(set(frame.step)):
                values = _by_seed(frame, gauge, optimiser, at)
                mean, low, high = mean_interval(values)
                spans.append(
                    {"optimiser": optimiser, "step": at, "mid": mean, "low": low, "high": high}
                )
        y = p.y("low", "rank correlation of the lift")
        tip = {"optimiser": None, "step": None, "mid": ".3f"}
        band = p.bands(pd.DataFrame(spans), step, y, colour, tip=tip)
        note = "mean over seeds, 95 % interval"
        panels.append(p.panel(f"Lift, {name}", band, p.levels(0.0), note=note, size=(260, 210)))
    return p.row(*panels)


def headline(run: Run) -> p.Chart:
    """The correlation of lift and co-occurrence over training, one line per optimiser."""
    means = (
        where(run.frame(), gauge="pair_rank")
        .groupby(["optimiser", "step"])
        .value.mean()
        .reset_index()
    )
    colour = p.by("optimiser", order=list(RATES), legend=False)
    y = p.y("value", "rank correlation", ticks=4)
    return p.thumbnail(p.lines(means, p.x("step", "step", ticks=3), y, colour))


def judge(run: Run) -> Judgement:
    """Check that words that co-occur often enter first, and others later, under both optimisers."""
    frame = run.frame()
    optimisers = {name: _numbers_of(frame, name) for name in RATES}
    outcomes = [numbers["outcome"] for numbers in optimisers.values()]
    numbers = {
        "optimisers": optimisers,
        "seeds": int(frame.member.nunique()),
        "as stated": [name for name in RATES if optimisers[name]["outcome"] == "as stated"],
    }
    if all(outcome == "as stated" for outcome in outcomes):
        verdict = Verdict.HOLDS
    elif "as stated" in outcomes:
        verdict = Verdict.UNDER
    elif "otherwise" in outcomes:
        verdict = Verdict.FAILS
    else:
        verdict = Verdict.INCONCLUSIVE
    return Judgement(
        verdict,
        numbers,
        "{seeds} seeds, rank correlation of lift and co-occurrence: {optimisers:{key} {first.mean:.2f} "
        "({first.low:.2f} … {first.high:.2f}) at the trough of attention entropy (step {trough step}), "
        "{last.mean:.2f} at the end, change {change.mean:.2f} ({change.low:.2f} … {change.high:.2f}), "
        "with the word's frequency {word first:.2f} and {word last:.2f}; entropy {entropy.start:.2f} → "
        "{entropy.trough:.2f} → {entropy.end:.2f}}",
        "{optimisers:{key} {first.mean:.2f} at the trough, {last.mean:.2f} at the end}",
    )


def _numbers_of(frame: pd.DataFrame, optimiser: str) -> dict[str, Any]:
    """Return the numbers of one optimiser, and whether words enter as stated."""
    curve = entropy_curve(frame, optimiser)
    trough = int(curve.trough_step)
    end = int(where(frame, optimiser=optimiser).step.max())
    at_trough = _by_seed(frame, "pair_rank", optimiser, trough)
    at_end = _by_seed(frame, "pair_rank", optimiser, end)
    first = bounds(mean_interval(at_trough))
    change = bounds(mean_interval(at_end - at_trough))
    outcome = "undecided"
    if curve.bounced and first["low"] > 0 and change["high"] < 0:
        outcome = "as stated"
    elif curve.bounced and (first["high"] < 0 or change["low"] > 0):
        outcome = "otherwise"
    return {
        "outcome": outcome,
        "entropy": curve.numbers(),
        "trough step": trough,
        "start": bounds(mean_interval(_by_seed(frame, "pair_rank", optimiser, 0))),
        "first": first,
        "last": bounds(mean_interval(at_end)),
        "change": change,
        "word first": float(_by_seed(frame, "word_rank", optimiser, trough).mean()),
        "word last": float(_by_seed(frame, "word_rank", optimiser, end).mean()),
    }


CODE_SLICE = {
    "text": "zipf",
    "vocabulary": 200,
    "width": 16,
    "length": 16,
    "batch": 8,
    "steps": 40,
    "every": 20,
    "probe": 60,
    "queries": 10,
    "least": 5,
    "seeds": 1,
}
RECORD_SLICE = {"steps": 150, "seeds": 1}
EXHIBIT = Exhibit(
    id="entering",
    title="Which words attention turns to, and when",
    statement=(
        "Attention attends first to words that often co-occur with the query, and then gradually includes words that "
        "co-occur less (Introduction)."
    ),
    seconds=20,
    rule=RULE,
    paper="frequent co-occurrence first",
    would_decide=WOULD_DECIDE,
    experiment=Experiment(
        SETTINGS,
        run,
        draw,
        judge,
        headline=headline,
        code_slice=CODE_SLICE,
        record_slice=RECORD_SLICE,
    ),
    messages={
        Verdict.HOLDS: "Attention turns to words that often co-occur with the query first, to others later",
        Verdict.UNDER: (
            "Under one optimiser attention turns to words that often co-occur with the query first, to others later"
        ),
        Verdict.FAILS: "Attention does not turn to words that often co-occur first, and to others later",
        Verdict.INCONCLUSIVE: "which words does attention turn to first?",
    },
)
