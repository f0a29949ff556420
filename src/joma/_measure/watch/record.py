"""What a watch writes to its run folder. A full disk loses rows, and never stops the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.line_files import LineFiles
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.phases import PHASES
from joma._measure.watch.readings import Reading
from joma._measure.watch.run_request import RunFolder, RunRequest
from joma._runs import Run, RunError
from joma._runs.alerts import ALERTS
from joma._runs.explanation import EXPLANATION, Explanation, write_explanation
from joma._runs.files import plain
from joma._runs.folder import RUN
from joma._runs.long_table import LongTable
from joma._runs.patterns import Patterns, read_patterns, write_patterns
from joma._runs.state import Ending, Missing, missing_in_words
from joma._runs.writer import RunWriter

# Readings of phases and alarms, one per measurement.
READINGS = "phases.jsonl"

# Uniform attention over the same number of keys has the same entropy up to this share.
_SAME_ENTROPY = 1e-3


class Record:
    """The run folder of a watch, and what could not be written to it.

    Arguments:
        request: which folder is opened, and how.
        notices: takes messages to the user.

    Attributes:
        writer: of the run folder.
        path: that folder as it was named, or with a number if the name was taken.
        last_step: the last step in the folder of a run that is resumed, until it goes on; else None.
        missing: gaps: measurements that could not be written.
    """

    def __init__(self, request: RunRequest, notices: Notices) -> None:
        self._notices = notices
        # The caller finishes a run that it lends, and resumes it.
        self._is_lent = isinstance(request.run, RunWriter)
        opened = request.open(notices)
        self.writer: RunWriter = opened.writer
        self.path: RunFolder = opened.path
        self.last_step: int | None = None
        self.missing: list[Missing] = []
        if opened.is_resumed:
            self.last_step = max((row["step"] for row in Run(opened.path).rows()), default=0)
            self.missing = list(self.writer.info.get("missing", []))
        self._problems: dict[str, OSError] = {}  # file -> why it cannot be written now
        self._lines = LineFiles(self.writer.path, self._problems)
        self._is_noted = True  # all facts are in `run.json`
        self._is_failing = False  # the last measurement could not be written
        self._has_warned = False
        self._written_step: int | None = None  # the last one that was written by this watch

    def _try(self, name: str, write: Callable[[], object]) -> bool:
        """Write a file; return False if it cannot be written, which `finish` reports."""
        try:
            write()
        except OSError as error:
            self._problems[name] = error
            return False
        self._problems.pop(name, None)
        return True

    # A run that is resumed

    def go_on_from(self, step: int) -> bool:
        """Drop rows of ``step`` and later ones if the run was resumed; return True if it was."""
        if self.last_step is None:
            return False
        self.last_step = None
        self.writer.drop_from(step)
        self.missing = [gap for gap in self.missing if gap["first"] < step]
        changes = self.writer.info.get("changes")
        if changes:
            self.note(changes=[change for change in changes if change["step"] < step])
        self._note_missing()
        return True

    def go_back_to(self, step: int) -> None:
        """Drop rows of later steps when training goes on, from a checkpoint of this step."""
        if self._written_step is not None and self._written_step > step:
            self.last_step = self._written_step

    # Readings and alerts

    def write_reading(self, reading: Reading) -> None:
        """Write what phases and alarms look at; a run that is resumed judges it again."""
        if not self._is_lent:
            self._lines.append(READINGS, [reading.to_json()])

    def write_alerts(self, alerts: Sequence[Mapping[str, Any]]) -> None:
        """Write the alerts that have begun."""
        if alerts:
            self._lines.append(ALERTS, [plain(alert) for alert in alerts])

    def cut_readings(self, step: int) -> list[Reading]:
        """Drop readings and alerts of ``step`` and later ones; return the readings before."""
        self.cut_alerts(step)
        rows = self._lines.cut(READINGS, lambda row: row[0] < step)
        return [Reading.from_json(row) for row in rows]

    def cut_alerts(self, step: int) -> None:
        """Drop alerts of ``step`` and later ones."""
        self._lines.cut(ALERTS, lambda alert: alert["step"] < step)

    # Facts in `run.json`

    def note(self, **facts: object) -> None:
        """Note facts about the run; without room on the disk, they are noted with the next ones."""
        self._is_noted = self._try(RUN, lambda: self.writer.note(**facts))

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
        """Note which matrices weight gauges are measured on, by part."""
        names = {part: list(chosen) for part, chosen in matrices.items()}
        if self.writer.info.get("matrices") != names:
            self.note(matrices=names)

    def note_measured(self, ways: Sequence[str]) -> None:
        """Note what attention was measured on, and in which mode; those of earlier steps stay."""
        noted = list(self.writer.info.get("measured", []))
        new = [way for way in ways if way not in noted]
        if new:
            self.note(measured=[*noted, *new])

    def note_change(self, step: int, changes: Sequence[str]) -> None:
        """Note that the structure of the model has changed before this step."""
        noted = self.writer.info.get("changes", [])
        earlier = [change for change in noted if change["step"] < step]
        self.note(changes=[*earlier, {"step": step, "changes": list(changes)}])

    def note_uniform(self, entropies: Sequence[float]) -> None:
        """Note the entropy that uniform attention would have, per layer.

        Entropies that vary during training say nothing: an empty list is noted.
        """
        noted = self.writer.info.get("uniform")
        if noted == []:
            return
        rounded: list[float | None] = []
        for entropy in entropies:
            if math.isnan(entropy):
                rounded.append(None)
            else:
                rounded.append(round(entropy, 6))
        if noted is None:
            self.note(uniform=rounded)
        elif not _are_alike(noted, rounded):
            self.note(uniform=[])

    def _note_missing(self) -> None:
        """Note which measurements the run lacks, if that has changed."""
        if self.missing != self.writer.info.get("missing", []):
            self.note(missing=self.missing)

    # Patterns and the explanation

    def read_patterns(self) -> Patterns | None:
        """Return the patterns in the folder; None if there are none that can be read."""
        try:
            return read_patterns(self.writer.path)
        except (RunError, OSError) as error:
            self._notices.once("patterns", f"{error}; patterns begin anew")
            return None

    def write_patterns(self, patterns: Patterns) -> bool:
        """Replace the patterns in the folder; return False if there was no room for them."""
        return self._try("patterns.json", lambda: write_patterns(self.writer.path, patterns))

    def write_explanation(self, explanation: Explanation) -> bool:
        """Replace the explanation in the folder; return False if there was no room for it."""
        return self._try(EXPLANATION, lambda: write_explanation(self.writer.path, explanation))

    def report_once(self, key: str, message: str) -> None:
        """Report something about the run, once."""
        self._notices.once(key, message)

    # Numbers

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
        """Count a measurement that could not be written; the first one is a warning."""
        reason = _reason(error)
        if self._is_failing:
            self.missing[-1]["last"] = step
            self.missing[-1]["measurements"] += 1
        else:
            gap: Missing = {"first": step, "last": step, "measurements": 1, "reason": reason}
            self.missing.append(gap)
        self._is_failing = True
        self._is_noted = False
        if not self._has_warned:
            self._has_warned = True
            self._notices.say(
                f"{self.writer.path} cannot be written ({reason}): the measurements of step "
                f"{step:,} are lost, and those of later steps until it can be written again. "
                "Training goes on"
            )

    # The end

    def finish(self, status: Ending, reason: str | None) -> None:
        """Finish the run, and report what it lacks."""
        self._lines.append_waiting()
        self._note_missing()
        lost = []
        if self._has_warned:
            lost.append(missing_in_words(self.missing))
        if not self._is_lent:
            self._try(RUN, lambda: self.writer.finish(status, reason))
        for name, error in self._problems.items():
            lost.append(f"{name} ({_reason(error)})")
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


def _are_alike(noted: Sequence[float | None], measured: Sequence[float | None]) -> bool:
    """Return True if the entropies of all layers agree. A layer that did not run may have any."""
    if len(noted) != len(measured):
        return False
    for before, now in zip(noted, measured, strict=True):
        if before is None or now is None:
            continue
        if not math.isclose(before, now, rel_tol=_SAME_ENTROPY):
            return False
    return True


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
