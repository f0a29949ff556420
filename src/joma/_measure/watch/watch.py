"""`joma.watch`: gauges attached to a model in training."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from joma._measure.events.axes import Heads
from joma._measure.events.finite import FiniteTrace
from joma._measure.events.optimiser import Steps, distinct_rates, optimisers_of
from joma._measure.events.padding import Padding, StatedPadding
from joma._measure.events.reasons import Reason
from joma._measure.events.source import EventSource
from joma._measure.gauges.kinds import BLOCK
from joma._measure.watch import applicability, attached
from joma._measure.watch.alarms import Alarms, Alert
from joma._measure.watch.alarms.not_finite import find_not_finite
from joma._measure.watch.alarms.notices import Notices, silent, warn
from joma._measure.watch.alarms.reporting import Alerts, OnAlert
from joma._measure.watch.clock import Clock
from joma._measure.watch.display import LiveLine, watch_html
from joma._measure.watch.explain import ExplanationBuilder
from joma._measure.watch.inputs import (
    ArgumentMistake,
    NotWatchable,
    check_has_attention,
    check_heads,
    check_model,
)
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.meters import (
    AttentionMeter,
    ChangeMeter,
    ChargeMeter,
    Meter,
    MeterProblem,
    MeterResult,
    MotionMeter,
    ReadMeter,
    StreamMeter,
    WeightMeter,
)
from joma._measure.watch.options import WatchOptions
from joma._measure.watch.passes import StepPasses
from joma._measure.watch.patterns import PatternKeeper, check_patterns
from joma._measure.watch.phases import PHASES, Phases
from joma._measure.watch.probe import ProbeBatch
from joma._measure.watch.processes import Processes, ProcessScope
from joma._measure.watch.readings import (
    FOR_PHASES,
    UNIFORM,
    Finding,
    LayerReading,
    Reading,
    read_layers,
)
from joma._measure.watch.record import Record, Resume, axes_of, config_of
from joma._measure.watch.sample import Sampler, check_sampled
from joma._measure.watch.schedule import Chosen, Every, Schedule
from joma._measure.watch.surgery import shorten
from joma._measure.watch.watched import WatchedModel
from joma._runs import Run
from joma._runs.explanation import Explanation
from joma._runs.long_table import LongTable
from joma._runs.state import Ending, ending
from joma._runs.warning import JomaWarning
from joma._runs.writer import RunWriter
from joma.models.names import plain_name
from joma.models.parts import PARTS
from joma.models.structure import find as find_structure

if TYPE_CHECKING:
    from types import TracebackType

    import pandas as pd

_open: weakref.WeakSet[Watch] = weakref.WeakSet()
_log = logging.getLogger("joma")


@atexit.register
def _close_all() -> None:
    """A script that ends without `close` leaves a finished run all the same."""
    for watch in list(_open):
        watch.close(*ending(getattr(sys, "last_value", None)))  # the exception that ended it


def watch(
    model: nn.Module,
    run: str | os.PathLike[str] | RunWriter | None = None,
    every: Every | None = None,
    gauges: Chosen | None = None,
    *,
    probe: Any = None,
    padding: Padding | None = None,
    heads: Heads | Mapping[str, Heads] | None = None,
    mlp: str | Sequence[str] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    queries: int | None = None,
    processes: ProcessScope = "own",
    on_alert: OnAlert | Literal["stop"] | None = None,
    live: bool | None = None,
    patterns: bool | None = None,
    words: Sequence[str] | None = None,
    overwrite: bool = False,
    resume: Resume = False,
) -> Watch:
    """Measure attention and weights of ``model`` while it trains; nothing about the training changes.

    Call `Watch.step` after each optimiser step. Attention is measured in the forward passes since the step before (all
    micro-batches of them, means over real queries), weights after the step.

    Arguments:
        model: any module; also compiled, `DistributedDataParallel` or `fully_shard`.
        run: the run folder to write; without one, rows are kept for `Watch.frame` only. If a watch wrote a run there
            already, this one goes to ``run``-2, …, with a warning: nothing is lost. `Watch.path` is where it went.
        every: measure the first step and every n-th, 100 by default; "log" for four measurements per doubling; or
            step -> bool.
        gauges: names of gauges (see `joma.gauges`), "entropy,stable_rank" by default, with commas or in a list; or
            gauge -> its own schedule, {"entropy": 10, "stable_rank": 500}, where None is that of ``every``.
        probe: a batch (mapping, sequence of arguments or one tensor) to measure on instead of the training batches:
            one more pass per measurement, in eval mode, comparable over time.
        padding: which tokens are real, if the mask that attention applies does not show it: the name of the model's
            argument that is 1 at real tokens and 0 at padding, a mask (B, T), or a function of (args, kwargs) of the
            model that gives it; or one per side or module, {"source": …, "target": …}. One that fits no attention is
            an error of the first measured `Watch.step`.
        heads: how many heads a module has, or the order of its leading axes, "batch heads" or "heads batch"; for all
            modules, or one per module. Found by itself; a layer whose heads cannot be told apart is reported as one.
        mlp: the lower MLP matrices: names of modules or parameters, or a regular expression. Found by structure.
        optimizer: the one that trains the model, or several in a list: learning rates and the clock τ = Σ lr are
            recorded from the steps that they make. Without it, `Watch.step` can be told the rate. Gauges of gradients
            and updates need it; with a gauge of charges, it has every gradient that is about to be used checked
            against the exact laws of the model (see `joma.charges`), in measured steps.
        queries: measure fused attention on a random sample of so many queries per pass: unbiased, at a fraction of the
            cost; the standard error of each gauge is recorded as ``entropy_error``, ….
        processes: under torch.distributed, "own" measures the passes of this process and waits for no other; "all" sums
            over all processes, each of which must have such a watch (the values are those of one process on all the
            data, and one process writes). Another process than the first writes its own values to ``run``-rank1, ….
        on_alert: is called with each `Alert` (step, kind, layer, heads, value, threshold, what_to_do) when it begins.
            One that raises does not stop the training. Or "stop": `Watch.should_stop` becomes True at the first
            critical alert, for your loop to end.
        live: a line in the terminal with loss, entropy and phases; by itself if there is a terminal. While a progress
            bar is shown (tqdm, Rich, Keras), the line is not.
        patterns: record who attends to whom in the probe's first sequence (64 tokens at most) at the start, at the
            sparsest, and of late, for `joma report`; by itself if there is a probe.
        words: of that sequence, one per token, for the axes of the picture.
        overwrite: replace the run in the folder.
        resume: True goes on with the run in the folder, of the same settings. "auto", for training that a scheduler
            may restart, does so if that run was killed, interrupted or failed, and starts a new one if it is done, has
            other settings, or is not there. It looks at the newest of ``run``, ``run``-2, …

    Returns:
        The watch: a context manager, or call its `close` at the end.
    """
    options = WatchOptions(
        run=run,
        every=every,
        gauges=gauges,
        probe=probe,
        padding=padding,
        heads=heads,
        mlp=mlp,
        optimizer=optimizer,
        queries=queries,
        processes=processes,
        on_alert=on_alert,
        live=live,
        patterns=patterns,
        words=words,
        overwrite=overwrite,
        resume=resume,
    )
    return Watch(model, options)


class Watch:
    """Gauges attached to a model; made by `joma.watch`.

    Attributes:
        model: the model.
        path: the run folder, if there is one.
        phases: one `Phase` per layer, after the first measurement.
        alerts: what went wrong so far.
        should_stop: True after a critical alert, if ``on_alert`` is "stop".
        latest: the last `Measurement`, if there is one.
        last_step: the number of the last step that was made.
        layers: names of the attention layers, by number, after the first measurement.
        problems: what could not be measured so far, and why, in sentences; each was a warning once.
        matrices: part -> names of the matrices that weight gauges are measured on.
        rates: the learning rates of the last step, one per parameter group; empty if they are not known.
        tau: the sums of the learning rates over all steps so far, likewise.
    """

    def __init__(self, model: nn.Module, options: WatchOptions) -> None:
        self._closed = True  # until everything is in place
        self._is_loaded = False  # from a state
        self._has_stepped = False  # since it was made, or loaded from a state
        self._has_refused_step = False
        self._explained: object = None  # what the explanation in the folder is about
        self.latest: Measurement | None = None
        # Losses of steps since the last measurement that are on another device.
        self._pending_losses: list[tuple[int, Tensor]] = []
        check_model(model)
        self.model = model
        self._processes = Processes(model, options.processes)
        self._notices = Notices(warn if self._processes.is_first else silent)
        self._watched = self._look_at(model, options)
        self._gauges = self._watched.gauges
        self._pass_gauges = {gauge.name for gauge in self._gauges if gauge.runs_model}
        if self._pass_gauges:
            check_has_attention(model)
        self._schedule = Schedule(self._watched.periods)
        self._mlp = options.mlp
        has_patterns = check_patterns(options.patterns, options.words, options.probe is not None)
        self._patterns = PatternKeeper(options.words, has_patterns and self._processes.is_first)
        self._trace = FiniteTrace(frozenset(self._watched.blocks.names))
        self._is_probed = options.probe is not None
        self._meters = self._make_meters(options)
        self._passes = self._make_passes(options)
        for meter in self._meters:
            meter.attach(self._passes)
        self._alarms = Alarms(self._notices)
        self._record = self._open_record(options)
        self._alerts = Alerts(self._record, self._notices, options.on_alert)
        if self._record.last_step is not None:
            self._schedule.go_on_from(self._record.last_step)
            self._replay_phases(self._record.kept(self._record.last_step + 1))
        self._record.note_layers(self._names(), self._widths())
        self._record.note_matrices(self.matrices)
        self._largest = [gauge.name for gauge in self._gauges if gauge.reduce == "max"]
        if self._largest:
            self._record.note(largest=self._largest)
        attached.claim(self._watched.names, self._where)
        has_line = sys.stderr.isatty() if options.live is None else options.live
        self._line: LiveLine | None = None
        if has_line and self._processes.rank == 0:
            self._line = LiveLine(self._describe_matrices())
        self._report_matrices()
        self._steps: Steps | None = None
        if options.optimizer is not None:
            observers = [one for meter in self._meters for one in meter.step_observers]
            self._steps = Steps(model, self._watched.optimizers, observers)
        self._training_source = self._find_training_source()
        self._clock = Clock(self._steps, "lr" in self._record.writer.info["axes"], self._notices)
        self._closed = False
        _open.add(self)
        self._arm()

    def _look_at(self, model: nn.Module, options: WatchOptions) -> WatchedModel:
        optimizers: Sequence[Optimizer] = []
        if options.optimizer is not None:
            optimizers = optimisers_of(model, options.optimizer)
        padding = None
        if options.padding is not None:
            modules = [plain_name(name) for name, _ in model.named_modules()]
            padding = StatedPadding(options.padding, modules)
        sampler = None
        if options.queries is not None:
            sampler = Sampler(options.queries)
        watched = WatchedModel(
            model,
            options.chosen_gauges,
            self._processes,
            mlp=options.mlp,
            is_lenient=options.has_default_gauges,
            optimizers=optimizers,
            periods=options.periods,
            padding=padding,
            sampler=sampler,
        )
        if sampler is not None:
            check_sampled(watched.gauges)
        return watched

    def _make_meters(self, options: WatchOptions) -> list[Meter]:
        probe = None
        if options.probe is not None:
            probe = ProbeBatch(options.probe)
        # Attention comes first: what its passes show decides which matrices are measured.
        return [
            AttentionMeter(self._watched, probe, (*FOR_PHASES, UNIFORM)),
            WeightMeter(self._watched),
            ChangeMeter(self._watched),
            ChargeMeter(self._watched),
            MotionMeter(self._watched),
            StreamMeter(self._watched),
            ReadMeter(self._watched),
        ]

    def _make_passes(self, options: WatchOptions) -> StepPasses:
        observers = [one for meter in self._meters for one in meter.observers]
        modules = [plain_name(name) for name, _ in self.model.named_modules()]
        passes = StepPasses(
            self._watched,
            [*observers, self._patterns],
            check_heads(options.heads, modules),
            self._trace,
            is_training=options.optimizer is not None,
        )
        attached.check_free(self._watched.names)
        if self._processes.cannot_gather and (self._is_probed or passes.source.replays):
            raise NotWatchable(f"no extra pass can be made: {self._processes.cannot_gather}")
        return passes

    def _find_training_source(self) -> EventSource:
        """Return the source that hears training: that of the gauges, unless they have a probe."""
        if self._pass_gauges and not self._is_probed:
            return self._passes.source
        observers = [one for meter in self._meters for one in meter.training_observers]
        return EventSource(self.model, observers)

    def _open_record(self, options: WatchOptions) -> Record:
        run = options.run
        if not (run is None or isinstance(run, RunWriter)):
            run = self._processes.folder(run)
        config = config_of(self.model, self._watched.periods, probed=self._is_probed)
        if options.queries is not None:
            config["queries"] = options.queries
        axes = axes_of(self._gauges, distinct_rates(self._watched.optimizers))
        for meter in self._meters:
            axes |= meter.axes
        writes = self._processes.is_first or isinstance(run, RunWriter)
        record = Record(
            run if writes else None,
            config,
            axes,
            self._notices,
            options.overwrite,
            options.resume,
        )
        self.path = None if isinstance(run, RunWriter) else run
        if writes and run is not None:
            self.path = record.path
        self._where = "no run folder" if self.path is None else f"run {self.path}"
        return record

    # The user's side

    @property
    def layers(self) -> list[str]:
        """Names of the attention layers, by number; empty before the first measurement."""
        return self._watched.layers.names

    @property
    def matrices(self) -> dict[str, list[str]]:
        """Part -> names of the matrices that weight gauges are measured on."""
        return self._watched.matrix_names

    @property
    def phases(self) -> Phases:
        """One `Phase` per layer, after the first measurement; ``print(w.phases)`` says them in words."""
        return self._alarms.phases

    @property
    def alerts(self) -> list[Alert]:
        """What went wrong so far, since this watch was made."""
        return list(self._alerts.reported)

    @property
    def problems(self) -> list[str]:
        """What could not be measured so far, and why, in sentences; each was a warning once."""
        return list(self._notices.problems)

    @property
    def should_stop(self) -> bool:
        """True after a critical alert, if ``on_alert`` is "stop"."""
        return self._alerts.should_stop

    @property
    def last_step(self) -> int:
        """The number of the last step that was made."""
        return self._schedule.step

    @property
    def heads(self) -> dict[str, list[int]]:
        """Gauge -> how many heads each of its layers has, for gauges that are measured per head."""
        return dict(self._record.writer.info.get("heads", {}))

    @property
    def rates(self) -> list[float]:
        """The learning rates of the last step, one per parameter group; empty if they are not known."""
        return list(self._clock.rates)

    @property
    def tau(self) -> list[float]:
        """The sums of the learning rates over all steps so far, one per parameter group; empty if not known."""
        return list(self._clock.tau)

    def step(
        self,
        loss: Any = None,
        *,
        step: int | None = None,
        lr: float | Tensor | None = None,
        **numbers: Any,
    ) -> dict[str, float]:
        """Tell that an optimiser step was made; measures if this step is due.

        Arguments:
            loss: of this step, a number or a tensor; a model's own ``output.loss`` is taken if none is given.
            step: its number, if the caller counts; else one more than the last. Numbers must increase: a step that
                does not is not recorded, with a warning.
            lr: the learning rate of this step, told with every step; not needed if the optimiser is watched.
            numbers: more to record.

        Returns:
            {} between measurements, else one number per gauge and layer, {"joma/entropy/layer_03": …}: the mean over
            heads, or the largest where the gauge is a maximum; and the clock, {"joma/tau": …}, if it is known. For
            any logger.
        """
        if self._closed:
            raise RuntimeError("this watch is closed")
        given = {"loss": loss, "lr": lr}
        for name, value in (
            {name: x for name, x in given.items() if x is not None} | numbers
        ).items():
            _check_number(name, value)
        number = None if step is None else int(step)
        try:
            return self._step(loss, number, lr, numbers)
        except (
            ArgumentMistake,
            JomaWarning,
        ):  # the user's mistake; a warning that the user made an error
            raise
        except Exception as error:
            self._report_failure("the measurement", error)
            return {}
        finally:
            with self._failures_reported("the preparation of the next step"):
                self._forget_passes()

    def _step(
        self, loss: Any, step: int | None, lr: float | Tensor | None, numbers: Mapping[str, Any]
    ) -> dict[str, float]:
        before = self.last_step
        if step is not None and self._has_stepped and step <= before:
            self._refuse_step(step)
            return {}
        self._has_stepped = True
        due = self._schedule.advance(step)
        if self._record.go_on_from(self.last_step):
            readings = self._record.kept(self.last_step)
            if not self._is_loaded:
                before = self.last_step - 1
                self._replay_phases(readings)
            self._clock.continue_from_rows(Run(self._record.writer.path).rows(), before)
        self._patterns.continue_run(self._record, self.last_step)
        self._clock.advance(None if lr is None else _scalar(lr), before, self.last_step)
        if due:
            return self._measure(due, loss, numbers)
        self._take_loss(loss)
        return {}

    @contextmanager
    def _failures_reported(self, part: str) -> Iterator[None]:
        """Go on whatever happens in this block; what fails is a warning."""
        try:
            yield
        except (ArgumentMistake, JomaWarning):
            raise
        except Exception as error:
            self._report_failure(part, error)

    def _report_failure(self, part: str, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        message = f"{part} failed in step {self.last_step} with {cause}; training goes on {Reason.INTERNAL}"
        self._notices.problem(("failure", part, type(error).__name__), message)

    def _forget_passes(self) -> None:
        """Make ready for the next step."""
        self._passes.clear()
        for meter in self._meters:
            meter.clear()
        self._arm()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run measures the same to the bit."""
        self._patterns.write(self._record)  # they are kept in the folder
        return {
            **self._schedule.state(),
            "alarms": self._alarms.state(),
            "layers": self._watched.layers.state(),
            "reported": self._notices.state(),
            "meters": {meter.title: meter.state() for meter in self._meters},
            "clock": self._clock.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; one of another version of joma is refused."""
        missing = [key for key in self.state_dict() if key not in (*state, "clock")]
        if missing:
            raise ValueError(
                f"this is no state of a watch of this version of joma: it lacks {', '.join(missing)}"
            )
        self._schedule.restore(state)
        self._is_loaded = True
        self._has_stepped = self.last_step > 0
        self._record.go_back_to(self.last_step)
        self._alarms = Alarms.restored(state["alarms"], self._notices)
        self._record.drop_alerts(self.last_step + 1)
        self._watched.layers.restore(state["layers"])
        self._notices.restore(state["reported"])
        for meter in self._meters:
            meter_state = state["meters"].get(meter.title)
            if meter_state is not None:
                meter.restore(meter_state)
        self._clock.restore(state.get("clock"), self.last_step)
        self._arm()

    def _replay_phases(self, readings: Sequence[Reading]) -> None:
        """Bring phases to where they were, from what the run folder keeps."""
        self._alarms = Alarms(self._notices)
        for reading in readings:
            self._alarms.update(reading)

    def _refuse_step(self, step: int) -> None:
        """Leave out a step whose number does not increase: rows of a run are in the order of steps."""
        if not self._has_refused_step:
            self._has_refused_step = True
            self._notices.say(
                f"step {step:,} was given after step {self.last_step:,}: steps must increase, so it is not recorded, "
                "nor are later ones up to that number. If training went back to a checkpoint, load the watch's "
                "state_dict() from it, or make a watch with resume=True"
            )

    def frame(self) -> pd.DataFrame:
        """The table of the run, `Run.frame`: step, layer, head, gauge, value, and the module or matrix of the layer."""
        return Run(self._record.writer.path).frame()

    def explain(self) -> Explanation:
        """Return what was seen so far: one row per attention and per MLP, with the evidence for each fact.

        Facts are those of the last pass in which an attention was examined: its first one, and one of new shapes.
        """
        calls: Counter[str] = Counter()
        for layer in self._watched.layers.layers:
            calls.update(name for name, _ in layer.keys)
        notes = []
        if self._pass_gauges and not calls:
            notes.append("No attention was measured yet.")
        lowers = None
        if self._mlp is not None:
            matrices = find_structure(self.model).matrices("mlp_in", self._mlp)
            lowers = [matrix.name for matrix in matrices]
        around = self._watched.order.around
        builder = ExplanationBuilder(
            self._passes.source, self._passes.unseen, calls, around, lowers
        )
        return builder.build(notes)

    def _write_explanation(self) -> None:
        """Write the explanation if an attention is new, refused, or read in another way."""
        source = self._passes.source
        refusals = (*source.problems, *self._passes.unseen, *self._watched.order.around)
        readings = {}
        for place, facts in source.guard.facts.items():
            reason = facts.refusal and facts.refusal.reason
            readings[place] = (facts.backend, facts.heads, reason)
        contents = (readings, refusals)
        if contents != self._explained and self._record.write_explanation(self.explain()):
            self._explained = contents

    @property
    def applies(self) -> str:
        """How far JoMA's premises hold for this model so far, in a sentence; "" without block gauges."""
        has_block_gauges = False
        for meter in self._meters:
            has_block_gauges |= any(gauge.kind is BLOCK for gauge in meter.gauges)
        if not has_block_gauges or self.latest is None:
            return ""
        return applicability.sentence(self.frame())

    def close(self, status: Ending = "done", reason: str | None = None) -> None:
        """Take the gauges off the model and finish the run; a second call does nothing.

        Arguments:
            status: how training ended: "done", "failed" or "interrupted".
            reason: why, in a few words.
        """
        if status not in get_args(Ending):
            raise ValueError(f"status must be one of {', '.join(get_args(Ending))}; got {status!r}")
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._detach()
        with self._failures_reported("the end of the watch"):
            if self._line is not None:
                self._line.close()
            self._patterns.write(self._record)
            sentence = self.applies
            if sentence:
                self._record.note(applies=sentence)
        with self._failures_reported("the end of the run"):
            self._record.finish(status, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(*ending(error))

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._detach()

    def _detach(self) -> None:
        """Leave the model alone."""
        self._training_source.leave()
        if self._steps is not None:
            self._steps.leave()
        attached.release(self._watched.names)

    def __repr__(self) -> str:
        phases = ", ".join(f"{n}: {phase.name}" for n, phase in enumerate(self.phases))
        state = "closed" if self._closed else f"step {self.last_step}"
        return f"Watch({type(self.model).__name__}, {self._where}, {state}{f'; {phases}' if phases else ''})"

    def _repr_html_(self) -> str:
        return watch_html(self)

    # A measurement

    def _arm(self) -> None:
        """Listen to the model and its optimisers if the step to come is due."""
        source = self._training_source
        source.pause()
        source.claim_thread()
        if self._watched.sampler is not None:
            self._watched.sampler.start(self.last_step + 1)
        due: Collection[str] = ()
        try:
            due = self._schedule.arm()
        finally:
            # Nothing is due if the user's schedule raises, and the model must be left alone.
            self._listen_for(due)

    def _listen_for(self, due: Collection[str]) -> None:
        """Listen to the model in the step to come if these gauges need it, or else leave it."""
        source = self._training_source
        for meter in self._meters:
            meter.prepare(due)
        is_measured = source is self._passes.source and not self._pass_gauges.isdisjoint(due)
        if is_measured or any(meter.needs_training_passes for meter in self._meters):
            source.listen()
        else:
            source.leave()

    def _take_loss(self, loss: Any) -> None:
        """Take the loss of a step that is not measured, without waiting for a device."""
        if (
            loss is None or self._processes.is_joint
        ):  # processes agree on a loss in measured steps only
            return
        if isinstance(loss, Tensor) and loss.device.type != "cpu":
            # a clone: a captured graph writes its next loss into the same memory
            self._pending_losses.append((self.last_step, loss.detach().clone()))
        else:
            self._alerts.report(self._alarms.update_loss(self.last_step, _scalar(loss)))

    def _take_pending_losses(self) -> None:
        for step, loss in self._pending_losses:
            self._alarms.take_loss(step, _scalar(loss))
        self._pending_losses.clear()

    def _measure(
        self, due: Collection[str], loss: Any, numbers: Mapping[str, Any]
    ) -> dict[str, float]:
        step = self.last_step
        self._training_source.pause()
        if self._watched.has_changed():
            self._follow(step)
        self._take_pending_losses()
        result = self._run_meters(step, due)
        own_loss = self._passes.losses.mean() if loss is None else _scalar(loss)
        mean_loss = self._processes.mean(own_loss)
        for_phases = {}
        for gauge in FOR_PHASES:
            table = result.tables.pop(gauge.name, None)
            if table is not None:
                for_phases[gauge.name] = torch.from_numpy(table.array(gauge.name))
        uniform = result.tables.pop(UNIFORM.name, None)
        names = self._names()
        numbers_of_step = LongTable.join(result.tables.values())
        self.latest = Measurement(step, numbers_of_step, names, mean_loss, self._largest)
        layers: list[LayerReading] = []
        if for_phases:
            self._record.note_measured(self._passes.describe(self._is_probed))
            layers = read_layers(for_phases)
        self._judge(self.latest, layers, result.findings)
        with self._failures_reported("the writing of the run"):
            if uniform is not None:
                levels = torch.from_numpy(uniform.array(UNIFORM.name))  # (layers, heads)
                self._record.note_uniform([float(level.nanmean()) for level in levels])
            if layers:
                self._patterns.take(
                    step, self._watched.layers.layers, layers[-1].entropy, self._record
                )
            rows = self._rows(result, numbers_of_step, mean_loss, numbers, bool(layers))
            self._record.note_matrices(self.matrices)
            self._record.write(step, rows, self._clock.columns(), names, self._widths())
        with self._failures_reported("the writing of the explanation"):
            self._write_explanation()
        if self._line is not None:
            with self._failures_reported("the live line"):
                self._line.show(self)
        metrics = self.latest.metrics()
        for name, value in self._clock.columns().items():
            metrics[f"joma/{name}"] = value
        return metrics

    def _run_meters(self, step: int, due: Collection[str]) -> MeterResult:
        """Return what all meters measured; one that fails loses its own values only."""
        together = MeterResult()
        for meter in self._meters:
            with self._failures_reported(f"the measurement of {meter.title}"):
                result = meter.measure(step, due)
                together.tables |= result.tables
                together.errors |= result.errors
                together.findings += result.findings
                for problem in result.problems:
                    self._report(problem)
        return together

    def _report(self, problem: MeterProblem) -> None:
        if problem.is_remark:
            self._notices.once(problem.key, problem.message)
        else:
            self._notices.problem(problem.key, problem.message)

    def _judge(
        self, measurement: Measurement, layers: Sequence[LayerReading], findings: list[Finding]
    ) -> None:
        """Update phases and alarms, and report the alerts that begin."""
        with self._failures_reported("the search for values that are not finite"):
            not_finite = find_not_finite(
                measurement, self._trace, self.model, self._watched.blocks, self._processes
            )
            if not_finite is not None:
                findings.append(not_finite)
        with self._failures_reported("the judgement of alarms"):
            gauges = measurement.per_head(self._alarms.gauges)
            reading = Reading(measurement.step, measurement.loss, layers, gauges, findings)
            alerts = self._alarms.update(reading, self.layers, measurement.names)
            self._alerts.report(alerts)
            self._record.keep(reading)

    def _rows(
        self,
        result: MeterResult,
        table: LongTable,
        loss: float | None,
        numbers: Mapping[str, Any],
        has_phases: bool,
    ) -> LongTable:
        """Return what is written of a step, in the order of the lines of the run."""
        single: dict[str, Any] = {name: _scalar(value) for name, value in numbers.items()}
        single |= self._clock.rows()
        if loss is not None:
            single["loss"] = loss
        # A number of the user gives way to a gauge of the same name.
        taken = {*result.tables, *result.errors}
        if has_phases:
            taken.add("phase")
        tables = []
        for name, value in single.items():
            if name not in taken:
                tables.append(LongTable.of_array(name, value, precision="float64"))
        tables += [table, *result.errors.values()]
        if has_phases:
            codes: list[int | None] = []
            for layer, phase in zip(self._watched.layers.layers, self.phases, strict=False):
                codes.append(PHASES.index(phase.name) if layer.keys else None)
            tables.append(LongTable.per_layer("phase", codes, "integer"))
        return LongTable.join(tables)

    def _report_matrices(self) -> None:
        """Log which matrices weight gauges are measured on: not a warning, since nothing is wrong."""
        if not self._processes.is_first:
            return
        words = self._describe_matrices()
        if words:
            _log.info(words)

    def _describe_matrices(self) -> str:
        """Return which matrices weight gauges are measured on, in one line; "" if there are none."""
        parts = []
        for part, names in self.matrices.items():
            title = PARTS.get(part, part).partition(":")[0]
            parts.append(f"{title}: {shorten(names)}")
        return f"joma measures {'; '.join(parts)}" if parts else ""

    def _follow(self, step: int) -> None:
        """Look again at a model whose modules were replaced; training goes on whatever happens."""
        try:
            self._renew(step)
        except Warning:  # which the user wants to be raised
            raise
        except Exception as error:
            self._watched.matrices = {}
            self._renew_meters(step)
            self._notices.say(
                f"step {step}: the model was changed, and its matrices could not be found again "
                f"({type(error).__name__}: {error}): they are not measured any more. Make a new watch"
            )

    def _renew(self, step: int) -> None:
        """Find the structure again, and record what changed."""
        names_before = self._watched.take_structure()
        attached.release(names_before)
        attached.claim(self._watched.names, self._where)
        self._passes.source.renew()
        changes = self._watched.renew(names_before, f"removed before step {step}")
        self._renew_meters(step)
        if changes:
            self._notices.say(
                f"step {step}: the model was changed ({'; '.join(changes)}); layers keep their "
                "numbers"
            )
            self._record.note_change(step, changes)
        self._record.note_matrices(self.matrices)

    def _renew_meters(self, step: int) -> None:
        for meter in self._meters:
            try:
                meter.renew()
            except ValueError as error:
                names = ", ".join(gauge.name for gauge in meter.gauges)
                meter.gauges = []
                self._notices.say(f"step {step}: {names} cannot be measured any more: {error}")

    def _names(self) -> dict[str, Sequence[str]]:
        """Return, by gauge, the module or matrix that each layer is, as far as it is known."""
        names: dict[str, Sequence[str]] = {}
        for meter in self._meters:
            names |= meter.names
        return names

    def _widths(self) -> dict[str, Sequence[int]]:
        """Return, by gauge, the number of heads or experts of each layer, where that says anything."""
        widths: dict[str, Sequence[int]] = {}
        for meter in self._meters:
            widths |= meter.widths
        axes = self._record.writer.info["axes"]
        recorded = {}
        for name, counts in widths.items():
            if len(axes.get(name, ())) > 1 or 0 in counts:
                recorded[name] = counts
        return recorded


def _check_number(name: str, value: Any) -> None:
    """Refuse what is no single number, without waiting for a device."""
    if isinstance(value, (int, float)):
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            advice = "give one number, for example loss.mean()"
            raise ValueError(f"the {name} has shape {tuple(value.shape)}: {advice}")
        return
    try:
        float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a number or a tensor with one entry; got {value!r}"
        ) from None


def _scalar(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
