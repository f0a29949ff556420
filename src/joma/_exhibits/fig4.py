"""Figure 4: sparse, then dense. Three dynamics of v towards the same ten targets μ ~ 1 + 3 U:

paper    v̇ = (μ − v) ∘ softmax(v²/3), v(0) = 0.05: what the authors' script draws
eqn6     v̇ = (μ − v) ∘ exp(v²/2), v(0) = 0: Eqn. 6, solved exactly; its own attention is softmax(v²/2)
caption  the same v, and the attention that the caption names, softmax(v²)
joint    the joint exp flow of a task with v̇ = μ − v under uniform attention: what Eqn. 6 approximates
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._exhibits.base import Experiment, Judgement, Progress, where
from joma._figures import panels as p
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
    "paper": "the authors' script: softmax(v²/3)",
    "eqn6": "Eqn. 6, exact: exp(v²/2)",
    "caption": "Eqn. 6, entropy(softmax(v²)) as in the caption",
    "joint": "the joint exp flow itself",
}
T_END = {"paper": 100.0, "eqn6": 2.5, "caption": 2.5, "joint": 2.5}


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
                bounce = solve_softmax_bounce(mu, t) if case == "paper" else solve_bounce(mu, t)
                v, entropy = bounce.v, softmax_entropy(bounce.v**2) if case == "caption" else bounce.entropy()
            for i in range(len(t)):
                writer.write(
                    i,
                    {"entropy": entropy[i]} | ({"v": v[i]} if s == 0 else {}),
                    t=float(t[i]),
                    case=case,
                    draw=s,
                )


def draw(run: Run) -> p.Chart:
    """For each dynamics: v over the sorted components, coloured by time, with μ dashed; entropy beside it."""
    frame = run.frame()
    component, v = p.x("component", "component, sorted by μ", axis={"tickMinStep": 1}), p.y("value", "v", domain=(0, 4))
    target = p.reference(where(frame, gauge="mu", draw=0), component, v)
    rows = []
    for case, title in CASES.items():
        states = where(frame, gauge="v", case=case)
        steps = np.sort(states.step.unique())
        shown = where(states, step=steps[:: max(1, len(steps) // 40)].tolist())
        time = p.by("t", "t", kind="Q", scheme="rainbow")
        tip = {"component": None, "t": ".3f", "value": ".3f"}
        left = p.lines(shown, component, v, time, detail="t", tip=tip, width=1.3)
        right = p.lines(
            where(frame, gauge="entropy", case=case), p.x("t", "t"), p.y("value", "nats", domain=(0, 2.4)),
            detail="draw", bold="datum.draw == 0", colour=p.ACCENT, tip={"draw": None, "t": ".3f", "value": ".3f"},
        )  # fmt: skip
        notes = (
            "v(t) by component, colour is time; dashed: target μ",
            "one line per draw of μ; bold: the one on the left",
        )
        rows.append(
            p.row(
                p.panel(title, left, target, note=notes[0], size=(300, 180)),
                p.panel("attention entropy", right, note=notes[1], size=(300, 180)),
            )
        )
    return p.column(*rows)


def dips(entropy: pd.DataFrame) -> pd.DataFrame:
    """Per case and draw of μ: entropy at the start, its fall, its rise from the trough to the end; do both count?"""
    curves = describe_all(entropy, EXACT, ["case", "draw"], over="t")
    rows = [(*key, curve.start, curve.depth, curve.bounce, curve.bounced) for key, curve in curves.items()]
    return pd.DataFrame(rows, columns=["case", "draw", "start", "depth", "rebound", "bounces"])


def judge(run: Run) -> Judgement:
    """A dip and a rebound of some size in nearly all draws: in script, Eqn. 6, caption and the joint flow."""
    table = dips(run.frame("entropy"))
    means = table.groupby("case")[["depth", "rebound", "bounces"]].mean()
    numbers = {case: {name: float(means[name][case]) for name in means.columns} for case in CASES}
    rule = f"entropy falls by {EXACT.fall} below its start and rises again by {EXACT.rise}, in ≥ 90 % of the draws of μ"
    text = "; ".join(f"{case}: −{n['depth']:.2f}, then +{n['rebound']:.2f} nats" for case, n in numbers.items())
    bounces = {case: n["bounces"] >= 0.9 for case, n in numbers.items()}
    measured = "; ".join(f"{case} −{n['depth']:.2f}, +{n['rebound']:.2f}" for case, n in numbers.items()) + " nats"
    paper = "“drops”, “rebounces”"
    verdict = Verdict.FAILS
    if bounces["paper"] and bounces["eqn6"] and bounces["caption"]:
        verdict = Verdict.HOLDS if bounces["joint"] else Verdict.UNDER
        text += "" if bounces["joint"] else ". So: under Eqn. 6, which overstates it for the flow it approximates"
    return Judgement(verdict, rule, text, numbers, measured, paper)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
