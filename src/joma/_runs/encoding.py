"""The long table as JSON text, and back: one text per section, nested lists in the shape of its gauge.

A number that was not measured is null. JSON has no NaN and no infinities: they are the strings "nan",
"inf" and "-inf".
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from joma._runs.long_table import LongTable, Precision

# The strings that stand for numbers that JSON does not have.
SPELT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

# Beyond these sizes NumPy writes a float32 in another notation than JSON's writer.
_LARGEST_PLAIN = 1e6

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


# From numbers to text


def encode(table: LongTable) -> list[str]:
    """Return the JSON text of each section."""
    texts: list[str] = []
    numbered = enumerate(table.sections)
    # All numbers of one precision become text in one call: a call per section costs more than its
    # numbers, if heads are few.
    for precision, group in groupby(numbered, key=lambda pair: pair[1].precision):
        numbers = [number for number, _ in group]
        first_row = table.starts[numbers[0]]
        last_row = table.starts[numbers[-1] + 1]
        if first_row < last_row:
            texts += _TEXTS_BY_PRECISION[precision](table.numbers[first_row:last_row])
    encoded = []
    for number, section in enumerate(table.sections):
        first_row = table.starts[number]
        last_row = table.starts[number + 1]
        entries = texts[first_row:last_row]
        size = section.size
        if len(entries) < size:
            measured = zip(table.places[first_row:last_row].tolist(), entries, strict=True)
            entries = ["null"] * size
            for place, text in measured:
                entries[place] = text
        encoded.append(_nested(entries, section.shape))
    return encoded


def encode_array(array: NDArray[Any], measured: NDArray[np.bool_] | None = None) -> str:
    """Return the JSON text of an array of booleans, integers or floats, with all their digits.

    ``measured`` has the shape of the array; None if all numbers were measured.
    """
    import numpy as np

    if array.dtype.kind == "f":
        array = array.astype(np.float64, copy=False)
        is_finite = np.isfinite(array)
        if not is_finite.all():
            spelt = array.astype(object)
            spelt[~is_finite] = array[~is_finite].astype(str)  # "nan", "inf", "-inf"
            if measured is not None:
                spelt[~measured] = None
            array = spelt
    return json.dumps(array.tolist(), separators=(",", ":"))


def as_lists(table: LongTable) -> dict[str, Any]:
    """Return by gauge the numbers that `encode` writes, as nested lists; None was not measured."""
    texts = encode(table)
    return {
        gauge: unspell(json.loads(text)) for gauge, text in zip(table.gauges, texts, strict=True)
    }


def _nested(entries: list[str], shape: tuple[int, ...]) -> str:
    """Return the entries of an array of this shape as lists in lists."""
    for axis in reversed(range(len(shape))):
        size = shape[axis]
        lists = []
        for number in range(math.prod(shape[:axis])):
            row = entries[number * size : (number + 1) * size]
            lists.append(f"[{','.join(row)}]")
        entries = lists
    (text,) = entries
    return text


def _float64_texts(values: NDArray[np.float64]) -> list[str]:
    """Return the shortest decimals that equal the values."""
    import numpy as np

    # The writer of JSON in C takes half of the time of a call of `repr` per number.
    texts = json.dumps(values.tolist())[1:-1].split(", ")
    is_finite = np.isfinite(values)
    if not is_finite.all():
        for row in np.flatnonzero(~is_finite).tolist():
            texts[row] = f'"{values[row]}"'
    return texts


def _float32_texts(values: NDArray[np.float64]) -> list[str]:
    """Return the shortest decimals that equal the values in float32.

    Numbers beyond the range of float32 keep all their digits.
    """
    import numpy as np

    sizes = np.abs(values)
    # False for NaN, too.
    is_plain = (sizes >= np.finfo(np.float32).tiny) & (sizes < _LARGEST_PLAIN)
    if is_plain.all():
        texts: list[str] = values.astype(np.float32).astype(str).tolist()
        return texts
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float32)
    texts = narrow.astype(str).tolist()
    is_large = np.isfinite(narrow) & (sizes >= _LARGEST_PLAIN)
    for row in np.flatnonzero(is_large).tolist():
        texts[row] = repr(float(texts[row]))
    others = np.flatnonzero(~is_plain & ~is_large)
    if len(others):
        for row, text in zip(others.tolist(), _float64_texts(values[others]), strict=True):
            texts[row] = text
    return texts


def _integer_texts(values: NDArray[np.float64]) -> list[str]:
    import numpy as np

    return list(map(str, values.astype(np.int64).tolist()))


def _boolean_texts(values: NDArray[np.float64]) -> list[str]:
    return ["true" if value else "false" for value in values.tolist()]


_TEXTS_BY_PRECISION: Mapping[Precision, Callable[[NDArray[np.float64]], list[str]]] = {
    "float32": _float32_texts,
    "float64": _float64_texts,
    "integer": _integer_texts,
    "boolean": _boolean_texts,
}


# From text to the table


@dataclass(frozen=True)
class GaugeLines:
    """The lines of one gauge in one run.

    Attributes:
        gauge: its name.
        find_padding: returns for the shape of a value which entries belong to heads that their
            layer does not have; None if all exist.
        numbers: of the lines, in their order.
    """

    gauge: str
    find_padding: Callable[[tuple[int, ...]], NDArray[np.bool_] | None]
    numbers: list[int]


@dataclass(frozen=True, eq=False)
class DecodedLines:
    """The long table of some lines.

    Attributes:
        table: rows in the order of lines.
        owners: per section of the table, the number of the `GaugeLines` that it belongs to.
        row_counts: per line, the number of its rows.
    """

    table: LongTable
    owners: Sequence[int]
    row_counts: NDArray[np.int64]


def decode(texts: Sequence[Any], groups: Sequence[GaugeLines]) -> DecodedLines:
    """Return the long table of lines, whose values are JSON text (bytes), or numbers and lists.

    Rows are in the order of lines, and lines of one gauge lie apart from each other. So the rows of
    each line are counted first; then every stack is written to its places at once, without sorting.
    """
    import numpy as np

    from joma._runs.long_table import LongTable, Section

    sections: list[Section] = []
    owners: list[int] = []
    stacks: list[Stack] = []
    row_counts = np.zeros(len(texts), np.int64)
    line_codes = np.zeros(len(texts), np.int64)  # line -> the number of its section
    for owner, group in enumerate(groups):
        for stack in _stacks(group, texts):
            row_counts[stack.lines] = stack.count_rows()
            line_codes[stack.lines] = len(stacks)
            stacks.append(stack)
            owners.append(owner)
            sections.append(Section(group.gauge, stack.shape, "float64"))
    total = int(row_counts.sum())
    starts = row_counts.cumsum() - row_counts
    places = np.empty(total, np.int64)
    values = np.empty(total)
    for stack in stacks:
        rows = stack.rows(starts)
        places[rows] = stack.row_places()
        values[rows] = stack.row_values()
    table = LongTable(tuple(sections), line_codes.repeat(row_counts), places, values)
    return DecodedLines(table, owners, row_counts)


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

    def rows(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the table that these values take, if line n begins at starts[n]."""
        import numpy as np

        first = starts[self.lines][:, None]  # (n, 1)
        if self.has_row is None:
            return (first + np.arange(math.prod(self.shape))).reshape(-1)
        has_row = self.has_row.reshape(len(self.lines), -1)  # (n, entries)
        return (first + has_row.cumsum(axis=1) - 1)[has_row]

    def row_places(self) -> NDArray[np.int64]:
        """Return the place of each row in its value, in the order of `rows`."""
        import numpy as np

        entries = math.prod(self.shape)
        places = np.broadcast_to(np.arange(entries), (len(self.lines), entries))
        if self.has_row is None:
            return places.reshape(-1)
        return places[self.has_row.reshape(places.shape)]

    def row_values(self) -> NDArray[np.float64]:
        """Return the number of each row, in the order of `rows`."""
        if self.has_row is None:
            return self.numbers.reshape(-1)
        values: NDArray[np.float64] = self.numbers[self.has_row]
        return values


def _stacks(group: GaugeLines, texts: Sequence[Any]) -> Iterator[Stack]:
    """Yield the values of one gauge, a stack for each shape that has numbers."""
    import numpy as np

    group_texts = [texts[number] for number in group.numbers]
    finite = _finite_stack(group_texts)
    if finite is not None:
        yield Stack(np.array(group.numbers), finite)
        return
    group_values = [parsed(text) for text in group_texts]
    for lines, stacked in _stacks_of_values(group.numbers, group_values):
        if not stacked.size:
            continue
        is_dropped = _not_measured(stacked, [texts[line] for line in lines])
        is_padding = group.find_padding(stacked.shape[1:])
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
