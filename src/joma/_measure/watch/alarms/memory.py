"""The memory of alarms from reading to reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

Tracker = TypeVar("Tracker")


@runtime_checkable
class Memory(Protocol):
    """Something that can be written to a checkpoint and read back."""

    def state(self) -> Any:
        """Return numbers, texts, lists and dicts, as JSON can store them."""

    def restore(self, state: Any) -> None:
        """Continue from a `state`."""


class PerPlace(Generic[Tracker]):
    """One tracker per place, created when it is first asked for.

    A tracker is a dataclass of plain numbers, all with defaults.
    """

    def __init__(self, create: Callable[..., Tracker]) -> None:
        self._create = create
        self._trackers: dict[str, Tracker] = {}

    def __getitem__(self, place: str) -> Tracker:
        if place not in self._trackers:
            self._trackers[place] = self._create()
        return self._trackers[place]

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the fields of all trackers, by place."""
        return {place: dict(vars(tracker)) for place, tracker in self._trackers.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continue from a `state`."""
        self._trackers = {place: self._create(**fields) for place, fields in state.items()}


@dataclass
class Growth:
    """The growth of a value since it was first measured."""

    first: float = math.nan
    beyond: int = 0  # measurements in a row above the threshold

    def passed_threshold(self, value: float, level: float, factor: float) -> float | None:
        """Take a value; return the threshold if this value and the one before were above it.

        The threshold is ``level``, or ``factor`` times the first value if that is higher.
        """
        if math.isfinite(value) and math.isnan(self.first):
            self.first = abs(value)
        # The first value may be NaN: `max` then returns the level, which has to come first.
        threshold = max(level, factor * self.first)
        # An infinite value is an alert of its own: "not finite".
        if math.inf > value > threshold:
            self.beyond += 1
        else:
            self.beyond = 0
        if self.beyond < 2:
            return None
        return threshold
