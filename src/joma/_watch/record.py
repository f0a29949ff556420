"""The run folder that a watch writes; a temporary one if none is named."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from joma._gauges.registry import Gauge
from joma._run import Run, RunError
from joma._run.alerts import ALERTS
from joma._run.folder import numbered, plain, read_info
from joma._run.patterns import Patterns, read_patterns, write_patterns
from joma._run.writer import RunWriter
from joma._watch.notices import Notices, tell
from joma._watch.phases import PHASES
from joma._watch.readings import Reading
from joma._watch.schedule import Every

RunFolder = str | os.PathLike[str]
_PHASES = "phases.jsonl"  # what phases and alarms are told from, per measurement


def axes_of(gauges: Sequence[Gauge], groups: int = 1) -> dict[str, list[str]]:
    """The axes of what a watch with these gauges writes; ``groups`` is how many learning rates there are."""
    axes = {g.name: g.axes for g in gauges}
    axes |= {"lr": ["group"], "tau": ["group"]} if groups > 1 else {}
    return axes | ({"phase": ["layer"]} if any(g.runs_model for g in gauges) else {})


def config_of(model: nn.Module, periods: Mapping[str, Every], *, probed: bool) -> dict[str, Any]:
    """What decides the outcome; a run is resumed with the same only."""
    told = {
        name: every if isinstance(every, (int, str)) else getattr(every, "__qualname__", repr(every))
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
        last_step: the last one in the folder of a run that is resumed, until it goes on; else None.
    """

    def __init__(
        self, run: RunFolder | RunWriter | None, config: Mapping[str, Any], axes: Mapping[str, Sequence[str]],
        notices: Notices, overwrite: bool, resume: bool,
    ) -> None:  # fmt: skip
        self._notices, self._lent = notices, isinstance(run, RunWriter)
        self.last_step: int | None = None
        self.path: RunFolder
        if isinstance(run, RunWriter):
            self.writer, self.path = run, run.path
            return
        if run is None:
            temporary = tempfile.mkdtemp(prefix="joma-watch-")
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            run = os.path.join(temporary, "run")
        elif resume and os.path.exists(os.path.join(run, "run.json")):
            self.writer, self.path = RunWriter.resume(run, config), run
            self.last_step = max((row["step"] for row in Run(run).rows()), default=0)
            return
        elif not overwrite and (following := numbered(Path(run), "watch")) != Path(run):
            old = read_info(Path(run))
            tell(
                f"{os.fspath(run)} holds a run already ({old['status']}, of {old.get('created')}): this one goes to "
                f"{following}; resume=True goes on with the old one, overwrite=True replaces it"
            )
            run = following
        self.path = run
        self.writer = RunWriter.create(
            run,
            kind="watch",
            config=config,
            axes=axes,
            packages=("joma", "torch", "transformers"),
            overwrite=overwrite,
        )

    def go_on_from(self, step: int) -> bool:
        """The next row is of this step: a run that is resumed loses rows from there on. Was it resumed just now?"""
        resumed, self.last_step = self.last_step is not None, None
        if resumed:
            self.writer.drop_from(step)
        return resumed

    def keep(self, reading: Reading) -> None:
        """Keep what phases and alarms are told from: a run that is resumed tells them again."""
        if not self._lent:
            self._append(_PHASES, [reading.to_json()], "phases")

    def write_alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Alerts have begun."""
        if alerts:
            self._append(ALERTS, [plain(alert) for alert in alerts], "alerts")

    def kept(self, step: int) -> list[Reading]:
        """What was kept before this step; the rest, and a line that was cut off, is dropped. So are later alerts."""
        self._drop_from(ALERTS, lambda alert: alert["step"] < step)
        return [Reading.from_json(row) for row in self._drop_from(_PHASES, lambda row: row[0] < step)]

    def drop_alerts(self, step: int) -> None:
        """Training goes on from a checkpoint: alerts of this step and later ones are not of it."""
        self._drop_from(ALERTS, lambda alert: alert["step"] < step)

    def _append(self, name: str, rows: Sequence[Any], what: str) -> None:
        try:
            with (self.writer.path / name).open("a", encoding="utf-8") as stream:
                stream.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            self._lost(error, f"{what} may be")

    def _drop_from(self, name: str, stays: Callable[[Any], bool]) -> list[Any]:
        """The rows of a file up to the first that does not stay; that one and the rest are dropped."""
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
            path.write_text("".join(lines[: len(rows)]), encoding="utf-8")
        return rows

    def note_layers(self, names: Mapping[str, Sequence[str]], heads: Mapping[str, Sequence[int]]) -> None:
        """Which module each layer is, and how many heads it has, by gauge."""
        layers = {gauge: list(modules) for gauge, modules in names.items()}
        if self.writer.info.get("layers") != layers:
            self.writer.note(layers=layers, heads=dict(heads), phases=list(PHASES))

    def note_uniform(self, levels: Sequence[float]) -> None:
        """The entropy that uniform attention would have, per layer; nothing is noted of one that varies."""
        found = [None if math.isnan(level) else round(level, 6) for level in levels]
        known = self.writer.info.get("uniform")
        if known is not None and (not known or _alike(known, found)):
            return
        try:
            self.writer.note(uniform=found if known is None else [])
        except OSError as error:
            self._lost(error, "facts about the run are")

    def patterns(self) -> Patterns | None:
        """Those of the folder; None if there are none that can be read."""
        try:
            return read_patterns(self.writer.path)
        except (RunError, OSError) as error:
            self._notices.once("patterns", f"{error}; patterns begin anew")
            return None

    def write_patterns(self, patterns: Patterns) -> None:
        """Put these in the place of those before."""
        try:
            write_patterns(self.writer.path, patterns)
        except OSError as error:
            self._lost(error, "attention patterns are")

    def tell_once(self, key: str, message: str) -> None:
        """Say something about the run, once."""
        self._notices.once(key, message)

    def _lost(self, error: OSError, what: str) -> None:
        self._notices.once("disk", f"{self.writer.path}: {error}; training goes on, {what} lost meanwhile")

    def write(
        self, step: int, rows: Mapping[str, Any], columns: Mapping[str, float], names: Mapping[str, Sequence[str]],
        heads: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        """The rows of one step, with columns that they share."""
        try:
            self.note_layers(names, heads)
            self.writer.write(step, dict(rows), **columns)
        except OSError as error:
            self._lost(error, "measurements are")

    def finish(self, status: str, reason: str | None) -> None:
        """The run is over; one that was lent by the caller is the caller's to finish."""
        if self._lent:
            return
        try:
            self.writer.finish("done" if status == "done" else "failed", reason)
        except OSError as error:
            self._notices.once("disk", f"the run {self.writer.path} could not be finished: {error}")
