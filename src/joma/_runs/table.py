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

from joma._runs.metric_lines import MetricLines

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

# JSON has no NaN and no infinities: `RunWriter` writes these strings.
SPELT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# Without these characters, what remains of a value is its shape, as in "[[,],[,]]".
_NUMBER_CHARACTERS = b"0123456789.+-eE"
_COMMAS_TO_NEWLINES = bytes.maketrans(b",", b"\n")
_NEWLINE = ord("\n")
# A decimal of 16 characters has a point and at most 15 digits, which float64 holds exactly as an integer.
_EXACT_LENGTH = 16
# Beyond e-09, the power of ten that such a decimal is divided by may not be exact.
_LARGE_EXPONENT = re.compile(rb"e[+-]?[1-9]")
# The fixed cost of one call of the parser of pandas: the JSON parser reads this many bytes in that time.
_FEW_BYTES = 20_000


def parsed(value: Any) -> Any:
    """Return a value that may still be JSON text as numbers and lists."""
    if isinstance(value, bytes):
        return json.loads(value)
    return value


def unspell(value: Any) -> Any:
    """Return `value` with the strings for NaN and infinities turned back into floats."""
    if isinstance(value, list):
        return [unspell(item) for item in value]
    if isinstance(value, dict):
        return {key: unspell(item) for key, item in value.items()}
    if isinstance(value, str):
        return SPELT.get(value, value)
    return value


@dataclass(frozen=True)
class GaugeShape:
    """The meaning of the arrays of one gauge, by the `run.json` of the run that measured it.

    Attributes:
        axes: the names of the axes.
        modules: the module or matrix of each layer; empty if the run names none.
        heads: the number of heads or experts of each layer; empty if no layer is padded.
    """

    axes: Sequence[str] = ()
    modules: Sequence[str] = ()
    heads: Sequence[int] = ()

    @classmethod
    def read(cls, info: Mapping[str, Any], gauge: str) -> GaugeShape:
        """Return the shape of a gauge in the run with this `run.json`."""
        heads = info.get("heads", {})
        if isinstance(heads, Mapping):  # older runs have one list for all gauges
            heads = heads.get(gauge, ())
        modules = info.get("layers", {})
        if isinstance(modules, Mapping):
            modules = modules.get(gauge, ())
        else:
            modules = ()
        return cls(info["axes"].get(gauge, ()), modules, heads)

    def indices(self, shape: tuple[int, ...]) -> dict[str, NDArray[np.int64]]:
        """Return per axis the index (entries,) of each entry of an array of this shape."""
        import numpy as np

        indices = np.indices(shape).reshape(len(shape), math.prod(shape))  # (axes, entries)
        return dict(zip(self.axes, indices, strict=True))

    def padding(self, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Return which entries (*shape) belong to heads that their layer does not have; None if all exist."""
        import numpy as np

        indices = self.indices(shape)
        if not self.heads or "layer" not in indices:
            return None
        layer = indices["layer"]
        if "head" in indices:
            head = indices["head"]
        elif "expert" in indices:
            head = indices["expert"]
        else:
            head = np.zeros_like(layer)  # one number per layer
        # Nothing is padding in layers that `run.json` does not list.
        head_counts = np.full(1 + int(layer.max(initial=-1)), np.iinfo(np.int64).max)  # (layers,)
        listed = min(len(head_counts), len(self.heads))
        head_counts[:listed] = self.heads[:listed]
        is_padding: NDArray[np.bool_] = head >= head_counts[layer]  # (entries,)
        if not is_padding.any():
            return None
        return is_padding.reshape(shape)


@dataclass(frozen=True, eq=False)
class Stack:
    """Values of one gauge that have the same shape.

    Attributes:
        lines: (n,), the numbers of their lines.
        numbers: (n, *shape).
        has_row: (n, *shape), False for entries that have no row; None if all have one.
    """

    lines: NDArray[np.int64]
    numbers: NDArray[np.float64]
    has_row: NDArray[np.bool_] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return self.numbers.shape[1:]

    def count_rows(self) -> NDArray[np.int64]:
        """Return the number of rows of each line, (n,)."""
        import numpy as np

        if self.has_row is None:
            return np.full(len(self.lines), math.prod(self.shape))
        return self.has_row.reshape(len(self.lines), -1).sum(axis=1)

    def places(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each row in the table, if the rows of line n begin at starts[n]."""
        import numpy as np

        first = starts[self.lines][:, None]  # (n, 1)
        if self.has_row is None:
            return (first + np.arange(math.prod(self.shape))).reshape(-1)
        has_row = self.has_row.reshape(len(self.lines), -1)  # (n, entries)
        return (first + has_row.cumsum(axis=1) - 1)[has_row]

    def select(self, per_entry: NDArray[Any]) -> NDArray[Any]:
        """Return per row an attribute that each entry of one value has, (entries,)."""
        import numpy as np

        repeated = np.broadcast_to(per_entry, (len(self.lines), len(per_entry)))  # (n, entries)
        if self.has_row is None:
            return repeated.reshape(-1)
        return repeated[self.has_row.reshape(repeated.shape)]

    def row_values(self) -> NDArray[np.float64]:
        """Return the number of each row, in the order of `places`."""
        if self.has_row is None:
            return self.numbers.reshape(-1)
        values: NDArray[np.float64] = self.numbers[self.has_row]
        return values


def long_table(
    sources: Iterable[tuple[Iterable[MetricLines], Mapping[str, Any]]], gauge: str | None = None
) -> pd.DataFrame:
    """Return the table of the lines of some runs, in their order.

    Arguments:
        sources: per run its lines, and the content of its `run.json`.
        gauge: the one gauge that the lines are of, if there is only one.

    Returns:
        The columns step, extra columns (t, seed, ...), axes (layer, head, ...), gauge, value, and
        module where a run names its layers.
    """
    lines = MetricLines()
    infos: list[Mapping[str, Any]] = []
    groups: dict[tuple[int, str], list[int]] = {}  # (source, gauge) -> line numbers
    for blocks, info in sources:
        for block in blocks:
            for number, name in enumerate(block.gauges, start=len(lines.gauges)):
                groups.setdefault((len(infos), name), []).append(number)
            lines.extend(block)
        infos.append(info)
    names = list(dict.fromkeys(lines.gauges))
    if gauge is not None:
        names = [gauge]  # its axes are columns even without any line
    shapes = {}
    for source, info in enumerate(infos):
        for name in names:
            shapes[source, name] = GaugeShape.read(info, name)
    table = _LongTable(lines, shapes.values())
    stacks = []
    for key, numbers in groups.items():
        for stack in _stacks(numbers, lines.values, shapes[key]):
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

    def __init__(self, lines: MetricLines, shapes: Iterable[GaugeShape]) -> None:
        import numpy as np

        self._lines = lines
        self._counts = np.zeros(len(lines.gauges), np.int64)  # rows of the table per line
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
        """Make the columns; -1 marks an index that a row does not have."""
        import numpy as np

        total = int(self._counts.sum())
        self._starts = self._counts.cumsum() - self._counts
        self._values = np.empty(total)
        for axis in self._axes:
            self._axes[axis] = np.full(total, -1, np.int64)
        if self._has_modules:
            self._module_places = np.full(total, -1, np.int64)

    def put(self, shape: GaugeShape, stack: Stack) -> None:
        """Write the rows of a stack."""
        import numpy as np

        places = stack.places(self._starts)
        self._values[places] = stack.row_values()
        indices = shape.indices(stack.shape)
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
        import pandas as pd

        columns = self._head_columns()
        for axis, index in self._axes.items():
            is_absent = index < 0
            if is_absent.any():
                columns[axis] = pd.arrays.IntegerArray(index, is_absent)
            else:
                columns[axis] = index
        columns["gauge"] = self._gauge_column()
        columns["value"] = self._values
        if self._has_modules:
            # -1 takes the last one, which is missing.
            modules = pd.Series([*self._modules, None], dtype="str").array
            columns["module"] = modules.take(self._module_places)
        # The arrays belong to the table alone. To copy them takes 4 ms for 130,000 rows.
        return pd.DataFrame(columns, copy=False)

    def _head_columns(self) -> dict[str, Any]:
        """Return step and extra columns, which all rows of a measurement share."""
        import numpy as np

        heads = self._lines.heads
        sizes = np.array(self._lines.sizes, dtype=np.int64)  # lines per measurement
        columns: dict[str, Any] = {}
        for name in dict.fromkeys(chain(["step"], *heads)):
            column = _column([head.get(name) for head in heads])
            values: Any = column.array
            if column.dtype in (np.int64, np.float64):
                values = column.to_numpy()  # repeats four times as fast
            columns[name] = values.repeat(sizes).repeat(self._counts)
        return columns

    def _gauge_column(self) -> Any:
        import numpy as np
        import pandas as pd

        codes: dict[str, int] = {}
        line_codes = [codes.setdefault(name, len(codes)) for name in self._lines.gauges]
        row_codes = np.array(line_codes, dtype=np.int64).repeat(self._counts)
        return pd.Series(list(codes), dtype="str").array.take(row_codes)


def _stacks(numbers: list[int], values: Sequence[Any], shape: GaugeShape) -> Iterator[Stack]:
    """Yield the values of some lines of one gauge, a stack for each shape that has numbers."""
    import numpy as np

    texts = [values[number] for number in numbers]
    finite = _finite_stack(texts)
    if finite is not None:
        yield Stack(np.array(numbers), finite)
        return
    for lines, stacked in _stacks_of_values(numbers, [parsed(text) for text in texts]):
        if not stacked.size:
            continue
        is_dropped = _not_measured(stacked, [values[line] for line in lines])
        is_padding = shape.padding(stacked.shape[1:])
        if is_padding is not None:
            # Only NaN is padding: a number stays, even if `run.json` lists fewer heads for its layer.
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

    if set(map(type, texts)) != {bytes}:
        return None
    first = texts[0]
    skeleton = first.translate(None, _NUMBER_CHARACTERS)
    has_numbers = len(skeleton) < len(first)
    if not has_numbers or skeleton.strip(b"[],"):
        return None
    joined = b"\n".join(texts)
    # One pass over all texts. A call per text takes three times as long.
    if joined.translate(None, _NUMBER_CHARACTERS) != b"\n".join([skeleton] * len(texts)):
        return None
    if b"[]" in joined:  # "[]" and "[1]" have the same skeleton
        return None
    shape = np.array(json.loads(first), dtype=np.float64).shape
    numbers = _numbers(joined.translate(_COMMAS_TO_NEWLINES, b"[]"))
    return numbers.reshape(len(texts), *shape)


def _numbers(text: bytes) -> NDArray[np.float64]:
    """Return decimals, one per line, each as the float64 that is nearest to it."""
    import numpy as np
    import pandas as pd

    if len(text) < _FEW_BYTES:
        return np.array(json.loads(b"[" + text.replace(b"\n", b",") + b"]"), dtype=np.float64)
    ends = np.flatnonzero(np.frombuffer(text + b"\n", np.uint8) == _NEWLINE)
    longest = max(int(ends[0]), int((ends[1:] - ends[:-1]).max(initial=0)) - 1)
    if longest > _EXACT_LENGTH or (b"e" in text and _LARGE_EXPONENT.search(text)):
        return np.fromstring(text.decode(), dtype=np.float64, sep="\n")
    # The fast parser of pandas rounds once for so few digits, and is then exact. It takes 6 ms for
    # 110,000 numbers, and the JSON parser 27 ms.
    table = pd.read_csv(io.BytesIO(text), header=None, dtype=np.float64, engine="c")
    return table[0].to_numpy()


def _not_measured(stacked: NDArray[np.float64], values: Sequence[Any]) -> NDArray[np.bool_]:
    """Return which of the values (lines, *shape) are null.

    `np.array` reads both null and "nan" as NaN, so lines with a NaN are parsed a second time.
    """
    import numpy as np

    flat = stacked.reshape(len(stacked), -1)  # (lines, entries)
    is_null = np.zeros(flat.shape, dtype=np.bool_)
    for line in np.flatnonzero(np.isnan(flat).any(axis=1)):
        value = np.array(parsed(values[int(line)]), dtype=object)
        is_null[line] = [item is None for item in value.flat]
    return is_null.reshape(stacked.shape)


def _column(values: list[Any]) -> pd.Series[Any]:
    """Return a column; integers and booleans keep their type if some are missing."""
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
