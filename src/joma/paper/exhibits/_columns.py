"""Table 1 column by column: the paper's numbers, means over seeds beside them, and what they say."""

from __future__ import annotations

import math
from typing import Any, cast

import pandas as pd

from joma._runs import Run
from joma.paper.exhibits._statistics import mean_interval
from joma.paper.labs.table1 import TABLE1

RATES = {1e-5: "as printed", 1e-4: "as in the authors' script"}
COLUMN = ["C", "N_ch", "N0", "N1"]
# the paper's value, what was measured, and what any network would give
STATES = {
    "trained": "trained",
    "untrained": "untrained",
    "permuted": "trained, latents permuted",
    "untrained permuted": "untrained, latents permuted",
    "permuted draws": "trained, latents permuted over 1,280 draws",  # takes copies of C sequences for evidence
}
LAYERS = (0, 1)


def summary(run: Run) -> pd.DataFrame:
    """One row per learning rate, column, layer and state: mean and sd over seeds; the paper's rows too."""
    frame = run.frame("ncorr")
    key = ["lr", *COLUMN, "s", "state"]
    measured = frame.groupby(key, sort=False).value.agg(mean="mean", sd="std").reset_index()
    paper = []
    for lr, *column in frame[key[:5]].drop_duplicates().itertuples(index=False):
        values = TABLE1[tuple(column)]
        for s in LAYERS:
            row = dict(zip(key, (lr, *column, s, "paper"), strict=True))
            paper.append(row | {"mean": values[s][0], "sd": values[s][1]})
    table = pd.concat([pd.DataFrame(paper), measured], ignore_index=True)
    several = len(run.info["config"]["settings"]["lr"]) > 1
    table["column"] = [
        f"C={row.C} N_ch={row.N_ch} ({row.N0}, {row.N1})" + (f", lr {rate(lr)}" if several else "")
        for row, lr in zip(table.itertuples(), table.lr.tolist(), strict=True)
    ]
    return table


def rate(lr: float) -> str:
    """A learning rate, and where it comes from."""
    return f"{lr:g} {RATES[lr]}" if lr in RATES else f"{lr:g}"


def baselines(run: Run) -> str:
    """How much of the paper's numbers the baselines reach, in words."""
    means = summary(run).pivot_table(index=["column", "s"], columns="state", values="mean")
    share = means.div(means["paper"], axis=0).groupby("s").mean()
    parts = [
        f"at s = {s} {share.untrained[s]:.0%} by the untrained network and {share.permuted[s]:.0%} by permuted latents"
        for s in LAYERS
    ]
    return f"Of the paper's numbers, baselines reach {', '.join(parts)}."


def judge_rate(frame: pd.DataFrame) -> dict[str, Any]:
    """Columns, counts and sentences of one learning rate."""
    wide = frame.pivot_table(index=[*COLUMN, "draw", "s"], columns="state", values="value")
    columns: list[dict[str, Any]] = []
    for key, part in wide.groupby([*COLUMN, "s"], sort=False):
        C, N_ch, N0, N1, s = cast("tuple[int, ...]", key)
        mean, sd = TABLE1[C, N_ch, N0, N1][s]
        entry: dict[str, Any] = dict(
            zip([*COLUMN, "s"], map(int, (C, N_ch, N0, N1, s)), strict=True)
        )
        entry |= {"paper": mean} | {state: float(part[state].mean()) for state in STATES}
        for baseline in ("untrained", "permuted"):
            gain = part.trained - part[baseline]
            entry[f"above {baseline}"] = bool(gain.mean() > 2 * gain.std())
        spread = math.hypot(sd, float(part.trained.std()))
        entry["the paper's value"] = bool(abs(entry["trained"] - mean) <= 2 * spread)
        columns.append(entry)
    means = frame.pivot_table(index="s", columns="state", values="value")
    above = {
        "trained": means.trained - means.permuted,
        "untrained": means.untrained - means["untrained permuted"],
    }
    numbers: dict[str, Any] = {}
    represented: dict[int, bool] = {}
    sentences = []
    added: dict[str, list[str]] = {"untrained": [], "permuted": []}
    for s in LAYERS:
        entries = [entry for entry in columns if entry["s"] == s]
        passed = sum(entry["above untrained"] and entry["above permuted"] for entry in entries)
        pairs = wide.xs(s, level="s")
        gains = {
            baseline: mean_interval(pairs.trained - pairs[baseline])
            for baseline in ("untrained", "permuted")
        }
        represented[s] = all(low > 0 for _, low, _ in gains.values())
        agree = sum(entry["the paper's value"] for entry in entries)
        numbers[f"above chance at s = {s}"] = {
            state: float(gain[s]) for state, gain in above.items()
        }
        numbers[f"passed at s = {s}"] = passed
        numbers[f"trained − baseline at s = {s}, with its 95 % interval"] = gains
        numbers[f"the paper's value at s = {s}"] = agree
        sentences.append(
            f"s = {s}: {means.trained[s]:.2f} trained, {means.untrained[s]:.2f} untrained, {means.permuted[s]:.2f} "
            f"permuted; trained − untrained {_signed(gains['untrained'])}, trained − permuted "
            f"{_signed(gains['permuted'])}; the paper's value in {agree}, above both baselines in {passed} of "
            f"{len(entries)} columns (above its own chance level: trained by {above['trained'][s]:.2f}, untrained by "
            f"{above['untrained'][s]:.2f})"
        )
        for baseline, interval in gains.items():
            added[baseline].append(f"{_signed(interval)} at s = {s}")
    measured = ", ".join(
        f"s = {s}: {means.trained[s]:.2f} (untrained {means.untrained[s]:.2f})" for s in LAYERS
    )
    reproduces = 2 * sum(entry["the paper's value"] for entry in columns) >= len(columns)
    return {
        "columns": columns, "numbers": numbers, "represented": represented, "reproduces": reproduces,
        "text": "; ".join(sentences), "measured": measured,
        "conclusion": "; ".join(f"trained − {baseline} {', '.join(parts)}" for baseline, parts in added.items()),
    }  # fmt: skip


def _signed(interval: tuple[float, float, float]) -> str:
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*interval)
