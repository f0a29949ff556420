"""Figure 4: sparse, then dense. Dynamics of v for ten numbers μ ~ 1 + 3 U:

paper    v̇ = (μ − v) ∘ softmax(v²/3), v(0) = 0.05: what the authors' script draws
eqn6     v̇ = (μ − v) ∘ exp(v²/2), v(0) = 0: Eqn. 6, solved exactly; its own attention is softmax(v²/2)
caption  the same v, and the attention that the caption names, softmax(v²)
joint    the joint exp flow with Eqn. 6's critical point μ (targets μ e^{μ²/2})
target   the joint exp flow with the target μ, and so with the smaller critical point √W(μ²)

Then, for μ spaced evenly, dip and rebound over the scale of μ, and with the term that Section 4 drops (C ≠ I).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._runs.curve import EXACT, describe_all
from joma._show.plots import panels as p
from joma.paper.exhibits._bounces import curves, path
from joma.paper.exhibits._statistics import counted, in_words
from joma.paper.exhibits.base import Exhibit, Experiment, Judgement, Progress, where
from joma.paper.labs.rebound import dip_and_rebound, entropy
from joma.paper.verdict import Verdict

SETTINGS = {
    "default": {"components": 10, "seeds": 5, "times": 401},
    "laptop": {"components": 10, "seeds": 100, "times": 1001},
    "paper": {"components": 10, "seeds": 1000, "times": 1001},
}
AXES = {"v": ["component"], "mu": ["component"]}
CASES = {
    "paper": "the authors' script", "eqn6": "Eqn. 6", "caption": "Eqn. 6, caption",
    "joint": "joint flow, same critical point", "target": "joint flow, same target",
}  # fmt: skip
SHOWN = {
    "paper": (0.0, 100.0),
    "eqn6": (0.0, 2.5),
    "joint": (1e-6, 10.0),
    "target": (1e-2, 10.0),
}  # times
DRAWN = ("paper", "eqn6", "joint")  # the dynamics that have panels of their own
SIZE = (265, 165)  # of a panel, in pixels
TIMES = 30  # at which the components are drawn
SCALES = dict.fromkeys(("eqn6", "joint"), (0.25, 0.5, 0.75, 1.0, 1.25)) | {
    "target": (0.25, 1.0, 4.0, 16.0, 64.0, 256)
}
TIP: dict[str, str | None] = {"t": ".3g", "value": ".3f"}
EPSILONS = (1.0, 0.9, 0.7, 0.5, 0.16)
REVISED = (
    "dip and rebound were asked of 90 % of the draws by script and caption, too (100 draws: 84 % and 69 %, fails; "
    "Eqn. 6 91 %, joint flow 95 %); the paper shows one draw, and its statement is about Eqn. 6"
)
TERM = 0.5  # the ε at which the dropped term is judged; the corrected Theorem 3 gives 0.0008 to 0.91 (S4.shift)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """The dynamics for each draw of μ (v is kept for the first), then the two sweeps for μ evenly in [1, 4]."""
    for s in range(settings["seeds"]):
        progress(s / (settings["seeds"] + 5), f"draw {s + 1} of {settings['seeds']}")
        mu = np.sort(1 + 3 * np.random.default_rng((seed, s)).random(settings["components"]))
        writer.write(0, {"mu": mu}, draw=s)
        for case, (t, v, nats) in curves(mu, settings["times"], SHOWN["paper"][1]).items():
            for i in range(len(t)):
                gauges = {"entropy": nats[i]} | (
                    {"v": v[i]} if s == 0 and case != "caption" else {}
                )
                writer.write(i, gauges, t=float(t[i]), case=case, draw=s)
    progress(
        settings["seeds"] / (settings["seeds"] + 5),
        "the scale of μ, and the term that Section 4 drops",
    )
    mu = np.linspace(1, 4, settings["components"])
    cells = [(case, scale, 1.0) for case, scales in SCALES.items() for scale in scales]
    cells += [(case, 1.0, epsilon) for case in ("eqn6", "joint") for epsilon in EPSILONS[1:]]
    for case, scale, epsilon in cells:
        dip, rebound = dip_and_rebound(entropy(path(case, scale * mu, epsilon)[1]))
        writer.write(0, {"dip": dip, "rebound": rebound}, case=case, scale=scale, epsilon=epsilon)


def draw(run: Run) -> p.Chart:
    """Components by time, entropy over time, and the rebound over the scale of μ and over ε."""
    frame = run.frame()
    components = [_components(frame, case) for case in DRAWN]
    entropies = [_entropy(frame, case) for case in DRAWN]
    return p.column(p.row(*components), p.row(*entropies), _sweeps(frame))


def _components(frame: pd.DataFrame, case: str) -> Any:
    """The components of v, one line per time, with their targets."""
    states = where(_during(frame, case), gauge="v", case=case)
    steps = np.sort(states.step.unique())
    states = where(states, step=steps[:: max(1, len(steps) // TIMES)].tolist())
    time = states.assign(time=states.t)
    if SHOWN[case][0] > 0:
        time = states.assign(time=np.log10(states.t))
    component = p.x("component", "component, sorted by μ", axis={"tickMinStep": 1})
    v = p.y("value", "v", domain=(0, 4))
    by_time = p.by("time", kind="Q", scheme=p.DEPTH, legend=False)
    tip = {"component": None, **TIP}
    lines = p.lines(time, component, v, by_time, detail="step", tip=tip, width=1.2)
    target = p.reference(where(frame, gauge="mu", draw=0), component, v)
    return p.panel(
        CASES[case], lines, target, note="v, from dark (early) to light; dashed: μ", size=SIZE
    )


def _entropy(frame: pd.DataFrame, case: str) -> Any:
    """Attention entropy over time: of the draw above as a bold line, of the others faint."""
    is_log = SHOWN[case][0] > 0
    table = where(_during(frame, case), gauge="entropy", case=case)
    t = p.x("t", "t", log=is_log, format="~g" if is_log else None, ticks=5)
    nats = p.y("value", "attention entropy (nats)", domain=(0, 2.4))
    tip = {"draw": None, **TIP}
    lines = p.lines(table, t, nats, detail="draw", bold="datum.draw == 0", tip=tip, colour=p.ACCENT)
    most = p.levels(np.log(_count(frame)))
    return p.panel(None, lines, most, size=SIZE)


def _during(frame: pd.DataFrame, case: str) -> pd.DataFrame:
    first, last = SHOWN[case]
    return frame[frame.t.between(first, last)]


def _count(frame: pd.DataFrame) -> int:
    """The number M of components."""
    return len(where(frame, gauge="mu", draw=0))


def _sweeps(frame: pd.DataFrame) -> p.Chart:
    """The rebound over the scale of μ, and over ε."""
    names = {case: CASES[case] for case in SCALES}
    rebounds = where(frame, gauge="rebound")
    rebounds = rebounds.assign(dynamics=rebounds.case.map(names))
    dynamics = p.by("dynamics", order=list(names.values()))
    nats = p.y("value", "rebound (nats)", zero=True)
    tip = {"dynamics": None, "scale": None, "epsilon": None, "value": ".3f"}
    by_scale = p.lines(
        where(rebounds, epsilon=1.0),
        p.x("scale", "scale of μ", log=True),
        nats,
        dynamics,
        tip=tip,
        points=True,
    )
    kept = where(rebounds, scale=1.0, case=["eqn6", "joint"])
    by_epsilon = p.lines(kept, p.x("epsilon", "ε"), nats, dynamics, tip=tip, points=True)
    note = f"μ = scale × (1 … 4), M = {_count(frame)} evenly spaced"
    return p.row(
        p.panel("Rebound over the scale of μ", by_scale, note=note, size=(330, 170)),
        p.panel(
            "Rebound with the term that Section 4 drops",
            by_epsilon,
            note="C = I + (ε − 1)μ̂μ̂ᵀ; ε = 1: dropped",
            size=(330, 170),
        ),
        shared=True,
    )


def headline(run: Run) -> p.Chart:
    """Attention entropy over time by Eqn. 6, one line per draw."""
    table = where(_during(run.frame(), "eqn6"), gauge="entropy", case="eqn6")
    t = p.x("t", "time", ticks=4)
    nats = p.y("value", "entropy (nats)", domain=(0, 2.4), ticks=4)
    return p.thumbnail(
        p.lines(table, t, nats, detail="draw", bold="datum.draw == 0", colour=p.ACCENT)
    )


def dips(entropy: pd.DataFrame) -> pd.DataFrame:
    """Per case and draw of μ: entropy at the start, its fall, its rise from the trough to the end; do both count?"""
    told = describe_all(entropy, EXACT, ["case", "draw"], over="t")
    rows = [
        (*key, curve.start, curve.depth, curve.bounce, curve.bounced) for key, curve in told.items()
    ]
    return pd.DataFrame(rows, columns=["case", "draw", "start", "depth", "rebound", "bounces"])


def judge(run: Run) -> Judgement:
    """Dip and rebound in most draws, by Eqn. 6 and the flow that it stands for; and with the term kept?"""
    frame = run.frame()
    each = dips(where(frame, gauge="entropy"))
    means = each.groupby("case")[["depth", "rebound", "bounces"]].mean()
    numbers: dict[str, Any] = {
        case: {name: float(means[name][case]) for name in means.columns} for case in CASES
    }
    shares = {
        case: counted(where(each, case=case).bounces.astype(float))
        for case in CASES
        if case != "target"
    }
    sweep = where(frame, gauge="rebound")
    term = {
        c: where(sweep, case=c, scale=1.0).set_index("epsilon").value.to_dict()
        for c in ("eqn6", "joint")
    }
    scales = {
        c: where(sweep, case=c, epsilon=1.0).set_index("scale").value.to_dict() for c in SCALES
    }
    numbers |= {
        "M": len(where(frame, gauge="mu", draw=0)),
        "rebound by ε": term,
        "rebound by scale": scales,
    }
    rule = (
        f"entropy falls by {EXACT.fall} below its start and rises again by {EXACT.rise} in at least half of the draws, "
        "by Eqn. 6 and by the joint flow with the same critical point; the attention of the authors' script and of the "
        f"caption are told beside. Holds: also with the dropped term kept, 90 % of the rebound at ε = {TERM}; holds "
        "under a condition: without; else fails"
    )
    measured = "; ".join(
        f"{case} −{numbers[case]['depth']:.2f}, +{numbers[case]['rebound']:.2f}" for case in CASES
    )
    eqn6, joint = (
        ", ".join(f"{term[c][e]:.2f}" for e in (1.0, TERM, EPSILONS[-1])) for c in ("eqn6", "joint")
    )
    text = f"M = {numbers['M']}, dip and rebound in nats: {measured}. Rebound for ε = 1, {TERM}, {EPSILONS[-1]}, "
    text += f"evenly spaced μ: Eqn. 6 {eqn6}; joint {joint}"
    text += "; draws that dip and rebound: " + ", ".join(
        f"{case} {in_words(s)}" for case, s in shares.items()
    )
    verdict = Verdict.HOLDS
    if term["eqn6"][TERM] < 0.9 * term["eqn6"][1.0]:
        verdict, text = Verdict.UNDER, f"{text}. So: Eqn. 6 needs C = I, a condition left unsaid"
    if any(shares[case]["share"] < 0.5 for case in ("eqn6", "joint")):
        verdict = Verdict.FAILS
    short, paper = f"M = {numbers['M']}: {measured} nats", "“drops”, “rebounces”"
    return Judgement(verdict, rule, text, numbers, short, paper, revised=REVISED)


EXHIBIT = Exhibit(
    id="fig4",
    title="Figure 4: sparse, then dense",
    statement=(
        "Salient components are learned first; attention entropy drops, then bounces back (Eqn. 6)."
    ),
    seconds=7,
    experiment=Experiment(SETTINGS, run, draw, judge, AXES, headline=headline),
    messages={
        Verdict.HOLDS: "Attention turns sparse, then dense",
        Verdict.UNDER: "Attention turns sparse, then dense; by Eqn. 6 only if C = I",
        Verdict.FAILS: "Sparse, then dense: not in most draws",
    },
)
