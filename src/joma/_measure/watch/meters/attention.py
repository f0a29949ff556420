"""Gauges of attention and of hidden states, on the passes of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from joma._measure.events.events import Observer
from joma._measure.events.reasons import Reason, message_of
from joma._measure.gauges.kinds import ATTENTION_KINDS, HIDDEN
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.inputs import (
    ArgumentMistake,
    NotWatchable,
    looks_like_attention,
    no_attention_message,
)
from joma._measure.watch.layers import module_of
from joma._measure.watch.meters.meter import Meter, MeterResult
from joma._measure.watch.passes import StepPasses
from joma._measure.watch.probe import ProbeBatch
from joma._measure.watch.tally import ERROR, Tally
from joma._measure.watch.unseen import unseen_modules
from joma._measure.watch.watched import WatchedModel

# Names in a message about several modules.
MAX_NAMES = 3


class AttentionMeter(Meter):
    """Measures gauges of attention and hidden states, and reports what could not be measured.

    Arguments:
        watched: the model.
        probe: a batch that is measured instead of the training batches.
        phase_gauges: gauges that are measured whenever the model runs for one of the user's.

    Attributes:
        tally: what is kept of the passes.
    """

    title = "attention"
    kinds = (*ATTENTION_KINDS, HIDDEN)

    def __init__(
        self,
        watched: WatchedModel,
        probe: ProbeBatch | None = None,
        phase_gauges: Sequence[Gauge] = (),
    ) -> None:
        super().__init__(watched)
        measured = [*self.gauges, *phase_gauges]
        self.tally = Tally(
            [gauge for gauge in measured if gauge.kind in ATTENTION_KINDS],
            [gauge for gauge in measured if gauge.kind is HIDDEN],
            watched.sampler,
        )
        self._probe = probe
        self._phase_gauges = [gauge.name for gauge in phase_gauges]
        self._pass_gauges = frozenset(gauge.name for gauge in watched.gauges if gauge.runs_model)
        self._error_names = []
        if watched.sampler is not None:
            for gauge in self.gauges:
                if gauge.kind.can_be_sampled:
                    self._error_names.append(f"{gauge.name}{ERROR}")
        self._passes: StepPasses

    def attach(self, passes: StepPasses) -> None:
        self._passes = passes
        if self._probe is not None:
            self._probe.check_ids(passes.source)

    @property
    def observers(self) -> list[Observer]:
        return [self.tally]

    # Its layers

    @property
    def names(self) -> Mapping[str, Sequence[str]]:
        names = self.watched.layers.names
        if not names:
            return {}
        gauges = [gauge.name for gauge in self.gauges]
        return dict.fromkeys([*gauges, "phase", *self._error_names], names)

    @property
    def widths(self) -> Mapping[str, Sequence[int]]:
        """Gauge -> the number of heads of each layer, for all gauges that are measured in passes.

        Meters of other gauges that know better replace theirs.
        """
        widths = self.tally.widths(self.watched.layers.layers)
        one_per_layer = [min(1, width) for width in widths]
        by_gauge = {}
        for gauge in self.watched.gauges:
            if gauge.runs_model:
                by_gauge[gauge.name] = one_per_layer
                if gauge.per_head:
                    by_gauge[gauge.name] = widths
        by_gauge["phase"] = one_per_layer
        return by_gauge | dict.fromkeys(self._error_names, widths)

    @property
    def axes(self) -> Mapping[str, list[str]]:
        axes = dict(super().axes)
        for name in self._error_names:
            axes[name] = ["layer", "head"]
        return axes

    # A step

    def prepare(self, due: Collection[str]) -> None:
        # Phases are read from every pass that is measured for another gauge.
        if not self._pass_gauges.isdisjoint(due):
            due = {*due, *self._phase_gauges}
        self.due = due
        self.tally.due = due

    def measure(self, step: int, due: Collection[str]) -> MeterResult:
        self.prepare(due)
        result = MeterResult()
        if self._pass_gauges.isdisjoint(due):
            return result
        if self._probe is not None and not self._probe.run(self._passes.source):
            # A pass that failed has shown some layers only.
            self.clear()
            self._passes.clear()
        try:
            self.measure_passes(result)
        except NotWatchable as reason:  # the next measured step looks again
            result.report(("attention", str(reason)), str(reason))
        return result

    def measure_passes(self, result: MeterResult) -> None:
        """Add the values of the passes since the last `clear`; none if nothing ran.

        Raises:
            NotWatchable: the model ran, and none of its attention was measured now or before.
        """
        source = self._passes.source
        processes = self.watched.processes
        # Every process asks the same questions in the same order: one that raised before the others
        # ask would leave them waiting.
        if processes.any(source.refusal is not None):
            raise NotWatchable(
                source.refusal or "another process refused to measure, and has given the reason"
            )
        has_attention = processes.any(bool(self.tally.combined))
        if not has_attention and source.ran and not self.watched.layers.layers:
            raise NotWatchable(self._explain_no_attention())
        for name, error in source.problems.items():
            result.report(
                ("problem", name), f"attention of {name} could not be measured: {message_of(error)}"
            )
        if has_attention:
            self._check_arguments()
            self._report_partial(result)
            self._report_passes(result)
        for name, problem in self.tally.problems.items():
            result.report(("gauge", name), f"gauge {name!r} failed: {problem}")
        if has_attention:
            self._number_layers(result)
            self._report_unseen(result)
            tables = self.tally.values(self.watched.layers.layers, processes)
            for name, table in tables.items():
                if name in self._error_names:
                    result.errors[name] = table
                else:
                    result.tables[name] = table
        elif not source.ran and not source.problems:
            result.report("idle", f"{self._explain_idle()} {Reason.NOT_RUN}")

    def clear(self) -> None:
        self.tally.clear()

    def _number_layers(self, result: MeterResult) -> None:
        source = self._passes.source
        attention = self.tally.combined
        # Modules of the same class as one that attends are layers, too, which a pass may skip.
        classes = set()
        for module, name in source.names.items():
            if (name, 0) in attention:
                classes.add(type(module))
        skipped = []
        for module, name in source.names.items():
            if type(module) in classes and looks_like_attention(type(module)):
                skipped.append(name)
        order = list(source.names.values())
        layers = self.watched.layers
        for number in layers.settle(attention, order, skipped, self.watched.blocks):
            result.report(
                ("new", number),
                f"attention in {layers.names[number]} is new: it becomes layer {number}",
                is_remark=True,
            )

    # What could not be measured

    def _check_arguments(self) -> None:
        """Raise for a mistake in the user's arguments that only a pass can show."""
        padding = self._passes.source.padding
        if padding is not None:
            mistake = padding.mistake()
            if mistake is not None:
                raise ArgumentMistake(mistake)

    def _explain_no_attention(self) -> str:
        source = self._passes.source
        causes = [f"{name}: {message_of(error)}" for name, error in source.problems.items()]
        self._passes.unseen = unseen_modules(source, source.problems, is_complete=True)
        causes += self._passes.unseen.values()
        return no_attention_message(source.model, len(source.ran), causes)

    def _explain_idle(self) -> str:
        """Return why no pass was seen since the last step."""
        source = self._passes.source
        if source.left_out:
            passes = " and ".join(f"{count} {why}" for why, count in source.left_out.items())
            return (
                f"the passes since the last step() are no training, and are not measured: {passes}"
            )
        if source.compiled_calls:
            return (
                "the model did not run since the last step(), or it ran inside a compiled "
                "function, where nothing is seen; give a probe batch, or compile the model instead "
                "of the function"
            )
        if source.was_bypassed:
            return (
                "nothing was seen since the last step(): another library has put back "
                "nn.Module.__call__"
            )
        return "the model did not run since the last step(): there is no attention to measure"

    def _report_partial(self, result: MeterResult) -> None:
        """Report layers without heads, and layers that attend with a part of their queries."""
        guard = self._passes.source.guard
        modules = guard.without_heads
        if modules:
            names = ", ".join(modules[:MAX_NAMES])
            if len(modules) > MAX_NAMES:
                names += f" and {len(modules) - MAX_NAMES} more"
            result.report(
                ("heads", len(modules)),
                f"it is not certain which axis holds the heads of {names}: reported as one, the "
                f"mean over heads. If you know it, say "
                f'heads={{"{modules[0]}": "batch heads"}} or "heads batch" {Reason.HEAD_AXIS}',
                is_remark=True,
            )
        for name, share in guard.shares.items():
            result.report(
                ("share", name),
                f"{name} attends with {share:.1%} of its queries, and only those are measured "
                f"{Reason.PART_OF_QUERIES}",
                is_remark=True,
            )

    def _report_passes(self, result: MeterResult) -> None:
        """Report passes in eval mode that are left out though nothing shows which are training."""
        left_out = self.tally.count_left_out()
        if left_out:
            result.report(
                "passes",
                f"{left_out} passes in eval mode since the last step() are not measured, since "
                "there were passes in train mode, and no gradients were computed by the time of "
                "step(). Evaluate under torch.no_grad()",
                is_remark=True,
            )

    def _report_unseen(self, result: MeterResult) -> None:
        """Report modules that ran and should attend, without any attention in or around them."""
        source = self._passes.source
        measured = [module_of(place) for place in self.tally.combined]
        unseen = unseen_modules(source, [*measured, *source.problems])
        self._passes.unseen |= unseen
        for name, message in unseen.items():
            result.report(("unseen", name), message)
