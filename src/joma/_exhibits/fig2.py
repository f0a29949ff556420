"""Figure 2: does the softmax first integral (Eqn. 18) predict the attention logits?

Two data sets with 20 classes, 10 distinct and 10 common tokens, linear activation, softmax attention with temperature
0.5, cross-entropy, normal starts of size 0.01: the setting of the authors' code, whose 2,000 steps of size 0.1 are the
flow up to t = 200. The first integral is taken with b̄ at the start.
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
    "quick": {"seeds": 5, "t_end": 200.0, "times": 201},
    "laptop": {"seeds": 50, "t_end": 200.0, "times": 401},
    "paper": {"seeds": 200, "t_end": 200.0, "times": 2001},
}
AXES = {"x": ["class", "token"]}
CASES = {"smooth": "smoothly moving classes", "random": "random classes"}
STEP = 0.1  # of the authors' gradient descent: batches = t / STEP


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Integrate both data sets for all seeds and record the normalised correlations."""
    total = len(CASES) * settings["seeds"]
    for n, (case, s) in enumerate((case, s) for case in CASES for s in range(settings["seeds"])):
        progress(n / total, f"{CASES[case]}, seed {s + 1} of {settings['seeds']}")
        rng = np.random.default_rng((seed, s))
        task = class_distributions(rng, smooth=case == "smooth")
        start = small_start(task, rng)
        flow = JointFlow(task, "softmax", "linear", temperature=0.5)
        path = flow.integrate(settings["t_end"], *start, times=settings["times"])
        if s == 0:
            writer.write(0, {"x": task.x}, case=case, draw=s)
        invariant = path.invariant()
        assert invariant.nc1 is not None
        assert invariant.nc2 is not None
        size = np.linalg.norm(invariant.z_hat, axis=1) / np.linalg.norm(path.z, axis=1)
        for i, t in enumerate(path.t):
            gauges = {
                "nc": invariant.nc[i],
                "nc1": invariant.nc1[i],
                "nc2": invariant.nc2[i],
                "size": size[i],
            }
            writer.write(round(t / STEP), gauges, t=float(t), case=case, draw=s)


NAMES = {"nc": "ẑ  (first integral)", "nc1": "ẑ₁ = ½ Σ v² only", "nc2": "ẑ₂ = −½ Σ ‖v‖² b̄ only"}


def draw(run: Run) -> Chart:
    """Both data sets: the frequencies x, and NC over training (line: mean over seeds, band: min to max)."""
    frame = run.frame()
    rows = []
    for case, title in CASES.items():
        x = frame[(frame.gauge == "x") & (frame.case == case)][["class", "token", "value"]]
        heat = (
            alt.Chart(x, title=alt.Title(f"x: {title}"))
            .mark_rect()
            .encode(
                alt.X("class:O", title="class label y", axis=alt.Axis(labels=False, ticks=False)),
                alt.Y("token:O", title="context token l", axis=alt.Axis(labels=False, ticks=False)),
                alt.Color("value:Q", scale=alt.Scale(scheme="viridis"), legend=None),
                tooltip=["class", "token", alt.Tooltip("value", format=".3f")],
            )
            .properties(width=170, height=200)
        )
        nc = frame[frame.gauge.isin(list(NAMES)) & (frame.case == case)]
        nc = nc.groupby(["step", "gauge"]).value.agg(["min", "mean", "max"]).reset_index()
        nc["quantity"] = nc.gauge.map(NAMES)
        base = alt.Chart(nc, title=alt.Title("Normalised correlation with the true logits z(t)")).encode(
            alt.X("step:Q", title="batches (t / 0.1)"),
            alt.Color("quantity:N", title=None, sort=list(NAMES.values()), legend=alt.Legend(symbolOpacity=1)),
        )
        band = base.mark_area(opacity=0.2).encode(
            alt.Y("min:Q", title="NC", scale=alt.Scale(domain=[-0.6, 1.0])), alt.Y2("max:Q")
        )
        line = base.mark_line(strokeWidth=2).encode(
            alt.Y("mean:Q"),
            tooltip=["quantity", "step", *(alt.Tooltip(c, format=".4f") for c in ("min", "mean", "max"))],
        )
        rows.append(
            alt.hconcat(heat, (band + line).properties(width=380, height=200)).resolve_scale(color="independent")
        )
    return alt.vconcat(*rows)


def judge(run: Run) -> Judgement:
    """High correlation of ẑ at all times, and what the components and the size do."""
    frame = run.frame()
    last = frame[frame.step == frame.step.max()]
    numbers: dict[str, Any] = {}
    for case in CASES:
        nc = frame[(frame.gauge == "nc") & (frame.case == case)].value
        end = last[last.case == case]
        numbers[case] = {
            "nc_min": nc.min(), "nc_mean": nc.mean(), "nc_max": nc.max(),
            "nc_end": end[end.gauge == "nc"].value.mean(),
            "nc1_end": end[end.gauge == "nc1"].value.mean(),
            "nc2_end": end[end.gauge == "nc2"].value.mean(),
            "size_end": end[end.gauge == "size"].value.mean(),  # ‖ẑ‖ / ‖z‖
        }  # fmt: skip
    lowest = min(n["nc_min"] for n in numbers.values())
    first = max(n["nc1_end"] for n in numbers.values())
    sizes = [n["size_end"] for n in numbers.values()]
    rule = "NC(ẑ, z) ≥ 0.9 at all times, both data sets, all seeds; and NC of each component < 0.9 at the end"
    measured, paper = f"NC(ẑ, z) ≥ {lowest:.3f}; ẑ₁ alone {first:.3f} in the end", "“high”; its components “do not”"
    if lowest < 0.9:
        return Judgement(Verdict("fails"), rule, f"NC(ẑ, z) falls to {lowest:.3f}", numbers, measured, paper)
    text = f"NC(ẑ, z) ≥ {lowest:.3f} throughout, but ẑ ends {min(sizes):.1f} to {max(sizes):.1f} times as large as z"
    if first < 0.9:
        return Judgement(Verdict("holds"), rule, text, numbers, measured, paper)
    text += f"; ẑ₁ alone does as well in the end (NC {first:.3f})"
    return Judgement(Verdict("holds as corrected"), rule, text, numbers, measured, paper)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
