"""Statistics that exhibits judge by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats


def mean_interval(values: pd.Series[float]) -> tuple[float, float, float]:
    """Mean of independent values with its 95 % interval by Student's t; one value has an infinite one."""
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return mean, -np.inf, np.inf
    half = float(stats.t.ppf(0.975, n - 1) * values.std() / np.sqrt(n))
    return mean, mean - half, mean + half


def bounds(interval: tuple[float, float, float]) -> dict[str, float]:
    """Return an interval as numbers of a judgement: its mean, low and high end."""
    mean, low, high = interval
    return {"mean": mean, "low": low, "high": high}


def extent(values: Iterable[float]) -> dict[str, float]:
    """Return the smallest and the largest of some values, as numbers of a judgement."""
    values = list(values)
    return {"least": float(min(values)), "most": float(max(values))}


def share_interval(count: int, total: int) -> tuple[float, float, float]:
    """A share with its exact 95 % interval (Clopper and Pearson)."""
    interval = stats.binomtest(count, total).proportion_ci(0.95, "exact")
    return count / total, float(interval.low), float(interval.high)


def counted(did: pd.Series[float]) -> dict[str, Any]:
    """How many of these (1 or 0) did it: count, flows, share and its exact 95 % interval."""
    interval = zip(("share", "low", "high"), share_interval(int(did.sum()), len(did)), strict=True)
    return {"count": int(did.sum()), "flows": len(did), **dict(interval)}


def exponent(rows: pd.DataFrame, x: str, y: str = "drift") -> tuple[float, float, float]:
    """Slope of ln y against ln x within each draw, with its 95 % interval from resampling the draws."""
    slopes = []
    for _, group in rows.groupby("draw"):
        a, b = np.log(group[x].to_numpy()), np.log(group[y].to_numpy())
        a = a - a.mean()
        slopes.append((float(a @ (b - b.mean())), float(a @ a)))
    parts = np.array(slopes)
    picks = np.random.default_rng(0).integers(len(parts), size=(4000, len(parts)))
    resampled = parts[picks].sum(axis=1)
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    total = parts.sum(axis=0)
    return float(total[0] / total[1]), float(low), float(high)
