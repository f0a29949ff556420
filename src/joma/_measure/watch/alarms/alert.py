"""Alerts: the findings of one alarm in one layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from joma._measure.watch.alarms.alarm_table import find_alarm
from joma._measure.watch.alarms.rule import Alarm
from joma._measure.watch.readings import Finding
from joma._runs.alerts import describe_alert


@dataclass(frozen=True)
class Alert:
    """Something that went wrong, and where.

    Attributes:
        step: when it was found; for a loss that is not finite or diverges, when that began.
        kind: "not finite", "diverging", "collapse", "never begins", "logit growth", "rank loss",
            "broken gradient", "update spike", "massive activation", or that of a user's alarm.
        layer: its number; None if it is not about one layer.
        heads: their numbers; () if it is about the whole layer.
        module: name of the layer, or of the first module that is not finite.
        gauge: what was measured.
        value: value of the gauge at the worst head.
        threshold: number that the value is beyond; None if there is none.
        later: names of the modules that were not finite after the first.
    """

    step: int
    kind: str
    layer: int | None
    heads: tuple[int, ...]
    module: str
    gauge: str
    value: float
    threshold: float | None
    later: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """The severity: "notice", "warning" or "critical"."""
        return find_alarm(self.kind).level

    @property
    def what_to_do(self) -> str:
        """Advice, in a sentence."""
        return find_alarm(self.kind).what_to_do

    def to_json(self) -> dict[str, Any]:
        """Return a row of alerts.jsonl."""
        return {**asdict(self), "level": self.level, "what_to_do": self.what_to_do}

    def __str__(self) -> str:
        return describe_alert(self.to_json())


@dataclass
class FindingGroup:
    """The findings of one alarm that become one alert: those of a layer, or of the model."""

    alarm: Alarm
    findings: list[Finding] = field(default_factory=list)

    def worst(self) -> Finding:
        """Return the finding that is farthest beyond its threshold."""
        first = self.findings[0]
        if first.threshold is None:
            return first
        if first.value > first.threshold:
            return max(self.findings, key=lambda finding: finding.value)
        return min(self.findings, key=lambda finding: finding.value)

    def to_alert(
        self,
        step: int,
        attention: Sequence[str],
        names: Mapping[str, Sequence[str]],
    ) -> Alert:
        """Return the alert.

        Arguments:
            step: the step of the findings.
            attention: names of the attention layers.
            names: gauge -> names of its layers, where they are others.
        """
        worst = self.worst()
        heads = {finding.head for finding in self.findings if finding.head is not None}
        module = worst.module or _layer_name(names.get(worst.gauge, attention), worst.layer)
        return Alert(
            step=self.alarm.onset(step),
            kind=self.alarm.kind,
            layer=worst.layer,
            heads=tuple(sorted(heads)),
            module=module,
            gauge=worst.gauge,
            value=worst.value,
            threshold=worst.threshold,
            later=worst.later,
        )


def group_findings(findings: Iterable[tuple[Alarm, Finding]]) -> dict[str, FindingGroup]:
    """Return the findings of each alert by a name for it, such as "collapse:3"."""
    groups: dict[str, FindingGroup] = {}
    for alarm, finding in findings:
        name = f"{alarm.kind}:{finding.layer}"
        if alarm.is_of_model:
            name = alarm.kind
        group = groups.setdefault(name, FindingGroup(alarm))
        group.findings.append(finding)
    return groups


def _layer_name(names: Sequence[str], layer: int | None) -> str:
    if layer is None or layer >= len(names):
        return ""
    return names[layer]
