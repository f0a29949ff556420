"""Writing run folders: create or resume, append measurements, finish."""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from joma._runs.encoding import SPELT, encode, encode_array
from joma._runs.folder import (
    LOCK,
    RUN,
    SCHEMA,
    RunError,
    describe,
    existing,
    final_name,
    lock,
    plain,
    read_info,
    this_host,
    unlock,
    write_json,
)
from joma._runs.metric_lines import END, METRICS, RESERVED, complete
from joma._runs.state import Ending, ending

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from joma._runs.long_table import LongTable
    from joma._runs.reader import Run


class RunWriter:
    """Writes a run folder, alone: `create` or `resume` it, `write` measurements, `finish`.

    As a context manager it finishes by itself: "done", or "failed" with the exception as the reason, or "interrupted".

    Attributes:
        path: the folder.
        info: the content of `run.json`.
    """

    def __init__(self, path: Path, info: dict[str, Any], lock: int) -> None:
        self.path, self.info, self._lock = path, info, lock
        for leftover in path.glob(f".{RUN}.*.tmp"):
            leftover.unlink()
        self._save()
        self._metrics = os.open(path / METRICS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._offset = complete(path / METRICS)
        os.ftruncate(self._metrics, self._offset)
        self._open = True

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
            axes: gauge -> the names of its axes, as {"entropy": ["layer", "head"]}; plain numbers need none.
            name: what to call the run; the folder's name by default.
            packages: distributions whose versions are recorded.
            overwrite: clear a run that is there, with all that is in its folder. A folder which is not a run
                is refused in any case.
        """
        path = Path(path).absolute()
        info = {
            "schema": SCHEMA,
            "kind": kind,
            "name": name if name is not None else final_name(path),
            "config": plain(config, "config"),
            "seed": plain(seed, "seed"),
            "versions": _versions(packages),
            "created": _now(),
            "host": this_host(),
            "axes": {gauge: _checked_axes(gauge, names) for gauge, names in (axes or {}).items()},
            "status": "running",
        }
        existing(path)  # nothing is written to a folder that is not ours, not even a lock
        path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.callback(unlock, descriptor := lock(path), path)
            if (old := existing(path)) is not None:
                if not overwrite:
                    status = "killed" if old["status"] == "running" else None  # its lock was free
                    same = old["config"] == info["config"]
                    raise RunError(
                        f"{path} holds {'this' if same else 'another'} run ({describe(old, status)}): "
                        f"{'resume it, ' if same else ''}choose another folder or pass overwrite=True"
                    )
                # whenever a kill comes, what is left says that it is neither the old run nor the new one
                write_json(
                    path / RUN, {**old, "status": "failed", "reason": "was being overwritten"}
                )
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
            check_config(path, info["config"], config)
            packages = [package for package in info.get("versions", {}) if package != "python"]
            info.setdefault("resumed", []).append({"at": _now(), "versions": _versions(packages)})
            info = {key: item for key, item in info.items() if key not in ("finished", "reason")}
            writer = cls(path, {**info, "status": "running", "host": this_host()}, descriptor)
            stack.pop_all()
        return writer

    def write(
        self, step: SupportsIndex, values: Mapping[str, ArrayLike] | LongTable, **extra: object
    ) -> None:
        """Append one measurement: all of it survives a kill, or nothing.

        Arguments:
            step: the training step, or whatever the rows are counted by.
            values: gauge -> a number, or an array with the axes declared for this gauge; or a long
                table with one section per gauge.
            extra: more columns, the same for all gauges: numbers, strings, booleans or None.
        """
        self._check_open()
        columns = {"step": operator.index(step), **_checked_extras(extra, self.info["axes"])}
        if isinstance(values, Mapping):
            texts = [(gauge, self._text_of_value(gauge, value)) for gauge, value in values.items()]
        else:
            texts = self._texts_of_table(values)
        if not texts:
            return
        # What all lines of the measurement begin with, without the closing brace.
        head = json.dumps(columns, separators=(",", ":"), allow_nan=False)[:-1]
        lines = []
        for gauge, text in texts:
            lines.append(f'{head},"gauge":{encode_basestring_ascii(gauge)},"value":{text}')
        data = "}\n".join(lines).encode() + END
        try:
            written = 0
            while written < len(data):  # once, but for a full disk or 2 GB
                written += os.write(self._metrics, memoryview(data)[written:])
            self._offset += len(data)
        except BaseException:
            os.ftruncate(self._metrics, self._offset)
            raise

    def note(self, **facts: object) -> None:
        """Record facts in `run.json` that were not known at the start: layer names, the reason of a warning."""
        self._check_open()
        self.info |= {key: plain(fact, key) for key, fact in facts.items()}
        self._save()

    def refer(self, run: Run, gauges: Sequence[str], **extra: object) -> None:
        """Make measurements of another run part of this one's table without copying them: readers follow the reference.

        Arguments:
            run: the other run. Its place relative to this one is kept: move or copy both together.
            gauges: which of its gauges.
            extra: more columns for all its rows, as for `write`.
        """
        self._check_open()
        axes = run.info["axes"]
        member = {
            "path": os.path.relpath(run.path.resolve(), self.path.resolve()),
            "gauges": list(gauges),
            "columns": _checked_extras(extra, {gauge: axes.get(gauge, []) for gauge in gauges}),
        }
        self.note(runs=[*self.info.get("runs", []), member])

    @property
    def offset(self) -> int:
        """The size of `metrics.jsonl` in bytes, to keep in a checkpoint; what it counts is on the disk."""
        if self._open:
            os.fsync(self._metrics)
        return self._offset

    def truncate(self, offset: int) -> None:
        """Drop all measurements after `offset`, which an earlier `RunWriter.offset` gave."""
        self._check_open()
        with (self.path / METRICS).open("rb") as stream:
            stream.seek(max(0, offset - len(END)))
            if offset and not (len(END) <= offset <= self._offset and stream.read(len(END)) == END):
                raise RunError(
                    f"no measurement of {self.path} ends at byte {offset} of {self._offset}: "
                    "the checkpoint belongs to another run or is newer than the rows; use an older one"
                )
        os.ftruncate(self._metrics, offset)
        self._offset = offset

    def drop_from(self, step: int) -> None:
        """Drop the measurements of ``step`` and all after it in the file: a run that went back goes on from there."""
        self._check_open()
        at = 0
        with (self.path / METRICS).open("rb") as stream:
            for line in stream:
                if json.loads(line)["step"] >= step:
                    break
                at += len(line)
        self.truncate(at)

    def finish(self, status: Ending = "done", reason: str | None = None) -> None:
        """Record how the run ended and release the folder; a second call does nothing."""
        if not self._open:
            return
        try:
            os.fsync(self._metrics)
            self.info |= {"status": status, "finished": _now()}
            if reason is not None:
                self.info["reason"] = reason
            self._save()
        finally:
            self._open = False
            os.close(self._metrics)
            unlock(self._lock, self.path)

    def leave(self) -> None:
        """Release the folder without recording an end: the run counts as killed, and can be resumed."""
        if not self._open:
            return
        self._open = False
        os.close(self._metrics)
        unlock(self._lock, self.path)

    def _save(self) -> None:
        write_json(self.path / RUN, self.info)

    def _check_open(self) -> None:
        if not self._open:
            raise RunError(f"the writer of {self.path} is finished: go on with RunWriter.resume")

    def _texts_of_table(self, table: LongTable) -> list[tuple[str, str]]:
        """Return the gauges of a table, each with the JSON text of its numbers."""
        for section in table.sections:
            self._check_shape(section.gauge, section.shape)
        return list(zip(table.gauges, encode(table), strict=True))

    def _text_of_value(self, gauge: str, value: Any) -> str:
        """Return the JSON text of a number or an array, with all digits of its numbers."""
        if isinstance(value, float) and math.isfinite(value):
            # Without an array, a number takes a third of the time.
            self._check_shape(gauge, ())
            return float.__repr__(value)
        array, measured = _checked_array(gauge, value)
        self._check_shape(gauge, array.shape)
        return encode_array(array, measured)

    def _check_shape(self, gauge: str, shape: tuple[int, ...]) -> None:
        """Refuse numbers whose axes are not as declared."""
        axes = self.info["axes"].get(gauge, [])
        if len(shape) != len(axes):
            raise RunError(
                f"gauge {gauge!r} has shape {shape} but the axes {axes}: "
                f"declare one name per axis, create(..., axes={{{gauge!r}: [...]}})"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            with suppress(OSError):  # a full disk must not hide the error that the user has to see
                self.finish(*ending(error))

    def __del__(self) -> None:
        # a dropped writer must not lock a notebook out; a forked child must not unlock its parent's run
        if getattr(self, "_open", False):
            os.close(self._metrics)
            os.close(self._lock)

    def __repr__(self) -> str:
        return f"RunWriter({str(self.path)!r}: {describe(self.info)})"


def _checked_array(gauge: str, value: Any) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return a value as an array of real numbers, and which of them were measured.

    None stands for a number that was not measured. If there is none, all were.
    """
    import numpy as np

    if not isinstance(value, np.ndarray) and hasattr(value, "tolist"):  # torch, on any device
        value = value.tolist()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RunError(f"gauge {gauge!r} is ragged: give an array, padded with None") from error
    measured = None
    if array.dtype.kind == "O" and array.ndim:
        measured = np.array([item is not None for item in array.flat]).reshape(array.shape)
        with suppress(TypeError, ValueError):
            array = np.asarray(np.where(measured, array, np.nan).tolist()).reshape(array.shape)
    if array.dtype.kind not in _REAL_KINDS:
        raise RunError(
            f"gauge {gauge!r} is {value!r}: give real numbers, with None where nothing was measured"
        )
    if array.dtype.kind in "iu" and array.size and np.abs(array).max() > _LARGEST_INTEGER:
        raise RunError(
            f"gauge {gauge!r} has an integer beyond 2**53, which a table of numbers cannot hold "
            "exactly: write it as a string in an extra column"
        )
    return array, measured


# NumPy's letters for booleans, integers, unsigned integers and floats.
_REAL_KINDS = "biuf"
# Every integer up to this one is a float64.
_LARGEST_INTEGER = 2**53


def _checked_axes(gauge: str, names: Sequence[str]) -> list[str]:
    if isinstance(names, str) or len(set(names)) < len(names) or set(names) & set(RESERVED):
        raise RunError(
            f"the axes of gauge {gauge!r} are {names!r}: give a list of different names, "
            f"none of them {', '.join(RESERVED)}"
        )
    return list(names)


def _checked_extras(
    extra: Mapping[str, object], axes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return extra columns that can be read back and clash with no other column."""
    taken = {*RESERVED, *(axis for names in axes.values() for axis in names)}
    if clash := taken & extra.keys():
        raise RunError(
            f"the extra columns {sorted(clash)} have names of other columns: rename them"
        )
    return {key: _checked_extra(key, value) for key, value in extra.items()}


def _checked_extra(key: str, value: object) -> Any:
    if isinstance(value, str) and value in SPELT:
        raise RunError(
            f"the extra column {key}={value!r} would be read as a number: use another word"
        )
    value = plain(value, key)
    if isinstance(value, (list, dict)):
        raise RunError(
            f"the extra column {key} is {value!r}: give one number, string, boolean or None"
        )
    return value


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


def check_config(path: Path, old: Mapping[str, object], asked: Mapping[str, object]) -> None:
    """Refuse to take the run in `path` for one of another config; say what differs."""
    if differences := config_differences(old, asked):
        raise RunError(
            f"{path} was made with another config ({'; '.join(differences)}): "
            "ask for the same config or choose another folder"
        )


def config_differences(old: Mapping[str, object], asked: Mapping[str, object]) -> list[str]:
    """Return a phrase for every setting that differs between the config of a run and the one asked for."""
    return _differences(old, plain(asked, "config"))


def _differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Name every key whose value differs between two configs, with both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [f"{key}: {old!r} in the run, {new!r} asked"]
    differences = []
    for name in dict.fromkeys((*old, *new)):
        below = f"{key}.{name}" if key else name
        if name not in new:
            differences.append(f"{below}: {old[name]!r} in the run, not asked")
        elif name not in old:
            differences.append(f"{below}: not in the run, {new[name]!r} asked")
        else:
            differences += _differences(old[name], new[name], below)
    return differences
