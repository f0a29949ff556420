"""The long table: one row per number that was measured, with its gauge, layer and head.

It is the one shape of numbers between a reducer and a figure. Meters return long tables, a
measurement joins them, `RunWriter` encodes the result as lines, and `Run` decodes all lines of a
run into one table.

Two different things must never share one value. A number that was *not measured* (a layer that did
not run, a gauge that is not due or not defined) has no row. A number that was computed and is *not
finite* has a row with NaN or infinity, and that is an alert.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

# With how many digits a run folder stores numbers. As decimals, float32 takes half of the room of
# float64.
Precision = Literal["float32", "float64", "integer", "boolean"]


@dataclass(frozen=True)
class Section:
    """What the rows of one gauge have in common.

    Attributes:
        gauge: its name.
        shape: of an array with a place for each number, measured or not: () for one number,
            (layers,), (layers, heads) or, of other writers than a watch, any other.
        precision: of the stored numbers.
    """

    gauge: str
    shape: tuple[int, ...]
    precision: Precision = "float32"

    @property
    def size(self) -> int:
        """The number of places."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class LongTable:
    """Numbers of gauges, one row each.

    Rows of one measurement are in the order of sections, and of places in each section. Rows of a
    whole run are in the order of the lines of its file.

    Attributes:
        sections: one per gauge; several if a gauge changes its shape in a run.
        codes: (rows,), the number of the section of each row.
        places: (rows,), the index of each number in an array of its section's shape, row by row:
            ``layer * heads + head`` for a gauge with heads.
        numbers: (rows,), float64.
    """

    sections: tuple[Section, ...]
    codes: NDArray[np.int64]
    places: NDArray[np.int64]
    numbers: NDArray[np.float64]

    @classmethod
    def of_array(
        cls,
        gauge: str,
        numbers: ArrayLike,
        measured: ArrayLike | None = None,
        precision: Precision = "float32",
    ) -> LongTable:
        """Return the rows of one gauge.

        Arguments:
            gauge: its name.
            numbers: of any shape.
            measured: bool, of the same shape; None if all numbers were measured.
            precision: of the stored numbers.
        """
        array = np.asarray(numbers, dtype=np.float64)
        values = array.reshape(-1)
        if measured is None:
            places = np.arange(len(values))
        else:
            places = np.flatnonzero(measured)
            values = values[places]
        section = Section(gauge, array.shape, precision)
        return cls((section,), np.zeros(len(places), np.int64), places, values)

    @classmethod
    def of_entries(
        cls,
        gauge: str,
        shape: tuple[int, ...],
        entries: Mapping[tuple[int, ...], float],
        precision: Precision = "float32",
    ) -> LongTable:
        """Return the rows of one gauge; ``entries`` are the numbers that were measured, by index."""
        array = np.zeros(shape)
        measured = np.zeros(shape, np.bool_)
        for index, number in entries.items():
            array[index] = number
            measured[index] = True
        return cls.of_array(gauge, array, measured, precision)

    @classmethod
    def per_layer(
        cls, gauge: str, numbers: Sequence[float | None], precision: Precision = "float32"
    ) -> LongTable:
        """Return the rows of a gauge with one number per layer; None was not measured."""
        entries: dict[tuple[int, ...], float] = {}
        for layer, number in enumerate(numbers):
            if number is not None:
                entries[(layer,)] = number
        return cls.of_entries(gauge, (len(numbers),), entries, precision)

    def first_column(self) -> LongTable:
        """Return the numbers (layers,) of the first head, of the only section (layers, heads)."""
        (section,) = self.sections
        layers, heads = section.shape
        section = Section(section.gauge, (layers,), section.precision)
        if heads == 1:
            return LongTable((section,), self.codes, self.places, self.numbers)
        rows = np.flatnonzero(self.places % heads == 0)
        return LongTable(
            (section,), self.codes[rows], self.places[rows] // heads, self.numbers[rows]
        )

    @classmethod
    def join(cls, tables: Iterable[LongTable]) -> LongTable:
        """Return all rows of several tables, one table after the other."""
        sections: list[Section] = []
        codes = []
        places = []
        values = []
        for table in tables:
            codes.append(table.codes)
            if sections:
                codes[-1] = table.codes + len(sections)
            places.append(table.places)
            values.append(table.numbers)
            sections += table.sections
        if len(codes) == 1:
            return cls(tuple(sections), codes[0], places[0], values[0])
        if not codes:
            return cls((), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
        return cls(
            tuple(sections), np.concatenate(codes), np.concatenate(places), np.concatenate(values)
        )

    def __len__(self) -> int:
        return len(self.numbers)

    # A measurement, in which each gauge has one section

    @property
    def gauges(self) -> list[str]:
        """The names of the gauges, in their order."""
        return [section.gauge for section in self.sections]

    @cached_property
    def _section_numbers(self) -> dict[str, int]:
        return {section.gauge: number for number, section in enumerate(self.sections)}

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each section, and the number of rows; rows are sorted by section."""
        starts: list[int] = self.codes.searchsorted(np.arange(len(self.sections) + 1)).tolist()
        return starts

    def section(self, gauge: str) -> Section:
        """Return the section of a gauge."""
        return self.sections[self._section_numbers[gauge]]

    def rows(self, gauge: str) -> slice:
        """Return which rows are those of a gauge."""
        number = self._section_numbers[gauge]
        return slice(self.starts[number], self.starts[number + 1])

    def select(self, gauges: Collection[str]) -> LongTable:
        """Return the rows of some gauges, in the order of this table."""
        parts = []
        for section in self.sections:
            if section.gauge in gauges:
                rows = self.rows(section.gauge)
                codes = np.zeros(rows.stop - rows.start, np.int64)
                parts.append(LongTable((section,), codes, self.places[rows], self.numbers[rows]))
        return LongTable.join(parts)

    def array(self, gauge: str) -> NDArray[np.float64]:
        """Return the numbers of a gauge in the shape of its section, NaN where there is no row."""
        rows = self.rows(gauge)
        shape = self.section(gauge).shape
        array = np.full(math.prod(shape), math.nan)
        array[self.places[rows]] = self.numbers[rows]
        return array.reshape(shape)

    def measured(self, gauge: str) -> NDArray[np.bool_]:
        """Return which numbers of a gauge were measured, in the shape of its section."""
        shape = self.section(gauge).shape
        measured = np.zeros(math.prod(shape), np.bool_)
        measured[self.places[self.rows(gauge)]] = True
        return measured.reshape(shape)

    def by_layer(self, gauge: str) -> list[NDArray[np.float64]]:
        """Return per layer the numbers that were measured in it, (heads measured,)."""
        rows = self.rows(gauge)
        layers, *others = self.section(gauge).shape
        first_places = np.arange(layers + 1) * math.prod(others)
        bounds = (rows.start + np.searchsorted(self.places[rows], first_places)).tolist()
        return [self.numbers[bounds[n] : bounds[n + 1]] for n in range(layers)]

    def index(self, row: int) -> tuple[int, ...]:
        """Return the index of a row in its section: (layer,) or (layer, head)."""
        shape = self.sections[int(self.codes[row])].shape
        return tuple(int(place) for place in np.unravel_index(int(self.places[row]), shape))
