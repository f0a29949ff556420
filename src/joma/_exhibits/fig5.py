"""Figure 5: co-occurrence in a hierarchy, and in which order attention associates tokens.

First, P[y_l = 1 | y_m = 1] against the height H of the lowest common ancestor: exact, sampled, Eqn. 8. Then Eqn. 6 with
μ = scale · P(l | m) on the two trees of the figure:

shallow   class → α, α′ → m l, l′: m and l′ share nothing but the class
deep      class → α → β, β′ → m l, m′ l′: β–β′ can only begin when m–l and m′–l′ are done, and is counted from t = 0

The association time of a pair is the time at which v reaches a level (99 %) of its target. Variants: μ from the
*excess* P(l | m) − P(l), and the joint flow that Eqn. 6 stands for (claim E6).
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy.integrate import quad
from scipy.special import lambertw

from joma._exhibits.base import Progress, Verdict
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory import HBLT
from joma.theory.bounce import flight_time, solve_bounce
from joma.theory.hierarchy import eqn8, theorem5

_COMMON = {"classes": 20, "depth": 5, "children": 2, "epsilon": 0.1, "scale": 5.0, "level": 0.99}
SETTINGS = {
    "quick": {**_COMMON, "samples": 50_000, "draws": 5, "scales": 100},
    "laptop": {**_COMMON, "samples": 500_000, "draws": 10, "scales": 100},
    "paper": {**_COMMON, "samples": 1_000_000, "draws": 20, "scales": 100},
}
AXES: dict[str, list[str]] = {}
# tree -> pair -> the two variables (context, query), numbered as in the tree
PAIRS = {
    "shallow": {"m–l": (3, 2), "m–l′": (4, 2)},
    "deep": {"m–l": (4, 3), "m′–l′": (6, 5), "β–β′": (2, 1), "m–l′": (6, 3)},
}
RANGE = (1.0, 12.0)  # of the scale of μ


def trees(settings: dict[str, Any]) -> dict[str, HBLT]:
    """The two trees; each class triggers one latent, so that ρ₀ = 1 − 2/C."""
    rho = 1 - settings["epsilon"]
    one_each = 1 - np.eye(settings["classes"])
    return {
        "shallow": HBLT(2, 2, rho, class_to_latent=one_each[:, :2]),
        "deep": HBLT(3, 2, rho, class_to_latent=one_each[:, :1]),
    }


def association_time(mu: float, level: float, dynamics: str = "eqn6") -> float:
    """When v reaches ``level`` of its final value, from 0."""
    if dynamics == "eqn6":
        return float(flight_time(-np.log1p(-level), mu))
    end = level * np.sqrt(lambertw(mu**2).real)
    return float(quad(lambda v: np.exp(-v * v / 2) / (abs(mu) - v * np.exp(v * v / 2)), 0, end, epsabs=1e-12)[0])


def association_times(
    probability: dict[str, float], scale: float, level: float, dynamics: str = "eqn6"
) -> dict[str, float]:
    """The association time of each pair, β–β′ after what it waits for."""
    times = {pair: association_time(scale * p, level, dynamics) for pair, p in probability.items()}
    if "β–β′" in times:
        times["β–β′"] += max(times["m–l"], times["m′–l′"])
    return times


def _probabilities(tree: HBLT, case: str, source: str) -> dict[str, float]:
    given, base = tree.cooccurrence(range(tree.size)), tree.marginal()
    return {pair: float(given[l, m] - (base[l] if source == "excess" else 0)) for pair, (l, m) in PAIRS[case].items()}


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Co-occurrence by height, then association times: exact, from sampled μ, over scales of μ, and variants."""
    _measure_cooccurrence(writer, settings, seed, progress)
    scale, level = settings["scale"], settings["level"]
    for case, tree in trees(settings).items():
        exact = _probabilities(tree, case, "co-occurrence")
        times = association_times(exact, scale, level)
        start = max(times["m–l"], times.get("m′–l′", 0.0))
        t = np.linspace(0.0, 1.3 * max(times.values()), 201)
        for pair, p in exact.items():
            clock = np.maximum(t - start, 0.0) if pair == "β–β′" else t
            v = solve_bounce(np.array([scale * p]), clock).v[:, 0]
            for i in range(len(t)):
                writer.write(i, {"v": v[i]}, t=float(t[i]), case=case, pair=pair, mu=scale * p)
        for draw in range(-1, settings["draws"]):  # −1: exact
            progress(0.5 + 0.4 * (draw + 1) / (settings["draws"] + 1), f"{case} hierarchy, association times")
            found = exact
            if draw >= 0:
                y = tree.sample(settings["samples"], np.random.default_rng((seed, 1, draw))).y
                found = {pair: float(y[y[:, m] == 1, l].mean()) for pair, (l, m) in PAIRS[case].items()}
            for pair, time in association_times(found, scale, level).items():
                writer.write(0, {"association": time}, case=case, pair=pair, draw=draw, mu=scale * found[pair])
    progress(0.95, "association times over scales of μ")
    for source in ("co-occurrence", "excess"):
        found = _probabilities(trees(settings)["deep"], "deep", source)
        for dynamics in ("eqn6", "joint"):
            for i, s in enumerate(np.geomspace(*RANGE, settings["scales"])):
                times = association_times(found, float(s), level, dynamics)
                margin = times["m–l′"] / times["β–β′"]
                writer.write(i, {"margin": margin}, scale=float(s), source=source, dynamics=dynamics)


def _measure_cooccurrence(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    C, L, epsilon = settings["classes"], settings["depth"], settings["epsilon"]
    tree = HBLT(L, settings["children"], 1 - epsilon, class_to_latent=1 - np.eye(C))
    H, exact = tree.heights()[:, 0], tree.cooccurrence()[:, 0]
    height = np.arange(1, L + 1)
    lines = {
        "exact": np.array([exact[h == H].mean() for h in height]),
        "Theorem 5": theorem5(1 - epsilon, tree.rho0[0], height, L),
        "Eqn. 8": eqn8(height, L),
        "Eqn. 8 with its remainder": eqn8(height, L, epsilon),
    }
    for name, values in lines.items():
        for h, value in zip(height, values, strict=True):
            if not (name == "Theorem 5" and h == L):
                writer.write(int(h), {"cooccurrence": value}, source=name, draw=-1)
    for draw in range(settings["draws"]):
        progress(0.5 * draw / settings["draws"], f"sampling the tree, draw {draw + 1} of {settings['draws']}")
        counts, seen = np.zeros(len(H)), 0
        rng = np.random.default_rng((seed, 0, draw))
        for _ in range(-(-settings["samples"] // 25_000)):  # in parts: all variables of all samples are large
            tokens = tree.sample(min(25_000, settings["samples"]), rng).tokens
            with_m = tokens[tokens[:, 0] == 1]
            counts, seen = counts + with_m.sum(axis=0, dtype=np.int64), seen + len(with_m)
        for h in height:
            writer.write(
                int(h), {"cooccurrence": counts[h == H].mean() / seen}, source="sampled", draw=draw, occurrences=seen
            )


def draw(run: Run) -> Chart:
    """Co-occurrence by height; v over time on the two trees; how much slower m–l′ is, over the scale of μ."""
    frame = run.frame()
    cells = frame[frame.gauge == "cooccurrence"][["step", "source", "value"]]
    order = ["exact", "Theorem 5", "Eqn. 8", "Eqn. 8 with its remainder"]
    x = alt.X("step:Q", title="height H of the lowest common ancestor", axis=alt.Axis(tickMinStep=1))
    y = alt.Y("value:Q", title="P[y_l = 1 | y_m = 1]", scale=alt.Scale(domain=[-0.02, 1]))
    lines = (
        alt.Chart(
            cells[cells.source != "sampled"],
            title=alt.Title("co-occurrence", subtitle="H = L: only the class is common"),
        )
        .mark_line(point=False)
        .encode(
            x,
            y,
            alt.Color("source:N", title=None, sort=order),
            alt.StrokeDash("source:N", sort=order, legend=None),
            tooltip=["source", "step", alt.Tooltip("value", format=".4f")],
        )
    )
    points = (
        alt.Chart(cells[cells.source == "sampled"])
        .mark_point(color="black", size=45)
        .encode(x, y, tooltip=["step", alt.Tooltip("value", format=".4f")])
    )
    level = run.info["config"]["settings"]["level"]
    panels: list[Any] = [(lines + points).properties(width=300, height=220)]
    for case in PAIRS:
        v = frame[(frame.gauge == "v") & (frame.case == case)].assign(share=lambda f: f.value / f.mu)
        done = frame[(frame.gauge == "association") & (frame.case == case) & (frame.draw >= 0)][["pair", "value"]]
        colour = alt.Color("pair:N", title=None, sort=["m–l", "m′–l′", "β–β′", "m–l′"])
        axis = alt.X("t:Q", title="t")
        curves = (
            alt.Chart(
                v[["t", "pair", "share"]],
                title=alt.Title(
                    f"{case} hierarchy, Eqn. 6", subtitle=f"v/μ; marks: {level:.0%} reached, one a draw of the data"
                ),
            )
            .mark_line(strokeWidth=2)
            .encode(
                axis,
                alt.Y("share:Q", title="v/μ", scale=alt.Scale(domain=[0, 1.1])),
                colour,
                alt.StrokeDash("pair:N", sort=["m–l", "m′–l′", "β–β′", "m–l′"], legend=None),
                tooltip=["pair", alt.Tooltip("t", format=".3f"), alt.Tooltip("share", format=".3f")],
            )
        )
        marks = (
            alt.Chart(done.assign(at=1.06))
            .mark_tick(orient="vertical", thickness=2, size=14)
            .encode(alt.X("value:Q", title="t"), alt.Y("at:Q"), colour, tooltip=["pair", "value"])
        )
        panels.append((curves + marks).properties(width=300, height=220))
    margin = frame[frame.gauge == "margin"][["scale", "source", "dynamics", "value"]].copy()
    margin["variant"] = margin.dynamics.map({"eqn6": "Eqn. 6", "joint": "joint flow"}) + ", μ from " + margin.source
    sweep = (
        alt.Chart(
            margin,
            title=alt.Title(
                "how slow is m–l′?", subtitle="its time over that of β–β′, waiting included; above 1 as the paper says"
            ),
        )
        .mark_line(strokeWidth=2)
        .encode(
            alt.X("scale:Q", title="scale of μ", scale=alt.Scale(type="log", domain=list(RANGE), nice=False)),
            alt.Y("value:Q", title="t(m–l′) / t(β–β′)", scale=alt.Scale(zero=False)),
            alt.Color("variant:N", title=None),
            tooltip=["variant", alt.Tooltip("scale", format=".2f"), alt.Tooltip("value", format=".3f")],
        )
    )
    one = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(strokeDash=[4, 4]).encode(alt.Y("one:Q"))
    panels.append((sweep + one).properties(width=300, height=220))
    rows = [alt.hconcat(*panels[:2]).resolve_scale(color="independent", strokeDash="independent")]
    rows.append(alt.hconcat(*panels[2:]).resolve_scale(color="independent", strokeDash="independent"))
    return alt.vconcat(*rows).resolve_scale(color="independent", strokeDash="independent")


def judge(run: Run) -> Verdict:
    """Sampled and exact co-occurrence agree; the order of association, in every draw and over scales of μ."""
    frame = run.frame()
    cells = frame[frame.gauge == "cooccurrence"]
    exact = cells[cells.source == "exact"].set_index("step").value
    sampled = cells[cells.source == "sampled"]
    # one query token: an estimate has at most the binomial error of a single pair
    error = (sampled.value - sampled.step.map(exact)).abs() / np.sqrt(0.25 / sampled.occurrences)
    eqn = cells[cells.source == "Eqn. 8"].set_index("step").value
    times: dict[str, dict[int, dict[str, float]]] = {case: {} for case in PAIRS}  # case -> draw -> pair; −1 is exact
    for row in frame[frame.gauge == "association"].to_dict("records"):
        times[row["case"]].setdefault(int(row["draw"]), {})[row["pair"]] = float(row["value"])
    s, d = times["shallow"][-1], times["deep"][-1]
    margin = frame[frame.gauge == "margin"]
    ranges = {}
    for (source, dynamics), rows in margin.groupby(["source", "dynamics"]):
        good = rows[rows.value > 1].scale
        ranges[f"{dynamics}, {source}"] = [float(good.min()), float(good.max())] if len(good) else None
    latents = int(exact.index.max()) - 1
    numbers = {
        "largest error of sampling, in standard errors": float(error.max()),
        "largest error of Eqn. 8": float((eqn - exact).loc[:latents].abs().max()),
        "Eqn. 8 where only the class is common": [float(eqn.iloc[-1]), float(exact.iloc[-1])],
        "shallow": s,
        "deep": d,
        "scales of μ at which m–l′ is slower than β–β′ with its wait": ranges,
    }
    rule = (
        "sampled co-occurrence within 4 standard errors of the exact one; in all draws m–l before m–l′ (shallow), and "
        "m–l and m′–l′ before β–β′ (deep); β–β′, wait included, before m–l′ at all scales of μ"
    )
    first = all(t["m–l"] < t["m–l′"] for t in times["shallow"].values()) and all(
        max(t["m–l"], t["m′–l′"]) < min(t["β–β′"], t["m–l′"]) for t in times["deep"].values()
    )
    span = ranges["eqn6, co-occurrence"]
    text = (
        f"shallow: m–l {s['m–l']:.2f}, m–l′ {s['m–l′']:.2f}; deep: m–l {d['m–l']:.2f}, m′–l′ {d['m′–l′']:.2f}, "
        f"β–β′ {d['β–β′']:.2f} with its wait, m–l′ {d['m–l′']:.2f}"
    )
    if not first or error.max() > 4 or span is None:
        return Verdict("fails", rule, text, numbers)
    if (margin.value > 1).all():
        return Verdict("holds", rule, text, numbers)
    return Verdict(
        "holds under",
        rule,
        f"{text}; l′ waits longer than β′ only for μ = {span[0]:.1f} … {span[1]:.1f} × co-occurrence",
        numbers,
    )
