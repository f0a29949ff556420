"""Sums over the queries of a step per head and gauge: all that is kept of the attention that was seen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from joma._measure.events.events import (
    AttentionEvent,
    AttentionRefused,
    BlockInput,
    Event,
    Pass,
    PassBegins,
    Place,
    counted,
)
from joma._measure.gauges.kinds import ATTENTION, KEYS
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.sample import Sampler, estimate
from joma._measure.watch.values import Values
from joma.models.blocks import Blocks

# Passes since a step whose sums are kept apart. Of an older one, whether its gradients were used is known: nobody holds
# the graphs of so many.
_APART = 256
ERROR = "_error"  # a gauge's standard error, where queries are sampled


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
    variance: dict[str, Tensor] = field(
        default_factory=dict
    )  # of the total, where queries are sampled


class Tally:
    """Observes what a step saw; only passes of training count, see `counted`.

    Attributes:
        due: names of the gauges that are measured.
    """

    def __init__(
        self,
        attention_gauges: Sequence[Gauge],
        hidden_gauges: Sequence[Gauge],
        sampler: Sampler | None = None,
    ) -> None:
        self.sampler = sampler
        self.attention_gauges, self.hidden_gauges = attention_gauges, hidden_gauges
        self.due: Collection[str] = [gauge.name for gauge in (*attention_gauges, *hidden_gauges)]
        self.layers: list[Layer] = []
        self.problems: dict[str, str] = {}  # gauge -> what its function raised
        self._sums: dict[Pass, dict[Place, _Sums]] = {}  # of each pass
        self._counts: Counter[Pass] = Counter()  # how many passes an entry of these sums stands for
        self._current: dict[Place, _Sums] = {}
        self._heads: dict[Place, int] = {}
        self._seen: dict[Place, _Sums] | None = (
            None  # the sums of all passes that count, once they are asked for
        )
        self._in_blocks = 0  # layers that are numbered by their block

    @property
    def wants(self) -> tuple[type[Event], ...]:
        """Hidden states only if there is a gauge for them."""
        return (
            PassBegins,
            AttentionEvent,
            AttentionRefused,
            *([BlockInput] if self.hidden_gauges else []),
        )

    def observe(self, event: PassBegins | AttentionEvent | AttentionRefused | BlockInput) -> None:
        """Add what was seen to the sums, or take it out again."""
        self._seen = None
        if isinstance(event, PassBegins):
            self._fold()
            self._current = self._sums.setdefault(event.current, {})
            self._counts[event.current] = 1
        elif isinstance(event, AttentionRefused):
            self._forget(event.call.name)
        elif isinstance(event, AttentionEvent):
            self._add_attention(event, *event.place)
        else:
            self._add_hidden(event)

    def clear(self) -> None:
        """Forget everything but the layers."""
        self._sums.clear()
        self._counts.clear()
        self._heads.clear()
        self._current = {}
        self._seen = None

    def _fold(self) -> None:
        """Add the sums of the oldest pass to those of another one of its kind, if there are too many."""
        if len(self._sums) < _APART:
            return
        oldest = next(iter(self._sums))
        alike = [one for one in self._sums if one is not oldest and _kind(one) == _kind(oldest)]
        if alike:
            sums = self._sums.pop(oldest)
            _add(sums, self._sums[alike[0]], self._largest)
            self._sums[alike[0]] = sums
            self._counts[alike[0]] += self._counts.pop(oldest)

    @property
    def _largest(self) -> set[str]:
        """Names of gauges that are a maximum."""
        return {
            gauge.name
            for gauge in (*self.attention_gauges, *self.hidden_gauges)
            if gauge.reduce == "max"
        }

    def count_left_out(self) -> int:
        """Return how many passes with gradients do not count by their mode alone: none had a backward pass."""
        with_gradients = [one for one, sums in self._sums.items() if one.grad and sums]
        if any(one.has_backward for one in with_gradients):
            return 0
        measured = counted(with_gradients)
        return sum(self._counts[one] for one in with_gradients if one not in measured)

    def _forget(self, module: str) -> None:
        """Nothing of a module's attention counts in this step: part of it would be another number."""
        for sums in self._sums.values():
            for place in [place for place in sums if place[0].split("/")[0] == module]:
                del sums[place]

    @property
    def seen(self) -> dict[Place, _Sums]:
        """The sums of this step."""
        if self._seen is None:
            self._seen = {}
            for one in counted([one for one, sums in self._sums.items() if sums]):
                _add(self._seen, self._sums[one], self._largest)
        return self._seen

    def _add_attention(self, event: AttentionEvent, name: str, invocation: int) -> None:
        """Add the queries of one attention call."""
        positions = None if self.sampler is None else self.sampler.draw(event)
        stats, shape = None, event.shape
        gauges = [gauge for gauge in self.attention_gauges if gauge.name in self.due]
        if gauges:  # may raise: what cannot be measured does not count as seen
            stats = event.stats if positions is None else event.stats_at(positions)
        if positions is not None:
            shape = (*shape[:2], len(positions))
        heads, states = event.shape[1], event.call.states
        source = None if states is None else states.data_ptr()
        known = self._heads.setdefault((name, invocation), heads)
        if known != heads:
            raise ValueError(
                f"it has {heads} heads in this pass, and had {known} before in the same step"
            )
        sums = self._current.setdefault((name, invocation), _Sums(heads, source))
        for gauge in gauges:
            assert stats is not None
            by_key = gauge.kind is KEYS
            wanted = shape[:2] if by_key else shape
            if (values := self._call(gauge, event.received if by_key else stats)) is None:
                continue
            if not isinstance(values, Tensor) or values.shape != wanted:
                given = tuple(values.shape) if isinstance(values, Tensor) else values
                axes = "(B, H)" if by_key else "(B, H, Tq)"
                self.problems[gauge.name] = f"it must give a tensor {axes}, {wanted}, not {given}"
                continue
            if by_key:  # a sample is to these gauges what a query is to the others
                real = (event.received.weights > 0).any(dim=-1)
                largest = torch.where(real, values.double(), -math.inf).amax(dim=0)
                sample_total = (
                    torch.where(real, values.double(), 0.0).sum(dim=0),
                    real.sum(dim=0).double(),
                )
            if gauge.reduce == "max":
                total = largest if by_key else stats.largest(values, _at(event.real, positions))
                count = torch.zeros(heads, device=values.device)
                old = sums.total.get(gauge.name)
                sums.total[gauge.name] = total if old is None else torch.maximum(old, total)
                sums.count[gauge.name] = count
            else:
                if by_key:
                    total, count = sample_total
                elif positions is None:
                    total, count = stats.total(values, event.real)
                else:
                    total, count, variance = estimate(event, stats, values, positions)
                    sums.variance[gauge.name] = sums.variance.get(gauge.name, 0) + variance
                sums.total[gauge.name] = sums.total.get(gauge.name, 0) + total
                sums.count[gauge.name] = sums.count.get(gauge.name, 0) + count

    def _add_hidden(self, event: BlockInput) -> None:
        """Add the value of each hidden-state gauge."""
        if (sums := self._current.get(event.place)) is None:
            return
        for gauge in self.hidden_gauges:
            if gauge.name not in self.due:
                continue
            if (number := self._call(gauge, event.distinct)) is None:
                continue
            value = torch.tensor([float(number)], dtype=torch.float64)
            sums.total[gauge.name] = sums.total.get(gauge.name, 0) + value
            sums.count[gauge.name] = sums.count.get(gauge.name, 0) + torch.ones(
                1, dtype=torch.float64
            )

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
        return sum(
            seen[k].heads for k in self.layers[layer].keys if k in seen and gauge in seen[k].total
        )

    def widths(self) -> list[int]:
        """How many heads each layer has; for one that was not seen, as many as the widest."""
        seen = self.seen
        heads = [sum(seen[key].heads for key in layer.keys if key in seen) for layer in self.layers]
        return [
            (count or max(heads)) if layer.keys else 0
            for count, layer in zip(heads, self.layers, strict=True)
        ]

    def settle_layers(
        self, order: Iterable[str], skipped: Iterable[str], blocks: Blocks
    ) -> list[int]:
        """Number the layers by the blocks they lie in, once; later ones are added, and their numbers returned.

        Arguments:
            order: names of all modules, in the order of the model.
            skipped: names that are layers though they may not have been seen yet.
            blocks: of the model; one without attention is a layer without calls.
        """
        known = {key for layer in self.layers for key in layer.keys}
        fresh = [key for key in self.seen if key not in known]
        if self.layers:
            return [self._add_layer(key, blocks.number(key[0].split("/")[0])) for key in fresh]
        position = {name: n for n, name in enumerate(order)}
        keys = {*fresh, *((name, 0) for name in skipped if name in position)}
        groups: dict[tuple[str, int, Any], list[Place]] = {}
        for name, call in sorted(
            keys, key=lambda key: (position.get(key[0].split("/")[0], len(position)), key)
        ):
            sums = self.seen.get((name, call))
            parent, _, last = name.rpartition(".")
            alone = sums is None or sums.heads > 1 or sums.source is None or not last.isdigit()
            group: tuple[str, int, Any] = (
                (name, call, None) if alone or sums is None else (parent, call, sums.source)
            )
            groups.setdefault(group, []).append((name, call))
        layers = [
            Layer(_name((name, call)) if len(members) > 1 else _name(members[0]), tuple(members))
            for (name, call, _), members in groups.items()
        ]
        self._in_blocks = len(blocks.names)
        rows = blocks.rows(layers, [layer.keys[0][0].split("/")[0] for layer in layers])
        self.layers = [row[0] if row else Layer(blocks.names[n], ()) for n, row in enumerate(rows)]
        return []

    def rename(self, names: Mapping[str, str | None], when: str) -> None:
        """Follow modules whose names changed; a layer of modules that are gone keeps its number, and stays empty."""
        for n, layer in enumerate(self.layers):
            keys = []
            for place, call in layer.keys:
                module, slash, rest = place.partition("/")
                now = names.get(module, module)
                if now is not None:
                    keys.append((f"{now}{slash}{rest}", call))
            if len(keys) == len(layer.keys) and layer.keys:
                name = layer.name if len(keys) > 1 else _name(keys[0])
                self.layers[n] = Layer(name, tuple(keys))
            elif layer.keys:
                self.layers[n] = Layer(f"{layer.name} ({when})", ())

    def _add_layer(self, key: Place, number: int | None) -> int:
        """Attention that was not seen before: that of its block, if the block had none, else one more layer."""
        layer = Layer(_name(key), (key,))
        if number is not None and number < self._in_blocks and not self.layers[number].keys:
            self.layers[number] = layer
            return number
        self.layers.append(layer)
        return len(self.layers) - 1

    def values(self, reduce_sum: Any = None, reduce_max: Any = None) -> dict[str, Values]:
        """Return, by gauge, its table (layers, heads), or (layers,) for hidden-state gauges.

        ``reduce_sum`` and ``reduce_max`` combine tensors over processes, in place.
        """
        widest = torch.tensor([float(max(self.widths(), default=0))], dtype=torch.float64)
        if reduce_max is not None:
            reduce_max(widest)
        H = int(widest)
        result: dict[str, Values] = {}
        for gauge in (*self.attention_gauges, *self.hidden_gauges):
            if gauge.name not in self.due:
                continue
            wide = H if gauge.per_head else 1
            largest = gauge.reduce == "max"
            total = self._table(gauge.name, "total", wide, -math.inf if largest else 0.0)
            count = self._table(gauge.name, "count", wide, 0.0)
            if largest:
                if reduce_max is not None:
                    # a maximum over processes may drop NaN, and it never drops infinity
                    total = torch.where(total.isnan(), math.inf, total)
                    reduce_max(total)
                value = Values.where(total != -math.inf, total)
            else:
                variance = self._table(gauge.name, "variance", wide, 0.0)
                if reduce_sum is not None:
                    together = torch.stack([total, count, variance])
                    reduce_sum(together)
                    total, count, variance = together
                if (
                    self.sampler is not None
                    and gauge.kind is ATTENTION
                    and not gauge.name.startswith("_")
                ):
                    error = variance.sqrt() / count.clamp(min=1)
                    result[f"{gauge.name}{ERROR}"] = Values.where(count > 0, error)
                value = Values.where(count > 0, total / count.clamp(min=1))
            result[gauge.name] = value if gauge.per_head else value.column(0)
        return result

    def _table(self, gauge: str, what: str, width: int, fill: float) -> Tensor:
        """(layers, width) of one of the sums of a gauge."""
        seen = self.seen
        table = torch.full((len(self.layers), width), fill, dtype=torch.float64)
        for n, layer in enumerate(self.layers):
            at = 0
            for key in layer.keys:
                if key in seen and gauge in seen[key].total:
                    size = len(seen[key].total[gauge])
                    if (part := getattr(seen[key], what).get(gauge)) is not None:
                        table[n, at : at + size] = part.double().cpu()
                    at += size
        return table


def _kind(one: Pass) -> tuple[bool, bool, bool]:
    return one.grad, one.in_train_mode, one.has_backward


def _add(sums: dict[Place, _Sums], others: dict[Place, _Sums], largest: Collection[str]) -> None:
    """Add the sums of other passes."""
    for place, other in others.items():
        own = sums.setdefault(place, _Sums(other.heads, other.source))
        for name, total in other.total.items():
            if name not in own.total:
                own.total[name] = total
            elif name in largest:
                own.total[name] = torch.maximum(own.total[name], total)
            else:
                own.total[name] = own.total[name] + total
        for name, count in other.count.items():
            own.count[name] = own.count.get(name, 0) + count
        for name, variance in other.variance.items():
            own.variance[name] = own.variance.get(name, 0) + variance


def _name(key: Place) -> str:
    return key[0] if key[1] == 0 else f"{key[0]}#{key[1]}"


def _at(real: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """Which of the queries at these positions are real; a mask of one column is of all queries."""
    return (
        real if real is None or positions is None or real.shape[-1] == 1 else real[..., positions]
    )
