"""The table of docs/theory.md on linear against nonlinear nodes, from the record of the exhibit `contrast`."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from joma.paper.exhibits import contrast
from joma.paper.exhibits._regimes import Returns
from joma.paper.exhibits.judgement import Judgement
from joma.paper.records import load

COLUMNS = ("regimes", *map(str, Returns), "nonlinear ends denser")


def judgement() -> Judgement | None:
    """Return what the current rule says of the recorded data; None without a record."""
    record = load("contrast")
    if record is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        return contrast.judge(record.unpack(Path(folder) / "run"))


def table() -> str:
    """Return one row per group of regimes, with how many of them have each verdict."""
    recorded = judgement()
    if recorded is None:
        return "This comparison has no record yet: `make record EXHIBIT=contrast` makes it."
    groups: dict[str, dict[str, Any]] = recorded.numbers["groups"]
    lines = [
        f"| attention comes back in | {' | '.join(COLUMNS)} |",
        f"|---{'|--:' * len(COLUMNS)}|",
    ]
    for title, numbers in groups.items():
        columns = {**numbers, **numbers["returns"]}
        counts = " | ".join(str(columns.get(column, 0)) for column in COLUMNS)
        lines.append(f"| {title} | {counts} |")
    return "\n".join(lines)


def label_table() -> str:
    """Return one row per kind of labels under cross-entropy, with how many regimes have each verdict."""
    recorded = judgement()
    if recorded is None:
        return "This comparison has no record yet: `make record EXHIBIT=contrast` makes it."
    regimes = recorded.numbers["regimes"][contrast.TITLES["labels"]]
    lines = [
        f"| cross-entropy with | regimes | {' | '.join(map(str, Returns))} |",
        f"|---|--:|{'--:|' * len(Returns)}",
    ]
    for kind in ("certain labels", "uncertain labels"):
        counts = Counter(
            numbers["returns"] for name, numbers in regimes.items() if name.startswith(kind)
        )
        cells = " | ".join(str(counts[str(returns)]) for returns in Returns)
        lines.append(f"| {kind} | {counts.total()} | {cells} |")
    return "\n".join(lines)
