"""The loop of a watch: what happens at each step of a training.

A step has three parts. Before it, `WatchLoop.arm` asks the schedule which gauges are due, and the
instruments listen to the model if one of them needs it. During it, the meters' observers see the
passes of the model and the steps of its optimisers. After it, `WatchLoop.step` collects what the
meters measured, judges it and writes it to the run folder.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from joma._measure.events.optimiser import distinct_rates
from joma._measure.gauges.kinds import BLOCK
from joma._measure.watch import applicability
from joma._measure.watch.alarms.not_finite import find_not_finite
from joma._measure.watch.alarms.notices import Notices, silent, warn
from joma._measure.watch.clock import Clock
from joma._measure.watch.display import LiveLine
from joma._measure.watch.failures import Failures
from joma._measure.watch.follower import Follower
from joma._measure.watch.instruments import Instruments
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.meters import MeterProblem, MeterResult
from joma._measure.watch.options import WatchOptions
from joma._measure.watch.patterns import PatternKeeper, check_patterns
from joma._measure.watch.phases import PHASES
from joma._measure.watch.processes import Processes
from joma._measure.watch.readings import Finding, LayerReading, take_layers, take_uniform
from joma._measure.watch.record import Record, rows_of_step
from joma._measure.watch.run_request import RunRequest, axes_of, config_of
from joma._measure.watch.schedule import Schedule
from joma._measure.watch.step_arguments import StepArguments, to_float
from joma._measure.watch.supervisor import Supervisor
from joma._measure.watch.watch_explanation import WatchExplanation
from joma._runs import Run
from joma._runs.long_table import LongTable
from joma._runs.state import Ending
from joma._runs.writer import RunWriter

_log = logging.getLogger("joma")


class WatchLoop:
    """Everything behind a `Watch`.

    Attributes:
        path: the run folder, if there is one.
        instruments: the meters, and what they listen to.
        supervisor: phases and alarms.
        record: the run folder's writer.
        clock: learning rates, and the clock τ.
        notices: messages to the user.
        explanation: what was seen so far.
        latest: the last measurement; None before the first.
    """

    def __init__(self, model: nn.Module, options: WatchOptions) -> None:
        self._processes = Processes(model, options.processes)
        give = silent
        if self._processes.is_first:
            give = warn
        self.notices = Notices(give)
        has_patterns = check_patterns(options.patterns, options.words, options.probe is not None)
        self._patterns = PatternKeeper(options.words, has_patterns and self._processes.is_first)
        self.instruments = Instruments(model, options, self._processes, [self._patterns])
        self._watched = self.instruments.watched
        self._schedule = Schedule(self._watched.periods)
        self._failures = Failures(self.notices, self._schedule)
        self.path: str | os.PathLike[str] | None = None
        self.record = self._open_record(options)
        self.supervisor = Supervisor(self.record, self.notices, options.on_alert)
        self._follower = Follower(self.instruments, self.record, self.notices)
        self.explanation = WatchExplanation(self.instruments, options.mlp)
        self.latest: Measurement | None = None
        self._is_restored = False  # from a state
        self._has_stepped = False  # since it was made, or restored
        self._has_refused_step = False
        self._continue_record()
        self._note_facts()
        self.instruments.attach(self.place)
        has_groups = "lr" in self.record.writer.info["axes"]
        self.clock = Clock(self.instruments.steps, has_groups, self.notices)
        self._line = self._make_line(options.live)
        self._log_matrices()

    # Its beginning

    def _open_record(self, options: WatchOptions) -> Record:
        config = config_of(
            self._watched.model,
            self._watched.periods,
            is_probed=self.instruments.is_probed,
            queries=options.queries,
        )
        axes = axes_of(self._watched.gauges, distinct_rates(self._watched.optimizers))
        axes |= self.instruments.axes
        request = RunRequest(options.run, config, axes, options.overwrite, options.resume)
        if options.run is None or isinstance(options.run, RunWriter):
            return Record(request, self.notices)
        folder = self._processes.folder(options.run)
        if not self._processes.is_first:
            # The first process writes the run. What this one has goes to a temporary folder.
            self.path = folder
            return Record(replace(request, run=None), self.notices)
        record = Record(replace(request, run=folder), self.notices)
        self.path = record.path
        return record

    def _continue_record(self) -> None:
        """Go on where a run that is resumed was left."""
        last_step = self.record.last_step
        if last_step is not None:
            self._schedule.go_on_from(last_step)
            self.supervisor.replay(self.record.cut_readings(last_step + 1))

    def _note_facts(self) -> None:
        self.record.note_layers(self.instruments.names, self.instruments.widths)
        self.record.note_matrices(self._watched.matrix_names)
        if self.instruments.largest:
            self.record.note(largest=self.instruments.largest)

    def _make_line(self, is_wanted: bool | None) -> LiveLine | None:
        if is_wanted is None:
            is_wanted = sys.stderr.isatty()
        if not is_wanted or self._processes.rank != 0:
            return None
        return LiveLine(self._watched.describe_matrices())

    def _log_matrices(self) -> None:
        """Log which matrices weight gauges are measured on: not a warning, since nothing is wrong."""
        words = self._watched.describe_matrices()
        if words and self._processes.is_first:
            _log.info(words)

    # What it knows

    @property
    def last_step(self) -> int:
        """The number of the last step that was made."""
        return self._schedule.step

    @property
    def layers(self) -> list[str]:
        """Names of the attention layers, by number."""
        return self._watched.layers.names

    @property
    def matrices(self) -> dict[str, list[str]]:
        """Part -> names of the matrices that weight gauges are measured on."""
        return self._watched.matrix_names

    @property
    def place(self) -> str:
        """The run folder in words."""
        if self.path is None:
            return "no run folder"
        return f"run {self.path}"

    def read_run(self) -> Run:
        """Return the run in the folder."""
        return Run(self.record.writer.path)

    def describe_premises(self) -> str:
        """Return how far JoMA's premises hold for this model so far; "" without block gauges."""
        if self.latest is None or not self.instruments.has_kind(BLOCK):
            return ""
        return applicability.sentence(self.read_run().frame())

    # A step

    def arm(self) -> None:
        """Listen to the model and its optimisers if the step to come is due."""
        self.instruments.begin_step(self.last_step + 1)
        due: Collection[str] = ()
        try:
            due = self._schedule.arm()
        finally:
            # Nothing is due if the user's schedule raises, and the model must be left alone.
            self.instruments.listen_for(due)

    def step(self, arguments: StepArguments) -> dict[str, float]:
        """Take a step that was made, measure it if it is due, and make ready for the next one."""
        metrics: dict[str, float] = {}
        try:
            with self._failures.reported("the measurement"):
                metrics = self._take_step(arguments)
        finally:
            with self._failures.reported("the preparation of the next step"):
                self.instruments.clear()
                self.arm()
        return metrics

    def _take_step(self, arguments: StepArguments) -> dict[str, float]:
        before = self.last_step
        number = arguments.number
        if number is not None and self._has_stepped and number <= before:
            self._refuse_step(number)
            return {}
        self._has_stepped = True
        due = self._schedule.advance(number)
        before = self._continue_run(before)
        rate = None
        if arguments.rate is not None:
            rate = to_float(arguments.rate)
        self.clock.advance(rate, before, self.last_step)
        if due:
            return self._measure(arguments, due)
        # Processes that are measured together agree on a loss in measured steps only.
        if arguments.loss is not None and not self._processes.is_joint:
            self.supervisor.take_loss(self.last_step, arguments.loss)
        return {}

    def _refuse_step(self, number: int) -> None:
        """Leave out a step whose number does not increase: rows of a run are in the order of steps."""
        if self._has_refused_step:
            return
        self._has_refused_step = True
        self.notices.say(
            f"step {number:,} was given after step {self.last_step:,}: steps must increase, so it "
            "is not recorded, nor are later ones up to that number. If training went back to a "
            "checkpoint, load the watch's state_dict() from it, or make a watch with resume=True"
        )

    def _continue_run(self, before: int) -> int:
        """Cut a run that is resumed to the steps before this one, at the first step.

        ``before`` is the last step that the schedule knew; the step that the clock goes on from is
        returned.
        """
        if self.record.go_on_from(self.last_step):
            readings = self.record.cut_readings(self.last_step)
            if not self._is_restored:
                before = self.last_step - 1
                self.supervisor.replay(readings)
            self.clock.continue_from_rows(self.read_run().rows(), before)
        self._patterns.continue_run(self.record, self.last_step)
        return before

    # A measurement

    def _measure(self, arguments: StepArguments, due: Collection[str]) -> dict[str, float]:
        """Measure the gauges that are due; return one number per gauge and layer."""
        step = self.last_step
        self.instruments.pause()
        self._follower.follow(step)
        self.supervisor.take_waiting_losses()
        result = self._run_meters(step, due)
        loss = self._processes.mean(self._own_loss(arguments.loss))
        layers = take_layers(result.tables)
        uniform_entropies = take_uniform(result.tables)
        table = LongTable.join(result.tables.values())
        measurement = Measurement(
            step, table, self.instruments.names, loss, self.instruments.largest
        )
        self.latest = measurement
        if layers:
            ways = self.instruments.passes.describe(self.instruments.is_probed)
            self.record.note_measured(ways)
        self._judge(measurement, layers, result.findings)
        with self._failures.reported("the writing of the run"):
            if uniform_entropies is not None:
                self.record.note_uniform(uniform_entropies)
            self._write(measurement, layers, result.errors, arguments.numbers)
        with self._failures.reported("the writing of the explanation"):
            self.explanation.write_changes(self.record)
        if self._line is not None:
            with self._failures.reported("the live line"):
                self._line.show(self.last_step, loss, self.supervisor.phases)
        metrics = measurement.metrics()
        for name, value in self.clock.columns().items():
            metrics[f"joma/{name}"] = value
        return metrics

    def _run_meters(self, step: int, due: Collection[str]) -> MeterResult:
        """Return what all meters measured; one that fails loses its own values only."""
        together = MeterResult()
        for meter in self.instruments.meters:
            with self._failures.reported(f"the measurement of {meter.title}"):
                result = meter.measure(step, due)
                together.tables |= result.tables
                together.errors |= result.errors
                together.findings += result.findings
                for problem in result.problems:
                    self._report(problem)
        return together

    def _report(self, problem: MeterProblem) -> None:
        if problem.is_remark:
            self.notices.once(problem.key, problem.message)
        else:
            self.notices.problem(problem.key, problem.message)

    def _own_loss(self, loss: Any) -> float | None:
        """Return the loss that the user gave, or else that of the model itself."""
        if loss is None:
            return self.instruments.passes.losses.mean()
        return to_float(loss)

    def _judge(
        self, measurement: Measurement, layers: Sequence[LayerReading], findings: list[Finding]
    ) -> None:
        with self._failures.reported("the search for values that are not finite"):
            not_finite = find_not_finite(
                measurement,
                self.instruments.trace,
                self._watched.model,
                self._watched.blocks,
                self._processes,
            )
            if not_finite is not None:
                findings.append(not_finite)
        with self._failures.reported("the judgement of alarms"):
            self.supervisor.judge(measurement, layers, findings, self.layers)

    def _write(
        self,
        measurement: Measurement,
        layers: Sequence[LayerReading],
        errors: Mapping[str, LongTable],
        numbers: Mapping[str, Any],
    ) -> None:
        """Write a measurement to the run folder, with the numbers of the user and of the clock."""
        step = measurement.step
        if layers:
            self._patterns.take(step, self._watched.layers.layers, layers[-1].entropy, self.record)
        floats: dict[str, Any] = {name: to_float(value) for name, value in numbers.items()}
        floats |= self.clock.rows()
        phases = None
        if layers:
            phases = self._phase_codes()
        rows = rows_of_step(measurement, floats, errors, phases)
        self.record.note_matrices(self._watched.matrix_names)
        widths = self.instruments.widths
        self.record.write(step, rows, self.clock.columns(), measurement.names, widths)

    def _phase_codes(self) -> list[int | None]:
        """Return the place of each layer's phase in `PHASES`; None for a layer that is gone."""
        codes: list[int | None] = []
        pairs = zip(self._watched.layers.layers, self.supervisor.phases, strict=False)
        for layer, phase in pairs:
            if layer.keys:
                codes.append(PHASES.index(phase.name))
            else:
                codes.append(None)
        return codes

    # Its end

    def detach(self) -> None:
        """Leave the model alone."""
        self.instruments.detach()

    def finish(self, status: Ending, reason: str | None) -> None:
        """Leave the model alone and finish the run."""
        self.detach()
        with self._failures.reported("the end of the watch"):
            if self._line is not None:
                self._line.close()
            self._patterns.write(self.record)
            premises = self.describe_premises()
            if premises:
                self.record.note(applies=premises)
        with self._failures.reported("the end of the run"):
            self.record.finish(status, reason)

    # A checkpoint

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        self._patterns.write(self.record)  # they are kept in the folder
        return {
            **self._schedule.state(),
            "alarms": self.supervisor.state(),
            "layers": self._watched.layers.state(),
            "reported": self.notices.state(),
            "meters": {meter.title: meter.state() for meter in self.instruments.meters},
            "clock": self.clock.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; one of another version of joma is refused."""
        missing = [key for key in self.state() if key not in state]
        if missing:
            raise ValueError(
                "this is no state of a watch of this version of joma: it lacks "
                f"{', '.join(missing)}"
            )
        self._schedule.restore(state)
        self._is_restored = True
        self._has_stepped = self.last_step > 0
        self.record.go_back_to(self.last_step)
        self.supervisor.restore(state["alarms"])
        self.record.cut_alerts(self.last_step + 1)
        self._watched.layers.restore(state["layers"])
        self.notices.restore(state["reported"])
        for meter in self.instruments.meters:
            meter_state = state["meters"].get(meter.title)
            if meter_state is not None:
                meter.restore(meter_state)
        self.clock.restore(state["clock"])
        self.arm()
