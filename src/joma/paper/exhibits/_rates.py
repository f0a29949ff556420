"""Runs of an exhibit at several learning rates, on the optimiser's clock: grouped, averaged, told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from joma._forecast import clock
from joma._forecast.clock import Apart, Key, OnClock
from joma._runs import Run
from joma._runs.curve import TRAINING, describe

Runs = dict[float, list[OnClock]]  # rate on the clock -> one curve per seed
Found = dict[tuple[str, int, Key], Runs]  # (kind of optimiser, layers, what it is of) -> its runs


def families(run: Run, gauges: Sequence[str], until: Mapping[str, float]) -> Found:
    """The curves of these gauges in an exhibit that trained at several rates, up to a τ per kind of optimiser."""
    found: Found = {}
    frame = run.frame()
    frame = frame[frame.gauge.isin(list(gauges))]
    keys: Any
    for keys, rows in frame.groupby(["optimiser", "momentum", "layers", "lr", "seed"]):
        optimiser, beta, layers, lr, _ = keys
        pace = clock.pace({"optimiser": optimiser, "momentum": beta})
        kind, rate = "momentum" if beta else str(optimiser), float(f"{lr * pace:.6g}")
        for key, curve in clock.curves_of(rows, str(run.path), pace).items():
            found.setdefault((kind, int(layers), key), {}).setdefault(rate, []).append(
                curve.until(until[kind])
            )
    return found


def slow(found: Found, kind: str, layers: int, key: Key) -> list[tuple[float, list[OnClock]]]:
    """Rates with their runs, but for the fastest; SGD together with momentum."""
    runs = found[kind, layers, key]
    slower = [(rate, curves) for rate, curves in runs.items() if rate < max(runs)]
    return (
        slower + list(found.get(("momentum", layers, key), {}).items()) if kind == "sgd" else slower
    )


def mean_curves(found: Found, kinds: tuple[str, ...], layers: int, key: Key) -> pd.DataFrame:
    """rate, step, tau, value: means over seeds."""
    parts = []
    for kind in kinds:
        for rate, runs in sorted(found.get((kind, layers, key), {}).items()):
            mean, name = clock.mean(runs), f"{rate:g}{' m' if kind == 'momentum' else ''}"
            parts.append(
                pd.DataFrame(
                    {"rate": name, "step": mean.step, "tau": mean.tau, "value": mean.value}
                )
            )
    return pd.concat(parts, ignore_index=True)


def fate(by_rate: Runs, apart: Apart, key: Key) -> str:
    """Where the fastest rate leaves the slowest one's curve, and what becomes of it."""
    fastest, slowest = (clock.mean(by_rate[rate]) for rate in (max(by_rate), min(by_rate)))
    left = clock.leaves(fastest, slowest, apart.within / np.sqrt(2))
    told = "stays on the curve" if left is None else f"leaves it at τ = {left:.2g}"
    if key.gauge in TRAINING:
        curve = describe(fastest.tau, fastest.value, TRAINING[key.gauge])
        told += f", {curve.pattern}, ends at {curve.end:.2f} (slowest {slowest.value[-1]:.2f})"
    return told
