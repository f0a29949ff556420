"""Figure 8: attention entropy over training for several learning rates, with validation losses."""

from __future__ import annotations

from typing import Any

from joma._runs import Run, RunWriter
from joma._runs.curve import ENTROPY
from joma._show.plots import panels as p
from joma.paper.exhibits import _curves
from joma.paper.exhibits._curves import (
    AXES,
    GRID,
    PLAIN,
    TO_THE_LETTER,
    TOY,
    TOY_RULE,
    best_loss,
    curves,
    measured,
)
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

# steps: so many at least, and at smaller learning rates so many more that lr × steps is tau at least
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": GRID | {"lr": [1e-4, 3e-4, 1e-3, 1e-2]},
    "paper": {"data": "wikitext-2", "vocabulary": None, "layers": [2], "lr": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2],
              "steps": 50_000, "tau": 0.0, "points": 50, "seeds": 1, "every": 100, **TO_THE_LETTER},
}  # fmt: skip
RULE = (
    "a run matches the theory if the entropy of its top layer dips and bounces without a collapse: "
    f"{ENTROPY.smoothed()}{ENTROPY}. At each depth: (a) the run with the lowest validation loss matches; (b) every run "
    "that does not match has a higher loss than every one that does; (c) at the largest learning rate some layer's "
    "attention has collapsed by the end (the watch's phase). Holds: all three at every depth; holds under a "
    f"condition: (a) at some depth; fails: at none. Losses and curves are means over the seeds. {TOY_RULE}"
)
# The stable rank does not decide here, and a record has to be small.
GAUGES = ("entropy", "phase", "valid_loss")
MOST = 2.7  # nats on the axis
WOULD_DECIDE = "losses on WikiText, with several seeds, and every learning rate trained for long enough: --preset laptop or paper"
REVISED = "models on the toy corpus, each rate trained for the same few steps with one seed, were judged, as holds"


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one model per depth, learning rate and seed."""
    runs = [
        {"data": settings["data"], "layers": layers, "lr": lr}
        | _curves.span(
            lr, settings["tau"], settings["points"], settings["steps"], settings["every"]
        )
        for layers in settings["layers"]
        for lr in settings["lr"]
    ]
    _curves.train_all(writer, runs, settings, seed, progress, GAUGES)


def draw(run: Run) -> p.Chart:
    """One panel per depth: the top layer at each learning rate, named at its end; best validation losses as legend."""
    settings = run.info["config"]["settings"]
    frame, losses = measured(run, "entropy", settings["data"]), best_loss(run, settings["data"])
    panels = []
    for layers in settings["layers"]:
        rates = sorted(settings["lr"])
        names = {lr: f"lr {lr:g}: {losses[layers, lr]:.3f}" for lr in rates}
        top = where(frame, layers=layers, layer=layers - 1)
        top = top.assign(run=top.lr.map(names))
        ends = top.sort_values("step").groupby("lr").tail(1).sort_values("value")
        places = p.apart(ends.value, MOST * 0.06)
        below = {"orient": "bottom", "symbolOpacity": 1}  # beside are the names at the ends
        colour = p.by(
            "run", "validation loss", order=list(names.values()), scheme=p.DEPTH, legend=below
        )
        x, y = (
            p.x("step", "minibatch", log=True),
            p.y("value", "attention entropy (nats)", domain=(0, MOST)),
        )
        drawn = p.lines(top, x, y, colour, tip={"run": None, "step": None, "value": ".3f"})
        labels = ends.assign(value=places, rate=ends.lr.map("{:g}".format))
        named = p.words(labels, x, y, "rate", colour, align="left", dx=6)
        title = f"{_curves.deep(layers)}: the top one, by learning rate"
        panels.append(p.panel(title, drawn, named, size=(420, 250)))
    return p.row(*panels)


def judge(run: Run) -> Judgement:
    """Check that the patterns that match the theory give the lowest loss, and that large rates collapse."""
    settings = run.info["config"]["settings"]
    depths = settings["layers"]
    rates = sorted(settings["lr"])
    data = settings["data"]
    by_layer = curves(run, data)
    losses = best_loss(run, data)
    matches = {key: by_layer[*key, key[0] - 1].pattern == "dip and bounce" for key in losses}

    best_runs = {}
    lowest = []
    apart = []
    collapses = []
    for depth in depths:
        best = min(rates, key=lambda lr: losses[depth, lr])
        pattern = by_layer[depth, best, depth - 1].pattern
        best_runs[depth] = {"loss": losses[depth, best], "lr": best, "pattern": pattern}
        if matches[depth, best]:
            lowest.append(depth)
        if _apart([(losses[depth, lr], matches[depth, lr]) for lr in rates]):
            apart.append(depth)
        if any(by_layer[depth, rates[-1], layer].collapsed for layer in range(depth)):
            collapses.append(depth)

    runs = {}
    for depth, lr in losses:
        patterns = [by_layer[depth, lr, layer].pattern for layer in range(depth)]
        runs[f"{_curves.deep(depth)}, lr {lr:g}"] = {
            "loss": losses[depth, lr],
            "matches": matches[depth, lr],
            "patterns": patterns,
        }
    numbers = {
        "runs": runs,
        "best runs": best_runs,
        "depths": depths,
        "largest rate": rates[-1],
        "depths whose best run matches": lowest,
        "depths whose matching runs are all better": apart,
        "depths that collapse at the largest rate": collapses,
        "entropy": _curves.entropy_numbers(run, data),
    }
    if data == TOY:
        verdict = Verdict.INCONCLUSIVE
    elif lowest == apart == collapses == depths:
        verdict = Verdict.HOLDS
    elif lowest:
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS
    collapse = "lr {largest rate:g} collapses at depths {depths that collapse at the largest rate} of {depths}"
    return Judgement(
        verdict,
        numbers,
        f"{{runs:{{key}}: {{loss:.3f}}, {{patterns}}}}; {collapse}",
        "lowest loss by depth: {best runs:{key}: {loss:.3f} at lr {lr:g}, {pattern}}; " + collapse,
    )


def _apart(runs: list[tuple[float, bool]]) -> bool:
    """Return whether every run that matches has a lower loss than all others; (loss, matches) each."""
    matching = [loss for loss, matches in runs if matches]
    others = [loss for loss, matches in runs if not matches]
    if not others:
        return True
    return bool(matching) and max(matching) < min(others)


# Forty steps of a two-layer model on a text that joma brings along.
CODE_SLICE = {
    "data": "zipf",
    "vocabulary": 500,
    "layers": [2],
    "lr": [1e-3],
    "steps": 40,
    "tau": 0.0,
    "points": 50,
    "seeds": 1,
    "every": 10,
    "valid_windows": 2,
    "valid_every": 0,
    **PLAIN,
}
RECORD_SLICE = {"layers": [1], "lr": [1e-4], "steps": 40, "tau": 0.0, "seeds": 1}
EXHIBIT = Exhibit(
    id="fig8",
    title="Figure 8: learning rates",
    statement="The attention patterns that match the theory come with the lowest validation loss.",
    seconds=190,
    rule=RULE,
    paper="lowest loss with dip and bounce; extremely sparse at large rates",
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS, run, draw, judge, AXES, code_slice=CODE_SLICE, record_slice=RECORD_SLICE
    ),
    messages={
        Verdict.HOLDS: "The best run is the one that dips and bounces",
        Verdict.UNDER: (
            "At some depth the best run dips and bounces, which alone is no evidence for the "
            "pattern"
        ),
        Verdict.FAILS: "The best run is not one that dips and bounces",
        Verdict.INCONCLUSIVE: "is the best run the one that dips and bounces?",
    },
)
