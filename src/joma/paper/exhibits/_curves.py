"""Language models that are trained for several exhibits, and what their curves did."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pandas as pd

from joma._measure.watch.phases import PHASES
from joma._runs import Run, RunInUse, RunWriter
from joma._runs.curve import ENTROPY, TRAINING, Curve, describe_all
from joma._runs.fingerprint import fingerprint
from joma.paper.exhibits.base import Progress
from joma.paper.verdict import Verdict

if TYPE_CHECKING:
    from joma._train.settings import Settings

AXES: dict[str, list[str]] = {}  # all measurements are in the runs that the exhibit refers to
RUNS = "language-runs"  # beside the exhibits
POLL = 5.0  # seconds between two looks at a run that another process trains
TOY = "pydoc"  # a small corpus that every machine has
TOY_RULE = f"On the toy corpus, {TOY}, the statement is inconclusive"
GAUGES = ("entropy", "stable_rank", "phase", "valid_loss")
# settings of an exhibit that all of its runs have
COMMON = (
    "vocabulary", "every", "threads", "valid_windows", "valid_every", "probe_windows", "fresh_adam", "short_window",
)  # fmt: skip
TOLD_APART_BY = (
    "data",
    "layers",
    "optimiser",
    "momentum",
    "lr",
    "activation",
)  # columns of the table
PLAIN = {"probe_windows": 2, "threads": 1, "fresh_adam": False, "short_window": False}
# what the authors' loop does besides; losses on all validation windows, to stand beside the paper's three digits
# the models on real text that Figures 6 and 8, lowrank and clock look at, each trained once for all of them
GRID: dict[str, Any] = {
    "data": "wikitext-2", "vocabulary": 2000, "layers": [1, 2], "seeds": 4, "steps": 1000, "tau": 0.5, "points": 50,
    "every": 10, "valid_windows": 16, "valid_every": 0,
    "gauges": ["entropy", "stable_rank", "gradient_rank", "update_rank"], **PLAIN,
}  # fmt: skip
# Nats. Means over two or three seeds move by as much when a seed is added.
CLOSE = 0.02
ENOUGH_SEEDS = 4
CLOSE_RULE = (
    f"With fewer than {ENOUGH_SEEDS} seeds, what exceeds or misses its threshold by less than "
    f"{CLOSE:g} nats is open"
)
TO_THE_LETTER = PLAIN | {
    "fresh_adam": True,
    "short_window": True,
    "valid_windows": 0,
    "valid_every": 1000,
}


def train_all(
    writer: RunWriter, runs: Iterable[dict[str, Any]], settings: dict[str, Any], seed: int, progress: Progress,
    gauges: Sequence[str] = GAUGES,
) -> None:  # fmt: skip
    """Train each of ``runs`` (data, layers, lr, steps and what else differs) with every seed, refer to its ``gauges``.

    The runs are beside the exhibit, in ``language-runs/``, named by settings and the code that trains them: a killed
    exhibit goes on where it was, runs of other code stay where they are and are not taken, and exhibits that need the
    same run share it. What another process is training now is come back to when all else is done.
    """
    from joma._train.language import train
    from joma._train.settings import Settings

    common = {key: settings[key] for key in COMMON}
    if "gauges" in settings:
        common["gauges"] = tuple(settings["gauges"])
    seeds = [seed + n for n in range(settings["seeds"])]
    planned = [Settings(**{**common, **run, "seed": one}) for run in runs for one in seeds]
    trained: dict[Settings, Run] = {}
    while waiting := [language for language in planned if language not in trained]:
        before = len(trained)
        for language in waiting:

            def show(state: Any, label: str = f"{language.data}, {language.label}") -> None:
                progress((len(trained) + state.step / state.steps) / len(planned), label)

            with warnings.catch_warnings():
                # what a watch tells a user to mend is a result here
                warnings.filterwarnings(
                    "ignore", message=r"joma\.watch: (attention of layer|step \d+: )"
                )
                try:
                    out = writer.path.parent / RUNS / _folder(language)
                    trained[language] = train(language, out, say=lambda line: None, show=show)
                except RunInUse:
                    progress(
                        len(trained) / len(planned), f"another exhibit trains {language.label}"
                    )
        if len(trained) == before:
            time.sleep(POLL)
    for language in planned:
        columns = {key: getattr(language, key) for key in (*TOLD_APART_BY, "seed")}
        run = trained[language]
        writer.refer(run, tuple(gauges), **columns, status=run.info["status"])


def span(lr: float, tau: float, points: int, steps: int, every: int) -> dict[str, int]:
    """How long to train and how often to measure: to the same τ = lr · steps at every rate, equally often on the clock.

    Never less than ``steps`` steps, nor more often than ``every``.

    >>> (
    ...     span(1e-4, 0.5, points=50, steps=1000, every=10),
    ...     span(1e-2, 0.5, points=50, steps=1000, every=10),
    ... )
    ({'steps': 5000, 'every': 100}, {'steps': 1000, 'every': 10})
    """
    return {"steps": max(steps, round(tau / lr)), "every": max(every, round(tau / points / lr))}


def _folder(settings: Settings) -> str:
    """What runs are told apart by, in words, and the fingerprint of all that decides them: a stale run is not taken."""
    return f"{settings.corpus_name},{settings.label},{fingerprint(['joma._train.language'], asdict(settings))}"


def measured(run: Run, gauge: str, data: str) -> pd.DataFrame:
    """The table of a gauge, mean over heads and seeds, of the models that were trained on ``data``."""
    frame = run.frame(gauge)
    frame = frame[frame["data"] == data]
    keys = [key for key in ("layers", "lr", "layer", "step") if key in frame]
    return frame.groupby(keys).value.mean().reset_index()


def curves(run: Run, data: str, gauge: str = "entropy") -> dict[tuple[int, float, int], Curve]:
    """(layers, lr, layer) -> what the gauge did, mean over seeds; entropy collapses if it does in most of them."""
    by = ["layers", "lr", "layer"]
    phases = run.frame("phase")
    last = phases[phases["data"] == data].sort_values("step").groupby([*by, "seed"]).value.last()
    share = (last == PHASES.index("collapsed")).groupby(by).mean()
    collapsed = share[share > 0.5].index if gauge == "entropy" else ()
    by_key = describe_all(measured(run, gauge, data), TRAINING[gauge], by, collapsed)
    return {
        (int(layers), float(lr), int(layer)): curve for (layers, lr, layer), curve in by_key.items()
    }


def seeds_that_bounce(run: Run, data: str) -> dict[tuple[int, float, int], list[int]]:
    """(layers, lr, layer) -> the seeds whose entropy dips and bounces."""
    frame = run.frame("entropy")
    by = ["layers", "lr", "layer", "seed"]
    entropy = frame[frame["data"] == data].groupby([*by, "step"]).value.mean().reset_index()
    seeds: dict[tuple[int, float, int], list[int]] = {}
    for (layers, lr, layer, seed), curve in describe_all(entropy, ENTROPY, by).items():
        bouncing = seeds.setdefault((int(layers), float(lr), int(layer)), [])
        bouncing += [int(seed)] if curve.bounced else []
    return seeds


# What one curve did, as a clause per curve.
CURVES = "{key}: {start:.2f} → {trough:.2f} (step {trough_step:g}) → {end:.2f}"


def rank_numbers(run: Run, data: str) -> dict[str, Any]:
    """Return what the stable rank of the lower MLPs did, and in how many layers it fell and rose again."""
    ranks = curves(run, data, "stable_rank")
    bounced = [curve for curve in ranks.values() if curve.bounced]
    by_name = {_name(key): curve.numbers() for key, curve in ranks.items()}
    return {"bounced": len(bounced), "layers": len(ranks), "curves": by_name}


def entropy_numbers(run: Run, data: str) -> dict[str, Any]:
    """Return the numbers of all entropy curves."""
    return {_name(key): curve.numbers() for key, curve in curves(run, data).items()}


def _name(key: tuple[int, float, int]) -> str:
    return f"{deep(key[0])}, lr {key[1]:g}, layer {key[2]}"


def deep(layers: int) -> str:
    """How deep a model is.

    >>> deep(1), deep(5)
    ('1 layer', '5 layers')
    """
    return f"{layers} layer{'' if layers == 1 else 's'}"


def is_open(margin: float, seeds: int) -> bool:
    """Return whether so few seeds leave open on which side of its threshold a difference in nats is."""
    return seeds < ENOUGH_SEEDS and abs(margin) < CLOSE


def verdict_of_all(
    verdict_of: Callable[[Sequence[bool]], Verdict], margins: Sequence[float], seeds: int
) -> Verdict:
    """Return the verdict that conditions give, or inconclusive if open ones would change it.

    Arguments:
        verdict_of: the verdict, given whether each condition is met.
        margins: by how many nats each condition is met; negative if it is not.
        seeds: over how many seeds the curves are means.
    """
    met = [margin >= 0 for margin in margins]
    verdict = verdict_of(met)
    choices = []
    for margin, is_met in zip(margins, met, strict=True):
        choices.append([True, False] if is_open(margin, seeds) else [is_met])
    if all(verdict_of(choice) is verdict for choice in itertools.product(*choices)):
        return verdict
    return Verdict.INCONCLUSIVE


def best_loss(run: Run, data: str) -> dict[tuple[int, float], float]:
    """(layers, lr) -> the lowest validation loss, of the mean over seeds."""
    lowest = measured(run, "valid_loss", data).groupby(["layers", "lr"], as_index=False).value.min()
    return {(int(row.layers), float(row.lr)): float(row.value) for row in lowest.itertuples()}
