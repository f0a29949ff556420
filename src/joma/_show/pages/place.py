"""Where a page goes by default, and whether what is there may be replaced.

A page carries a mark of what it shows. A default place is never taken from a page of something else,
nor from a file that is no page.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from joma._runs import RunError

PAPER = "paper"  # the page of all exhibits in a folder
RUNS = "runs"  # the page of some runs
_LONGEST = 80  # characters of the names of runs in the name of a page
_HEAD = 4096  # bytes: the mark is before the style
_MARK = re.compile(r'<meta name="joma-shows" content="([0-9a-f]*)">')


def default_place(folders: Sequence[Path]) -> Path:
    """Return where the page of these folders goes: into the folder, or next to several under their names.

    >>> str(default_place([Path("runs/a")]))
    'runs/a/report.html'
    >>> str(default_place([Path("runs/a"), Path("runs/b")]))
    'runs/report-a+b.html'
    """
    full = [os.path.abspath(folder) for folder in folders]
    if len(set(full)) == 1:
        return folders[0] / "report.html"
    parent = os.path.commonpath(full)
    inside = [os.path.relpath(folder, parent) for folder in dict.fromkeys(full)]
    names = list(inside)
    if os.curdir in names:
        names[names.index(os.curdir)] = os.path.basename(parent)
    text = "+".join(re.sub(r"[^\w.-]+", "-", name) for name in names)[:_LONGEST]
    if text != "+".join(inside):  # other runs may be spelt like that, too
        text += f"-{hashlib.sha256(json.dumps(inside).encode()).hexdigest()[:8]}"
    place = os.path.relpath(parent)
    if place.startswith(os.pardir):
        place = parent
    return Path(place) / f"report-{text}.html"


def mark_of(kind: str, folders: Sequence[Path], page: Path) -> str:
    """Return the mark of a page: its kind, and where the folders that it shows are relative to it."""
    start = os.path.abspath(page.parent)
    places = dict.fromkeys(os.path.relpath(os.path.abspath(folder), start) for folder in folders)
    return hashlib.sha256(json.dumps([kind, *places]).encode()).hexdigest()[:16]


def check_replaceable(page: Path, mark: str) -> None:
    """Refuse a place that holds anything else than an earlier page with this mark."""
    if not page.exists():
        return
    with page.open("rb") as stream:
        head = stream.read(_HEAD).decode("utf-8", errors="replace")
    earlier_mark = _MARK.search(head)
    if earlier_mark is None or earlier_mark[1] != mark:
        raise RunError(
            f"{page} is there already, and is no page of the same runs: it stays as it is; "
            "name another file with --out (out= in Python)"
        )
