"""Attention alone: the MLP frozen, as the special case of the joint dynamics (slides, “consistent with Scan & Snap”).

Theorem 1 holds for any ratio r of the learning rates of attention and MLP. In attention's own time the MLP moves by
1/r: as r grows, the joint flow goes over to one in which only attention learns, v = v(0). For exp attention, linear
nodes and fixed gradients that limit is closed,

    ż_l = e^{z_l} c_l,  c_l = Σ_k v_lk(0) Δ_lk / A,     z_l(t) = −ln(e^{−z_l(0)} − c_l t),

which blows up at t* = min e^{−z_l(0)} / c_l over c_l > 0: only the token that gets there first goes to infinity, and
attention turns sparse (“scan”). Under softmax attention the limit is integrated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._statistics import bounds, counted, exponent
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where, wide
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict
from joma.theory import JointFlow, Task
from joma.theory.setting import Array
from joma.theory.tasks import random_gradients

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {
        "draws": 20,
        "tokens": 8,
        "nodes": 4,
        "ratios": [1, 10, 100, 1000, 10_000],
        "t_softmax": 20.0,
    },
    "laptop": {
        "draws": 100,
        "tokens": 20,
        "nodes": 10,
        "ratios": [1, 10, 100, 1000, 10_000],
        "t_softmax": 100.0,
    },
    "paper": {
        "draws": 500,
        "tokens": 20,
        "nodes": 10,
        "ratios": [1, 10, 100, 1000, 10_000],
        "t_softmax": 100.0,
    },
}
LATE = 0.9  # of the time until the blow-up
SLOPE, LARGE = 0.2, 100  # how far the exponent may be from −1, and from which r on
RULE = (
    f"exp attention: the largest difference between the joint flow's logits and the closed form, at {LATE:g} of the "
    f"time until its blow-up, falls as r to a power within {SLOPE:g} of −1 (95 % interval from resampling the draws, "
    f"r ≥ {LARGE:g}). Softmax attention at the largest r: its entropy ends below its start in more than half of the "
    "draws (lower end of the exact 95 % interval). Holds: both; holds under exp attention: the first; else fails"
)

REVISED = "the exponent was taken from r ≥ 10; now from 100, after a look at three small draws of another seed"


def closed_logits(task: Task, v0: Array, z0: Array, t: Array) -> Array:
    """z(t) (T, M) of exp attention whose linear nodes are frozen at v0 (M, K), before the blow-up."""
    c = (v0 * task.saliency().delta).sum(axis=1)
    return np.asarray(-np.log(np.exp(-z0) - c * t[:, None]))


def blow_up(task: Task, v0: Array, z0: Array) -> float:
    """When the first logit of `closed_logits` goes to infinity; infinite if none does."""
    c = (v0 * task.saliency().delta).sum(axis=1)
    return float((np.exp(-z0[c > 0]) / c[c > 0]).min(initial=np.inf))


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Both attentions at all ratios from the same starts, in attention's time."""
    for draw in range(settings["draws"]):
        progress(draw / settings["draws"], f"draw {draw + 1} of {settings['draws']}")
        rng = np.random.default_rng((seed, draw))
        task = random_gradients(rng, tokens=settings["tokens"], nodes=settings["nodes"])
        v0, z0 = (
            rng.standard_normal((task.tokens, task.nodes)),
            0.1 * rng.standard_normal(task.tokens),
        )
        end = min(blow_up(task, v0, z0), 1e3)
        for ratio in settings["ratios"]:
            for attention, t_end in (("exp", LATE * end), ("softmax", settings["t_softmax"])):
                times = np.linspace(0.0, t_end, 41)
                flow = JointFlow(task, attention, "linear", mlp_lr=1 / ratio, attention_lr=1.0)
                path = flow.integrate(t_end, v0, None, z0, times=times)
                labels = {"ratio": ratio, "attention": attention, "draw": draw}
                for n, entropy in enumerate(path.entropy()):
                    if (
                        n < len(times) and path.t[n] == times[n]
                    ):  # a joint flow may blow up before the frozen one
                        writer.write(
                            n, {"entropy": float(entropy)}, t=n / (len(times) - 1), **labels
                        )
                if attention == "exp" and path.t[-1] == times[-1]:
                    closed = closed_logits(task, v0, z0, times)
                    first = path.z[-1].argmax() == closed[-1].argmax()
                    drift = float(np.abs(path.z[-1] - closed[-1]).max())
                    writer.write(0, {"drift": drift, "same_winner": float(first)}, **labels)


def draw(run: Run) -> p.Chart:
    """How far the joint flow is from the frozen one over r, and entropy over time by r, for both attentions."""
    frame = run.frame()
    drift = where(frame, gauge="drift").groupby("ratio").value.median().reset_index()
    dots = p.lines(drift, p.x("ratio", "r", log=True), p.y("value", "largest |z − z of the frozen MLP|", log=True),
                   points=True)  # fmt: skip
    panels = [p.panel("Exp attention, median over draws", dots, size=(240, 190))]
    curves = where(frame, gauge="entropy", draw=0)
    curves = curves.assign(r=curves.ratio.map("r = {:g}".format))
    order = list(dict.fromkeys(curves.sort_values("ratio").r))
    for attention, of in (("exp", f"{LATE:g} of the time until the blow-up"), ("softmax", "time")):
        x, y = p.x("t", f"share of {of}"), p.y("value", "attention entropy (nats)", zero=True)
        lines = p.lines(where(curves, attention=attention), x, y, p.by("r", order=order))
        panels.append(
            p.panel(f"{attention.capitalize()} attention, the first draw", lines, size=(240, 190))
        )
    return p.row(*panels, shared=True)


def judge(run: Run) -> Judgement:
    """Check that a frozen MLP is the limit of the joint dynamics, and that attention turns sparse in it."""
    frame = run.frame()
    drift = wide(where(frame, gauge=["drift", "same_winner"]), ["draw", "ratio"])
    slope = bounds(exponent(drift[drift.ratio >= LARGE], "ratio"))
    last = where(frame, gauge="entropy", attention="softmax", ratio=frame.ratio.max())
    ends = last.sort_values("t").groupby("draw").value.agg(["first", "last"])
    sparser = counted((ends["last"] < ends["first"]).astype(float))
    winners = drift.groupby("ratio").same_winner.mean()
    drifts = drift.groupby("ratio").drift.median()
    numbers = {
        "exponent": slope,
        "sparser": sparser,
        "largest": {"r": winners.index[-1], "same winner": winners.iloc[-1]},
        "drift": {f"r = {ratio:g}": value for ratio, value in drifts.items()},
        "same winner": {f"r = {ratio:g}": value for ratio, value in winners.items()},
    }
    has_limit = slope["low"] >= -1 - SLOPE and slope["high"] <= -1 + SLOPE
    if not has_limit:
        verdict = Verdict.FAILS
    elif sparser["low"] > 0.5:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.UNDER
    return Judgement(
        verdict,
        numbers,
        "the joint flow goes to the one with a frozen MLP as r to the power {exponent.mean:.2f} "
        "({exponent.low:.2f} to {exponent.high:.2f}); at r = {largest.r:g} the same token leads in "
        "{largest.same winner:.0%} of the draws; with the MLP frozen, softmax attention ends sparser "
        "in {sparser.count} of {sparser.flows} ({sparser.low:.2f}–{sparser.high:.2f}) draws",
        "softmax attention ends sparser in {sparser.count} of {sparser.flows} draws",
    )


EXHIBIT = Exhibit(
    id="frozen",
    title="Attention alone: the MLP frozen",
    statement=(
        "With the MLP frozen, attention turns sparser: the joint dynamics is consistent with "
        "Scan & Snap (slides)."
    ),
    seconds=15,
    rule=RULE,
    revised=REVISED,
    experiment=Experiment(SETTINGS, run, draw, judge),
    messages={
        Verdict.HOLDS: "With the MLP frozen, attention turns sparser: the limit of the joint dynamics",
        Verdict.UNDER: (
            "A frozen MLP is the limit of the joint dynamics; softmax attention need not "
            "turn sparser in it"
        ),
        Verdict.FAILS: "The joint dynamics does not go to that of a frozen MLP as expected",
    },
)
