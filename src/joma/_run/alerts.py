"""The alerts of a run folder, as a watch wrote them: one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from joma._run.table import unspell

ALERTS = "alerts.jsonl"
LEVELS = ("notice", "warning", "critical")  # worst last


def read_alerts(folder: Path) -> list[dict[str, Any]]:
    """Step, kind, layer, head, module, gauge, value, threshold, level and what_to_do of each, in order."""
    path = folder / ALERTS
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []  # the last may be cut off
    return [{key: unspell(value) for key, value in json.loads(line).items()} for line in lines]
