"""Folding: a block whose attention is computed from its MLP weights, beside the block that trains both (Theorem 1).

ReLU nodes, cross-entropy, all three attentions. The start of the linear case makes one logit pass through zero.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np

from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory import FoldedFlow, JointFlow, Task
from joma.theory.verdict import Verdict

SETTINGS = {
    "quick": {"samples": 24, "tokens": 6, "nodes": 4, "t_end": 12.0, "times": 121},
    "laptop": {"samples": 100, "tokens": 20, "nodes": 10, "t_end": 12.0, "times": 241},
    "paper": {"samples": 200, "tokens": 40, "nodes": 20, "t_end": 12.0, "times": 241},
}
AXES = {"z": ["token"]}
CASES = ("linear", "exp", "softmax")


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


def draw(run: Run) -> Chart:
    """Logits over time: joint as lines, folded as points on top; the difference below."""
    frame = run.frame()
    columns: list[Any] = []
    for case in CASES:
        z = frame[(frame.gauge == "z") & (frame.case == case)][["t", "token", "flow", "value"]]
        points = z[z.flow == "folded"]
        points = points[points.t.isin(np.sort(points.t.unique())[::10])]
        x, y = alt.X("t:Q", title="t"), alt.Y("value:Q", title="attention logits z")
        colour = alt.Color("token:N", title="token")
        title = alt.Title(f"{case} attention", subtitle="line: joint flow, rings: folded")
        tooltip = ["token", "t", alt.Tooltip("value", format=".4f")]
        line = alt.Chart(z[z.flow == "joint"], title=title).mark_line().encode(x, y, colour, tooltip=tooltip)
        ring = alt.Chart(points).mark_point(size=28, strokeWidth=1.4).encode(x, y, colour)
        gap = frame[(frame.gauge == "difference") & (frame.case == case)][["t", "value"]].assign(
            value=lambda f: f.value.clip(lower=1e-17)
        )
        below = (
            alt.Chart(gap)
            .mark_line(color="#57606a")
            .encode(
                alt.X("t:Q", title="t"),
                alt.Y(
                    "value:Q",
                    title="largest difference",
                    scale=alt.Scale(type="log", domain=[1e-17, 10]),
                    axis=alt.Axis(format=".0e", tickCount=5),
                ),
                tooltip=["t", alt.Tooltip("value", format=".1e")],
            )
            .properties(width=250, height=90)
        )
        columns.append(alt.vconcat((line + ring).properties(width=250, height=190), below))
    return alt.hconcat(*columns)


def judge(run: Run) -> Judgement:
    """Folded and joint agree to 1e-7 for linear and exp attention; softmax is reported."""
    frame = run.frame()
    gap = frame[frame.gauge == "difference"].groupby("case").value.max()
    linear = (
        frame[(frame.gauge == "z") & (frame.case == "linear") & (frame.flow == "joint") & (frame.token == 0)]
        .sort_values("t")
        .value
    )
    numbers = {
        **{case: float(gap[case]) for case in CASES},
        "z_changes_sign": bool(linear.iloc[0] < 0 < linear.iloc[-1]),
    }
    rule = "largest difference of (v, ξ, z) ≤ 1e-7 for linear attention (through a sign change of z) and exp attention"
    text = f"linear {gap['linear']:.0e}, exp {gap['exp']:.0e}; softmax (Eqn. 18, approximate) {gap['softmax']:.2g}"
    measured = f"difference ≤ {max(gap['linear'], gap['exp']):.0e} (softmax {gap['softmax']:.2g})"
    paper = "0 (exact)"
    if max(gap["linear"], gap["exp"]) > 1e-7 or not numbers["z_changes_sign"]:
        return Judgement(Verdict("fails"), rule, text, numbers, measured, paper)
    return Judgement(
        Verdict("holds under"), rule, f"{text}; exact under linear and exp attention", numbers, measured, paper
    )


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
