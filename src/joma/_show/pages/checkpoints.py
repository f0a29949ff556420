"""The checkpoints of a scan, for its part of the page: status and means, notes, and equal weights."""

from __future__ import annotations

from typing import Any

from joma._runs import Run
from joma._show.pages.render import render

MOST_OPEN = 20  # rows of a table that is unfolded from the start
TONES = {"ok": "good", "partly": "fair", "failed": "bad"}


def checkpoints_table(run: Run) -> str:
    """Return the table with the mean of each gauge over layers and heads, below the notes."""
    from joma._checkpoints.scan import Scan
    from joma._show.plots.watch import titled

    scan = Scan(run.path)
    points = scan.checkpoints()
    if points.empty:
        return ""
    frame = scan.frame()
    means: dict[Any, float] = frame.groupby(["checkpoint", "gauge"]).value.mean().dropna().to_dict()
    measured = {gauge for _, gauge in means}
    gauges = [gauge for gauge in dict.fromkeys(frame.gauge) if gauge in measured]
    rows: list[dict[str, Any]] = []
    for point in points.to_dict("records"):
        name = point["checkpoint"]
        rows.append(
            {
                "step": point.get("step"),
                "name": name,
                "status": point["status"],
                "same": point["same_as"],
                "numbers": [means.get((name, gauge)) for gauge in gauges],
                # True where a mean lacks some layers
                "gaps": [gauge in point["problems"] for gauge in gauges],
            }
        )
    return render(
        "checkpoints.html",
        rows=rows,
        noun="model" if scan.is_comparison else "checkpoint",
        gauges=[titled(gauge) for gauge in gauges],
        notes=[(names, remark) for remark, names in scan.remarks().items()],
        tones=TONES,
        counts={status: int((points.status == status).sum()) for status in TONES},
        copies=sum(bool(row["same"]) for row in rows),
        has_gaps=any(_has_gap(row) for row in rows),
        most_open=MOST_OPEN,
    )


def _has_gap(row: dict[str, Any]) -> bool:
    """True if a mean that is shown lacks some layers."""
    for number, is_incomplete in zip(row["numbers"], row["gaps"], strict=True):
        if number is not None and is_incomplete:
            return True
    return False
