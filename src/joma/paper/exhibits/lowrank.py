"""Is the gradient of lower rank than the weight, and does its rank fall first? (GaLore's Lemma B.6, from Theorem 2.)

The paper's language model in training: stable rank of the lower MLP matrix W, of its gradient as Adam gets it, and of
Adam's update; beside them attention entropy, with its dip and bounce.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from joma._runs import Run, RunWriter
from joma._runs.curve import ENTROPY, RANK, Curve, describe_all
from joma._show.plots import panels as p
from joma.paper.exhibits import _curves
from joma.paper.exhibits._curves import AXES, GRID, PLAIN, TOY, TOY_RULE, deep, measured
from joma.paper.exhibits.base import Exhibit, Experiment, Progress
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": GRID | {"lr": 1e-4, "steps": 5000, "every": 100},
    "paper": {"data": "wikitext-2", "vocabulary": None, "layers": [1, 2, 5, 10], "lr": 1e-4, "steps": 50_000,
              "seeds": 3, "every": 100, "valid_windows": 0, "valid_every": 1000, "gauges": GRID["gauges"], **PLAIN},
}  # fmt: skip
RANKS = {"stable_rank": "weight", "gradient_rank": "gradient", "update_rank": "update"}
LESS = 0.5  # of the weight's stable rank
RULE = (
    f"{RANK.smoothed()}at the trough of each: the gradient's stable rank is at most {LESS:g} of the weight's, and it "
    "has made half of its fall before the weight has; holds: in every layer; holds under a condition: one of the "
    "two in every layer; else fails. The update's rank, and where the troughs lie beside that of attention entropy, "
    f"are reported and do not decide. {TOY_RULE}"
)
WOULD_DECIDE = "models on WikiText, of several depths and seeds: --preset laptop or paper"


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one model per depth and seed, with gauges of the weight, the gradient and the update."""
    fixed = {key: settings[key] for key in ("data", "lr", "steps")}
    runs = [{**fixed, "layers": layers} for layers in settings["layers"]]
    _curves.train_all(writer, runs, settings, seed, progress, (*_curves.GAUGES, *RANKS))


def stories(run: Run) -> dict[tuple[int, int], dict[str, Curve]]:
    """(layers, layer) -> what each rank and the entropy did, means over the seeds."""
    data = run.info["config"]["settings"]["data"]
    out: dict[tuple[int, int], dict[str, Curve]] = {}
    for gauge in (*RANKS, "entropy"):
        rule = ENTROPY if gauge == "entropy" else RANK
        for (layers, layer), curve in describe_all(
            measured(run, gauge, data), rule, ["layers", "layer"]
        ).items():
            out.setdefault((int(layers), int(layer)), {})[gauge] = curve
    return out


def half_way(frame: pd.DataFrame, curve: Curve) -> float:
    """The first step after its peak at which a curve, smoothed, has made half of its fall; infinite without one."""
    smooth = (
        frame.sort_values("step")
        .set_index("step")
        .value.rolling(RANK.window, center=True, min_periods=1)
        .median()
    )
    if curve.depth <= 0:
        return math.inf
    peak = smooth[smooth.index <= curve.trough_step].idxmax()
    below = smooth[(smooth.index >= peak) & (smooth <= curve.start - curve.depth / 2)]
    return float(below.index[0]) if len(below) else math.inf


def halves(run: Run) -> dict[tuple[int, int], dict[str, float]]:
    """(layers, layer) -> the step at which each rank has made half of its fall."""
    data = run.info["config"]["settings"]["data"]
    out: dict[tuple[int, int], dict[str, float]] = {}
    for (layers, layer), curves in stories(run).items():
        out[layers, layer] = {}
        for gauge in RANKS:
            frame = measured(run, gauge, data)
            own = frame[(frame.layers == layers) & (frame.layer == layer)]
            out[layers, layer][gauge] = half_way(own, curves[gauge])
    return out


def draw(run: Run) -> p.Chart:
    """One column per depth: the ranks of the top layer, and entropy below."""
    settings = run.info["config"]["settings"]
    tables = {gauge: measured(run, gauge, settings["data"]) for gauge in (*RANKS, "entropy")}
    columns = []
    for layers in settings["layers"]:
        own = {
            gauge: table[(table.layers == layers) & (table.layer == layers - 1)]
            for gauge, table in tables.items()
        }
        ranks = pd.concat([own[gauge].assign(of=name) for gauge, name in RANKS.items()])
        x, tip = p.step_axis(ranks.step), {"of": None, "step": None, "value": ".3g"}
        colour = p.by("of", order=list(RANKS.values()))
        title = f"{deep(layers)}: lower MLP of the top layer"
        above = p.lines(ranks, x, p.y("value", "stable rank", log=True), colour, tip=tip)
        below = p.lines(own["entropy"], x, p.y("value", "attention entropy (nats)", zero=True))
        columns.append(
            p.column(p.panel(title, above, size=(300, 180)), p.panel(None, below, size=(300, 110)))
        )
    return p.row(*columns)


def judge(run: Run) -> Judgement:
    """Check that the gradient's rank is lower than the weight's, and falls earlier."""
    steps = halves(run)
    layers: dict[str, Any] = {}
    lower = []
    earlier = []
    for (depth, layer), curves in stories(run).items():
        half = steps[depth, layer]
        lower.append(curves["gradient_rank"].trough <= LESS * curves["stable_rank"].trough)
        earlier.append(half["gradient_rank"] < half["stable_rank"])
        numbers = {gauge: curve.numbers() for gauge, curve in curves.items()}
        for gauge in RANKS:
            numbers[gauge]["half"] = half[gauge]
        layers[f"layer {layer} of {depth}"] = numbers
    if run.info["config"]["settings"]["data"] == TOY:
        verdict = Verdict.INCONCLUSIVE
    elif all(lower) and all(earlier):
        verdict = Verdict.HOLDS
    elif all(lower) or all(earlier):
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS
    ranks = []
    for gauge, name in RANKS.items():
        path = _path(gauge, f"step {{{gauge}.half:g}}")
        ranks.append(f"of the {name} {path}")
    template = (
        f"{{layers:{{key}}, stable rank {', '.join(ranks)}, attention entropy {_path('entropy')} "
        "({entropy.pattern})}"
    )
    return Judgement(
        verdict,
        {"layers": layers, "lower": sum(lower), "earlier": sum(earlier), "count": len(lower)},
        template,
        "gradients have a lower rank than the weight in {lower} of {count} layers",
    )


def _path(gauge: str, half: str = "") -> str:
    """Return the part of the template that shows what one curve did."""
    path = " → ".join(f"{{{gauge}.{name}:.2f}}" for name in ("start", "trough", "end"))
    if half:
        return f"{path} (half-way at {half})"
    return path


# Forty steps of a two-layer model on a text that joma brings along.
CODE_SLICE = {
    "data": "zipf",
    "vocabulary": 500,
    "layers": [2],
    "lr": 1e-3,
    "steps": 40,
    "seeds": 1,
    "every": 10,
    "valid_windows": 2,
    "valid_every": 0,
    "gauges": GRID["gauges"],
    **PLAIN,
}
RECORD_SLICE = {"layers": [1], "steps": 40, "seeds": 1}
EXHIBIT = Exhibit(
    id="lowrank",
    title="Is the gradient of lower rank than the weight?",
    statement=(
        "GaLore: the gradient of the lower MLP becomes low-rank before the weight does (from "
        "Theorem 2)."
    ),
    seconds=60,
    rule=RULE,
    would_decide=WOULD_DECIDE,
    experiment=Experiment(
        SETTINGS, run, draw, judge, AXES, code_slice=CODE_SLICE, record_slice=RECORD_SLICE
    ),
    messages={
        Verdict.HOLDS: "The gradient is of lower rank than the weight, and is so earlier",
        Verdict.UNDER: "The gradient is of lower rank than the weight, or falls earlier; not both throughout",
        Verdict.FAILS: (
            "Not in every layer is the gradient of lower rank than the weight, nor does it "
            "fall earlier"
        ),
        Verdict.INCONCLUSIVE: "is the gradient of lower rank than the weight, and earlier?",
    },
)
