"""The meters of a watch, and what they listen to: passes of the model, steps of its optimisers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from joma._measure.events.events import Observer
from joma._measure.events.finite import FiniteTrace
from joma._measure.events.optimiser import Steps, optimisers_of
from joma._measure.events.padding import StatedPadding
from joma._measure.events.source import EventSource
from joma._measure.gauges.kinds import GaugeKind
from joma._measure.watch import attached
from joma._measure.watch.inputs import NotWatchable, check_has_attention, check_heads
from joma._measure.watch.meters import (
    AttentionMeter,
    ChangeMeter,
    ChargeMeter,
    Meter,
    MotionMeter,
    ReadMeter,
    StreamMeter,
    WeightMeter,
)
from joma._measure.watch.options import WatchOptions
from joma._measure.watch.passes import StepPasses
from joma._measure.watch.probe import ProbeBatch
from joma._measure.watch.processes import Processes
from joma._measure.watch.readings import FOR_PHASES, UNIFORM
from joma._measure.watch.sample import Sampler, check_sampled
from joma._measure.watch.watched import WatchedModel
from joma.models.names import plain_name


class Instruments:
    """The meters of one watch. Nothing touches the model before `attach`.

    Arguments:
        model: the model.
        options: of the watch.
        processes: those that are measured together.
        observers: more observers of the passes that gauges are measured on.

    Attributes:
        watched: the model as meters see it.
        meters: one per group of gauges.
        passes: the passes of the model since the last step.
        trace: finds the first module whose output is not finite.
        is_probed: True if gauges are measured on a probe instead of the training batches.
        pass_gauges: names of the gauges that are measured in passes.
        steps: the steps of the optimisers; None if none is watched, or before `attach`.
    """

    def __init__(
        self,
        model: nn.Module,
        options: WatchOptions,
        processes: Processes,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.watched = _look_at(model, options, processes)
        self.is_probed = options.probe is not None
        self.pass_gauges = {gauge.name for gauge in self.watched.gauges if gauge.runs_model}
        if self.pass_gauges:
            check_has_attention(model)
        self.trace = FiniteTrace(frozenset(self.watched.blocks.names))
        self.meters = self._make_meters(options)
        self.passes = self._make_passes(options, observers)
        for meter in self.meters:
            meter.attach(self.passes)
        self.steps: Steps | None = None
        self._follows_optimizers = options.optimizer is not None
        self._training_source = self._find_training_source()
        self._watch_title = ""

    def _make_meters(self, options: WatchOptions) -> list[Meter]:
        probe = None
        if options.probe is not None:
            probe = ProbeBatch(options.probe)
        # Attention comes first: what its passes show decides which matrices are measured.
        return [
            AttentionMeter(self.watched, probe, (*FOR_PHASES, UNIFORM)),
            WeightMeter(self.watched),
            ChangeMeter(self.watched),
            ChargeMeter(self.watched),
            MotionMeter(self.watched),
            StreamMeter(self.watched),
            ReadMeter(self.watched),
        ]

    def _make_passes(self, options: WatchOptions, observers: Sequence[Observer]) -> StepPasses:
        all_observers: list[Observer] = []
        for meter in self.meters:
            all_observers += meter.observers
        all_observers += observers
        passes = StepPasses(
            self.watched,
            all_observers,
            check_heads(options.heads, _module_names(self.watched.model)),
            self.trace,
            is_training=options.optimizer is not None,
        )
        attached.check_free(self.watched.names)
        cannot_gather = self.watched.processes.cannot_gather
        if cannot_gather and (self.is_probed or passes.source.replays):
            raise NotWatchable(f"no extra pass can be made: {cannot_gather}")
        return passes

    def _find_training_source(self) -> EventSource:
        """Return the source that hears training: that of the gauges, unless they have a probe."""
        if self.pass_gauges and not self.is_probed:
            return self.passes.source
        observers: list[Observer] = []
        for meter in self.meters:
            observers += meter.training_observers
        return EventSource(self.watched.model, observers)

    # On the model

    def attach(self, watch_title: str) -> None:
        """Claim the model's modules for this watch, and hear the steps of its optimisers.

        ``watch_title`` describes the watch in the error of another watch on the same modules.
        """
        self._watch_title = watch_title
        attached.claim(self.watched.names, watch_title)
        if self._follows_optimizers:
            observers = [one for meter in self.meters for one in meter.step_observers]
            self.steps = Steps(self.watched.model, self.watched.optimizers, observers)

    def detach(self) -> None:
        """Leave the model alone."""
        self._training_source.leave()
        if self.steps is not None:
            self.steps.leave()
        attached.release(self.watched.names)

    def look_again(self) -> Mapping[nn.Module, str]:
        """Claim the modules that the model has now; return the names of those before."""
        names_before = self.watched.take_structure()
        attached.release(names_before)
        attached.claim(self.watched.names, self._watch_title)
        self.passes.source.renew()
        return names_before

    # A step

    def begin_step(self, step: int) -> None:
        """Make ready for a step, in the thread that trains."""
        self._training_source.pause()
        self._training_source.claim_thread()
        if self.watched.sampler is not None:
            self.watched.sampler.start(step)

    def listen_for(self, due: Collection[str]) -> None:
        """Listen to the model in the step to come if these gauges need it, or else leave it."""
        source = self._training_source
        for meter in self.meters:
            meter.prepare(due)
        is_measured = source is self.passes.source and not self.pass_gauges.isdisjoint(due)
        if is_measured or any(meter.needs_training_passes for meter in self.meters):
            source.listen()
        else:
            source.leave()

    def pause(self) -> None:
        """Stop listening until the next step."""
        self._training_source.pause()

    def clear(self) -> None:
        """Forget the passes of the step."""
        self.passes.clear()
        for meter in self.meters:
            meter.clear()

    # What is measured

    def has_kind(self, kind: GaugeKind) -> bool:
        """Return True if a meter has a gauge of this kind, which the model can be measured on."""
        return any(gauge.kind is kind for meter in self.meters for gauge in meter.gauges)

    @property
    def largest(self) -> list[str]:
        """Names of the gauges that are maxima, not means."""
        return [gauge.name for gauge in self.watched.gauges if gauge.reduce == "max"]

    @property
    def names(self) -> dict[str, Sequence[str]]:
        """Gauge -> the module or matrix that each layer is, as far as it is known."""
        names: dict[str, Sequence[str]] = {}
        for meter in self.meters:
            names |= meter.names
        return names

    @property
    def widths(self) -> dict[str, Sequence[int]]:
        """Gauge -> the number of heads or experts of each layer."""
        widths: dict[str, Sequence[int]] = {}
        for meter in self.meters:
            widths |= meter.widths
        return widths

    @property
    def axes(self) -> dict[str, list[str]]:
        """Gauge -> the names of the axes of its values."""
        axes: dict[str, list[str]] = {}
        for meter in self.meters:
            axes |= meter.axes
        return axes


def _look_at(model: nn.Module, options: WatchOptions, processes: Processes) -> WatchedModel:
    """Find what the options ask for in the model."""
    optimizers = []
    if options.optimizer is not None:
        optimizers = optimisers_of(model, options.optimizer)
    padding = None
    if options.padding is not None:
        padding = StatedPadding(options.padding, _module_names(model))
    sampler = None
    if options.queries is not None:
        sampler = Sampler(options.queries)
    watched = WatchedModel(
        model,
        options.chosen_gauges,
        processes,
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


def _module_names(model: nn.Module) -> list[str]:
    return [plain_name(name) for name, _ in model.named_modules()]
