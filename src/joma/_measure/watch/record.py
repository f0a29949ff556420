"""The run folder that a watch writes; a temporary one if none is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from torch import nn

from joma._measure.gauges.registry import Gauge
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.phases import PHASES
from joma._measure.watch.readings import Reading
from joma._measure.watch.schedule import Every
from joma._runs import Run, RunError
from joma._runs.alerts import ALERTS
from joma._runs.explanation import EXPLANATION, Explanation, write_explanation
from joma._runs.folder import newest, numbered, plain, read_info
from joma._runs.long_table import LongTable
from joma._runs.patterns import Patterns, read_patterns, write_patterns
from joma._runs.state import Ending, Missing, missing_in_words, state_of
from joma._runs.writer import RunWriter, config_differences

RunFolder = str | os.PathLike[str]
Resume = bool | Literal["auto"]
_PHASES = "phases.jsonl"  # what phases and alarms are told from, per measurement


def axes_of(gauges: Sequence[Gauge], groups: int = 1) -> dict[str, list[str]]:
    """The axes of what a watch with these gauges writes; ``groups`` is how many learning rates there are."""
    axes = {g.name: g.axes for g in gauges}
    axes |= {"lr": ["group"], "tau": ["group"]} if groups > 1 else {}
    return axes | ({"phase": ["layer"]} if any(g.runs_model for g in gauges) else {})


def config_of(model: nn.Module, periods: Mapping[str, Every], *, probed: bool) -> dict[str, Any]:
    """What decides the outcome; a run is resumed with the same only."""
    told = {
        name: every
        if isinstance(every, (int, str))
        else getattr(every, "__qualname__", repr(every))
        for name, every in periods.items()
    }
    return {
        "model": type(_unwrapped(model)).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "every": told if len(set(told.values())) > 1 else next(iter(told.values())),
        "gauges": list(told),
        "measured on": "probe" if probed else "training batches",
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        inner = getattr(inner, "_orig_mod", inner)
        if inner is model:
            return model
        model = inner


def _alike(known: Sequence[float | None], found: Sequence[float | None]) -> bool:
    """Whether the levels of all layers are the same; one that was not seen this time may be anything."""
    pairs = [(a, b) for a, b in zip(known, found, strict=False) if a is not None and b is not None]
    return len(known) == len(found) and all(math.isclose(a, b, rel_tol=1e-3) for a, b in pairs)


class Record:
    """Writes what was measured; a full disk loses rows, and never stops the training.

    Attributes:
        writer: of the run folder.
        path: that folder as it was named, or with a number if the name was taken.
        last_step: the last step in the folder of a run that is resumed, until it goes on; else None.
        missing: measurements that could not be written, one entry for each time that there was no room.
    """

    def __init__(
        self, run: RunFolder | RunWriter | None, config: Mapping[str, Any], axes: Mapping[str, Sequence[str]],
        notices: Notices, overwrite: bool, resume: Resume,
    ) -> None:  # fmt: skip
        self._notices = notices
        self._lent = isinstance(run, RunWriter)
        self.last_step: int | None = None
        self.missing: list[Missing] = []
        self._is_failing = False  # the last measurement could not be written
        self._has_warned = False
        self._written_step: int | None = None  # the last one that was written by this watch
        self._pending: dict[str, list[str]] = {}  # file -> lines that wait for room on the disk
        self._problems: dict[str, OSError] = {}  # what could not be written so far -> the reason
        self._is_noted = True  # all facts are in `run.json`
        self.path: RunFolder
        self.writer: RunWriter
        if isinstance(run, RunWriter):
            self.writer = run
            self.path = run.path
            return
        try:
            self._open(run, config, axes, overwrite, resume)
        except OSError as error:
            if isinstance(error, RunError):  # a sentence already
                raise
            place = "a temporary folder" if run is None else os.fspath(run)
            raise RunError(
                f"cannot write a run to {place}: {error.strerror or error}; give run= a folder that can be written to"
            ) from None

    def _open(
        self, run: RunFolder | None, config: Mapping[str, Any], axes: Mapping[str, Sequence[str]], overwrite: bool,
        resume: Resume,
    ) -> None:  # fmt: skip
        """Create the run, or go on with the one in the folder."""
        if run is None:
            temporary = tempfile.mkdtemp(prefix="joma-watch-")
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            run = os.path.join(temporary, "run")
        elif not overwrite and has_run(run):
            old = (
                run
                if resume is True
                else _unfinished(Path(run), config)
                if resume == "auto"
                else None
            )
            if old is not None:
                self._resume(old, config)
                return
            run = self._number(run, config, resume)
        self.path = run
        self.writer = RunWriter.create(
            run,
            kind="watch",
            config=config,
            axes=axes,
            packages=("joma", "torch", "transformers"),
            overwrite=overwrite,
        )

    def _resume(self, run: RunFolder, config: Mapping[str, Any]) -> None:
        self.writer = RunWriter.resume(run, config)
        self.path = run
        self.last_step = max((row["step"] for row in Run(run).rows()), default=0)
        self.missing = list(self.writer.info.get("missing", []))

    def _number(self, run: RunFolder, config: Mapping[str, Any], resume: Resume) -> RunFolder:
        """Return the folder to write to instead of ``run``, which holds a run already, and warn."""
        following = numbered(Path(run), "watch")
        if following == Path(run):
            return run
        old = read_info(Path(run))
        state = f"{state_of(Path(run), old).status}, created {old.get('created')}"
        if resume == "auto":
            last = newest(Path(run))
            old = read_info(last)
            differences = config_differences(old["config"], config)
            reason = (
                f"its config is another one: {'; '.join(differences)}"
                if differences
                else "it came to its end"
            )
            way_out = f"resume='auto' did not go on with {last}, since {reason}"
        else:
            way_out = (
                "Training that was restarted goes on with its run by resume='auto' (or resume=True, however that run "
                "ended); overwrite=True replaces the old run"
            )
        self._notices.say(
            f"{os.fspath(run)} holds a run already ({state}): this one goes to {following}. {way_out}"
        )
        return following

    def go_on_from(self, step: int) -> bool:
        """The next row is of this step: a run that is resumed loses rows from there on. Was it resumed just now?"""
        resumed, self.last_step = self.last_step is not None, None
        if resumed:
            self.writer.drop_from(step)
            self.missing = [gap for gap in self.missing if gap["first"] < step]
            if changes := self.writer.info.get("changes"):
                self.note(changes=[change for change in changes if change["step"] < step])
            self._note_missing()
        return resumed

    def go_back_to(self, step: int) -> None:
        """Training goes back to a checkpoint of this step: rows of later steps are dropped when it goes on."""
        if self._written_step is not None and self._written_step > step:
            self.last_step = self._written_step

    def keep(self, reading: Reading) -> None:
        """Keep what phases and alarms are told from: a run that is resumed tells them again."""
        if not self._lent:
            self._append(_PHASES, [reading.to_json()])

    def write_alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Alerts have begun."""
        if alerts:
            self._append(ALERTS, [plain(alert) for alert in alerts])

    def kept(self, step: int) -> list[Reading]:
        """What was kept before this step; the rest, and a line that was cut off, is dropped. So are later alerts."""
        self._drop_from(ALERTS, lambda alert: alert["step"] < step)
        return [
            Reading.from_json(row) for row in self._drop_from(_PHASES, lambda row: row[0] < step)
        ]

    def drop_alerts(self, step: int) -> None:
        """Training goes on from a checkpoint: alerts of this step and later ones are not of it."""
        self._drop_from(ALERTS, lambda alert: alert["step"] < step)

    def _append(self, name: str, rows: Sequence[Any]) -> None:
        """Add lines to a file; if there is no room for them, they wait until there is."""
        lines = self._pending.setdefault(name, [])
        lines += [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
        try:
            append_whole(self.writer.path / name, "".join(lines))
        except OSError as error:
            self._problems[name] = error
        else:
            lines.clear()
            self._problems.pop(name, None)

    def _drop_from(self, name: str, stays: Callable[[Any], bool]) -> list[Any]:
        """The rows of a file up to the first that does not stay; that one and the rest are dropped."""
        self._append(name, [])
        path = self.writer.path / name
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not stays(row):
                break
            rows.append(row)
        if len(rows) < len(lines):
            os.truncate(
                path, len("".join(lines[: len(rows)]).encode())
            )  # needs no room, unlike writing it anew
        return rows

    def note_layers(
        self, names: Mapping[str, Sequence[str]], widths: Mapping[str, Sequence[int]]
    ) -> None:
        """Note which module each layer is, and how many heads or experts it has, by gauge."""
        layers = {gauge: list(modules) for gauge, modules in names.items()}
        if self.writer.info.get("layers") == layers:
            return
        axes = self.writer.info["axes"]
        heads = {}
        for gauge, counts in widths.items():
            # One number per layer says nothing, unless a layer has none.
            if len(axes.get(gauge, ())) > 1 or 0 in counts:
                heads[gauge] = list(counts)
        self.note(layers=layers, heads=heads, phases=list(PHASES))

    def note_matrices(self, matrices: Mapping[str, Sequence[str]]) -> None:
        """Which matrices weight gauges are measured on, by part."""
        names = {part: list(chosen) for part, chosen in matrices.items()}
        if self.writer.info.get("matrices") != names:
            self.note(matrices=names)

    def note_measured(self, ways: Sequence[str]) -> None:
        """What attention was measured on, and in which mode the model was; those of earlier steps stay."""
        known = self.writer.info.get("measured", [])
        if any(way not in known for way in ways):
            self.note(measured=[*known, *(way for way in ways if way not in known)])

    def note_change(self, step: int, changes: Sequence[str]) -> None:
        """The structure of the model has changed before this step."""
        earlier = [
            change for change in self.writer.info.get("changes", []) if change["step"] < step
        ]
        self.note(changes=[*earlier, {"step": step, "changes": list(changes)}])

    def note_uniform(self, levels: Sequence[float]) -> None:
        """The entropy that uniform attention would have, per layer; nothing is noted of one that varies."""
        found = [None if math.isnan(level) else round(level, 6) for level in levels]
        known = self.writer.info.get("uniform")
        if known is not None and (not known or _alike(known, found)):
            return
        self.note(uniform=found if known is None else [])

    def note(self, **facts: object) -> None:
        """Record facts about the run; if there is no room for them, they are recorded with the next ones."""
        try:
            self.writer.note(**facts)
        except OSError as error:
            self._is_noted = False
            self._problems["run.json"] = error
        else:
            self._is_noted = True
            self._problems.pop("run.json", None)

    def patterns(self) -> Patterns | None:
        """Those of the folder; None if there are none that can be read."""
        try:
            return read_patterns(self.writer.path)
        except (RunError, OSError) as error:
            self._notices.once("patterns", f"{error}; patterns begin anew")
            return None

    def write_patterns(self, patterns: Patterns) -> bool:
        """Put these in the place of those before; False if there was no room for them."""
        try:
            write_patterns(self.writer.path, patterns)
        except OSError as error:
            self._problems["patterns.json"] = error
            return False
        self._problems.pop("patterns.json", None)
        return True

    def write_explanation(self, explanation: Explanation) -> bool:
        """Replace the explanation in the folder; False if there was no room for it."""
        try:
            write_explanation(self.writer.path, explanation)
        except OSError as error:
            self._problems[EXPLANATION] = error
            return False
        self._problems.pop(EXPLANATION, None)
        return True

    def tell_once(self, key: str, message: str) -> None:
        """Say something about the run, once."""
        self._notices.once(key, message)

    def write(
        self,
        step: int,
        table: LongTable,
        columns: Mapping[str, float],
        names: Mapping[str, Sequence[str]],
        widths: Mapping[str, Sequence[int]],
    ) -> None:
        """Write the numbers of one step, with columns that they share."""
        self.note_layers(names, widths)
        try:
            self.writer.write(step, table, **columns)
        except OSError as error:
            self._miss(step, error)
            return
        self._is_failing = False
        self._written_step = step
        if not self._is_noted:
            self.note()
            self._note_missing()

    def _miss(self, step: int, error: OSError) -> None:
        """The measurements of this step could not be written."""
        if self._is_failing:
            self.missing[-1]["last"] = step
            self.missing[-1]["measurements"] += 1
        else:
            self.missing.append(
                {"first": step, "last": step, "measurements": 1, "reason": _reason(error)}
            )
        self._is_failing = True
        self._is_noted = False
        if not self._has_warned:
            self._has_warned = True
            self._notices.say(
                f"{self.writer.path} cannot be written ({_reason(error)}): the measurements of step {step:,} are "
                "lost, and those of later steps until it can be written again. Training goes on"
            )

    def _note_missing(self) -> None:
        """Record in `run.json` which measurements it lacks, if that has changed."""
        if self.missing != self.writer.info.get("missing", []):
            self.note(missing=self.missing)

    def finish(self, status: Ending, reason: str | None) -> None:
        """The run is over; one that was lent by the caller is the caller's to finish."""
        for name in list(self._pending):
            self._append(name, [])
        self._note_missing()
        lost = [missing_in_words(self.missing)] if self._has_warned else []
        if not self._lent:
            try:
                self.writer.finish(status, reason)
                self._problems.pop("run.json", None)
            except OSError as error:
                self._problems["run.json"] = error
        lost += [f"{name} ({_reason(error)})" for name, error in self._problems.items()]
        if lost:
            self._notices.say(f"{self.writer.path} lacks {'; '.join(lost)}")


def rows_of_step(
    measurement: Measurement,
    numbers: Mapping[str, Any],
    errors: Mapping[str, LongTable],
    phases: Sequence[int | None] | None,
) -> LongTable:
    """Return what is written of a measurement, in the order of the lines of the run.

    Arguments:
        measurement: the numbers of the gauges, and the loss.
        numbers: of the user and of the clock; one with the name of a gauge is left out.
        errors: standard errors of gauges.
        phases: the code of each layer's phase, None for a layer that is gone; None if no attention
            was measured.
    """
    alone = dict(numbers)
    if measurement.loss is not None:
        alone["loss"] = measurement.loss
    gauges = {*measurement.table.gauges, *errors}
    if phases is not None:
        gauges.add("phase")
    tables = []
    for name, value in alone.items():
        if name not in gauges:
            tables.append(LongTable.of_array(name, value, precision="float64"))
    tables += [measurement.table, *errors.values()]
    if phases is not None:
        tables.append(LongTable.per_layer("phase", phases, "integer"))
    return LongTable.join(tables)


def has_run(folder: RunFolder) -> bool:
    """True if the folder holds a run of any kind."""
    return os.path.exists(os.path.join(folder, "run.json"))


def _unfinished(path: Path, config: Mapping[str, Any]) -> Path | None:
    """Return the newest of ``path``, ``path``-2, … if it has this config and did not come to its end, else None."""
    last = newest(path)
    old = read_info(last)
    is_over = state_of(last, old).status == "done"
    if is_over or old["kind"] != "watch" or config_differences(old["config"], config):
        return None
    return last


def append_whole(path: Path, text: str) -> None:
    """Add text to a file; if that fails, the file is what it was: half a line would spoil the next one."""
    if not text:
        return
    data = text.encode()
    # Without a stream of Python, a line takes a third of the time.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
