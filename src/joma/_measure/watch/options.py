"""The options of a watch, checked as soon as they are given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Optimizer

from joma._measure.events.axes import Heads
from joma._measure.events.padding import Padding
from joma._measure.gauges.registry import Gauge, in_training
from joma._measure.watch.alarms.reporting import OnAlert
from joma._measure.watch.inputs import check_run
from joma._measure.watch.processes import ProcessScope
from joma._measure.watch.run_request import Resume
from joma._measure.watch.schedule import Chosen, Every, schedules
from joma._runs.writer import RunWriter

DEFAULT_GAUGES = ("entropy", "stable_rank")


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Everything that `joma.watch` can be asked for, except the model; see there for what each option means.

    A mistake that can be seen without the model is an error when the options are made.

    Attributes:
        periods: gauge -> its schedule.
        chosen_gauges: the gauges to measure, in the order in which they were named.
    """

    run: str | os.PathLike[str] | RunWriter | None = None
    every: Every | None = None
    gauges: Chosen | None = None
    probe: Any = None
    padding: Padding | None = None
    heads: Heads | Mapping[str, Heads] | None = None
    mlp: str | Sequence[str] | None = None
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    queries: int | None = None
    processes: ProcessScope = "own"
    on_alert: OnAlert | Literal["stop"] | None = None
    live: bool | None = None
    patterns: bool | None = None
    words: Sequence[str] | None = None
    overwrite: bool = False
    resume: Resume = False
    periods: Mapping[str, Every] = field(init=False, repr=False)
    chosen_gauges: Sequence[Gauge] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_run(self.run, self.overwrite, self.resume)
        if self.on_alert not in (None, "stop") and not callable(self.on_alert):
            raise TypeError(
                f"on_alert must be 'stop' or a function of an alert; got {self.on_alert!r}"
            )
        if self.gauges is not None and not isinstance(self.gauges, (str, Mapping)):
            # A generator can be read only once, and `dataclasses.replace` checks the options again.
            object.__setattr__(self, "gauges", tuple(self.gauges))
        names = DEFAULT_GAUGES if self.gauges is None else self.gauges
        periods = schedules(names, self.every)
        chosen_gauges = in_training(periods)
        if not chosen_gauges:
            raise ValueError(f"no gauges to measure; give some, for example {DEFAULT_GAUGES}")
        # A frozen dataclass sets what it derives in this way.
        object.__setattr__(self, "periods", periods)
        object.__setattr__(self, "chosen_gauges", chosen_gauges)

    @property
    def has_default_gauges(self) -> bool:
        """True if the user named no gauges: those that do not apply to the model are left out."""
        return self.gauges is None
