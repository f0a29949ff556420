"""Many runs: a grid of settings, each run in its own folder, on this machine or on a Ray cluster.

Each run can be resumed, so a worker that is killed costs no more than the steps since its last checkpoint.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._jobs import Job, Progress, check_engine, open_engine, run_jobs
from joma._jobs.machine import threads
from joma._runs import Run, RunError
from joma._runs.config import check_config
from joma._runs.listing import standings
from joma._train.language import train
from joma._train.settings import Settings, check_whole

if TYPE_CHECKING:
    import pandas as pd

_PRELOAD = (
    "joma._train.language",
    "safetensors.torch",
    "torch._dynamo",
)  # the last by torch's optimizers: 5 s per run
_ATTEMPTS = 3  # how often the worker of a run may die before the sweep gives that run up


@dataclass(frozen=True)
class RunEnd:
    """How one run of a sweep ended."""

    path: Path
    status: str  # done, diverged, failed
    reason: str | None = None


def grid(base: Settings, choices: Mapping[str, Sequence[Any]]) -> dict[str, Settings]:
    """Folder name -> settings, for every combination; the name has what varies: "layers=2,lr=0.001"."""
    names = [name for name, values in choices.items() if len(values) > 1]
    runs: dict[str, Settings] = {}
    for combination in itertools.product(*choices.values()):
        chosen = dict(zip(choices, combination, strict=True))
        label = ",".join(f"{name}={chosen[name]:g}" if isinstance(chosen[name], float) else f"{name}={chosen[name]}"
                         for name in names)  # fmt: skip
        label = label.replace("/", "_") or "run"
        if label in runs:
            raise ValueError(
                f"two runs would share the folder {label!r}: give values that differ, and in six digits"
            )
        runs[label] = replace(base, **chosen)
        runs[label].checked()
    return runs


def sweep(
    runs: Mapping[str, Settings],
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    engine: str = "processes",
    address: str | None = None,
    retry: bool = False,
    checkpoint_every: int = 500,
    report: Callable[[RunEnd, int, int], None] = lambda end, n, total: None,
) -> list[RunEnd]:
    """Do every run that is not complete; one that fails does not stop the others.

    Arguments:
        runs: folder name -> settings, as `grid` gives them.
        out: the folder of the run folders.
        workers: how many runs at a time; each has its share of the cores, unless its settings say otherwise.
        engine: "processes" (of this machine; one worker is this process itself) or "ray".
        address: of a Ray cluster; a local one is started without.
        retry: also do again what failed before.
        checkpoint_every: steps between checkpoints.
        report: called with each run that has ended, how many have and how many there are.
    """
    if workers < 1:
        raise ValueError(f"at least one worker is needed, got {workers}")
    engine = check_engine(engine, address)
    check_whole("checkpoint_every", checkpoint_every)
    out = Path(out)
    infos = {name: _info(out / name) for name in runs}
    decided = {name: _decided(settings, infos[name], workers) for name, settings in runs.items()}
    for name, info in infos.items():  # all of them, before anything is done
        if info is not None:
            stored = {
                key: value for key, value in info["config"].items() if key in asdict(decided[name])
            }
            check_config(out / name, stored, asdict(decided[name]))
    ends: dict[str, RunEnd] = {}

    def take(name: str, end: RunEnd) -> None:
        ends[name] = end
        report(end, len(ends), len(runs))

    for name, info in infos.items():
        if info is not None and info["status"] in (
            "done",
            "diverged",
            *(() if retry else ("failed",)),
        ):
            take(name, RunEnd(out / name, info["status"], info.get("reason")))
    jobs = [
        Job(name, partial(_train_one, settings, out.absolute() / name, checkpoint_every))
        for name, settings in decided.items()
        if name not in ends
    ]
    options: dict[str, Any] = {"threads": threads(workers), "preload": _PRELOAD, "inline": True}
    if jobs:
        with open_engine(engine, workers, address, **options) as opened:
            for end in run_jobs(jobs, opened, attempts=_ATTEMPTS):
                take(
                    end.id,
                    RunEnd(out / end.id, *(("failed", end.error) if end.error else end.value)),
                )
    return [ends[name] for name in runs]


def _info(path: Path) -> dict[str, Any] | None:
    """What is known of the run in a folder; None if there is none that can be read."""
    try:
        return Run(path).info
    except (RunError, OSError):
        return None


def _decided(settings: Settings, info: Mapping[str, Any] | None, workers: int) -> Settings:
    """Settings with their number of threads: as asked, as the run began with, or a share of the cores."""
    begun = info["config"].get("threads") if info else None
    return replace(settings, threads=settings.threads or begun or threads(workers))


def _train_one(
    settings: Settings, path: Path, checkpoint_every: int, progress: Progress
) -> tuple[str, str | None]:
    """Status and reason of one run, done in a worker."""
    trained = train(settings, path, checkpoint_every=checkpoint_every, say=lambda message: None)
    return trained.info["status"], trained.info.get("reason")


def status(out: str | os.PathLike[str]) -> pd.DataFrame:
    """Return a table of the runs below a folder: status, steps, losses, entropy, phases, worst alert."""
    import pandas as pd

    columns = (
        "run", "status", "step", "steps", "loss", "valid_loss", "entropy", "phases", "alert", "reason",
    )  # fmt: skip
    return pd.DataFrame(standings(out), columns=list(columns))
