"""What phases and alarms are told from: the numbers of one measurement, small enough to be kept."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from joma._measure.gauges.attention import AttentionStats
from joma._measure.gauges.kinds import ATTENTION
from joma._measure.gauges.registry import Gauge

SINK = 0.9  # the mean mass on sinks from which a head is a sink itself
ALL = 0.99  # and from which it attends to nothing else
FEW_KEYS = (
    1.0  # nats: where non-sink attention can spread no further than this, low entropy means nothing
)
LOW, RECOVERED = 0.04, 0.08  # of the largest possible non-sink entropy: 0.1 and 0.2 nats of 2.5

# Levels of a head's non-sink attention. Rules about collapse need no more of a healthy head than its level, so that a
# run folder keeps one letter per head, and the number itself only where it is not high.
UNKNOWN_LEVEL = "?"
LOW_LEVEL = "l"
MIDDLE_LEVEL = "m"
HIGH_LEVEL = "h"


def _possible(stats: AttentionStats) -> Tensor:
    """The largest non-sink entropy there could be."""
    return (stats.visible - 1).clamp(min=1).log().expand_as(stats.entropy)


# measured whatever gauges are asked for: they are almost free
FOR_PHASES = (
    Gauge("_entropy", ATTENTION, lambda stats: stats.entropy, ""),
    Gauge("_nonsink", ATTENTION, lambda stats: stats.nonsink_entropy, ""),
    Gauge("_sink", ATTENTION, lambda stats: stats.sink_mass, ""),
    Gauge("_possible", ATTENTION, _possible, ""),
    Gauge("_logsumexp", ATTENTION, lambda stats: stats.logsumexp, "", reduce="max"),
)


# likewise: ln(visible keys), what uniform attention would have, for pictures
UNIFORM = Gauge(
    "_uniform",
    ATTENTION,
    lambda stats: stats.visible.clamp(min=1).log().expand_as(stats.entropy),
    "",
)


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


class AttentionReading(Protocol):
    """One attention layer at one measurement, as the rules see it."""

    @property
    def entropy(self) -> float:
        """Mean over heads, in nats."""

    @property
    def possible(self) -> float:
        """Non-sink entropy of attention that is spread as far as it goes, in nats."""

    @property
    def nonsink(self) -> float:
        """Mean spread of the heads that are not sinks; NaN if all are."""

    @property
    def levels(self) -> str:
        """One letter per head: the level of its spread."""

    @property
    def spread(self) -> Sequence[float]:
        """Per head: non-sink entropy over the possible one."""

    @property
    def logsumexp(self) -> Sequence[float]:
        """Per head, the largest."""


@dataclass(frozen=True)
class LayerReading:
    """One attention layer: means over its heads, and one number per head (NaN where it says nothing)."""

    entropy: float  # nats
    possible: float  # nats: of non-sink attention that is spread as far as it goes
    spread: Sequence[
        float
    ] = ()  # per head: non-sink entropy over the possible one; 0 where all is on sinks
    sink: Sequence[float] = ()  # per head: mean mass on sinks
    logsumexp: Sequence[float] = ()  # per head, the largest

    @property
    def nonsink(self) -> float:
        """Mean spread of the heads that are not sinks; NaN if all are."""
        return nonsink_of_layer(self.spread, self.sink)

    @property
    def levels(self) -> str:
        """One letter per head: the level of its spread."""
        pairs = zip(self.spread, self.sink, strict=True)
        return "".join(level_of_head(spread, sink) for spread, sink in pairs)


@dataclass(frozen=True)
class StoredLayer:
    """The part of a `LayerReading` that a run folder keeps: rules come to the same verdicts by it."""

    entropy: float
    possible: float
    nonsink: float
    levels: str
    spread: Sequence[float]  # per head; NaN where the level is high or unknown
    logsumexp: Sequence[float]


def level_of_head(spread: float, sink: float) -> str:
    """Return the level of a head; a sink that also attends elsewhere is healthy."""
    if math.isnan(spread) or math.isnan(sink):
        return UNKNOWN_LEVEL
    if SINK < sink <= ALL or spread > RECOVERED:
        return HIGH_LEVEL
    if spread < LOW:
        return LOW_LEVEL
    return MIDDLE_LEVEL


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
    layers: Sequence[AttentionReading] = ()
    gauges: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()

    def to_json(self) -> list[Any]:
        """Return what rules need of the reading, without loss of a bit; the step comes first."""
        means = [[layer.entropy, layer.possible, layer.nonsink] for layer in self.layers]
        levels = " ".join(layer.levels for layer in self.layers)
        logsumexp: list[Any] = []
        if "max_logit" not in self.gauges:  # rules look at one of the two
            logsumexp = _pack_rows([layer.logsumexp for layer in self.layers])
        gauges = {gauge: _pack_rows(rows) for gauge, rows in self.gauges.items()}
        findings = [asdict(finding) for finding in self.findings]
        return [
            self.step,
            self.loss,
            _pack_rows(means),
            _pack_bytes(levels.encode()),
            _pack_rows([_below_high(layer) for layer in self.layers]),
            logsumexp,
            gauges,
            findings,
        ]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Reading:
        """Return the reading that `to_json` made ``row`` from, with a `StoredLayer` per layer."""
        step, loss, packed_means, packed_levels, spreads, packed_logsumexp, gauges, findings = row
        means = _unpack_rows(packed_means)  # per layer: entropy, possible, nonsink
        levels = _unpack_bytes(packed_levels).decode().split(" ")[: len(means)]
        logsumexp: list[list[float]] = [[]] * len(means)
        if packed_logsumexp:
            logsumexp = _unpack_rows(packed_logsumexp)
        layers = []
        columns = zip(means, levels, _unpack_rows(spreads), logsumexp, strict=True)
        for (entropy, possible, nonsink), heads, below_high, largest in columns:
            spread = _with_nan(heads, below_high)
            layers.append(StoredLayer(entropy, possible, nonsink, heads, spread, largest))
        return cls(
            int(step),
            None if loss is None else float(loss),
            layers,
            {gauge: _unpack_rows(rows) for gauge, rows in gauges.items()},
            [Finding.from_json(finding) for finding in findings],
        )


def _below_high(layer: AttentionReading) -> list[float]:
    """Return the spread of the heads whose level is low or in the middle."""
    pairs = zip(layer.levels, layer.spread, strict=True)
    return [spread for level, spread in pairs if level in (LOW_LEVEL, MIDDLE_LEVEL)]


def _with_nan(levels: str, below_high: Sequence[float]) -> list[float]:
    """Return one spread per head, from those that `_below_high` gave."""
    numbers = iter(below_high)
    return [next(numbers) if level in (LOW_LEVEL, MIDDLE_LEVEL) else math.nan for level in levels]


def _pack_rows(rows: Sequence[Sequence[float]]) -> list[Any]:
    """Return rows of numbers as [type, lengths, text]: 4 characters per head instead of 20 as decimals.

    The type is float32 where that loses nothing, as for what a float32 model computes.
    """
    numbers = np.array([number for row in rows for number in row], dtype="<f8")
    with np.errstate(over="ignore"):
        narrow = numbers.astype("<f4")
    if np.array_equal(narrow.astype("<f8"), numbers, equal_nan=True):
        numbers = narrow
    # The first bytes of all numbers, then the second, …: signs and exponents are alike, and are compressed together.
    planes = (
        numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize).T
    )  # (bytes per number, numbers)
    lengths = {len(row) for row in rows}
    shape = [len(rows), *lengths] if len(lengths) == 1 else [len(row) for row in rows]
    kind = numbers.dtype.str if len(lengths) == 1 else f"ragged {numbers.dtype.str}"
    return [kind, shape, _pack_bytes(planes.tobytes())]


def _unpack_rows(packed: Sequence[Any]) -> list[list[float]]:
    """Return the rows that `_pack_rows` packed."""
    kind, shape, text = packed
    dtype = np.dtype(kind.removeprefix("ragged "))
    lengths = shape if kind.startswith("ragged") else [shape[1]] * shape[0]
    planes = np.frombuffer(_unpack_bytes(text), np.uint8).reshape(dtype.itemsize, sum(lengths))
    numbers = np.ascontiguousarray(planes.T).reshape(-1).view(dtype).astype(np.float64).tolist()
    rows = []
    start = 0
    for length in lengths:
        rows.append(numbers[start : start + length])
        start += length
    return rows


def _pack_bytes(data: bytes) -> str:
    return base64.b85encode(zlib.compress(data, 9)).decode()


def _unpack_bytes(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


def read_layers(values: Mapping[str, Tensor]) -> list[LayerReading]:
    """Per layer, from the values (layers, heads) of `FOR_PHASES`."""
    layers = []
    for entropy, nonsink, sink, possible, logsumexp in zip(
        *(values[g.name] for g in FOR_PHASES), strict=True
    ):
        most = float(possible.nanmean())
        few = not most >= FEW_KEYS
        pairs = zip(nonsink.tolist(), sink.tolist(), strict=True)
        spread = [
            math.nan if few or math.isnan(m) else 0.0 if m > ALL else n / most for n, m in pairs
        ]
        layers.append(
            LayerReading(float(entropy.nanmean()), most, spread, sink.tolist(), logsumexp.tolist())
        )
    return layers


def nonsink_of_layer(spread: Sequence[float], sink_mass: Sequence[float]) -> float:
    """Mean over the heads that are not sinks; NaN if all are."""
    kept = [n for n, m in zip(spread, sink_mass, strict=True) if math.isfinite(n) and m <= SINK]
    return sum(kept) / len(kept) if kept else math.nan
