"""Duplicates in a scan: checkpoints with the same weights, and rows that a retry measured again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def settled(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Return the table of a scan without rows that were measured again later.

    `columns` distinguish scans, if the table holds several.
    """
    axes = [axis for axis in ("layer", "head") if axis in table]
    return table.drop_duplicates([*columns, "step", "checkpoint", "gauge", *axes], keep="last")


def same_weights(points: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return checkpoint -> the others of which exactly the same was read."""
    groups: dict[str, list[str]] = {}
    for name, row in points.items():
        if row["digest"]:
            groups.setdefault(row["digest"], []).append(name)
    same = {}
    for names in groups.values():
        for name in names:
            others = [other for other in names if other != name]
            if others:
                same[name] = ", ".join(others)
    return same


def without_copies(frame: pd.DataFrame, by: str) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """Return the rows of checkpoints without those that have the weights of a later step.

    The second value has the names of the dropped checkpoints, per value of the column `by`.
    """
    points = frame.drop_duplicates([by, "checkpoint"]).sort_values("step", kind="stable")
    copies = points[points.digest.notna() & points.duplicated([by, "digest"], keep="last")]
    dropped = {}
    for value, rows in copies.groupby(by, sort=False):
        dropped[str(value)] = list(rows.checkpoint)
    for value, checkpoints in dropped.items():
        frame = frame[(frame[by] != value) | ~frame.checkpoint.isin(checkpoints)]
    return frame, dropped
