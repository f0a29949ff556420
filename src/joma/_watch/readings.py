"""What phases and alarms are told from: the numbers of one measurement, small enough to be kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from joma._gauges.attention import AttentionStats
from joma._gauges.registry import Gauge

SINK = 0.9  # the mean mass on sinks from which a head is a sink itself
ALL = 0.99  # and from which it attends to nothing else
FEW_KEYS = 1.0  # nats: where non-sink attention can spread no further than this, low entropy means nothing


def _possible(stats: AttentionStats) -> Tensor:
    """The largest non-sink entropy there could be."""
    return (stats.visible - 1).clamp(min=1).log().expand_as(stats.entropy)


# measured whatever gauges are asked for: they are almost free
FOR_PHASES = (
    Gauge("_entropy", "attention", lambda stats: stats.entropy, ""),
    Gauge("_nonsink", "attention", lambda stats: stats.nonsink_entropy, ""),
    Gauge("_sink", "attention", lambda stats: stats.sink_mass, ""),
    Gauge("_possible", "attention", _possible, ""),
    Gauge("_logsumexp", "attention", lambda stats: stats.logsumexp, "", reduce="max"),
)


# likewise: ln(visible keys), what uniform attention would have, for pictures
UNIFORM = Gauge("_uniform", "attention", lambda stats: stats.visible.clamp(min=1).log().expand_as(stats.entropy), "")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at one measurement.

    Attributes:
        kind: of the alert that it will be.
        layer: its number; None if it is not about one layer.
        head: its number; None if it is about a whole layer.
        gauge: what was measured.
        value: of the gauge.
        threshold: what the value is beyond; None if there is no such number.
        module: its name, where it is not that of the layer.
        later: modules where the same was seen after it.
        is_everywhere: True if no layer is healthy while it lasts.
    """

    kind: str
    layer: int | None
    head: int | None
    gauge: str
    value: float
    threshold: float | None
    module: str = ""
    later: tuple[str, ...] = ()
    is_everywhere: bool = False

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Finding:
        """Return the finding whose fields are in ``row``."""
        return cls(**{**row, "later": tuple(row["later"])})


@dataclass(frozen=True)
class LayerReading:
    """One attention layer: means over its heads, and one number per head (NaN where it says nothing)."""

    entropy: float  # nats
    possible: float  # nats: of non-sink attention that is spread as far as it goes
    spread: Sequence[float] = ()  # per head: non-sink entropy over the possible one; 0 where all is on sinks
    sink: Sequence[float] = ()  # per head: mean mass on sinks
    logsumexp: Sequence[float] = ()  # per head, the largest

    @property
    def nonsink(self) -> float:
        """Mean spread of the heads that are not sinks; NaN if all are."""
        return nonsink_of_layer(self.spread, self.sink)


@dataclass(frozen=True)
class Reading:
    """One measurement.

    Attributes:
        loss: None if it is not known.
        layers: of attention.
        gauges: gauge -> per layer, its values; one per head where it has heads.
        findings: what is wrong by evidence that is not among these numbers.
    """

    step: int
    loss: float | None
    layers: Sequence[LayerReading] = ()
    gauges: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()

    def to_json(self) -> list[Any]:
        """As lists and numbers."""
        layers = [[x.entropy, x.possible, x.spread, x.sink, x.logsumexp] for x in self.layers]
        return [self.step, self.loss, layers, self.gauges, [asdict(finding) for finding in self.findings]]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Reading:
        """Return the reading that `to_json` made ``row`` from."""
        step, loss, layers, gauges, findings = row
        return cls(
            int(step),
            None if loss is None else float(loss),
            [LayerReading(*layer) for layer in layers],
            gauges,
            [Finding.from_json(finding) for finding in findings],
        )


def read_layers(values: Mapping[str, Tensor]) -> list[LayerReading]:
    """Per layer, from the values (layers, heads) of `FOR_PHASES`."""
    layers = []
    for entropy, nonsink, sink, possible, logsumexp in zip(*(values[g.name] for g in FOR_PHASES), strict=True):
        most = float(possible.nanmean())
        few = not most >= FEW_KEYS
        pairs = zip(nonsink.tolist(), sink.tolist(), strict=True)
        spread = [math.nan if few or math.isnan(m) else 0.0 if m > ALL else n / most for n, m in pairs]
        layers.append(LayerReading(float(entropy.nanmean()), most, spread, sink.tolist(), logsumexp.tolist()))
    return layers


def nonsink_of_layer(spread: Sequence[float], sink_mass: Sequence[float]) -> float:
    """Mean over the heads that are not sinks; NaN if all are."""
    kept = [n for n, m in zip(spread, sink_mass, strict=True) if math.isfinite(n) and m <= SINK]
    return sum(kept) / len(kept) if kept else math.nan
