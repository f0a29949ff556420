"""Gauges of the residual stream, of hidden neurons and of routers, in a model's passes.

Of each block are looked at: its output (the stream), the outputs of the matrices that write to it
(the output projection of attention, the upper MLP matrix; for experts the module around them), the
input of the upper MLP matrix (the hidden neurons), and the output of a router: logits over the
experts, and which of them were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
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
from joma._measure.events.padding import real_tokens
from joma._measure.gauges.kinds import NEURONS, ROUTER, STREAM, STREAM_KINDS, GaugeKind
from joma._measure.gauges.registry import number_or_none
from joma._measure.gauges.stream import Routing, Stream
from joma._measure.watch.meters.meter import Meter, MeterResult
from joma._measure.watch.reducers import REDUCERS, Reducer
from joma._measure.watch.watched import WatchedModel
from joma.models.structure import find


@dataclass
class _BlockCall:
    """What was seen of a block in its call that is under way."""

    written: dict[str, Tensor] = field(default_factory=dict)  # "attention" or "mlp" -> (n, d)
    has_routed: bool = False


@dataclass(frozen=True)
class _Writer:
    """A module that writes to the stream: of which role, and in which block."""

    role: str
    block: int


@dataclass(frozen=True)
class _Experts:
    """The experts of a block: how many, and the module that holds them."""

    count: int
    holder: str


# (gauge, block) -> its reducer, of one pass or of several.
StreamTally = dict[tuple[str, int], Reducer]


class StreamMeter(Meter):
    """Measures gauges on the stream, on neurons and on routers; an observer of passes."""

    title = "streams"
    kinds = STREAM_KINDS
    wants: tuple[type[Event], ...] = (PassBegins, ModuleBegins, ModuleEnds)

    def __init__(self, watched: WatchedModel) -> None:
        super().__init__(watched)
        self._reducer_types = {gauge.name: REDUCERS[gauge.reduce] for gauge in self.gauges}
        self._problems: dict[str, str] = {}  # gauge -> what its function raised
        self._passes: dict[Pass, StreamTally] = {}
        self._current: StreamTally = {}  # of the pass that is under way
        self._under_way: dict[int, _BlockCall] = {}
        self._blocks: list[str] = []
        self._block_of: dict[str, int] = {}
        self._writers: dict[str, _Writer] = {}  # by module
        self._neurons: dict[str, int] = {}  # upper MLP matrix -> block
        self._experts: dict[int, _Experts] = {}  # by block
        self._find()

    # Which modules to look at

    def renew(self) -> None:
        self._writers.clear()
        self._neurons.clear()
        self._experts.clear()
        self._find()

    def _find(self) -> None:
        if not self.gauges:
            return
        model = self.watched.model
        blocks = self.watched.blocks
        self._blocks = blocks.names
        if not self._blocks:
            raise ValueError(
                f"{self.gauges[0].name} is measured on blocks; none were found in "
                f"{type(model).__name__}"
            )
        self._block_of = {name: number for number, name in enumerate(self._blocks)}
        structure = find(model)
        modules = structure.modules
        names = {module: name for name, module in modules.items()}
        for module in structure.attention_writers:
            block = blocks.number(names[module])
            if block is not None:
                self._writers.setdefault(names[module], _Writer("attention", block))
        upper = [matrix.name for matrix in structure.matrices("mlp_out")]
        rows = blocks.rows(upper, upper, experts=True)
        for block, row in enumerate(rows[: len(self._blocks)]):
            self._find_mlp(block, row, modules)
        self._check_kinds()

    def _find_mlp(self, block: int, row: list[str], modules: Mapping[str, nn.Module]) -> None:
        if len(row) == 1 and row[0] in modules:
            # The neurons of a convolution come before the tokens.
            if not isinstance(modules[row[0]], nn.modules.conv._ConvNd):
                self._neurons[row[0]] = block
                self._writers[row[0]] = _Writer("mlp", block)
        elif len(row) > 1 and ".experts" in row[0]:
            around = row[0].split(".experts")[0]
            self._writers[around] = _Writer("mlp", block)
            self._experts[block] = _Experts(len(row), f"{around}.experts")

    def _check_kinds(self) -> None:
        missing: dict[GaugeKind, str] = {}
        if not self._neurons:
            missing[NEURONS] = "hidden neurons of an MLP per block"
        if not self._experts:
            missing[ROUTER] = "routers of experts"
        for gauge in self.gauges:
            if gauge.kind in missing:
                raise ValueError(
                    f"{gauge.name} is measured on {missing[gauge.kind]}, and none were found in "
                    f"{type(self.watched.model).__name__}"
                )

    @property
    def observers(self) -> list[Observer]:
        if self.gauges:
            return [self]
        return []

    @property
    def names(self) -> Mapping[str, list[str]]:
        return {gauge.name: self._blocks for gauge in self.gauges}

    @property
    def widths(self) -> Mapping[str, list[int]]:
        """Gauge -> 1 for blocks that it can be measured on, else 0."""
        every_block = range(len(self._blocks))
        blocks_of: dict[GaugeKind, Collection[int]] = {
            STREAM: every_block,
            NEURONS: set(self._neurons.values()),
            ROUTER: self._experts,
        }
        widths = {}
        for gauge in self.gauges:
            measurable = blocks_of[gauge.kind]
            widths[gauge.name] = [int(block in measurable) for block in every_block]
        return widths

    # In a pass

    def observe(self, event: PassBegins | ModuleBegins | ModuleEnds) -> None:
        """A pass, or a module in it, begins or ends."""
        if isinstance(event, PassBegins):
            self._current = self._passes.setdefault(event.current, {})
            self._under_way.clear()
        elif isinstance(event, ModuleBegins):
            self._look_at_neurons(event)
        else:
            self._look_at_output(event)

    def _look_at_neurons(self, event: ModuleBegins) -> None:
        block = self._neurons.get(event.call.name)
        if block is not None and self._is_due(NEURONS):
            self._measure_block(NEURONS, block, self._rows(event, event.call.states))

    def _look_at_output(self, event: ModuleEnds) -> None:
        name = event.call.name
        if name in self._block_of:
            block = self._block_of[name]
            call = self._under_way.pop(block, _BlockCall())
            states = self._rows(event, _first_tensor(event.output))
            if self._is_due(STREAM) and states is not None:
                stream = Stream(states, call.written.get("attention"), call.written.get("mlp"))
                self._measure_block(STREAM, block, stream)
        elif name in self._writers and self._is_due(STREAM):
            writer = self._writers[name]
            written = self._rows(event, _first_tensor(event.output))
            if written is not None:
                call = self._under_way.setdefault(writer.block, _BlockCall())
                call.written[writer.role] = written
        elif self._experts and self._is_due(ROUTER):
            self._look_for_router(event)

    def _look_for_router(self, event: ModuleEnds) -> None:
        """Measure this module if it lies in a block with experts and gives a logit per expert."""
        name = event.call.name
        for block, experts in self._experts.items():
            is_inside = name.startswith(f"{self._blocks[block]}.")
            if not is_inside or name.startswith(experts.holder):
                continue
            call = self._under_way.setdefault(block, _BlockCall())
            outputs = [event.output]
            if isinstance(event.output, (tuple, list)):
                outputs = list(event.output)
            logits = _find_logits(outputs, experts.count)
            if call.has_routed or logits is None:
                return
            choices = _find_choices(event, outputs, logits)
            call.has_routed = True
            logit_rows = self._rows(event, logits)
            choice_rows = self._rows(event, choices)
            if logit_rows is not None and choice_rows is not None:
                self._measure_block(ROUTER, block, Routing(logit_rows, choice_rows))
            return

    def _is_due(self, kind: GaugeKind) -> bool:
        return any(gauge.kind is kind and gauge.name in self.due for gauge in self.gauges)

    def _rows(self, event: Event, states: Tensor | None) -> Tensor | None:
        """Return the states (n, d) of real tokens, of (B, T, d) or (B·T, d)."""
        if states is None or states.dim() not in (2, 3):
            return None
        flat = states.detach().flatten(0, -2)  # (B·T, d)
        shape = _batch_shape(event, states)
        if math.prod(shape) != len(flat):
            return flat
        real = real_tokens(event.calls, self.watched.padding, shape[0], shape[1], states.device)
        if real is None:
            return flat
        return flat[real[:, 0].expand(*shape).flatten()]  # (n, d)

    def _measure_block(self, kind: GaugeKind, block: int, received: Any) -> None:
        if received is None:
            return
        for gauge in self.gauges:
            if gauge.kind is not kind or gauge.name not in self.due:
                continue
            try:
                value = number_or_none(gauge.function(received))
            except Exception as error:  # a gauge must not stop the training
                self._problems[gauge.name] = f"{type(error).__name__}: {error}"
                continue
            if value is None:  # not defined here
                continue
            key = (gauge.name, block)
            if key not in self._current:
                self._current[key] = self._reducer_types[gauge.name]()
            self._current[key].add_number(value)

    # A measurement

    def measure(self, step: int, due: Collection[str]) -> MeterResult:
        """Return one number per block: the mean or the largest over the passes that count."""
        self.due = due
        result = MeterResult()
        combined = self._combine_passes()
        for gauge in self.due_gauges:
            table = self._reducer_types[gauge.name].table(len(self._blocks), 1)
            for (name, block), reducer in combined.items():
                if name == gauge.name:
                    table.put(block, 0, reducer)
            table.combine(self.watched.processes)
            result.tables[gauge.name] = table.result().table(gauge.name).first_column()  # (blocks,)
        for name, reason in self._problems.items():
            result.report(("gauge", name), f"step {step}: {name} could not be measured: {reason}")
        return result

    def _combine_passes(self) -> StreamTally:
        """Return the reducers over the passes that count."""
        combined: StreamTally = {}
        for one in counted(list(self._passes)):
            for key, reducer in self._passes[one].items():
                if key in combined:
                    combined[key].merge(reducer)
                else:
                    combined[key] = reducer.copy()
        return combined

    def clear(self) -> None:
        self._passes.clear()
        self._current = {}
        self._under_way.clear()


def _batch_shape(event: Event, states: Tensor) -> tuple[int, int]:
    """Return (B, T) of states (B, T, d), or of states (B·T, d) from the module around them."""
    if states.dim() == 3:
        return states.shape[0], states.shape[1]
    shape = (1, len(states))
    for call in event.calls:
        if call.states is not None and call.states.dim() == 3:
            shape = (call.states.shape[0], call.states.shape[1])
    return shape


def _find_logits(outputs: Any, experts: int) -> Tensor | None:
    """Return the first output with one number per expert."""
    for output in outputs:
        is_floating = isinstance(output, Tensor) and output.is_floating_point()
        if is_floating and output.shape[-1] == experts:
            return output
    return None


def _find_choices(event: ModuleEnds, outputs: Any, logits: Tensor) -> Tensor:
    """Return the chosen experts of each token: given by the router, or the largest logits."""
    for output in outputs:
        if isinstance(output, Tensor) and output.dtype in (torch.int64, torch.int32):
            return output
    for module in (event.call.module, *(call.module for call in reversed(event.calls))):
        top_k = getattr(module, "top_k", None)
        if isinstance(top_k, int):
            return logits.topk(top_k, dim=-1).indices
    raise ValueError("it does not say how many experts a token is sent to (no indices, no top_k)")


def _first_tensor(output: Any) -> Tensor | None:
    """Return the output of a module, or the first part of it."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, Tensor):
        return output
    return None
