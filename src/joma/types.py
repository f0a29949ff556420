"""Types of the results of public functions, for annotations.

    from joma.types import Alert, Watch

    def on_alert(watch: Watch, alert: Alert) -> None: ...

`joma.watch` returns a `Watch`, `joma.scan` a `Scan`, and so on. Each type is imported on first use.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:  # type checkers see the classes, and nothing is imported at run time
    from typing import Any

    from joma._checkpoints.audit.audit import Audit
    from joma._checkpoints.audit.faults import Fault
    from joma._checkpoints.scan import Scan
    from joma._forecast.forecast import Forecast
    from joma._inspect.geometry import Geometry
    from joma._inspect.superposition import Superposition
    from joma._measure.charges.charge import Charge
    from joma._measure.charges.table import Charges
    from joma._measure.gauges.attention import AttentionStats
    from joma._measure.gauges.embedding import Coherence
    from joma._measure.gauges.logits import Bounds, Received
    from joma._measure.gauges.registry import Gauge
    from joma._measure.watch.alarms.alert import Alert
    from joma._measure.watch.phases import Phase, Phases
    from joma._measure.watch.watch import Watch
    from joma._runs import Run
    from joma._runs.curve import Curve
    from joma._runs.explanation import Explanation
    from joma.models.structure import ModelStructure
    from joma.paper.exhibits.base import Exhibit
    from joma.paper.exhibits.judgement import Judgement
    from joma.paper.exhibits.runner import Reproduction
    from joma.paper.verdict import Verdict
    from joma.theory.trajectory import Trajectory

# name -> the private module that defines it
_TYPES = {
    "Alert": "joma._measure.watch.alarms.alert",
    "AttentionStats": "joma._measure.gauges.attention",
    "Audit": "joma._checkpoints.audit.audit",
    "Bounds": "joma._measure.gauges.logits",
    "Charge": "joma._measure.charges.charge",
    "Charges": "joma._measure.charges.table",
    "Coherence": "joma._measure.gauges.embedding",
    "Curve": "joma._runs.curve",
    "Exhibit": "joma.paper.exhibits.base",
    "Explanation": "joma._runs.explanation",
    "Fault": "joma._checkpoints.audit.faults",
    "Forecast": "joma._forecast.forecast",
    "Gauge": "joma._measure.gauges.registry",
    "Geometry": "joma._inspect.geometry",
    "Judgement": "joma.paper.exhibits.judgement",
    "ModelStructure": "joma.models.structure",
    "Phase": "joma._measure.watch.phases",
    "Phases": "joma._measure.watch.phases",
    "Received": "joma._measure.gauges.logits",
    "Reproduction": "joma.paper.exhibits.runner",
    "Run": "joma._runs",
    "Scan": "joma._checkpoints.scan",
    "Superposition": "joma._inspect.superposition",
    "Trajectory": "joma.theory.trajectory",
    "Verdict": "joma.paper.verdict",
    "Watch": "joma._measure.watch.watch",
}

__all__ = [
    "Alert",
    "AttentionStats",
    "Audit",
    "Bounds",
    "Charge",
    "Charges",
    "Coherence",
    "Curve",
    "Exhibit",
    "Explanation",
    "Fault",
    "Forecast",
    "Gauge",
    "Geometry",
    "Judgement",
    "ModelStructure",
    "Phase",
    "Phases",
    "Received",
    "Reproduction",
    "Run",
    "Scan",
    "Superposition",
    "Trajectory",
    "Verdict",
    "Watch",
]


def __getattr__(name: str) -> Any:
    if name not in _TYPES:
        raise AttributeError(
            f"module 'joma.types' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_TYPES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
