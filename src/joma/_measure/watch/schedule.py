"""When a watch measures, and which gauges: each has a schedule, most often the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from joma._measure.gauges.registry import names_of

Every = int | str | Callable[[int], bool]
# names of gauges, with commas or in several strings; or gauge -> its own schedule (None: that of the watch)
Chosen = str | Iterable[str] | Mapping[str, Every | None]
DEFAULT = 100  # steps


def rule(every: Every) -> Callable[[int, int], bool]:
    """(a, b) -> is a measurement due in the steps a + 1, …, b? A function of the step is asked about b."""
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
    """Gauge -> its schedule, from what `joma.watch` was given; ``every`` is that of gauges without one."""
    if not isinstance(chosen, Mapping):
        return dict.fromkeys(names_of(chosen), _checked(every))
    if every is not None and chosen and all(period is not None for period in chosen.values()):
        raise ValueError(
            f"all gauges have a schedule of their own, {dict(chosen)}: leave out every={every!r}"
        )
    common, result = _checked(every), {}
    for name, period in chosen.items():
        try:
            result[name] = common if period is None else _checked(period)
        except ValueError as error:
            raise ValueError(f"gauges[{name!r}]: {error}") from None
    return result


def _checked(every: Every | None) -> Every:
    rule(DEFAULT if every is None else every)
    return DEFAULT if every is None else every


class Schedule:
    """Which gauges are measured at which steps. That has to be known before the step: the next increment is taken to
    be the last one.

    A multiple that was passed unexpectedly is made up for in the next step.

    Attributes:
        step: the last step that was made.
    """

    def __init__(self, every: Mapping[str, Every]) -> None:
        self._due = {name: rule(period) for name, period in every.items()}
        self.step, self._stride, self._expected = 0, 1, 1
        self._measured = dict.fromkeys(every, -1)  # gauge -> when
        self._armed: list[str] = []

    def arm(self) -> Collection[str]:
        """Decide about the step to come: which gauges are to be measured?"""
        self._expected = self.step + self._stride
        self._armed = [
            name for name, due in self._due.items() if due(self._measured[name], self._expected)
        ]
        return self._armed

    def advance(self, step: int | None) -> Collection[str]:
        """A step was made, one more than the last unless its number is given: which gauges are to be measured?"""
        before, self.step = self.step, self.step + 1 if step is None else int(step)
        self._stride = max(1, self.step - before)
        # from a checkpoint that is older: what came after it is made again
        self._measured = {name: min(at, self.step - 1) for name, at in self._measured.items()}
        arrived = self.step >= self._expected
        now = [
            name
            for name in self._armed
            if arrived or self._due[name](self._measured[name], self.step)
        ]
        self._measured |= dict.fromkeys(now, self.step)
        return now

    def go_on_from(self, step: int) -> None:
        """A run is continued: everything up to this step was measured."""
        self.step, self._measured = step, dict.fromkeys(self._due, step)

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"step": self.step, "measured": dict(self._measured), "stride": self._stride}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.step, self._stride = int(state["step"]), int(state.get("stride", 1))
        self._measured = {name: int(state["measured"].get(name, self.step)) for name in self._due}
