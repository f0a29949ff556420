"""Staged folders: one that appears under its name only when it is whole, whenever a process dies.

It is filled under a hidden name next to its place and renamed. A run that is replaced is set aside
under another hidden name meanwhile. What a killed process leaves is cleared by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from joma._runs.folder import (
    LOCK,
    RunError,
    describe,
    existing,
    is_alive,
    lock,
    this_host,
    unlock,
)
from joma._runs.lock import is_free

# A folder that is being filled, or one that is set aside, next to its place.
_SIBLING = re.compile(
    r"\.(?P<name>.+)\.(?P<what>partial|old)-(?P<pid>\d+)-(?P<host>.*)-[0-9a-f]{8}"
)


def final_name(path: Path) -> str:
    """Return the name that a folder has, or will have once it is no longer staged."""
    sibling = _SIBLING.fullmatch(path.name)
    if sibling is None:
        return path.name
    return sibling["name"]


def tidy(paths: Iterable[Path]) -> None:
    """Clear what killed processes of this host left next to these folders, which need not exist."""
    for path in paths:
        if path.parent.is_dir():
            _tidy(path)


def _tidy(path: Path) -> None:
    """Clear what killed processes left next to a folder; bring back a run that they set aside."""
    for entry in list(path.parent.iterdir()):
        sibling = _SIBLING.fullmatch(entry.name)
        if sibling is None or sibling["name"] != path.name or sibling["host"] != this_host():
            continue
        if is_alive(int(sibling["pid"])):
            continue
        if sibling["what"] == "old" and not path.exists():
            with suppress(OSError):  # another process may be doing the same
                os.rename(entry, path)
        else:
            shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def staged(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Fill a folder that appears under its name only when it is whole.

    Arguments:
        path: where the folder is to be; its parents are made.
        overwrite: replace a run that is there. The old one stays until the new one is whole, and
            comes back should the exchange fail. Folders which are not runs are never replaced.

    Yields:
        A temporary folder next to ``path`` to write to. It is renamed to ``path`` at the end of the
        block, and removed if the block raises anything (KeyboardInterrupt too).
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


def _sibling(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}-{os.getpid()}-{this_host()}-{os.urandom(4).hex()}")


def _check_free(path: Path, overwrite: bool) -> None:
    """Refuse a path that must not be replaced: before the work, and again after it."""
    old = existing(path)
    if old is None:
        return
    if not overwrite:
        status = None
        if old["status"] == "running" and is_free(path / LOCK):
            status = "killed"
        raise RunError(
            f"{path} holds {describe(old, status)}: choose another folder or pass overwrite=True"
        )
    unlock(lock(path), path)


def _exchange(fresh: Path, path: Path) -> None:
    """Put ``fresh`` in the place of ``path``, which comes back if that fails."""
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
        locked = path
        if aside.exists():
            locked = aside
        unlock(descriptor, locked)
        if path.exists():
            shutil.rmtree(aside, ignore_errors=True)
