"""Gauges on what happened to each block between two measurements.

The gauges themselves, and the theory behind them, are in `joma._measure.gauges.assumptions`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from joma._measure.events.events import AttentionEvent, Event, Observer
from joma._measure.events.optimiser import StepBegins, StepObserver
from joma._measure.gauges.assumptions import PARTS, QUERY_BIAS, BlockMotion, share_missed
from joma._measure.gauges.kinds import BLOCK
from joma._measure.gauges.registry import number_or_none
from joma._measure.watch.meters.meter import Meter, MeterResult
from joma._measure.watch.watched import WatchedModel
from joma._runs.long_table import LongTable
from joma.models.matrices import Matrix
from joma.models.projections import query_bias
from joma.models.sharded import gather
from joma.models.structure import find

# Inputs of attention that are kept per block. The logits of all pairs of them are compared.
MAX_TOKENS = 64
# Queries whose logits are compared with those of the module.
CHECKED_QUERIES = 8
# Share of the logits that may be missed: half precision misses a few per cent.
MAX_MISSED_SHARE = 0.1
# Gauges that have no value where attention is not the softmax of the logits of the weights.
LOGIT_GAUGES = ("attention_drift", "eqn17_residual")


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The matrices of one block that these gauges compare.

    Attributes:
        name: of its attention module.
        attention: that module.
        matrices: part -> matrix, for all of `PARTS`.
    """

    name: str
    attention: nn.Module
    matrices: Mapping[str, Matrix]

    def read(self, parts: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of some of its weights, and the bias of queries if it has one."""
        weights = {}
        for part in parts:
            views = [gather(view) for view in self.matrices[part].read()]
            weights[part] = torch.cat(views).clone()
        bias = query_bias(self.attention)
        if bias is not None:
            weights[QUERY_BIAS] = bias.clone()
        return weights


@dataclass(frozen=True, eq=False)
class AttentionInput:
    """Some distinct rows (n, d) of what an attention module receives, and its number of heads."""

    states: Tensor
    heads: int


class InputObserver:
    """Keeps the first input of each attention module since the last `clear`.

    It also tests whether the attention of a module is the softmax of the logits of its weights, as
    `BlockMotion.logits` has it.

    Attributes:
        inputs: by module.
        missed: module -> the share of its logits that the weights do not explain.
    """

    wants: tuple[type[Event], ...] = (AttentionEvent,)

    def __init__(self) -> None:
        self.inputs: dict[str, AttentionInput] = {}
        self.missed: dict[str, float] = {}
        self._blocks: dict[str, BlockParts] = {}

    def restart(self, blocks: Sequence[BlockParts]) -> None:
        """Look at these blocks from now on."""
        self.inputs.clear()
        self.missed.clear()
        self._blocks = {block.name: block for block in blocks}

    def observe(self, event: AttentionEvent) -> None:
        """Keep some distinct rows of the module's input."""
        name = event.call.name
        states = event.call.states
        if name in self.inputs or name not in self._blocks:
            return
        if states is None or states.dim() != 3:
            return
        states = states.detach()
        rows = states.flatten(0, 1)  # (B·T, d)
        stride = max(1, len(rows) // (4 * MAX_TOKENS))
        rows = torch.unique(rows[::stride], dim=0)  # (distinct rows, d)
        stride = -(-len(rows) // MAX_TOKENS)
        self.inputs[name] = AttentionInput(rows[::stride], event.shape[1])
        with torch.no_grad():
            self.missed[name] = self._missed_share(event, states)

    def _missed_share(self, event: AttentionEvent, states: Tensor) -> float:
        """Return the share of the logits of some real queries of the first sample."""
        is_batch_first = getattr(event.call.module, "batch_first", True)
        if is_batch_first:
            first = states[0]  # (T, d)
        else:
            first = states[:, 0]
        queries = torch.arange(event.shape[2], device=event.device)
        if event.real is not None:
            queries = queries[event.real[0, 0]]
        queries = queries[:: -(-len(queries) // CHECKED_QUERIES) or 1]
        attention = event.rows(0, queries)  # (heads, queries, keys)
        if len(first) != attention.shape[-1]:
            return math.inf  # keys of other states
        weights = self._blocks[event.call.name].read(("q", "k"))
        motion = BlockMotion(weights, weights, first, event.shape[1])
        logits = motion.logits(weights)  # (heads, T, T)
        return share_missed(attention, logits[:, queries])


class GradientObserver:
    """Sums the gradients of lower MLP matrices over an interval, in odd and in even steps.

    Attributes:
        earlier: by block, the sum over the interval before; None if there was no gradient.
    """

    wants = (StepBegins,)

    def __init__(self) -> None:
        self._parameters: list[Tensor] = []
        self._steps = 0
        # By block, the sums over odd and over even steps; None until there is a gradient.
        self._sums: list[list[Tensor | None]] = []
        self.earlier: list[Tensor | None] = []

    def restart(self, parameters: Sequence[Tensor]) -> None:
        """Look at these parameters from now on."""
        self._parameters = list(parameters)
        self.earlier = [None] * len(parameters)
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._steps = 0
        self._sums = [[None, None] for _ in self._parameters]

    def observe(self, event: StepBegins) -> None:
        """Add the gradients if the optimiser that steps trains the first of the parameters."""
        stepped: set[int] = set()
        for group in event.optimizer.param_groups:
            stepped.update(id(parameter) for parameter in group["params"])
        if not self._parameters or id(self._parameters[0]) not in stepped:
            return
        half = self._steps % 2
        for sums, parameter in zip(self._sums, self._parameters, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            total = sums[half]
            if total is None:
                sums[half] = gradient.detach().clone()
            else:
                total.add_(gradient)
        self._steps += 1

    def halves(self, block: int) -> tuple[Tensor, Tensor] | None:
        """Return the sums over odd and over even steps; None if there was no gradient."""
        odd, even = self._sums[block]
        if odd is None:
            if even is None:
                return None
            return torch.zeros_like(even), even
        if even is None:
            return odd, torch.zeros_like(odd)
        return odd, even

    def next_interval(self) -> None:
        """Make this interval the one before."""
        self.earlier = []
        for odd, even in self._sums:
            # With a measurement at every step, there is one gradient and nothing to add.
            if even is None:
                self.earlier.append(odd)
            elif odd is None:
                self.earlier.append(even)
            else:
                self.earlier.append(odd + even)
        self._begin_interval()

    def state(self) -> dict[str, Tensor]:
        """Return what the rest of the interval needs."""
        state = {}
        for block, earlier in enumerate(self.earlier):
            if earlier is not None:
                state[f"{block}:earlier"] = earlier
        for block in range(len(self._sums)):
            halves = self.halves(block)
            if halves is not None:
                state[f"{block}:odd"] = halves[0]
                state[f"{block}:even"] = halves[1]
        if self._parameters:
            state["steps"] = torch.tensor(self._steps)
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state`."""
        for block in range(len(self._parameters)):
            self.earlier[block] = state.get(f"{block}:earlier")
            self._sums[block] = [state.get(f"{block}:odd"), state.get(f"{block}:even")]
        self._steps = 0
        if "steps" in state:
            self._steps = int(state["steps"])


class MotionMeter(Meter):
    """Measures block gauges: keeps the weights of the measurement before, and observes the rest."""

    title = "motions"
    kinds = (BLOCK,)

    def __init__(self, watched: WatchedModel) -> None:
        super().__init__(watched)
        if len({watched.periods[gauge.name] for gauge in self.gauges}) > 1:
            raise ValueError(
                f"{self._gauge_names} compare two measurements: give them the same schedule"
            )
        self._inputs = InputObserver()
        self._gradients = GradientObserver()
        # Block, or gauges -> why they have no value.
        self._problems: dict[str, str] = {}
        self._blocks: list[BlockParts] = []
        # By block, the weights at the measurement before; empty before the first one.
        self._before: list[dict[str, Tensor]] = []
        self._find()

    @property
    def _gauge_names(self) -> str:
        return ", ".join(gauge.name for gauge in self.gauges)

    # Which blocks

    def _find(self) -> None:
        if not self.gauges:
            return
        structure = find(self.watched.model)
        matrices = {part: structure.matrices(part) for part in PARTS}
        counts = {part: len(matrices[part]) for part in PARTS}
        if len(set(counts.values())) > 1 or not counts["q"]:
            present = ", ".join(f"{count} {part}" for part, count in counts.items())
            raise ValueError(
                f"{self._gauge_names}: every block needs queries, keys, values, an output and a "
                f"lower MLP, and this model has {present}"
            )
        self._blocks = []
        for number, query in enumerate(matrices["q"]):
            name = query.name.removesuffix(".q")
            own_matrices = {part: matrices[part][number] for part in PARTS}
            self._blocks.append(BlockParts(name, structure.modules[name], own_matrices))
        self._inputs.restart(self._blocks)
        self._gradients.restart([_parameter(matrix) for matrix in matrices["mlp_in"]])

    def renew(self) -> None:
        """Find the blocks again; the next measurement has none before it."""
        self._problems = {}
        self._before = []
        self._find()

    @property
    def observers(self) -> list[Observer]:
        if self.gauges:
            return [self._inputs]
        return []

    @property
    def step_observers(self) -> list[StepObserver]:
        return [self._gradients]

    @property
    def names(self) -> Mapping[str, list[str]]:
        modules = [block.name for block in self._blocks]
        return {gauge.name: modules for gauge in self.gauges}

    # A measurement

    def measure(self, step: int, due: Collection[str]) -> MeterResult:
        """Return one number per block; none at the first measurement, which has none before it."""
        self.due = due
        result = MeterResult()
        # All of them have one schedule: all are due, or none.
        if self.due_gauges:
            result.tables = self._compare_with_before()
        for name, reason in self._problems.items():
            result.report(("block", name), f"step {step}: {name} could not be measured: {reason}")
        return result

    def _compare_with_before(self) -> dict[str, LongTable]:
        by_block = []
        with torch.no_grad():
            after = [block.read(PARTS) for block in self._blocks]
            if self._before:
                for number, weights in enumerate(after):
                    by_block.append(self._measure_block(number, weights))
        self._before = after
        self._report_refused()
        self._inputs.inputs.clear()
        self._gradients.next_interval()
        values: dict[str, LongTable] = {}
        if by_block:
            for gauge in self.gauges:
                numbers = [row[gauge.name] for row in by_block]
                values[gauge.name] = LongTable.per_layer(gauge.name, numbers)
        return values

    def _measure_block(self, number: int, after: dict[str, Tensor]) -> dict[str, float | None]:
        name = self._blocks[number].name
        attention_input = self._inputs.inputs.get(name)
        states = None
        heads = 1
        if attention_input is not None:
            heads = attention_input.heads
            if not self._is_refused(name):
                states = attention_input.states
        motion = BlockMotion(
            before=self._before[number],
            after=after,
            states=states,
            heads=heads,
            earlier=self._gradients.earlier[number],
            halves=self._gradients.halves(number),
        )
        try:
            return {gauge.name: number_or_none(gauge.function(motion)) for gauge in self.gauges}
        except Exception as error:  # a gauge must not stop the training
            self._problems[name] = f"{type(error).__name__}: {error}"
            return {gauge.name: None for gauge in self.gauges}

    def _is_refused(self, module: str) -> bool:
        """True if the attention of a module is not that of its weights."""
        return self._inputs.missed.get(module, 0.0) > MAX_MISSED_SHARE

    def _report_refused(self) -> None:
        refused = [block.name for block in self._blocks if self._is_refused(block.name)]
        measured = [gauge.name for gauge in self.gauges if gauge.name in LOGIT_GAUGES]
        if not refused or not measured:
            return
        names = ", ".join(refused[:3])
        if len(refused) > 3:
            names += ", …"
        self._problems[", ".join(measured)] = (
            f"in {len(refused)} of {len(self._blocks)} layers ({names}) attention is not the "
            f"softmax of (W_Q u + b_Q)·(W_K u)/√d_h, which misses "
            f"{self._inputs.missed[refused[0]]:.0%} of the logits: rotary or other positions, "
            "normalised queries, another scale, or keys of other states; no value there"
        )

    # A checkpoint

    def state(self) -> dict[str, Tensor]:
        state = {}
        for number, weights in enumerate(self._before):
            for part, tensor in weights.items():
                state[f"{number}:{part}"] = tensor
        return state | self._gradients.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._gradients.restore(state)
        self._before = []
        for number in range(len(self._blocks)):
            weights = {}
            for part in (*PARTS, QUERY_BIAS):
                if f"{number}:{part}" in state:
                    weights[part] = state[f"{number}:{part}"]
            self._before.append(weights)
        if not any(self._before):
            self._before = []


def _parameter(matrix: Matrix) -> Tensor:
    """Return the parameter that a matrix is a view of."""
    view = matrix.views()[0]
    if view._base is not None:
        view = view._base
    return gather(view)
