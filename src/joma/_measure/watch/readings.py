"""Readings: the numbers of one measurement that phases and alarms look at.

They are small enough that a run folder keeps all of them.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from joma._measure.gauges.attention import AttentionStats
from joma._measure.gauges.kinds import ATTENTION
from joma._measure.gauges.registry import Gauge
from joma._runs.long_table import LongTable

# Mean mass on sinks above which a head is a sink, and above which it attends to nothing else.
SINK_MASS = 0.9
FULL_SINK_MASS = 0.99

# Nats. Non-sink attention that can spread no further than this is low whatever the model does.
LEAST_POSSIBLE = 1.0

# Shares of the largest possible non-sink entropy: 0.1 and 0.2 nats of 2.5.
LOW = 0.04
RECOVERED = 0.08

# Levels of a head's non-sink attention. Rules about collapse need no more of a healthy head than
# its level. So a run folder keeps one letter per head, and the number only where it is not high.
UNKNOWN_LEVEL = "?"
LOW_LEVEL = "l"
MIDDLE_LEVEL = "m"
HIGH_LEVEL = "h"


def _possible(stats: AttentionStats) -> Tensor:
    """Return the largest possible non-sink entropy of each query: the sink takes one key."""
    return (stats.visible - 1).clamp(min=1).log().expand_as(stats.entropy)


def _uniform(stats: AttentionStats) -> Tensor:
    """Return the entropy of uniform attention, ln(visible keys), of each query."""
    return stats.visible.clamp(min=1).log().expand_as(stats.entropy)


# Measured whatever gauges are asked for: the statistics behind them are computed anyway.
FOR_PHASES = (
    Gauge("_entropy", ATTENTION, lambda stats: stats.entropy, ""),
    Gauge("_nonsink", ATTENTION, lambda stats: stats.nonsink_entropy, ""),
    Gauge("_sink", ATTENTION, lambda stats: stats.sink_mass, ""),
    Gauge("_possible", ATTENTION, _possible, ""),
    Gauge("_logsumexp", ATTENTION, lambda stats: stats.logsumexp, "", reduce="max"),
)

# Likewise, for figures.
UNIFORM = Gauge("_uniform", ATTENTION, _uniform, "")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong at one measurement.

    Attributes:
        kind: of the alert that it will be.
        layer: its number; None if it is not about one layer.
        head: its number; None if it is about a whole layer.
        gauge: what was measured.
        value: of the gauge.
        threshold: number that the value is beyond; None if there is none.
        module: name of the module, if it is not the layer.
        later: modules in which the same was found after it.
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
    """The numbers of one attention layer that rules look at."""

    @property
    def entropy(self) -> float:
        """Mean entropy over heads, in nats."""

    @property
    def possible(self) -> float:
        """Largest possible non-sink entropy, in nats."""

    @property
    def nonsink(self) -> float:
        """Mean spread of the heads that are not sinks; NaN if all are."""

    @property
    def levels(self) -> str:
        """One letter per head: the level of its spread."""

    @property
    def spread(self) -> Sequence[float]:
        """Per head: non-sink entropy as a share of the possible one."""

    @property
    def logsumexp(self) -> Sequence[float]:
        """Per head: the largest logsumexp."""


@dataclass(frozen=True)
class LayerReading:
    """One attention layer at one measurement. NaN stands for a head without a meaningful value.

    Attributes:
        entropy: mean over heads, in nats.
        possible: largest possible non-sink entropy, in nats.
        spread: per head: non-sink entropy as a share of the possible one; 0 if all mass is on
            sinks.
        sink: per head: mean mass on sinks.
        logsumexp: per head: the largest.
    """

    entropy: float
    possible: float
    spread: Sequence[float] = ()
    sink: Sequence[float] = ()
    logsumexp: Sequence[float] = ()

    # Several rules and the run folder ask for both.
    @cached_property
    def nonsink(self) -> float:
        """Mean spread of the heads that are not sinks; NaN if all are."""
        return nonsink_of_layer(self.spread, self.sink)

    @cached_property
    def levels(self) -> str:
        """One letter per head: the level of its spread."""
        pairs = zip(self.spread, self.sink, strict=True)
        return "".join(level_of_head(spread, sink) for spread, sink in pairs)


@dataclass(frozen=True)
class StoredLayer:
    """The part of a `LayerReading` that a run folder keeps. Rules judge it alike."""

    entropy: float
    possible: float
    nonsink: float
    levels: str
    spread: Sequence[float]  # per head; NaN where the level is high or unknown
    logsumexp: Sequence[float]


def level_of_head(spread: float, sink: float) -> str:
    """Return the level of a head. A sink that also attends elsewhere is healthy."""
    if math.isnan(spread) or math.isnan(sink):
        return UNKNOWN_LEVEL
    if SINK_MASS < sink <= FULL_SINK_MASS or spread > RECOVERED:
        return HIGH_LEVEL
    if spread < LOW:
        return LOW_LEVEL
    return MIDDLE_LEVEL


@dataclass(frozen=True)
class Reading:
    """The numbers of one measurement.

    Attributes:
        step: of the measurement.
        loss: None if it is unknown.
        layers: one per attention layer.
        gauges: gauge -> values per layer, one per head if it has heads.
        findings: problems with other evidence than these numbers.
    """

    step: int
    loss: float | None
    layers: Sequence[AttentionReading] = ()
    gauges: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()

    def to_json(self) -> list[Any]:
        """Return the numbers that rules need, to the last bit; the step comes first."""
        means = [[layer.entropy, layer.possible, layer.nonsink] for layer in self.layers]
        levels = " ".join(layer.levels for layer in self.layers)
        logsumexp: list[Any] = []
        if "max_logit" not in self.gauges:  # rules look at one of the two only
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
        """Return the reading that `to_json` gave, with a `StoredLayer` per layer."""
        step, loss, packed_means, packed_levels, spreads, packed_logsumexp, gauges, findings = row
        means = _unpack_rows(packed_means)  # per layer: entropy, possible, nonsink
        levels = _unpack_bytes(packed_levels).decode().split(" ")[: len(means)]
        if loss is not None:
            loss = float(loss)
        logsumexp: list[list[float]] = [[] for _ in means]
        if packed_logsumexp:
            logsumexp = _unpack_rows(packed_logsumexp)
        layers = []
        columns = zip(means, levels, _unpack_rows(spreads), logsumexp, strict=True)
        for (entropy, possible, nonsink), heads, below_high, largest in columns:
            spread = _with_nan(heads, below_high)
            layers.append(StoredLayer(entropy, possible, nonsink, heads, spread, largest))
        return cls(
            step=int(step),
            loss=loss,
            layers=layers,
            gauges={gauge: _unpack_rows(rows) for gauge, rows in gauges.items()},
            findings=[Finding.from_json(finding) for finding in findings],
        )


def _below_high(layer: AttentionReading) -> list[float]:
    """Return the spread of the heads whose level is low or in the middle."""
    pairs = zip(layer.levels, layer.spread, strict=True)
    return [spread for level, spread in pairs if level in (LOW_LEVEL, MIDDLE_LEVEL)]


def _with_nan(levels: str, below_high: Sequence[float]) -> list[float]:
    """Return one spread per head, from those that `_below_high` gave."""
    numbers = iter(below_high)
    spread = []
    for level in levels:
        if level in (LOW_LEVEL, MIDDLE_LEVEL):
            spread.append(next(numbers))
        else:
            spread.append(math.nan)
    return spread


def _pack_rows(rows: Sequence[Sequence[float]]) -> list[Any]:
    """Return rows of numbers as [type, shape, text], 4 characters per head instead of 20.

    The type is float32 if that loses nothing, as for the numbers of a float32 model. The shape is
    [rows, columns], or the length of each row if the type says "ragged".
    """
    flat: list[float] = []
    for row in rows:
        flat += row
    numbers = np.array(flat, dtype="<f8")
    with np.errstate(over="ignore"):
        narrow = numbers.astype("<f4")
    if np.array_equal(narrow.astype("<f8"), numbers, equal_nan=True):
        numbers = narrow
    # The first bytes of all numbers, then the second, …: signs and exponents are alike, and zlib
    # compresses them together.
    as_bytes = numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)
    planes = as_bytes.T  # (bytes per number, numbers)
    lengths = [len(row) for row in rows]
    kind = numbers.dtype.str
    shape = lengths
    if len(set(lengths)) == 1:
        shape = [len(rows), lengths[0]]
    else:
        kind = f"ragged {kind}"
    return [kind, shape, _pack_bytes(planes.tobytes())]


def _unpack_rows(packed: Sequence[Any]) -> list[list[float]]:
    """Return the rows that `_pack_rows` packed."""
    kind, shape, text = packed
    dtype = np.dtype(kind.removeprefix("ragged "))
    if kind.startswith("ragged"):
        lengths = shape
    else:
        row_count, column_count = shape
        lengths = [column_count] * row_count
    planes = np.frombuffer(_unpack_bytes(text), np.uint8)
    planes = planes.reshape(dtype.itemsize, sum(lengths))  # (bytes per number, numbers)
    as_bytes = np.ascontiguousarray(planes.T).reshape(-1)
    numbers = as_bytes.view(dtype).astype(np.float64).tolist()
    rows = []
    start = 0
    for length in lengths:
        rows.append(numbers[start : start + length])
        start += length
    return rows


def _pack_bytes(data: bytes) -> str:
    # A window and tables as large as the data need: those of the default are 256 KiB, and to clear
    # them for a few numbers takes four times as long as to compress these.
    bits = len(data).bit_length()
    window = min(15, max(9, bits))
    memory = min(8, max(1, bits - 6))
    compressor = zlib.compressobj(9, zlib.DEFLATED, window, memory)
    packed = compressor.compress(data) + compressor.flush()
    return base64.b85encode(packed).decode()


def _unpack_bytes(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


def take_layers(tables: dict[str, LongTable]) -> list[LayerReading]:
    """Remove the tables of `FOR_PHASES`, and return one reading per layer; [] if nothing ran."""
    columns = []
    for gauge in FOR_PHASES:
        table = tables.pop(gauge.name, None)
        if table is None:
            return []
        columns.append(torch.from_numpy(table.array(gauge.name)))  # (layers, heads)
    entropy, nonsink, sink, possible, logsumexp = columns
    rows = zip(
        entropy.nanmean(dim=1).tolist(),
        possible.nanmean(dim=1).tolist(),
        nonsink.tolist(),
        sink.tolist(),
        logsumexp.tolist(),
        strict=True,
    )
    layers = []
    for mean_entropy, largest, entropies, sink_masses, largest_logsumexp in rows:
        layers.append(
            LayerReading(
                entropy=mean_entropy,
                possible=largest,
                spread=_spreads(entropies, sink_masses, largest),
                sink=sink_masses,
                logsumexp=largest_logsumexp,
            )
        )
    return layers


def take_uniform(tables: dict[str, LongTable]) -> list[float] | None:
    """Remove the table of `UNIFORM`, and return its mean per layer; None if nothing ran."""
    table = tables.pop(UNIFORM.name, None)
    if table is None:
        return None
    levels = torch.from_numpy(table.array(UNIFORM.name))  # (layers, heads)
    means: list[float] = levels.nanmean(dim=1).tolist()
    return means


def _spreads(
    nonsink: Sequence[float], sink_masses: Sequence[float], possible: float
) -> list[float]:
    """Return non-sink entropy as a share of the possible one, per head."""
    spreads = []
    for entropy, sink_mass in zip(nonsink, sink_masses, strict=True):
        # `not >=` is also True for NaN.
        if not possible >= LEAST_POSSIBLE or math.isnan(sink_mass):
            spreads.append(math.nan)
        elif sink_mass > FULL_SINK_MASS:
            spreads.append(0.0)
        else:
            spreads.append(entropy / possible)
    return spreads


def nonsink_of_layer(spreads: Sequence[float], sink_masses: Sequence[float]) -> float:
    """Return the mean spread of the heads that are not sinks; NaN if all are."""
    counted = []
    for spread, sink_mass in zip(spreads, sink_masses, strict=True):
        if math.isfinite(spread) and sink_mass <= SINK_MASS:
            counted.append(spread)
    if not counted:
        return math.nan
    return sum(counted) / len(counted)
