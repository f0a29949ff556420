"""The passes of a model since the last step: who observes them, and what they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from joma._measure.events.axes import Heads
from joma._measure.events.events import Observer, Pass, PassBegins, PassEnds, counted
from joma._measure.events.finite import FiniteTrace
from joma._measure.events.source import EventSource
from joma._measure.watch.watched import WatchedModel
from joma._runs.measured import describe_passes


class LossObserver:
    """An observer of the losses that a model itself gives in training, as ``output.loss``."""

    wants = (PassEnds,)

    def __init__(self) -> None:
        self._losses: dict[Pass, Tensor] = {}

    def observe(self, event: PassEnds) -> None:
        """A pass came to its end."""
        if isinstance(event.output, dict):
            loss = event.output.get("loss")
        else:
            loss = getattr(event.output, "loss", None)
        if event.grad and isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses[event.current] = loss.detach()

    def mean(self) -> float | None:
        """Return the mean over the passes of training; None if there was none."""
        if not self._losses:
            return None
        losses = [self._losses[one].double().cpu() for one in counted(list(self._losses))]
        return float(torch.stack(losses).mean())

    def clear(self) -> None:
        """Forget the losses."""
        self._losses.clear()


class ModeObserver:
    """An observer of the modes, train or eval, of the passes."""

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
        """Forget the passes."""
        self._passes.clear()


class StepPasses:
    """The passes since the last step.

    Arguments:
        watched: the model.
        observers: of its passes.
        heads: module -> what the user states about its heads.
        trace: finds the first module whose output is not finite.
        is_training: True if passes with gradients are sure to come.

    Attributes:
        source: the events of the model.
        losses: those that the model itself gives.
        unseen: modules that should attend, without an attention being seen in them -> a sentence
            with the cause.
    """

    def __init__(
        self,
        watched: WatchedModel,
        observers: Iterable[Observer],
        heads: Mapping[str, Heads] | None = None,
        trace: FiniteTrace | None = None,
        is_training: bool = False,
    ) -> None:
        self.losses = LossObserver()
        self.unseen: dict[str, str] = {}
        self._modes = ModeObserver()
        self.source = EventSource(
            watched.model,
            [self.losses, self._modes, *observers],
            watched.padding,
            heads=heads,
            trace=trace,
            is_alone=watched.processes.is_alone,
            trains=is_training,
        )

    def describe(self, is_probe: bool) -> list[str]:
        """Return what the passes were, in words: batches, and the mode of the model."""
        is_replay = self.source.has_replayed and not is_probe
        modes = sorted(self._modes.modes())
        return [describe_passes(is_probe, mode, is_replay) for mode in modes]

    def clear(self) -> None:
        """Forget the passes."""
        self.losses.clear()
        self._modes.clear()
        self.source.ran.clear()
        self.source.refusal = None  # the next measured step looks again
        self.source.compiled_calls = 0
        self.source.has_replayed = False
        self.source.left_out.clear()
        if self.source.trace is not None:
            self.source.trace.clear()
