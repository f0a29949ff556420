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
from joma.paper.exhibits._statistics import counted
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.labs.rebound import dip_and_rebound, entropy, eqn6_path, joint_path
from joma.paper.verdict import Verdict
from joma.theory import solve_bounce, solve_softmax_bounce
from joma.theory.bounce import softmax_entropy
from joma.theory.setting import Array


def path(case: str, mu: Array, along: float = 1.0) -> tuple[Array, Array]:
    """Times and v of Eqn. 6 or of a joint flow, until they are at rest; ``along``: the ε of C = I + (ε − 1)μ̂μ̂ᵀ."""
    target = mu * np.exp(mu * mu / 2) if case == "joint" else mu
    return eqn6_path(mu, along, end=1e3) if case == "eqn6" else joint_path(target, along)


def curves(mu: Array, times: int, end: float) -> dict[str, tuple[Array, Array, Array]]:
    """Times, v and entropy per case; of a solver's steps about ``times``, the lowest entropy among them.

    ``end`` is the last time of the authors' script.
    """
    t = np.linspace(0.0, end, times)
    script = solve_softmax_bounce(mu, t)
    found = {"paper": (t, script.v, script.entropy())}
    for case in ("eqn6", "joint", "target"):
        t, v = path(case, mu)
        v = solve_bounce(mu, t).v if case == "eqn6" else v
        found[case] = (t, v, entropy(v))
        if case == "eqn6":
            found["caption"] = (t, v, softmax_entropy(v * v))
    for case, (t, v, nats) in found.items():
        kept = np.unique([*range(0, len(t), -(-len(t) // times)), nats.argmin(), len(t) - 1])
        found[case] = (t[kept], v[kept], nats[kept])
    return found


SETTINGS = {
    "default": {"components": 10, "seeds": 20, "times": 401},
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
TIMES = 12  # at which the components are drawn
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
LEAST_SHARE = 0.5  # of the draws must dip and rebound
KEPT = 0.9  # of the rebound must remain with the dropped term
RULE = (
    f"entropy falls by {EXACT.fall} below its start and rises again by {EXACT.rise} in at least half of the draws, "
    "by Eqn. 6 and by the joint flow with the same critical point. Holds: also with the dropped term kept, "
    f"{KEPT:.0%} of the rebound at ε = {TERM}; holds under a condition: without; else fails. The attention of the "
    "authors' script and that of the caption are shown for comparison and do not decide"
)


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
    return p.column(p.grid(*components, *entropies, columns=len(DRAWN)), _sweeps(frame))


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
    t = p.x("t", "t", ticks=5)
    if is_log:
        t = p.x("t", "t", log=True, format="~g", ticks=p.decades(table.t))
    nats = p.y("value", "attention entropy (nats)", domain=(0, 2.4))
    tip = {"draw": None, **TIP}
    lines = p.lines(table, t, nats, detail="draw", bold="datum.draw == 0", tip=tip, colour=p.ACCENT)
    most = p.levels(np.log(_count(frame)))
    note = "bold: the draw above, faint: the others"
    return p.panel("its entropy", lines, most, note=note, size=SIZE)


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
        p.x("scale", "scale of μ", log=True, ticks=[0.25, 1, 4, 16, 64, 256], format="~g"),
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
    """Check dip and rebound by Eqn. 6 and by the joint flow, and again with the dropped term kept."""
    frame = run.frame()
    each = dips(where(frame, gauge="entropy"))
    means = each.groupby("case")[["depth", "rebound", "bounces"]].mean()
    sweep = where(frame, gauge="rebound")
    by_term = {}
    for case in ("eqn6", "joint"):
        by_term[case] = where(sweep, case=case, scale=1.0).set_index("epsilon").value.to_dict()
    by_scale = {}
    for case in SCALES:
        by_scale[case] = where(sweep, case=case, epsilon=1.0).set_index("scale").value.to_dict()
    shares = {}
    for case in CASES:
        if case != "target":
            shares[case] = counted(where(each, case=case).bounces.astype(float))
    epsilons = (1.0, TERM, EPSILONS[-1])
    numbers: dict[str, Any] = {
        "M": len(where(frame, gauge="mu", draw=0)),
        "cases": {case: means.loc[case].to_dict() for case in CASES},
        "draws that dip and rebound": shares,
        "rebound by ε": by_term,
        "rebound by scale": by_scale,
        "ε": epsilons,
        "rebound": {case: [by_term[case][ε] for ε in epsilons] for case in by_term},
    }
    template = (
        "M = {M}, dip and rebound in nats: {cases:{key} −{depth:.2f} +{rebound:.2f}}; rebound for "
        "ε = {ε:g} and evenly spaced μ: {rebound.eqn6:.2f} by Eqn. 6, {rebound.joint:.2f} in the joint "
        "flow; draws that dip and rebound: "
        "{draws that dip and rebound:{key} {count} of {flows} ({low:.2f}–{high:.2f})}"
    )
    if any(shares[case]["share"] < LEAST_SHARE for case in ("eqn6", "joint")):
        verdict = Verdict.FAILS
    elif by_term["eqn6"][TERM] < KEPT * by_term["eqn6"][1.0]:
        verdict = Verdict.UNDER
        template += ". So: Eqn. 6 needs C = I, a condition that the paper does not state"
    else:
        verdict = Verdict.HOLDS
    short_template = "M = {M}: {cases:{key} −{depth:.2f} +{rebound:.2f}} nats"
    return Judgement(verdict, numbers, template, short_template)


EXHIBIT = Exhibit(
    id="fig4",
    title="Figure 4: sparse, then dense",
    statement=(
        "Salient components are learned first; attention entropy drops, then bounces back (Eqn. 6)."
    ),
    seconds=7,
    rule=RULE,
    paper="“drops”, “rebounces”",
    revised=REVISED,
    experiment=Experiment(SETTINGS, run, draw, judge, AXES, headline=headline),
    messages={
        Verdict.HOLDS: "Attention turns sparse, then dense",
        Verdict.UNDER: "Attention turns sparse, then dense; by Eqn. 6 only if C = I",
        Verdict.FAILS: "Sparse, then dense: not in most draws",
    },
)
