"""Hierarchies in trained Transformers (Section 5, Figure 5b-c): in which order are a tree's levels learned?

Transformers are trained on the classes of noisy latent trees (`joma.paper.labs.tree`), deep ones (class, α, β,
tokens) and
shallow ones (class, β, tokens). A level's curve has been learned halfway when it first passes the middle between its
start and its end; it counts as learned if it rose by more than ``LEAST``. In order, in a training of a deep tree, is

    attention   m attends to l of its own β (first block) before a token of β attends to one of β′ under one α (second)
    latents     hidden nodes represent β (first block) before α (second block), by held-out NCorr

The control is the same measurement with tokens and latents permuted over the tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._statistics import mean_interval, share_interval
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {
        "seeds": 6,
        "rho": 0.9,
        "layers": [2],
        "width": 32,
        "steps": 200,
        "every": 25,
        "lr": 1e-3,
    },
    "laptop": {
        "seeds": 8,
        "rho": 0.9,
        "layers": [2, 3],
        "width": 64,
        "steps": 2000,
        "every": 50,
        "lr": 1e-3,
    },
    "paper": {
        "seeds": 20,
        "rho": 0.9,
        "layers": [2, 3],
        "width": 1024,
        "steps": 10_000,
        "every": 50,
        "lr": 1e-4,
    },
}
ENOUGH = 6  # trainings: six of six in order have an interval above ½, five of five have not
FIRST_SEED = 1000  # settings and rule were chosen on smaller ones
SHAPES = {"deep": {"depth": 3, "latents": 4}, "shallow": {"depth": 2, "latents": 12}}
LEAST = {"attention": 0.05, "ncorr": 0.05}  # of a rise: attention over uniform, correlation
# what must come first, and what after it: (gauge, block) of a deep tree
ORDERS = {
    "attention": (("attention_siblings", 0), ("attention_cousins", 1)),
    "latents": (("ncorr_beta", None), ("ncorr_alpha", None)),
}
LABELS = ["shape", "layers", "draw", "tree"]
RULE = (
    f"a level is learned if its curve rises by more than {LEAST['attention']:g} (attention over uniform, beyond "
    f"that on tokens that share nothing) or {LEAST['ncorr']:g} (held-out NCorr), at the step where it passes half "
    "of its rise. Holds if, for attention and for latents, the share of trainings in order has a lower end (95 %) "
    "above ½ and above the upper end for the permuted tree; holds under a condition: for one of the two; else "
    f"fails. Inconclusive with fewer than {ENOUGH} trainings, or if no level is learned in half of them. Judged on "
    f"seeds from {FIRST_SEED} on"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one network per shape, depth of the network and seed."""
    from joma.paper.labs.tree import TreeSettings, follow

    seeds = {
        "deep": settings["seeds"],
        "shallow": -(-settings["seeds"] // 3),
    }  # only deep trees are judged
    work = [
        (shape, layers, draw)
        for shape in SHAPES
        for layers in settings["layers"]
        for draw in range(seeds[shape])
    ]
    common = {name: settings[name] for name in ("rho", "width", "steps", "every", "lr")}
    for n, (shape, layers, draw) in enumerate(work):

        def show(step: int, n: int = n) -> None:
            progress(
                (n + step / settings["steps"]) / len(work),
                f"{work[n][0]} tree, seed {work[n][2] + 1}",
            )

        drawn = int(np.random.SeedSequence((seed, FIRST_SEED + draw)).generate_state(1)[0] % 2**31)
        chosen = TreeSettings(**common, **SHAPES[shape], layers=layers, seed=drawn)
        for step, tree, row in follow(chosen, show):
            flat = {
                f"{g}_{b}": x
                for g, v in row.items()
                if isinstance(v, list)
                for b, x in enumerate(v)
            }
            flat |= {g: v for g, v in row.items() if not isinstance(v, list)}
            writer.write(step, flat, shape=shape, layers=layers, draw=draw, tree=tree)


def curve(frame: pd.DataFrame, gauge: str, block: int | None) -> pd.DataFrame:
    """A gauge over steps, one column per training; attention on cousins is that beyond tokens which share nothing."""
    wide = where(frame, gauge=gauge if block is None else f"{gauge}_{block}").pivot_table(
        "value", "step", LABELS
    )
    if block is None:
        return wide
    others = where(frame, gauge=f"attention_others_{block}").pivot_table("value", "step", LABELS)
    return wide - others[wide.columns]


def halfway(values: pd.Series[float], least: float) -> float:
    """The step at which a curve first passes the middle between start and end; NaN if it did not rise by ``least``."""
    start, end = float(values.iloc[0]), float(values.iloc[-1])
    if not end - start > least:
        return float("nan")
    return float(values.index[int((values >= (start + end) / 2).to_numpy().argmax())])


def orders(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per training of a deep tree and kind of order: both steps, and whether they are in order."""
    deep, rows = where(frame, shape="deep"), []
    for name, (first, second) in ORDERS.items():
        least = LEAST["attention" if name == "attention" else "ncorr"]
        early, late = curve(deep, *first), curve(deep, *second)
        for column in early.columns:
            one, two = halfway(early[column], least), halfway(late[column], least)
            keys = dict(zip(LABELS, column, strict=True))
            both = not np.isnan(one + two)
            rows.append(
                {
                    **keys,
                    "order": name,
                    "first": one,
                    "second": two,
                    "learned": both,
                    "in_order": one < two,
                }
            )
    return pd.DataFrame(rows)


def draw(run: Run) -> p.Chart:
    """Attention by kinship in the first two blocks, and held-out NCorr; means over seeds, the permuted tree dashed."""
    frame = run.frame()
    frame = frame[frame.layers == frame.layers.min()]
    panels = []
    for shape in SHAPES:
        part = where(frame, shape=shape)
        named = {f"attention_{kin}_0": kin for kin in ("siblings", "cousins", "others")}
        for title, names in ((f"{shape}: attention over uniform, block 1", named),
                             (f"{shape}: held-out NCorr", {"ncorr_beta": "β", "ncorr_alpha": "α"})):  # fmt: skip
            data = (
                where(part, gauge=list(names))
                .groupby(["gauge", "tree", "step"])
                .value.mean()
                .reset_index()
            )
            data = data.assign(what=data.gauge.map(names))
            colour, dashes = (
                p.by("what", order=list(names.values())),
                p.dash("tree", ["tree", "permuted"]),
            )
            lines = p.lines(
                data, p.x("step", "minibatch"), p.y("value", zero=False), colour, dash=dashes
            )
            panels.append(p.panel(title, lines, size=(300, 170)))
    return p.column(p.row(*panels[:2]), p.row(*panels[2:]))


def judge(run: Run) -> Judgement:
    """How often are the levels of a deep tree learned in order, and how often by the same measure without a tree?"""
    frame = run.frame()
    table = orders(frame)
    numbers: dict[str, Any] = {}
    for name in ORDERS:
        for tree in ("tree", "permuted"):
            rows = where(table, order=name, tree=tree)
            share, low, high = share_interval(int(rows.in_order.sum()), len(rows))
            numbers[f"{name}, {tree}"] = {
                "in_order": int(rows.in_order.sum()), "learned": int(rows.learned.sum()), "trainings": len(rows),
                "share": share, "low": low, "high": high, "first": float(rows["first"].median()),
                "second": float(rows["second"].median()),
            }  # fmt: skip
    last = where(frame, step=frame.step.max(), tree="tree", shape="deep")
    competition = mean_interval(where(last, gauge="competition_0").value)
    numbers["competition"] = dict(zip(("mean", "low", "high"), competition, strict=True))
    numbers["accuracy"] = float(where(last, gauge="accuracy").value.mean())
    passed = [
        name
        for name in ORDERS
        if numbers[f"{name}, tree"]["low"] > max(0.5, numbers[f"{name}, permuted"]["high"])
    ]
    learned = any(
        2 * numbers[f"{name}, tree"]["learned"] >= numbers[f"{name}, tree"]["trainings"]
        for name in ORDERS
    )
    enough = min(numbers[f"{name}, tree"]["trainings"] for name in ORDERS) >= ENOUGH
    decided = (Verdict.FAILS, Verdict.UNDER, Verdict.HOLDS)[len(passed)]
    verdict = decided if learned and enough else Verdict.INCONCLUSIVE

    numbers["orders"] = {
        name: {"tree": numbers[f"{name}, tree"], "permuted": numbers[f"{name}, permuted"]}
        for name in ORDERS
    }
    return Judgement(
        verdict,
        numbers,
        "{orders:{key}: {tree.in_order} of {tree.trainings} in order ({tree.low:.2f}–{tree.high:.2f}; both "
        "levels learned in {tree.learned}), permuted tree {permuted.in_order}}; competition between "
        "queries: rank correlation {competition.mean:.2f} ({competition.low:.2f} to "
        "{competition.high:.2f}); accuracy {accuracy:.2f}",
        "latents in order in {orders.latents.tree.in_order} of {orders.latents.tree.trainings}",
    )


EXHIBIT = Exhibit(
    id="hierarchy",
    title="Hierarchies in trained Transformers",
    statement=(
        "m associates with l and m′ with l′ before β with β′; hidden nodes come to represent "
        "y_β (Section 5)."
    ),
    seconds=60,
    rule=RULE,
    paper="level by level",
    would_decide="longer training of wider networks: --preset laptop",
    experiment=Experiment(SETTINGS, run, draw, judge),
    messages={
        Verdict.HOLDS: "The small Transformers trained here learn the hierarchy level by level",
        Verdict.UNDER: "Level by level in attention or in latents, not in both",
        Verdict.FAILS: "The small Transformers trained here do not learn the hierarchy level by level",
        Verdict.INCONCLUSIVE: "do trained Transformers learn a hierarchy level by level?",
    },
)
