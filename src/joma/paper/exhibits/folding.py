"""Folding: a block whose attention is computed from its MLP weights, beside the block that trains both (Theorem 1).

ReLU nodes, cross-entropy, all three attentions. The start of the linear case makes one logit pass through zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict
from joma.theory import FoldedFlow, JointFlow, Task

SETTINGS = {
    "default": {"samples": 24, "tokens": 6, "nodes": 4, "t_end": 12.0, "times": 121},
    "laptop": {"samples": 100, "tokens": 20, "nodes": 10, "t_end": 12.0, "times": 241},
    "paper": {"samples": 200, "tokens": 40, "nodes": 20, "t_end": 12.0, "times": 241},
}
AXES = {"z": ["token"]}
CASES = ("linear", "exp", "softmax")
EXACT = 1e-7
RULE = (
    f"largest difference of (v, ξ, z) ≤ {EXACT:g} for linear attention, through a sign change of z, and for "
    "exp attention"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Integrate the joint and the folded flow side by side for each attention."""
    N, M, K = settings["samples"], settings["tokens"], settings["nodes"]
    rng = np.random.default_rng((seed, 1))
    x = rng.gamma(0.5, size=(N, M))
    task = Task.classification(x / x.sum(axis=1, keepdims=True), rng.integers(K, size=N), classes=K)
    v0, z0 = 0.3 * rng.standard_normal((M, K)), 0.3 * rng.standard_normal(M)
    # linear attention: a small negative logit whose own gradient pushes it up, and on through zero
    z_linear = np.abs(z0) + 0.5
    z_linear[0] = -0.05
    v0[0] = 2.0 * task.saliency().delta[0] / np.linalg.norm(task.saliency().delta[0])
    for n, attention in enumerate(CASES):
        start = z_linear if attention == "linear" else z0
        paths = {}
        for m, (name, flow) in enumerate((("joint", JointFlow), ("folded", FoldedFlow))):
            progress((2 * n + m) / 6, f"{attention} attention, {name}")
            paths[name] = flow(task, attention, "relu").integrate(
                settings["t_end"], v0, z0=start, times=settings["times"]
            )
        for i, t in enumerate(paths["joint"].t):
            for name, path in paths.items():
                writer.write(i, {"z": path.z[i]}, t=float(t), case=attention, flow=name)
            difference = max(
                float(np.abs(getattr(paths["joint"], q)[i] - getattr(paths["folded"], q)[i]).max())
                for q in ("v", "xi", "z")
            )
            writer.write(i, {"difference": difference}, t=float(t), case=attention, flow="joint")


def draw(run: Run) -> p.Chart:
    """Logits over time: joint as lines, folded as rings on top; the difference below."""
    frame = run.frame()
    t, z, token = p.x("t", "t"), p.y("value", "attention logits z"), p.by("token", "token")
    columns = []
    for case in CASES:
        joint, folded = (
            where(frame, gauge="z", case=case, flow=flow) for flow in ("joint", "folded")
        )
        rings = folded[folded.t.isin(np.sort(folded.t.unique())[::10])]
        gap = where(frame, gauge="difference", case=case)
        below = p.lines(
            gap.assign(value=gap.value.clip(lower=1e-17)), t,
            p.y("value", "largest difference", log=True, domain=(1e-17, 10), format=".0e", ticks=5),
            colour=p.FAINT, tip={"t": None, "value": ".1e"},
        )  # fmt: skip
        logits = (
            p.lines(joint, t, z, token, tip={"token": None, "t": None, "value": ".4f"}),
            p.dots(rings, t, z, token),
        )
        note = "line: joint flow, rings: folded"
        above = p.panel(f"{case} attention", *logits, note=note, size=(250, 190))
        columns.append(p.column(above, p.panel(None, below, size=(250, 90)), shared=True))
    return p.row(*columns, shared=True)


def headline(run: Run) -> p.Chart:
    """Logits under exp attention: joint flow as lines, folded flow as rings."""
    frame = where(run.frame(), gauge="z", case="exp")
    joint = where(frame, flow="joint")
    folded = where(frame, flow="folded")
    rings = folded[folded.t.isin(np.sort(folded.t.unique())[::20])]
    t = p.x("t", "time", ticks=4)
    z = p.y("value", "attention logits", ticks=4)
    token = p.by("token", legend=False)
    return p.thumbnail(p.lines(joint, t, z, token), p.dots(rings, t, z, token, size=18))


def judge(run: Run) -> Judgement:
    """Check that folded and joint flow agree under linear and exp attention."""
    frame = run.frame()
    gap = where(frame, gauge="difference").groupby("case").value.max()
    linear = where(frame, gauge="z", case="linear", flow="joint", token=0).sort_values("t").value
    changes_sign = bool(linear.iloc[0] < 0 < linear.iloc[-1])
    worst = max(gap["linear"], gap["exp"])
    numbers = {
        **{case: gap[case] for case in CASES},
        "worst": worst,
        "z_changes_sign": changes_sign,
    }
    template = "linear {linear:.0e}, exp {exp:.0e}; softmax (Eqn. 18, approximate) {softmax:.2g}"
    if worst <= EXACT and changes_sign:
        verdict = Verdict.UNDER
        template += "; exact under linear and exp attention"
    else:
        verdict = Verdict.FAILS
    return Judgement(verdict, numbers, template, "difference ≤ {worst:.0e} (softmax {softmax:.2g})")


EXHIBIT = Exhibit(
    id="folding",
    title="Attention integrated out",
    statement="A block without attention parameters follows the block with them (Theorem 1).",
    seconds=5,
    rule=RULE,
    paper="0 (exact)",
    experiment=Experiment(SETTINGS, run, draw, judge, AXES, headline=headline),
    messages={
        Verdict.UNDER: (
            "Linear and exp attention can be integrated out exactly: free logits, frozen "
            "orthonormal embeddings, plain gradient flow"
        ),
        Verdict.FAILS: "A block without attention parameters does not follow the block with them",
    },
)
