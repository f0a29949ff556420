"""Gauges on what happened to each block between two measurements: see `joma._measure.gauges.assumptions`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from joma._measure.events.events import AttentionEvent, Event, Observer
from joma._measure.events.optimiser import StepBegins
from joma._measure.gauges.assumptions import PARTS, QUERY_BIAS, BlockMotion, Weights, share_missed
from joma._measure.gauges.kinds import BLOCK
from joma._measure.gauges.registry import Gauge, number_or_none
from joma._measure.watch.values import Values
from joma.models.matrices import Matrix
from joma.models.projections import query_bias
from joma.models.sharded import gather
from joma.models.structure import find

_TOKENS = 64  # inputs of attention that are kept per block
_CHECKED = 8  # queries whose logits are compared with the module's own
_EXPLAINED = 0.1  # share of the logits that may be missed: half precision misses a few per cent
_OF_LOGITS = ("attention_drift", "eqn17_residual")


class _Inputs:
    """An observer of what attention is given: the first inputs of each module since the last `clear`.

    It also tries whether the module's attention is that of its weights, as `BlockMotion.logits` has it.
    """

    wants: tuple[type[Event], ...] = (AttentionEvent,)

    def __init__(self, weights: Mapping[str, Callable[[], Weights]]) -> None:
        self._weights = weights  # module -> reads its q, k and b_Q
        self.seen: dict[str, tuple[Tensor, int]] = {}  # module -> states (n, d), heads
        self.missed: dict[str, float] = {}  # module -> share of its logits

    def observe(self, event: AttentionEvent) -> None:
        """Keep some distinct rows of the module's input."""
        name, states = event.call.name, event.call.states
        if name in self.seen or name not in self._weights or states is None or states.dim() != 3:
            return
        states = states.detach()
        rows = states.flatten(0, 1)
        rows = torch.unique(rows[:: max(1, len(rows) // (4 * _TOKENS))], dim=0)
        self.seen[name] = rows[:: -(-len(rows) // _TOKENS)], event.shape[1]
        with torch.no_grad():
            self.missed[name] = self._missed(event, states)

    def _missed(self, event: AttentionEvent, states: Tensor) -> float:
        """Of some real queries of the first sample."""
        first = (
            states[0] if getattr(event.call.module, "batch_first", True) else states[:, 0]
        )  # (T, d)
        queries = torch.arange(event.shape[2], device=event.device)
        queries = queries if event.real is None else queries[event.real[0, 0]]
        queries = queries[:: -(-len(queries) // _CHECKED) or 1]
        attention = event.rows(0, queries)  # (heads, queries, keys)
        if len(first) != attention.shape[-1]:
            return math.inf  # keys of other states
        weights = self._weights[event.call.name]()
        z = BlockMotion(weights, weights, first, event.shape[1]).logits(weights)
        return share_missed(attention, z[:, queries])


class _Gradients:
    """An observer of steps: sums of the lower MLP's gradients, in odd and in even steps, over an interval."""

    wants = (StepBegins,)

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._steps = 0
        self.halves: list[tuple[Tensor, Tensor] | None] = [None] * len(parameters)
        self.earlier: list[Tensor | None] = [None] * len(parameters)

    def observe(self, event: StepBegins) -> None:
        """A step of the optimiser that trains the first of them is about to be made."""
        stepped = {id(p) for group in event.optimizer.param_groups for p in group["params"]}
        if not self._parameters or id(self._parameters[0]) not in stepped:
            return
        for n, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            halves = self.halves[n] or (
                torch.zeros_like(parameter.grad),
                torch.zeros_like(parameter.grad),
            )
            halves[self._steps % 2].add_(parameter.grad)
            self.halves[n] = halves
        self._steps += 1

    def state(self) -> dict[str, Tensor]:
        """What the rest of the interval needs."""
        out = {f"{n}:earlier": x for n, x in enumerate(self.earlier) if x is not None}
        for n, halves in enumerate(self.halves):
            out |= {} if halves is None else {f"{n}:odd": halves[0], f"{n}:even": halves[1]}
        return out | ({"steps": torch.tensor(self._steps)} if self._parameters else {})

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        every = range(len(self._parameters))
        self.earlier = [state.get(f"{n}:earlier") for n in every]
        self.halves = [
            (state[f"{n}:odd"], state[f"{n}:even"]) if f"{n}:odd" in state else None for n in every
        ]
        self._steps = int(state["steps"]) if "steps" in state else 0

    def next_interval(self) -> None:
        """What was this interval is now the one before."""
        self.earlier = [None if halves is None else halves[0] + halves[1] for halves in self.halves]
        self.halves, self._steps = [None] * len(self._parameters), 0


class Motions:
    """Measures block gauges: keeps the weights of the measurement before, and listens to passes and steps.

    Attributes:
        modules: names of the attention modules, by block.
        inputs: an observer of passes.
        gradients: an observer of steps.
        problems: block, or gauges -> what measuring it raised, or why it was refused; it has no values then.
    """

    def __init__(
        self, model: nn.Module, gauges: Sequence[Gauge], periods: Mapping[str, Any]
    ) -> None:
        self.gauges = [gauge for gauge in gauges if gauge.kind is BLOCK]
        self.due: Collection[str] = [gauge.name for gauge in self.gauges]  # all of them, or none
        if len({periods[gauge.name] for gauge in self.gauges}) > 1:
            raise ValueError(
                f"{', '.join(g.name for g in self.gauges)} compare two measurements: give them the same schedule"
            )
        structure = find(model)
        self._matrices: dict[str, list[Matrix]] = {
            part: structure.matrices(part) for part in PARTS if self.gauges
        }
        counts = {part: len(matrices) for part, matrices in self._matrices.items()}
        if self.gauges and (len(set(counts.values())) > 1 or not counts["q"]):
            raise ValueError(
                f"{', '.join(g.name for g in self.gauges)}: every block needs queries, keys, values, an output and a "
                f"lower MLP, and this model has {', '.join(f'{n} {part}' for part, n in counts.items())}"
            )
        self.modules = [matrix.name.removesuffix(".q") for matrix in self._matrices.get("q", [])]
        modules = structure.modules
        self._attentions = [modules[name] for name in self.modules]
        self.inputs = _Inputs(
            {name: partial(self._read, n, ("q", "k")) for n, name in enumerate(self.modules)}
        )
        self.gradients = _Gradients(
            [_parameter(matrix) for matrix in self._matrices.get("mlp_in", [])]
        )
        self.problems: dict[str, str] = {}
        self._before: list[dict[str, Tensor]] = []

    def renew(self, model: nn.Module, periods: Mapping[str, Any]) -> None:
        """Find the blocks of a model that was changed; the next measurement has none before it."""
        if self.gauges:
            inputs, gradients = self.inputs, self.gradients  # which observe passes and steps
            self.__init__(model, self.gauges, periods)  # type: ignore[misc]
            inputs.__dict__.update(self.inputs.__dict__)
            gradients.__dict__.update(self.gradients.__dict__)
            self.inputs, self.gradients = inputs, gradients

    @property
    def observers(self) -> list[Observer]:
        """Of passes, if there is anything to measure."""
        return [self.inputs] if self.gauges else []

    widths: Mapping[str, list[int]] = {}  # nothing is per head

    @property
    def names(self) -> dict[str, list[str]]:
        """Gauge -> the attention module of each block."""
        return {gauge.name: self.modules for gauge in self.gauges}

    def measure(self) -> dict[str, Values]:
        """Gauge -> (blocks,); {} at the first measurement, which has none before it."""
        if not self.gauges or self.gauges[0].name not in self.due:
            return {}
        with torch.no_grad():
            after = [self._read(n, PARTS) for n in range(len(self.modules))]
            values = (
                [self._values(n, weights) for n, weights in enumerate(after)]
                if self._before
                else []
            )
        self._before = after
        self._tell_refused()
        self.inputs.seen.clear()
        self.gradients.next_interval()
        if not values:
            return {}
        return {
            gauge.name: Values.per_layer([by_gauge[gauge.name] for by_gauge in values])
            for gauge in self.gauges
        }

    def _read(self, n: int, parts: Sequence[str]) -> dict[str, Tensor]:
        """The weights of a block, copied."""
        weights = {
            part: torch.cat([gather(w) for w in self._matrices[part][n].read()]).clone()
            for part in parts
        }
        bias = query_bias(self._attentions[n])
        return weights if bias is None else weights | {QUERY_BIAS: bias.clone()}

    def _refused(self) -> list[str]:
        """The modules whose attention is not that of their weights; gauges of logits have no value there."""
        return [name for name in self.modules if self.inputs.missed.get(name, 0.0) > _EXPLAINED]

    def _tell_refused(self) -> None:
        refused, measured = (
            self._refused(),
            [gauge.name for gauge in self.gauges if gauge.name in _OF_LOGITS],
        )
        if refused and measured:
            some = ", ".join(refused[:3]) + (", …" if len(refused) > 3 else "")
            self.problems[", ".join(measured)] = (
                f"in {len(refused)} of {len(self.modules)} layers ({some}) attention is not the softmax of "
                f"(W_Q u + b_Q)·(W_K u)/√d_h, which misses {self.inputs.missed[refused[0]]:.0%} of the logits: rotary "
                "or other positions, normalised queries, another scale, or keys of other states; no value there"
            )

    def _values(self, n: int, after: dict[str, Tensor]) -> dict[str, float | None]:
        states, heads = self.inputs.seen.get(self.modules[n], (None, 1))
        states = None if self.modules[n] in self._refused() else states
        earlier, halves = self.gradients.earlier[n], self.gradients.halves[n]
        motion = BlockMotion(self._before[n], after, states, heads, earlier, halves)
        try:
            return {gauge.name: number_or_none(gauge.function(motion)) for gauge in self.gauges}
        except Exception as error:  # nothing that is measured may stop the training
            self.problems[self.modules[n]] = f"{type(error).__name__}: {error}"
            return dict.fromkeys((gauge.name for gauge in self.gauges), None)

    def state(self) -> dict[str, Tensor]:
        """What the next measurement starts from, by names that begin with "block:"."""
        out = {
            f"block:{n}:{part}": w
            for n, weights in enumerate(self._before)
            for part, w in weights.items()
        }
        return out | {f"block:{key}": x for key, x in self.gradients.state().items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`; other names are left alone."""
        saved = {
            key.removeprefix("block:"): x for key, x in state.items() if key.startswith("block:")
        }
        self.gradients.restore(saved)
        self._before = [
            {part: saved[f"{n}:{part}"] for part in (*PARTS, QUERY_BIAS) if f"{n}:{part}" in saved}
            for n in range(len(self.modules))
        ]
        self._before = self._before if any(self._before) else []


def _parameter(matrix: Matrix) -> Tensor:
    """The parameter that a matrix is a view of."""
    view = matrix.views()[0]
    base = view if view._base is None else view._base
    return gather(base)
