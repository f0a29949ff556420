"""`Alarm`: the base class of the rules that look at a run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from joma._measure.watch.alarms.memory import Memory
from joma._measure.watch.readings import Finding, Reading

AlertLevel = Literal["notice", "warning", "critical"]


@dataclass(frozen=True)
class GaugeValue:
    """One number of a reading.

    Attributes:
        gauge: name of its gauge, with the part: "stable_rank.q".
        layer: number of its layer.
        head: number of its head; None if the layer has one value.
        value: the number; NaN if it was not measured, or is not a number.
        place: a name for gauge, layer and head, to remember things by.
    """

    gauge: str
    layer: int
    head: int | None
    value: float
    place: str


@dataclass
class Alarm(ABC):
    """A rule that takes the readings of a run, one at a time, and finds what is wrong.

    A subclass is a dataclass. Its arguments are its thresholds, each with a comment on its source.
    Fields with ``init=False`` are its memory from reading to reading. A checkpoint keeps them, so
    they have to be numbers, texts, lists, dicts with texts as keys, or a `Memory`.
    `joma.alarm` registers the class.

    Attributes:
        kind: name of its alerts, for example "rank loss".
        level: severity of its alerts: "notice", "warning" or "critical".
        what_to_do: advice for the user, one sentence without a capital letter or a full stop.
        gauges: names of the gauges that it looks at, without their parts. A reading has their
            values in the steps in which the watch measures them.
        is_of_model: True if it raises one alert for the model; False for one alert per layer.
    """

    kind: ClassVar[str]
    level: ClassVar[AlertLevel]
    what_to_do: ClassVar[str]
    gauges: ClassVar[tuple[str, ...]] = ()
    is_of_model: ClassVar[bool] = False

    @abstractmethod
    def observe(self, reading: Reading) -> Iterable[Finding]:
        """Take a reading and return what is wrong now, one finding per head or layer."""

    def state(self) -> dict[str, Any]:
        """Return what the rule remembers, for a checkpoint: its fields that are not arguments."""
        state: dict[str, Any] = {}
        for name in self._memory_fields():
            value = getattr(self, name)
            if isinstance(value, Memory):
                state[name] = value.state()
            else:
                state[name] = deepcopy(value)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, which may have been written as JSON.

        A field that the state lacks stays as it is: the class may have gained it since.
        """
        for name in self._memory_fields():
            if name not in state:
                continue
            value = getattr(self, name)
            if isinstance(value, Memory):
                value.restore(state[name])
            else:
                setattr(self, name, deepcopy(state[name]))

    def _memory_fields(self) -> list[str]:
        return [field.name for field in fields(self) if not field.init]

    def onset(self, step: int) -> int:
        """Return the step at which a finding of ``step`` began."""
        return step

    def values(self, reading: Reading) -> Iterator[GaugeValue]:
        """Yield the values of the alarm's gauges, one per layer and head."""
        for gauge, layers in reading.gauges.items():
            if gauge.split(".")[0] not in self.gauges:
                continue
            for layer, values in enumerate(layers):
                for index, value in enumerate(values):
                    head = index if len(values) > 1 else None
                    yield GaugeValue(gauge, layer, head, value, f"{gauge}:{layer}:{index}")

    def layer_values(self, reading: Reading) -> Iterator[GaugeValue]:
        """Yield the first value of each layer, for gauges that have one value per layer."""
        for value in self.values(reading):
            if value.head is None:
                yield value
            elif value.head == 0:
                yield GaugeValue(value.gauge, value.layer, None, value.value, value.place)

    def finding(
        self,
        gauge: str,
        value: float,
        threshold: float | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        is_everywhere: bool = False,
    ) -> Finding:
        """Return a finding of this alarm's kind.

        Arguments:
            gauge: name of the gauge.
            value: the value that is wrong.
            threshold: the number that the value is beyond; None if there is none.
            layer: number of the layer; None if it is not about one layer.
            head: number of the head; None if it is about the whole layer.
            is_everywhere: True if no layer is healthy while this lasts.

        Returns:
            The finding, for `observe` to return.
        """
        return Finding(self.kind, layer, head, gauge, value, threshold, is_everywhere=is_everywhere)


class LossAlarm(Alarm):
    """A rule that takes the loss of every step, also of steps that are not measured."""

    is_of_model = True

    @abstractmethod
    def take_loss(self, step: int, loss: float) -> None:
        """Take the loss of a step. Steps increase."""

    @abstractmethod
    def findings(self) -> list[Finding]:
        """Return what is wrong with the losses so far."""

    def observe(self, reading: Reading) -> Iterable[Finding]:
        return self.findings()


def loss_of(reading: Reading) -> float:
    """Return the loss of a reading; NaN if it is unknown."""
    if reading.loss is None:
        return math.nan
    return reading.loss
