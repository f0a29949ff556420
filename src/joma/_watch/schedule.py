"""When a watch measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Every = int | str | Callable[[int], bool]


def rule(every: Every) -> Callable[[int, int], bool]:
    """(a, b) -> is a measurement due in the steps a + 1, …, b? A function of the step is asked about b."""
    if callable(every):
        return lambda after, upto: bool(every(upto))
    if every == "log":
        return lambda after, upto: after < 1 or int(4 * math.log2(upto)) > int(4 * math.log2(after))
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return lambda after, upto: after < 1 or upto // every > after // every
    raise ValueError(f"every must be a positive number of steps, 'log', or a function of the step; got {every!r}")


class Schedule:
    """Which steps are measured. That has to be known before the step: the next increment is taken to be the last one.

    A multiple that was passed unexpectedly is made up for in the next step.

    Attributes:
        step: the last step that was made.
    """

    def __init__(self, every: Every) -> None:
        self._due = rule(every)
        self.step, self._measured, self._stride = 0, -1, 1
        self._expected, self._armed = 1, False

    def arm(self) -> bool:
        """Decide about the step to come: are its passes to be looked at?"""
        self._expected = self.step + self._stride
        self._armed = self._due(self._measured, self._expected)
        return self._armed

    def advance(self, step: int | None) -> bool:
        """A step was made, one more than the last unless its number is given: is it to be measured?"""
        before, self.step = self.step, self.step + 1 if step is None else int(step)
        self._stride = max(1, self.step - before)
        if self.step <= self._measured:  # from a checkpoint that is older: what came after it is made again
            self._measured = self.step - 1
        due = self._armed and (self.step >= self._expected or self._due(self._measured, self.step))
        if due:
            self._measured = self.step
        return due

    def go_on_from(self, step: int) -> None:
        """A run is continued: everything up to this step was measured."""
        self.step = self._measured = step

    def state(self) -> dict[str, int]:
        """What `restore` needs."""
        return {"step": self.step, "measured": self._measured, "stride": self._stride}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self.step, self._stride = int(state["step"]), int(state.get("stride", 1))
        self._measured = int(state.get("measured", self.step))
