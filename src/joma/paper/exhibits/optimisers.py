"""Optimisers: one task under gradient flow, SGD, momentum, weight decay and Adam.

Linear nodes, exp attention, one node, tokens that differ in saliency Δ = discriminancy × frequency. Theorem 2 says that
the most salient token wins. Minibatch Adam divides by the gradient's root mean square, so its rates should follow
Δ/√(Δ² + σ²), with σ² the variance of a minibatch's gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits.base import Exhibit, Experiment, Progress
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict
from joma.theory import SGD, Adam, AdamW, JointFlow, Task
from joma.theory.optimisers import Optimiser
from joma.theory.setting import Array

SETTINGS = {
    "default": {"tokens": 12, "samples": 200, "seeds": 3, "steps": 1500, "batches": 600},
    "laptop": {"tokens": 30, "samples": 1000, "seeds": 20, "steps": 3000, "batches": 2000},
    "paper": {"tokens": 30, "samples": 1000, "seeds": 100, "steps": 3000, "batches": 2000},
}
OPTIMISERS: dict[str, Optimiser] = {
    "SGD": SGD(),
    "momentum": SGD(0.9),
    "weight decay": SGD(0.0, 0.05),
    "Adam": Adam(),
    "AdamW": AdamW(),
}
RATES = {"SGD": 0.02, "momentum": 0.002, "weight decay": 0.02, "Adam": 0.002, "AdamW": 0.002}
FIRST_SEED = (
    1000  # the design was changed after a look at seeds 0, 1, …: those that judge are others
)
REACH = 2.5  # compared when the largest weight is this large
TIMES = 3  # times the entropy that Adam loses must SGD and momentum lose
RULE = (
    f"holds under a condition, training like SGD's: SGD and momentum lose ≥ {TIMES} × the entropy that Adam loses at "
    "the same largest weight, and Adam's minibatch rates follow Δ/√(Δ² + σ²) more closely than Δ; else fails"
)
REVISED = (
    "the design was changed after a first look at other seeds; those that are judged, from "
    f"{FIRST_SEED} on, were drawn after that"
)


def example(rng: np.random.Generator, samples: int, tokens: int) -> Task:
    """Frequencies over 1.5 decades and, independent of them, discriminancies of either sign; noise in the gradients."""
    frequency = np.geomspace(0.5, 0.015, tokens)
    present = rng.random((samples, tokens)) < frequency
    signal = rng.permutation(np.linspace(0.2, 1.0, tokens)) * rng.choice([-1.0, 1.0], tokens)
    g = (present - frequency) @ signal + rng.standard_normal(samples)
    return Task(present.astype(np.float64), g[:, None])


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train full-batch with each optimiser; then minibatch SGD and Adam for the order of the rates."""
    for s in range(settings["seeds"]):
        rng = np.random.default_rng((seed, FIRST_SEED + s))
        task = example(rng, settings["samples"], settings["tokens"])
        flow, start = JointFlow(task, "exp"), np.full((settings["tokens"], 1), 1e-3)
        for n, (name, optimiser) in enumerate(OPTIMISERS.items()):
            progress((s + n / 6) / settings["seeds"], f"seed {s + 1}, {name}")
            path = flow.descend(settings["steps"], RATES[name], start, optimiser=optimiser)
            largest = np.abs(path.v).max(axis=(1, 2))
            stop = (
                int(np.argmax(largest >= REACH)) if (largest >= REACH).any() else len(largest) - 1
            )
            entropy, drift = path.entropy(), path.invariant().drift
            for i in np.unique(np.linspace(0, stop, 60).astype(int)):
                values = {"entropy": entropy[i], "largest": largest[i], "drift": drift[i]}
                writer.write(int(i), values, optimiser=name, draw=s, progress=float(i / stop))
        for name in ("SGD", "Adam"):
            plain, adapted = minibatch_orders(
                task, name, settings["batches"], np.random.default_rng((seed, FIRST_SEED + s, 1))
            )
            writer.write(
                0,
                {"order_saliency": plain, "order_adapted": adapted},
                optimiser=name,
                draw=s,
                progress=1.0,
            )


def minibatch_orders(
    task: Task, name: str, batches: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Correlation of how far v has moved with Δ, and with Δ/√(Δ² + σ²), in minibatches of 8 at small rates."""
    size, rate = 8, 1e-5
    per_sample = (
        task.x * task.g
    )  # (N, M): at z = 0 the gradients of v, which small rates leave as they are
    delta, variance = per_sample.mean(axis=0), per_sample.var(axis=0) / size
    optimiser: SGD | Adam = SGD() if name == "SGD" else Adam()
    v, none = np.zeros(task.tokens), np.zeros(task.tokens)
    memory: tuple[Array, ...] = ()
    for n in range(batches):
        gradient: Array = per_sample[rng.integers(task.samples, size=size)].mean(axis=0)
        moved = optimiser.step(gradient, v, none, memory, n)
        v, memory = v + rate * moved.direction, moved.memory
    adapted = delta / np.sqrt(np.where(variance > 0, delta**2 + variance, 1.0))
    return float(np.corrcoef(v, delta)[0, 1]), float(np.corrcoef(v, adapted)[0, 1])


def draw(run: Run) -> p.Chart:
    """Entropy and the drift of Theorem 1's integral, against the way to the same largest weight."""
    frame = run.frame()
    first = frame[frame.draw == 0]
    way = p.x("progress", f"share of the steps until max|v| = {REACH:g}")
    optimiser = p.by("optimiser", order=list(OPTIMISERS))
    axes = {"entropy": "attention entropy in nats", "drift": "drift of z − (r/2T) Σ v²"}
    curves = {
        gauge: p.lines(first[first.gauge == gauge], way, p.y("value", y), optimiser)
        for gauge, y in axes.items()
    }
    return p.row(*(p.panel(None, curve, size=(320, 220)) for curve in curves.values()), shared=True)


def judge(run: Run) -> Judgement:
    """Compare how sparse attention becomes under SGD and Adam, and which saliency orders the tokens."""
    frame = run.frame()
    curves = frame[frame.gauge == "entropy"].sort_values("progress")
    entropy = curves.groupby(["optimiser", "draw"]).value
    lost = (entropy.first() - entropy.last()).groupby("optimiser").mean()
    is_order = frame.gauge.str.startswith("order")
    order = frame[is_order].groupby(["optimiser", "gauge"]).value.mean()
    numbers = {
        "weight": REACH,
        "entropy lost": {name: lost[name] for name in OPTIMISERS},
        "order": {f"{name}, {gauge}": order[name, gauge] for name, gauge in order.index},
    }
    differs = min(lost["SGD"], lost["momentum"]) >= TIMES * lost["Adam"]
    adapts = order["Adam", "order_adapted"] > order["Adam", "order_saliency"]
    if differs and adapts:
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict,
        numbers,
        "at max|v| = {weight:g} attention has lost {entropy lost.SGD:.2f} nats under SGD, "
        "{entropy lost.momentum:.2f} with momentum, {entropy lost.Adam:.2f} under Adam; Adam's rates "
        "follow Δ/√(Δ² + σ²) at {order.Adam, order_adapted:.3f} and Δ at "
        "{order.Adam, order_saliency:.3f}, SGD's follow Δ at {order.SGD, order_saliency:.3f}",
        "attention loses {entropy lost.SGD:.2f} nats under SGD (under Adam: {entropy lost.Adam:.2f})",
    )


EXHIBIT = Exhibit(
    id="optimisers",
    title="The same task under different optimisers",
    statement="Ours: the most salient token wins (Theorem 2) under the optimisers that people use, too.",
    seconds=15,
    rule=RULE,
    revised=REVISED,
    experiment=Experiment(SETTINGS, run, draw, judge),
    messages={
        Verdict.UNDER: "SGD turns attention far sparser than Adam, which orders tokens otherwise",
        Verdict.FAILS: "SGD and Adam do not part as expected",
    },
)
