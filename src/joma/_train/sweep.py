"""Many runs: a grid of settings, each run in its own folder, on this machine or on a Ray cluster.

Each run can be resumed, so a worker that is killed costs no more than the steps since its last checkpoint: what is not
complete is simply started again.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._jobs.cluster import ray_backend
from joma._jobs.machine import threads
from joma._run import Run, RunError, RunInUse
from joma._run.writer import check_config
from joma._train.language import train
from joma._train.settings import Settings, check_whole

if TYPE_CHECKING:
    import pandas as pd

_ATTEMPTS = 3  # how often the worker of a run may die before the sweep gives that run up
_RUNNING = ".running"  # a folder with a file for each run that a worker is at


@dataclass(frozen=True)
class Outcome:
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
            raise ValueError(f"two runs would share the folder {label!r}: give values that differ, and in six digits")
        runs[label] = replace(base, **chosen)
        runs[label].checked()
    return runs


def sweep(
    runs: Mapping[str, Settings],
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    engine: str = "loky",
    address: str | None = None,
    retry: bool = False,
    checkpoint_every: int = 500,
    report: Callable[[Outcome, int, int], None] = lambda outcome, n, total: None,
) -> list[Outcome]:
    """Do every run that is not complete; one that fails does not stop the others.

    Arguments:
        runs: folder name -> settings, as `grid` gives them.
        out: the folder of the run folders.
        workers: how many runs at a time; each has its share of the cores, unless its settings say otherwise.
        engine: "loky" (processes on this machine) or "ray".
        address: of a Ray cluster; a local one is started without.
        retry: also do again what failed before.
        checkpoint_every: steps between checkpoints.
        report: told of each outcome, with how many there are and are to be.
    """
    if workers < 1:
        raise ValueError(f"at least one worker is needed, got {workers}")
    if engine not in ("loky", "ray"):
        raise ValueError(f"unknown engine {engine!r}: loky or ray")
    check_whole("checkpoint_every", checkpoint_every)
    out = Path(out)
    infos = {name: _info(out / name) for name in runs}
    left = {name: _decided(settings, infos[name], workers) for name, settings in runs.items()}
    for name, info in infos.items():  # all of them, before anything is done
        if info is not None:
            stored = {key: value for key, value in info["config"].items() if key in asdict(left[name])}
            check_config(out / name, stored, asdict(left[name]))
    outcomes: dict[str, Outcome] = {}

    def take(name: str, outcome: Outcome) -> None:
        outcomes[name] = outcome
        report(outcome, len(outcomes), len(runs))

    for name, info in infos.items():
        if info is not None and info["status"] in ("done", "diverged", *(() if retry else ("failed",))):
            take(name, Outcome(out / name, info["status"], info.get("reason")))
    deaths: Counter[str] = Counter()
    while left := {name: settings for name, settings in left.items() if name not in outcomes}:
        _clear_marks(out, left)
        try:
            for name, outcome in _parallel(left, out, workers, engine, address, checkpoint_every):
                take(name, outcome)
        except Exception as error:
            if not _is_dead_worker(error):
                raise
            unfinished = [name for name in left if name not in outcomes]
            died = [name for name in unfinished if (out / _RUNNING / name).exists()]
            deaths.update(died or unfinished)
            for name in unfinished:
                if deaths[name] >= _ATTEMPTS:
                    reason = f"its worker died {deaths[name]} times ({type(error).__name__})"
                    take(name, Outcome(out / name, "failed", reason))
        finally:
            _clear_marks(out, left)
    return [outcomes[name] for name in runs]


def _info(path: Path) -> dict[str, Any] | None:
    """What is known of the run in a folder; None if there is none that can be read."""
    try:
        return Run(path).info
    except (RunError, OSError):
        return None


def _clear_marks(out: Path, names: Iterable[str]) -> None:
    for name in names:
        (out / _RUNNING / name).unlink(missing_ok=True)
    with suppress(OSError):  # not there, or another sweep has marks in it
        (out / _RUNNING).rmdir()


def _decided(settings: Settings, info: Mapping[str, Any] | None, workers: int) -> Settings:
    """Settings with their number of threads: as asked, as the run began with, or a share of the cores."""
    begun = info["config"].get("threads") if info else None
    return replace(settings, threads=settings.threads or begun or threads(workers))


def _parallel(
    runs: Mapping[str, Settings], out: Path, workers: int, engine: str, address: str | None, checkpoint_every: int
) -> Iterator[tuple[str, Outcome]]:
    from joblib import Parallel, delayed

    work = [
        (name, asdict(settings), str(out / name), str(out / _RUNNING / name), checkpoint_every)
        for name, settings in runs.items()
    ]
    tasks = [delayed(_one)(*arguments) for arguments in work]
    if engine == "loky" and workers == 1:
        yield from (_one(*arguments) for arguments in work)
    elif engine == "loky":
        yield from Parallel(n_jobs=workers, return_as="generator_unordered")(tasks)
    else:
        with ray_backend(address):
            yield from Parallel(n_jobs=workers)(tasks)


def _one(name: str, settings: dict[str, Any], path: str, mark: str, checkpoint_every: int) -> tuple[str, Outcome]:
    """One run, in a worker: whatever happens is an outcome. The mark is left behind if the process is killed."""
    try:
        Path(mark).parent.mkdir(parents=True, exist_ok=True)
        Path(mark).touch()
        run = train(Settings(**settings), path, checkpoint_every=checkpoint_every, say=lambda message: None)
        return name, Outcome(Path(path), run.info["status"], run.info.get("reason"))
    except RunInUse as error:
        return name, Outcome(Path(path), "failed", str(error))
    except Exception as error:
        return name, Outcome(Path(path), "failed", f"{type(error).__name__}: {error}")
    finally:
        Path(mark).unlink(missing_ok=True)


def _is_dead_worker(error: Exception) -> bool:
    # by name: neither loky's nor Ray's exceptions need be importable here
    dead = {"TerminatedWorkerError", "BrokenProcessPool", "WorkerCrashedError", "ActorDiedError", "RayActorError"}
    return any(kind.__name__ in dead for kind in type(error).__mro__)


def status(out: str | os.PathLike[str]) -> pd.DataFrame:
    """A table of the runs below a folder: what varies, status, steps, losses, entropy, phases."""
    import pandas as pd

    out = Path(out)
    found = sorted(path.parent for path in out.glob("*/run.json"))
    if not found:
        raise RunError(f"there are no runs in {out}")
    rows = []
    for path in found:
        run = Run(path)
        info = run.info
        row: dict[str, Any] = {"run": path.name, "status": info["status"], "steps": info["config"].get("steps")}
        table = run.latest()
        means = table.groupby("gauge").value.mean()
        row |= {gauge: means.get(gauge) for gauge in ("loss", "valid_loss", "entropy")}
        row["step"] = table.step.max() if len(table) else None
        row["phases"] = " ".join(info["phases"][int(code)] for code in table[table.gauge == "phase"].value)
        row["reason"] = info.get("reason")
        rows.append(row)
    columns = ["run", "status", "step", "steps", "loss", "valid_loss", "entropy", "phases", "reason"]
    return pd.DataFrame(rows, columns=columns)
