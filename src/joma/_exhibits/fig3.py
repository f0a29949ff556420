"""Figure 3: which components of v₀ grow under linear activation and softmax attention (the task of Figure 2, left).

The paper reads it as winner-take-all (Theorem 2): some components go on growing, the others saturate.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np

from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory import JointFlow
from joma.theory.tasks import class_distributions, small_start
from joma.theory.verdict import Verdict

SETTINGS = {
    "quick": {"t_end": 200.0, "times": 201},
    "laptop": {"t_end": 2000.0, "times": 401},
    "paper": {"t_end": 200.0, "times": 2001},
}
AXES = {"v": ["token", "node"], "v0": ["token"]}
SHOWN = 4  # components of the first column, as in the paper


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Integrate the smooth data set and record V at both ends and its first column over time."""
    rng = np.random.default_rng((seed, 0))
    task = class_distributions(rng, smooth=True)
    start = small_start(task, rng)
    progress(0.0, "integrating")
    path = JointFlow(task, "softmax", "linear", temperature=0.5).integrate(
        settings["t_end"], *start, times=settings["times"]
    )
    for i, t in enumerate(path.t):
        gauges = {"v0": path.v[i, :, 0]}
        if i in (0, len(path.t) - 1):
            gauges["v"] = path.v[i]
        writer.write(round(t / 0.1), gauges, t=float(t))


def draw(run: Run) -> Chart:
    """V at the start and at the end, and the growth of the first components of v₀."""
    frame = run.frame()
    panels: list[Any] = []
    ends = (frame.step.min(), frame.step.max())
    for step, title in zip(ends, ("V at the start", "V at the end"), strict=True):
        data = frame[(frame.gauge == "v") & (frame.step == step)][["token", "node", "value"]]
        limit = float(data.value.abs().max())
        panels.append(
            alt.Chart(data, title=alt.Title(title, subtitle=f"|v| ≤ {limit:.2g}"))
            .mark_rect()
            .encode(
                alt.X("node:O", title="node k", axis=alt.Axis(labels=False, ticks=False)),
                alt.Y("token:O", title="context token l", axis=alt.Axis(labels=False, ticks=False)),
                alt.Color(
                    "value:Q",
                    title=None,
                    scale=alt.Scale(scheme="redblue", domain=[-limit, limit], reverse=True),
                    legend=None,
                ),
                tooltip=["token", "node", alt.Tooltip("value", format=".3f")],
            )
            .properties(width=190, height=210)
        )
    growth = frame[(frame.gauge == "v0") & (frame.token < SHOWN)][["step", "token", "value"]]
    growth = growth.assign(component=growth.token.map(lambda l: f"component {l}"))
    lines = (
        alt.Chart(growth, title=alt.Title("Growth of the first components of v₀"))
        .mark_line(strokeWidth=2)
        .encode(
            alt.X("step:Q", title="batches (t / 0.1)"),
            alt.Y("value:Q", title="v₀(t)"),
            alt.Color("component:N", title=None),
            tooltip=["component", "step", alt.Tooltip("value", format=".3f")],
        )
        .properties(width=330, height=210)
    )
    return alt.hconcat(*panels, lines).resolve_scale(color="independent")


def judge(run: Run) -> Judgement:
    """How much each component of v₀ still grows over the second half of training."""
    frame = run.frame("v0")
    steps = np.sort(frame.step.unique())
    table = frame.pivot_table(index="step", columns="token", values="value").to_numpy()
    half = int(np.searchsorted(steps, steps[-1] / 2))
    early, late = table[half] - table[0], table[-1] - table[half]
    # a component that keeps its pace has late = early; one that has saturated has late near 0
    fastest = np.abs(late).max()
    growing = np.abs(late) > 0.5 * fastest
    saturated = np.abs(late) < 0.1 * fastest
    numbers = {
        "growing": int(growing.sum()),
        "saturated": int(saturated.sum()),
        "components": int(late.size),
        "largest_growth_second_half": float(fastest),
        "largest_growth_first_half": float(np.abs(early).max()),
    }
    rule = (
        "over the second half of training at most a quarter of the components grow at more than half the fastest pace, "
        "and at least half of them at less than a tenth of it"
    )
    summary = (
        f"second half of training: {growing.sum()} of {late.size} components of v₀ grow, "
        f"{saturated.sum()} have saturated"
    )
    measured, paper = (
        f"{growing.sum()} of {late.size} grow, {saturated.sum()} saturated",
        "“some” grow, the “remaining” saturate",
    )
    ok = 0 < growing.sum() <= late.size / 4 and saturated.sum() >= late.size / 2
    return Judgement(Verdict("holds" if ok else "fails"), rule, summary, numbers, measured, paper)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
