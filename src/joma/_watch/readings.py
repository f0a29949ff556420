"""What phases and alarms are told from: the numbers of one measurement, small enough to be kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
        loss: NaN if it is not known.
        layers: of attention.
        gauges: gauge -> per layer, its values; one per head where it has heads.
    """

    step: int
    loss: float
    layers: Sequence[LayerReading] = ()
    gauges: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        """As lists and numbers."""
        layers = [[x.entropy, x.possible, x.spread, x.sink, x.logsumexp] for x in self.layers]
        return [self.step, self.loss, layers, self.gauges]

    @classmethod
    def from_json(cls, kept: Sequence[Any]) -> Reading:
        """What `to_json` made."""
        step, loss, layers, gauges = kept
        return cls(int(step), float(loss), [LayerReading(*layer) for layer in layers], gauges)


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
