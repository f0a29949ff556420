"""Figure 9: G(y) = F(θ₁⁻¹(y)) of a ReLU node, for several isotropic families.

Two points of G on one line through the origin, with y in the ratio a₋/a₊, are what a critical point of two components
needs (Eqn. 56): G(y)/y has to take a value twice. It does for heavy tails, at one separation D* of the centres; at
others, and for log-concave marginals at all, nodes grow or die.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory.isotropic import (
    ExpNorm,
    Gaussian,
    Laplace,
    Mixture,
    Radial,
    StudentT,
    Thetas,
    UniformBall,
    critical_rays,
)
from joma.theory.verdict import Verdict

SETTINGS = {
    "quick": {"n": 3, "points": 161, "ratios": 25, "t_end": 150.0},
    "laptop": {"n": 3, "points": 401, "ratios": 100, "t_end": 600.0},
    "paper": {"n": 10, "points": 401, "ratios": 100, "t_end": 600.0},
}
AXES = {"y": ["point"], "G": ["point"], "level": ["point"]}
WEIGHTS = (0.4, -0.6)  # a₊ and −a₋ of the pair that is drawn
FACTORS = (0.8, 1.0, 1.2)  # separations of the centres, in D*
HEAVY = "Student-t, ν = 3"


def families(n: int) -> dict[str, Radial]:
    """The families, by the names they have in the picture."""
    return {
        "Gaussian": Gaussian(n),
        "uniform ball": UniformBall(n, 2.0),
        "exp(−‖x‖)": ExpNorm(n, 0.6),
        "Laplace": Laplace(n),
        HEAVY: StudentT(n, nu=3.0),
        "Student-t, ν = 1.5": StudentT(n, nu=1.5),
    }


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """G on a grid, pairs for a range of ratios, and flows about the critical separation."""
    y = 1 / (1 + np.exp(-np.linspace(-9.0, 5.3, settings["points"])))
    ratios = np.geomspace(1.05, 20.0, settings["ratios"])
    named = families(settings["n"])
    for k, (name, family) in enumerate(named.items()):
        progress(k / (len(named) + 1), name)
        thetas = Thetas(family)
        rho = family.ppf(y)
        writer.write(0, {"y": y, "G": thetas.F(rho), "level": thetas.level(rho)}, family=name)
        for i, ratio in enumerate((-WEIGHTS[1] / WEIGHTS[0], *ratios)):
            found = critical_rays(family, [1.0, -float(ratio)])
            pairs = [ray.rho for ray in found.rays] + [(c.rho1[1], c.rho1[1] - c.separation) for c in found.continua]
            row = {"pairs": float(len(pairs))}
            if pairs:
                y1, y2 = (float(family.cdf(r)) for r in pairs[0])
                row |= {"y1": y1, "y2": y2, "slope": float(thetas.level(pairs[0][0])), "D": found.separations[0]}
            writer.write(i, row, family=name, ratio=float(ratio))
    progress(len(named) / (len(named) + 1), "flows")
    heavy = named[HEAVY]
    (ray,) = critical_rays(heavy, WEIGHTS).rays
    t = np.linspace(0.0, settings["t_end"], 201)
    noise = 0.1 * np.random.default_rng(seed).standard_normal(settings["n"] + 1)
    axis = np.eye(settings["n"])[0]
    v0, xi0 = ray.point(np.stack([ray.separation * axis, 0 * axis]))
    for factor in FACTORS:
        mixture = Mixture(heavy, np.stack([factor * ray.separation * axis, 0 * axis]), np.array(WEIGHTS))
        path = mixture.integrate(float(t[-1]), v0 + noise[:-1], xi0 + noise[-1], times=t)
        for i, (time, v) in enumerate(zip(path.t, path.v, strict=True)):
            writer.write(i, {"norm": float(np.linalg.norm(v))}, t=float(time), factor=factor)


def _curves(frame: pd.DataFrame) -> pd.DataFrame:
    wide = frame[frame.gauge.isin(list(AXES))].pivot_table(index=["family", "point"], columns="gauge", values="value")
    return wide.reset_index()


def _pairs(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frame[frame.gauge.isin(["pairs", "y1", "y2", "slope", "D"])]
    wide = rows.pivot_table(index=["family", "ratio", "step"], columns="gauge", values="value").reset_index()
    return wide.reindex(columns=["family", "ratio", "step", "pairs", "y1", "y2", "slope", "D"])


def draw(run: Run) -> Chart:
    """G with its lines, G(y)/y, the separation that a ratio needs, and the flow at and beside it."""
    frame = run.frame()
    curves, pairs = _curves(frame), _pairs(frame)
    order = list(families(1))
    colour = alt.Color("family:N", sort=order, title=None, scale=alt.Scale(domain=order))
    ratio = -WEIGHTS[1] / WEIGHTS[0]
    drawn = pairs[(pairs.step == 0) & (pairs.pairs > 0)]
    lines = pd.concat(
        [pd.DataFrame({"family": r.family, "y": [0.0, 1.0], "G": [0.0, r.slope]}) for r in drawn.itertuples()]
    )
    ends = pd.concat([drawn.assign(y=drawn[c], G=drawn[c] * drawn.slope, level=drawn.slope) for c in ("y1", "y2")])
    point = alt.Chart(ends).mark_point(size=45, filled=True, opacity=1).encode(colour)
    base = alt.Chart(curves).mark_line(clip=True, strokeWidth=1.8)
    top = alt.Y("G:Q", title="G(y)", scale=alt.Scale(domain=[0, 2.5]))
    left = (
        base.encode(alt.X("y:Q", title="y = θ₁(ρ)"), top, colour)
        + alt.Chart(lines).mark_line(strokeDash=[4, 3], clip=True, strokeWidth=1).encode(alt.X("y:Q"), top, colour)
        + point.encode(alt.X("y:Q"), top)
    ).properties(
        width=330, height=230,
        title=alt.Title("G(y)", subtitle=f"dashed: the line through two points with y in the ratio {ratio:g}"),
    )  # fmt: skip
    ticks = alt.Axis(values=[1e-4, 1e-3, 0.01, 0.1, 0.5, 1], format="~g")
    level = alt.Y("level:Q", title="G(y)/y", scale=alt.Scale(domain=[0, 6]))
    x = alt.X("y:Q", title="y (log)", scale=alt.Scale(type="log", domain=[1e-4, 1]), axis=ticks)
    right = (base.encode(x, level, colour) + point.encode(x, level)).properties(
        width=330, height=230,
        title=alt.Title("the line's slope, G(y)/y", subtitle="a value taken twice: a pair. Increasing: none"),
    )  # fmt: skip
    wanted = pairs[(pairs.step > 0) & (pairs.pairs > 0)]
    below = (
        alt.Chart(wanted)
        .mark_line()
        .encode(
            alt.X(
                "ratio:Q",
                title="a₋/a₊ (log)",
                scale=alt.Scale(type="log", domain=[1, 20]),
                axis=alt.Axis(values=[1, 1.5, 2, 3, 5, 10, 20]),
            ),
            alt.Y("D:Q", title="D*"),
            alt.Color("family:N", sort=order, legend=None, scale=alt.Scale(domain=order)),
        )
        .properties(
            width=330,
            height=200,
            title=alt.Title("the separation D* that critical rays need", subtitle="families not shown have none"),
        )
    )
    norms = frame[frame.gauge == "norm"].assign(separation=lambda f: f.factor.map("{:g} D*".format))
    flow = (
        alt.Chart(norms)
        .mark_line()
        .encode(
            alt.X("t:Q", title="t"),
            alt.Y("value:Q", title="‖v‖"),
            alt.Color(
                "separation:N", title="separation", sort=None, scale=alt.Scale(range=["#7f7f7f", "#24292f", "#0072b2"])
            ),
        )
        .properties(
            width=330,
            height=200,
            title=alt.Title(
                f"what becomes of a node ({HEAVY})", subtitle="below D* it dies, at D* it rests, above it grows"
            ),
        )
    )
    return alt.vconcat(left | right, (below | flow).resolve_scale(color="independent")).resolve_scale(
        color="independent"
    )


def judge(run: Run) -> Judgement:
    """A pair on one line, for every family or only for those whose G(y)/y does not increase."""
    frame = run.frame()
    curves, pairs = _curves(frame).sort_values(["family", "y"]), _pairs(frame)
    steps = curves.groupby("family")["level"].apply(lambda level: float((level.diff() / level).min()))
    has = pairs[pairs.step == 0].set_index("family").pairs > 0
    flow = frame[frame.gauge == "norm"].sort_values("t").groupby("factor").value
    change = (flow.last() / flow.first()).to_dict()
    numbers = {
        "pairs": {name: bool(has[name]) for name in has.index},
        "least_relative_step_of_level": steps.to_dict(),
        "norm_end_over_start": {f"{factor:g} D*": value for factor, value in change.items()},
        "D": pairs[(pairs.step == 0) & (pairs.pairs > 0)].set_index("family").D.to_dict(),
    }
    rule = (
        "a line through the origin meets G at two points with y in the ratio 1.5: in every family (holds), or in "
        "exactly those whose G(y)/y is not increasing (holds under); and ‖v‖ falls, stays within 25 %, and grows at "
        "0.8, 1 and 1.2 D*"
    )
    with_pairs, without = (", ".join(name for name in has.index if bool(has[name]) == yes) for yes in (True, False))
    fates = change[0.8] < 0.75 and abs(change[1.0] - 1) < 0.25 and change[1.2] > 1.25
    summary = f"pairs: {with_pairs or 'none'}; none: {without or '–'}"
    measured, paper = f"two crossings in {int(has.sum())} of {len(has)} families", "“twice”"
    if not has.any() or not fates:
        return Judgement(Verdict("fails"), rule, summary, numbers, measured, paper)
    if has.all():
        return Judgement(Verdict("holds"), rule, summary, numbers, measured, paper)
    consistent = all(has[name] == (steps[name] <= 1e-9) for name in has.index)
    under = f"{summary}. So: under tails that are exponential or heavier, at one separation D* of the centres"
    verdict, text = ("holds under", under) if consistent else ("fails", summary)
    return Judgement(Verdict(verdict), rule, text, numbers, measured, paper)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
