"""Figure 3: which components of v₀ grow under linear activation and softmax attention (the task of Figure 2, left).

The paper reads it as winner-take-all (Theorem 2): some components go on growing, the others saturate.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict
from joma.theory import JointFlow
from joma.theory.tasks import class_distributions, small_start

SETTINGS = {
    "default": {"t_end": 200.0, "times": 201},
    "laptop": {"t_end": 2000.0, "times": 401},
    "paper": {"t_end": 200.0, "times": 2001},
}
AXES = {"v": ["token", "node"], "v0": ["token"]}
SHOWN = 4  # components of the first column, as in the paper
RULE = (
    "over the second half of training at most a quarter of the components grow at more than half the "
    "fastest pace, and at least half of them at less than a tenth of it"
)


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


def draw(run: Run) -> p.Chart:
    """V at the start and at the end, and the growth of the first components of v₀."""
    frame = run.frame()
    panels = []
    for step, title in ((frame.step.min(), "V at the start"), (frame.step.max(), "V at the end")):
        data = where(frame, gauge="v", step=step)
        limit = float(data.value.abs().max())
        cells = p.heat(
            data, p.x("node", "node k", kind="O", labels=False),
            p.y("token", "context token l", kind="O", labels=False),
            p.by("value", kind="Q", scheme="redblue", domain=(limit, -limit), legend=False),
            tip={"token": None, "node": None, "value": ".3f"},
        )  # fmt: skip
        panels.append(p.panel(title, cells, note=f"|v| ≤ {limit:.2g}", size=(190, 210)))
    growth = where(frame, gauge="v0", token=list(range(SHOWN)))
    growth = growth.assign(component=growth.token.map("component {}".format))
    grown = p.lines(
        growth, p.x("step", "batches (t / 0.1)"), p.y("value", "v₀(t)"), p.by("component"), width=2,
        tip={"component": None, "step": None, "value": ".3f"},
    )  # fmt: skip
    return p.row(*panels, p.panel("Growth of the first components of v₀", grown, size=(330, 210)))


def judge(run: Run) -> Judgement:
    """Compare how much each component of v₀ grows over both halves of training."""
    frame = run.frame("v0")
    steps = np.sort(frame.step.unique())
    table = frame.pivot_table(index="step", columns="token", values="value").to_numpy()
    half = int(np.searchsorted(steps, steps[-1] / 2))
    early = table[half] - table[0]
    late = table[-1] - table[half]
    # A component that keeps its pace has late = early; a saturated one has late near 0.
    fastest = np.abs(late).max()
    growing = int((np.abs(late) > 0.5 * fastest).sum())
    saturated = int((np.abs(late) < 0.1 * fastest).sum())
    numbers = {
        "growing": growing,
        "saturated": saturated,
        "components": late.size,
        "largest_growth_second_half": fastest,
        "largest_growth_first_half": np.abs(early).max(),
    }
    if 0 < growing <= late.size / 4 and saturated >= late.size / 2:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict,
        numbers,
        "in the second half of training, {growing} of {components} components of v₀ grow and "
        "{saturated} have saturated",
        "{growing} of {components} grow, {saturated} saturated",
    )


EXHIBIT = Exhibit(
    id="fig3",
    title="Figure 3: growth of the components",
    statement="With linear activation some components of v₀ keep growing while the others saturate.",
    seconds=1,
    rule=RULE,
    paper="“some” grow, the “remaining” saturate",
    experiment=Experiment(SETTINGS, run, draw, judge, AXES),
    messages={
        Verdict.HOLDS: "A few components keep growing while most saturate",
        Verdict.FAILS: "Components do not part into a few that grow and most that saturate",
    },
)
