"""Gradients that break a law of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from joma._measure.watch.alarms.rule import Alarm
from joma._measure.watch.readings import Finding, Reading


@dataclass
class BrokenGradientAlarm(Alarm):
    """Alarm for a gradient that breaks an exact law of the model by more than rounding allows.

    The meter of charges checks the gradients of measured steps, just before the optimiser uses
    them, and adds its findings to the reading. Each finding has its own bound of rounding.
    """

    kind = "broken gradient"
    level = "warning"
    what_to_do = (
        "look for a detached path, or a gradient that is scaled, clipped or stepped for one "
        "parameter alone; see joma.charges(model).check_gradients()"
    )

    def observe(self, reading: Reading) -> Iterable[Finding]:
        """Return the findings of the check of gradients."""
        return [finding for finding in reading.findings if finding.kind == self.kind]
