"""Folders and files that are written whole, by one process: atomic files, the lock, staged folders.

What is on disk is whole whenever the process dies. A folder is a run when it holds a `run.json` that joma
wrote; no other folder is ever replaced or removed.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from joma._runs.lock import is_free, take
from joma._runs.warning import warn

RUN, LOCK = "run.json", ".lock"
# Readers hold the lock for microseconds, to see whether a run has a writer. So one refusal does not mean much.
_ATTEMPTS = 5
_PAUSE = 0.02  # seconds between two attempts
_SIBLING = re.compile(
    r"\.(?P<name>.+)\.(?P<what>partial|old)-(?P<pid>\d+)-(?P<host>.*)-[0-9a-f]{8}"
)


class RunError(Exception):
    """A run folder cannot be read or written as asked."""


class RunInUse(RunError):
    """Another writer holds the run folder."""


class RunNotFound(RunError, FileNotFoundError):
    """The folder is not a run."""


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content, read in parts."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file so that at each moment the old or the new content is there, whole."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(folder: Path, room: int, instead: str) -> None:
    """Make ``folder`` and refuse one that cannot be written to, or whose disk is full, before any work is done.

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
            f"cannot write to {folder}: {free / 1e6:.0f} MB are free on its disk, {room / 1e6:.0f} MB may be needed; "
            f"make room or choose another {instead}"
        )


def write_json(path: str | os.PathLike[str], obj: object) -> None:
    """Write `obj` as indented JSON, atomically; arrays become lists, NaN and ±inf strings."""
    write_atomic(path, json.dumps(plain(obj), indent=2, ensure_ascii=False) + "\n")


def plain(obj: Any, where: str = "") -> Any:
    """Return `obj` made of JSON's own types; `where` names the place in errors."""
    if hasattr(obj, "tolist"):  # NumPy and torch, scalars and arrays
        obj = obj.tolist()
    if isinstance(obj, float) and not math.isfinite(obj):
        return str(float(obj))
    if obj is None or isinstance(obj, (str, int, float)):
        return obj
    if isinstance(obj, Mapping):
        return {
            str(key): plain(item, f"{where}.{key}" if where else str(key))
            for key, item in obj.items()
        }
    if isinstance(obj, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(obj)]
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    raise TypeError(
        f"{where or 'the value'} is {obj!r} of type {type(obj).__name__}, which JSON cannot hold: "
        "give numbers, strings, booleans, None, lists, dicts, paths or arrays"
    )


# The version of the files of a run folder. It grows when a reader of the version before would
# misread them; keys that a reader may leave alone need no new version.
SCHEMA = 1
# Runs of before there were versions.
FIRST_SCHEMA = 1


def read_info(path: Path) -> dict[str, Any]:
    """Return the content of `run.json`; say what is missing if the folder is not a run."""
    try:
        info = json.loads((path / RUN).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        state = (
            "is a file"
            if path.is_file()
            else f"has no {RUN}"
            if path.is_dir()
            else "does not exist"
        )
        raise RunNotFound(
            f"{path} is not a run: it {state}. Runs are the folders that joma's watch, train, scan and "
            "exhibits write; from code: RunWriter.create(path, kind=..., config=...)"
        ) from None
    except ValueError as error:
        raise RunError(
            f"{path / RUN} is not JSON ({error}): restore it or choose another folder"
        ) from error
    if not (isinstance(info, dict) and info.keys() >= {"kind", "config", "axes", "status"}):
        raise RunError(f"{path / RUN} was not written by joma: choose another folder")
    schema = info.get("schema", FIRST_SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise RunError(
            f"{path / RUN} has schema {schema!r}, and this version of joma reads schemas up to "
            f"{SCHEMA}: read it with the version that wrote it, or a newer one"
        )
    return info


def describe(info: Mapping[str, Any], status: str | None = None) -> str:
    """Return in a few words which run this is; ``status`` is its state, if it is not the recorded one."""
    return f"{info['kind']} {info.get('name')!r}, {status or info['status']}, created {info.get('created')}"


def existing(path: Path) -> dict[str, Any] | None:
    """Return the info of the run in `path`, or None for a new or empty folder; refuse anything else."""
    if not path.exists():
        return None
    try:
        return read_info(path)
    except RunNotFound:
        # a writer killed before its first run.json leaves its lock and a temporary file
        ours = re.compile(rf"{re.escape(LOCK)}|\.{re.escape(RUN)}\.[0-9a-f]{{8}}\.tmp")
        if path.is_dir() and all(ours.fullmatch(entry.name) for entry in path.iterdir()):
            return None
        raise RunError(
            f"{path} is neither empty nor a run and stays as it is: choose another folder"
        ) from None


def numbered(path: Path, kind: str) -> Path:
    """The folder itself if it is new or empty, else the first of `path`-2, `path`-3, … that is.

    Only a run of this kind makes way, finished or not: one that is being written is `RunInUse`, and another run, or a
    folder that is not a run, is for the writer to refuse.
    """
    if (old := existing(path)) is None or old["kind"] != kind:
        return path
    unlock(lock(path), path)
    for n in itertools.count(2):
        following = path.with_name(f"{path.name}-{n}")
        with suppress(RunError):  # a folder that is not ours
            if existing(following) is None:
                return following
    raise AssertionError  # numbers do not end


def newest(path: Path) -> Path:
    """The last of `path`, `path`-2, `path`-3, … that is a run of the same kind."""
    kind, numbers = read_info(path)["kind"], [1]
    for entry in path.absolute().parent.glob(f"{glob.escape(path.absolute().name)}-*"):
        ending = entry.name.removeprefix(f"{path.absolute().name}-")
        if ending.isdecimal() and ending[0] != "0":
            with suppress(RunError):
                numbers += [int(ending)] * (read_info(entry)["kind"] == kind)
    last = max(numbers)
    return path if last == 1 else path.with_name(f"{path.name}-{last}")


def lock(folder: Path) -> int:
    """Take the folder's lock and return its descriptor, or raise `RunInUse`."""
    file = folder / LOCK

    def unavailable(error: ImportError | OSError) -> None:
        if isinstance(error, ImportError):  # reading works everywhere
            raise RunError("runs can be written on Linux and macOS; on Windows use WSL") from error
        warn(f"joma: cannot lock {folder} ({error}): let only one process write there")

    descriptor = None
    for attempt in range(_ATTEMPTS):
        descriptor = take(file, unavailable=unavailable)
        if descriptor is not None:
            break
        if attempt < _ATTEMPTS - 1:
            time.sleep(_PAUSE)
    if descriptor is None:
        with suppress(FileNotFoundError):  # the holder has just gone
            holder = file.read_text(errors="replace") or "another process"
            if holder == _me():
                holder += " (this process: call finish() on the earlier writer)"
            raise RunInUse(
                f"{folder} is in use by {holder}: wait for it, stop it, or choose another folder"
            )
        return lock(folder)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, _me().encode())
    return descriptor


def unlock(descriptor: int, folder: Path) -> None:
    """Release the lock that `lock` took; the file goes too, since a forked child may hold a copy open."""
    (folder / LOCK).unlink(missing_ok=True)
    os.close(descriptor)


def this_host() -> str:
    """Return the name of this machine, without characters that file names cannot have."""
    return re.sub(r"[^\w.-]", "_", platform.node())


def _me() -> str:
    return f"pid {os.getpid()} on {this_host()}"


def writer_of(folder: Path) -> tuple[int | None, str | None]:
    """Return process id and host of the last writer of a folder, as its lock file has them; None if it has none."""
    try:
        text = (folder / LOCK).read_text(errors="replace")
    except OSError:
        return None, None
    holder = re.fullmatch(r"pid (\d+) on (.*)", text)
    return (int(holder[1]), holder[2]) if holder else (None, None)


def final_name(path: Path) -> str:
    """Return the name that a folder has, or will have once it is no longer staged."""
    staged_as = _SIBLING.fullmatch(path.name)
    return staged_as["name"] if staged_as else path.name


def _sibling(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}-{os.getpid()}-{this_host()}-{os.urandom(4).hex()}")


def is_alive(pid: int) -> bool:
    """True if this machine has a process of this id."""
    if os.name != "posix":  # elsewhere os.kill(pid, 0) may end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _tidy(path: Path) -> None:
    """Clear what killed processes of this host left beside `path`; bring back a run they set aside."""
    for entry in list(path.parent.iterdir()):
        left = _SIBLING.fullmatch(entry.name)
        if (
            left
            and left["name"] == path.name
            and left["host"] == this_host()
            and not is_alive(int(left["pid"]))
        ):
            if left["what"] == "old" and not path.exists():
                with suppress(OSError):  # another process may be doing the same
                    os.rename(entry, path)
            else:
                shutil.rmtree(entry, ignore_errors=True)


def tidy(paths: Iterable[Path]) -> None:
    """Clear what killed processes of this host left beside these folders, which need not exist."""
    for path in paths:
        if path.parent.is_dir():
            _tidy(path)


@contextmanager
def staged(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Fill a folder that appears under its name only when it is whole.

    Arguments:
        path: where the folder is to be; its parents are made.
        overwrite: replace a run that is there. The old one stays until the new one is whole, and comes back
            should the exchange fail. Folders which are not runs are never replaced.

    Yields:
        A temporary folder beside `path` to write to. It is renamed to `path` at the end of the block, and
        removed if the block raises anything (KeyboardInterrupt too).
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    _tidy(path)
    _check_free(path, overwrite)
    fresh = _sibling(path, "partial")
    try:
        fresh.mkdir()
        yield fresh
        _check_free(path, overwrite)
        if path.exists():
            _exchange(fresh, path)
        else:
            os.rename(fresh, path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _check_free(path: Path, overwrite: bool) -> None:
    """Refuse a path that must not be replaced: before the work, and again after it."""
    if (old := existing(path)) is not None:
        if not overwrite:
            is_killed = old["status"] == "running" and is_free(path / LOCK)
            status = "killed" if is_killed else None
            raise RunError(
                f"{path} holds {describe(old, status)}: choose another folder or pass overwrite=True"
            )
        unlock(lock(path), path)


def _exchange(fresh: Path, path: Path) -> None:
    """Put `fresh` in the place of `path`, which is removed when that is done and comes back if it fails."""
    aside = _sibling(path, "old")
    descriptor = lock(path)
    try:
        os.rename(path, aside)
        os.rename(fresh, path)
    except BaseException:
        if not path.exists():
            os.rename(aside, path)
        raise
    finally:
        unlock(descriptor, aside if aside.exists() else path)
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
