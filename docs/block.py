"""``python docs/block.py``: the tables of ``docs/block.md``, about ten minutes of one core.

long    folded against joint over 1,000 steps on Python's documentation, by SGD and by Adam, three seeds
cases   the exhibit ``block`` at its default preset, case by case
cost    time and memory per step, both forms alternately in one run (``python -m benchmarks block``)

Ends with status 1 if a case that should be exact is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import torch

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_build")]

from benchmarks import block as benchmark  # noqa: E402
from marks import between  # noqa: E402

from joma._data.words import most_frequent, words_of  # noqa: E402
from joma._runs import Run  # noqa: E402
from joma.paper.exhibits import block, get  # noqa: E402
from joma.paper.exhibits.making import make_exhibit  # noqa: E402
from joma.paper.labs.text_block import places  # noqa: E402
from joma.paper.labs.twins import FOLDS, OPTIMISERS, Data, compare  # noqa: E402

WORDS, NODES, WINDOW, BATCH, STEPS, SEEDS = 500, 48, 16, 64, 1000, 3


def trained() -> pd.DataFrame:
    """One row per fold, optimiser and seed: the largest gaps over training, and where both forms are at its end."""
    code, vocabulary = most_frequent(words_of("pydoc"), WORDS)
    data = Data(places(code, WINDOW), *3 * [len(vocabulary)])
    rows = []
    for fold in FOLDS:
        for optimiser in ("SGD", "Adam"):
            for seed in range(SEEDS):
                sizes = {"nodes": NODES, "batch": BATCH, "steps": STEPS, "every": STEPS // 10}
                path = pd.DataFrame(
                    [values for _, values in compare(fold, optimiser, data, **sizes, seed=seed)]
                )
                off = 100 * (path.loss_folded / path.loss_joint - 1).iloc[-1]
                row = {
                    "fold": fold.name,
                    "optimiser": optimiser,
                    "exact": fold.exact(optimiser),
                    "gap": path.gap.max(),
                }
                row |= {
                    "loss_gap": path.loss_gap.max(),
                    "nc": path.nc.iloc[-1],
                    "size": path["size"].iloc[-1],
                }
                rows.append(row | {"off": off})
                print(rows[-1], flush=True)
    return pd.DataFrame(rows)


def long_table(rows: pd.DataFrame) -> str:
    """The cases over seeds: smallest to largest."""
    lines = [
        "| fold | optimiser | logits apart, of their size | losses apart, at any step | correlation of the ways of the "
        "logits | ratio of their lengths | last 100 losses, folded against joint |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (fold, optimiser), seeds in rows.groupby(["fold", "optimiser"], sort=False):
        gap = spread(seeds.gap, ".0e")
        cells = [
            f"**{gap}**" if seeds.exact.all() else gap,
            spread(seeds.loss_gap, ".0e"),
            spread(seeds.nc, ".2f"),
        ]
        cells += [spread(seeds["size"], ".2f"), f"{spread(seeds.off, '+.2f')} %"]
        lines.append(f"| {fold} | {optimiser} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: pd.Series, form: str) -> str:
    """Smallest and largest, or one number where they are printed alike."""
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (values.min(), values.max())))


def case_table(cases: pd.DataFrame) -> str:
    """What the exhibit found, by fold, data and optimiser."""
    lines = [f"| fold | data | {' | '.join(OPTIMISERS)} |", "|---|---|" + len(OPTIMISERS) * "---|"]
    by_case = {(row["fold"], row["data"], row["optimiser"]): row for _, row in cases.iterrows()}
    for fold in FOLDS:
        for data in block.DATA:
            row = [by_case.get((fold.name, data, optimiser)) for optimiser in OPTIMISERS]
            lines.append(f"| {fold.name} | {data} | {' | '.join(map(case, row))} |")
    return "\n".join(lines)


def case(row: pd.Series | None) -> str:
    """One cell: exact with the gap, or what it is with the numbers that made it so."""
    if row is None:
        return "refused"
    if row["is"] == "exact":
        return f"exact ({row['gap']:.0e})"
    return f"{row['is']}: NC {row['nc']:.2f}, length × {row['size']:.2f}, loss {100 * row['loss_off']:+.2f} %"


def cost_table() -> str:
    """Joint over folded, in one run."""
    lines = [
        "| logits | optimiser | time per step, joint / folded | memory held by the block, joint / folded |",
        "|---|---|--:|--:|",
    ]
    for row in benchmark.run():
        logits, optimiser = row["what"].split(", ")[-2:]
        folded, joint = row["mib"]
        logits = logits.removeprefix("logits ").removesuffix(" for all queries")
        memory = f"{joint / folded:.2g} × ({joint:.0f} and {folded:.0f} MiB)"
        lines.append(f"| {logits} | {optimiser} | {row['ratio']:.2g} × | {memory} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, and write the tables into the page."""
    torch.set_num_threads(1)
    page = DOCS / "block.md"
    cost = cost_table()
    print(cost, flush=True)
    rows = trained()
    outcome = make_exhibit(get(["block"])[0], out=Path("runs/block"))
    tables = {
        "long": long_table(rows),
        "cases": case_table(block.table(Run(outcome.path))),
        "cost": cost,
    }
    text = page.read_text()
    for name, table in tables.items():
        text = between(text, name, table)
    page.write_text(text)
    return int(rows[rows.exact].gap.max() > block.EXACT)


if __name__ == "__main__":
    sys.exit(main())
