"""Table 1 with noise (ρ < 1), where nodes can be chosen on one half of the data and scored on the other; and its trend.

Without noise there are as many distinct sequences as classes, and a best of hundreds of nodes over them is large for
any features. With noise samples differ, chance is near 0, and NCorr can tell a trained network from an untrained one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from joma._exhibits._columns import LAYERS
from joma._exhibits._statistics import mean_interval
from joma._exhibits.base import Progress, where
from joma._run import Run, RunWriter
from joma.theory._table1 import TABLE1

COLUMNS = ((20, 2, 10, 20), (20, 3, 20, 30))  # the simplest, and the most complicated with as many classes
HELD_OUT = {"trained held out": "trained", "untrained held out": "untrained"}


def run_noisy(writer: RunWriter, settings: dict[str, Any], lr: float, seed: int, progress: Progress) -> None:
    """Both columns at each ρ and seed; ``noisy_ncorr`` by state."""
    from joma._train.hierarchy import Training
    from joma._train.ncorr import train_and_measure

    noisy = settings["noisy"]
    work = [(rho, column, draw) for rho in noisy["rho"] for column in COLUMNS for draw in range(noisy["seeds"])]
    for n, (rho, (C, N_ch, N0, N1), draw) in enumerate(work):
        progress(n / len(work), f"ρ = {rho:g}, C = {C}, N_ch = {N_ch}, ({N0}, {N1}), seed {draw + 1}")
        drawn = int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
        training = Training(steps=noisy["steps"], lr=lr)
        states, _ = train_and_measure((N0, N1, N_ch, C), settings["d"], training, drawn, lambda step: None, rho)
        for state, name in HELD_OUT.items():
            labels = {"rho": rho, "C": C, "N_ch": N_ch, "N0": N0, "N1": N1, "draw": draw, "state": name}
            writer.write(training.steps, {"noisy_ncorr": states[state]}, **labels)


def noisy_story(run: Run) -> tuple[str, dict[str, Any]]:
    """What the noisy columns say, in words and numbers: trained − untrained, held out, per layer of latents."""
    frame = where(run.frame(), gauge="noisy_ncorr")
    if frame.empty:
        return "No columns with noise were trained.", {}
    keys = ["rho", "C", "N_ch", "N0", "N1", "draw", "s"]
    table = frame.pivot_table(index=keys, columns="state", values="value")
    numbers: dict[str, Any] = {}
    parts = []
    for s in LAYERS:
        rows = table.xs(s, level="s")
        gain = mean_interval(rows.trained - rows.untrained)
        numbers[f"s = {s}"] = {"trained": rows.trained.mean(), "untrained": rows.untrained.mean(), "gain": gain}
        parts.append(f"s = {s}: {rows.trained.mean():.2f} trained, {rows.untrained.mean():.2f} untrained, gain "
                     f"{gain[0]:+.3f} [{gain[1]:+.3f}, {gain[2]:+.3f}]")  # fmt: skip
    levels = ", ".join(f"{rho:g}" for rho in sorted(frame.rho.unique()))
    return f"With noise, ρ = {levels}, nodes chosen on one half and scored on the other: {'; '.join(parts)}.", numbers


def trend(run: Run) -> tuple[str, dict[str, Any]]:
    """How trained NCorr changes from (N_ch = 2, (10, 20)) to (3, (20, 30)) at equal C, here and in the paper."""
    frame = where(run.frame("ncorr"), state="trained")
    table = frame.pivot_table(index=["lr", "C", "draw", "s"], columns=["N_ch", "N0"], values="value")
    if (2, 10) not in table or (3, 20) not in table:
        return "The trend with complexity is not judged: the columns it compares were not trained.", {}
    change = (table[3, 20] - table[2, 10]).dropna()
    interval = mean_interval(change)
    classes = sorted(int(C) for C in change.index.unique("C"))
    paper = np.mean([TABLE1[C, 3, 20, 30][s][0] - TABLE1[C, 2, 10, 20][s][0] for C in classes for s in LAYERS])
    word = "goes down" if interval[2] < 0 else "goes up" if interval[1] > 0 else "is not seen to change"
    text = (
        f"From (N_ch = 2, (10, 20)) to (3, (20, 30)) trained NCorr {word}: {interval[0]:+.3f} [{interval[1]:+.3f}, "
        f"{interval[2]:+.3f}] (paper {paper:+.3f}, “goes down a bit”)."
    )
    return text, {"change": interval, "paper": float(paper), "classes": classes}
