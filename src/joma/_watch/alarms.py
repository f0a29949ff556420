"""Alarms: rules over the readings of a run, one reading at a time.

    collapse            a head's non-sink attention is low (below LOW of the largest possible entropy, or all of it is
                        on sinks) for PATIENCE measurements, without a new best loss since it became so (NaN is not
                        better); one head alone may be sharp in health, so it is told of if most heads of its layer
                        are low too, or if the loss is worse than before. Or the layer's phase is `collapsed`
    logit growth        the largest logit of a head (its logsumexp, where `max_logit` is not measured) is above LOGIT
                        and above GROWN times its first value, at two measurements in a row; or, at two in a row, above
                        STRONG and above SURGE times all that it was SUDDEN measurements ago or more, if that was
                        above BEGUN: the first growth of a head that has done nothing yet is healthy; or, at once,
                        above LOGIT and LEAP times all that it was
    massive activation  `massive_activation` is above MASSIVE and ONSET times its first value, at two in a row
    rank loss           `stable_rank` or `hidden_rank`, once above 2, is below RANK for PATIENCE measurements without a
                        new best loss since
    update spike        `update_ratio` or `gradient_norm` is SPIKE times the median of its last values; an update must
                        move the weights by UPDATE at least
    not finite          the loss, a weight, an activation or any gauge was computed and is NaN or infinite
    diverging           the loss rises for good: see `joma._watch.divergence`
    broken gradient     a gradient breaks an exact law of the model: see `joma._watch.charges`
    never begins        the first layer's attention is low and that of all others uniform for PATIENCE measurements, and
                        over the last quarter of the run the loss did not fall

There is one alert per kind and layer (one for the model, if it is not finite or diverging), with
all heads that it was found in. It comes when it begins, and again only if it was over in between.
The rules were written before the runs that score them (`benchmarks/trouble.py`) were looked at.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from joma._run.alerts import describe_alert
from joma._watch.divergence import Divergence
from joma._watch.phases import PATIENCE, Phase, Phases, Stuck, loss_falls
from joma._watch.readings import HIGH_LEVEL, LOW, LOW_LEVEL, UNKNOWN_LEVEL, AttentionReading, Finding, Reading

LOGIT, GROWN = 100.0, 2.0  # 100 is where QK-clip of Kimi K2 sets in
STRONG, SURGE, SUDDEN, BEGUN = 15.0, 2.5, 6, 2.0  # a softmax is all but one-hot at differences of 15
LEAP = 10.0  # no batch is as odd as that
MASSIVE, ONSET = 1000.0, 10.0  # of Sun et al., "Massive activations in large language models" (2024)
RANK, RANK_RECOVERED, RANK_FIRST = 1.1, 1.2, 2.0
SPIKE, UPDATE, HISTORY = 10.0, 1e-3, 32
# gauges that alarms look at, where they are measured
JUDGED = ("max_logit", "massive_activation", "stable_rank", "hidden_rank", "update_ratio", "gradient_norm")
_SPREAD = "normalised non-sink entropy"
UNIFORM = 0.95  # of the largest possible entropy

_KINDS = {
    "not finite": ("critical", "go back to a checkpoint before it; clip gradients, lower the learning rate, or compute "
                   "in a wider type where it began"),
    "diverging": ("critical", "lower the learning rate or warm up longer, and go back to a checkpoint before the rise; "
                  "if that does not help, check the sign and the scale of loss and gradients"),
    "collapse": ("critical", "the usual cause is a learning rate that is too high: lower it, warm up longer, or "
                 "normalise queries and keys; go back to a checkpoint before it"),
    "never begins": ("critical", "lower the learning rate, warm up longer, or begin with fewer layers"),
    "logit growth": ("warning", "clip queries and keys (QK-clip), normalise them, or lower the learning rate"),
    "rank loss": ("warning", "lower the learning rate or add weight decay; look for tokens that have become one"),
    "broken gradient": ("warning", "look for a detached path, or a gradient that is scaled, clipped or stepped for one "
                        "parameter alone; see joma.charges(model).check_gradients()"),
    "update spike": ("warning", "clip gradients, look at the batch of this step, or lower the learning rate"),
    "massive activation": ("notice", "healthy models have them too; mind them in low precision and quantisation"),
}  # fmt: skip
KINDS = tuple(_KINDS)
_OF_THE_MODEL = ("not finite", "diverging")  # kinds with one alert for all layers


@dataclass(frozen=True)
class Alert:
    """Something that went wrong, and where.

    Attributes:
        step: when it was found; for a loss that is not finite or diverges, when that began.
        kind: "not finite", "diverging", "collapse", "never begins", "logit growth", "rank loss", "broken gradient",
            "update spike" or "massive activation".
        layer: its number; None if it is not about one layer.
        heads: their numbers; () if it is about the whole layer.
        module: name of the layer, or of the first module that is not finite.
        gauge: what was measured.
        value: of the gauge; of the worst head.
        threshold: what the value is beyond; None if there is no such number.
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
        return _KINDS[self.kind][0]

    @property
    def what_to_do(self) -> str:
        """A sentence."""
        return _KINDS[self.kind][1]

    def to_json(self) -> dict[str, Any]:
        """A row of alerts.jsonl."""
        return {**asdict(self), "level": self.level, "what_to_do": self.what_to_do}

    def __str__(self) -> str:
        return describe_alert(self.to_json())


@dataclass
class _History:
    """The values of a gauge at one place."""

    first: float = math.nan
    beyond: int = 0  # measurements in a row
    recent: list[float] = field(default_factory=list)


def _name(names: Sequence[str], layer: int | None) -> str:
    return names[layer] if layer is not None and layer < len(names) else ""


def _key(finding: Finding) -> str:
    """Return what findings of one alert have in common."""
    return finding.kind if finding.kind in _OF_THE_MODEL else f"{finding.kind}:{finding.layer}"


def _worst(findings: Sequence[Finding]) -> Finding:
    """Return the finding that is farthest beyond its threshold."""
    first = findings[0]
    if first.threshold is None:
        return first
    if first.value > first.threshold:
        return max(findings, key=lambda finding: finding.value)
    return min(findings, key=lambda finding: finding.value)


class Alarms:
    """Phases of the layers, and what is wrong now.

    Attributes:
        phases: one per attention layer.
    """

    def __init__(self) -> None:
        self.phases = Phases()
        self._stuck: dict[str, Stuck] = {}  # "layer:head", and "gauge:layer:head" of ranks
        self._histories: dict[str, _History] = {}
        self._losses: deque[float] = deque(maxlen=2 * PATIENCE)
        self._best = math.inf
        self._divergence = Divergence()
        self._last_loss = -1  # the step of the last loss that was taken
        self._bad_loss: tuple[int, float] | None = None  # (step, loss) of the first in a row that is not finite
        self._nothing_begins: list[tuple[int, float]] = []  # (step, loss) since the first layer is low, others uniform
        self._active: set[str] = set()  # alerts that have been told and are not over

    def update(
        self, reading: Reading, attention: Sequence[str] = (), names: Mapping[str, Sequence[str]] | None = None
    ) -> list[Alert]:
        """Take one reading; returns what has begun with it.

        Arguments:
            reading: the numbers.
            attention: names of the attention layers.
            names: gauge -> names of its layers, where they are others.
        """
        names = names or {}
        self.take_loss(reading.step, reading.loss)
        loss = math.nan if reading.loss is None else reading.loss
        if math.isfinite(loss):
            self._best = min(self._best, loss)
        self._losses.append(loss)
        self.phases += [Phase() for _ in range(len(reading.layers) - len(self.phases))]
        rules = (
            self._collapses,
            self._never_begins,
            self._logits,
            self._massive,
            self._ranks,
            self._spikes,
        )
        findings = [*reading.findings, *self._of_the_loss(reading.findings)]
        for rule in rules:
            findings += rule(reading, loss)
        self._judge_phases(reading.step, findings)
        groups = _grouped(findings)
        begun = [
            self._alert(reading.step, group, attention, names)
            for key, group in groups.items()
            if key not in self._active
        ]
        self._active = set(groups)
        return begun

    def update_loss(self, step: int, loss: float) -> list[Alert]:
        """Take the loss of a step that is not measured; returns what has begun with it."""
        self.take_loss(step, loss)
        findings = self._of_the_loss(())
        groups = _grouped(findings)
        begun = [self._alert(step, group, (), {}) for key, group in groups.items() if key not in self._active]
        self._active |= set(groups)
        if begun:
            self._judge_phases(step, findings)
        return begun

    def take_loss(self, step: int, loss: float | None) -> None:
        """Take the loss of a step; one that was taken already is not taken twice."""
        if loss is None or step <= self._last_loss:
            return
        self._last_loss = step
        self._divergence.update(step, loss)
        if math.isfinite(loss):
            self._bad_loss = None
        elif self._bad_loss is None:
            self._bad_loss = (step, loss)

    def _of_the_loss(self, others: Sequence[Finding]) -> list[Finding]:
        """Return what is wrong with the losses so far; ``others`` may have found a cause already."""
        findings = []
        has_cause = any(finding.kind == "not finite" for finding in others)
        if self._bad_loss is not None and not has_cause:
            findings.append(Finding("not finite", None, None, "loss", self._bad_loss[1], None, is_everywhere=True))
        if self._divergence.since is not None:
            level = self._divergence.level
            threshold = self._divergence.threshold
            findings.append(Finding("diverging", None, None, "loss", level, threshold, is_everywhere=True))
        return findings

    def _judge_phases(self, step: int, findings: Sequence[Finding]) -> None:
        """Tell each layer's phase about the critical finding that stands there, the most general one first."""
        critical = [finding for finding in findings if _KINDS[finding.kind][0] == "critical"]
        for n, phase in enumerate(self.phases):
            here = [finding.kind for finding in critical if finding.is_everywhere or finding.layer == n]
            phase.judge(step, min(here, key=KINDS.index, default=""))

    def _alert(
        self, step: int, findings: Sequence[Finding], attention: Sequence[str], names: Mapping[str, Sequence[str]]
    ) -> Alert:
        """Return the one alert of findings of one kind in one layer."""
        worst = _worst(findings)
        heads = sorted({finding.head for finding in findings if finding.head is not None})
        module = worst.module or _name(names.get(worst.gauge, attention), worst.layer)
        if worst.kind == "diverging" and self._divergence.since is not None:
            step = self._divergence.since
        if worst.kind == "not finite" and self._bad_loss is not None:
            step = self._bad_loss[0]
        return Alert(
            step, worst.kind, worst.layer, tuple(heads), module, worst.gauge, worst.value, worst.threshold, worst.later
        )  # fmt: skip

    # Rules: each yields what is wrong now

    def _collapses(self, reading: Reading, loss: float) -> Iterator[Finding]:
        for n, (phase, layer) in enumerate(zip(self.phases, reading.layers, strict=False)):
            heads = self._heads_of(n, layer, loss)
            most = 2 * sum(bool(stuck.count) for stuck in heads.values()) > len(layer.levels)
            told = [head for head, stuck in heads.items() if stuck.told and (most or self._typical() > stuck.usual)]
            collapsed = 2 * len(told) > len(layer.levels)
            phase.update(reading.step, layer.entropy, layer.nonsink, loss, layer.possible, collapsed)
            for head in told:
                yield Finding("collapse", n, head, _SPREAD, layer.spread[head], LOW)
            if phase.has_collapsed and not told:
                yield Finding("collapse", n, None, _SPREAD, layer.nonsink, LOW)

    def _heads_of(self, n: int, layer: AttentionReading, loss: float) -> dict[int, Stuck]:
        """Bring the heads of a layer that can be judged up to date, and return them."""
        heads = {}
        for head, level in enumerate(layer.levels):
            if level == UNKNOWN_LEVEL:
                continue
            stuck = self._stuck.setdefault(f"{n}:{head}", Stuck())
            stuck.update(level == LOW_LEVEL, level == HIGH_LEVEL, loss, self._best, self._usual())
            heads[head] = stuck
        return heads

    def _typical(self) -> float:
        """The median of the last losses; what is no number is as bad as can be."""
        return median([x if math.isfinite(x) else math.inf for x in list(self._losses)[-PATIENCE:]])

    def _usual(self) -> float:
        """What the loss does not exceed by its scatter alone, by the measurements before this one; inf if unknown."""
        known = [x for x in list(self._losses)[-PATIENCE - 1 : -1] if math.isfinite(x)]
        if len(known) < PATIENCE // 2:
            return math.inf
        level = median(known)
        return level + 2 * median([abs(x - level) for x in known])

    def _never_begins(self, reading: Reading, loss: float) -> Iterator[Finding]:
        layers = [(n, layer) for n, layer in enumerate(reading.layers) if not math.isnan(layer.entropy)]
        if len(layers) < 2:
            return
        (first, bottom), *others = layers
        uniform = [layer.entropy / layer.possible for _, layer in others if layer.possible > 0]
        if not (bottom.nonsink < LOW and uniform and min(uniform) > UNIFORM):
            self._nothing_begins.clear()
            return
        self._nothing_begins.append((reading.step, loss))
        known = [(at, past) for at, past in self._nothing_begins if math.isfinite(past)]
        if len(known) >= PATIENCE and not loss_falls(known, reading.step):
            yield Finding("never begins", first, None, _SPREAD, bottom.nonsink, LOW, is_everywhere=True)

    def _logits(self, reading: Reading, loss: float) -> Iterator[Finding]:
        exact = reading.gauges.get("max_logit")
        gauge = "max_logsumexp" if exact is None else "max_logit"
        for n, values in enumerate([layer.logsumexp for layer in reading.layers] if exact is None else exact):
            for head, value in enumerate(values):
                place = f"{gauge}:{n}:{head}"
                surged = self._surged(place, value)
                if threshold := self._grown(place, value, LOGIT, GROWN) or surged:
                    yield Finding("logit growth", n, head, gauge, value, threshold)

    def _massive(self, reading: Reading, loss: float) -> Iterator[Finding]:
        for n, values in enumerate(reading.gauges.get("massive_activation", ())):
            if threshold := self._grown(f"massive_activation:{n}", values[0], MASSIVE, ONSET):
                yield Finding("massive activation", n, None, "massive_activation", values[0], threshold)

    def _grown(self, place: str, value: float, level: float, factor: float) -> float:
        """The threshold, if the value was above it twice in a row: the level, and a multiple of the first value."""
        history = self._histories.setdefault(place, _History())
        if math.isfinite(value) and math.isnan(history.first):
            history.first = abs(value)
        threshold = max(level, factor * history.first)
        # an infinite value is an alert of its own
        history.beyond = history.beyond + 1 if math.inf > value > threshold else 0
        return threshold if history.beyond >= 2 else 0.0

    def _surged(self, place: str, value: float) -> float:
        """The threshold, if the last two values, or the last by far, were above it: a multiple of all before."""
        history = self._histories.setdefault(place, _History())
        if not math.isfinite(value):
            return 0.0
        leap = max(LOGIT, LEAP * max(history.recent, default=math.inf))
        history.recent = [*history.recent, value][-HISTORY:]
        if value > leap:
            return leap
        past = history.recent[:-SUDDEN]
        if len(past) < PATIENCE or max(past) < BEGUN:
            return 0.0
        threshold = max(STRONG, SURGE * max(past))
        return threshold if min(history.recent[-2:]) > threshold else 0.0

    def _ranks(self, reading: Reading, loss: float) -> Iterator[Finding]:
        for gauge, layers in reading.gauges.items():
            if gauge.split(".")[0] not in ("stable_rank", "hidden_rank"):
                continue
            for n, values in enumerate(layers):
                for head, value in enumerate(values):
                    history = self._histories.setdefault(f"{gauge}:{n}:{head}", _History())
                    if math.isfinite(value) and math.isnan(history.first):
                        history.first = value
                    if math.isnan(value) or not history.first > RANK_FIRST:
                        continue
                    stuck = self._stuck.setdefault(f"{gauge}:{n}:{head}", Stuck())
                    stuck.update(value < RANK, value > RANK_RECOVERED, loss, self._best)
                    if stuck.told:
                        yield Finding("rank loss", n, head if len(values) > 1 else None, gauge, value, RANK)

    def _spikes(self, reading: Reading, loss: float) -> Iterator[Finding]:
        for gauge, layers in reading.gauges.items():
            if (name := gauge.split(".")[0]) not in ("update_ratio", "gradient_norm"):
                continue
            for n, (value, *_) in enumerate(layers):
                history = self._histories.setdefault(f"{gauge}:{n}", _History())
                if len(history.recent) >= PATIENCE:
                    usual = SPIKE * median(history.recent)
                    threshold = max(usual, UPDATE) if name == "update_ratio" else usual
                    if math.inf > value > threshold:
                        yield Finding("update spike", n, None, gauge, value, threshold)
                        continue  # what is a spike is not what is usual
                if math.isfinite(value):
                    history.recent = [*history.recent, value][-HISTORY:]

    # A checkpoint

    def state(self) -> dict[str, Any]:
        """All of it as plain numbers."""
        return {
            "phases": [phase.state() for phase in self.phases],
            "heads": {place: dict(vars(stuck)) for place, stuck in self._stuck.items()},
            "histories": {place: dict(vars(history)) for place, history in self._histories.items()},
            "losses": list(self._losses),
            "best": self._best,
            "nothing_begins": [list(pair) for pair in self._nothing_begins],
            "active": sorted(self._active),
            "divergence": self._divergence.state(),
            "last_loss": self._last_loss,
            "bad_loss": None if self._bad_loss is None else list(self._bad_loss),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Alarms:
        """What `state` told of."""
        alarms = cls()
        alarms.phases = Phases(Phase.restored(phase) for phase in state["phases"])
        alarms._stuck = {place: Stuck(**stuck) for place, stuck in state["heads"].items()}
        alarms._histories = {place: _History(**history) for place, history in state["histories"].items()}
        alarms._losses.extend(state["losses"])
        alarms._best = float(state["best"])
        alarms._nothing_begins = [(int(at), float(loss)) for at, loss in state["nothing_begins"]]
        alarms._active = set(state["active"])
        alarms._divergence = Divergence.restored(state["divergence"])
        alarms._last_loss = int(state["last_loss"])
        if state["bad_loss"] is not None:
            step, loss = state["bad_loss"]
            alarms._bad_loss = (int(step), float(loss))
        return alarms


def _grouped(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Return the findings of each alert."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(_key(finding), []).append(finding)
    return groups
