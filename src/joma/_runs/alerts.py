"""The alerts of a run folder, one line each, and their only description in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joma._runs.encoding import unspell

ALERTS = "alerts.jsonl"
LEVELS = ("notice", "warning", "critical")  # worst last
# Heads or modules that a sentence lists before it counts the rest: more do not fit on a line.
MOST_NAMES = 3


def read_alerts(folder: Path) -> list[dict[str, Any]]:
    """Read the step, kind, layer, heads, module, gauge, value, level, … of each alert, in order."""
    path = folder / ALERTS
    if not path.exists():
        return []
    # A kill may have cut off the last line. What follows the last newline is never a whole alert.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [unspell(json.loads(line)) for line in lines]


def worst_level(alerts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the level of the worst alert, or None without alerts."""
    levels = [str(alert["level"]) for alert in alerts]
    return max(levels, key=LEVELS.index, default=None)


def tell_alert(alert: Mapping[str, Any]) -> str:
    """Return the step, what is wrong, and what to do."""
    advice = str(alert["what_to_do"])
    return f"step {alert['step']:,}: {describe_alert(alert)}. {advice[:1].upper()}{advice[1:]}"


def describe_alert(alert: Mapping[str, Any]) -> str:
    """Return what is wrong and where.

    >>> describe_alert(
    ...     {
    ...         "kind": "collapse",
    ...         "layer": 1,
    ...         "heads": [0, 3],
    ...         "module": "layers.1.self_attn",
    ...         "gauge": "entropy",
    ...         "value": 2.8e-32,
    ...         "threshold": 0.04,
    ...         "later": [],
    ...     }
    ... )
    'collapse in layer 1 (layers.1.self_attn), heads 0 and 3: entropy is below 0.0001 (threshold 0.04)'
    """
    kind = alert["kind"]
    value = readable(alert["value"])
    threshold = alert["threshold"]
    if kind == "not finite":
        return f"{kind}: {_describe_not_finite(alert, value)}"
    if kind == "broken gradient":
        return (
            f"{kind}{_place(alert)}: it breaks a law of the model by {value} "
            f"(rounding allows {readable(threshold)})"
        )
    sentence = f"{kind}{_place(alert)}: {alert['gauge']} is {value}"
    if threshold is not None:
        sentence += f" (threshold {readable(threshold)})"
    return sentence


def _describe_not_finite(alert: Mapping[str, Any], value: str) -> str:
    """Name the first module and those after it."""
    sentence = f"{alert['gauge']}: {value}"
    if alert["module"]:
        sentence += f" first in {alert['module']}"
    if alert["layer"] is not None:
        sentence += f" (layer {alert['layer']})"
    sentence += _heads(alert["heads"])
    if alert["later"]:
        sentence += f"; then in {listed(alert['later'])}"
    return sentence


def _place(alert: Mapping[str, Any]) -> str:
    place = ""
    if alert["layer"] is not None:
        place += f" in layer {alert['layer']}"
        if alert["module"]:
            place += f" ({alert['module']})"
    return place + _heads(alert["heads"])


def _heads(heads: Sequence[int]) -> str:
    if not heads:
        return ""
    if len(heads) == 1:
        return f", head {heads[0]}"
    return f", heads {listed([str(head) for head in heads])}"


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Return "a", "a and b", "a, b and c", or "a, b, c and 5 more".

    >>> listed(["0", "1", "2", "3", "4"])
    '0, 1, 2 and 2 more'
    """
    parts = list(names[:most])
    if len(names) > most:
        parts.append(f"{len(names) - most} more")
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def readable(number: float) -> str:
    """Return a number as people write it.

    >>> [readable(x) for x in (0.0, 2.806e-32, 0.0412, 3.14159, 134.2, 51234.0, float("nan"))]
    ['0', 'below 0.0001', '0.0412', '3.142', '134.2', '51,234', 'NaN']
    """
    if math.isnan(number):
        return "NaN"
    if number == math.inf:
        return "Inf"
    if number == -math.inf:
        return "-Inf"
    size = abs(number)
    if 0 < size < 1e-4:
        return "below 0.0001"
    if 1e4 <= size < 1e9:
        return f"{number:,.0f}"
    return f"{number:.4g}"
