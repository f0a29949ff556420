"""An audit: the change between neighbouring checkpoints over the steps, one line per tensor, faults marked."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from joma._runs import RunError
from joma._show.plots import panels as p

MOST = 200  # lines: of more tensors the largest changes and an even choice of the others


def draw(
    changes: pd.DataFrame, checkpoints: pd.DataFrame, faults: Sequence[tuple[str, str]], title: str
) -> p.Chart:
    """From the tables of an audit.

    Arguments:
        changes: step, checkpoint, tensor, file, change.
        checkpoints: step, checkpoint.
        faults: (checkpoint, kind).
        title: of the picture.
    """
    moving = changes[changes.change > 0]
    if moving.empty:
        raise RunError("no change between checkpoints to draw: the level `hashes` reads no weights")
    by_tensor = moving.groupby("tensor").change.max().sort_values(ascending=False)
    if len(by_tensor) > MOST:
        rest = by_tensor.index[MOST // 2 :]
        chosen = {*by_tensor.index[: MOST // 2], *rest[:: max(1, len(rest) // (MOST // 2))]}
        moving = moving[moving.tensor.isin(chosen)]
    x = p.step_axis(moving.step, scan=True)
    y = p.y(
        "change", "relative change since the checkpoint before", log=True, format=".0e", ticks=6
    )
    lines = p.lines(
        moving, x, y, detail="tensor", tip=["step", "tensor", "file", "change"], opacity=0.35
    )
    marks = [lines]
    if faults:
        at = (
            pd.DataFrame(faults, columns=["checkpoint", "fault"])
            .drop_duplicates()
            .merge(checkpoints, on="checkpoint")
        )
        top = moving.groupby("step").change.max()
        at = at.assign(change=[float(top.get(step, top.max())) for step in at.step])
        marks.append(p.dots(at, x, y, p.by("fault", "fault"), tip=["step", "checkpoint", "fault"]))
    return p.panel(title, *marks, note="one line per tensor", size=(620, 300))
