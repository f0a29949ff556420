"""The run folder of a watch: a new one, one that is resumed, or the next with a number.

Nothing is lost without `overwrite`. A folder that holds a run already is resumed if the user asks
for it. Otherwise the new run goes to the folder with the next free number, with a warning.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from joma._measure.gauges.registry import Gauge
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.schedule import Every
from joma._runs import RunError
from joma._runs.config import config_differences
from joma._runs.folder import newest, numbered, read_info
from joma._runs.state import state_of
from joma._runs.writer import RunWriter

RunFolder = str | os.PathLike[str]
Resume = bool | Literal["auto"]

# Distributions whose versions a run records.
_PACKAGES = ("joma", "torch", "transformers")


@dataclass(frozen=True)
class OpenedRun:
    """A run that a watch writes.

    Attributes:
        writer: of the run.
        path: its folder, as the user named it, or with a number.
        is_resumed: True if the run was there before.
    """

    writer: RunWriter
    path: RunFolder
    is_resumed: bool = False


@dataclass(frozen=True)
class RunRequest:
    """What a watch asks for when it opens its run.

    Attributes:
        run: the folder; None for a temporary one; or a writer that the caller lends.
        config: what decides the outcome. A run is resumed with the same only.
        axes: gauge -> the names of the axes of its values.
        overwrite: True to replace the run in the folder.
        resume: True to resume the run in the folder; "auto" to do so if it has not ended.
    """

    run: RunFolder | RunWriter | None
    config: Mapping[str, Any]
    axes: Mapping[str, Sequence[str]]
    overwrite: bool = False
    resume: Resume = False

    def open(self, notices: Notices) -> OpenedRun:
        """Create the run or resume it.

        Raises:
            RunError: the folder cannot be written to, or holds something else.
        """
        if isinstance(self.run, RunWriter):
            return OpenedRun(self.run, self.run.path)
        try:
            if self.run is None:
                return self._create_temporary()
            return self._open_folder(self.run, notices)
        except RunError:
            raise
        except OSError as error:
            place = "a temporary folder"
            if self.run is not None:
                place = os.fspath(self.run)
            raise RunError(
                f"cannot write a run to {place}: {error.strerror or error}; give run= a folder "
                "that can be written to"
            ) from None

    def _create_temporary(self) -> OpenedRun:
        temporary = tempfile.mkdtemp(prefix="joma-watch-")
        opened = self._create(os.path.join(temporary, "run"))
        weakref.finalize(opened.writer, shutil.rmtree, temporary, ignore_errors=True)
        return opened

    def _open_folder(self, run: RunFolder, notices: Notices) -> OpenedRun:
        if self.overwrite or not has_run(run):
            return self._create(run)
        if self.resume is True:
            return self._resume(run)
        if self.resume == "auto":
            unfinished = self._find_unfinished(Path(run))
            if unfinished is not None:
                return self._resume(unfinished)
        return self._create(self._next_folder(run, notices))

    def _create(self, run: RunFolder) -> OpenedRun:
        writer = RunWriter.create(
            run,
            kind="watch",
            config=self.config,
            axes=self.axes,
            packages=_PACKAGES,
            overwrite=self.overwrite,
        )
        return OpenedRun(writer, run)

    def _resume(self, run: RunFolder) -> OpenedRun:
        return OpenedRun(RunWriter.resume(run, self.config), run, is_resumed=True)

    def _find_unfinished(self, path: Path) -> Path | None:
        """Return the newest of ``path``, ``path``-2, … if it has this config and has not ended."""
        last = newest(path)
        old = read_info(last)
        is_over = state_of(last, old).status == "done"
        if is_over or old["kind"] != "watch" or config_differences(old["config"], self.config):
            return None
        return last

    def _next_folder(self, run: RunFolder, notices: Notices) -> RunFolder:
        """Return the folder to write to instead of ``run``, which holds a run, and warn."""
        following = numbered(Path(run), "watch")
        if following == Path(run):
            return run
        old = read_info(Path(run))
        state = f"{state_of(Path(run), old).status}, created {old.get('created')}"
        notices.say(
            f"{os.fspath(run)} holds a run already ({state}): this one goes to {following}. "
            f"{self._explain_resume(Path(run))}"
        )
        return following

    def _explain_resume(self, path: Path) -> str:
        """Return how to go on with the run that is there, or why that was not done."""
        if self.resume != "auto":
            return (
                "Training that was restarted goes on with its run by resume='auto' (or "
                "resume=True, however that run ended); overwrite=True replaces the old run"
            )
        last = newest(path)
        differences = config_differences(read_info(last)["config"], self.config)
        reason = "it came to its end"
        if differences:
            reason = f"its config is another one: {'; '.join(differences)}"
        return f"resume='auto' did not go on with {last}, since {reason}"


def has_run(folder: RunFolder) -> bool:
    """Return True if the folder holds a run of any kind."""
    return os.path.exists(os.path.join(folder, "run.json"))


def axes_of(gauges: Sequence[Gauge], groups: int = 1) -> dict[str, list[str]]:
    """Return the axes of what a watch with these gauges writes.

    ``groups`` is the number of learning rates.
    """
    axes = {gauge.name: gauge.axes for gauge in gauges}
    if groups > 1:
        axes["lr"] = ["group"]
        axes["tau"] = ["group"]
    if any(gauge.runs_model for gauge in gauges):
        axes["phase"] = ["layer"]
    return axes


def config_of(
    model: nn.Module, periods: Mapping[str, Every], *, is_probed: bool, queries: int | None = None
) -> dict[str, Any]:
    """Return what decides the outcome of a watch.

    Arguments:
        model: the model.
        periods: gauge -> its schedule.
        is_probed: True if a probe is measured instead of the training batches.
        queries: how many queries are sampled per pass; None if all are measured.
    """
    schedules = {gauge: _schedule_in_json(every) for gauge, every in periods.items()}
    every: Any = schedules
    if len(set(schedules.values())) == 1:
        every = next(iter(schedules.values()))
    measured_on = "training batches"
    if is_probed:
        measured_on = "probe"
    config = {
        "model": type(_unwrapped(model)).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "every": every,
        "gauges": list(schedules),
        "measured on": measured_on,
    }
    if queries is not None:
        config["queries"] = queries
    return config


def _schedule_in_json(every: Every) -> int | str:
    """Return a schedule as it is recorded: a function of the user by its name."""
    if isinstance(every, (int, str)):
        return every
    return str(getattr(every, "__qualname__", repr(every)))


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while True:
        inner = model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        inner = getattr(inner, "_orig_mod", inner)
        if inner is model:
            return model
        model = inner
