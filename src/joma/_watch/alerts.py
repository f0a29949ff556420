"""Telling of alerts: a warning, a row in the run folder, a call of the user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from joma._watch.alarms import Alert
from joma._watch.notices import Notices
from joma._watch.record import Record

OnAlert = Callable[[Alert], object]


class Alerts:
    """Tells of alerts; nothing that comes of it stops the training.

    Attributes:
        told: all so far.
    """

    def __init__(self, record: Record, notices: Notices, on_alert: OnAlert | None) -> None:
        if on_alert is not None and not callable(on_alert):
            raise TypeError(f"on_alert must be a function of an alert; got {on_alert!r}")
        self.told: list[Alert] = []
        self._record, self._notices, self._on_alert = record, notices, on_alert

    def tell(self, begun: Sequence[Alert]) -> None:
        """Of what has just begun; heads of a layer are one warning."""
        groups: dict[tuple[str, int | None], list[Alert]] = {}
        for alert in begun:
            groups.setdefault((alert.kind, alert.layer), []).append(alert)
        for (kind, layer), alerts in groups.items():
            self._notices.forget(("alert", kind, layer))
            self._notices.once(("alert", kind, layer), _sentence(alerts))
        self.told += begun
        self._record.write_alerts([alert.to_json() for alert in begun])
        for alert in begun:
            try:
                if self._on_alert is not None:
                    self._on_alert(alert)
            except Exception as error:
                self._notices.once("on_alert", f"on_alert raised {type(error).__name__}: {error}; training goes on")


def _sentence(alerts: Sequence[Alert]) -> str:
    """What is wrong in one layer, and what to do."""
    first = alerts[0]
    heads = [str(alert.head) for alert in alerts if alert.head is not None]
    where = "" if first.layer is None else f" in layer {first.layer} ({first.module})"
    which = f", head{'s' if len(heads) > 1 else ''} {', '.join(heads)}" if heads else ""
    worst = max(alerts, key=lambda alert: alert.value) if first.value > first.threshold else first
    value = f"{worst.gauge} is {worst.value:.4g}, threshold {worst.threshold:.4g}"
    advice = f"{first.what_to_do[0].upper()}{first.what_to_do[1:]}"
    return f"step {first.step}: {first.kind}{where}{which}: {value}. {advice}"
