"""``JOMA_DATA=… python docs/authors.py``: joma's language model beside the authors' own runs.

The paper's model at its full vocabulary of 28,782 words, from the authors' starts, with attention entropy on the
sequence that they stored: to step 2,000 at several depths, rates and seeds, and to step 1,000 one of these on the
training articles in other orders; with ``--long`` one layer to step 20,000.
What they measured is looked for in ``$JOMA_DATA/authors-wikitext-2``: ``entropy.csv`` (layers, lr, seed, step, layer,
entropy) and ``valid_loss.csv`` (layers, lr, seed, step, valid_loss), read off the result files in their repository
(facebookresearch/luckmatters, ssl/real-dataset/joma).

Not part of the tests: hours on two cores. The runs are in the order of their cost; killed, the same command goes on
where it was. Each run that is complete has its lines in ``docs/authors.md``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import re
from collections.abc import Collection
from pathlib import Path

import pandas as pd
from scipy import stats

from joma._runs import Run
from joma._train.settings import Settings
from joma._train.sweep import RunEnd, sweep

DOCS = Path(__file__).parent
Key = tuple[int, float, int]  # layers, lr, the authors' seed
STEPS = (1000, 2000)
LONG = 20_000
RATES = (1e-4, 1e-3)
SEEDS = {1: (1, 2, 3), 2: (1,), 5: (1,)}  # layers -> the authors' seeds to start from
COMPARED: list[Key] = [
    (layers, lr, seed) for layers, seeds in SEEDS.items() for seed in seeds for lr in RATES
]
ORDERS = (1, 2)  # seeds of other orders of the training articles: theirs is not known to be ours
REORDERED: Key = (1, 1e-4, 1)
ONE_SEED = (
    0.1  # nats that may lie between us and the authors where they have one seed, and no spread
)


def settings(layers: int, lr: float, seed: int, *, long: bool = False) -> Settings:
    """The authors' run, whose seed ``s`` starts from torch's seed ``s + 2``."""
    validated = {"valid_windows": 0, "valid_every": 1000} if long else {"valid_windows": 1}
    return Settings(
        data="wikitext-2", layers=layers, lr=lr, seed=seed + 2, steps=LONG if long else max(STEPS), every=250,
        threads=1, probe="authors", fresh_adam=True, short_window=True, gauges=("entropy", "stable_rank"), **validated,
    )  # fmt: skip


def reordered(folder: Path, out: Path, seed: int) -> Path:
    """WikiText-2 in ``out`` with its training articles in another order: the same words, and as often."""
    text = (folder / "wiki.train.tokens").read_text(encoding="utf-8")
    articles = re.split(r"(?m)^(?= \n = [^=].* = $)", text)
    random.Random(seed).shuffle(articles)
    out.mkdir(parents=True, exist_ok=True)
    (out / "wiki.train.tokens").write_text("".join(articles), encoding="utf-8")
    (out / "wiki.valid.tokens").write_bytes((folder / "wiki.valid.tokens").read_bytes())
    return out


def in_orders(out: Path, data: Path) -> dict[str, Settings]:
    """The runs on reordered articles, by folder."""
    runs = {}
    for seed in ORDERS:
        text = reordered(data / "wikitext-2", out / f"order-{seed}" / "wikitext-2", seed)
        runs[f"{name(*REORDERED)},order={seed}"] = dataclasses.replace(
            settings(*REORDERED),
            data=str(text),
            steps=min(STEPS),
            valid_windows=0,
            valid_every=min(STEPS),
        )
    return runs


def name(layers: int, lr: float, seed: int) -> str:
    """The run's folder."""
    return f"layers={layers},lr={lr:g},authors-seed={seed}"


def measured(out: Path, keys: list[Key], steps: Collection[int]) -> pd.DataFrame:
    """Entropy by layers, lr, seed, step and layer, of the runs that are complete."""
    tables = [pd.DataFrame(columns=["layers", "lr", "seed", "step", "layer", "entropy"])]
    for layers, lr, seed in keys:
        path = out / name(layers, lr, seed)
        if not (path / "run.json").exists() or not Run(path).done:
            continue
        frame = Run(path).frame("entropy").rename(columns={"value": "entropy"})
        frame = frame[frame.step.isin(steps)].assign(layers=layers, lr=lr, seed=seed)
        tables.append(frame[list(tables[0].columns)])
    return pd.concat(tables[1:] or tables, ignore_index=True)


def compared(ours: pd.DataFrame, theirs: pd.DataFrame) -> pd.DataFrame:
    """One line per layers, lr, step and layer: means over seeds, the authors' spread, and whether we are within it."""
    by = ["layers", "lr", "step", "layer"]
    mean = (
        ours.groupby(by)
        .entropy.agg(["mean", "count"])
        .rename(columns={"mean": "ours", "count": "runs"})
    )
    authors = theirs.groupby(by).entropy.agg(["mean", "std", "count"])
    authors.columns = ["authors", "sd", "seeds"]
    table = mean.join(authors, how="left").reset_index()
    table["allowed"] = (2 * table.sd).where(table.seeds > 1, ONE_SEED)
    table["within"] = (table.ours - table.authors).abs() <= table.allowed
    return table


def by_order(out: Path) -> str:
    """What the order of the articles alone changes, in words; empty where such runs are not complete."""
    step, values = min(STEPS), []
    for folder in (name(*REORDERED), *(f"{name(*REORDERED)},order={seed}" for seed in ORDERS)):
        if not (out / folder / "run.json").exists():
            return ""
        entropy = Run(out / folder).frame("entropy").set_index("step").value
        if step not in entropy.index:
            return ""
        values.append(float(entropy[step]))
    layers, lr, seed = REORDERED
    words = " and ".join(f"{value:.3f}" for value in values[1:])
    return (
        f"Their seeds share one order of the articles and ours another, so the spread of their seeds is not all there "
        f"is: with {layers} layer, lr {lr:g} and the start of their seed {seed}, entropy at step {step:,} is "
        f"{values[0]:.3f} on the articles in our order and {words} in two others."
    )


def by_chance(table: pd.DataFrame) -> str:
    """How many rows would lie outside if our runs were drawn as theirs: Student's t, with their few seeds."""
    known = table[table.seeds > 1]
    outside = 2 * stats.t.sf(2 / (1 / known.runs + 1 / known.seeds) ** 0.5, known.seeds - 1)
    return (
        f"{int((~known.within).sum())} of {len(known)} rows lie outside. {outside.sum():.1f} would be expected to if "
        "our runs were further seeds of theirs: a standard deviation of two or three seeds is itself uncertain, and "
        "one run is compared with a mean (Student's t; layers of one run are not independent)."
    )


def page(table: pd.DataFrame, runs: int, total: int, orders: str) -> str:
    """The page, in Markdown."""
    lines = [
        "# Beside the authors' runs",
        "",
        f"Made by `python docs/authors.py`; {runs} of {total} runs are complete. The paper's language model on "
        "WikiText-2 with all 28,782 words, from the authors' starts: attention entropy in nats on the one sequence "
        "that they stored (`--probe authors`), mean over the runs, beside the mean over their seeds, from the result "
        "files in their repository (facebookresearch/luckmatters, ssl/real-dataset/joma). Within: no further apart "
        f"than twice the standard deviation of their seeds, or {ONE_SEED:g} nats where they have one. The order of the "
        "training articles and the drawn dropout masks differ from theirs.",
        "",
        *([by_chance(table), ""] if len(table) else []),
        *([orders, ""] if orders else []),
        "| layers | lr | step | layer | joma | runs | authors | sd | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table.itertuples():
        verdict = "within" if row.within else f"**{row.ours - row.authors:+.3f}**"
        numbers = f"{row.ours:.3f} | {row.runs} | {row.authors:.3f} | {row.sd:.3f}"
        lines.append(
            f"| {row.layers} | {row.lr:g} | {row.step:,} | {row.layer} | {numbers} | {verdict} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Train what is missing, and write the page and its numbers after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/authors"), help="folder of the runs")
    parser.add_argument(
        "--page", type=Path, default=DOCS / "authors.md", help="the page to write, and its .json"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="runs at a time; 0 writes the page of what there is"
    )
    parser.add_argument("--long", action="store_true", help=f"one layer, lr 1e-4, to step {LONG:,}")
    options = parser.parse_args()
    data = Path(os.environ.get("JOMA_DATA", "."))
    theirs = pd.read_csv(data / "authors-wikitext-2" / "entropy.csv")
    keys: list[Key] = [(1, 1e-4, 1)] if options.long else COMPARED
    steps = range(1000, LONG + 1, 1000) if options.long else STEPS

    def write(outcome: RunEnd | None = None, n: int = 0, total: int = 0) -> None:
        ours = measured(options.out, keys, steps)
        table, runs = compared(ours, theirs), len(ours.groupby(["layers", "lr", "seed"]))
        options.page.write_text(page(table, runs, len(keys), by_order(options.out)))
        options.page.with_suffix(".json").write_text(
            table.round(4).to_json(orient="records", indent=1)
        )
        if outcome is not None:
            print(
                f"{n}/{total} {outcome.path.name}: {outcome.status} {outcome.reason or ''}",
                flush=True,
            )

    if options.workers:
        runs = {name(*key): settings(*key, long=options.long) for key in keys}
        runs |= {} if options.long else in_orders(options.out, data)
        sweep(runs, options.out, workers=options.workers, checkpoint_every=100, report=write)
    write()


if __name__ == "__main__":
    main()
