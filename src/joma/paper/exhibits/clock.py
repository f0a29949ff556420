"""The optimiser's clock: are runs at different learning rates the same curve over τ = Σ lr?

Language models at several rates and depths, under Adam, SGD and momentum (τ = Σ lr / (1 − β)), each trained to the same
τ. Single runs of different rates are compared on the clock with single runs of one rate, which differ by their seeds;
the fastest rate of each kind is there to leave the common curve, and is not judged. The authors' own runs are beside
ours in `joma docs foresight`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from joma._forecast import clock
from joma._forecast.clock import Apart, Key, OnClock
from joma._runs import Run, RunWriter
from joma._runs.curve import TRAINING, describe
from joma._show.plots import panels as p
from joma.paper.exhibits import _curves
from joma.paper.exhibits._curves import AXES, GRID, PLAIN, TOY, TOY_RULE, deep, span
from joma.paper.exhibits.base import Exhibit, Experiment, Progress
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

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


# per kind of optimiser: rates on the clock, which momentum divides by (1 − β); the last is too fast and not judged.
# steps: of Adam, at least; other_layers: the depths at which SGD and momentum are trained, too
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": GRID | {"other_layers": [1, 2],
                      "rates": {"adam": [1e-4, 3e-4, 1e-3], "sgd": [0.5, 1.0, 4.0], "momentum": [0.5, 1.0]},
                      "tau": {"adam": GRID["tau"], "sgd": 400.0, "momentum": 400.0}},
    "paper": {"data": "wikitext-2", "vocabulary": None, "layers": [1, 2, 5, 10], "other_layers": [1, 2, 5, 10],
              "seeds": 3, "points": 60, "steps": 0,
              "rates": {"adam": [1e-5, 3e-5, 1e-4, 1e-3], "sgd": [0.5, 1.0, 4.0], "momentum": [0.5, 1.0]},
              "tau": {"adam": 0.6, "sgd": 1000.0, "momentum": 1000.0},
              "every": 1, "valid_windows": 31, "valid_every": 0, **PLAIN},
}  # fmt: skip
BETA = 0.9  # of momentum
LEAST = 1.5  # times the distance between seeds
GAUGES = ("entropy", "stable_rank", "valid_loss")
RULE = (
    "the distance of two curves is the root mean square of their difference over τ. A curve keeps to the clock if runs "
    f"of different rates are at most {LEAST:g} times as far apart as runs of one rate and different seeds; the fastest "
    "rate of each optimiser is left out. Judged are the top layer's entropy and the validation loss under Adam, at "
    "every depth. Holds: all of them; holds under a condition: some; fails: none. "
    f"{_curves.CLOSE_RULE}; a verdict that it could change is inconclusive. Other layers, stable ranks, SGD and "
    f"momentum (τ = Σ lr/(1 − β), together with SGD) are reported next to them. {TOY_RULE}"
)
WOULD_DECIDE = "models on WikiText at several depths with four seeds: --preset laptop --set seeds=4"


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one model per optimiser, depth, rate and seed, each to the same τ, measured equally often on the clock."""
    runs = []
    for layers in settings["layers"]:
        for kind, rates in settings["rates"].items():
            if kind != "adam" and layers not in settings["other_layers"]:
                continue
            least = (settings["steps"], settings["every"]) if kind == "adam" else (0, 1)
            for rate in rates:
                chosen = {"data": settings["data"], "layers": layers, "lr": rate}
                chosen |= span(rate, settings["tau"][kind], settings["points"], *least)
                if kind != "adam":
                    beta = BETA if kind == "momentum" else 0.0
                    chosen |= {"optimiser": "sgd", "momentum": beta, "lr": rate * (1 - beta)}
                runs.append(chosen)
    _curves.train_all(writer, runs, settings, seed, progress, (*GAUGES, "phase"))


def draw(run: Run) -> p.Chart:
    """By depth: entropy of the top layer over steps and over τ, loss and stable rank over τ; SGD and momentum below."""
    settings = run.info["config"]["settings"]
    found = families(run, GAUGES, settings["tau"])
    rows = []
    for layers in settings["layers"]:
        named = deep(layers)
        entropy, rank, loss = (
            Key("entropy", layers - 1),
            Key("stable_rank", layers - 1),
            Key("valid_loss", None),
        )
        adam = {kind: mean_curves(found, ("adam",), layers, kind) for kind in (entropy, rank, loss)}
        rows.append(p.row(
            _panel(f"{named}, Adam: over steps …", adam[entropy], "step"),
            _panel("… and over τ = Σ lr", adam[entropy], "tau"), shared=True,
        ))  # fmt: skip
        rows.append(p.row(
            _panel(f"{named}, Adam: validation loss", adam[loss], "tau", "validation loss"),
            _panel("stable rank of the top layer's lower MLP", adam[rank], "tau", "stable rank"), shared=True,
        ))  # fmt: skip
        if ("sgd", layers, entropy) not in found:
            continue
        sgd = {
            kind: mean_curves(found, ("sgd", "momentum"), layers, kind) for kind in (entropy, loss)
        }
        rows.append(p.row(
            _panel(f"{named}, SGD and momentum (m)", sgd[entropy], "tau"),
            _panel("validation loss", sgd[loss], "tau", "validation loss"), shared=True,
        ))  # fmt: skip
    return p.column(*rows)


def _panel(
    title: str, table: pd.DataFrame, over: str, name: str = "attention entropy, top layer (nats)"
) -> Any:
    x = p.x(over, "step" if over == "step" else "τ", log=over == "step")
    y = p.y("value", name, zero=name.startswith("attention"))
    return p.panel(
        title, p.lines(table, x, y, p.by("rate", "lr", order=list(dict.fromkeys(table.rate))))
    )


def judge(run: Run) -> Judgement:
    """Check that rates are no further apart on the clock than seeds."""
    settings = run.info["config"]["settings"]
    found = families(run, GAUGES, settings["tau"])
    curves: dict[str, dict[str, Any]] = {}
    measured: dict[tuple[str, int, Key], Apart] = {}
    for kind, layers, key in found:
        if kind == "momentum":
            continue
        groups = slow(found, kind, layers, key)
        apart = clock.apart(groups)
        measured[kind, layers, key] = apart
        curves[_name(kind, layers, key)] = {
            "between rates": apart.between,
            "between seeds": apart.within,
            "ratio": apart.ratio,
            "exponent": clock.best_power(groups),
            "fastest": fate(found[kind, layers, key], apart, key),
        }

    by_depth = {}
    deciding = {}
    margins = []
    for layers in settings["layers"]:
        judged = {"entropy": Key("entropy", layers - 1), "loss": Key("valid_loss", None)}
        by_depth[layers] = {
            name: measured["adam", layers, key].ratio for name, key in judged.items()
        }
        for key in judged.values():
            apart = measured["adam", layers, key]
            margins.append(LEAST * apart.within - apart.between)
        for kind in settings["rates"]:
            for key in judged.values():
                name = _name(kind, layers, key)
                if name in curves:
                    deciding[name] = curves[name]
    numbers = {
        "curves": curves,
        "deciding": deciding,
        "kept": sum(margin >= 0 for margin in margins),
        "judged": len(margins),
        "ratios by depth": by_depth,
        "seeds": settings["seeds"],
        "margins": margins,
    }
    verdict = Verdict.INCONCLUSIVE
    if settings["data"] != TOY:
        verdict = _curves.verdict_of_all(_verdict, margins, settings["seeds"])
    return Judgement(
        verdict,
        numbers,
        "{kept} of {judged} curves keep to the clock, with {seeds} seeds; {deciding:{key}: {between rates:.3g} between "
        "rates, {between seeds:.3g} between seeds, exponent {exponent:.2f}; the fastest rate {fastest}}",
        "distance of rates over that of seeds (entropy, loss), by depth: "
        "{ratios by depth:{key}: {entropy:.2f}, {loss:.2f}}",
    )


def _verdict(keeps: Sequence[bool]) -> Verdict:
    if all(keeps):
        return Verdict.HOLDS
    if any(keeps):
        return Verdict.UNDER
    return Verdict.FAILS


def _name(kind: str, layers: int, key: Key) -> str:
    return f"{kind}, {deep(layers)}, {key}"


# Thirty steps with each optimiser on a text that joma brings along.
CODE_SLICE = {
    "data": "zipf",
    "vocabulary": 500,
    "layers": [1],
    "other_layers": [1],
    "seeds": 1,
    "points": 10,
    "steps": 0,
    "rates": {"adam": [1e-3], "sgd": [1.0], "momentum": [1.0]},
    "tau": {"adam": 0.03, "sgd": 30.0, "momentum": 30.0},
    "every": 1,
    "valid_windows": 2,
    "valid_every": 0,
    **PLAIN,
}
RECORD_SLICE = {
    "layers": [1],
    "other_layers": [],
    "seeds": 1,
    "steps": 40,
    "rates": {"adam": [1e-4]},
    "tau": {"adam": 0.004},
}
EXHIBIT = Exhibit(
    id="clock",
    title="The optimiser's clock",
    revised="two seeds decided, however small the margin; now it takes four",
    statement=(
        "Ours: entropy, stable rank and loss are functions of τ = Σ lr; rates that are too "
        "large leave the curve."
    ),
    seconds=90,
    rule=RULE,
    would_decide=WOULD_DECIDE,
    experiment=Experiment(
        SETTINGS, run, draw, judge, AXES, code_slice=CODE_SLICE, record_slice=RECORD_SLICE
    ),
    messages={
        Verdict.HOLDS: "Runs at different learning rates are one curve over the sum of their rates",
        Verdict.UNDER: "Over the sum of learning rates some curves of different rates agree, and some do not",
        Verdict.FAILS: "Curves of different learning rates do not agree over the sum of their rates",
        Verdict.INCONCLUSIVE: "are runs at different learning rates one curve over the sum of their rates?",
    },
)
