"""Runs below a folder, and how each of them stands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joma._runs.alerts import read_alerts, worst_level
from joma._runs.folder import RUN, RunError
from joma._runs.reader import Run


def runs_below(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the run folders in a folder at any depth, in the order of their names; a run itself is one.

    Hidden folders are left out: exhibits are made in them.
    """
    folder = Path(folder)
    remedy = "name the folder that your runs are in"
    if not folder.exists():
        raise RunError(f"there is no folder {folder}: {remedy}")
    if not folder.is_dir():
        raise RunError(f"{folder} is a file: {remedy}")
    found = list(_walk(folder))
    if not found:
        raise RunError(f"there are no runs in {folder}: {remedy}")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    if (folder / RUN).is_file():
        yield folder
        return
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from _walk(entry)


def standing(path: Path, name: str) -> dict[str, Any]:
    """Return the state and the last numbers of a run; None for what it does not have, NaN for what it measured.

    A run that cannot be read has the status "unreadable", with the reason.
    """
    row: dict[str, Any] = {"run": name, "kind": None, "status": "unreadable"}
    row |= dict.fromkeys(("step", "steps", "loss", "valid_loss", "entropy", "phases", "alert"))
    try:
        run = Run(path)
        info = run.info
        table = run.latest()
        state = run.state
        alert = worst_level(read_alerts(path))
    except (RunError, OSError, ValueError) as error:
        return row | {"reason": str(error)}
    row |= {"kind": info["kind"], "status": state.status, "alert": alert}
    row["reason"] = state.remark or None
    config = info.get("config") or {}
    row["steps"] = config.get("steps")
    if table.empty:
        return row
    row["step"] = int(table.step.max())
    means = table.groupby("gauge").value.mean()
    for gauge in ("loss", "valid_loss", "entropy"):
        if gauge in means:
            row[gauge] = float(means[gauge])
    codes = table[table.gauge == "phase"].value.dropna()
    row["phases"] = " ".join(info["phases"][int(code)] for code in codes) or None
    return row


def standings(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return how the runs below a folder stand, one dict each; they are named by their path in the folder."""
    folder = Path(folder)
    rows = []
    for path in runs_below(folder):
        name = path.name
        if path != folder:
            name = path.relative_to(folder).as_posix()
        rows.append(standing(path, name))
    return rows
