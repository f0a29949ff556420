"""The checkpoints of a scan, for its part of the page: how each fared, what was said of them, which are twice."""

from __future__ import annotations

from typing import Any

from joma._runs import Run
from joma._show.pages.render import render

MOST_OPEN = 20  # rows of the table that are shown without being asked for
TONES = {"ok": "good", "partly": "fair", "failed": "bad"}


def checkpoints_table(run: Run) -> str:
    """The table, with the mean of each gauge over layers and heads; above it what needs a look."""
    from joma._checkpoints.scan import Scan
    from joma._show.plots.watch import titled

    scan = Scan(run.path)
    points = scan.checkpoints()
    if points.empty:
        return ""
    frame = scan.frame()
    means: dict[Any, float] = frame.groupby(["checkpoint", "gauge"]).value.mean().dropna().to_dict()
    gauges = [
        gauge for gauge in dict.fromkeys(frame.gauge) if any(name == gauge for _, name in means)
    ]
    rows: list[dict[str, Any]] = []
    for row in points.itertuples():
        shown = [means.get((row.checkpoint, gauge)) for gauge in gauges]
        rows.append(
            {
                "step": row.step,
                "name": row.checkpoint,
                "status": row.status,
                "same": row.same_as,
                "numbers": shown,
            }
        )
    notes = [(names, remark) for remark, names in scan.remarks().items()]
    return render(
        "checkpoints.html", rows=rows, gauges=[titled(gauge) for gauge in gauges], notes=notes, tones=TONES,
        counts={status: int((points.status == status).sum()) for status in TONES},
        copies=sum(bool(row["same"]) for row in rows), most_open=MOST_OPEN,
    )  # fmt: skip
