"""Reading run folders: rows, and the long table."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._run.folder import RunError, describe, read_info

if TYPE_CHECKING:
    import pandas as pd

METRICS = "metrics.jsonl"
END = b',"end":true}\n'  # JSON escapes quotes and newlines in strings: these bytes only end a measurement
RESERVED = ("step", "gauge", "value", "end")
SPELT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_BLOCK = 1 << 22  # bytes read at a time


def complete(metrics: Path) -> int:
    """Return the byte offset after the last complete measurement."""
    with metrics.open("rb") as stream:
        stop, later = stream.seek(0, os.SEEK_END), b""
        while stop > 0:
            start = max(0, stop - _BLOCK)
            stream.seek(start)
            block = stream.read(stop - start) + later  # a marker may straddle two blocks
            if (at := block.rfind(END)) >= 0:
                return start + at + len(END)
            stop, later = start, block[: len(END) - 1]
    return 0


def unspell(value: Any) -> Any:
    """Return `value` with the strings for NaN and infinities turned back into floats."""
    if isinstance(value, list):
        return [unspell(item) for item in value]
    return SPELT.get(value, value) if isinstance(value, str) else value


class Run:
    """A run folder, for reading; a run that is still being written can be read too.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        read_info(self.path)

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`, as it is now."""
        return read_info(self.path)

    @property
    def done(self) -> bool:
        """Whether the run came to its end; False while it runs, after a failure and after a kill."""
        return bool(self.info["status"] == "done")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each line of the complete measurements, in order: step, extra columns, gauge, value."""
        for row in self._lines():
            yield {key: item if key == "gauge" else unspell(item) for key, item in row.items()}

    def frame(self, gauge: str | None = None) -> pd.DataFrame:
        """Return the long table: one line a number, in the order of writing.

        Arguments:
            gauge: only this gauge; all by default.

        Returns:
            The columns step, extra columns (t, seed, ...), axes (layer, head, ...), gauge, value. Axes are
            counted from 0, and are `Int64` with `<NA>` where some gauge does not have them.
        """
        import numpy as np
        import pandas as pd

        declared: dict[str, list[str]] = self.info["axes"]
        columns: dict[str, list[Any]] = {"step": [], "gauge": []}  # one item a line
        groups: dict[tuple[str, tuple[int, ...]], tuple[list[int], list[Any]]] = {}  # -> line numbers, values
        count = 0
        for row in self._lines(gauge):
            value = row.pop("value")
            value = np.array(value, dtype=np.float64) if isinstance(value, list) else float(value)
            numbers, values = groups.setdefault((row["gauge"], getattr(value, "shape", ())), ([], []))
            numbers.append(count)
            values.append(value)
            for key, item in row.items():
                column = columns.setdefault(key, [])
                if len(column) < count:
                    column.extend([None] * (count - len(column)))
                column.append(item)
            count += 1
        if gauge is not None and not groups and gauge not in declared:
            known = ", ".join(sorted({row["gauge"] for row in self._lines()} | declared.keys()))
            raise RunError(f"{self.path} has no gauge {gauge!r}; it has {known or 'none yet'}")

        gauges = columns.pop("gauge")
        names = [gauge] if gauge is not None else list(dict.fromkeys(gauges))
        axes: dict[str, list[Any]] = {axis: [] for name in names for axis in declared.get(name, [])}
        at, flat = [np.empty(0, np.int64)], [np.empty(0)]
        for (name, shape), (numbers, values) in groups.items():
            if (size := math.prod(shape)) == 0:
                continue
            at.append(np.repeat(np.array(numbers), size))
            flat.append(np.array(values).reshape(-1))  # (lines, *shape) -> (lines * size,)
            places = np.indices(shape).reshape(len(shape), size)
            place = dict(zip(declared.get(name, []), places, strict=True))
            for axis, indices in axes.items():
                indices.append(np.tile(place.get(axis, np.full(size, -1)), len(numbers)))
        order = np.argsort(np.concatenate(at), kind="stable")
        line = np.concatenate(at)[order]

        table: dict[str, Any] = {}
        for key, column in columns.items():
            column.extend([None] * (count - len(column)))
            table[key] = _column(column).array.take(line)
        for axis, indices in axes.items():
            index = np.concatenate([np.empty(0, np.int64), *indices])[order]
            absent = index < 0
            table[axis] = pd.arrays.IntegerArray(index, absent) if absent.any() else index
        table["gauge"] = pd.Series(gauges, dtype="str").array.take(line)
        table["value"] = np.concatenate(flat)[order]
        return pd.DataFrame(table)

    def _lines(self, gauge: str | None = None) -> Iterator[dict[str, Any]]:
        """Parse the complete measurements, one call of the JSON parser for many lines."""
        wanted = b"" if gauge is None else json.dumps(gauge).encode()
        if not (metrics := self.path / METRICS).exists():
            return
        left, rest = complete(metrics), b""
        with metrics.open("rb") as stream:
            while block := stream.read(min(left, _BLOCK)):
                left -= len(block)
                *lines, rest = (rest + block).split(b"\n")
                lines = [line for line in lines if wanted in line]
                try:
                    rows = json.loads(b"[" + b",".join(lines) + b"]")
                except ValueError:
                    rows = [self._parse(line) for line in lines]
                for row in rows:
                    if gauge is None or row["gauge"] == gauge:
                        row.pop("end", None)
                        yield row

    def _parse(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise RunError(
                f"{self.path / METRICS} is damaged: {line[:80]!r} is not JSON ({error}); delete that line"
            ) from error

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {describe(self.info)})"

    def _repr_html_(self) -> str:
        info = {"folder": self.path, **self.info}
        cells = (f"<tr><th>{escape(key)}</th><td>{escape(str(item))}</td></tr>" for key, item in info.items())
        return f"<table>{''.join(cells)}</table>"


def _column(values: list[Any]) -> pd.Series[Any]:
    """Return a column; whole numbers and booleans stay what they are where some are missing."""
    import pandas as pd

    if not SPELT.keys().isdisjoint(values):
        values = unspell(values)
    missing = type(None)
    dtypes = {frozenset(): "int64", frozenset({int, missing}): "Int64", frozenset({bool, missing}): "boolean"}
    return pd.Series(values, dtype=dtypes.get(frozenset(map(type, values))))
