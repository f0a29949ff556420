"""Gauges of the residual stream, of hidden neurons and of routers, in a model's passes.

What is looked at, per block: its output (the stream), the outputs of the matrices that write to it (the output
projection of attention, the upper MLP matrix; for experts the module around them), the input of the upper MLP matrix
(the hidden neurons), and what a router gives: logits over the experts and which of them were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from joma._measure.events.events import (
    Event,
    ModuleBegins,
    ModuleEnds,
    Observer,
    Pass,
    PassBegins,
    counted,
)
from joma._measure.events.padding import StatedPadding, real_tokens
from joma._measure.gauges.kinds import NEURONS, ROUTER, STREAM, STREAM_KINDS, GaugeKind
from joma._measure.gauges.registry import Gauge, number_or_none
from joma._measure.gauges.stream import Routing, Stream
from joma._measure.watch.processes import Processes
from joma._measure.watch.values import Values
from joma.models.blocks import Blocks
from joma.models.structure import find


@dataclass
class _Seen:
    """What was seen of a block in its call that is under way."""

    written: dict[str, Tensor] = field(default_factory=dict)  # "attention" or "mlp" -> (n, d)
    routed: bool = False


class Streams:
    """Measures gauges on the stream, on neurons and on routers; an observer of passes.

    Attributes:
        due: names of the gauges that are measured in the step to come.
        problems: gauge -> why it could not be measured.
    """

    wants: tuple[type[Event], ...] = (PassBegins, ModuleBegins, ModuleEnds)

    def __init__(
        self, model: nn.Module, gauges: Sequence[Gauge], padding: StatedPadding | None, processes: Processes,
        blocks: Blocks,
    ) -> None:  # fmt: skip
        self.gauges = [gauge for gauge in gauges if gauge.kind in STREAM_KINDS]
        self.due: Collection[str] = [gauge.name for gauge in self.gauges]
        self.problems: dict[str, str] = {}
        self._padding, self._processes = padding, processes
        self._numbering = blocks
        # of each pass: (gauge, block) -> sum or largest, and how many
        self._passes: dict[Pass, dict[tuple[str, int], tuple[float, int]]] = {}
        self._sums: dict[tuple[str, int], tuple[float, int]] = {}  # of the pass that is under way
        self._under_way: dict[int, _Seen] = {}
        self._blocks: list[str] = []
        self._block_of: dict[str, int] = {}
        self._writers: dict[str, tuple[str, int]] = {}  # module -> what it writes, and its block
        self._neurons: dict[str, int] = {}  # upper MLP matrix -> block
        self._experts: dict[
            int, tuple[int, str]
        ] = {}  # block -> how many, and the module that holds them
        if self.gauges:
            self._find(model, blocks)

    def _find(self, model: nn.Module, blocks: Blocks) -> None:
        """Which modules to look at."""
        self._blocks = blocks.names
        if not self._blocks:
            raise ValueError(
                f"{self.gauges[0].name} is measured on blocks; none were found in {type(model).__name__}"
            )
        structure = find(model)
        modules = structure.modules
        self._block_of = {name: n for n, name in enumerate(self._blocks)}
        names = {module: name for name, module in modules.items()}
        for module in structure.attention_writers:
            if (n := blocks.number(names[module])) is not None:
                self._writers.setdefault(names[module], ("attention", n))
        upper = [matrix.name for matrix in structure.matrices("mlp_out")]
        for n, row in enumerate(blocks.rows(upper, upper, experts=True)[: len(self._blocks)]):
            if len(row) == 1 and isinstance(modules.get(row[0]), nn.modules.conv._ConvNd):
                continue  # its neurons come before the tokens
            if len(row) == 1 and row[0] in modules:
                self._neurons[row[0]] = n
                self._writers[row[0]] = "mlp", n
            elif len(row) > 1 and ".experts" in row[0]:
                around = row[0].split(".experts")[0]
                self._writers[around] = "mlp", n
                self._experts[n] = len(row), f"{around}.experts"
        lacking = {
            NEURONS: "hidden neurons of an MLP per block" if not self._neurons else "",
            ROUTER: "routers of experts" if not self._experts else "",
        }
        for gauge in self.gauges:
            if missing := lacking.get(gauge.kind):
                raise ValueError(
                    f"{gauge.name} is measured on {missing}, and none were found in {type(model).__name__}"
                )

    def renew(self, model: nn.Module) -> None:
        """Find the modules of a model that was changed."""
        self._writers.clear()
        self._neurons.clear()
        self._experts.clear()
        if self.gauges:
            self._find(model, self._numbering)

    @property
    def observers(self) -> list[Observer]:
        """Of passes, if there is anything to measure."""
        return [self] if self.gauges else []

    @property
    def names(self) -> dict[str, list[str]]:
        """Gauge -> the block of each layer."""
        return {gauge.name: self._blocks for gauge in self.gauges}

    @property
    def widths(self) -> dict[str, list[int]]:
        """Gauge -> 1 for blocks that it can be measured on, else 0."""
        every = range(len(self._blocks))
        there: dict[GaugeKind, Collection[int]] = {
            STREAM: every,
            NEURONS: self._neurons.values(),
            ROUTER: self._experts,
        }
        return {gauge.name: [int(n in there[gauge.kind]) for n in every] for gauge in self.gauges}

    # In a pass

    def observe(self, event: PassBegins | ModuleBegins | ModuleEnds) -> None:
        """A pass, or a module in it, begins or ends."""
        if isinstance(event, PassBegins):
            self._sums = self._passes.setdefault(event.current, {})
            self._under_way.clear()
            return
        name = event.call.name
        if isinstance(event, ModuleBegins):
            if (n := self._neurons.get(name)) is not None and self._wanted(NEURONS):
                self._measure(NEURONS, n, self._rows(event, event.call.states))
            return
        n = self._block_of.get(name)
        if n is not None:
            seen = self._under_way.pop(n, _Seen())
            states = self._rows(event, _tensor(event.output))
            if self._wanted(STREAM) and states is not None:
                self._measure(
                    STREAM,
                    n,
                    Stream(states, seen.written.get("attention"), seen.written.get("mlp")),
                )
        elif name in self._writers and self._wanted(STREAM):
            what, n = self._writers[name]
            if (written := self._rows(event, _tensor(event.output))) is not None:
                self._under_way.setdefault(n, _Seen()).written[what] = written
        elif self._experts and self._wanted(ROUTER):
            self._look_for_router(event, name)

    def _look_for_router(self, event: ModuleEnds, name: str) -> None:
        """Is this module, in a block with experts, the one that gives a logit per expert?"""
        for n, (experts, holder) in self._experts.items():
            if not name.startswith(f"{self._blocks[n]}.") or name.startswith(holder):
                continue
            seen = self._under_way.setdefault(n, _Seen())
            parts = event.output if isinstance(event.output, (tuple, list)) else [event.output]
            logits = next(
                (
                    x
                    for x in parts
                    if isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] == experts
                ),
                None,
            )
            if seen.routed or logits is None:
                return
            chosen = next(
                (
                    x
                    for x in parts
                    if isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)
                ),
                None,
            )
            around = [event.call.module, *(call.module for call in reversed(event.calls))]
            k = next(
                (k for module in around if isinstance(k := getattr(module, "top_k", None), int)),
                None,
            )
            if chosen is None and k is not None:
                chosen = logits.topk(k, dim=-1).indices
            if chosen is None:
                raise ValueError(
                    "it does not say how many experts a token is sent to (no indices, no top_k)"
                )
            seen.routed = True
            rows, experts_of = self._rows(event, logits), self._rows(event, chosen)
            if rows is not None and experts_of is not None:
                self._measure(ROUTER, n, Routing(rows, experts_of))
            return

    def _wanted(self, kind: GaugeKind) -> bool:
        return any(gauge.kind is kind and gauge.name in self.due for gauge in self.gauges)

    def _rows(self, event: Event, states: Tensor | None) -> Tensor | None:
        """The states (n, d) of real tokens, of (B, T, d) or (B·T, d)."""
        if states is None or states.dim() not in (2, 3):
            return None
        flat = states.detach().flatten(0, -2)
        around = [
            call.states
            for call in event.calls
            if call.states is not None and call.states.dim() == 3
        ]
        shape = (
            states.shape[:2]
            if states.dim() == 3
            else around[-1].shape[:2]
            if around
            else (1, len(flat))
        )
        if math.prod(shape) != len(flat):
            return flat
        real = real_tokens(event.calls, self._padding, shape[0], shape[1], states.device)
        return flat if real is None else flat[real[:, 0].expand(*shape).flatten()]

    def _measure(self, kind: GaugeKind, block: int, given: Any) -> None:
        for gauge in self.gauges:
            if gauge.kind is not kind or gauge.name not in self.due or given is None:
                continue
            try:
                value = number_or_none(gauge.function(given))
            except Exception as error:  # nothing that is measured may stop the training
                self.problems[gauge.name] = f"{type(error).__name__}: {error}"
                continue
            if value is None:  # not defined here
                continue
            _add(self._sums, gauge, block, value, 1)

    # A measurement

    def measure(self) -> dict[str, Values]:
        """Gauge -> (blocks,): over the passes since the last `clear`, the mean or the largest."""
        values = {}
        sums = self._sums_of_training()
        for gauge in self.gauges:
            if gauge.name not in self.due:
                continue
            pairs = [sums.get((gauge.name, n), (0.0, 0)) for n in range(len(self._blocks))]
            total, count = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
            if gauge.reduce == "max":
                # a maximum over processes may drop NaN, and it never drops infinity
                if self._processes.is_joint:
                    total = torch.where(total.isnan(), math.inf, total)
                total = self._processes.max_(torch.where(count > 0, total, -math.inf))
                values[gauge.name] = Values.where(total != -math.inf, total)
            else:
                both = self._processes.sum_(torch.stack([total, count]))
                values[gauge.name] = Values.where(both[1] > 0, both[0] / both[1].clamp(min=1))
        return values

    def _sums_of_training(self) -> dict[tuple[str, int], tuple[float, int]]:
        """Return the sums over the passes that count."""
        gauges = {gauge.name: gauge for gauge in self.gauges}
        sums: dict[tuple[str, int], tuple[float, int]] = {}
        for one in counted(list(self._passes)):
            for (name, block), (value, count) in self._passes[one].items():
                _add(sums, gauges[name], block, value, count)
        return sums

    def clear(self) -> None:
        """Forget the passes that were seen."""
        self._passes.clear()
        self._sums = {}
        self._under_way.clear()


def _add(
    sums: dict[tuple[str, int], tuple[float, int]],
    gauge: Gauge,
    block: int,
    value: float,
    count: int,
) -> None:
    """Add a value, or the sum of ``count`` values, of a gauge in a block."""
    old, old_count = sums.get((gauge.name, block), (0.0, 0))
    if gauge.reduce == "max":
        largest = _larger(old, value) if old_count else value
        sums[gauge.name, block] = largest, old_count + count
    else:
        sums[gauge.name, block] = old + value, old_count + count


def _larger(a: float, b: float) -> float:
    """Return the larger of two numbers, or NaN if one of them is NaN, which `max` may drop."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _tensor(output: Any) -> Tensor | None:
    """What a module gave, or the first part of it."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) else None
