"""The long table of run folders, one row per number; every table that joma shows of a run is made here.

A number that was not measured is null in the files and has no row. NaN and infinities are numbers that were computed.
Layers with fewer heads than the widest may also be padded with NaN; the table has no rows for the padding.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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


def long_table(
    sources: Iterable[tuple[Lines, Mapping[str, Any]]], gauge: str | None = None
) -> pd.DataFrame:
    """Return the table of the lines of some runs, in their order.

    Arguments:
        sources: per run its lines, and the content of its `run.json`.
        gauge: the one gauge that the lines are of, if there is only one.

    Returns:
        The columns step, extra columns (t, seed, ...), axes (layer, head, ...), gauge, value, and module where a run
        names its layers.
    """
    import numpy as np
    import pandas as pd

    rows: list[dict[str, Any]] = []
    infos: list[Mapping[str, Any]] = []
    groups: dict[tuple[int, str], list[int]] = {}  # (source, gauge) -> line numbers
    for lines, info in sources:
        start = len(rows)
        rows.extend(lines)
        for number in range(start, len(rows)):
            groups.setdefault((len(infos), rows[number]["gauge"]), []).append(number)
        infos.append(info)

    names = [gauge] if gauge is not None else list(dict.fromkeys(row["gauge"] for row in rows))
    shapes = {(n, name): Shape.of(info, name) for n, info in enumerate(infos) for name in names}
    axes: dict[str, list[Any]] = {axis: [] for shape in shapes.values() for axis in shape.axes}
    at = [np.empty(0, np.int64)]
    flat = [np.empty(0)]
    modules: list[str] = []  # of all gauges, one after the other
    named = [
        np.empty(0, np.int64)
    ]  # per number, the place of its module in this list; -1 if it has none
    for key, numbers in groups.items():
        first_module = len(modules)
        names_here = shapes[key].modules
        modules += names_here
        for chosen, stacked in _stacks(numbers, rows):
            size, count = math.prod(stacked.shape[1:]), len(stacked)
            place = shapes[key].places(stacked.shape[1:])
            values = stacked.reshape(-1)
            dropped = _not_measured(chosen, stacked, rows)
            if (padding := shapes[key].padding(place)) is not None:
                dropped |= np.tile(padding, count) & np.isnan(
                    values
                )  # a number stays, whatever run.json says
            keep: Any = ~dropped if dropped.any() else slice(None)
            at.append(np.repeat(chosen, size)[keep])
            flat.append(values[keep])
            layer = place.get("layer", np.full(size, -1))
            has_module = (layer >= 0) & (layer < len(names_here))
            named.append(np.tile(np.where(has_module, first_module + layer, -1), count)[keep])
            for axis, indices in axes.items():
                indices.append(np.tile(place.get(axis, np.full(size, -1)), count)[keep])
    line = np.concatenate(at)
    order = np.argsort(line, kind="stable")
    line = line[order]

    table: dict[str, Any] = {}
    for column in dict.fromkeys(chain(["step"], *rows)):
        if column not in ("gauge", "value"):
            table[column] = _column([row.get(column) for row in rows]).array.take(line)
    for axis, indices in axes.items():
        index = np.concatenate([np.empty(0, np.int64), *indices])[order]
        absent = index < 0
        table[axis] = pd.arrays.IntegerArray(index, absent) if absent.any() else index
    table["gauge"] = pd.Series([row["gauge"] for row in rows], dtype="str").array.take(line)
    table["value"] = np.concatenate(flat)[order]
    if any(shape.modules for shape in shapes.values()) and "layer" in axes:
        distinct = pd.Series(
            [*modules, None], dtype="str"
        ).array  # -1 takes the last one, which is missing
        table["module"] = distinct.take(np.concatenate(named)[order])
    return pd.DataFrame(table)


def _stacks(
    numbers: list[int], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Line numbers with their values as one array (lines, *shape), for each shape that has numbers in it."""
    import numpy as np

    texts = [rows[number]["value"] for number in numbers]
    finite = _finite_stack(texts)
    if finite is not None:
        return [(np.array(numbers), finite)] if finite.size else []
    values = [parsed(text) for text in texts]
    try:
        stacks = [
            (np.array(numbers), np.array(values, dtype=np.float64))
        ]  # reads "nan" and "inf", too
    except ValueError:  # the shape changed within the run
        by_shape: dict[tuple[int, ...], tuple[list[int], list[Any]]] = {}
        for number, value in zip(numbers, values, strict=True):
            array = np.array(value, dtype=np.float64)
            chosen, arrays = by_shape.setdefault(array.shape, ([], []))
            chosen.append(number)
            arrays.append(array)
        stacks = [(np.array(chosen), np.array(arrays)) for chosen, arrays in by_shape.values()]
    return [(chosen, stacked) for chosen, stacked in stacks if stacked.size]


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
    numbers = _numbers(b",".join(texts).translate(None, b"[]"))
    return numbers.reshape(len(texts), *shape)


def _numbers(text: bytes) -> NDArray[np.float64]:
    """Return decimals that are separated by commas, each as the float64 that is nearest to it."""
    import numpy as np
    import pandas as pd

    commas = np.flatnonzero(np.frombuffer(text, np.uint8) == ord(","))
    longest = int(np.diff(commas, prepend=-1, append=len(text)).max()) - 1
    if longest > EXACT_LENGTH or LARGE_EXPONENT.search(text):
        return np.fromstring(text.decode(), dtype=np.float64, sep=",")
    # The fast parser of pandas rounds once for so few digits, and is then exact. It is four times as fast.
    lines = io.BytesIO(text.replace(b",", b"\n"))
    table = pd.read_csv(lines, header=None, dtype=np.float64, engine="c")
    return table[0].to_numpy()


def _not_measured(
    numbers: NDArray[np.int64], stacked: NDArray[np.float64], rows: Sequence[Mapping[str, Any]]
) -> NDArray[np.bool_]:
    """Return which of the values of these lines are null, (lines · numbers per line,).

    `np.array` reads both null and "nan" as NaN, so only lines with a NaN are looked at again.
    """
    import numpy as np

    flat = stacked.reshape(len(stacked), -1)  # (lines, numbers per line)
    missing = np.zeros(flat.shape, dtype=np.bool_)
    for line in np.flatnonzero(np.isnan(flat).any(axis=1)):
        value = np.array(parsed(rows[numbers[line]]["value"]), dtype=object)
        missing[line] = [item is None for item in value.flat]
    return missing.reshape(-1)


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
