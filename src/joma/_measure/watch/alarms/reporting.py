"""Reports of alerts: a warning, a row in the run folder, a call of the user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from joma._measure.watch.alarms.alert import Alert
from joma._measure.watch.alarms.notices import Notices
from joma._runs.alerts import tell_alert

if TYPE_CHECKING:
    from joma._measure.watch.record import Record

OnAlert = Callable[[Alert], object]


class Alerts:
    """Reports alerts. Nothing that fails in a report stops the training.

    Attributes:
        reported: all alerts so far.
        should_stop: True after a critical alert, if ``on_alert`` is "stop".
    """

    def __init__(
        self,
        record: Record,
        notices: Notices,
        on_alert: OnAlert | Literal["stop"] | None,
    ) -> None:
        self.reported: list[Alert] = []
        self.should_stop = False
        self._record = record
        self._notices = notices
        self._on_alert = on_alert

    def report(self, begun: Sequence[Alert]) -> None:
        """Report the alerts that have just begun."""
        if not begun:
            return
        for alert in begun:
            key = ("alert", alert.kind, alert.layer)
            self._notices.forget(key)
            self._notices.once(key, tell_alert(alert.to_json()))
        self.reported += begun
        self._record.write_alerts([alert.to_json() for alert in begun])
        for alert in begun:
            self._act(alert)

    def _act(self, alert: Alert) -> None:
        if self._on_alert == "stop":
            self.should_stop |= alert.level == "critical"
            return
        try:
            if callable(self._on_alert):
                self._on_alert(alert)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._notices.once("on_alert", f"on_alert raised {reason}; training goes on")
