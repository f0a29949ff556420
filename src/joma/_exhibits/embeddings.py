"""Are the embedding vectors almost orthogonal, at the input of every layer? (The slides' check of the assumption.)

Cosines between the representations of different tokens at each layer's input, over training: raw, and without the
tokens' common mean; beside random Gaussian vectors of the same dimension. The quick preset reads a small GPT-NeoX that
is trained on the embedded corpus; the others read Pythia from the hub, or from folders in ``$JOMA_MODELS``.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from joma._exhibits._series import checkpoints, located, series
from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._figures.watch import step_axis
from joma._run import Run, RunWriter
from joma.theory.verdict import Verdict

PYTHIA = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 143000]
SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"series": {}, "data": "pydoc", "sample": 4096},
    "laptop": {"model": "EleutherAI/pythia-70m", "steps": PYTHIA, "data": "wikitext-2", "sample": 8192},
    "paper": {"model": "EleutherAI/pythia-1.4b", "steps": PYTHIA, "data": "wikitext-103", "sample": 8192},
}
STATISTICS = ("mean", "signed_mean", "q90", "maximum")
AXES = {
    **{name: ["layer"] for name in STATISTICS},
    "histogram": ["layer", "bin"],
    "same_token": ["layer", "other"],
}
BINS = 64
KINDS = {"raw": "as they are", "centred": "without their common mean"}
RULE = (
    "almost orthogonal: the mean |cos| between different tokens is at most 2 times that of random Gaussian vectors of "
    "the same dimension. Last checkpoint; holds: at every layer's input as it is; holds under: at every layer's input "
    "without the tokens' common mean, or as it is at the first layer; else fails"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Measure the geometry of each checkpoint on the same tokens."""
    from joma._inspect.geometry import embedding_geometry

    if "model" in settings:
        found = {step: located(settings["model"], f"step{step}") for step in settings["steps"]}
        share = 0.0
    else:
        share = 0.6  # of the time, if the series has to be trained
        folder = series(settings["series"], seed, lambda done, what: progress(share * done, what))
        found = {step: (str(path), None) for step, path in checkpoints(folder).items()}
    for n, (step, (model, revision)) in enumerate(found.items()):
        progress(share + (1 - share) * n / len(found), f"step {step}")
        geometry = embedding_geometry(model, settings["data"], sample=settings["sample"], revision=revision)
        table = geometry.frame()
        for kind in KINDS:
            part = table[table.kind == kind]
            values = {name: part[name].to_numpy() for name in STATISTICS}
            values["same_token"] = geometry.between(centre=kind == "centred")
            values["histogram"] = np.array([c.histogram(BINS).numpy() for c in getattr(geometry, kind)])
            writer.write(step, values, kind=kind)
        writer.write(step, {"random": geometry.random, "dimension": geometry.dimension, "tokens": part.tokens.iloc[0]})


def _colour(layers: int) -> alt.Color:
    scheme = alt.SchemeParams(name="plasma", extent=[0.0, 0.86])
    return alt.Color("layer:O", title="layer", scale=alt.Scale(scheme=scheme, domain=list(range(layers))))


def draw(run: Run) -> Chart:
    """Mean |cos| over training; its distribution at the end; the same token at two layers."""
    frame = run.frame()
    layers = 1 + int(frame[frame.gauge == "mean"].layer.max())
    random = float(frame[frame.gauge == "random"].value.iloc[-1])
    last = int(frame.step.max())
    rows: list[Any] = []
    for kind, words in KINDS.items():
        mean = frame[(frame.gauge == "mean") & (frame.kind == kind)][["step", "layer", "value"]]
        lines = _over_steps(mean.assign(layer=mean.layer.astype(int)), words, layers)
        rows.append(
            alt.hconcat(
                lines + _random_line(random),
                _distribution(frame, kind, last, layers, int(frame[frame.gauge == "dimension"].value.iloc[0])),
                _between(frame, kind, last),
            ).resolve_scale(color="independent")
        )
    return alt.vconcat(*rows).resolve_scale(color="independent")


def _over_steps(mean: pd.DataFrame, words: str, layers: int) -> alt.Chart:
    return (
        alt.Chart(mean, title=alt.Title(f"Tokens {words}", subtitle="mean |cos|; dashed: random vectors"))
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=14))
        .encode(
            step_axis(mean.step, scan=True),
            alt.Y("value:Q", title="mean |cos| of different tokens", scale=alt.Scale(domain=[0, 1])),
            _colour(layers),
            tooltip=["step", "layer", alt.Tooltip("value", format=".3f")],
        )
        .properties(width=260, height=200)
    )


def _random_line(random: float) -> alt.Chart:
    return (
        alt.Chart(pd.DataFrame({"value": [random]}))
        .mark_rule(strokeDash=[5, 4], color="black", strokeWidth=1.5)
        .encode(alt.Y("value:Q"))
    )


def _distribution(frame: pd.DataFrame, kind: str, last: int, layers: int, d: int) -> Any:
    counts = frame[(frame.gauge == "histogram") & (frame.kind == kind) & (frame.step == last)]
    counts = counts[["layer", "bin", "value"]].astype({"layer": int})
    counts["value"] /= counts.groupby("layer").value.transform("sum") / BINS  # a density over |cos|
    counts["cosine"] = (counts.bin.astype(float) + 0.5) / BINS
    x = (np.arange(BINS) + 0.5) / BINS
    density = (1 - x**2) ** ((d - 3) / 2)
    expected = pd.DataFrame({"cosine": x, "value": density / density.mean()})
    axis = alt.X("cosine:Q", title="|cos|", scale=alt.Scale(domain=[0, 1]))
    lines = (
        alt.Chart(counts[["layer", "cosine", "value"]], title=alt.Title(f"Step {last:,}", subtitle="density of |cos|"))
        .mark_line(strokeWidth=1.8, interpolate="step")
        .encode(axis, alt.Y("value:Q", title="density"), _colour(layers), tooltip=["layer", "cosine", "value"])
    )
    rule = alt.Chart(expected).mark_line(strokeDash=[5, 4], color="black", strokeWidth=1.5)
    return (lines + rule.encode(axis, alt.Y("value:Q"))).properties(width=220, height=200)


def _between(frame: pd.DataFrame, kind: str, last: int) -> Any:
    same = frame[(frame.gauge == "same_token") & (frame.kind == kind) & (frame.step == last)]
    same = same[["layer", "other", "value"]].astype({"layer": int, "other": int})
    base = alt.Chart(same, title=alt.Title("Between layers", subtitle="mean cos of the same token")).encode(
        alt.X("other:O", title="input of layer", axis=alt.Axis(labelAngle=0)), alt.Y("layer:O", title="input of layer")
    )
    colour = alt.Color("value:Q", title="cos", scale=alt.Scale(scheme="blues", domain=[0, 1]))
    cells = base.mark_rect().encode(colour, tooltip=["layer", "other", alt.Tooltip("value", format=".3f")])
    if same.layer.max() < 8:
        ink = alt.condition("datum.value > 0.6", alt.value("white"), alt.value("black"))
        return (cells + base.mark_text(fontSize=10).encode(alt.Text("value:Q", format=".2f"), color=ink)).properties(
            width=180, height=200
        )
    return alt.layer(cells).properties(width=180, height=200)


def judge(run: Run) -> Judgement:
    """Compare with random vectors, at the last checkpoint; by RULE."""
    from joma._inspect.geometry import ALMOST

    frame = run.frame()
    last = frame[frame.step == frame.step.max()]
    random = float(last[last.gauge == "random"].value.iloc[0])
    means = {
        kind: [float(x) for x in last[(last.gauge == "mean") & (last.kind == kind)].sort_values("layer").value]
        for kind in KINDS
    }
    first = frame[(frame.step == frame.step.min()) & (frame.gauge == "mean") & (frame.kind == "raw")]
    numbers: dict[str, Any] = {"random": random, "dimension": int(last[last.gauge == "dimension"].value.iloc[0])}
    numbers |= {"mean |cos|": means, "untrained, raw": [float(x) for x in first.sort_values("layer").value]}
    within = {kind: [x <= ALMOST * random for x in values] for kind, values in means.items()}
    numbers["almost orthogonal"] = within
    raw, centre = means["raw"], means["centred"]
    text = (
        f"mean |cos| of different tokens at the layers' inputs: {raw[0]:.2f} (first) to {raw[-1]:.2f} (last) as they "
        f"are, {centre[0]:.2f} to {centre[-1]:.2f} without their mean; random vectors {random:.2f}; almost orthogonal "
        f"at {sum(within['raw'])} and {sum(within['centred'])} of {len(raw)} layers"
    )
    verdict = (
        "holds" if all(within["raw"]) else "holds under" if all(within["centred"]) or within["raw"][0] else "fails"
    )
    measured = f"mean |cos| {max(raw):.2f}, centred {max(centre):.2f}, random {random:.2f}"
    return Judgement(Verdict(verdict), RULE, text, numbers, measured, "almost orthogonal")


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
