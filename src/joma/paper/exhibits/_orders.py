"""What Figure 5 measures of a tree, the grid over which it is judged, and where on it the order is the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from joma._runs import RunWriter
from joma.paper.exhibits.base import Progress
from joma.paper.labs.association import count_with_first
from joma.theory import HBLT
from joma.theory.hierarchy import eqn8, theorem5

LEVELS = (0.5, 0.9, 0.99, 0.999)  # of the target
SCALES = tuple(range(1, 13))  # of μ
DRAWN = 6  # the scale of the curves in the picture and of the endpoint, the middle one
VARIANTS = {
    f"{dynamics}, {source}": f"{title}, μ from {source}"
    for (dynamics, title), source in product(
        {"eqn6": "Eqn. 6", "joint": "joint flow"}.items(), ("co-occurrence", "excess")
    )
}
PAPER = "eqn6, co-occurrence"
ENDPOINT = {"variant": "eqn6, excess", "level": "90.0%", "scale": DRAWN}  # what decides
RULE = (
    "sampled co-occurrence within 4 standard errors of the exact one; in order, in all draws and exactly: m–l "
    "before m–l′ (shallow), m–l and m′–l′ before β–β′ with its wait, and that before m–l′ (deep); holds: at one "
    f"endpoint, Eqn. 6 with μ from the excess, level {ENDPOINT['level']}, scale {ENDPOINT['scale']}; holds under a "
    "condition: not there, but over a part of the grid of levels and scales with Eqn. 6 and co-occurrence. The whole "
    "grid is told and does not decide"
)
REVISED = "holds asked for the order in all of the cells of the grid in all variants; now one endpoint decides"


def measure_cooccurrence(
    writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress
) -> None:
    """Write P[y_l = 1 | y_m = 1] by the height of the lowest common ancestor: exact, by formula, sampled."""
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
        progress(
            0.5 * draw / settings["draws"],
            f"sampling the tree, draw {draw + 1} of {settings['draws']}",
        )
        counts, occurrences = count_with_first(
            tree, settings["samples"], np.random.default_rng((seed, 0, draw))
        )
        for h in height:
            share = counts[h == H].mean() / occurrences
            writer.write(
                int(h),
                {"cooccurrence": share},
                source="sampled",
                draw=draw,
                occurrences=occurrences,
            )


def orders(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each variant, level and scale: the exact t(m–l′) / t(β–β′), and the share of draws in order.

    In order: m–l before m–l′ (shallow); m–l and m′–l′ before β–β′ with its wait, and that before m–l′ (deep).
    """
    rows = frame[frame.gauge == "association"][
        ["case", "variant", "draw", "level", "scale", "pair", "value"]
    ]
    wide = rows.pivot_table(
        "value", ["variant", "draw", "level", "scale"], ["case", "pair"]
    )  # one value in each
    shallow = wide["shallow"].loc[PAPER]  # has no variants
    tables = []
    for variant in VARIANTS:
        deep = wide["deep"].loc[variant]
        done = np.maximum(deep["m–l"], deep["m′–l′"])
        near = (shallow["m–l"] < shallow["m–l′"]) & (done < deep["m–l′"])
        good = near & (done < deep["β–β′"]) & (deep["β–β′"] < deep["m–l′"])
        by = {
            "share": good.groupby(["level", "scale"]).mean(),
            "near": near.groupby(["level", "scale"]).all(),
        }
        ratio = (deep["m–l′"] / deep["β–β′"]).loc[-1]
        tables.append(pd.DataFrame({**by, "ratio": ratio}).reset_index().assign(variant=variant))
    table = pd.concat(tables, ignore_index=True)
    table["good"] = table.share == 1
    table["level"] = table.level.map(lambda i: f"{LEVELS[int(i)]:.1%}")
    table["scale"] = table.scale.map(lambda i: SCALES[int(i)])
    return table


def part_in_order(table: pd.DataFrame) -> str:
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


def grid_numbers(tables: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Of each variant's part of `orders`: how much of the grid is in order, where, and the ratios of the times."""
    levels = {variant: table.groupby("level", sort=False) for variant, table in tables.items()}
    return {
        "cells in order": {
            v: f"{int(table.good.sum())} of {len(table)}" for v, table in tables.items()
        },
        "scales in order, by level": {
            v: {level: rows[rows.good].scale.tolist() for level, rows in grouped}
            for v, grouped in levels.items()
        },
        "t(m–l′) / t(β–β′) for scales 1 … 12, by level": {
            v: {level: rows.ratio.round(4).tolist() for level, rows in grouped}
            for v, grouped in levels.items()
        },
    }
