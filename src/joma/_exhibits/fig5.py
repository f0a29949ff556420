"""Figure 5: co-occurrence in a hierarchy, and in which order attention associates tokens.

First, P[y_l = 1 | y_m = 1] against the height H of the lowest common ancestor: exact, sampled, Eqn. 8. Then Eqn. 6 with
μ = scale · P(l | m) on the two trees of the figure:

shallow   class → α, α′ → m l, l′: m and l′ share nothing but the class
deep      class → α → β, β′ → m l, m′ l′: β–β′ can only begin when m–l and m′–l′ are done, and is counted from t = 0

The association time of a pair is the time at which v reaches a level of its target. The paper fixes neither level nor
scale, and the order depends on both: it is measured over a grid of them. Variants on the deep tree: μ from the *excess*
P(l | m) − P(l), and the joint flow that Eqn. 6 stands for (claim E6).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy.integrate import quad
from scipy.special import lambertw

from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory import HBLT
from joma.theory.bounce import flight_time
from joma.theory.hierarchy import eqn8, theorem5
from joma.theory.setting import Array
from joma.theory.verdict import Verdict

_COMMON = {"classes": 20, "depth": 5, "children": 2, "epsilon": 0.1}
SETTINGS = {
    "quick": {**_COMMON, "samples": 50_000, "draws": 5},
    "laptop": {**_COMMON, "samples": 500_000, "draws": 10},
    "paper": {**_COMMON, "samples": 1_000_000, "draws": 20},
}
AXES = {"association": ["level", "scale"]}
# tree -> pair -> the two variables (context, query), numbered as in the tree
PAIRS = {
    "shallow": {"m–l": (3, 2), "m–l′": (4, 2)},
    "deep": {"m–l": (4, 3), "m′–l′": (6, 5), "β–β′": (2, 1), "m–l′": (6, 3)},
}
LEVELS = (0.5, 0.9, 0.99, 0.999)  # of the target
SCALES = tuple(range(1, 13))  # of μ
DRAWN = 6  # the scale of the curves in the picture, the middle one; nothing is judged by it
VARIANTS = {
    f"{dynamics}, {source}": f"{title}, μ from {source}"
    for (dynamics, title), source in product(
        {"eqn6": "Eqn. 6", "joint": "joint flow"}.items(), ("co-occurrence", "excess")
    )
}
PAPER = "eqn6, co-occurrence"


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
    probability: dict[str, float],
    dynamics: str = "eqn6",
    levels: Sequence[float] | Array = LEVELS,
    scales: Sequence[float] = SCALES,
) -> dict[str, Array]:
    """The association times of each pair (level, scale), β–β′ after what it waits for."""
    times = {
        pair: np.array([[association_time(scale * p, level, dynamics) for scale in scales] for level in levels])
        for pair, p in probability.items()
    }
    if "β–β′" in times:
        times["β–β′"] += np.maximum(times["m–l"], times["m′–l′"])
    return times


def _probabilities(tree: HBLT, case: str, samples: int, rng: np.random.Generator | None) -> dict[str, dict[str, float]]:
    """P(l | m) of each pair, and its excess over P(l): exact, or from ``samples`` drawn with ``rng``."""
    if rng is None:
        given, base = tree.cooccurrence(range(tree.size)), tree.marginal()
        found = {pair: float(given[l, m]) for pair, (l, m) in PAIRS[case].items()}
    else:
        y = tree.sample(samples, rng).y
        base = y.mean(axis=0)
        found = {pair: float(y[y[:, m] == 1, l].mean()) for pair, (l, m) in PAIRS[case].items()}
    excess = {pair: found[pair] - float(base[l]) for pair, (l, _) in PAIRS[case].items()}
    return {"co-occurrence": found, "excess": excess}


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Co-occurrence by height, then association times over levels and scales: exact, from sampled μ, and variants."""
    _measure_cooccurrence(writer, settings, seed, progress)
    for case, tree in trees(settings).items():
        for draw in range(-1, settings["draws"]):  # −1: exact
            progress(0.5 + 0.5 * (draw + 1) / (settings["draws"] + 1), f"{case} hierarchy, association times")
            rng = None if draw < 0 else np.random.default_rng((seed, 1, draw))
            found = _probabilities(tree, case, settings["samples"], rng)
            for variant in VARIANTS if case == "deep" else (PAPER,):
                dynamics, source = variant.split(", ")
                for pair, times in association_times(found[source], dynamics).items():
                    writer.write(0, {"association": times}, case=case, pair=pair, draw=draw, variant=variant)
            if draw < 0:
                remaining = np.geomspace(1, 0.5 * (1 - LEVELS[-1]), 60)
                curves = association_times(found["co-occurrence"], "eqn6", 1 - remaining, [DRAWN])
                for pair, times in curves.items():
                    for i, time in enumerate(times[:, 0]):
                        writer.write(i, {"time": time}, remaining=float(remaining[i]), case=case, pair=pair)


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
            alt.Color("source:N", title=None, sort=order, legend=alt.Legend(orient="bottom", columns=2)),
            alt.StrokeDash("source:N", sort=order, legend=None),
            tooltip=["source", "step", alt.Tooltip("value", format=".4f")],
        )
    )
    points = (
        alt.Chart(cells[cells.source == "sampled"])
        .mark_point(color="black", size=45)
        .encode(x, y, tooltip=["step", alt.Tooltip("value", format=".4f")])
    )
    panels: list[Any] = [(lines + points).properties(width=270, height=210), *(_curves(frame, case) for case in PAIRS)]
    table = orders(frame)
    maps = [_map(table[table.variant == variant], title) for variant, title in VARIANTS.items()]
    rows = [alt.hconcat(*panels).resolve_scale(color="independent", strokeDash="independent")]
    rows += [alt.hconcat(*maps[i : i + 2]) for i in (0, 2)]
    return alt.vconcat(*rows).resolve_scale(color="independent", strokeDash="independent")


_LEVEL_AXIS = alt.Axis(values=[1 - level for level in LEVELS], labelExpr="format(1 - datum.value, '.1%')")


def _curves(frame: pd.DataFrame, case: str) -> Chart:
    """Association times against the level, at one scale."""
    order = ["m–l", "m′–l′", "β–β′", "m–l′"]
    colour = alt.Color("pair:N", title=None, sort=order, legend=alt.Legend(orient="bottom"))
    y = alt.Y("remaining:Q", title="level", scale=alt.Scale(type="log", domain=[0.0005, 1]), axis=_LEVEL_AXIS)
    curves = (
        alt.Chart(
            frame[(frame.gauge == "time") & (frame.case == case)][["pair", "remaining", "value"]],
            title=alt.Title(
                f"{case} hierarchy, Eqn. 6", subtitle=f"μ = {DRAWN} P(l | m); marks: one a draw of the data"
            ),
        )
        .mark_line(strokeWidth=2)
        .encode(
            alt.X("value:Q", title="association time"),
            y,
            colour,
            alt.StrokeDash("pair:N", sort=order, legend=None),
            alt.Order("remaining:Q"),
            tooltip=["pair", alt.Tooltip("value", format=".3f"), alt.Tooltip("remaining", format=".3f")],
        )
    )
    rows = frame[(frame.gauge == "association") & (frame.case == case) & (frame.variant == PAPER) & (frame.draw >= 0)]
    rows = rows[rows.scale == SCALES.index(DRAWN)]
    rows = rows.assign(remaining=rows.level.map(lambda i: 1 - LEVELS[int(i)]))[["pair", "remaining", "value"]]
    marks = alt.Chart(rows).mark_tick(orient="vertical", thickness=2, size=12).encode(alt.X("value:Q"), y, colour)
    return (curves + marks).properties(width=270, height=210)


def _map(table: pd.DataFrame, title: str) -> Chart:
    """t(m–l′) / t(β–β′) over level and scale, coloured by the draws in which the order is the paper's."""
    base = alt.Chart(
        table,
        title=alt.Title(
            title, subtitle="deep: t(m–l′) / t(β–β′), exact; coloured: share of draws in the paper's order"
        ),
    ).encode(
        alt.X("scale:O", title="scale of μ", axis=alt.Axis(labelAngle=0)),
        alt.Y("level:N", title="level", sort=[f"{level:.1%}" for level in LEVELS[::-1]]),
        tooltip=["scale", "level", alt.Tooltip("ratio", format=".4f"), alt.Tooltip("share", format=".0%")],
    )
    cells = base.mark_rect(stroke="white").encode(
        alt.Color("share:Q", scale=alt.Scale(domain=[0, 1], range=["#f0f0f0", "#0072b2"]), legend=None)
    )
    ink = alt.condition("datum.share > 0.5", alt.value("white"), alt.value("#24292f"))
    text = base.mark_text(fontSize=10).encode(alt.Text("ratio:Q", format=".2f"), color=ink)
    return (cells + text).properties(width=420, height=110)


def orders(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each variant, level and scale: the exact t(m–l′) / t(β–β′), and the share of draws in order.

    In order: m–l before m–l′ (shallow); m–l and m′–l′ before β–β′ with its wait, and that before m–l′ (deep).
    """
    rows = frame[frame.gauge == "association"][["case", "variant", "draw", "level", "scale", "pair", "value"]]
    wide = rows.pivot_table("value", ["variant", "draw", "level", "scale"], ["case", "pair"])  # one value in each
    shallow = wide["shallow"].loc[PAPER]  # has no variants
    tables = []
    for variant in VARIANTS:
        deep = wide["deep"].loc[variant]
        done = np.maximum(deep["m–l"], deep["m′–l′"])
        near = (shallow["m–l"] < shallow["m–l′"]) & (done < deep["m–l′"])
        good = near & (done < deep["β–β′"]) & (deep["β–β′"] < deep["m–l′"])
        by = {"share": good.groupby(["level", "scale"]).mean(), "near": near.groupby(["level", "scale"]).all()}
        ratio = (deep["m–l′"] / deep["β–β′"]).loc[-1]
        tables.append(pd.DataFrame({**by, "ratio": ratio}).reset_index().assign(variant=variant))
    table = pd.concat(tables, ignore_index=True)
    table["good"] = table.share == 1
    table["level"] = table.level.map(lambda i: f"{LEVELS[int(i)]:.1%}")
    table["scale"] = table.scale.map(lambda i: SCALES[int(i)])
    return table


def _where(table: pd.DataFrame) -> str:
    """The part of the grid in order, in words."""
    parts = []
    for level, rows in table[table.good].groupby("level", sort=False):
        runs: list[list[int]] = []
        for scale in rows.scale:
            if runs and scale == runs[-1][-1] + 1:
                runs[-1].append(scale)
            else:
                runs.append([scale])
        spans = (f"{r[0]}–{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
        parts.append(f"{', '.join(spans)} at level {level}")
    return "scale " + "; ".join(parts) if parts else "nowhere"


def judge(run: Run) -> Judgement:
    """Sampled and exact co-occurrence agree; over which levels and scales all draws associate in the paper's order."""
    frame = run.frame()
    cells = frame[frame.gauge == "cooccurrence"]
    exact = cells[cells.source == "exact"].set_index("step").value
    sampled = cells[cells.source == "sampled"]
    # one query token: an estimate has at most the binomial error of a single pair
    error = (sampled.value - sampled.step.map(exact)).abs() / np.sqrt(0.25 / sampled.occurrences)
    eqn = cells[cells.source == "Eqn. 8"].set_index("step").value
    latents = int(exact.index.max()) - 1
    table = orders(frame)
    tables = {variant: table[table.variant == variant] for variant in VARIANTS}
    paper = tables[PAPER]
    numbers = {
        "largest error of sampling, in standard errors": float(error.max()),
        "largest error of Eqn. 8": float((eqn - exact).loc[:latents].abs().max()),
        "Eqn. 8 where only the class is common": [float(eqn.iloc[-1]), float(exact.iloc[-1])],
        "cells in which the near pairs come before m–l′": f"{int(paper.near.sum())} of {len(paper)}",
        "cells in order": {v: f"{int(t.good.sum())} of {len(t)}" for v, t in tables.items()},
        "scales in order, by level": {
            v: {level: rows[rows.good].scale.tolist() for level, rows in t.groupby("level", sort=False)}
            for v, t in tables.items()
        },
        "t(m–l′) / t(β–β′) for scales 1 … 12, by level": {
            v: {level: rows.ratio.round(4).tolist() for level, rows in t.groupby("level", sort=False)}
            for v, t in tables.items()
        },
    }
    rule = (
        "sampled co-occurrence within 4 standard errors of the exact one; in order, in all draws and exactly: m–l "
        "before m–l′ (shallow), m–l and m′–l′ before β–β′ with its wait, and that before m–l′ (deep); holds: over the "
        "whole grid of levels and scales, variants included; holds under: over a part of it with Eqn. 6 and "
        "co-occurrence"
    )
    text = (
        f"near pairs before m–l′ in {int(paper.near.sum())} of {len(paper)} (level, scale); β–β′ with its wait too in "
        f"{int(paper.good.sum())}: {_where(paper)}. "
        + "; ".join(
            f"{VARIANTS[v]}: {int(t.good.sum())} of {len(t)}, {_where(t)}" for v, t in tables.items() if v != PAPER
        )
    )
    measured = f"in order at {int(paper.good.sum())} of {len(paper)} (level, scale)"
    if error.max() > 4 or not paper.good.any():
        return Judgement(Verdict("fails"), rule, text, numbers, measured)
    return Judgement(Verdict("holds" if table.good.all() else "holds under"), rule, text, numbers, measured)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
