"""Sums over the queries of a step per head and gauge: all that is kept of the attention that was seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from joma._events.events import Attention, BlockInput, Event, PassBegins, Place
from joma._gauges.registry import Gauge


@dataclass(frozen=True)
class Layer:
    """One attention layer: the calls whose heads, one after the other, are its heads."""

    name: str
    keys: tuple[Place, ...]


@dataclass
class _Sums:
    heads: int
    source: int | None  # where the module's input lies: parallel one-head modules share it
    total: dict[str, Tensor] = field(default_factory=dict)  # gauge -> (H,)
    count: dict[str, Tensor] = field(default_factory=dict)


class Tally:
    """Observes what a step saw, in passes with gradients and in passes without; the former count if there are any."""

    def __init__(self, attention_gauges: Sequence[Gauge], hidden_gauges: Sequence[Gauge]) -> None:
        self.attention_gauges, self.hidden_gauges = attention_gauges, hidden_gauges
        self.layers: list[Layer] = []
        self.problems: dict[str, str] = {}  # gauge -> what its function raised
        self._sums: dict[bool, dict[Place, _Sums]] = {True: {}, False: {}}
        self._grad = False

    @property
    def wants(self) -> tuple[type[Event], ...]:
        """Hidden states only if there is a gauge for them."""
        return (PassBegins, Attention, BlockInput) if self.hidden_gauges else (PassBegins, Attention)

    def observe(self, event: PassBegins | Attention | BlockInput) -> None:
        """Add what was seen to the sums."""
        if isinstance(event, PassBegins):
            self._grad = event.grad
        elif isinstance(event, Attention):
            self._add_attention(event, *event.place)
        else:
            self._add_hidden(event)

    def clear(self) -> None:
        """Forget everything but the layers."""
        for sums in self._sums.values():
            sums.clear()

    @property
    def seen(self) -> dict[Place, _Sums]:
        """The sums of this step."""
        return self._sums[True] or self._sums[False]

    def _add_attention(self, event: Attention, name: str, invocation: int) -> None:
        """Add the queries of one attention call."""
        if self.attention_gauges:
            _ = event.stats  # may raise: what cannot be measured does not count as seen
        heads, states = event.shape[1], event.call.states
        source = None if states is None else states.data_ptr()
        sums = self._sums[self._grad].setdefault((name, invocation), _Sums(heads, source))
        if sums.heads != heads:  # another attention in the same module
            self._add_attention(event, name, invocation + 1)
            return
        for gauge in self.attention_gauges:
            stats = event.stats
            if (values := self._call(gauge, stats)) is None:
                continue
            if not isinstance(values, Tensor) or values.shape != event.shape:
                shape = tuple(values.shape) if isinstance(values, Tensor) else values
                self.problems[gauge.name] = f"it must give a tensor (B, H, Tq), {event.shape}, not {shape}"
                continue
            if gauge.reduce == "max":
                total, count = stats.largest(values, event.real), torch.zeros(heads, device=values.device)
                old = sums.total.get(gauge.name)
                sums.total[gauge.name] = total if old is None else torch.maximum(old, total)
                sums.count[gauge.name] = count
            else:
                total, count = stats.total(values, event.real)
                sums.total[gauge.name] = sums.total.get(gauge.name, 0) + total
                sums.count[gauge.name] = sums.count.get(gauge.name, 0) + count

    def _add_hidden(self, event: BlockInput) -> None:
        """Add the value of each hidden-state gauge."""
        sums = self._sums[self._grad][event.place]
        for gauge in self.hidden_gauges:
            if (number := self._call(gauge, event.distinct)) is None:
                continue
            value = torch.tensor([float(number)], dtype=torch.float64)
            sums.total[gauge.name] = sums.total.get(gauge.name, 0) + value
            sums.count[gauge.name] = sums.count.get(gauge.name, 0) + torch.ones(1, dtype=torch.float64)

    def _call(self, gauge: Gauge, given: Any) -> Any:
        """A gauge's value, or None if it raised: one that fails takes neither training nor the others down."""
        try:
            return gauge.function(given)
        except Exception as error:
            self.problems[gauge.name] = f"{type(error).__name__}: {error}"
            return None

    def heads(self, layer: int, gauge: str) -> int:
        """How many heads of a layer this gauge was measured on, in this process."""
        seen = self.seen
        return sum(seen[k].heads for k in self.layers[layer].keys if k in seen and gauge in seen[k].total)

    def widths(self) -> list[int]:
        """How many heads each layer has; for one that was not seen, as many as the widest."""
        seen = self.seen
        heads = [sum(seen[key].heads for key in layer.keys if key in seen) for layer in self.layers]
        return [count or max(heads) for count in heads]

    def settle_layers(self, order: Iterable[str], skipped: Iterable[str]) -> range:
        """Number the layers by position in the model, once; later ones are added at the end, and returned.

        Arguments:
            order: names of all modules, in the order of the model.
            skipped: names that are layers though they may not have been seen yet.
        """
        known = {key for layer in self.layers for key in layer.keys}
        fresh = [key for key in self.seen if key not in known]
        if self.layers:
            for key in fresh:
                self.layers.append(Layer(_name(key), (key,)))
            return range(len(self.layers) - len(fresh), len(self.layers))
        position = {name: n for n, name in enumerate(order)}
        keys = {*fresh, *((name, 0) for name in skipped if name in position)}
        groups: dict[tuple[str, int, Any], list[Place]] = {}
        for name, call in sorted(keys, key=lambda key: (position.get(key[0], len(position)), key[1])):
            sums = self.seen.get((name, call))
            parent, _, last = name.rpartition(".")
            alone = sums is None or sums.heads > 1 or sums.source is None or not last.isdigit()
            group: tuple[str, int, Any] = (name, call, None) if alone or sums is None else (parent, call, sums.source)
            groups.setdefault(group, []).append((name, call))
        for (name, call, _), members in groups.items():
            title = _name((name, call)) if len(members) > 1 else _name(members[0])
            self.layers.append(Layer(title, tuple(members)))
        return range(0)

    def values(self, reduce_sum: Any = None, reduce_max: Any = None) -> dict[str, Tensor]:
        """Gauge -> (layers, heads), or (layers,) for hidden-state gauges; NaN where nothing was seen.

        ``reduce_sum`` and ``reduce_max`` combine tensors over processes, in place.
        """
        seen = self.seen
        widest = torch.tensor([float(max(self.widths(), default=0))], dtype=torch.float64)
        if reduce_max is not None:
            reduce_max(widest)
        H = int(widest)
        result = {}
        for gauge in (*self.attention_gauges, *self.hidden_gauges):
            wide = H if gauge.on == "attention" else 1
            largest = gauge.reduce == "max"
            total = torch.full((len(self.layers), wide), -math.inf if largest else 0.0, dtype=torch.float64)
            count = torch.zeros_like(total)
            for n, layer in enumerate(self.layers):
                at = 0
                for key in layer.keys:
                    if key in seen and gauge.name in seen[key].total:
                        part = seen[key].total[gauge.name].double().cpu()
                        total[n, at : at + len(part)] = part
                        count[n, at : at + len(part)] = seen[key].count[gauge.name].double().cpu()
                        at += len(part)
            if largest:
                if reduce_max is not None:
                    reduce_max(total)
                value = torch.where(total == -math.inf, math.nan, total)
            else:
                if reduce_sum is not None:
                    both = torch.stack([total, count])
                    reduce_sum(both)
                    total, count = both
                value = torch.where(count > 0, total / count.clamp(min=1), math.nan)
            result[gauge.name] = value if gauge.on == "attention" else value[:, 0]
        return result


def _name(key: Place) -> str:
    return key[0] if key[1] == 0 else f"{key[0]}#{key[1]}"
