"""The alerts of a run folder, one line each, and the one way to put an alert into words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joma._runs.table import unspell

ALERTS = "alerts.jsonl"
LEVELS = ("notice", "warning", "critical")  # worst last
MOST_NAMES = 3  # heads or modules that a sentence lists before it counts the rest


def read_alerts(folder: Path) -> list[dict[str, Any]]:
    """Read step, kind, layer, heads, module, gauge, value, threshold, level, … of each alert, in order."""
    path = folder / ALERTS
    lines = (
        path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    )  # the last may be cut off
    return [{key: unspell(value) for key, value in json.loads(line).items()} for line in lines]


def worst_level(alerts: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the level of the worst alert, or None without alerts."""
    return max((str(alert["level"]) for alert in alerts), key=LEVELS.index, default=None)


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
    beyond = "" if threshold is None else f" (threshold {readable(threshold)})"
    if kind == "not finite":
        return f"{kind}: {_not_finite(alert, value)}"
    if kind == "broken gradient":
        return f"{kind}{_place(alert)}: it breaks a law of the model by {value} (rounding allows {readable(threshold)})"
    return f"{kind}{_place(alert)}: {alert['gauge']} is {value}{beyond}"


def _not_finite(alert: Mapping[str, Any], value: str) -> str:
    """Name the first module and those after it."""
    where = f" first in {alert['module']}" if alert["module"] else ""
    layer = "" if alert["layer"] is None else f" (layer {alert['layer']})"
    heads = f", {_heads(alert['heads'])}" if alert["heads"] else ""
    later = alert["later"]
    then = f"; then in {listed(later)}" if later else ""
    return f"{alert['gauge']}: {value}{where}{layer}{heads}{then}"


def _place(alert: Mapping[str, Any]) -> str:
    layer = "" if alert["layer"] is None else f" in layer {alert['layer']}"
    module = f" ({alert['module']})" if layer and alert["module"] else ""
    heads = f", {_heads(alert['heads'])}" if alert["heads"] else ""
    return f"{layer}{module}{heads}"


def _heads(heads: Sequence[int]) -> str:
    return (
        f"head {heads[0]}" if len(heads) == 1 else f"heads {listed([str(head) for head in heads])}"
    )


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Return "a", "a and b", "a, b and c", or "a, b, c and 5 more".

    >>> listed(["0", "1", "2", "3", "4"])
    '0, 1, 2 and 2 more'
    """
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"{len(names) - most} more")
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def readable(number: float) -> str:
    """Return a number as people write it.

    >>> [readable(x) for x in (0.0, 2.806e-32, 0.0412, 3.14159, 134.2, 51234.0, float("nan"))]
    ['0', 'below 0.0001', '0.0412', '3.142', '134.2', '51,234', 'NaN']
    """
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Inf" if number > 0 else "-Inf"
    size = abs(number)
    if 0 < size < 1e-4:
        return "below 0.0001"
    if 1e4 <= size < 1e9:
        return f"{number:,.0f}"
    return f"{number:.4g}"
