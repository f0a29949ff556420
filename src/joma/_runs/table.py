"""The long table of run folders, one row per number; every table that joma shows of a run is made here.

A number that was not measured is null in the files and has no row. NaN and infinities are numbers that were computed.
Layers with fewer heads than the widest may also be padded with NaN; the table has no rows for the padding.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

SPELT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Lines of metrics.jsonl: step, extra columns, gauge, value. The value may still be JSON text, as bytes.
Lines = Iterable[dict[str, Any]]
# Characters of finite numbers: what is left of a value without them is its shape, as "[[,],[,]]".
_DIGITS = b"0123456789.+-eE"
# Characters of a decimal with at most 15 digits, whose integer float64 holds exactly, and a point.
EXACT_LENGTH = 16
# A call of the parser of pandas takes as long as the JSON parser takes for this many bytes.
FEW_BYTES = 20_000
_COMMAS_TO_NEWLINES = bytes.maketrans(b",", b"\n")
# Beyond e-09 the power of ten that such a decimal is divided by may not be exact.
LARGE_EXPONENT = re.compile(rb"e[+-]?[1-9]")


def parsed(value: Any) -> Any:
    """Return a value that may still be JSON text as numbers and lists."""
    return json.loads(value) if isinstance(value, bytes) else value


def unspell(value: Any) -> Any:
    """Return `value` with the strings for NaN and infinities turned back into floats."""
    if isinstance(value, list):
        return [unspell(item) for item in value]
    if isinstance(value, dict):
        return {key: unspell(item) for key, item in value.items()}
    return SPELT.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Shape:
    """What the arrays of one gauge are, by the `run.json` of the run that measured it."""

    axes: Sequence[str] = ()
    modules: Sequence[str] = ()  # the module or matrix of each layer; empty if the run names none
    heads: Sequence[
        int
    ] = ()  # how many heads or experts each layer has; empty if no layer is padded

    @classmethod
    def of(cls, info: Mapping[str, Any], gauge: str) -> Shape:
        """The shape of a gauge in the run with this `run.json`."""
        heads = info.get("heads", {})
        heads = (
            heads.get(gauge, ()) if isinstance(heads, Mapping) else heads
        )  # one list for all gauges: older runs
        names = info.get("layers", {})
        modules = names.get(gauge, ()) if isinstance(names, Mapping) else ()
        return cls(info["axes"].get(gauge, ()), modules, heads)

    def places(self, shape: tuple[int, ...]) -> dict[str, NDArray[np.int64]]:
        """Axis -> the index of each number of an array of this shape, in the order of its numbers."""
        import numpy as np

        indices = np.indices(shape).reshape(len(shape), math.prod(shape))
        return dict(zip(self.axes, indices, strict=True))

    def padding(self, places: Mapping[str, NDArray[np.int64]]) -> NDArray[np.bool_] | None:
        """Which numbers are of heads or experts that their layer does not have; None if there are none."""
        import numpy as np

        if not self.heads or "layer" not in places:
            return None
        layer = places["layer"]
        head = places.get(
            "head", places.get("expert", np.zeros_like(layer))
        )  # or one number per layer
        known = np.full(1 + int(layer.max(initial=-1)), np.iinfo(np.int64).max)
        count = min(len(known), len(self.heads))
        known[:count] = self.heads[:count]
        beyond: NDArray[np.bool_] = head >= known[layer]
        return beyond if beyond.any() else None


@dataclass(frozen=True, eq=False)
class Stack:
    """Values of one gauge that have the same shape.

    Attributes:
        lines: (n,), the numbers of their lines.
        numbers: (n, *shape).
        is_kept: (n, *shape), False for entries that have no row; None if all have one.
    """

    lines: NDArray[np.int64]
    numbers: NDArray[np.float64]
    is_kept: NDArray[np.bool_] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return self.numbers.shape[1:]

    def count_rows(self) -> NDArray[np.int64]:
        """Return how many rows each line has, (n,)."""
        import numpy as np

        if self.is_kept is None:
            return np.full(len(self.lines), math.prod(self.shape))
        return self.is_kept.reshape(len(self.lines), -1).sum(axis=1)

    def places(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each kept entry in the table, if the rows of line n begin at starts[n]."""
        import numpy as np

        first = starts[self.lines][:, None]  # (n, 1)
        if self.is_kept is None:
            return (first + np.arange(math.prod(self.shape))).reshape(-1)
        is_kept = self.is_kept.reshape(len(self.lines), -1)  # (n, entries)
        return (first + is_kept.cumsum(axis=1) - 1)[is_kept]

    def select(self, per_entry: NDArray[Any]) -> NDArray[Any]:
        """Return what each kept entry has, given what each entry of one value has, (entries,)."""
        import numpy as np

        every = np.broadcast_to(per_entry, (len(self.lines), len(per_entry)))  # (n, entries)
        if self.is_kept is None:
            return every.reshape(-1)
        return every[self.is_kept.reshape(every.shape)]

    def kept_numbers(self) -> NDArray[np.float64]:
        """Return the numbers that have a row, in the order of `places`."""
        if self.is_kept is None:
            return self.numbers.reshape(-1)
        kept: NDArray[np.float64] = self.numbers[self.is_kept]
        return kept


def long_table(
    sources: Iterable[tuple[Lines, Mapping[str, Any]]], gauge: str | None = None
) -> pd.DataFrame:
    """Return the table of the lines of some runs, in their order.

    Arguments:
        sources: per run its lines, and the content of its `run.json`.
        gauge: the one gauge that the lines are of, if there is only one.

    Returns:
        The columns step, extra columns (t, seed, ...), axes (layer, head, ...), gauge, value, and
        module where a run names its layers.
    """
    rows: list[dict[str, Any]] = []
    infos: list[Mapping[str, Any]] = []
    groups: dict[tuple[int, str], list[int]] = {}  # (source, gauge) -> line numbers
    for lines, info in sources:
        for row in lines:
            key = (len(infos), row["gauge"])
            if key in groups:
                groups[key].append(len(rows))
            else:
                groups[key] = [len(rows)]
            rows.append(row)
        infos.append(info)
    names = list(dict.fromkeys(name for _, name in groups))
    if gauge is not None:
        names = [gauge]
    shapes = {}
    for source, info in enumerate(infos):
        for name in names:
            shapes[source, name] = Shape.of(info, name)
    table = _LongTable(rows, shapes.values())
    stacks = []
    for key, numbers in groups.items():
        for stack in _stacks(numbers, rows, shapes[key]):
            stacks.append((shapes[key], stack))
            table.count(stack)
    table.allocate()
    for shape, stack in stacks:
        table.put(shape, stack)
    return table.frame()


class _LongTable:
    """Columns of the long table, filled stack by stack.

    Rows are in the order of lines, and lines of one gauge lie apart from each other. So the rows of
    each line are counted first; then every stack is written to its places at once, without sorting.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], shapes: Iterable[Shape]) -> None:
        import numpy as np

        self._rows = rows
        self._counts = np.zeros(len(rows), np.int64)  # rows of the table per line
        self._starts = self._counts
        self._axes: dict[str, NDArray[np.int64]] = {}
        self._has_modules = False
        for shape in shapes:
            self._has_modules |= bool(shape.modules)
            for axis in shape.axes:
                self._axes[axis] = np.empty(0, np.int64)
        self._has_modules &= "layer" in self._axes
        self._values = np.empty(0)
        # The modules of all gauges one after the other, and per row a place in this list.
        self._modules: list[str] = []
        self._first_module: dict[int, int] = {}
        self._module_places = np.empty(0, np.int64)

    def count(self, stack: Stack) -> None:
        """Count the rows of a stack, before `allocate`."""
        self._counts[stack.lines] = stack.count_rows()

    def allocate(self) -> None:
        """Make the columns; an index of -1 is one that a row does not have."""
        import numpy as np

        total = int(self._counts.sum())
        self._starts = self._counts.cumsum() - self._counts
        self._values = np.empty(total)
        for axis in self._axes:
            self._axes[axis] = np.full(total, -1, np.int64)
        if self._has_modules:
            self._module_places = np.full(total, -1, np.int64)

    def put(self, shape: Shape, stack: Stack) -> None:
        """Write the rows of a stack."""
        import numpy as np

        places = stack.places(self._starts)
        self._values[places] = stack.kept_numbers()
        indices = shape.places(stack.shape)
        for axis, index in indices.items():
            self._axes[axis][places] = stack.select(index)
        if self._has_modules and shape.modules and "layer" in indices:
            first = self._first_module.setdefault(id(shape), len(self._modules))
            if first == len(self._modules):
                self._modules += shape.modules
            layer = indices["layer"]
            place = np.where(layer < len(shape.modules), first + layer, -1)
            self._module_places[places] = stack.select(place)

    def frame(self) -> pd.DataFrame:
        """Return the table."""
        import numpy as np
        import pandas as pd

        columns: dict[str, Any] = {}
        for name in dict.fromkeys(chain(["step"], *self._rows)):
            if name not in ("gauge", "value"):
                column = _column([row.get(name) for row in self._rows])
                columns[name] = column.array.repeat(self._counts)
        for axis, index in self._axes.items():
            is_absent = index < 0
            columns[axis] = index
            if is_absent.any():
                columns[axis] = pd.arrays.IntegerArray(index, is_absent)
        gauges = pd.Series([row["gauge"] for row in self._rows], dtype="str").array
        columns["gauge"] = gauges.take(np.repeat(np.arange(len(self._rows)), self._counts))
        columns["value"] = self._values
        if self._has_modules:
            # -1 takes the last one, which is missing.
            modules = pd.Series([*self._modules, None], dtype="str").array
            columns["module"] = modules.take(self._module_places)
        return pd.DataFrame(columns)


def _stacks(numbers: list[int], rows: Sequence[Mapping[str, Any]], shape: Shape) -> Iterator[Stack]:
    """Yield the values of some lines of one gauge, a stack for each shape that has numbers."""
    import numpy as np

    texts = [rows[number]["value"] for number in numbers]
    finite = _finite_stack(texts)
    if finite is not None:
        if finite.size:
            yield Stack(np.array(numbers), finite)
        return
    for lines, stacked in _stacks_of_values(numbers, [parsed(text) for text in texts]):
        if not stacked.size:
            continue
        is_dropped = _not_measured(lines, stacked, rows)
        padding = shape.padding(shape.places(stacked.shape[1:]))
        if padding is not None:
            # A number stays, whatever `run.json` says about the heads of a layer.
            is_padding = np.broadcast_to(padding.reshape(stacked.shape[1:]), stacked.shape)
            is_dropped |= is_padding & np.isnan(stacked)
        yield Stack(lines, stacked, ~is_dropped)


def _stacks_of_values(
    numbers: list[int], values: list[Any]
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Return line numbers with their values as one array (lines, *shape), for each shape."""
    import numpy as np

    try:
        # This reads "nan" and "inf", too.
        return [(np.array(numbers), np.array(values, dtype=np.float64))]
    except ValueError:  # the shape changed within the run
        by_shape: dict[tuple[int, ...], tuple[list[int], list[Any]]] = {}
        for number, value in zip(numbers, values, strict=True):
            array = np.array(value, dtype=np.float64)
            lines, arrays = by_shape.setdefault(array.shape, ([], []))
            lines.append(number)
            arrays.append(array)
        return [(np.array(lines), np.array(arrays)) for lines, arrays in by_shape.values()]


def _finite_stack(texts: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return JSON texts of finite numbers as one array (lines, *shape); None if they are anything else.

    The JSON parser would make an object of each number.
    """
    import numpy as np

    first = texts[0]
    if not isinstance(first, bytes):
        return None
    skeleton = first.translate(None, _DIGITS)
    has_numbers = len(skeleton) < len(first)
    if not has_numbers or skeleton.strip(b"[],"):
        return None
    for text in texts:
        if (
            not isinstance(text, bytes)
            or text.translate(None, _DIGITS) != skeleton
            or b"[]" in text
        ):
            return None
    shape = np.array(json.loads(first), dtype=np.float64).shape
    # One number per line, without the brackets.
    numbers = _numbers(b",".join(texts).translate(_COMMAS_TO_NEWLINES, b"[]"))
    return numbers.reshape(len(texts), *shape)


def _numbers(text: bytes) -> NDArray[np.float64]:
    """Return decimals, one per line, each as the float64 that is nearest to it."""
    import numpy as np
    import pandas as pd

    if len(text) < FEW_BYTES:
        return np.array(json.loads(b"[" + text.replace(b"\n", b",") + b"]"), dtype=np.float64)
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    longest = int(np.diff(ends, prepend=-1, append=len(text)).max()) - 1
    if longest > EXACT_LENGTH or (b"e" in text and LARGE_EXPONENT.search(text)):
        return np.fromstring(text.decode(), dtype=np.float64, sep="\n")
    # The fast parser of pandas rounds once for so few digits, and is then exact. It takes 6 ms for
    # 110,000 numbers, and the JSON parser 27 ms.
    table = pd.read_csv(io.BytesIO(text), header=None, dtype=np.float64, engine="c")
    return table[0].to_numpy()


def _not_measured(
    lines: NDArray[np.int64], stacked: NDArray[np.float64], rows: Sequence[Mapping[str, Any]]
) -> NDArray[np.bool_]:
    """Return which of the values (lines, *shape) are null.

    `np.array` reads both null and "nan" as NaN, so only lines with a NaN are looked at again.
    """
    import numpy as np

    flat = stacked.reshape(len(stacked), -1)  # (lines, entries)
    is_null = np.zeros(flat.shape, dtype=np.bool_)
    for line in np.flatnonzero(np.isnan(flat).any(axis=1)):
        value = np.array(parsed(rows[lines[line]]["value"]), dtype=object)
        is_null[line] = [item is None for item in value.flat]
    return is_null.reshape(stacked.shape)


def _column(values: list[Any]) -> pd.Series[Any]:
    """Return a column; whole numbers and booleans stay what they are where some are missing."""
    import pandas as pd

    if not SPELT.keys().isdisjoint(values):
        values = unspell(values)
    missing = type(None)
    dtypes = {
        frozenset(): "int64",
        frozenset({int, missing}): "Int64",
        frozenset({bool, missing}): "boolean",
    }
    return pd.Series(values, dtype=dtypes.get(frozenset(map(type, values))))
