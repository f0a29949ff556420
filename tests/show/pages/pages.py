"""Pages for the tests: of two cheap exhibits with all claims, and of runs with a hostile name."""

import numpy as np

from joma._runs import RunWriter
from joma._show.pages.page import write_report
from joma._show.pages.runs import report
from joma.paper.claims import Result, claims
from joma.paper.exhibits import get, make_exhibit
from joma.paper.verdict import Verdict

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"
VERDICTS = (Verdict.HOLDS, Verdict.CORRECTED, Verdict.UNDER, Verdict.FAILS, Verdict.ERROR)


def results():
    """One for each registered claim; nothing is checked, the verdicts take turns."""
    return [
        Result(
            claim=claim, verdict=VERDICTS[n % 5], value=1e-9, printed_value=0.5, control_value=10.0, cases=3,
            seconds=0.0, error="NaN < 1 & x" if n % 5 == 4 else None,
        )
        for n, claim in enumerate(claims())
    ]  # fmt: skip


def paper_page(folder):
    """The page of fig3 and fig4, beside their folders, and one exhibit that is missing."""
    chosen = get(["fig3", "fig4", "folding"])
    for exhibit in chosen[:2]:
        make_exhibit(exhibit, out=folder)
    return write_report(folder, chosen, results(), preset="default", seed=0)


def watch_run(path, name, level=0.0, kind="watch", steps=(1, 2, 4, 8), layers=2, lr=None):
    """A run whose entropy is ``level`` + step + 10 × layer; with a learning rate, it has τ."""
    config = {"model": "Tiny", "parameters": 123, "gauges": ["entropy"], "level": level}
    with RunWriter.create(
        path, kind=kind, config=config, axes={"entropy": ["layer", "head"]}, name=name
    ) as writer:
        writer.note(layers={"entropy": [f"h.{n}" for n in range(layers)]})
        for step in steps:
            entropy = np.full((layers, 2), level + step) + 10.0 * np.arange(layers)[:, None]
            writer.write(
                step,
                {"entropy": entropy, "loss": 1.0 / step},
                **({} if lr is None else {"tau": lr * step}),
            )
    return path


def runs_page(folder):
    """Two runs over each other, one with a hostile name."""
    runs = [
        watch_run(folder / "a", HOSTILE, lr=0.5),
        watch_run(folder / "b", "plain", 0.5, lr=0.25),
    ]
    return report(runs, folder / "runs.html")
