"""The judge of a run: gives each reading to all alarms and reports the alerts that begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from joma._measure.watch.alarms.alarm_table import all_alarms
from joma._measure.watch.alarms.alert import Alert, FindingGroup, group_findings
from joma._measure.watch.alarms.collapse import CollapseAlarm
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.alarms.rule import Alarm, LossAlarm
from joma._measure.watch.phases import Phases
from joma._measure.watch.readings import Finding, Reading
from joma._runs.encoding import unspell

AlarmFinding = tuple[Alarm, Finding]


class Alarms:
    """All alarms of a watch, the phases of the layers, and the alerts that hold now.

    Arguments:
        notices: where an alarm that fails is reported; without it, its exception is raised.
    """

    def __init__(self, notices: Notices | None = None) -> None:
        self._alarms = [create() for create in all_alarms()]
        self._notices = notices
        self._last_loss_step = -1
        self._active: set[str] = set()  # alerts that were reported and are not over

    @property
    def phases(self) -> Phases:
        """One phase per attention layer."""
        for alarm in self._alarms:
            if isinstance(alarm, CollapseAlarm):
                return alarm.phases
        raise AssertionError("the table of alarms has no CollapseAlarm")

    @property
    def gauges(self) -> set[str]:
        """Names of the gauges that alarms look at, without their parts."""
        names: set[str] = set()
        for alarm in self._alarms:
            names.update(alarm.gauges)
        return names

    def update(
        self,
        reading: Reading,
        attention: Sequence[str] = (),
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> list[Alert]:
        """Take a reading and return the alerts that begin with it.

        Arguments:
            reading: the numbers of one measurement.
            attention: names of the attention layers.
            names: gauge -> names of its layers, where they are others.
        """
        self.take_loss(reading.step, reading.loss)
        findings: list[AlarmFinding] = []
        for alarm in self._alarms:
            findings += self._observe(alarm, reading)
        self._judge_phases(reading.step, findings)
        groups = group_findings(findings)
        begun = self._new_groups(groups)
        self._active = set(groups)
        return [group.to_alert(reading.step, attention, names or {}) for group in begun]

    def update_loss(self, step: int, loss: float) -> list[Alert]:
        """Take the loss of a step that is not measured and return the alerts that begin with it."""
        self.take_loss(step, loss)
        findings: list[AlarmFinding] = []
        for alarm in self._loss_alarms():
            findings += _with_alarm(alarm, alarm.findings())
        groups = group_findings(findings)
        begun = self._new_groups(groups)
        self._active |= set(groups)
        if begun:
            self._judge_phases(step, findings)
        return [group.to_alert(step, (), {}) for group in begun]

    def take_loss(self, step: int, loss: float | None) -> None:
        """Take the loss of a step, unless that of this step or a later one was taken already."""
        if loss is None or step <= self._last_loss_step:
            return
        self._last_loss_step = step
        for alarm in self._loss_alarms():
            alarm.take_loss(step, loss)

    def _loss_alarms(self) -> list[LossAlarm]:
        return [alarm for alarm in self._alarms if isinstance(alarm, LossAlarm)]

    def _observe(self, alarm: Alarm, reading: Reading) -> list[AlarmFinding]:
        """Return the findings of an alarm; none if it fails, which is reported once."""
        try:
            return _with_alarm(alarm, alarm.observe(reading))
        except Exception as error:
            if self._notices is None:
                raise
            reason = f"{type(error).__name__}: {error}"
            message = f"the alarm {alarm.kind!r} raised {reason}; training goes on"
            self._notices.problem(("alarm", alarm.kind), f"step {reading.step}: {message}")
            return []

    def _new_groups(self, groups: Mapping[str, FindingGroup]) -> list[FindingGroup]:
        return [group for name, group in groups.items() if name not in self._active]

    def _judge_phases(self, step: int, findings: Sequence[AlarmFinding]) -> None:
        """Give each phase the critical alert that holds at its layer; the first in the table."""
        critical = [(alarm, finding) for alarm, finding in findings if alarm.level == "critical"]
        for number, phase in enumerate(self.phases):
            trouble = ""
            for alarm, finding in critical:
                if finding.is_everywhere or finding.layer == number:
                    trouble = alarm.kind
                    break
            phase.judge(step, trouble)

    def state(self) -> dict[str, Any]:
        """Return what all alarms remember, as plain numbers."""
        return {
            "alarms": {alarm.kind: alarm.state() for alarm in self._alarms},
            "last_loss_step": self._last_loss_step,
            "active": sorted(self._active),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], notices: Notices | None = None) -> Alarms:
        """Return the alarms that `state` describes; an alarm that is not in it begins anew."""
        alarms = cls(notices)
        states = unspell(
            dict(state["alarms"])
        )  # a state that was written as JSON spells infinities
        for alarm in alarms._alarms:
            if alarm.kind in states:
                alarm.restore(states[alarm.kind])
        alarms._last_loss_step = int(state["last_loss_step"])
        alarms._active = set(state["active"])
        return alarms


def _with_alarm(alarm: Alarm, findings: Iterable[Finding]) -> list[AlarmFinding]:
    return [(alarm, finding) for finding in findings]
