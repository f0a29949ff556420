"""``JOMA_DATA=… python docs/wikitext.py``: the paper's one-layer model on the real WikiText-2, at two learning rates.

Not part of the tests (about a quarter of an hour on two cores); a killed script goes on where it was. Writes
``docs/wikitext.md`` and its picture, and ends with status 1 if one of the stated figures is not reached.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from joma._measure.watch.phases import PHASES
from joma._runs import Run
from joma._show.pages.plot import plot
from joma._train.language import StepSummary, train
from joma._train.settings import Settings

DOCS = Path(__file__).parent
OUT = Path("runs/wikitext")
STEPS, EVERY = 6000, 50


def trained(lr: float) -> Run:
    """One layer, the 4,000 most frequent words, everything else as in the paper."""
    settings = Settings(
        data="wikitext-2", vocabulary=4000, layers=1, lr=lr, steps=STEPS, every=EVERY, threads=1
    )

    def show(state: StepSummary) -> None:
        if state.step % 500 == 0:
            print(
                f"lr {lr:g}, step {state.step}: loss {state.loss:.3f}, entropy {state.entropy:.3f}",
                flush=True,
            )

    return train(settings, OUT / settings.label, show=show)


def series(run: Run, gauge: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, the mean over what axes the gauge has."""
    means = run.frame(gauge).groupby("step").value.mean()
    return means.index.to_numpy(), means.to_numpy()


def phases(run: Run) -> list[str]:
    """The layer's phases in the order it went through them, each with its first step."""
    found: list[str] = []
    name = None
    for row in run.frame("phase").sort_values("step").itertuples():
        if PHASES[int(row.value)] != name:
            name = PHASES[int(row.value)]
            found.append(f"{name} from step {row.step}")
    return found


def main() -> int:
    """Train both, judge, write the page."""
    healthy, hot = trained(1e-4), trained(1e-2)
    steps, entropy = series(healthy, "entropy")
    low = int(np.argmin(entropy))
    last_hot = series(hot, "entropy")[1][-1]
    rows = [
        ("lr 1e-4: lowest entropy", "≤ 1.75 nats", f"{entropy[low]:.3f}", entropy[low] <= 1.75),
        ("… at step", "< 4,000", f"{steps[low]:,}", steps[low] < 4000),
        ("… last value above the lowest", "≥ 0.12 nats", f"{entropy[-1] - entropy[low]:.3f}",
         entropy[-1] - entropy[low] >= 0.12),
        ("lr 1e-2: phase at the end", "collapsed", phases(hot)[-1].split()[0], phases(hot)[-1].startswith("collapsed")),
    ]  # fmt: skip
    lines = [
        "# WikiText-2: dip, bounce and collapse",
        "",
        "Made by `JOMA_DATA=… python docs/wikitext.py`: one layer, the 4,000 most frequent words, 6,000 steps, one run "
        "a learning rate, all else as in the paper.",
        "",
        "| what | asked | measured | |",
        "|---|---|---|---|",
        *(
            f"| {what} | {asked} | {got} | {'met' if met else '**missed**'} |"
            for what, asked, got, met in rows
        ),
        "",
        f"At 1e-4 entropy starts at {entropy[0]:.2f} nats and goes through: {'; '.join(phases(healthy))}. "
        f"At 1e-2 it ends at {last_hot:.3f} nats: {'; '.join(phases(hot))}.",
        "",
        "| lr | lowest validation loss | last | stable rank: first | lowest | last |",
        "|---|---|---|---|---|---|",
    ]
    for lr, run in (("1e-4", healthy), ("1e-2", hot)):
        loss, rank = series(run, "valid_loss")[1], series(run, "stable_rank")[1]
        lines.append(
            f"| {lr} | {loss.min():.3f} | {loss[-1]:.3f} | {rank[0]:.1f} | {rank.min():.1f} | {rank[-1]:.1f} |"
        )
    for run, name in ((healthy, "wikitext"), (hot, "wikitext-hot")):
        plot(run.path, OUT / name)
        shutil.copy(OUT / name / "figure.png", DOCS / "figures" / f"{name}.png")
    lines += [
        "",
        "![lr 1e-4](figures/wikitext.png)",
        "",
        "![lr 1e-2](figures/wikitext-hot.png)",
        "",
    ]
    (DOCS / "wikitext.md").write_text("\n".join(lines))
    print("\n".join(lines))
    return 0 if all(met for *_, met in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
