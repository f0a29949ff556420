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


def judge(
    phases: list[Phase], values: Mapping[str, Tensor], step: int, loss: float, layers: Sequence[str], notices: Notices
) -> None:
    """Bring each layer's phase up to date; ``values`` are those of `FOR_PHASES`, (layers, heads) each."""
    phases += [Phase() for _ in range(len(values["_entropy"]) - len(phases))]
    for n, phase in enumerate(phases):
        entropy, nonsink, sink, possible = (values[gauge.name][n] for gauge in FOR_PHASES)
        judged = float(possible.nanmean()) >= 1.0  # with a handful of keys, low entropy means nothing
        low = nonsink_of_layer(nonsink.tolist(), sink.tolist()) if judged else math.nan
        phase.update(step, float(entropy.nanmean()), low, loss)
        if phase.name == "collapsed":
            notices.once(
                ("collapsed", n),
                f"attention of layer {n} ({layers[n]}) has collapsed by step {step}: its non-sink entropy is "
                f"{low:.3f} nats and the loss ({loss:.4g}) does not fall. The usual cause is a learning rate that is "
                "too high: lower it, warm up longer, or normalise queries and keys",
            )
        else:
            notices.forget(("collapsed", n))
