"""Figure 5: co-occurrence in a hierarchy, and in which order attention associates tokens.

First, P[y_l = 1 | y_m = 1] against the height H of the lowest common ancestor: exact, sampled, Eqn. 8. Then when
Eqn. 6 associates the pairs of the figure's two trees (``joma.paper.labs.association``). The paper fixes neither the
level
of v nor the scale of μ, and the order depends on both: it is measured over a grid of them. Variants on the deep tree:
μ from the *excess* P(l | m) − P(l), and the joint flow that Eqn. 6 stands for (claim E6).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits import _orders as grid
from joma.paper.exhibits.base import Exhibit, Experiment, Judgement, Progress, where
from joma.paper.labs.association import PAIRS, association_times, probabilities, trees
from joma.paper.verdict import Verdict

_COMMON = {"classes": 20, "depth": 5, "children": 2, "epsilon": 0.1}
SETTINGS = {
    "default": {**_COMMON, "samples": 50_000, "draws": 5},
    "laptop": {**_COMMON, "samples": 500_000, "draws": 10},
    "paper": {**_COMMON, "samples": 1_000_000, "draws": 20},
}
AXES = {"association": ["level", "scale"]}


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Co-occurrence by height, then association times over levels and scales: exact, from sampled μ, and variants."""
    grid.measure_cooccurrence(writer, settings, seed, progress)
    for case, tree in trees(settings["classes"], settings["epsilon"]).items():
        for draw in range(-1, settings["draws"]):  # −1: exact
            progress(
                0.5 + 0.5 * (draw + 1) / (settings["draws"] + 1),
                f"{case} hierarchy, association times",
            )
            rng = None if draw < 0 else np.random.default_rng((seed, 1, draw))
            given = probabilities(tree, case, settings["samples"], rng)
            for variant in grid.VARIANTS if case == "deep" else (grid.PAPER,):
                dynamics, source = variant.split(", ")
                for pair, times in association_times(
                    given[source], grid.LEVELS, grid.SCALES, dynamics
                ).items():
                    writer.write(
                        0, {"association": times}, case=case, pair=pair, draw=draw, variant=variant
                    )
            if draw < 0:
                remaining = np.geomspace(1, 0.5 * (1 - grid.LEVELS[-1]), 60)
                for pair, times in association_times(
                    given["co-occurrence"], 1 - remaining, [grid.DRAWN]
                ).items():
                    for i, time in enumerate(times[:, 0]):
                        writer.write(
                            i, {"time": time}, remaining=float(remaining[i]), case=case, pair=pair
                        )


def draw(run: Run) -> p.Chart:
    """Co-occurrence by height; v over time on the two trees; how much slower m–l′ is, over the scale of μ."""
    frame = run.frame()
    cells = where(frame, gauge="cooccurrence")
    order = ["exact", "Theorem 5", "Eqn. 8", "Eqn. 8 with its remainder"]
    x = p.x("step", "height H of the lowest common ancestor", axis={"tickMinStep": 1})
    y = p.y("value", "P[y_l = 1 | y_m = 1]", domain=(-0.02, 1))
    colour = p.by("source", order=order, legend={"orient": "bottom", "columns": 2})
    tip = {"source": None, "step": None, "value": ".4f"}
    cooccurrence = p.panel(
        "co-occurrence",
        p.lines(
            where(cells, source=order), x, y, colour, dash=p.dash("source", order), tip=tip, width=2
        ),
        p.dots(where(cells, source="sampled"), x, y, tip=["step", "value"], size=45, color="black"),
        note="H = L: only the class is common",
        size=(270, 210),
    )
    table = grid.orders(frame)
    maps = [_map(where(table, variant=variant), title) for variant, title in grid.VARIANTS.items()]
    rows = [p.row(*maps[i : i + 2], shared=True) for i in (0, 2)]
    return p.column(p.row(cooccurrence, *(_curves(frame, case) for case in PAIRS)), *rows)


def _curves(frame: pd.DataFrame, case: str) -> Any:
    """Association times against the level, at one scale."""
    order = list(PAIRS["deep"])
    x, colour = (
        p.x("value", "association time"),
        p.by("pair", order=order, legend={"orient": "bottom"}),
    )
    axis = {
        "values": [1 - level for level in grid.LEVELS],
        "labelExpr": "format(1 - datum.value, '.1%')",
    }
    y = p.y("remaining", "level", log=True, domain=(0.0005, 1), axis=axis)
    tip = {"pair": None, "value": ".3f", "remaining": ".3f"}
    rows = where(
        frame,
        gauge="association",
        case=case,
        variant=grid.PAPER,
        scale=grid.SCALES.index(grid.DRAWN),
    )
    rows = rows[rows.draw >= 0].assign(
        remaining=lambda table: 1 - np.take(grid.LEVELS, table.level.astype(int))
    )
    curves = where(frame, gauge="time", case=case)
    return p.panel(
        f"{case} hierarchy, Eqn. 6",
        p.lines(
            curves, x, y, colour, dash=p.dash("pair", order), order="remaining", tip=tip, width=2
        ),
        p.strokes(rows, x, y, colour),
        note=f"μ = {grid.DRAWN} P(l | m); marks: one per draw of the data",
        size=(270, 210),
    )


def _map(table: pd.DataFrame, title: str) -> Any:
    """t(m–l′) / t(β–β′) over level and scale, coloured by the draws in which the order is the paper's."""
    cells = p.heat(
        table, p.x("scale", "scale of μ", kind="O"),
        p.y("level", "level", kind="N", sort=[f"{level:.1%}" for level in grid.LEVELS[::-1]]),
        p.by("share", kind="Q", colours={0: "#f0f0f0", 1: p.ACCENT}, legend=False), text="ratio",
        white="datum.share > 0.5", tip={"scale": None, "level": None, "ratio": ".4f", "share": ".0%"},
    )  # fmt: skip
    note = "deep: t(m–l′) / t(β–β′), exact; coloured: share of draws in the paper's order"
    return p.panel(title, cells, note=note, size=(420, 110))


def judge(run: Run) -> Judgement:
    """Sampled and exact co-occurrence agree; over which levels and scales all draws associate in the paper's order."""
    frame = run.frame()
    cells = where(frame, gauge="cooccurrence")
    exact, eqn = (
        where(cells, source=source).set_index("step").value for source in ("exact", "Eqn. 8")
    )
    sampled = where(cells, source="sampled")
    # one query token: an estimate has at most the binomial error of a single pair
    error = (sampled.value - sampled.step.map(exact)).abs() / np.sqrt(0.25 / sampled.occurrences)
    table = grid.orders(frame)
    tables = {variant: where(table, variant=variant) for variant in grid.VARIANTS}
    paper = tables[grid.PAPER]
    near, good, total = int(paper.near.sum()), int(paper.good.sum()), len(paper)
    numbers: dict[str, Any] = {
        "largest error of sampling, in standard errors": float(error.max()),
        "largest error of Eqn. 8": float((eqn - exact).loc[: exact.index.max() - 1].abs().max()),
        "Eqn. 8 where only the class is common": [float(eqn.iloc[-1]), float(exact.iloc[-1])],
        "cells in which the near pairs come before m–l′": f"{near} of {total}",
        **grid.grid_numbers(tables),
    }
    others = [
        f"{grid.VARIANTS[v]}: {numbers['cells in order'][v]}, {grid.part_in_order(t)}"
        for v, t in tables.items()
        if v != grid.PAPER
    ]
    text = (
        f"near pairs before m–l′ in {near} of {total} (level, scale); β–β′ with its wait too in {good}: "
        f"{grid.part_in_order(paper)}. {'; '.join(others)}"
    )
    (endpoint,) = where(table, **grid.ENDPOINT).to_dict("records")
    numbers["endpoint"] = {
        **grid.ENDPOINT,
        "t(m–l′) / t(β–β′)": float(endpoint["ratio"]),
        "share of draws": endpoint["share"],
    }
    verdict = Verdict.HOLDS if endpoint["good"] else Verdict.UNDER if good else Verdict.FAILS
    verdict = verdict if error.max() <= 4 else Verdict.FAILS
    measured = (
        f"in order in {endpoint['share']:.0%} of draws, t(m–l′) / t(β–β′) = {endpoint['ratio']:.3f} (μ from excess, "
        f"level {endpoint['level']}, scale {endpoint['scale']}); from co-occurrence at {good} of {total} (level, scale)"
    )
    return Judgement(verdict, grid.RULE, text, numbers, measured, revised=grid.REVISED)


EXHIBIT = Exhibit(
    id="fig5",
    title="Figure 5: hierarchical data",
    statement=(
        "Close tokens co-occur more; m–l and m′–l′ associate first, then their latents β–β′, "
        "while m–l′ stays slow."
    ),
    seconds=5,
    experiment=Experiment(SETTINGS, run, draw, judge, AXES),
    messages={
        Verdict.HOLDS: "Near tokens associate first, then their latents, the far pair last",
        Verdict.UNDER: "Near tokens first, then latents: over a part of the levels and scales",
        Verdict.FAILS: "Tokens do not associate in the paper's order",
    },
)
