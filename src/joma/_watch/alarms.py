"""The phase of each layer from the numbers of a measurement, and an alarm where attention has collapsed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from joma._gauges.attention import AttentionStats
from joma._gauges.registry import Gauge
from joma._watch.notices import Notices
from joma._watch.phases import Phase, nonsink_of_layer


def _possible(stats: AttentionStats) -> Tensor:
    """The largest non-sink entropy there could be."""
    return (stats.visible - 1).clamp(min=1).log().expand_as(stats.entropy)


# what phases are told from, measured whatever gauges are asked for: they are almost free
FOR_PHASES = (
    Gauge("_entropy", "attention", lambda stats: stats.entropy, ""),
    Gauge("_nonsink", "attention", lambda stats: stats.nonsink_entropy, ""),
    Gauge("_sink", "attention", lambda stats: stats.sink_mass, ""),
    Gauge("_possible", "attention", _possible, ""),
)


def told_from(values: Mapping[str, Tensor]) -> list[tuple[float, float]]:
    """Per layer its entropy and its non-sink entropy (NaN if that says nothing), from the values of `FOR_PHASES`."""
    per_layer = []
    for entropy, nonsink, sink, possible in zip(*(values[gauge.name] for gauge in FOR_PHASES), strict=True):
        judged = float(possible.nanmean()) >= 1.0  # with a handful of keys, low entropy means nothing
        low = nonsink_of_layer(nonsink.tolist(), sink.tolist()) if judged else math.nan
        per_layer.append((float(entropy.nanmean()), low))
    return per_layer


def update(phases: list[Phase], per_layer: Sequence[tuple[float, float]], step: int, loss: float) -> None:
    """Bring each layer's phase up to date with what `told_from` gave."""
    phases += [Phase() for _ in range(len(per_layer) - len(phases))]
    for phase, (entropy, nonsink) in zip(phases, per_layer, strict=True):
        phase.update(step, entropy, nonsink, loss)


def warn(
    phases: Sequence[Phase], per_layer: Sequence[tuple[float, float]], step: int, loss: float, layers: Sequence[str],
    notices: Notices,
) -> None:  # fmt: skip
    """Say which layers have collapsed, each once until it recovers."""
    for n, (phase, (_, nonsink)) in enumerate(zip(phases, per_layer, strict=True)):
        if phase.name == "collapsed":
            notices.once(
                ("collapsed", n),
                f"attention of layer {n} ({layers[n]}) has collapsed by step {step}: its non-sink entropy is "
                f"{nonsink:.3f} nats and the loss ({loss:.4g}) does not fall. The usual cause is a learning rate that "
                "is too high: lower it, warm up longer, or normalise queries and keys",
            )
        else:
            notices.forget(("collapsed", n))
