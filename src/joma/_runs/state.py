"""The state of a run: as its writer left it, or killed if the writer is gone without a word.

States are "running", "done", "failed" (an exception), "interrupted" (Ctrl-C), "diverged" (of `joma train`) and
"killed". A killed process cannot write its end, so that the last one is worked out whenever a run is read: `run.json`
says "running", and nobody holds the lock of the folder. A lock may not be seen from another machine, so of a run that
was begun there it is only said when it was last written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from joma._runs.folder import LOCK, RUN, is_alive, this_host, writer_of
from joma._runs.lock import is_free

Ending = Literal["done", "failed", "interrupted", "diverged"]


class Missing(TypedDict):
    """Measurements in a row that could not be written: their first and last step, how many there are, and why."""

    first: int
    last: int
    measurements: int
    reason: str


def missing_in_words(missing: Sequence[Missing]) -> str:
    """Return which measurements a run lacks, and why.

    >>> missing_in_words(
    ...     [{"first": 98, "last": 800, "measurements": 703, "reason": "No space left on device"}]
    ... )
    '703 measurements of steps 98 to 800 (No space left on device)'
    """
    phrases = []
    for gap in missing:
        count = gap["measurements"]
        if count == 1:
            text = f"the measurement of step {gap['first']:,}"
        else:
            text = f"{count:,} measurements of steps {gap['first']:,} to {gap['last']:,}"
        phrases.append(f"{text} ({gap['reason']})")
    return ", ".join(phrases)


def ending(error: BaseException | None) -> tuple[Ending, str | None]:
    """Return the state of a run that ends with this exception, and the reason to record."""
    if error is None:
        return "done", None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "KeyboardInterrupt (Ctrl-C)"
    return "failed", f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class State:
    """The state of a run when it was read.

    Attributes:
        status: "running", "done", "failed", "interrupted", "diverged" or "killed".
        host: the machine that the run was begun on, if known.
        written: when a file of the run was last written.
        remark: the reason of an end, or what is known without one; "" if there is nothing to add.
    """

    status: str
    host: str | None
    written: datetime
    remark: str

    def __str__(self) -> str:
        return f"{self.status} ({self.remark})" if self.remark else self.status


def state_of(folder: Path, info: Mapping[str, Any]) -> State:
    """Return the state of the run in ``folder``, whose `run.json` has the content ``info``."""
    status = str(info["status"])
    pid, lock_host = writer_of(folder)
    host = info.get("host", lock_host)
    written = _last_written(folder)
    remark = str(info.get("reason") or "")
    if status == "running" and not _has_writer(folder, pid, lock_host):
        moment = written.isoformat(sep=" ", timespec="seconds")
        if host is not None and host != this_host():
            remark = f"on {host}, last written {moment}: only there can one see whether it goes on"
        else:
            status = "killed"
            remark = f"its process ended without recording an end; last written {moment}"
    return State(status, host, written, remark)


def _has_writer(folder: Path, pid: int | None, host: str | None) -> bool:
    """True if a process holds the folder."""
    free = is_free(folder / LOCK)
    if free is None:  # a file system without locks: a process of this machine can be looked for
        return host == this_host() and pid is not None and is_alive(pid)
    return not free


def _last_written(folder: Path) -> datetime:
    files = (file for file in (folder / "metrics.jsonl", folder / RUN) if file.exists())
    return datetime.fromtimestamp(max((file.stat().st_mtime for file in files), default=0.0), UTC)
