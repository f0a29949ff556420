"""Figure 4: sparse, then dense. Three dynamics of v towards the same ten targets μ ~ 1 + 3 U:

paper   v̇ = (μ − v) ∘ softmax(v²/3), v(0) = 0.05: what the authors' figure was drawn with
eqn6    v̇ = (μ − v) ∘ exp(v²/2), v(0) = 0: Eqn. 6, solved exactly
joint   the joint exp flow of a task with v̇ = μ − v under uniform attention: what Eqn. 6 approximates
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma._run.curve import EXACT, describe_all
from joma.theory import JointFlow, solve_bounce, solve_softmax_bounce
from joma.theory.bounce import softmax_entropy
from joma.theory.tasks import orthogonal_regression
from joma.theory.verdict import Verdict

SETTINGS = {
    "quick": {"components": 10, "seeds": 5, "times": 401},
    "laptop": {"components": 10, "seeds": 100, "times": 1001},
    "paper": {"components": 10, "seeds": 1000, "times": 1001},
}
AXES = {"v": ["component"], "mu": ["component"]}
CASES = {
    "paper": "the paper's figure: softmax(v²/3)",
    "eqn6": "Eqn. 6, exact: exp(v²/2)",
    "joint": "the joint exp flow itself",
}
T_END = {"paper": 100.0, "eqn6": 2.5, "joint": 2.5}


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Solve the three dynamics for each draw of μ; trajectories are kept for the first draw."""
    for s in range(settings["seeds"]):
        progress(s / settings["seeds"], f"draw {s + 1} of {settings['seeds']}")
        mu = np.sort(1 + 3 * np.random.default_rng((seed, s)).random(settings["components"]))
        writer.write(0, {"mu": mu}, draw=s)
        for case in CASES:
            t = np.linspace(0.0, T_END[case], settings["times"])
            if case == "joint":
                path = JointFlow(orthogonal_regression(mu), "exp", "linear").integrate(T_END[case], times=t)
                v, entropy = path.v[:, :, 0], softmax_entropy(path.z)
            else:
                bounce = solve_bounce(mu, t) if case == "eqn6" else solve_softmax_bounce(mu, t)
                v, entropy = bounce.v, bounce.entropy()
            for i in range(len(t)):
                writer.write(
                    i,
                    {"entropy": entropy[i]} | ({"v": v[i]} if s == 0 else {}),
                    t=float(t[i]),
                    case=case,
                    draw=s,
                )


def draw(run: Run) -> Chart:
    """For each dynamics: v over the sorted components, coloured by time, with μ dashed; entropy beside it."""
    frame = run.frame()
    mu = frame[(frame.gauge == "mu") & (frame.draw == 0)][["component", "value"]]
    target = (
        alt.Chart(mu)
        .mark_line(strokeDash=[5, 4], color="black", strokeWidth=1.5)
        .encode(alt.X("component:Q"), alt.Y("value:Q"))
    )
    rows: list[Any] = []
    for case, title in CASES.items():
        v = frame[(frame.gauge == "v") & (frame.case == case)]
        steps = np.sort(v.step.unique())
        v = v[v.step.isin(steps[:: max(1, len(steps) // 40)])][["t", "component", "value"]]
        left = (
            alt.Chart(v, title=alt.Title(title, subtitle="v(t) by component, colour is time; dashed: target μ"))
            .mark_line(strokeWidth=1.3)
            .encode(
                alt.X("component:Q", title="component, sorted by μ", axis=alt.Axis(tickMinStep=1)),
                alt.Y("value:Q", title="v", scale=alt.Scale(domain=[0, 4])),
                alt.Color("t:Q", title="t", scale=alt.Scale(scheme="rainbow")),
                detail="t:Q",
                tooltip=["component", alt.Tooltip("t", format=".3f"), alt.Tooltip("value", format=".3f")],
            )
        )
        entropy = frame[(frame.gauge == "entropy") & (frame.case == case)][["t", "draw", "value"]]
        right = (
            alt.Chart(
                entropy,
                title=alt.Title("attention entropy", subtitle="one line per draw of μ; bold: the one on the left"),
            )
            .mark_line()
            .encode(
                alt.X("t:Q", title="t"),
                alt.Y("value:Q", title="nats", scale=alt.Scale(domain=[0, 2.4])),
                detail="draw:N",
                strokeWidth=alt.condition("datum.draw == 0", alt.value(2.6), alt.value(1)),
                opacity=alt.condition("datum.draw == 0", alt.value(1), alt.value(0.45)),
                color=alt.value("#0072b2"),
                tooltip=["draw", alt.Tooltip("t", format=".3f"), alt.Tooltip("value", format=".3f")],
            )
            .properties(width=300, height=180)
        )
        rows.append(
            alt.hconcat((left + target).properties(width=300, height=180), right).resolve_scale(color="independent")
        )
    return alt.vconcat(*rows).resolve_scale(color="independent")


def dips(entropy: pd.DataFrame) -> pd.DataFrame:
    """Per case and draw of μ: entropy at the start, its fall, its rise from the trough to the end; do both count?"""
    curves = describe_all(entropy.rename(columns={"t": "step"}), EXACT, ["case", "draw"])
    rows = [(*key, curve.start, curve.depth, curve.bounce, curve.bounced) for key, curve in curves.items()]
    return pd.DataFrame(rows, columns=["case", "draw", "start", "depth", "rebound", "bounces"])


def judge(run: Run) -> Judgement:
    """A dip and a rebound of some size in nearly all draws: in the paper's dynamics, Eqn. 6 and the joint flow."""
    table = dips(run.frame("entropy"))
    means = table.groupby("case")[["depth", "rebound", "bounces"]].mean()
    numbers = {case: {name: float(means[name][case]) for name in means.columns} for case in CASES}
    rule = f"entropy falls by {EXACT.fall} below its start and rises again by {EXACT.rise}, in ≥ 90 % of the draws of μ"
    text = "; ".join(f"{case}: −{n['depth']:.2f}, then +{n['rebound']:.2f} nats" for case, n in numbers.items())
    bounces = {case: n["bounces"] >= 0.9 for case, n in numbers.items()}
    measured = "; ".join(f"{case} −{n['depth']:.2f}, +{n['rebound']:.2f}" for case, n in numbers.items()) + " nats"
    paper = "“drops”, “rebounces”"
    if not (bounces["paper"] and bounces["eqn6"]):
        return Judgement(Verdict("fails"), rule, text, numbers, measured, paper)
    if bounces["joint"]:
        return Judgement(Verdict("holds"), rule, text, numbers, measured, paper)
    text += ". So: under Eqn. 6, which overstates it for the flow it approximates"
    return Judgement(Verdict("holds under"), rule, text, numbers, measured, paper)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
