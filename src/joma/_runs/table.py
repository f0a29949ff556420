"""The table of a run as pandas shows it: the long table, with the step and the columns of each line.

Every table that joma shows of a run is made here. Layers with fewer heads than the widest may be
padded with NaN in the files; the table has no rows for the padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from joma._runs.encoding import SPELT, DecodedLines, GaugeLines, decode, unspell
from joma._runs.metric_lines import MetricLines

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray


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
    line_numbers: dict[tuple[int, str], list[int]] = {}  # (source, gauge) -> numbers of its lines
    for blocks, info in sources:
        for block in blocks:
            for number, name in enumerate(block.gauges, start=len(lines.gauges)):
                line_numbers.setdefault((len(infos), name), []).append(number)
            lines.extend(block)
        infos.append(info)
    names = list(dict.fromkeys(lines.gauges))
    if gauge is not None:
        names = [gauge]  # its axes are columns even without any line
    shapes = {}
    for source, info in enumerate(infos):
        for name in names:
            shapes[source, name] = GaugeShape.read(info, name)
    groups = []
    for (source, name), numbers in line_numbers.items():
        groups.append(GaugeLines(name, shapes[source, name].padding, numbers))
    decoded = decode(lines.values, groups)
    shapes_of_groups = [shapes[key] for key in line_numbers]
    section_shapes = [shapes_of_groups[owner] for owner in decoded.owners]
    return _frame(lines, decoded, section_shapes, list(shapes.values()))


def _frame(
    lines: MetricLines,
    decoded: DecodedLines,
    section_shapes: Sequence[GaugeShape],
    all_shapes: Sequence[GaugeShape],
) -> pd.DataFrame:
    """Return the table.

    Arguments:
        lines: of the runs.
        decoded: their numbers.
        section_shapes: the meaning of each section of the decoded table.
        all_shapes: of all gauges, also of those without any line.
    """
    import numpy as np
    import pandas as pd

    table = decoded.table
    axes = list(dict.fromkeys(axis for shape in all_shapes for axis in shape.axes))
    has_modules = "layer" in axes and any(shape.modules for shape in all_shapes)
    # All places of all sections one after the other, and what is to be known of each of them. A row
    # takes it from there: one gather per column, however many sections there are.
    sizes = [math.prod(section.shape) for section in table.sections]
    indices = {axis: np.full(sum(sizes), -1) for axis in axes}  # -1: the section has no such axis
    modules: list[str | None] = []
    module_numbers = np.full(sum(sizes), -1)
    firsts = np.zeros(len(sizes), np.int64)
    first = 0
    for number, (section, shape) in enumerate(zip(table.sections, section_shapes, strict=True)):
        firsts[number] = first
        places = slice(first, first + sizes[number])
        first += sizes[number]
        section_indices = shape.indices(section.shape)
        for axis, index in section_indices.items():
            indices[axis][places] = index
        if shape.modules and "layer" in section_indices:
            layer = section_indices["layer"]
            module_numbers[places] = np.where(layer < len(shape.modules), len(modules) + layer, -1)
            modules += shape.modules
    entries = firsts[table.codes] + table.places  # (rows,)

    columns = _head_columns(lines, decoded.row_counts)
    for axis in axes:
        column = indices[axis][entries]
        is_absent = column < 0
        if is_absent.any():
            columns[axis] = pd.arrays.IntegerArray(column, is_absent)
        else:
            columns[axis] = column
    columns["gauge"] = pd.Series(table.gauges, dtype="str").array.take(table.codes)
    columns["value"] = table.numbers
    if has_modules:
        # -1 takes the last one, which is missing.
        names = pd.Series([*modules, None], dtype="str").array
        columns["module"] = names.take(module_numbers[entries])
    # The arrays belong to the table alone. To copy them takes 4 ms for 130,000 rows.
    return pd.DataFrame(columns, copy=False)


def _head_columns(lines: MetricLines, row_counts: NDArray[np.int64]) -> dict[str, Any]:
    """Return step and extra columns, which all rows of a measurement share."""
    import numpy as np

    sizes = np.array(lines.sizes, dtype=np.int64)  # lines per measurement
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(chain(["step"], *lines.heads)):
        column = _column([head.get(name) for head in lines.heads])
        values: Any = column.array
        if column.dtype in (np.int64, np.float64):
            values = column.to_numpy()  # repeats four times as fast
        columns[name] = values.repeat(sizes).repeat(row_counts)
    return columns


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
