"""Table 1 with noise (ρ < 1), where nodes can be chosen on one half of the data and scored on the other; and its trend.

Without noise there are as many distinct sequences as classes, and a best of hundreds of nodes over them is large for
any features. With noise samples differ, chance is near 0, and NCorr can tell a trained network from an untrained one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from joma._runs import Run, RunWriter
from joma._show.plots.tables import markdown
from joma.paper.exhibits._columns import LAYERS
from joma.paper.exhibits._statistics import mean_interval
from joma.paper.exhibits.base import Progress, where
from joma.paper.labs.table1 import TABLE1

COLUMNS = (
    (20, 2, 10, 20),
    (20, 3, 20, 30),
)  # the simplest, and the most complicated with as many classes
HELD_OUT = {
    "trained held out": "trained",
    "untrained held out": "untrained",
    "permuted held out": "permuted",
}
KEYS = ["rho", "C", "N_ch", "N0", "N1", "draw", "s"]


def run_noisy(
    writer: RunWriter, settings: dict[str, Any], lr: float, seed: int, progress: Progress
) -> None:
    """Both columns at each ρ and seed; ``noisy_ncorr`` by state."""
    from joma.paper.labs.hierarchy import Training
    from joma.paper.labs.ncorr import train_and_measure

    noisy = settings["noisy"]
    work = [
        (rho, column, draw)
        for rho in noisy["rho"]
        for column in COLUMNS
        for draw in range(noisy["seeds"])
    ]
    for n, (rho, (C, N_ch, N0, N1), draw) in enumerate(work):
        progress(
            n / len(work), f"ρ = {rho:g}, C = {C}, N_ch = {N_ch}, ({N0}, {N1}), seed {draw + 1}"
        )
        drawn = int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
        training = Training(steps=noisy["steps"], lr=lr)
        states, _, _ = train_and_measure(
            (N0, N1, N_ch, C), settings["d"], training, drawn, lambda step: None, rho
        )
        for state, name in HELD_OUT.items():
            labels = {
                "rho": rho,
                "C": C,
                "N_ch": N_ch,
                "N0": N0,
                "N1": N1,
                "draw": draw,
                "state": name,
            }
            writer.write(training.steps, {"noisy_ncorr": states[state]}, **labels)


def noisy_story(run: Run) -> tuple[str, dict[str, Any]]:
    """What the noisy columns say, in words and numbers: trained − untrained, held out, per layer; and their trend."""
    frame = where(run.frame(), gauge="noisy_ncorr")
    if frame.empty:
        return "No columns with noise were trained.", {}
    table = frame.pivot_table(index=KEYS, columns="state", values="value")
    numbers: dict[str, Any] = {}
    parts = []
    for s in LAYERS:
        rows = table.xs(s, level="s")
        gain = mean_interval(rows.trained - rows.untrained)
        means = {state: float(rows[state].mean()) for state in HELD_OUT.values()}
        numbers[f"s = {s}"] = {**means, "gain": gain}
        parts.append(
            f"s = {s}: {', '.join(f'{mean:.2f} {state}' for state, mean in means.items())}, gain {_bounds(gain)}"
        )
    by_column = frame.pivot_table(
        index=["rho", "draw", "s"], columns=["state", "N_ch"], values="value"
    )
    change = mean_interval(by_column["trained", 3] - by_column["trained", 2])
    numbers["change"] = change
    levels = ", ".join(f"{rho:g}" for rho in sorted(frame.rho.unique()))
    text = f"With noise, ρ = {levels}, nodes chosen on one half and scored on the other: {'; '.join(parts)}"
    return f"{text}; with complexity it {_word(change)}: {_bounds(change)}.", numbers


def noisy_table(run: Run) -> str:
    """``noisy.md``: the columns with noise as rows, mean ± sd over seeds."""
    story, frame = noisy_story(run)[0], where(run.frame(), gauge="noisy_ncorr")
    if frame.empty:
        return f"{story}\n"
    header = ["", *(f"s = {s}: {state}" for s in LAYERS for state in HELD_OUT.values())]
    rows = []
    for (rho, C, N_ch, N0, N1), column in frame.groupby(KEYS[:5]):
        cells = [
            where(column, s=s, state=state).value for s in LAYERS for state in HELD_OUT.values()
        ]
        name = f"ρ={rho:g} C={C:g} N_ch={N_ch:g} ({N0:g}, {N1:g})"
        rows.append([name, *(f"{values.mean():.2f} ± {values.std():.2f}" for values in cells)])
    return markdown(f"NCorr, nodes chosen on one half of the draws. {story}", header, rows)


def _word(change: tuple[float, float, float]) -> str:
    return "goes down" if change[2] < 0 else "goes up" if change[1] > 0 else "is not seen to change"


def _bounds(change: tuple[float, float, float]) -> str:
    return f"{change[0]:+.3f} [{change[1]:+.3f}, {change[2]:+.3f}]"


def trend(run: Run) -> tuple[str, dict[str, Any]]:
    """How trained NCorr changes from (N_ch = 2, (10, 20)) to (3, (20, 30)) at equal C, here and in the paper."""
    frame = where(run.frame("ncorr"), state="trained")
    table = frame.pivot_table(
        index=["lr", "C", "draw", "s"], columns=["N_ch", "N0"], values="value"
    )
    if (2, 10) not in table or (3, 20) not in table:
        return (
            "The trend with complexity is not judged: the columns it compares were not trained.",
            {},
        )
    change = (table[3, 20] - table[2, 10]).dropna()
    interval = mean_interval(change)
    classes = sorted(int(C) for C in change.index.unique("C"))
    paper = np.mean(
        [TABLE1[C, 3, 20, 30][s][0] - TABLE1[C, 2, 10, 20][s][0] for C in classes for s in LAYERS]
    )
    text = (
        f"From (N_ch = 2, (10, 20)) to (3, (20, 30)) trained NCorr {_word(interval)}: {_bounds(interval)} (paper "
        f"{paper:+.3f}, “goes down a bit”)."
    )
    return text, {"change": interval, "paper": float(paper), "classes": classes}
