"""The state of a run: as its writer recorded it, or "killed" if the writer ended without a record.

States are "running", "done", "failed" (an exception), "interrupted" (Ctrl-C), "diverged" (by `joma
train`) and "killed". A killed process cannot record its end. A reader infers it: `run.json` has the
status "running", and no process holds the lock of the folder. Locks may be invisible from another
machine, so a run that started there stays "running", with the time when it was last written.
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
    """A gap: consecutive measurements that could not be written, with the reason."""

    first: int
    last: int
    measurements: int
    reason: str


def missing_in_words(missing: Sequence[Missing]) -> str:
    """Describe the measurements that a run lacks, with the reasons.

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
        host: the machine that the run started on, if recorded.
        written: when a file of the run was last written.
        remark: the reason for the end, or what can be inferred without one; "" for nothing.
    """

    status: str
    host: str | None
    written: datetime
    remark: str

    def __str__(self) -> str:
        if not self.remark:
            return self.status
        return f"{self.status} ({self.remark})"


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
    is_unlocked = is_free(folder / LOCK)
    if is_unlocked is None:
        # The file system has no locks, but a process of this machine can be looked up by its id.
        return host == this_host() and pid is not None and is_alive(pid)
    return not is_unlocked


def _last_written(folder: Path) -> datetime:
    last = 0.0
    for file in (folder / "metrics.jsonl", folder / RUN):
        if file.exists():
            last = max(last, file.stat().st_mtime)
    return datetime.fromtimestamp(last, UTC)
