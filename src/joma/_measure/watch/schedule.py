"""When a watch measures, and which gauges: each has a schedule, most often the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from joma._measure.gauges.registry import names_of

Every = int | str | Callable[[int], bool]
# Names of gauges, with commas or in several strings; or gauge -> its own schedule, where None is that
# of the watch.
Chosen = str | Iterable[str] | Mapping[str, Every | None]
DEFAULT = 100  # steps


def rule(every: Every) -> Callable[[int, int], bool]:
    """Return a function of (a, b): True if a measurement is due in the steps a + 1, …, b.

    A function of the user is asked about step b.
    """
    if callable(every):
        return lambda after, upto: bool(every(upto))
    if every == "log":
        return lambda after, upto: after < 1 or int(4 * math.log2(upto)) > int(4 * math.log2(after))
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return lambda after, upto: after < 1 or upto // every > after // every
    raise ValueError(
        f"every must be a positive number of steps, 'log', or a function of the step; got {every!r}"
    )


def schedules(chosen: Chosen, every: Every | None) -> dict[str, Every]:
    """Return gauge -> its schedule; ``every`` is that of gauges without one of their own."""
    if not isinstance(chosen, Mapping):
        return dict.fromkeys(names_of(chosen), _checked(every))
    if every is not None and chosen and all(period is not None for period in chosen.values()):
        raise ValueError(
            f"all gauges have a schedule of their own, {dict(chosen)}: leave out every={every!r}"
        )
    common = _checked(every)
    result = {}
    for name, period in chosen.items():
        try:
            result[name] = common if period is None else _checked(period)
        except ValueError as error:
            raise ValueError(f"gauges[{name!r}]: {error}") from None
    return result


def _checked(every: Every | None) -> Every:
    if every is None:
        return DEFAULT
    rule(every)  # which raises for one that makes no sense
    return every


class Schedule:
    """Which gauges are measured at which steps.

    That has to be known before the step, so the next increment is taken to be the last one. A
    multiple that was passed unexpectedly is made up for in the next step.

    Attributes:
        step: the last step that was made.
    """

    def __init__(self, every: Mapping[str, Every]) -> None:
        self._rules = {name: rule(period) for name, period in every.items()}
        self.step = 0
        self._stride = 1
        self._expected = 1
        self._measured = dict.fromkeys(every, -1)  # gauge -> the step of its last measurement
        self._armed: list[str] = []

    def arm(self) -> Collection[str]:
        """Return the gauges that are to be measured in the step to come."""
        self._expected = self.step + self._stride
        self._armed = []
        for name in self._rules:
            if self._is_due(name, self._expected):
                self._armed.append(name)
        return self._armed

    def advance(self, step: int | None) -> Collection[str]:
        """Take a step, one more than the last by default; return the gauges to measure in it."""
        before = self.step
        self.step = before + 1 if step is None else int(step)
        self._stride = max(1, self.step - before)
        for name, measured in self._measured.items():
            # From an older checkpoint: the steps that came after it are made again.
            self._measured[name] = min(measured, self.step - 1)
        has_arrived = self.step >= self._expected
        due = [name for name in self._armed if has_arrived or self._is_due(name, self.step)]
        self._measured |= dict.fromkeys(due, self.step)
        return due

    def _is_due(self, name: str, step: int) -> bool:
        return self._rules[name](self._measured[name], step)

    def go_on_from(self, step: int) -> None:
        """Continue a run in which everything up to this step was measured."""
        self.step = step
        self._measured = dict.fromkeys(self._rules, step)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"step": self.step, "measured": dict(self._measured), "stride": self._stride}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self.step = int(state["step"])
        self._stride = int(state["stride"])
        for name in self._rules:
            self._measured[name] = int(state["measured"].get(name, self.step))
