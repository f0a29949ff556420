"""Figure 9: G(y) = F(θ₁⁻¹(y)) of a ReLU node, for several isotropic families.

Two points of G on one line through the origin, with y in the ratio a₋/a₊, are what a critical point of two components
needs (Eqn. 56): G(y)/y has to take a value twice. It does for heavy tails, at one separation D* of the centres; at
others, and for log-concave marginals at all, nodes grow or die.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where, wide
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict
from joma.theory import isotropic
from joma.theory.isotropic import Mixture, Radial, StudentT, Thetas, critical_rays

SETTINGS = {
    "default": {"n": 3, "points": 161, "ratios": 25, "t_end": 150.0},
    "laptop": {"n": 3, "points": 401, "ratios": 100, "t_end": 600.0},
    "paper": {"n": 10, "points": 401, "ratios": 100, "t_end": 600.0},
}
AXES = {"y": ["point"], "G": ["point"], "level": ["point"]}
WEIGHTS = (0.4, -0.6)  # a₊ and −a₋ of the pair that is drawn
FACTORS = (0.8, 1.0, 1.2)  # separations of the centres, in D*
HEAVY = "Student-t, ν = 3"
TOUCHING = 0.25  # share by which ‖v‖ may change at D*
RULE = (
    f"a line through the origin meets G at two points with y in the ratio {-WEIGHTS[1] / WEIGHTS[0]:g}: in every family "
    "(holds), or in exactly those whose G(y)/y does not increase (holds under a condition); and ‖v‖ falls, stays "
    f"within {TOUCHING:.0%}, and grows at {FACTORS[0]:g}, {FACTORS[1]:g} and {FACTORS[2]:g} D*"
)


def families(n: int) -> dict[str, Radial]:
    """The families, by the names they have in the picture."""
    return {
        "Gaussian": isotropic.Gaussian(n),
        "uniform ball": isotropic.UniformBall(n, 2.0),
        "exp(−‖x‖)": isotropic.ExpNorm(n, 0.6),
        "Laplace": isotropic.Laplace(n),
        HEAVY: StudentT(n, nu=3.0),
        "Student-t, ν = 1.5": StudentT(n, nu=1.5),
    }


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """G on a grid, pairs for a range of ratios, and flows about the critical separation."""
    y = 1 / (1 + np.exp(-np.linspace(-9.0, 5.3, settings["points"])))
    named = families(settings["n"])
    for k, (name, family) in enumerate(named.items()):
        progress(k / (len(named) + 1), name)
        thetas = Thetas(family)
        rho = family.ppf(y)
        writer.write(0, {"y": y, "G": thetas.F(rho), "level": thetas.level(rho)}, family=name)
        for i, ratio in enumerate(
            (-WEIGHTS[1] / WEIGHTS[0], *np.geomspace(1.05, 20.0, settings["ratios"]))
        ):
            rays = critical_rays(family, [1.0, -float(ratio)])
            pairs = [ray.rho for ray in rays.rays] + [
                (c.rho1[1], c.rho1[1] - c.separation) for c in rays.continua
            ]
            row = {"pairs": float(len(pairs))}
            if pairs:
                y1, y2 = (float(family.cdf(r)) for r in pairs[0])
                row |= {
                    "y1": y1,
                    "y2": y2,
                    "slope": float(thetas.level(pairs[0][0])),
                    "D": rays.separations[0],
                }
            writer.write(i, row, family=name, ratio=float(ratio))
    progress(len(named) / (len(named) + 1), "flows")
    heavy = named[HEAVY]
    (ray,) = critical_rays(heavy, WEIGHTS).rays
    t = np.linspace(0.0, settings["t_end"], 201)
    noise = 0.1 * np.random.default_rng(seed).standard_normal(settings["n"] + 1)
    axis = np.eye(settings["n"])[0]
    v0, xi0 = ray.point(np.stack([ray.separation * axis, 0 * axis]))
    for factor in FACTORS:
        mixture = Mixture(
            heavy, np.stack([factor * ray.separation * axis, 0 * axis]), np.array(WEIGHTS)
        )
        path = mixture.integrate(float(t[-1]), v0 + noise[:-1], xi0 + noise[-1], times=t)
        for i, (time, v) in enumerate(zip(path.t, path.v, strict=True)):
            writer.write(i, {"norm": float(np.linalg.norm(v))}, t=float(time), factor=factor)


def _curves(frame: pd.DataFrame) -> pd.DataFrame:
    return wide(where(frame, gauge=list(AXES)), ["family", "point"])


def _pairs(frame: pd.DataFrame) -> pd.DataFrame:
    gauges = ["pairs", "y1", "y2", "slope", "D"]
    keys = ["family", "ratio", "step"]
    return wide(where(frame, gauge=gauges), keys).reindex(columns=[*keys, *gauges])


def draw(run: Run) -> p.Chart:
    """G with its lines, G(y)/y, the separation that a ratio needs, and the flow at and beside it."""
    frame = run.frame()
    curves, pairs = _curves(frame), _pairs(frame)
    colour = p.by("family", order=(order := list(families(1))), domain=order)
    drawn = pairs[(pairs.step == 0) & (pairs.pairs > 0)]
    chords = [
        pd.DataFrame({"family": r.family, "y": [0.0, 1.0], "G": [0.0, r.slope]})
        for r in drawn.itertuples()
    ]
    ends = pd.concat(
        [
            drawn.assign(y=drawn[c], G=drawn[c] * drawn.slope, level=drawn.slope)
            for c in ("y1", "y2")
        ]
    )
    disc: dict[str, Any] = {"size": 45, "filled": True, "opacity": 1}
    x, y = p.x("y", "y = θ₁(ρ)"), p.y("G", "G(y)", domain=(0, 2.5))
    top = p.panel(
        "G(y)",
        p.lines(curves, x, y, colour, clip=True),
        p.lines(pd.concat(chords), x, y, colour, width=1, dashed=True, clip=True),
        p.dots(ends, x, y, colour, **disc),
        note=f"dashed: the line through two points with y in the ratio {-WEIGHTS[1] / WEIGHTS[0]:g}",
        size=(330, 230),
    )
    x = p.x(
        "y",
        "y (log)",
        log=True,
        domain=(1e-4, 1),
        ticks=[1e-4, 1e-3, 0.01, 0.1, 0.5, 1],
        format="~g",
    )
    y = p.y("level", "G(y)/y", domain=(0, 6))
    slope = p.panel(
        "the line's slope, G(y)/y",
        p.lines(curves, x, y, colour, clip=True),
        p.dots(ends, x, y, colour, **disc),
        note="a value taken twice: a pair. Increasing: none",
        size=(330, 230),
    )
    ratio = p.x("ratio", "a₋/a₊ (log)", log=True, domain=(1, 20), ticks=[1, 1.5, 2, 3, 5, 10, 20])
    silent = p.by("family", order=order, domain=order, legend=False)
    needed = p.lines(pairs[(pairs.step > 0) & (pairs.pairs > 0)], ratio, p.y("D", "D*"), silent)
    separation = p.panel(
        "the separation D* that critical rays need", needed, note="families not shown have none"
    )
    names = [f"{factor:g} D*" for factor in FACTORS]
    norms = where(frame, gauge="norm").assign(separation=lambda f: f.factor.map("{:g} D*".format))
    fate = p.lines(
        norms, p.x("t", "t"), p.y("value", "‖v‖"),
        p.by("separation", "separation", colours=dict(zip(names, ("#7f7f7f", p.INK, p.ACCENT), strict=True))),
    )  # fmt: skip
    note = "below D* it dies, at D* it rests, above it grows"
    below = p.row(separation, p.panel(f"what becomes of a node ({HEAVY})", fate, note=note))
    return p.column(p.row(top, slope, shared=True), below)


def judge(run: Run) -> Judgement:
    """Find the families with a pair of points on one line, and what becomes of a node."""
    frame = run.frame()
    curves = _curves(frame).sort_values(["family", "y"])
    pairs = _pairs(frame)
    least_steps = {}
    for family, curve in curves.groupby("family"):
        least_steps[family] = (curve["level"].diff() / curve["level"]).min()
    drawn = pairs[pairs.step == 0].set_index("family")
    has_pair = drawn.pairs > 0
    norms = where(frame, gauge="norm").sort_values("t").groupby("factor").value
    change = (norms.last() / norms.first()).to_dict()
    below, at, above = (change[factor] for factor in FACTORS)
    numbers = {
        "pairs": has_pair.to_dict(),
        "with": has_pair[has_pair].index.tolist(),
        "without": has_pair[~has_pair].index.tolist(),
        "count": {"with": int(has_pair.sum()), "families": len(has_pair)},
        "least relative step of G(y)/y": least_steps,
        "norm at the end over start": {f"{factor:g} D*": value for factor, value in change.items()},
        "D": drawn[has_pair].D.to_dict(),
    }
    template = "a pair in {count.with} of {count.families} families ({with}), none in the others ({without})"
    is_rest_point = below < 1 - TOUCHING and abs(at - 1) < TOUCHING and above > 1 + TOUCHING
    # Rounding makes steps of a curve that does not increase a little positive.
    is_heavy = [least_steps[family] <= 1e-9 for family in has_pair.index]
    if has_pair.all() and is_rest_point:
        verdict = Verdict.HOLDS
    elif has_pair.any() and is_rest_point and has_pair.tolist() == is_heavy:
        verdict = Verdict.UNDER
        template += (
            ". So: under tails that are exponential or heavier, at one separation D* of the centres"
        )
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict, numbers, template, "two crossings in {count.with} of {count.families} families"
    )


EXHIBIT = Exhibit(
    id="fig9",
    title="Figure 9: the function G(y)",
    statement=(
        "A line through the origin meets G(y) twice, and the flow has critical points where "
        "it does (Eqns. 57-59)."
    ),
    seconds=4,
    rule=RULE,
    paper="“twice”",
    experiment=Experiment(SETTINGS, run, draw, judge, AXES),
    messages={
        Verdict.HOLDS: "A line through the origin meets G twice, in every family that was tried",
        Verdict.UNDER: "A line meets G twice only where G(y)/y does not increase",
        Verdict.FAILS: "Lines through the origin do not meet G as stated",
    },
)
