"""A watch that begins with the training, after a trainer has moved and wrapped the model."""

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
    from joma._measure.watch.run_request import Resume

# What a trainer does at a critical alert: stop, or lower the learning rates.
AlertAction = Literal["stop", "lower"]

# Factor of the learning rates at a critical alert, with on_alert="lower".
LOWERED_SHARE = 0.5


class WatchKeywords(TypedDict, total=False):
    """The options of `joma.watch` but run, every, gauges and optimizer, which is the trainer's."""

    probe: Any
    padding: Padding | None
    heads: Heads | Mapping[str, Heads] | None
    mlp: str | Sequence[str] | None
    queries: int | None
    processes: ProcessScope
    on_alert: OnAlert | AlertAction | None
    live: bool | None
    patterns: bool | None
    words: Sequence[str] | None
    overwrite: bool
    resume: Resume


class DeferredWatch:
    """Takes the options of `joma.watch` now, checks them, and creates the `Watch` later.

    ``live`` is False by default: trainers draw a progress bar in the same terminal.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None,
        every: Every | None,
        gauges: Chosen | None,
        keywords: WatchKeywords,
    ) -> None:
        unknown = keywords.keys() - WatchKeywords.__annotations__.keys()
        if unknown:
            names = ", ".join(WatchKeywords.__annotations__)
            raise TypeError(f"unknown options {sorted(unknown)}; joma.watch has {names}")
        action = keywords.get("on_alert")
        if not (action is None or callable(action) or action in get_args(AlertAction)):
            raise ValueError(
                f"on_alert must be 'stop', 'lower' or a function of an alert; got {action!r}"
            )
        self.path = run  # the folder that is written
        self._requested_run = run
        self._action = action
        watch_keywords: dict[str, Any] = {"live": False, **keywords}
        watch_keywords.pop("on_alert", None)
        self._options = WatchOptions(run=run, every=every, gauges=gauges, **watch_keywords)
        self._watch: Watch | None = None
        self._state: Mapping[str, Any] | None = None  # of the checkpoint that training resumes from
        self._is_open = False
        self._optimizers: list[Optimizer] = []
        self._lowered_step = -1  # step at which rates were lowered last

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
        """Return the long table of all measurements so far, as `Watch.frame` does."""
        return self.watch.frame()

    def _stop(self) -> None:
        """Make the trainer stop after this step."""
        raise NotImplementedError

    def _schedulers(self) -> list[Any]:
        """Return the trainer's schedulers of learning rates."""
        raise NotImplementedError

    def _act(self, alert: Alert) -> None:
        """Do what the user asked for; "stop" and "lower" act on critical alerts only."""
        if callable(self._action):
            self._action(alert)
        elif alert.level != "critical":
            return
        elif self._action == "stop":
            self._stop()
        elif self.watch.last_step != self._lowered_step:
            # Once per step, however many layers have an alert.
            self._lowered_step = self.watch.last_step
            for optimizer in self._optimizers:
                lower_rates(optimizer, self._schedulers())

    def _begin(self, model: nn.Module, optimizers: Any = None) -> None:
        """Create the watch when training begins.

        The trainer's optimisers may be objects that cannot be followed. Training is then watched
        without them.
        """
        options = replace(self._options, run=self._requested_run)
        if self._is_open:
            # A beginning without an end is one that the trainer gave up to try again.
            self.watch.close("failed", "training was started again")
            options = replace(options, run=self.path, overwrite=True, resume=False)
        self._optimizers = _followed_optimizers(model, optimizers)
        if self._action == "lower" and not self._optimizers:
            raise ValueError("on_alert='lower' needs an optimiser that can be followed")
        if self._action is not None:
            options = replace(options, on_alert=self._act)
        self._watch = Watch(model, replace(options, optimizer=self._optimizers or None))
        self._is_open = True
        self.path = self._watch.path
        if self._state is not None:
            try:
                self._watch.load_state_dict(self._state)
            except ValueError as error:
                warn(f"{error}; its phases and alarms begin anew")
            self._state = None

    def _end(self, error: BaseException | None = None) -> None:
        if not self._is_open:
            return
        self._is_open = False
        error_type = None
        if error is not None:
            error_type = type(error)
        self.watch.__exit__(error_type, error, None)

    def __repr__(self) -> str:
        if self._watch is not None:
            inside = repr(self._watch)
        elif self.path is not None:
            inside = f"run {self.path}, training has not begun"
        else:
            inside = "no run folder, training has not begun"
        return f"{type(self).__name__}({inside})"

    def _repr_html_(self) -> str:
        if self._watch is None:
            return f"<p>{self!r}</p>"
        return self._watch._repr_html_()


def lower_rates(optimizer: Optimizer, schedulers: Sequence[Any] = ()) -> None:
    """Halve the learning rates of an optimiser, and the base rates of its schedulers."""
    for group in optimizer.param_groups:
        for name in ("lr", "initial_lr"):
            if name in group:
                group[name] = group[name] * LOWERED_SHARE
    for wrapped in schedulers:
        # Accelerate wraps schedulers, and the optimisers inside them.
        scheduler = getattr(wrapped, "scheduler", wrapped)
        scheduled = getattr(scheduler, "optimizer", None)
        is_of_optimizer = _unwrapped(scheduled) is _unwrapped(optimizer)
        if is_of_optimizer and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * LOWERED_SHARE for rate in scheduler.base_lrs]


def _unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def _followed_optimizers(model: nn.Module, optimizers: Any) -> list[Optimizer]:
    """Return the optimisers that can be followed; warn if they cannot be."""
    if not optimizers:
        return []
    try:
        return optimisers_of(model, optimizers)
    except (TypeError, ValueError) as error:
        warn(f"learning rates are not recorded: {error}")
        return []
