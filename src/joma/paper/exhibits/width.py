"""Over-parameterisation (slides, future work: “Why we need over-parameterization?”): a sweep over widths.

`joma.nn.JoMABlock` with K hidden nodes and a linear head learns the next word of a text, with softmax attention per
query, by Adam; with and without the residual connection, which shows the head the query itself. Told per width: the
loss at the end, and how many minibatches it takes to come to the loss at which the narrowest block ends.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from joma._data.words import most_frequent, words_of
from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.nn import JoMABlock
from joma.paper.exhibits._statistics import bounds, mean_interval
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.labs.text_block import Places, places
from joma.paper.labs.twins import Twin
from joma.paper.verdict import Verdict
from joma.theory.setting import Array

SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {"text": "wikitext-2", "V": 500, "widths": [4, 16, 64, 256, 1024], "window": 16, "batch": 64,
               "steps": 4000, "seeds": 5},
    "paper": {"text": "wikitext-2", "V": 1000, "widths": [4, 16, 64, 256, 1024, 4096], "window": 35, "batch": 256,
              "steps": 10_000, "seeds": 5},
}  # fmt: skip
EVERY = 10  # minibatches whose losses are averaged
RESIDUAL = {True: "with the residual connection", False: "without"}
RULE = (
    "the slides ask a question and state nothing that could hold or fail. Told: the mean loss over the last tenth of "
    "training per width, with its 95 % interval over seeds (Student's t); where it stops falling (the next width's "
    "interval is not below the mean); and minibatches until the loss, averaged over a tenth of training, is that at "
    "which the narrowest block ends. One block of one head on a small vocabulary decides nothing about language models"
)
WOULD_DECIDE = "a statement of what over-parameterisation brings, and language models of several widths to convergence"


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train a block per width and seed, with and without the residual connection, and write its losses."""
    code, vocabulary = most_frequent(words_of(settings["text"]), settings["V"])
    text, cases = (
        places(code, settings["window"]),
        [(r, K) for r in RESIDUAL for K in settings["widths"]],
    )
    for n, (residual, K) in enumerate(cases):
        for s in range(settings["seeds"]):
            progress((n + s / settings["seeds"]) / len(cases), f"{K} nodes, {RESIDUAL[residual]}")
            sizes = {
                "words": len(vocabulary),
                "batch": settings["batch"],
                "steps": settings["steps"],
            }
            losses = train(text, K, residual, 1000 * seed + s, **sizes)
            for end in range(EVERY, len(losses) + 1, EVERY):
                labels = {"width": K, "residual": residual, "draw": s}
                writer.write(end, {"loss": float(losses[end - EVERY : end].mean())}, **labels)


def train(
    text: Places, K: int, residual: bool, seed: int, *, words: int, batch: int, steps: int
) -> Array:
    """The losses (steps,) of one block under Adam; minibatches depend on nothing but the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = JoMABlock(words, K, attention="softmax", residual=residual)
        twin = Twin(block, nn.Linear(K, words), "Adam")
    query, context, target = (
        torch.as_tensor(part) for part in (text.query, text.context, text.target)
    )
    for _ in range(steps):
        pick = torch.randint(len(query), (batch,), generator=generator)
        twin.step(query[pick], context[pick], target[pick])
    return np.array(twin.losses)


def draw(run: Run) -> p.Chart:
    """The loss over training by width, and at the end over widths, with and without the residual connection."""
    frame = run.frame("loss")
    frame["nodes"] = frame.width.map("{:g} nodes".format)
    order = list(dict.fromkeys(frame.sort_values("width").nodes))
    means = where(frame, residual=True).groupby(["nodes", "step"]).value.mean().reset_index()
    y = p.y("value", "loss (nats)", zero=False)
    lines = p.lines(means, p.x("step", "minibatch"), y, p.by("nodes", order=order))
    panels = [p.panel("Training, mean over seeds", lines, size=(280, 200))]
    ends = last(frame).assign(block=lambda rows: rows.residual.map(RESIDUAL))
    colour, x = p.by("block", order=list(RESIDUAL.values())), p.x("width", "nodes", log=True)
    dots = p.dots(ends, x, y, colour, tip=("width", "block", "value"))
    lines = p.lines(ends.groupby(["block", "width"]).value.mean().reset_index(), x, y, colour)
    panels.append(p.panel("At the end, one dot per seed", lines, dots, size=(280, 200)))
    return p.row(*panels)


def last(frame: pd.DataFrame) -> pd.DataFrame:
    """The mean loss over the last tenth of training, per width, residual and draw."""
    late = frame[frame.step > 0.9 * frame.step.max()]
    return late.groupby(["residual", "width", "draw"]).value.mean().reset_index()


def minibatches(frame: pd.DataFrame) -> dict[int, int]:
    """Width -> after how many minibatches its loss is that at which the narrowest block ends; those that get there."""
    curves = frame.pivot_table(values="value", index="step", columns="width")
    smooth = curves.rolling(max(1, len(curves) // 10)).mean()
    there = smooth <= smooth[smooth.columns[0]].iloc[-1]
    return {int(width): int(there.index[there[width]][0]) for width in there if there[width].any()}


def judge(run: Run) -> Judgement:
    """Report what width brings; by the rule it decides nothing."""
    frame = run.frame("loss")
    ends = last(frame)
    blocks: dict[str, Any] = {}
    for residual, name in RESIDUAL.items():
        part = where(ends, residual=residual)
        widths = sorted(set(part.width.astype(int)))
        losses = {width: bounds(mean_interval(where(part, width=width).value)) for width in widths}
        stops = widths[-1]
        for width, wider in pairwise(widths):
            if losses[wider]["high"] >= losses[width]["mean"]:
                stops = width
                break
        blocks[name] = {
            "loss": losses,
            "falls until": stops,
            "minibatches": minibatches(where(frame, residual=residual)),
        }
    return Judgement(
        Verdict.INCONCLUSIVE,
        {"blocks": blocks, "with": blocks[RESIDUAL[True]]},
        "{blocks:{key}, loss in nats by nodes: {loss:{mean:.2f} ({key})}, falling until {falls until}; "
        "minibatches until the loss at which the narrowest ends: {minibatches:{value:,} ({key})}}",
        "loss falls until {with.falls until} nodes",
    )


CODE_SLICE = {
    "text": "zipf",
    "V": 200,
    "widths": [4, 64],
    "window": 8,
    "batch": 32,
    "steps": 100,
    "seeds": 1,
}
RECORD_SLICE = {"widths": [4, 64], "steps": 40, "seeds": 1}
EXHIBIT = Exhibit(
    id="width",
    title="Over-parameterisation",
    statement=(
        "“Why we need over-parameterization?” (asked in the slides): a sweep over widths, "
        "residual on and off."
    ),
    seconds=60,
    rule=RULE,
    paper="a question",
    would_decide=WOULD_DECIDE,
    experiment=Experiment(
        SETTINGS, run, draw, judge, code_slice=CODE_SLICE, record_slice=RECORD_SLICE
    ),
    messages={
        Verdict.INCONCLUSIVE: "what does over-parameterisation bring?",
    },
)
