"""Run folders: their one reader (`Run`) and their one writer (`RunWriter`, `staged`).

A run folder holds `run.json` (what was run: kind, name, config, seed, versions, axes, status) and
`metrics.jsonl` (what was measured: one line a step and gauge). All lines of one measurement are appended by
one `os.write`, and the last of them carries `"end": true`, so that a run killed at any moment keeps every
complete measurement: readers ignore a torn tail, `RunWriter.resume` cuts it off. JSON has no NaN and no
infinities: they are written as the strings `"nan"`, `"inf"` and `"-inf"` and read back as floats.

>>> import tempfile
>>> with staged(Path(tempfile.mkdtemp()) / "demo") as folder:
...     with RunWriter.create(folder, kind="demo", config={}, axes={"entropy": ["layer"]}) as writer:
...         writer.write(0, {"entropy": [0.5, 0.25], "loss": 2.0}, t=0.0)
>>> list(Run(folder.with_name("demo")).rows())[1]
{'step': 0, 't': 0.0, 'gauge': 'loss', 'value': 2.0}
"""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex

from joma._folder import (
    LOCK,
    RUN,
    RunError,
    RunInUse,
    RunNotFound,
    describe,
    existing,
    final_name,
    lock,
    plain,
    read_info,
    staged,
    unlock,
    write_atomic,
    write_json,
)

if TYPE_CHECKING:
    from types import TracebackType

    import pandas as pd
    from numpy.typing import ArrayLike

__all__ = [
    "Run",
    "RunError",
    "RunInUse",
    "RunNotFound",
    "RunWriter",
    "staged",
    "write_atomic",
    "write_json",
]

_METRICS = "metrics.jsonl"
_END = b',"end":true}\n'  # JSON escapes quotes and newlines inside strings: these bytes only end a measurement
_BLOCK = 1 << 22  # bytes read at a time
_RESERVED = ("step", "gauge", "value", "end")
_SPELT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _unspell(value: Any) -> Any:
    """Return `value` with the strings for NaN and infinities turned back into floats."""
    if isinstance(value, list):
        return [_unspell(item) for item in value]
    return _SPELT.get(value, value) if isinstance(value, str) else value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of Python and of `packages`; None where a package is not installed."""
    from importlib import metadata

    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Name every key whose value differs between two configs, with both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{key}: {old!r} in the run, {new!r} asked"]
    found = []
    for name in dict.fromkeys((*old, *new)):
        below = f"{key}.{name}" if key else name
        if name not in new:
            found.append(f"{below}: {old[name]!r} in the run, not asked")
        elif name not in old:
            found.append(f"{below}: not in the run, {new[name]!r} asked")
        else:
            found += _differences(old[name], new[name], below)
    return found


def _complete(metrics: Path) -> int:
    """Return the byte offset after the last complete measurement."""
    with metrics.open("rb") as stream:
        stop, later = stream.seek(0, os.SEEK_END), b""
        while stop > 0:
            start = max(0, stop - _BLOCK)
            stream.seek(start)
            block = stream.read(stop - start) + later  # a marker may straddle two blocks
            if (at := block.rfind(_END)) >= 0:
                return start + at + len(_END)
            stop, later = start, block[: len(_END) - 1]
    return 0


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
        """Yield one dict a line (step, extra columns, gauge, value) of the complete measurements, in order."""
        for row in self._lines():
            yield {key: _unspell(item) for key, item in row.items()}

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
        steps: list[int] = []
        gauges: list[str] = []
        extras: list[dict[str, Any]] = []
        groups: dict[tuple[str, tuple[int, ...]], tuple[list[int], list[Any]]] = {}  # -> line numbers, values
        for number, row in enumerate(self._lines(gauge)):
            steps.append(row.pop("step"))
            gauges.append(name := row.pop("gauge"))
            value = row.pop("value")
            value = np.array(value, dtype=np.float64) if isinstance(value, list) else float(value)
            lines, values = groups.setdefault((name, getattr(value, "shape", ())), ([], []))
            lines.append(number)
            values.append(value)
            extras.append(row)
        if gauge is not None and not groups and gauge not in declared:
            known = ", ".join(sorted({row["gauge"] for row in self._lines()} | declared.keys()))
            raise RunError(f"{self.path} has no gauge {gauge!r}; it has {known or 'none yet'}")

        names = [gauge] if gauge is not None else list(dict.fromkeys(gauges))
        axes: dict[str, list[Any]] = {axis: [] for name in names for axis in declared.get(name, [])}
        at, numbers = [np.empty(0, np.int64)], [np.empty(0)]
        for (name, shape), (lines, values) in groups.items():
            if (size := math.prod(shape)) == 0:
                continue
            at.append(np.repeat(np.array(lines), size))
            numbers.append(np.array(values).reshape(-1))  # (lines, *shape) -> (lines * size,)
            places = np.indices(shape).reshape(len(shape), size)
            place = dict(zip(declared.get(name, []), places, strict=True))
            for axis, column in axes.items():
                column.append(np.tile(place.get(axis, np.full(size, -1)), len(lines)))
        order = np.argsort(line := np.concatenate(at), kind="stable")
        line = line[order]

        table = {"step": pd.Series(steps, dtype="int64")}
        for extra in dict.fromkeys(key for row in extras for key in row):
            table[extra] = _column([_unspell(row.get(extra)) for row in extras])
        table = {key: column.take(line).reset_index(drop=True) for key, column in table.items()}
        for axis, column in axes.items():
            index = np.concatenate([np.empty(0, np.int64), *column])[order]
            absent = index < 0
            table[axis] = pd.Series(pd.arrays.IntegerArray(index, absent) if absent.any() else index)
        table["gauge"] = pd.Series(gauges, dtype="str").take(line).reset_index(drop=True)
        table["value"] = pd.Series(np.concatenate(numbers)[order])
        return pd.DataFrame(table)

    def _lines(self, gauge: str | None = None) -> Iterator[dict[str, Any]]:
        """Parse the complete measurements, one call of the JSON parser for many lines."""
        wanted = b"" if gauge is None else json.dumps(gauge).encode()
        if not (metrics := self.path / _METRICS).exists():
            return
        left, rest = _complete(metrics), b""
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
                f"{self.path / _METRICS} is damaged: {line[:80]!r} is not JSON ({error}); delete that line"
            ) from error

    def __repr__(self) -> str:
        info = self.info
        return f"Run({str(self.path)!r}: {info['kind']} {info.get('name')!r}, {info['status']})"

    def _repr_html_(self) -> str:
        info = {"folder": self.path, **self.info}
        cells = (f"<tr><th>{escape(key)}</th><td>{escape(str(item))}</td></tr>" for key, item in info.items())
        return f"<table>{''.join(cells)}</table>"


def _column(values: list[Any]) -> pd.Series[Any]:
    """Return an extra column; whole numbers and booleans stay what they are where some are missing."""
    import pandas as pd

    kinds = {type(value) for value in values}
    if kinds == {int, type(None)}:
        return pd.Series(values, dtype="Int64")
    return pd.Series(values, dtype="boolean") if kinds == {bool, type(None)} else pd.Series(values)


class RunWriter:
    """Writes a run folder, alone: `create` or `resume` it, `write` measurements, `finish`.

    As a context manager it finishes by itself: "done", or "failed" with the exception as the reason.

    Attributes:
        path: the folder.
        info: the content of `run.json`.
    """

    def __init__(self, path: Path, info: dict[str, Any], lock: int) -> None:
        self.path, self.info, self._lock = path, info, lock
        for leftover in path.glob(f".{RUN}.*.tmp"):
            leftover.unlink()
        self._save()
        self._metrics = os.open(path / _METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._open = True
        self._offset = _complete(path / _METRICS)
        os.ftruncate(self._metrics, self._offset)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        kind: str,
        config: Mapping[str, object],
        seed: int | None = None,
        axes: Mapping[str, Sequence[str]] | None = None,
        name: str | None = None,
        packages: Sequence[str] = ("joma", "numpy"),
        overwrite: bool = False,
    ) -> Self:
        """Start a run in a new or empty folder.

        Arguments:
            path: the folder; it and its parents are made.
            kind: what made the run: "watch", "scan", ...
            config: all that decides the outcome; `resume` compares it.
            seed: the seed of the random numbers.
            axes: the names of the axes of each gauge that is an array, such as {"entropy": ["layer", "head"]}.
            name: what to call the run; the folder's name by default.
            packages: distributions whose versions are recorded.
            overwrite: clear a run that is there, with all that is in its folder. Folders which are not runs are
                refused in any case.
        """
        path = Path(path).absolute()
        info = {
            "kind": kind,
            "name": name if name is not None else final_name(path),
            "config": plain(config, "config"),
            "seed": plain(seed, "seed"),
            "versions": _versions(packages),
            "created": _now(),
            "axes": {gauge: _checked_axes(gauge, names) for gauge, names in (axes or {}).items()},
            "status": "running",
        }
        existing(path)  # nothing is written to a folder that is not ours, not even a lock
        path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.callback(unlock, descriptor := lock(path), path)
            if (old := existing(path)) is not None:
                if not overwrite:
                    same = old["config"] == info["config"]
                    raise RunError(
                        f"{path} holds {'this' if same else 'another'} run ({describe(old)}): "
                        f"{'resume it, ' if same else ''}choose another folder or pass overwrite=True"
                    )
                # whenever a kill comes, what is left says that it is neither the old run nor the new one
                write_json(path / RUN, {**old, "status": "failed", "reason": "was being overwritten"})
                for entry in path.iterdir():
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    elif entry.name not in (RUN, LOCK):
                        entry.unlink()
            writer = cls(path, info, descriptor)
            stack.pop_all()
        return writer

    @classmethod
    def resume(cls, path: str | os.PathLike[str], config: Mapping[str, object]) -> Self:
        """Go on with a run of the same `config`, after its last complete measurement."""
        path = Path(path).absolute()
        read_info(path)
        with ExitStack() as stack:
            stack.callback(unlock, descriptor := lock(path), path)
            info = read_info(path)
            if differences := _differences(info["config"], plain(config, "config")):
                raise RunError(
                    f"{path} was made with another config ({'; '.join(differences)}): "
                    "ask for the same config or choose another folder"
                )
            packages = [package for package in info.get("versions", {}) if package != "python"]
            info.setdefault("resumed", []).append({"at": _now(), "versions": _versions(packages)})
            info = {key: item for key, item in info.items() if key not in ("finished", "reason")}
            writer = cls(path, {**info, "status": "running"}, descriptor)
            stack.pop_all()
        return writer

    def write(self, step: SupportsIndex, values: Mapping[str, ArrayLike], **extra: object) -> None:
        """Append one measurement: all of it survives a kill, or nothing.

        Arguments:
            step: the training step, or whatever the rows are counted by.
            values: gauge -> a number, or an array with the axes declared for this gauge.
            extra: more columns, the same for all gauges: numbers, strings, booleans or None.
        """
        self._check_open()
        axes = {axis for gauge in values for axis in self.info["axes"].get(gauge, [])}
        for key, item in (extra := {key: _checked_extra(key, item) for key, item in extra.items()}).items():
            if key in axes or key in _RESERVED:
                raise RunError(f"the extra column {key!r}={item!r} has the name of another column: rename it")
        head = {"step": operator.index(step), **extra}
        rows = [{**head, "gauge": gauge, "value": self._checked(gauge, item)} for gauge, item in values.items()]
        if not rows:
            return
        rows[-1]["end"] = True
        data = "".join(json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n" for row in rows).encode()
        try:
            written = 0
            while written < len(data):  # once, but for a full disk or 2 GB
                written += os.write(self._metrics, memoryview(data)[written:])
            self._offset += len(data)
        except BaseException:
            os.ftruncate(self._metrics, self._offset)
            raise

    @property
    def offset(self) -> int:
        """The size of `metrics.jsonl` in bytes, to keep in a checkpoint; what it counts is on the disk."""
        if self._open:
            os.fsync(self._metrics)
        return self._offset

    def truncate(self, offset: int) -> None:
        """Drop all measurements after `offset`, which an earlier `RunWriter.offset` gave."""
        self._check_open()
        with (self.path / _METRICS).open("rb") as stream:
            stream.seek(max(0, offset - len(_END)))
            if offset and not (len(_END) <= offset <= self._offset and stream.read(len(_END)) == _END):
                raise RunError(
                    f"no measurement of {self.path} ends at byte {offset} of {self._offset}: "
                    "the checkpoint belongs to another run or is newer than the rows; use an older one"
                )
        os.ftruncate(self._metrics, offset)
        self._offset = offset

    def finish(self, status: Literal["done", "failed"] = "done", reason: str | None = None) -> None:
        """Record how the run ended and release the folder; a second call does nothing."""
        if not self._open:
            return
        try:
            os.fsync(self._metrics)
            self.info |= {"status": status, "finished": _now()} | ({} if reason is None else {"reason": reason})
            self._save()
        finally:
            self._open = False
            os.close(self._metrics)
            unlock(self._lock, self.path)

    def _save(self) -> None:
        write_json(self.path / RUN, self.info)

    def _check_open(self) -> None:
        if not self._open:
            raise RunError(f"the writer of {self.path} is finished: go on with RunWriter.resume")

    def _checked(self, gauge: str, value: Any) -> Any:
        """Return a value as nested lists, if its numbers and axes are as declared."""
        import numpy as np

        if not isinstance(value, np.ndarray) and hasattr(value, "tolist"):  # torch, on any device
            value = value.tolist()
        axes = self.info["axes"].get(gauge, [])
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise RunError(f"gauge {gauge!r} is ragged: give an array, with NaN where nothing is ({error})") from error
        if array.dtype.kind not in "biuf":
            raise RunError(f"gauge {gauge!r} is {value!r}: give real numbers, with NaN where nothing is")
        if array.ndim != len(axes):
            raise RunError(
                f"gauge {gauge!r} has shape {array.shape} but the axes {axes}: "
                f"declare one name an axis, create(..., axes={{{gauge!r}: [...]}})"
            )
        if array.dtype.kind == "f":
            array = array.astype(np.float64, copy=False)
        return array.tolist() if np.isfinite(array).all() else plain(array)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        else:
            with suppress(OSError):  # a full disk must not hide the error that the user has to see
                self.finish("failed", f"{type(error).__name__}: {error}")

    def __del__(self) -> None:
        # a writer that was dropped must not lock a notebook out; a forked child must not unlock its parent's run
        if getattr(self, "_open", False):
            os.close(self._metrics)
            os.close(self._lock)

    def __repr__(self) -> str:
        return f"RunWriter({str(self.path)!r}: {describe(self.info)})"


def _checked_axes(gauge: str, names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or len(set(names)) < len(names) or set(names) & set(_RESERVED):
        raise RunError(
            f"the axes of gauge {gauge!r} are {names!r}: give a list of different names, "
            f"none of them {', '.join(_RESERVED)}"
        )
    return list(names)


def _checked_extra(key: str, value: object) -> Any:
    if isinstance(value, str) and value in _SPELT:
        raise RunError(f"the extra column {key}={value!r} would be read as a number: use another word")
    value = plain(value, key)
    if isinstance(value, (list, dict)):
        raise RunError(f"the extra column {key} is {value!r}: give one number, string, boolean or None")
    return value
