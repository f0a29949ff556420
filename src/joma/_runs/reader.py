"""Reading run folders: lines, and the long table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs.folder import RUN, RunError, RunNotFound, describe, read_info
from joma._runs.patterns import Patterns, read_patterns
from joma._runs.state import State, state_of
from joma._runs.table import long_table, parsed, unspell

if TYPE_CHECKING:
    import pandas as pd

METRICS = "metrics.jsonl"
END = b',"end":true}\n'  # JSON escapes quotes and newlines in strings: these bytes only end a measurement
RESERVED = ("step", "gauge", "value", "end")
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


class Run:
    """A run folder, for reading; a run that is still being written can be read too.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        read_info(self.path)
        self._frames: dict[
            str | None, pd.DataFrame
        ] = {}  # gauge -> table, of the files with this signature
        self._signature: list[tuple[str, int, int]] = []

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`, as it is now."""
        return read_info(self.path)

    @property
    def status(self) -> str:
        """State of the run now: "running", "done", "failed", "interrupted", "diverged" or "killed".

        In `info` a run that was killed is "running": nobody was left to record the end. It was killed if no process
        holds its folder any more. Of a run on another machine that may be impossible to see: then it is "running",
        and ``state.written`` is when it was last written.
        """
        return self.state.status

    @property
    def state(self) -> State:
        """The `status` now, with ``host``, ``written`` and ``remark``; ``str(state)`` is a phrase."""
        return state_of(self.path, self.info)

    @property
    def done(self) -> bool:
        """Whether the run came to its end; False while it runs, after a failure and after a kill."""
        return bool(self.info["status"] == "done")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each line of the complete measurements, in order: step, extra columns, gauge, value."""
        for lines, _ in self._sources():
            for row in lines:
                try:
                    row["value"] = parsed(row["value"])
                except ValueError:
                    self._name_damage()
                    raise
                yield {key: item if key == "gauge" else unspell(item) for key, item in row.items()}

    def frame(self, gauge: str | None = None) -> pd.DataFrame:
        """Return the long table: one row per number, in the order of writing; of no head that a layer does not have.

        Arguments:
            gauge: only this gauge; all by default.

        Returns:
            The columns step, extra columns (t, seed, ...), axes (layer, head, ...), gauge, value, and, where the run
            names its layers, module: the module or matrix that a layer is. Axes are counted from 0, and are `Int64`
            with `<NA>` where some gauge does not have them.
        """
        signature = self._sign_files()
        if signature != self._signature:
            self._signature = signature
            self._frames.clear()
        if gauge not in self._frames:
            self._frames[gauge] = self._read_frame(gauge)
        return self._frames[gauge].copy()

    def _sign_files(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of each file that the table is read from: it is parsed once until one changes."""
        signature = []
        for folder in [self.path, *self.members]:
            for name in (RUN, METRICS):
                path = folder / name
                if path.exists():
                    state = path.stat()
                    signature.append((str(path), state.st_size, state.st_mtime_ns))
        return signature

    def _read_frame(self, gauge: str | None) -> pd.DataFrame:
        try:
            table = long_table(self._sources(gauge), gauge)
        except json.JSONDecodeError:
            self._name_damage()
            raise
        if (
            gauge is not None
            and table.empty
            and not any(gauge in info["axes"] for _, info in self._sources())
        ):
            declared = {name for _, info in self._sources() for name in info["axes"]}
            known = ", ".join(sorted(declared | {row["gauge"] for row in self.rows()}))
            raise RunError(f"{self.path} has no gauge {gauge!r}; it has {known or 'none yet'}")
        return table

    def latest(self) -> pd.DataFrame:
        """The rows of `frame` at the last step of each gauge."""
        table = self.frame()
        return table[table.step == table.groupby("gauge").step.transform("max")].reset_index(
            drop=True
        )

    def patterns(self) -> Patterns | None:
        """Who attends to whom at a few steps, if the run recorded it: ``patterns().kept[0].shares(layer)``."""
        return read_patterns(self.path)

    @property
    def members(self) -> list[Path]:
        """The folders of the runs whose measurements this one refers to (`RunWriter.refer`); they may be missing."""
        return [
            Path(os.path.normpath(self.path / member["path"]))
            for member in self.info.get("runs", [])
        ]

    def _sources(
        self, gauge: str | None = None
    ) -> Iterator[tuple[Iterator[dict[str, Any]], dict[str, Any]]]:
        """Yield the lines of this run, then of each that it refers to, with the `run.json` that describes them."""
        info = self.info
        yield self._lines(gauge), info
        for path, member in zip(self.members, info.get("runs", []), strict=True):
            try:
                run = Run(path)
            except RunNotFound as error:
                raise RunNotFound(
                    f"{self.path} refers to the measurements in {path}, which is not there ({error}): bring that "
                    f"folder back, or make {self.path} again"
                ) from None
            yield run._as_member(member, gauge), run.info

    def _as_member(self, member: dict[str, Any], gauge: str | None) -> Iterator[dict[str, Any]]:
        """Yield the lines of the gauges that another run refers to, with the columns that it adds."""
        for row in self._lines(gauge):
            if row["gauge"] in member["gauges"]:
                yield {"step": row.pop("step"), **member["columns"], **row}

    def _lines(self, gauge: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the complete measurements, their values as JSON text where `RunWriter` wrote them."""
        wanted = b"" if gauge is None else json.dumps(gauge).encode()
        if not (metrics := self.path / METRICS).exists():
            return
        left, rest = complete(metrics), b""
        with metrics.open("rb") as stream:
            while block := stream.read(min(left, _BLOCK)):
                left -= len(block)
                *lines, rest = (rest + block).split(b"\n")
                if wanted:
                    lines = [line for line in lines if wanted in line]
                rows = _heads(lines) or self._parse_all(lines)
                for row in rows:
                    if gauge is None or row["gauge"] == gauge:
                        row.pop("end", None)
                        yield row

    def _parse_all(self, lines: list[bytes]) -> list[Any]:
        """Parse lines, one call of the JSON parser for all of them if none is damaged."""
        try:
            rows: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
        except ValueError:
            rows = [self._parse(line) for line in lines]
        return rows

    def _name_damage(self) -> None:
        """Raise a `RunError` that names the first line which is not JSON, in this run or one that it refers to."""
        for folder in [self.path, *self.members]:
            metrics = folder / METRICS
            if metrics.exists():
                run = Run(folder)
                for line in metrics.read_bytes()[: complete(metrics)].splitlines():
                    run._parse(line)

    def _parse(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise RunError(
                f"{self.path / METRICS} is damaged: {line[:80]!r} is not JSON ({error}); delete that line"
            ) from error

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {describe(self.info, self.status)})"

    def _repr_html_(self) -> str:
        info = {"folder": self.path, **self.info}
        cells = (
            f"<tr><th>{escape(key)}</th><td>{escape(str(item))}</td></tr>"
            for key, item in info.items()
        )
        return f"<table>{''.join(cells)}</table>"


def _heads(lines: list[bytes]) -> list[dict[str, Any]] | None:
    """Return lines with their values as JSON text; None if a line is not as `RunWriter` writes it.

    JSON escapes quotes in strings, so that the bytes `,"value":` begin the value and nothing else.
    """
    heads = []
    values = []
    for line in lines:
        head, separator, value = line.partition(b',"value":')
        value = value.removesuffix(b"}").removesuffix(b',"end":true')
        if not separator or not value:
            return None
        heads.append(head)
        values.append(value)
    try:
        rows: list[dict[str, Any]] = json.loads(b"[" + b"},".join(heads) + b"}]") if heads else []
    except ValueError:
        return None
    if len(rows) != len(values):
        return None
    for row, value in zip(rows, values, strict=True):
        row["value"] = value
    return rows
