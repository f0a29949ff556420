"""Run folders: what makes a folder a run, which names are free, and the lock of the one writer.

A folder is a run when it holds a `run.json` that joma wrote. No other folder is ever replaced or
removed.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from joma._runs.lock import take
from joma._runs.warning import warn

RUN = "run.json"
LOCK = ".lock"

# The version of the files of a run folder. It grows when a reader of the version before would
# misread them; keys that a reader may leave alone need no new version.
SCHEMA = 1
_KEYS = {"schema", "kind", "config", "axes", "status"}

# A writer that was killed before its first `run.json` leaves its lock and a temporary file.
_REMAINS = re.compile(rf"{re.escape(LOCK)}|\.{re.escape(RUN)}\.[0-9a-f]{{8}}\.tmp")

# Readers hold the lock for microseconds, to see whether a run has a writer. So one refusal does not
# mean much.
_ATTEMPTS = 5
_PAUSE = 0.02  # seconds between two attempts


class RunError(Exception):
    """A run folder cannot be read or written as asked."""


class RunInUse(RunError):
    """Another writer holds the run folder."""


class RunNotFound(RunError, FileNotFoundError):
    """The folder is not a run."""


def check_writable(folder: Path, room: int, instead: str) -> None:
    """Create ``folder``, and refuse one that cannot be written to, or whose disk is full.

    Arguments:
        folder: to be written to.
        room: bytes that must be free.
        instead: what to choose another of, as "--out".
    """
    probe = folder / f".write-test-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as stream:
                stream.write(bytes(min(room, 1 << 20)))
                os.fsync(stream.fileno())
            free = shutil.disk_usage(folder).free
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot write to {folder}: {error.strerror or error}; choose another {instead}"
        ) from None
    if free < room:
        raise RunError(
            f"cannot write to {folder}: {free / 1e6:.0f} MB are free on its disk, "
            f"{room / 1e6:.0f} MB may be needed; make room or choose another {instead}"
        )


# `run.json`


def read_info(path: Path) -> dict[str, Any]:
    """Return the content of `run.json`.

    Raises:
        RunNotFound: the folder is not a run.
        RunError: joma did not write the file, or a newer version did.
    """
    try:
        info = json.loads((path / RUN).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RunNotFound(
            f"{path} is not a run: it {_what_it_is(path)}. Runs are the folders that joma's watch, "
            "train, scan and exhibits write; from code: RunWriter.create(path, kind=..., "
            "config=...)"
        ) from None
    except ValueError as error:
        raise RunError(
            f"{path / RUN} is not JSON ({error}): restore it or choose another folder"
        ) from error
    if not (isinstance(info, dict) and info.keys() >= _KEYS):
        raise RunError(f"{path / RUN} was not written by joma: choose another folder")
    schema = info["schema"]
    if not isinstance(schema, int) or schema > SCHEMA:
        raise RunError(
            f"{path / RUN} has schema {schema!r}, and this version of joma reads schemas up to "
            f"{SCHEMA}: read it with the version that wrote it, or a newer one"
        )
    return info


def _what_it_is(path: Path) -> str:
    """Return why a path is not a run, after "it"."""
    if path.is_file():
        return "is a file"
    if path.is_dir():
        return f"has no {RUN}"
    return "does not exist"


def describe(info: Mapping[str, Any], status: str | None = None) -> str:
    """Return in a few words which run this is.

    ``status`` is its state, if it is not the recorded one.
    """
    if status is None:
        status = info["status"]
    return f"{info['kind']} {info.get('name')!r}, {status}, created {info.get('created')}"


def existing(path: Path) -> dict[str, Any] | None:
    """Return the info of the run in ``path``, or None for a new or empty folder.

    Raises:
        RunError: the folder holds something else.
    """
    if not path.exists():
        return None
    try:
        return read_info(path)
    except RunNotFound:
        if path.is_dir() and all(_REMAINS.fullmatch(entry.name) for entry in path.iterdir()):
            return None
        raise RunError(
            f"{path} is neither empty nor a run and stays as it is: choose another folder"
        ) from None


# Names with numbers


def numbered(path: Path, kind: str) -> Path:
    """Return ``path`` if it is new or empty, else the first of ``path``-2, ``path``-3, … that is.

    Only a run of this kind makes way, finished or not. Another run, or a folder that is not a run,
    is for the writer to refuse.

    Raises:
        RunInUse: the run is being written.
    """
    old = existing(path)
    if old is None or old["kind"] != kind:
        return path
    unlock(lock(path), path)
    for number in itertools.count(2):
        following = path.with_name(f"{path.name}-{number}")
        with suppress(RunError):  # a folder that is not ours
            if existing(following) is None:
                return following
    raise AssertionError  # numbers do not end


def newest(path: Path) -> Path:
    """Return the last of ``path``, ``path``-2, ``path``-3, … that is a run of the same kind."""
    kind = read_info(path)["kind"]
    name = path.absolute().name
    last = 1
    for entry in path.absolute().parent.glob(f"{glob.escape(name)}-*"):
        ending = entry.name.removeprefix(f"{name}-")
        if not ending.isdecimal() or ending.startswith("0"):
            continue
        with suppress(RunError):
            if read_info(entry)["kind"] == kind:
                last = max(last, int(ending))
    if last == 1:
        return path
    return path.with_name(f"{path.name}-{last}")


# The lock of the writer


def lock(folder: Path) -> int:
    """Take the folder's lock and return its descriptor.

    Raises:
        RunInUse: another writer holds it.
    """
    file = folder / LOCK
    descriptor = _take_patiently(folder)
    if descriptor is None:
        try:
            holder = file.read_text(errors="replace") or "another process"
        except FileNotFoundError:  # the holder has just gone
            return lock(folder)
        if holder == _this_process():
            holder += " (this process: call finish() on the earlier writer)"
        raise RunInUse(
            f"{folder} is in use by {holder}: wait for it, stop it, or choose another folder"
        )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, _this_process().encode())
    return descriptor


def _take_patiently(folder: Path) -> int | None:
    """Take the lock in one of several attempts; return None if it is held at all of them."""

    def unavailable(error: ImportError | OSError) -> None:
        if isinstance(error, ImportError):  # reading works everywhere
            raise RunError("runs can be written on Linux and macOS; on Windows use WSL") from error
        warn(f"joma: cannot lock {folder} ({error}): let only one process write there")

    for attempt in range(_ATTEMPTS):
        if attempt > 0:
            time.sleep(_PAUSE)
        descriptor = take(folder / LOCK, unavailable=unavailable)
        if descriptor is not None:
            return descriptor
    return None


def unlock(descriptor: int, folder: Path) -> None:
    """Release the lock that `lock` took.

    The file goes too, since a forked child may hold a copy of the descriptor open.
    """
    (folder / LOCK).unlink(missing_ok=True)
    os.close(descriptor)


def writer_of(folder: Path) -> tuple[int | None, str | None]:
    """Return process id and host of the last writer of a folder; None each if it has none."""
    try:
        text = (folder / LOCK).read_text(errors="replace")
    except OSError:
        return None, None
    holder = re.fullmatch(r"pid (\d+) on (.*)", text)
    if holder is None:
        return None, None
    return int(holder[1]), holder[2]


def this_host() -> str:
    """Return the name of this machine, without characters that file names cannot have."""
    return re.sub(r"[^\w.-]", "_", platform.node())


def _this_process() -> str:
    return f"pid {os.getpid()} on {this_host()}"


def is_alive(pid: int) -> bool:
    """Return True if this machine has a process of this id."""
    if os.name != "posix":  # elsewhere os.kill(pid, 0) may end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
