"""Reducers: how the values of one gauge become one number per head of a step.

There is one class per way to reduce. All of them keep a few sums or maxima per head, their *parts*,
which are combined in the same way over the calls of a pass, the passes of a step, and processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from joma._measure.gauges.kernels import widened
from joma._measure.watch.processes import Processes
from joma._runs.long_table import LongTable


@dataclass(frozen=True)
class Combination:
    """How two values of one part become one.

    Attributes:
        neutral: the value that changes nothing.
        combine: the operation, entry by entry.
    """

    neutral: float
    combine: Callable[[Tensor, Tensor], Tensor]


SUM = Combination(0.0, torch.add)
# Unlike `max` of Python, `torch.maximum` gives NaN if one of the two is NaN.
LARGEST = Combination(-math.inf, torch.maximum)


@dataclass(frozen=True, eq=False)
class QuerySample:
    """The queries of one attention call that were drawn to be measured.

    Attributes:
        positions: (n,), in increasing order.
        is_real: (B, H, T), for all queries of the call: those that see a key and are not padding.
    """

    positions: Tensor
    is_real: Tensor

    @cached_property
    def real_queries(self) -> Tensor:
        """The number of real queries in the call, (H,)."""
        return self.is_real.sum(dim=(0, 2)).double()

    @cached_property
    def drawn_real_queries(self) -> Tensor:
        """The number of real queries among those that were drawn, (H,)."""
        return self.is_real[..., self.positions].sum(dim=(0, 2))


@dataclass(frozen=True, eq=False)
class Reduced:
    """One number per head, and which of the heads were measured.

    Attributes:
        numbers: float64, (H,), (layers, H) or (gauges, layers, H); NaN where nothing was measured.
        measured: bool, of the same shape.
    """

    numbers: Tensor
    measured: Tensor

    @classmethod
    def where(cls, measured: Tensor, numbers: Tensor) -> Reduced:
        """Return the numbers, with NaN where ``measured`` is False."""
        return cls(torch.where(measured, numbers, math.nan), measured)

    def table(self, gauge: str) -> LongTable:
        """Return one row per number that was measured."""
        return LongTable.of_array(gauge, self.numbers.numpy(), self.measured.numpy())

    def tables(self, gauges: Sequence[str]) -> dict[str, LongTable]:
        """Return the table of each gauge, of numbers (gauges, layers, H)."""
        numbers = self.numbers.numpy()
        measured = self.measured.numpy()
        tables = {}
        for row, gauge in enumerate(gauges):
            tables[gauge] = LongTable.of_array(gauge, numbers[row], measured[row])
        return tables


class Reducer(ABC):
    """Combines the values of gauges: over calls and passes, and then over layers and processes.

    Attributes:
        parts: name -> one number per head: (H,) of one gauge, (gauges, H) of several, and
            (layers, H) or (gauges, layers, H) in a table; empty if nothing was added yet. Tensors
            are replaced and never changed in place, so that copies are cheap.
    """

    combinations: ClassVar[Mapping[str, Combination]]

    def __init__(self) -> None:
        self.parts: dict[str, Tensor] = {}

    @classmethod
    @abstractmethod
    def reduce(
        cls, values: Tensor, is_counted: Tensor, sample: QuerySample | None
    ) -> dict[str, Tensor]:
        """Return the parts of one call, (gauges, H) each.

        Several gauges of one attention are reduced together: of a small model, the number of tensor
        operations costs more than their size.

        Arguments:
            values: (gauges, B, H, T), or (gauges, B, H) for gauges with one value per sample.
            is_counted: bool, of the same shape; False at padding and where a gauge is not defined.
            sample: the queries that the values are of; None if they are all queries of the call.
        """

    @abstractmethod
    def result(self) -> Reduced:
        """Return one number per head; heads without a real query were not measured.

        NaN is a number that was computed, and is an alert. So it never stands for "not measured".
        """

    @abstractmethod
    def add_number(self, number: float) -> None:
        """Add the value of a gauge that gives one number per pass, as if the layer had one head."""

    def error(self) -> Reduced | None:
        """Return the standard error of each number; None if the numbers are exact."""
        return None

    def add(self, values: Tensor, is_counted: Tensor, sample: QuerySample | None = None) -> None:
        """Add the values of this gauge alone, (B, H, T) or (B, H); see `reduce`."""
        parts = self.reduce(values[None], is_counted[None], sample)  # (1, H) each
        self.add_parts({name: part[0] for name, part in parts.items()})

    def merge(self, other: Self) -> None:
        """Add all that another reducer of the same class has, which stays as it is."""
        self.add_parts(other.parts)

    def copy(self) -> Self:
        """Return a reducer that can go on without changing this one."""
        twin = type(self)()
        twin.parts = dict(self.parts)
        return twin

    def of_gauge(self, row: int) -> Self:
        """Return what this reducer of several gauges has of one of them, (1, H)."""
        one = type(self)()
        one.parts = {name: part[row : row + 1] for name, part in self.parts.items()}
        return one

    def add_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Add the parts of another call, pass or reducer of the same gauges."""
        if not self.parts:
            self.parts = dict(parts)
            return
        for name, part in parts.items():
            self.parts[name] = self.combinations[name].combine(self.parts[name], part)

    # A table of all layers

    @classmethod
    def table(cls, *shape: int) -> Self:
        """Return a reducer with parts of this shape in which nothing was measured.

        Arguments:
            shape: layers and heads; or gauges, layers and heads.
        """
        table = cls()
        for name, combination in cls.combinations.items():
            table.parts[name] = torch.full(shape, combination.neutral, dtype=torch.float64)
        return table

    def put(
        self, layer: int, first_head: int, reducer: Self, gauges: Sequence[int] | None = None
    ) -> None:
        """Write the heads of a reducer, (H,) or (gauges, H), into this table.

        Arguments:
            layer: its number.
            first_head: where the heads begin.
            reducer: of one layer.
            gauges: the rows of its gauges in this table; all rows by default.
        """
        for name, part in reducer.parts.items():
            rows = self.parts[name]
            heads = slice(first_head, first_head + part.shape[-1])
            # The assignment converts type and device.
            if gauges is None:
                rows[..., layer, heads] = part
            else:
                rows[gauges, layer, heads] = part.to(rows)

    def combine(self, processes: Processes) -> None:
        """Combine a table with those of the other processes."""
        if not processes.is_joint:
            return
        names = list(self.parts)
        if all(self.combinations[name] is SUM for name in names):
            # One message instead of one per part: each of them waits for the slowest process.
            together = torch.stack([self.parts[name] for name in names])
            processes.sum_(together)
            self.parts = dict(zip(names, together, strict=True))
            return
        for name, part in self.parts.items():
            # A maximum over processes may drop NaN, and it never drops infinity.
            largest = torch.where(part.isnan(), math.inf, part)
            self.parts[name] = processes.max_(largest)


def _axes_but_heads(values: Tensor) -> tuple[int, ...]:
    """Return the axes that are reduced: all but the gauges and the heads, the first and the third."""
    return (1, *range(3, values.dim()))


class Mean(Reducer):
    """The mean over all real queries (or samples, or passes) of a step."""

    combinations: ClassVar = {"total": SUM, "count": SUM}

    @classmethod
    def reduce(
        cls, values: Tensor, is_counted: Tensor, sample: QuerySample | None
    ) -> dict[str, Tensor]:
        if sample is not None:
            raise TypeError("a sample of queries is reduced by SampledMean")
        axes = _axes_but_heads(values)
        total = widened(torch.where(is_counted, values, 0.0)).sum(dim=axes)  # (gauges, H)
        count = widened(is_counted.sum(dim=axes))  # (gauges, H)
        return {"total": total, "count": count}

    def add_number(self, number: float) -> None:
        total = torch.tensor([number], dtype=torch.float64)
        self.add_parts({"total": total, "count": torch.ones_like(total)})

    def result(self) -> Reduced:
        count = self.parts["count"]
        return Reduced.where(count > 0, self.parts["total"] / count.clamp(min=1))


class Max(Reducer):
    """The largest value over all real queries (or samples, or passes) of a step."""

    combinations: ClassVar = {"largest": LARGEST}

    @classmethod
    def reduce(
        cls, values: Tensor, is_counted: Tensor, sample: QuerySample | None
    ) -> dict[str, Tensor]:
        # Of a sample, this is the largest value among the queries that were drawn. Phases are read
        # from it, and `check_sampled` refuses gauges of the user that need all queries.
        low = widened(torch.where(is_counted, values, -math.inf))
        if not low.numel():
            gauges, _, heads = values.shape[:3]
            return {"largest": low.new_full((gauges, heads), -math.inf)}
        return {"largest": low.amax(dim=_axes_but_heads(values))}  # (gauges, H)

    def add_number(self, number: float) -> None:
        self.add_parts({"largest": torch.tensor([number], dtype=torch.float64)})

    def result(self) -> Reduced:
        largest = self.parts["largest"]
        return Reduced.where(largest != -math.inf, largest)


class SampledMean(Mean):
    """The mean over all real queries, estimated without bias from a sample of them.

    n of T positions are drawn without replacement, the same for all samples of a batch. With y_t
    the sum of a gauge over the batch at position t, the total is estimated by T·mean(y), whose
    variance is T²(1 − n/T) s²/n. The number of real queries is known exactly, so that the mean is
    unbiased too.
    """

    combinations: ClassVar = {"total": SUM, "count": SUM, "variance": SUM}

    @classmethod
    def reduce(
        cls, values: Tensor, is_counted: Tensor, sample: QuerySample | None
    ) -> dict[str, Tensor]:
        if sample is None:
            parts = super().reduce(values, is_counted, None)
            return parts | {"variance": torch.zeros_like(parts["total"])}
        queries = sample.is_real.shape[2]
        drawn = len(sample.positions)
        per_position = torch.where(is_counted, values, 0.0).double().sum(dim=1)  # (gauges, H, n)
        total = queries * per_position.mean(dim=-1)  # (gauges, H)
        variance = queries**2 * (1 - drawn / queries) * per_position.var(dim=-1) / drawn
        counted = is_counted.sum(dim=(1, 3)).double()  # (gauges, H)
        # Where a gauge is not defined at some of the queries, their number is an estimate as well.
        is_everywhere_defined = sample.drawn_real_queries == counted
        estimated = counted * queries / drawn
        count = torch.where(is_everywhere_defined, sample.real_queries, estimated)
        return {"total": total, "count": count, "variance": variance}

    def error(self) -> Reduced:
        count = self.parts["count"]
        return Reduced.where(count > 0, self.parts["variance"].sqrt() / count.clamp(min=1))


REDUCERS: dict[str, type[Reducer]] = {"mean": Mean, "max": Max}
