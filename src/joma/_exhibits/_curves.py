"""Entropy curves of trained language models, for Figures 6 and 8: training, and what a curve did."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from joma._exhibits.base import Progress
from joma._run import Run, RunWriter
from joma._watch.phases import PHASES

if TYPE_CHECKING:
    from joma._train.settings import Settings

AXES = {"entropy": ["layer"], "stable_rank": ["layer"], "phase": ["layer"]}


def train_all(writer: RunWriter, name: str, runs: Iterable[dict[str, Any]], seed: int, progress: Progress) -> None:
    """Train each of ``runs`` (settings that differ from the defaults) and copy its curves into the exhibit.

    The runs themselves are kept beside the exhibit, in ``<name>-runs/``, named by all of their settings: a killed
    exhibit goes on where it was.
    """
    from joma._train.language import train
    from joma._train.settings import Settings

    runs = list(runs)
    for n, chosen in enumerate(runs):
        label = f"{chosen['data']}, {chosen['layers']} layers, lr {chosen['lr']:g}"

        def show(state: Any, n: int = n, label: str = label) -> None:
            progress((n + state.step / state.steps) / len(runs), label)

        settings = Settings(**chosen, valid_windows=4, probe_windows=2, seed=seed)
        out = writer.path.parent / f"{name}-runs" / _folder(settings)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="joma.watch: attention of layer")  # a collapse is a result here
            run = train(settings, out, say=lambda line: None, show=show)
        _copy(run, writer, data=settings.data, layers=settings.layers, lr=settings.lr)


def _folder(settings: Settings) -> str:
    """What runs are told apart by, in words, and a hash of everything."""
    digest = hashlib.blake2b(json.dumps(asdict(settings), sort_keys=True).encode(), digest_size=4).hexdigest()
    return f"{settings.corpus_name},{settings.label},{digest}"


def _copy(run: Run, writer: RunWriter, **columns: Any) -> None:
    steps: dict[int, dict[str, Any]] = {}
    for row in run.rows():
        value = row["value"]
        if row["gauge"] == "entropy":
            value = [float(np.mean(heads)) for heads in value]
        if row["gauge"] in (*AXES, "loss", "valid_loss"):
            steps.setdefault(row["step"], {})[row["gauge"]] = value
    for step, values in steps.items():
        writer.write(step, values, **columns, status=run.info["status"])


@dataclass(frozen=True)
class Curve:
    """What one gauge of one layer did, smoothed."""

    start: float
    trough: float
    trough_step: int
    end: float
    least: float  # the smallest dip that counts, in the gauge's unit; half of it for a bounce
    collapsed: bool = False  # the watch's phase at the end

    @property
    def depth(self) -> float:
        """How far it fell from its start."""
        return self.start - self.trough

    @property
    def bounce(self) -> float:
        """How far it rose again."""
        return self.end - self.trough

    @property
    def dipped(self) -> bool:
        """By 5 % of its start at least; the rule of the watch's phase `sparsifying`."""
        return self.depth >= max(self.least, 0.05 * self.start)

    @property
    def bounced(self) -> bool:
        """By 10 % of the dip at least; the rule of the watch's phase `bouncing`."""
        return self.dipped and self.bounce >= max(self.least / 2, 0.1 * self.depth)

    @property
    def pattern(self) -> str:
        """In words."""
        if self.collapsed:
            return "collapse"
        return "dip and bounce" if self.bounced else "dip" if self.dipped else "flat"

    def __str__(self) -> str:
        return f"{self.start:.2f} → {self.trough:.2f} (step {self.trough_step}) → {self.end:.2f}"

    def numbers(self) -> dict[str, Any]:
        """All of it, for a verdict."""
        return {**asdict(self), "depth": self.depth, "bounce": self.bounce, "pattern": self.pattern}


LEAST = {"entropy": 0.1, "stable_rank": 0.0}  # nats; a rank's dip is relative alone


def curve(
    steps: NDArray[np.int64], values: NDArray[np.float64], least: float, *, window: int = 5, collapsed: bool = False
) -> Curve:
    """The shape of a curve, by medians of ``window`` values: the highest before the trough is its start.

    The first value is taken as it is: a fast fall right after it is no noise.
    """
    smooth = pd.Series(values).rolling(window, center=True, min_periods=1).median().to_numpy()
    low = int(np.argmin(smooth))
    start = max(float(values[0]), float(smooth[: low + 1].max()))
    return Curve(start, float(smooth[low]), int(steps[low]), float(smooth[-1]), least, collapsed)


def measured(run: Run, gauge: str, data: str) -> pd.DataFrame:
    """The table of a gauge, of the models that were trained on ``data``."""
    frame = run.frame(gauge)
    return frame[frame["data"] == data]


def curves(run: Run, data: str, gauge: str = "entropy") -> dict[tuple[int, float, int], Curve]:
    """(layers, lr, layer) -> what the gauge did; only entropy can collapse."""
    phases = measured(run, "phase", data).sort_values("step").groupby(["layers", "lr", "layer"]).value.last().to_dict()
    found = {}
    for key, group in measured(run, gauge, data).groupby(["layers", "lr", "layer"], sort=True):
        layers, lr, layer = cast(tuple[int, float, int], key)
        over = gauge == "entropy" and PHASES[int(phases[key])] == "collapsed"
        found[int(layers), float(lr), int(layer)] = curve(
            group.step.to_numpy(), group.value.to_numpy(), LEAST[gauge], collapsed=over
        )
    return found


def rank_story(run: Run, data: str) -> tuple[str, dict[str, Any]]:
    """The stable rank of the lower MLPs: where it fell and rose again, in words and numbers."""
    found = curves(run, data, "stable_rank")
    done = [c for c in found.values() if c.bounced]
    words = f"stable rank of the lower MLP falls and rises again in {len(done)} of {len(found)} layers"
    return words, {_name(key): c.numbers() for key, c in found.items()}


def entropy_story(run: Run, data: str) -> dict[str, Any]:
    """The numbers of all entropy curves."""
    return {_name(key): c.numbers() for key, c in curves(run, data).items()}


def _name(key: tuple[int, float, int]) -> str:
    return f"{key[0]} layers, lr {key[1]:g}, layer {key[2]}"


def best_loss(run: Run, data: str) -> dict[tuple[int, float], float]:
    """(layers, lr) -> the lowest validation loss."""
    lowest = measured(run, "valid_loss", data).groupby(["layers", "lr"], as_index=False).value.min()
    return {(int(row.layers), float(row.lr)): float(row.value) for row in lowest.itertuples()}
