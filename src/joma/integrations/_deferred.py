"""A watch that begins when training does: trainers move and wrap the model before their first step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from joma._measure.events.optimiser import optimisers_of
from joma._measure.watch.alarms.notices import warn
from joma._measure.watch.options import WatchOptions
from joma._measure.watch.schedule import Chosen, Every
from joma._measure.watch.watch import Watch

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn
    from torch.optim import Optimizer

    from joma._measure.events.axes import Heads
    from joma._measure.events.padding import Padding
    from joma._measure.watch.alarms import Alert
    from joma._measure.watch.alarms.reporting import OnAlert
    from joma._measure.watch.phases import Phases
    from joma._measure.watch.processes import ProcessScope
    from joma._measure.watch.record import Resume


Action = Literal["stop", "lower"]  # what a trainer does at a critical alert
LOWER = 0.5  # of the learning rate


class Options(TypedDict, total=False):
    """The options of `joma.watch` besides run, every, gauges and optimizer, which is the trainer's."""

    probe: Any
    padding: Padding | None
    heads: Heads | Mapping[str, Heads] | None
    mlp: str | Sequence[str] | None
    queries: int | None
    processes: ProcessScope
    on_alert: OnAlert | Action | None
    live: bool | None
    patterns: bool | None
    words: Sequence[str] | None
    overwrite: bool
    resume: Resume


class Deferred:
    """Takes the options of `joma.watch` now and makes the `Watch` later; what can be wrong with them is said now.

    ``live`` is False unless asked for: trainers draw a progress bar in the same terminal.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None,
        every: Every | None,
        gauges: Chosen | None,
        options: Options,
    ) -> None:
        if unknown := options.keys() - Options.__annotations__.keys():
            raise TypeError(
                f"unknown options {sorted(unknown)}; joma.watch has {', '.join(Options.__annotations__)}"
            )
        self._action = options.get("on_alert")
        if not (self._action is None or callable(self._action) or self._action in get_args(Action)):
            raise ValueError(
                f"on_alert must be 'stop', 'lower' or a function of an alert; got {self._action!r}"
            )
        self.path = self._named = run  # the folder that is written, and as it was asked for
        of_watch: dict[str, Any] = {"live": False, **options}
        of_watch.pop("on_alert", None)
        self._options = WatchOptions(run=run, every=every, gauges=gauges, **of_watch)
        self._watch: Watch | None = None
        self._state: Mapping[str, Any] | None = None  # of a checkpoint that training goes on from
        self._open = False
        self._optimizers: list[Optimizer] = []
        self._lowered = -1  # the step at which rates were lowered last

    @property
    def watch(self) -> Watch:
        """The `Watch`, once training has begun; it stays readable after the end."""
        if self._watch is None:
            raise RuntimeError(
                "training has not begun: the model is watched from its first step on"
            )
        return self._watch

    @property
    def phases(self) -> Phases:
        """One `Phase` per layer, after the first measurement."""
        return self.watch.phases

    @property
    def layers(self) -> list[str]:
        """Names of the attention layers, by number."""
        return self.watch.layers

    def frame(self) -> pd.DataFrame:
        """The long table of all measurements so far, as `Watch.frame`."""
        return self.watch.frame()

    def _stop(self) -> None:
        """Have the trainer stop after this step."""
        raise NotImplementedError

    def _schedulers(self) -> list[Any]:
        """The trainer's schedulers of learning rates."""
        raise NotImplementedError

    def _act(self, alert: Alert) -> None:
        """Something went wrong: do what was asked for; "stop" and "lower" act on critical alerts only."""
        if callable(self._action):
            self._action(alert)
        elif alert.level == "critical" and self._action == "stop":
            self._stop()
        elif alert.level == "critical" and self.watch.last_step != self._lowered:
            self._lowered = self.watch.last_step  # once per step, however many layers there are
            for optimizer in self._optimizers:
                lower(optimizer, self._schedulers())

    def _begin(self, model: nn.Module, optimizers: Any = None) -> None:
        """Training begins; a beginning without an end is one that the trainer gave up to try again.

        What the trainer holds as its optimisers may be something that cannot be followed: then training is watched
        without them.
        """
        options = replace(self._options, run=self._named)
        if self._open:
            self.watch.close("failed", "training was started again")
            options = replace(options, run=self.path, overwrite=True, resume=False)
        self._optimizers = _followed(model, optimizers) or []
        if self._action == "lower" and not self._optimizers:
            raise ValueError("on_alert='lower' needs an optimiser that can be followed")
        on_alert = None if self._action is None else self._act
        options = replace(options, optimizer=self._optimizers or None, on_alert=on_alert)
        self._watch = Watch(model, options)
        self._open = True
        self.path = self._watch.path
        if self._state is not None:
            try:
                self._watch.load_state_dict(self._state)
            except ValueError as error:
                warn(f"{error}; its phases and alarms begin anew")
            self._state = None

    def _end(self, error: BaseException | None = None) -> None:
        if self._open:
            self._open = False
            self.watch.__exit__(None if error is None else type(error), error, None)

    def __repr__(self) -> str:
        where = f"run {self.path}" if self.path is not None else "no run folder"
        inside = f"{where}, training has not begun" if self._watch is None else repr(self._watch)
        return f"{type(self).__name__}({inside})"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>" if self._watch is None else self._watch._repr_html_()


def lower(optimizer: Optimizer, schedulers: Sequence[Any] = ()) -> None:
    """Halve the learning rates of an optimiser, and what its schedulers make them from."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * LOWER
    for given in schedulers:
        scheduler = getattr(
            given, "scheduler", given
        )  # Accelerate wraps it, and the optimiser that it holds
        followed = getattr(scheduler, "optimizer", None)
        followed = getattr(followed, "optimizer", followed)
        if followed is getattr(optimizer, "optimizer", optimizer) and hasattr(
            scheduler, "base_lrs"
        ):
            scheduler.base_lrs = [rate * LOWER for rate in scheduler.base_lrs]


def _followed(model: nn.Module, optimizers: Any) -> list[Optimizer] | None:
    """The optimisers that can be followed; None, and a warning, if there are none."""
    if not optimizers:
        return None
    try:
        return optimisers_of(model, optimizers)
    except (TypeError, ValueError) as error:
        warn(f"learning rates are not recorded: {error}")
        return None
