"""Attention and hidden-state gauges on a model's passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from joma._measure.events.axes import Heads
from joma._measure.events.events import Observer, Pass, PassBegins, PassEnds, counted
from joma._measure.events.finite import FiniteTrace
from joma._measure.events.padding import StatedPadding
from joma._measure.events.reasons import Reason, message_of
from joma._measure.events.source import EventSource
from joma._measure.gauges.kinds import ATTENTION_KINDS, HIDDEN
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.inputs import (
    ArgumentMistake,
    NotWatchable,
    looks_like_attention,
    no_attention_message,
)
from joma._measure.watch.layers import LayerNumbering, module_of
from joma._measure.watch.processes import Processes
from joma._measure.watch.sample import Sampler
from joma._measure.watch.tally import Tally
from joma._measure.watch.unseen import unseen_modules
from joma._measure.watch.values import Values
from joma._runs.measured import describe_passes
from joma.models.blocks import Blocks


class Losses:
    """An observer of the losses that a model itself gives in training, as ``output.loss``."""

    wants = (PassEnds,)

    def __init__(self) -> None:
        self._losses: dict[Pass, Tensor] = {}

    def observe(self, event: PassEnds) -> None:
        """A pass came to its end."""
        loss = (
            event.output.get("loss")
            if isinstance(event.output, dict)
            else getattr(event.output, "loss", None)
        )
        if event.grad and isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses[event.current] = loss.detach()

    def mean(self) -> float | None:
        """Return the mean over the passes of training since the last `clear`, or None if there was none."""
        if not self._losses:
            return None
        losses = [self._losses[one] for one in counted(list(self._losses))]
        return float(torch.stack([x.double().cpu() for x in losses]).mean())

    def clear(self) -> None:
        """Forget them."""
        self._losses.clear()


class Modes:
    """An observer of the modes, train or eval, of the passes since the last `clear`."""

    wants = (PassBegins,)

    def __init__(self) -> None:
        self._passes: list[Pass] = []

    def observe(self, event: PassBegins) -> None:
        """A pass begins."""
        self._passes.append(event.current)

    def modes(self) -> set[bool]:
        """Return the modes of the passes that count; True for train mode."""
        return {one.in_train_mode for one in counted(self._passes)}

    def clear(self) -> None:
        """Forget them."""
        self._passes.clear()


class Passes:
    """Measures gauges in the passes since the last `clear`, and says what could not be measured.

    Attributes:
        source: the events of the model.
        blocks: the numbering of layers.
        tally: what is kept of the attention that was seen.
        numbering: which attention is which layer.
        losses: of the model itself.
        unseen: modules that should attend, without an attention being seen in them -> a sentence with the cause.
    """

    def __init__(
        self, model: nn.Module, blocks: Blocks, gauges: Sequence[Gauge], padding: StatedPadding | None,
        processes: Processes, notices: Notices, sampler: Sampler | None = None, observers: Sequence[Observer] = (),
        heads: Mapping[str, Heads] | None = None, trace: FiniteTrace | None = None, trains: bool = False,
    ) -> None:  # fmt: skip
        attention = [gauge for gauge in gauges if gauge.kind in ATTENTION_KINDS]
        self.tally = Tally(attention, [gauge for gauge in gauges if gauge.kind is HIDDEN], sampler)
        self.numbering = LayerNumbering()
        self.losses, self.blocks = Losses(), blocks
        self.unseen: dict[str, str] = {}
        self._modes = Modes()
        self.source = EventSource(
            model,
            [self.tally, self.losses, self._modes, *observers],
            padding,
            heads=heads,
            trace=trace,
            is_alone=processes.is_alone,
            trains=trains,
        )
        self._processes, self._notices = processes, notices

    @property
    def layers(self) -> list[str]:
        """Names of the attention layers, by number; empty before the first measurement."""
        return self.numbering.names

    def measure(self) -> dict[str, Values]:
        """Return, by gauge, its table (layers, heads), or (layers,) for hidden-state gauges; {} if nothing ran.

        Raises `NotWatchable` if the model ran and none of its attention could be measured, now or before.
        """
        source, tally = self.source, self.tally
        # Every process asks the same questions in the same order: one that raised before the others ask would leave
        # them waiting.
        if self._processes.any(source.refusal is not None):
            raise NotWatchable(
                source.refusal or "another process refused to measure, and has given the reason"
            )
        nothing = not self._processes.any(bool(tally.combined))
        if nothing and source.ran and not self.numbering.layers:
            causes = [f"{name}: {message_of(error)}" for name, error in source.problems.items()]
            self.unseen = unseen_modules(source, source.problems, is_complete=True)
            causes += self.unseen.values()
            raise NotWatchable(no_attention_message(source.model, len(source.ran), causes))
        for name, error in source.problems.items():
            self._notices.problem(
                ("problem", name), f"attention of {name} could not be measured: {message_of(error)}"
            )
        if not nothing:
            self._check_arguments()
            self._report_partial()
            self._report_passes()
        for name, problem in tally.problems.items():
            self._notices.problem(("gauge", name), f"gauge {name!r} failed: {problem}")
        if nothing:
            if not source.ran and not source.problems:
                self._notices.problem("idle", f"{self._why_idle()} {Reason.NOT_RUN}")
            return {}
        kinds = {
            type(module) for module, name in source.names.items() if (name, 0) in tally.combined
        }
        skipped = [
            name
            for module, name in source.names.items()
            if type(module) in kinds and looks_like_attention(type(module))
        ]  # layers that this pass may have left out
        order = list(source.names.values())
        for layer in self.numbering.settle(tally.combined, order, skipped, self.blocks):
            self._notices.once(
                ("new", layer),
                f"attention in {self.layers[layer]} is new: it becomes layer {layer}",
            )
        self._name_unseen()
        return tally.values(self.numbering.layers, self._processes)

    def _why_idle(self) -> str:
        """Return why no pass was seen since the last step."""
        source = self.source
        if source.left_out:
            passes = " and ".join(f"{count} {why}" for why, count in source.left_out.items())
            return (
                f"the passes since the last step() are no training, and are not measured: {passes}"
            )
        if source.compiled_calls:
            return (
                "the model did not run since the last step(), or it ran inside a compiled function, where nothing is "
                "seen; give a probe batch, or compile the model instead of the function"
            )
        if source.was_bypassed:
            return "nothing was seen since the last step(): another library has put back nn.Module.__call__"
        return "the model did not run since the last step(): there is no attention to measure"

    def ways(self, is_probe: bool) -> list[str]:
        """Return what the passes since the last `clear` were, in words: batches, and the mode of the model."""
        is_replay = self.source.has_replayed and not is_probe
        return [describe_passes(is_probe, mode, is_replay) for mode in sorted(self._modes.modes())]

    def _check_arguments(self) -> None:
        """Raise for a mistake in the user's arguments that only a pass can show."""
        padding = self.source.padding
        mistake = None if padding is None else padding.mistake()
        if mistake is not None:
            raise ArgumentMistake(mistake)

    def _report_partial(self) -> None:
        """Report, once, layers without heads and layers that attend with a part of their queries."""
        modules = self.source.guard.without_heads
        if modules:
            names = ", ".join(modules[:3]) + (
                f" and {len(modules) - 3} more" if len(modules) > 3 else ""
            )
            self._notices.once(
                ("heads", len(modules)),
                f"it is not certain which axis holds the heads of {names}: reported as one, the mean over heads. If "
                f'you know it, say heads={{"{modules[0]}": "batch heads"}} or "heads batch" {Reason.HEAD_AXIS}',
            )
        for name, share in self.source.guard.shares.items():
            self._notices.once(
                ("share", name),
                f"{name} attends with {share:.1%} of its queries, and only those are measured {Reason.PART_OF_QUERIES}",
            )

    def _report_passes(self) -> None:
        """Report, once, that passes in eval mode are left out though nothing shows which passes are training."""
        left_out = self.tally.count_left_out()
        if left_out:
            self._notices.once(
                "passes",
                f"{left_out} passes in eval mode since the last step() are not measured, since there were passes in "
                "train mode, and no gradients were computed by the time of step(). Evaluate under torch.no_grad()",
            )

    def clear(self) -> None:
        """Forget the passes that were seen."""
        self.tally.clear()
        self.losses.clear()
        self._modes.clear()
        self.source.ran.clear()
        self.source.refusal = None  # the next measured step looks again
        self.source.compiled_calls = 0
        self.source.has_replayed = False
        self.source.left_out.clear()
        if self.source.trace is not None:
            self.source.trace.clear()

    def _name_unseen(self) -> None:
        """Report, once each, attention modules that ran without any attention being seen in or around them."""
        measured = [module_of(place) for place in self.tally.combined]
        unseen = unseen_modules(self.source, [*measured, *self.source.problems])
        self.unseen |= unseen
        for name, message in unseen.items():
            self._notices.problem(("unseen", name), message)
