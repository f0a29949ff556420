"""Figure 10: one neuron, several unrelated patterns.

For every neuron of the lower MLPs the strongest contexts in a corpus, grouped by the words that the query attends to
(`joma.superpose`). Two controls: the network before training, and contexts dealt out at random to the neurons of a
layer, which shows how many neurons would have two patterns by chance. The eight texts that the figure prints are read,
too (`joma._exhibits._texts`). The quick preset reads a small GPT-NeoX that is trained on the embedded corpus; the
others read Pythia from the hub, or from folders in ``$JOMA_MODELS``.
"""

from __future__ import annotations

import json
from typing import Any

from joma._exhibits._series import checkpoints, located, series
from joma._exhibits._texts import fired_by_both
from joma._exhibits.base import Experiment, Judgement, Progress, where
from joma._figures import panels as p
from joma._figures.contexts import contexts
from joma._run import Run, RunWriter
from joma.theory.verdict import Verdict

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
AXES = {"patterns": ["neuron"], "chance": ["shuffle"], "fired_by_both": ["a", "b"]}
REVISIONS = {"trained": None, "untrained": "step0"}  # of a model on the hub
EXAMPLES = 4  # neurons that are shown, two patterns each
STATES = {"trained": "trained", "untrained": "before training", "chance": "contexts dealt out at random"}
RULE = (
    "a pattern is 3 or more strong contexts that attend to common words; a neuron is superposed if it has 2 or more "
    "patterns, which share no attended word. The count is given beside that before training and that with contexts "
    "dealt out at random, and decides nothing: chance alone gives as many such neurons as a trained model has, since "
    "unrelated contexts share common words"
)
WOULD_DECIDE = "a count of superposed neurons that is zero, but for chance, where contexts are dealt out at random"
REVISED = "more neurons than by chance, by 2 sd, was called holds, and some neurons holds under"


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Count patterns in each model, trained and not, and with contexts dealt out at random."""
    from joma._inspect.page import as_json, page
    from joma._inspect.superpose import superpose
    from joma._run import write_atomic, write_json

    if "models" in settings:
        sources = {(name, s): located(name, r) for name in settings["models"] for s, r in REVISIONS.items()}
        share = 0.0
    else:
        share = 0.6  # of the time, if the series has to be trained
        steps = checkpoints(series(settings["series"], seed, lambda done, what: progress(share * done, what)))
        ends = {"trained": max(steps), "untrained": min(steps)}
        sources = {("small GPT-NeoX", state): (str(steps[step]), None) for state, step in ends.items()}
    examples: dict[str, Any] = {}
    for n, ((name, state), (model, revision)) in enumerate(sources.items()):

        def report(done: float, what: str, n: int = n, state: str = state) -> None:
            progress(share + (1 - share) * (n + 0.8 * done) / len(sources), f"{STATES[state]}: {what}")

        superposition = superpose(
            model, settings["data"], tokens=settings["tokens"], revision=revision, progress=report
        )
        table = superposition.frame()
        for layer in superposition.strongest:
            counts = table[table.layer == layer].sort_values("neuron").patterns.to_numpy()
            writer.write(0, {"patterns": counts}, model=name, state=state, layer=layer)
        if state == "trained":
            by_chance = superposition.chance(settings["shuffles"], seed)
            by_both = fired_by_both(model, revision, superposition)
            writer.write(0, {"chance": by_chance, "fired_by_both": by_both}, model=name, state=state)
            superposition.info["model"] = name
            examples[name] = as_json(superposition, superposition.top(EXAMPLES))
            short = name.rpartition("/")[2].replace(" ", "-")
            write_atomic(writer.path / f"superpose-{short}.html", page(superposition, superposition.top(20)))
    write_json(writer.path / "examples.json", {"models": examples})


def draw(run: Run) -> p.Chart:
    """Share of neurons by number of patterns, with the controls; below, examples as in the paper's figure."""
    frame = run.frame()
    counts = where(frame, gauge="patterns")
    counts = counts.assign(superposed=counts.value >= 2, what=counts.state.map(STATES))
    shares = counts.groupby(["model", "what", "layer"], sort=False).superposed.mean().reset_index(name="share")
    shares["place"] = shares.layer.map("layer {:.0f}".format)
    panels = []
    for model in dict.fromkeys(shares.model):
        level = where(frame, gauge="chance", model=model).value
        bars = p.bars(
            where(shares, model=model), p.x("place", kind="N", sort=None), p.y("share", "share of neurons", format="%"),
            p.by("what", colours={"trained": "#d55e00", "before training": "#9ab8cc"}),
            tip={"place": None, "what": None, "share": ".2%"}, chance=(float(level.mean()), float(level.std())),
        )  # fmt: skip
        note = "with two or more unrelated patterns; dashed: contexts dealt out at random, ± 2 sd"
        panels.append(p.panel(f"{model}: superposed neurons", bars, note=note, size=(560, 190)))
    note = "layer/neuron; bold: what the query (framed) attends to; shade: the neuron's activation"
    for model, shown in json.loads((run.path / "examples.json").read_text())["models"].items():
        rows = {
            f"{neuron['layer']}/{neuron['neuron']} {letter}": pattern["contexts"][0]
            for neuron in shown["neurons"]
            for letter, pattern in zip("AB", neuron["patterns"], strict=False)
        }
        panels.append(contexts(f"{model}: one neuron, two patterns (A and B)", note, rows))
    return p.column(*panels)


def judge(run: Run) -> Judgement:
    """The count beside chance and beside the untrained model; by RULE it decides nothing."""
    frame = run.frame()
    patterns = where(frame, gauge="patterns")
    numbers: dict[str, Any] = {}
    parts = []
    for model in dict.fromkeys(patterns.model):
        counts = {state: where(patterns, model=model, state=state).value for state in ("trained", "untrained")}
        share = {state: float((values >= 2).mean()) for state, values in counts.items()}
        level = where(frame, gauge="chance", model=model).value
        mean, sd, trained = float(level.mean()), float(level.std()), counts["trained"]
        superposed = int((trained >= 2).sum())
        both = where(frame, gauge="fired_by_both", model=model)
        paired, others = (both[(both.a == both.b) == same].value for same in (True, False))
        numbers[model] = {
            **share, "by chance": mean, "sd": sd, "neurons": len(trained), "superposed": superposed,
            "most patterns": int(trained.max()), "fired by A and B, by pair": paired.astype(int).tolist(),
            "by texts of two pairs": float(others.mean()),
        }  # fmt: skip
        parts.append(
            f"{model}: {superposed} of {len(trained):,} neurons have two or more patterns ({share['trained']:.1%}; "
            f"{share['untrained']:.1%} before training, {mean:.1%} ± {sd:.1%} by chance); the texts A and B "
            f"of the figure's pairs both fire {', '.join(f'{count:.0f}' for count in paired)} neurons, texts of two "
            f"pairs {others.mean():.1f} in the mean"
        )
    text = "; ".join(parts)
    first = numbers[next(iter(numbers))]
    measured = f"superposed {first['trained']:.1%}, chance {first['by chance']:.1%}"
    paper = "4 neurons shown, 2 patterns each"
    return Judgement(Verdict.UNDECIDED, RULE, text, numbers, measured, paper, WOULD_DECIDE, REVISED)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
