"""Figure 10: one neuron, several unrelated patterns.

For every neuron of the lower MLPs the strongest contexts in a corpus, grouped by the words that the query attends to
(`joma.superpose`). Two controls: the network before training, and contexts dealt out at random to the neurons of a
layer, which shows how many neurons would have two patterns by chance. The quick preset reads a small GPT-NeoX that is
trained on the embedded corpus; the others read Pythia from the hub, or from folders in ``$JOMA_MODELS``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np
import pandas as pd

from joma._exhibits._series import checkpoints, located, series
from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory.verdict import Verdict

if TYPE_CHECKING:
    from joma._inspect.superpose import Superposition

SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"series": {}, "data": "pydoc", "tokens": 100_000, "shuffles": 20},
    "laptop": {"models": ["EleutherAI/pythia-70m"], "data": "wikitext-2", "tokens": 1_000_000, "shuffles": 20},
    "paper": {
        "models": ["EleutherAI/pythia-160m", "EleutherAI/pythia-70m"],
        "data": "wikitext-103",
        "tokens": 3_000_000,
        "shuffles": 20,
    },
}
AXES = {"patterns": ["neuron"], "chance": ["shuffle"]}
EXAMPLES = 4  # neurons that are shown, two patterns each
STATES = {"trained": "trained", "untrained": "before training", "chance": "contexts dealt out at random"}
RULE = (
    "a pattern is 3 or more strong contexts that attend to common words; a neuron is superposed if it has 2 or more "
    "patterns, which share no attended word. Holds: in the trained model more neurons are superposed than with "
    "contexts dealt out at random, by more than 2 sd; holds under: some are, but not more than by chance; fails: none"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Count patterns in each model, trained and not, and with contexts dealt out at random."""
    from joma._inspect.page import as_json, page
    from joma._inspect.superpose import superpose
    from joma._run import write_atomic, write_json

    if "models" in settings:
        sources = {(name, s): located(name, r) for name in settings["models"] for s, r in _REVISIONS.items()}
        share = 0.0
    else:
        share = 0.6  # of the time, if the series has to be trained
        steps = checkpoints(series(settings["series"], seed, lambda done, what: progress(share * done, what)))
        ends = {"trained": max(steps), "untrained": min(steps)}
        sources = {("small GPT-NeoX", state): (str(steps[step]), None) for state, step in ends.items()}
    for n, ((name, state), (model, revision)) in enumerate(sources.items()):

        def told(done: float, what: str, n: int = n, state: str = state) -> None:
            progress(share + (1 - share) * (n + 0.8 * done) / len(sources), f"{STATES[state]}: {what}")

        found = superpose(model, settings["data"], tokens=settings["tokens"], revision=revision, progress=told)
        table = found.frame()
        for layer in found.strongest:
            counts = table[table.layer == layer].sort_values("neuron").patterns.to_numpy()
            writer.write(0, {"patterns": counts}, model=name, state=state, layer=layer)
        if state == "trained":
            by_chance = chance(found, settings["shuffles"], seed)
            writer.write(0, {"chance": by_chance}, model=name, state=state)
            if n == 0:
                found.info["model"] = name
                shown = found.top(EXAMPLES)
                write_json(writer.path / "examples.json", as_json(found, shown))
                write_atomic(writer.path / "superpose.html", page(found, found.top(20)))


_REVISIONS = {"trained": None, "untrained": "step0"}


def chance(found: Superposition, shuffles: int, seed: int) -> list[float]:
    """The share of superposed neurons when each gets as many contexts as it has, of any neurons of its layer."""
    from joma._inspect.group import attended_words, grouped

    rng = np.random.default_rng(seed)
    layers = []
    for layer, strongest in found.strongest.items():
        own = [found.contexts(layer, neuron) for neuron in range(len(strongest.value))]
        pool = [(c.position, attended_words(c, found.word)) for contexts in own for c in contexts]
        layers.append(([len(contexts) for contexts in own], pool))
    shares = []
    for _ in range(shuffles):
        superposed = total = 0
        for sizes, pool in layers:
            order, start = rng.permutation(len(pool)), 0
            for size in sizes:
                dealt = dict(pool[n] for n in order[start : start + size])  # a place in the text counts once
                superposed += len(grouped(list(dealt.values()))) >= 2
                start, total = start + size, total + 1
        shares.append(superposed / max(1, total))
    return shares


def draw(run: Run) -> Chart:
    """Share of neurons by number of patterns, with the controls; below, examples as in the paper's figure."""
    frame = run.frame()
    patterns = frame[frame.gauge == "patterns"]
    counts = patterns.assign(superposed=patterns.value >= 2)
    table = counts.groupby(["model", "state", "layer"], sort=False).superposed.mean().reset_index(name="share")
    table["what"] = table.state.map(STATES)
    table["place"] = [f"layer {int(n)}" for n in table.layer]
    by_chance = frame[frame.gauge == "chance"].groupby("model", sort=False).value.agg(["mean", "std"]).reset_index()
    bars: list[Any] = []
    for model in dict.fromkeys(table.model):
        base = (
            alt.Chart(
                table[table.model == model][["place", "what", "share"]],
                title=alt.Title(
                    f"{model}: superposed neurons",
                    subtitle="with two or more unrelated patterns; dashed: contexts dealt out at random, ± 2 sd",
                ),
            )
            .mark_bar()
            .encode(
                alt.X("place:N", title=None, sort=None, axis=alt.Axis(labelAngle=0)),
                alt.XOffset("what:N", sort=None),
                alt.Y("share:Q", title="share of neurons", axis=alt.Axis(format="%")),
                alt.Color(
                    "what:N", title=None, sort=None,
                    scale=alt.Scale(domain=["trained", "before training"], range=["#d55e00", "#9ab8cc"]),
                ),
                tooltip=["place", "what", alt.Tooltip("share", format=".2%")],
            )
        )  # fmt: skip
        level = by_chance[by_chance.model == model].assign(
            low=lambda x: (x["mean"] - 2 * x["std"]).clip(lower=0), high=lambda x: x["mean"] + 2 * x["std"]
        )
        band = alt.Chart(level[["low", "high"]]).mark_rect(color="#57606a", opacity=0.25)
        line = alt.Chart(level[["mean"]]).mark_rule(color="#24292f", strokeDash=[5, 4], strokeWidth=1.5)
        bars.append(
            alt.layer(base, band.encode(alt.Y("low:Q"), alt.Y2("high:Q")), line.encode(alt.Y("mean:Q"))).properties(
                width=560, height=190
            )
        )
    return alt.vconcat(*bars, _examples(run)).resolve_scale(color="independent")


WIDE = 118  # characters of a line of the examples


def _examples(run: Run) -> Any:
    """Two contexts a neuron, one of each pattern: tokens at their place, attended ones in bold, shade by activation."""
    stored = json.loads((run.path / "examples.json").read_text())
    rows = []
    for neuron in stored["neurons"]:
        for letter, pattern in zip("AB", neuron["patterns"], strict=False):
            name = f"{neuron['layer']}/{neuron['neuron']} {letter}"
            rows += [{"row": name, **token} for token in _tokens(pattern["contexts"][0])]
    frame = pd.DataFrame(rows, columns=["row", "at", "end", "ink", "text", "shade", "bold", "query"])
    order = list(dict.fromkeys(frame.row))
    y = alt.Y("row:N", sort=order, title=None, axis=alt.Axis(grid=False, ticks=False, domain=False))
    x, ink = (alt.X(name, scale=alt.Scale(domain=[0, WIDE], nice=False), axis=None) for name in ("at:Q", "ink:Q"))
    title = alt.Title(
        "Examples: one neuron, two patterns (A and B)",
        subtitle="layer/neuron; bold: what the query (framed) attends to; shade: the neuron's activation",
    )
    base = alt.Chart(frame, title=title)
    shade = base.mark_rect(height=16).encode(
        x, alt.X2("end:Q"), y, color=alt.value("#d55e00"), opacity=alt.Opacity("shade:Q", scale=None, legend=None)
    )
    frame_ = base.transform_filter("datum.query").mark_rect(height=16, fill=None, stroke="#24292f", strokeWidth=1.2)
    layers: list[Any] = [shade, frame_.encode(x, alt.X2("end:Q"), y)]
    for bold in (True, False):
        part = base.transform_filter(f"datum.bold == {str(bold).lower()}").mark_text(
            align="left", font="DejaVu Sans Mono, monospace", fontSize=9, baseline="middle",
            fontWeight="bold" if bold else "normal", color="#24292f" if bold else "#57606a",
        )  # fmt: skip
        layers.append(part.encode(ink, y, text="text:N"))
    return alt.layer(*layers).properties(width=5.45 * WIDE, height=26 * max(1, len(order)))


def _tokens(context: dict[str, Any]) -> list[dict[str, Any]]:
    """The end of a window up to its query, as much as a line holds: place and text of each token."""
    top = max(context["along"][context["query"]], 1e-9)
    texts = [text.replace("\n", "⏎").replace("\t", " ") for text in context["tokens"]]
    first, room = context["query"] + 1, WIDE
    while first > 0 and room >= len(texts[first - 1]):
        first, room = first - 1, room - len(texts[first - 1])
    found, at = [], 0
    for n in range(first, context["query"] + 1):
        bold = n in context["attended"]
        shade = round(0.7 * max(0.0, min(1.0, context["along"][n] / top)), 3)
        found.append(
            {
                "at": at,
                "end": at + len(texts[n]),
                "ink": at + len(texts[n]) - len(texts[n].lstrip()),  # pictures drop white space at the front
                "text": texts[n].strip(),
                "shade": shade,
                "bold": bold,
                "query": n == context["query"],
            }
        )
        at += len(texts[n])
    return found


def judge(run: Run) -> Judgement:
    """More superposed neurons than by chance? By RULE, over all models."""
    frame = run.frame()
    patterns = frame[frame.gauge == "patterns"]
    numbers: dict[str, Any] = {}
    parts, above, some = [], [], []
    for model in dict.fromkeys(patterns.model):
        own = patterns[patterns.model == model]
        share = {s: float((own[own.state == s].value >= 2).mean()) for s in ("trained", "untrained")}
        level = frame[(frame.gauge == "chance") & (frame.model == model)].value
        mean, sd = float(level.mean()), float(level.std())
        trained = own[own.state == "trained"].value
        numbers[model] = {
            **share, "by chance": mean, "sd": sd, "neurons": len(trained), "superposed": int((trained >= 2).sum()),
            "most patterns": int(trained.max()),
        }  # fmt: skip
        above.append(share["trained"] > mean + 2 * sd)
        some.append(share["trained"] > 0)
        parts.append(
            f"{model}: {numbers[model]['superposed']} of {len(trained):,} neurons have two or more patterns "
            f"({share['trained']:.1%}; {share['untrained']:.1%} before training, {mean:.1%} ± {sd:.1%} by chance)"
        )
    verdict = "holds" if all(above) else "holds under" if all(some) else "fails"
    text = "; ".join(parts)
    if verdict == "holds under":
        text += ". So: there are such neurons, but no more than unrelated contexts give by sharing common words"
    first = numbers[next(iter(numbers))]
    measured = f"superposed {first['trained']:.1%}, chance {first['by chance']:.1%}"
    return Judgement(Verdict(verdict), RULE, text, numbers, measured, "4 neurons shown, 2 patterns each")


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
