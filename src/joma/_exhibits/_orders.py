"""The grid of levels and scales over which Figure 5 is judged, and where on it pairs associate in the paper's order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

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
    f"endpoint, Eqn. 6 with μ from the excess, level {ENDPOINT['level']}, scale {ENDPOINT['scale']}; holds under: not "
    "there, but over a part of the grid of levels and scales with Eqn. 6 and co-occurrence. The whole grid is told "
    "and does not decide"
)
REVISED = "holds asked for the order in all of the cells of the grid in all variants; now one endpoint decides"


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
        "cells in order": {v: f"{int(table.good.sum())} of {len(table)}" for v, table in tables.items()},
        "scales in order, by level": {
            v: {level: rows[rows.good].scale.tolist() for level, rows in grouped} for v, grouped in levels.items()
        },
        "t(m–l′) / t(β–β′) for scales 1 … 12, by level": {
            v: {level: rows.ratio.round(4).tolist() for level, rows in grouped} for v, grouped in levels.items()
        },
    }
