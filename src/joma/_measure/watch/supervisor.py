"""The judgement of a run: phases and alarms, by measurements and by the losses between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from joma._measure.watch.alarms import Alarms, Alert
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.alarms.reporting import Alerts, OnAlert
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.phases import Phases
from joma._measure.watch.readings import Finding, LayerReading, Reading
from joma._measure.watch.record import Record
from joma._measure.watch.step_arguments import to_float


class Supervisor:
    """Updates phases and alarms, and reports the alerts that begin.

    Arguments:
        record: takes readings and alerts.
        notices: takes messages to the user.
        on_alert: what the user wants to happen at an alert.
    """

    def __init__(
        self, record: Record, notices: Notices, on_alert: OnAlert | Literal["stop"] | None
    ) -> None:
        self._record = record
        self._notices = notices
        self._alarms = Alarms(notices)
        self._alerts = Alerts(record, notices, on_alert)
        # (step, loss) since the last measurement, on another device than the CPU.
        self._waiting_losses: list[tuple[int, Tensor]] = []

    @property
    def phases(self) -> Phases:
        """One phase per attention layer."""
        return self._alarms.phases

    @property
    def alerts(self) -> list[Alert]:
        """The alerts that were reported so far."""
        return list(self._alerts.reported)

    @property
    def should_stop(self) -> bool:
        """True after a critical alert, if the user asked for a stop."""
        return self._alerts.should_stop

    # Losses between two measurements

    def take_loss(self, step: int, loss: Any) -> None:
        """Take the loss of a step that is not measured, without waiting for a device."""
        if isinstance(loss, Tensor) and loss.device.type != "cpu":
            # A captured graph writes its next loss into the same memory: hence the clone.
            self._waiting_losses.append((step, loss.detach().clone()))
        else:
            self._alerts.report(self._alarms.update_loss(step, to_float(loss)))

    def take_waiting_losses(self) -> None:
        """Take the losses that are on another device, now that a step is measured anyway."""
        for step, loss in self._waiting_losses:
            self._alarms.take_loss(step, to_float(loss))
        self._waiting_losses.clear()

    # Measurements

    def judge(
        self,
        measurement: Measurement,
        layers: Sequence[LayerReading],
        findings: Sequence[Finding],
        attention: Sequence[str],
    ) -> None:
        """Take a measurement.

        Arguments:
            measurement: its numbers.
            layers: one reading per attention layer.
            findings: what meters found to be wrong.
            attention: names of the attention layers.
        """
        gauges = measurement.per_head(self._alarms.gauges)
        reading = Reading(measurement.step, measurement.loss, layers, gauges, findings)
        alerts = self._alarms.update(reading, attention, measurement.names)
        self._alerts.report(alerts)
        self._record.write_reading(reading)

    def replay(self, readings: Sequence[Reading]) -> None:
        """Bring phases and alarms to where these readings left them, without new reports."""
        self._alarms = Alarms(self._notices)
        for reading in readings:
            self._alarms.update(reading)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return self._alarms.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._alarms = Alarms.restored(state, self._notices)
