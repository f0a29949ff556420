"""Charges of a watched model: their balance and drift, and an alarm where a gradient breaks an exact law.

The gradient identity of every exact charge (see ``joma.charges``) is checked in measured steps, before the optimiser
uses the gradient; that needs ``optimizer=``. The tolerance follows the precision that the passes were computed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from joma._measure.charges.by_layer import (
    ChargeHistory,
    ChargeState,
    by_part,
    explain_missing,
)
from joma._measure.charges.charge import Charge, Status
from joma._measure.charges.find import find
from joma._measure.charges.identity import Deviation, check_gradients
from joma._measure.events.events import PassBegins
from joma._measure.events.optimiser import StepBegins
from joma._measure.gauges.kinds import CHARGE
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.processes import Processes
from joma._measure.watch.readings import Finding
from joma._measure.watch.values import Values
from joma.models.blocks import Blocks


class Precision:
    """An observer of passes: the type that autocast computes in, if it does."""

    wants = (PassBegins,)

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None

    def observe(self, event: PassBegins) -> None:
        """A pass begins."""
        if event.grad and event.autocast is not None:
            self.dtype = event.autocast


class Charges:
    """Measures charge gauges, and observes steps in which some are due.

    Attributes:
        due: names of the gauges that are measured in the step to come.
        precision: an observer of the passes.
        deviations: what was off in the last step, or None if there was none to be judged.
        unchecked: names of exact charges with a parameter that trains, but in no optimiser that is watched: nobody
            sets its gradient to zero.
    """

    wants = (StepBegins,)

    def __init__(
        self, model: nn.Module, gauges: Sequence[Gauge], processes: Processes, blocks: Blocks,
        optimizers: Sequence[Optimizer],
    ) -> None:  # fmt: skip
        self.gauges = [gauge for gauge in gauges if gauge.kind is CHARGE]
        self.precision = Precision()
        self.due: Collection[str] = ()
        self.deviations: list[Deviation] | None = None
        self.unchecked: list[str] = []
        self._processes, self._optimizers = processes, list(optimizers)
        self._blocks = blocks
        self._all = find(model) if self.gauges else []
        if self.gauges and processes.cannot_gather:
            raise ValueError(f"charges cannot be measured: {processes.cannot_gather}")
        layers = by_part(self._all, blocks)
        for gauge in self.gauges:
            if gauge.part not in layers:
                raise ValueError(explain_missing(self._all, gauge.part))
            if gauge.name.startswith("charge_residual") and not self._optimizers:
                raise ValueError(
                    f"{gauge.name} is measured before an optimiser's step: give optimizer=…"
                )
        if any(side.parameter.is_meta for charge in self._all for side in charge.sides):
            raise ValueError(
                "the model is on the meta device: its weights have no values to measure"
            )
        self._states = ChargeHistory(
            {part: layers[part] for part in dict.fromkeys(g.part for g in self.gauges)}
        )
        with torch.no_grad():
            self.widths = {  # gauge -> how many heads each layer has; 1 for charges that are not per head, 0 for none
                g.name: [
                    (len(layer.sums()[0]) if g.per_head else 1) if layer.charges else 0
                    for layer in layers[g.part]
                ]
                for g in self.gauges
            }

    def renew(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Find the charges of a model that was changed; their drift is measured from now on."""
        if self.gauges:
            precision = self.precision
            self.__init__(model, self.gauges, self._processes, self._blocks, optimizers)  # type: ignore[misc]
            self.precision = precision

    @property
    def checks(self) -> bool:
        """Is there anything to check in the step to come?"""
        return any(gauge.name in self.due for gauge in self.gauges)

    @property
    def names(self) -> dict[str, list[str]]:
        """Gauge -> names of its charges, by layer."""
        return {g.name: [layer.name for layer in self._states.layers[g.part]] for g in self.gauges}

    def observe(self, event: StepBegins) -> None:
        """A step begins: gradients are those that the optimiser is about to use."""
        if not self.checks or not self._processes.computes_weights:
            return
        first, trained = (
            self.deviations is None,
            {id(p) for other in self._optimizers for p in _parameters(other)},
        )
        parameters = {id(p) for p in _parameters(event.optimizer)}

        def due(charge: Charge) -> bool:
            """All of it is this optimiser's; or several share it, and none of them has stepped yet."""
            return _within(charge, parameters) or (first and _within(charge, trained))

        due_now = [charge for charge in self._all if due(charge)]
        self.deviations = (self.deviations or []) + check_gradients(
            due_now, computed_in=self.precision.dtype
        )
        self._states.keep_residuals(lambda p: p.grad, lambda layer: all(map(due, layer.charges)))
        if first:
            self.unchecked = [
                c.name for c in self._all if c.status is Status.EXACT and not _within(c, trained)
            ]

    def measure(self) -> dict[str, Values]:
        """Gauge -> (layers,), or (layers, heads) for charges per head."""
        values: dict[str, Values] = {}
        for part, layers in self._states.layers.items():
            chosen = [
                gauge for gauge in self.gauges if gauge.part == part and gauge.name in self.due
            ]
            here = bool(chosen) and self._processes.computes_weights
            with torch.no_grad():
                states = {
                    n: self._states.state_of(part, layer)
                    for n, layer in enumerate(layers)
                    if layer.charges and here
                }
            for gauge in chosen:
                values[gauge.name] = self._table(gauge, states)
        return values

    def _table(self, gauge: Gauge, states: Mapping[int, ChargeState]) -> Values:
        """Return the table (layers, heads) of a gauge, or (layers,) of charges that are not per head."""
        widths = self.widths[gauge.name]
        table = Values.empty(len(widths), max(widths))
        for n, state in states.items():
            row = gauge.function(state)
            if row is None:
                continue
            numbers = torch.as_tensor(row, dtype=torch.float64).reshape(-1)
            for head, number in enumerate(numbers.tolist()):
                # 0/0 of sides that are both zero is not defined; NaN of sides that are not finite is a fact
                if not math.isnan(number) or not state.finite:
                    table.put((n, head), number)
        table = self._processes.sum_whole_values(table)
        return table if gauge.per_head else table.column(0)

    def findings(self, step: int, notices: Notices) -> list[Finding]:
        """Return the laws that the last gradient broke; give notice of what could not be checked."""
        if self.deviations is None and self._processes.computes_weights:
            notices.once(
                "no step",
                f"step {step}: no step of the optimiser was seen, so no gradient was checked",
            )
        if self.unchecked:
            notices.once(
                "unchecked",
                f"{len(self.unchecked)} charges are not checked, {self.unchecked[0]} the first of them: they have "
                "parameters that train but are in no optimiser that is watched",
            )
        # a gradient that is not finite is an alert of its own
        broken = [
            deviation for deviation in self.deviations or [] if math.isfinite(deviation.value)
        ]
        return [self._finding(deviation) for deviation in broken]

    def _finding(self, deviation: Deviation) -> Finding:
        charge = deviation.charge
        layer = self._blocks.number(charge.name)
        gauge = f"charge_residual.{charge.kind}"
        return Finding(
            "broken gradient",
            layer,
            deviation.head,
            gauge,
            deviation.value,
            deviation.bound,
            charge.name,
        )

    def clear(self) -> None:
        """Forget the step and its passes."""
        self.deviations = None
        self.precision.dtype = None
        self._states.forget_residuals()

    def state(self) -> dict[str, Any]:
        """What the drift is measured from."""
        return dict(self._states.starts)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._states.starts = dict(state)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _within(charge: Charge, parameters: set[int]) -> bool:
    """Are all sides that train among these parameters?"""
    return {
        id(side.parameter) for side in charge.sides if side.parameter.requires_grad
    } <= parameters
