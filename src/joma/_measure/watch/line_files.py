"""Files of JSON lines in a run folder, next to its numbers: alerts, and the readings of alarms."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class LineFiles:
    """Appends lines to files. Lines for which there is no room wait until there is.

    Arguments:
        folder: of the files.
        problems: file -> why it cannot be written now; kept up to date.
    """

    def __init__(self, folder: Path, problems: dict[str, OSError]) -> None:
        self._folder = folder
        self._problems = problems
        self._waiting: dict[str, list[str]] = {}  # file -> lines

    def append(self, name: str, rows: Sequence[Any]) -> None:
        """Append one line per row to a file."""
        lines = self._waiting.setdefault(name, [])
        for row in rows:
            lines.append(json.dumps(row, separators=(",", ":")) + "\n")
        try:
            append_whole(self._folder / name, "".join(lines))
        except OSError as error:
            self._problems[name] = error
            return
        lines.clear()
        self._problems.pop(name, None)

    def append_waiting(self) -> None:
        """Append the lines that wait."""
        for name in list(self._waiting):
            self.append(name, [])

    def cut(self, name: str, stays: Callable[[Any], bool]) -> list[Any]:
        """Drop the first row for which ``stays`` is false and all after it; return those before.

        A line that was cut off by a kill ends the file, too.
        """
        self.append(name, [])
        path = self._folder / name
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not stays(row):
                break
            rows.append(row)
        if len(rows) < len(lines):
            size = len("".join(lines[: len(rows)]).encode())
            os.truncate(path, size)  # which needs no room on the disk, unlike a new file
        return rows


def append_whole(path: Path, text: str) -> None:
    """Append text to a file, or leave the file as it was: half a line would spoil the next one."""
    if not text:
        return
    data = text.encode()
    # Without a stream of Python, a line takes a third of the time.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
