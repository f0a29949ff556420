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

from joma._runs.config import check_config
from joma._runs.encoding import encode, encode_array
from joma._runs.files import plain, write_json
from joma._runs.folder import (
    LOCK,
    RUN,
    SCHEMA,
    RunError,
    describe,
    existing,
    lock,
    read_info,
    this_host,
    unlock,
)
from joma._runs.metric_lines import END, METRICS, complete
from joma._runs.staging import final_name
from joma._runs.state import Ending, ending
from joma._runs.written_values import checked_array, checked_axes, checked_columns

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import ArrayLike

    from joma._runs.long_table import LongTable
    from joma._runs.reader import Run


class RunWriter:
    """Writes a run folder, alone: `create` or `resume` it, `write` measurements, `finish`.

    As a context manager it finishes by itself: "done", or "failed" with the exception as the reason,
    or "interrupted".

    Attributes:
        path: the folder.
        info: the content of `run.json`.
    """

    def __init__(self, path: Path, info: dict[str, Any], lock: int) -> None:
        self.path = path
        self.info = info
        self._lock = lock
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
            axes: gauge -> the names of its axes, as {"entropy": ["layer", "head"]}; plain numbers
                need none.
            name: what to call the run; the folder's name by default.
            packages: distributions whose versions are recorded.
            overwrite: clear a run that is there, with all that is in its folder. A folder which is
                not a run is refused in any case.
        """
        path = Path(path).absolute()
        if name is None:
            name = final_name(path)
        info = {
            "schema": SCHEMA,
            "kind": kind,
            "name": name,
            "config": plain(config, "config"),
            "seed": plain(seed, "seed"),
            "versions": _versions(packages),
            "created": _now(),
            "host": this_host(),
            "axes": {gauge: checked_axes(gauge, names) for gauge, names in (axes or {}).items()},
            "status": "running",
        }
        existing(path)  # nothing is written to a folder that is not ours, not even a lock
        path.mkdir(parents=True, exist_ok=True)
        descriptor = lock(path)
        with ExitStack() as stack:
            stack.callback(unlock, descriptor, path)
            old = existing(path)
            if old is not None:
                if not overwrite:
                    raise _refusal(path, old, info["config"])
                _clear(path, old)
            writer = cls(path, info, descriptor)
            stack.pop_all()  # the writer holds the lock from now on
        return writer

    @classmethod
    def resume(cls, path: str | os.PathLike[str], config: Mapping[str, object]) -> Self:
        """Go on with a run of the same `config`, after its last complete measurement."""
        path = Path(path).absolute()
        read_info(path)
        descriptor = lock(path)
        with ExitStack() as stack:
            stack.callback(unlock, descriptor, path)
            info = read_info(path)
            check_config(path, info["config"], config)
            packages = [package for package in info.get("versions", {}) if package != "python"]
            info.setdefault("resumed", []).append({"at": _now(), "versions": _versions(packages)})
            info.pop("finished", None)
            info.pop("reason", None)
            info |= {"status": "running", "host": this_host()}
            writer = cls(path, info, descriptor)
            stack.pop_all()  # the writer holds the lock from now on
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
        columns = {"step": operator.index(step), **checked_columns(extra, self.info["axes"])}
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
        self._append("}\n".join(lines).encode() + END)

    def _append(self, data: bytes) -> None:
        """Append all lines of a measurement, or none."""
        try:
            written = 0
            while written < len(data):  # once, but for a full disk or 2 GB
                written += os.write(self._metrics, memoryview(data)[written:])
            self._offset += len(data)
        except BaseException:
            os.ftruncate(self._metrics, self._offset)
            raise

    def note(self, **facts: object) -> None:
        """Record facts in `run.json` that were not known at the start, as the names of layers."""
        self._check_open()
        for key, fact in facts.items():
            self.info[key] = plain(fact, key)
        self._save()

    def refer(self, run: Run, gauges: Sequence[str], **extra: object) -> None:
        """Make measurements of another run part of this one's table, without a copy.

        Readers follow the reference. Its path is relative: move or copy both runs together.

        Arguments:
            run: the other run.
            gauges: which of its gauges.
            extra: more columns for all its rows, as for `write`.
        """
        self._check_open()
        axes = run.info["axes"]
        member = {
            "path": os.path.relpath(run.path.resolve(), self.path.resolve()),
            "gauges": list(gauges),
            "columns": checked_columns(extra, {gauge: axes.get(gauge, []) for gauge in gauges}),
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
        if offset != 0 and not self._ends_at(offset):
            raise RunError(
                f"no measurement of {self.path} ends at byte {offset} of {self._offset}: the "
                "checkpoint belongs to another run or is newer than the rows; use an older one"
            )
        os.ftruncate(self._metrics, offset)
        self._offset = offset

    def _ends_at(self, offset: int) -> bool:
        """Return True if a measurement ends at this byte."""
        if not len(END) <= offset <= self._offset:
            return False
        with (self.path / METRICS).open("rb") as stream:
            stream.seek(offset - len(END))
            return stream.read(len(END)) == END

    def drop_from(self, step: int) -> None:
        """Drop the measurements of ``step`` and all after it in the file.

        A run that went back to a checkpoint goes on from there.
        """
        self._check_open()
        offset = 0
        with (self.path / METRICS).open("rb") as stream:
            for line in stream:
                if json.loads(line)["step"] >= step:
                    break
                offset += len(line)
        self.truncate(offset)

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
        """Release the folder without recording an end; the run counts as killed."""
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
        array, measured = checked_array(gauge, value)
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


def _refusal(path: Path, old: Mapping[str, Any], config: object) -> RunError:
    """Return the error of a folder that holds a run."""
    status = None
    if old["status"] == "running":  # its lock was free
        status = "killed"
    which = "another"
    remedy = "choose another folder or pass overwrite=True"
    if old["config"] == config:
        which = "this"
        remedy = f"resume it, {remedy}"
    return RunError(f"{path} holds {which} run ({describe(old, status)}): {remedy}")


def _clear(path: Path, old: Mapping[str, Any]) -> None:
    """Remove everything in a run folder but `run.json` and the lock.

    Whenever a kill comes, `run.json` says that this is neither the old run nor the new one.
    """
    write_json(path / RUN, {**old, "status": "failed", "reason": "was being overwritten"})
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in (RUN, LOCK):
            entry.unlink()


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
