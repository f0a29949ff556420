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
    never begins        the first layer's attention is low and that of all others uniform for PATIENCE measurements, and
                        over the last quarter of the run the loss did not fall

Each is told when it begins, and again only if it was over in between. The rules were written before the runs that score
them (`benchmarks/trouble.py`) were looked at.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from joma._watch.phases import LOW, PATIENCE, RECOVERED, Phase, Phases, Stuck, loss_falls
from joma._watch.readings import ALL, SINK, LayerReading, Reading

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
    "collapse": ("critical", "the usual cause is a learning rate that is too high: lower it, warm up longer, or "
                 "normalise queries and keys; go back to a checkpoint before it"),
    "never begins": ("critical", "lower the learning rate, warm up longer, or begin with fewer layers"),
    "logit growth": ("warning", "clip queries and keys (QK-clip), normalise them, or lower the learning rate"),
    "rank loss": ("warning", "lower the learning rate or add weight decay; look for tokens that have become one"),
    "update spike": ("warning", "clip gradients, look at the batch of this step, or lower the learning rate"),
    "massive activation": ("notice", "healthy models have them too; mind them in low precision and quantisation"),
}  # fmt: skip
KINDS = tuple(_KINDS)
_Wrong = tuple[str, int | None, int | None, str, float, float]  # kind, layer, head, gauge, value, threshold


@dataclass(frozen=True)
class Alert:
    """Something that went wrong, and where.

    Attributes:
        step: when it was told.
        kind: "collapse", "never begins", "logit growth", "rank loss", "update spike" or "massive activation".
        layer: its number; None if it is of the whole model.
        head: its number; None if it is of the whole layer.
        module: name of the layer.
        gauge: what was measured.
        value: of the gauge.
        threshold: what it is beyond.
    """

    step: int
    kind: str
    layer: int | None
    head: int | None
    module: str
    gauge: str
    value: float
    threshold: float

    @property
    def level(self) -> str:
        """How bad it is: "notice", "warning" or "critical"."""
        return _KINDS[self.kind][0]

    @property
    def what_to_do(self) -> str:
        """A sentence."""
        return _KINDS[self.kind][1]

    def to_json(self) -> dict[str, Any]:
        """A row of alerts.jsonl."""
        return {**asdict(self), "level": self.level, "what_to_do": self.what_to_do}

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer} ({self.module})"
        head = "" if self.head is None else f", head {self.head}"
        beyond = f"{self.gauge} is {self.value:.4g} (threshold {self.threshold:.4g})"
        return f"{self.kind}{layer}{head}: {beyond}"


@dataclass
class _History:
    """The values of a gauge at one place."""

    first: float = math.nan
    beyond: int = 0  # measurements in a row
    recent: list[float] = field(default_factory=list)


def _name(names: Sequence[str], layer: int | None) -> str:
    return names[layer] if layer is not None and layer < len(names) else ""


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
        if math.isfinite(reading.loss):
            self._best = min(self._best, reading.loss)
        self._losses.append(reading.loss)
        self.phases += [Phase() for _ in range(len(reading.layers) - len(self.phases))]
        found = [
            *self._collapses(reading), *self._never_begins(reading), *self._logits(reading), *self._massive(reading),
            *self._ranks(reading), *self._spikes(reading),
        ]  # fmt: skip
        now = {f"{kind}:{layer}:{head}:{gauge}" for kind, layer, head, gauge, *_ in found}
        begun = [
            Alert(reading.step, kind, layer, head, _name(names.get(gauge, attention), layer), gauge, value, threshold)
            for kind, layer, head, gauge, value, threshold in found
            if f"{kind}:{layer}:{head}:{gauge}" not in self._active
        ]  # fmt: skip
        self._active = now
        return begun

    # Rules: each gives (kind, layer, head, gauge, value, threshold) of what is wrong now

    def _collapses(self, reading: Reading) -> Iterator[_Wrong]:
        for n, (phase, layer) in enumerate(zip(self.phases, reading.layers, strict=False)):
            heads = self._heads_of(n, layer, reading.loss)
            most = 2 * sum(bool(stuck.count) for stuck in heads.values()) > len(layer.spread)
            told = [head for head, stuck in heads.items() if stuck.told and (most or self._typical() > stuck.usual)]
            collapsed = 2 * len(told) > len(layer.spread)
            phase.update(reading.step, layer.entropy, layer.nonsink, reading.loss, layer.possible, collapsed)
            for head in told:
                yield "collapse", n, head, _SPREAD, layer.spread[head], LOW
            if phase.name == "collapsed" and not told:
                yield "collapse", n, None, _SPREAD, layer.nonsink, LOW

    def _heads_of(self, n: int, layer: LayerReading, loss: float) -> dict[int, Stuck]:
        """The heads of a layer that can be judged, brought up to date; sinks that attend elsewhere too are healthy."""
        heads = {}
        for head, (spread, sink) in enumerate(zip(layer.spread, layer.sink, strict=True)):
            if math.isnan(spread) or math.isnan(sink):
                continue
            healthy = SINK < sink <= ALL
            heads[head] = stuck = self._stuck.setdefault(f"{n}:{head}", Stuck())
            stuck.update(spread < LOW and not healthy, spread > RECOVERED or healthy, loss, self._best, self._usual())
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

    def _never_begins(self, reading: Reading) -> Iterator[_Wrong]:
        layers = [(n, layer) for n, layer in enumerate(reading.layers) if not math.isnan(layer.entropy)]
        if len(layers) < 2:
            return
        (first, bottom), *others = layers
        uniform = [layer.entropy / layer.possible for _, layer in others if layer.possible > 0]
        if not (bottom.nonsink < LOW and uniform and min(uniform) > UNIFORM):
            self._nothing_begins.clear()
            return
        self._nothing_begins.append((reading.step, reading.loss))
        known = [(at, loss) for at, loss in self._nothing_begins if math.isfinite(loss)]
        if len(known) >= PATIENCE and not loss_falls(known, reading.step):
            yield "never begins", first, None, _SPREAD, bottom.nonsink, LOW

    def _logits(self, reading: Reading) -> Iterator[_Wrong]:
        exact = reading.gauges.get("max_logit")
        gauge = "max_logsumexp" if exact is None else "max_logit"
        for n, values in enumerate([layer.logsumexp for layer in reading.layers] if exact is None else exact):
            for head, value in enumerate(values):
                place = f"{gauge}:{n}:{head}"
                surged = self._surged(place, value)
                if threshold := self._grown(place, value, LOGIT, GROWN) or surged:
                    yield "logit growth", n, head, gauge, value, threshold

    def _massive(self, reading: Reading) -> Iterator[_Wrong]:
        for n, values in enumerate(reading.gauges.get("massive_activation", ())):
            if threshold := self._grown(f"massive_activation:{n}", values[0], MASSIVE, ONSET):
                yield "massive activation", n, None, "massive_activation", values[0], threshold

    def _grown(self, place: str, value: float, level: float, factor: float) -> float:
        """The threshold, if the value was above it twice in a row: the level, and a multiple of the first value."""
        history = self._histories.setdefault(place, _History())
        if math.isfinite(value) and math.isnan(history.first):
            history.first = abs(value)
        threshold = max(level, factor * history.first)
        history.beyond = history.beyond + 1 if value > threshold else 0
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

    def _ranks(self, reading: Reading) -> Iterator[_Wrong]:
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
                    stuck.update(value < RANK, value > RANK_RECOVERED, reading.loss, self._best)
                    if stuck.told:
                        yield "rank loss", n, head if len(values) > 1 else None, gauge, value, RANK

    def _spikes(self, reading: Reading) -> Iterator[_Wrong]:
        for gauge, layers in reading.gauges.items():
            if (name := gauge.split(".")[0]) not in ("update_ratio", "gradient_norm"):
                continue
            for n, (value, *_) in enumerate(layers):
                history = self._histories.setdefault(f"{gauge}:{n}", _History())
                if len(history.recent) >= PATIENCE:
                    usual = SPIKE * median(history.recent)
                    threshold = max(usual, UPDATE) if name == "update_ratio" else usual
                    if value > threshold or math.isinf(value):
                        yield "update spike", n, None, gauge, value, threshold
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
        return alarms
