"""What is twice in a scan: checkpoints with the same weights, and rows that a retry has measured again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def settled(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The table of a scan, or of several that ``columns`` tell apart, without what a retry has measured again."""
    axes = [axis for axis in ("layer", "head") if axis in table]
    return table.drop_duplicates([*columns, "step", "checkpoint", "gauge", *axes], keep="last")


def same_weights(points: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Checkpoint -> the others of which exactly the same was read."""
    groups: dict[str, list[str]] = {}
    for name, row in points.items():
        if row["digest"]:
            groups.setdefault(row["digest"], []).append(name)
    return {
        name: ", ".join(n for n in names if n != name)
        for names in groups.values()
        if len(names) > 1
        for name in names
    }


def without_copies(frame: pd.DataFrame, by: str) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """The rows of checkpoints that do not have the weights of a later step, and the names of the others, per ``by``."""
    points = frame.drop_duplicates([by, "checkpoint"]).sort_values("step", kind="stable")
    copies = points[points.digest.notna() & points.duplicated([by, "digest"], keep="last")]
    dropped = {str(name): list(rows.checkpoint) for name, rows in copies.groupby(by, sort=False)}
    for name, checkpoints in dropped.items():
        frame = frame[(frame[by] != name) | ~frame.checkpoint.isin(checkpoints)]
    return frame, dropped
