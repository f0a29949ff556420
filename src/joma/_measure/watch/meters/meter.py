"""What the watch asks of every meter. A new kind of gauge is one more subclass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from joma._measure.events.events import Observer
from joma._measure.events.optimiser import StepObserver
from joma._measure.gauges.kinds import GaugeKind
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.passes import StepPasses
from joma._measure.watch.readings import Finding
from joma._measure.watch.watched import WatchedModel
from joma._runs.long_table import LongTable


@dataclass(frozen=True)
class MeterProblem:
    """Something that the user should know about a measurement; each key is reported once.

    Attributes:
        key: what it is about.
        message: a sentence.
        is_remark: True if nothing is missing because of it, so that it is not in `Watch.problems`.
    """

    key: Hashable
    message: str
    is_remark: bool = False


@dataclass
class MeterResult:
    """What a meter gives at one measurement.

    Attributes:
        tables: gauge -> its table, (layers,), (layers, heads) or (layers, experts).
        errors: gauge with the ending "_error" -> the standard error of each number.
        problems: what could not be measured, and why.
        findings: what is wrong with the model, for alarms.
    """

    tables: dict[str, LongTable] = field(default_factory=dict)
    errors: dict[str, LongTable] = field(default_factory=dict)
    problems: list[MeterProblem] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def report(self, key: Hashable, message: str, *, is_remark: bool = False) -> None:
        """Add a problem."""
        self.problems.append(MeterProblem(key, message, is_remark))


class Meter(ABC):
    """Measures the gauges of some kinds.

    A step goes like this: `prepare` with the gauges that will be due, observers see the passes and
    the optimiser's step, `measure`, `clear`.

    Attributes:
        title: what it measures, for messages.
        kinds: the kinds of gauges that it measures.
        gauges: those of the watch that are of these kinds.
        due: the names of the gauges that are measured in the step to come.
    """

    title: ClassVar[str]
    kinds: ClassVar[tuple[GaugeKind, ...]]

    def __init__(self, watched: WatchedModel) -> None:
        self.watched = watched
        self.gauges = [gauge for gauge in watched.gauges if gauge.kind in self.kinds]
        self.due: Collection[str] = ()

    @property
    def due_gauges(self) -> list[Gauge]:
        """The gauges that are measured in the step to come."""
        return [gauge for gauge in self.gauges if gauge.name in self.due]

    # What it observes

    @property
    def observers(self) -> Sequence[Observer]:
        """Observers of the passes that gauges are measured on."""
        return ()

    @property
    def training_observers(self) -> Sequence[Observer]:
        """Observers of training passes, even if gauges are measured on a probe or on no pass."""
        return ()

    @property
    def step_observers(self) -> Sequence[StepObserver]:
        """Observers of the steps of optimisers."""
        return ()

    @property
    def needs_training_passes(self) -> bool:
        """True if the `training_observers` have to hear the passes of the step to come."""
        return False

    def attach(self, passes: StepPasses) -> None:  # noqa: B027 (few meters need it)
        """Take the passes of the model, which exist only after all observers."""

    # A step

    def prepare(self, due: Collection[str]) -> None:
        """Make ready for a step in which the gauges ``due`` are measured."""
        self.due = due

    @abstractmethod
    def measure(self, step: int, due: Collection[str]) -> MeterResult:
        """Return the values of the gauges that are due, for the step that was just made."""

    def clear(self) -> None:  # noqa: B027 (few meters need it)
        """Forget the step."""

    # Its layers

    @property
    @abstractmethod
    def names(self) -> Mapping[str, Sequence[str]]:
        """Gauge -> the module or matrix that each layer is, as far as it is known."""

    @property
    def widths(self) -> Mapping[str, Sequence[int]]:
        """Gauge -> the number of heads or experts of each layer; 0 where there is nothing to measure."""
        return {}

    @property
    def axes(self) -> Mapping[str, list[str]]:
        """Gauge -> the names of the axes of its values."""
        return {gauge.name: gauge.axes for gauge in self.gauges}

    def renew(self) -> None:  # noqa: B027 (few meters need it)
        """Follow a model whose modules were replaced; layers keep their numbers.

        Raises:
            ValueError: its gauges cannot be measured on the model any more.
        """

    # A checkpoint

    def state(self) -> Any:
        """Return what the next measurement starts from, for a checkpoint; None if that is nothing."""
        return None

    def restore(self, state: Any) -> None:  # noqa: B027 (few meters need it)
        """Continue from a `state`."""
