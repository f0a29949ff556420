"""Charges of a watched model: their balance and drift, and gradients that break an exact law.

The gradient identity of every exact charge (see ``joma.charges``) is checked in measured steps,
before the optimiser uses the gradient. That needs ``optimizer=``. The tolerance follows the
precision that the passes were computed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from joma._measure.charges.by_layer import (
    ChargeHistory,
    ChargeNumbers,
    by_part,
    explain_missing,
)
from joma._measure.charges.charge import Charge, Status
from joma._measure.charges.find import find
from joma._measure.charges.identity import Deviation, check_gradients
from joma._measure.events.events import Observer, PassBegins
from joma._measure.events.optimiser import StepBegins, StepObserver
from joma._measure.gauges.kinds import CHARGE
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.meters.meter import Meter, MeterResult
from joma._measure.watch.readings import Finding
from joma._measure.watch.watched import WatchedModel
from joma._runs.long_table import LongTable


class AutocastObserver:
    """An observer of passes: the type that autocast computes in, if it does."""

    wants = (PassBegins,)

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None

    def observe(self, event: PassBegins) -> None:
        """A pass begins."""
        if event.grad and event.autocast is not None:
            self.dtype = event.autocast


class ChargeMeter(Meter):
    """Measures charge gauges, and checks gradients in the steps in which some are due."""

    title = "charges"
    kinds = (CHARGE,)
    wants = (StepBegins,)

    def __init__(self, watched: WatchedModel) -> None:
        super().__init__(watched)
        self._autocast = AutocastObserver()
        # What is off in the gradients of this step; None before the optimiser's step.
        self._deviations: list[Deviation] | None = None
        # Exact charges with a parameter that trains, but in no optimiser that is watched: nobody
        # sets its gradient to zero.
        self._unchecked: list[str] = []
        self._charges: list[Charge] = []
        self._history = ChargeHistory({})
        self._widths: dict[str, list[int]] = {}
        if self.gauges and watched.processes.cannot_gather:
            raise ValueError(f"charges cannot be measured: {watched.processes.cannot_gather}")
        self._find()

    def _find(self) -> None:
        if not self.gauges:
            return
        self._charges = find(self.watched.model)
        layers = by_part(self._charges, self.watched.blocks)
        for gauge in self.gauges:
            if gauge.part not in layers:
                raise ValueError(explain_missing(self._charges, gauge.part))
            if gauge.name.startswith("charge_residual") and not self.watched.optimizers:
                raise ValueError(
                    f"{gauge.name} is measured before an optimiser's step: give optimizer=…"
                )
        for charge in self._charges:
            if any(side.parameter.is_meta for side in charge.sides):
                raise ValueError(
                    "the model is on the meta device: its weights have no values to measure"
                )
        parts = dict.fromkeys(gauge.part for gauge in self.gauges)
        self._history = ChargeHistory({part: layers[part] for part in parts})
        with torch.no_grad():
            for gauge in self.gauges:
                widths = []
                for layer in layers[gauge.part]:
                    if not layer.charges:
                        widths.append(0)
                    elif gauge.per_head:
                        widths.append(len(layer.sums()[0]))
                    else:
                        widths.append(1)
                self._widths[gauge.name] = widths

    def renew(self) -> None:
        """Find the charges of a model that was changed; their drift is measured from now on."""
        self._deviations = None
        self._unchecked = []
        self._widths = {}
        self._find()

    @property
    def names(self) -> Mapping[str, list[str]]:
        names = {}
        for gauge in self.gauges:
            names[gauge.name] = [layer.name for layer in self._history.layers[gauge.part]]
        return names

    @property
    def widths(self) -> Mapping[str, list[int]]:
        return self._widths

    # In a step

    @property
    def observers(self) -> list[Observer]:
        return [self._autocast]

    @property
    def training_observers(self) -> list[Observer]:
        return [self._autocast]

    @property
    def step_observers(self) -> list[StepObserver]:
        return [self]

    @property
    def needs_training_passes(self) -> bool:
        return bool(self.due_gauges) and bool(self.watched.optimizers)

    def observe(self, event: StepBegins) -> None:
        """A step begins: gradients are those that the optimiser is about to use."""
        if not self.due_gauges or not self.watched.processes.computes_weights:
            return
        is_first_step = self._deviations is None
        stepped = {id(parameter) for parameter in _parameters(event.optimizer)}
        trained: set[int] = set()
        for optimizer in self.watched.optimizers:
            trained.update(id(parameter) for parameter in _parameters(optimizer))

        def is_due(charge: Charge) -> bool:
            # All of it is this optimiser's; or several share it, and none of them has stepped yet.
            return _is_within(charge, stepped) or (is_first_step and _is_within(charge, trained))

        due_charges = [charge for charge in self._charges if is_due(charge)]
        deviations = check_gradients(due_charges, computed_in=self._autocast.dtype)
        self._deviations = [*(self._deviations or []), *deviations]
        self._history.keep_residuals(
            lambda parameter: parameter.grad, lambda layer: all(map(is_due, layer.charges))
        )
        if is_first_step:
            self._unchecked = []
            for charge in self._charges:
                if charge.status is Status.EXACT and not _is_within(charge, trained):
                    self._unchecked.append(charge.name)

    # A measurement

    def measure(self, step: int, due: Collection[str]) -> MeterResult:
        self.due = due
        result = MeterResult()
        for part, layers in self._history.layers.items():
            gauges = [gauge for gauge in self.due_gauges if gauge.part == part]
            if not gauges:
                continue
            states = {}
            if self.watched.processes.computes_weights:
                with torch.no_grad():
                    for number, layer in enumerate(layers):
                        if layer.charges:
                            states[number] = self._history.state_of(part, layer)
            for gauge in gauges:
                result.tables[gauge.name] = self._table(gauge, states)
        if self.needs_training_passes:
            self._report_gradients(step, result)
        return result

    def _table(self, gauge: Gauge, states: Mapping[int, ChargeNumbers]) -> LongTable:
        """Return the table (layers, heads) of a gauge, or (layers,) if it has no heads."""
        widths = self._widths[gauge.name]
        entries: dict[tuple[int, ...], float] = {}
        for layer, state in states.items():
            row = gauge.function(state)
            if row is None:
                continue
            numbers = torch.as_tensor(row, dtype=torch.float64).reshape(-1)  # (heads,)
            for head, number in enumerate(numbers.tolist()):
                # 0/0 of sides that are both zero is not defined. NaN of sides that are not finite
                # was computed.
                if not math.isnan(number) or not state.finite:
                    entries[layer, head] = number
        shape = (len(widths), max(widths))
        table = LongTable.of_entries(gauge.name, shape, entries, gauge.precision)
        table = self.watched.processes.sum_whole_values(table)
        if gauge.per_head:
            return table
        return table.first_column()

    def _report_gradients(self, step: int, result: MeterResult) -> None:
        """Add the laws that the last gradient broke, and what could not be checked."""
        if self._deviations is None and self.watched.processes.computes_weights:
            result.report(
                "no step",
                f"step {step}: no step of the optimiser was seen, so no gradient was checked",
                is_remark=True,
            )
        if self._unchecked:
            result.report(
                "unchecked",
                f"{len(self._unchecked)} charges are not checked, {self._unchecked[0]} the first "
                "of them: they have parameters that train but are in no optimiser that is watched",
                is_remark=True,
            )
        for deviation in self._deviations or []:
            # A gradient that is not finite is an alert of its own.
            if math.isfinite(deviation.value):
                result.findings.append(self._finding(deviation))

    def _finding(self, deviation: Deviation) -> Finding:
        charge = deviation.charge
        return Finding(
            kind="broken gradient",
            layer=self.watched.blocks.number(charge.name),
            head=deviation.head,
            gauge=f"charge_residual.{charge.kind}",
            value=deviation.value,
            threshold=deviation.bound,
            module=charge.name,
        )

    def clear(self) -> None:
        self._deviations = None
        self._autocast.dtype = None
        self._history.forget_residuals()

    # A checkpoint

    def state(self) -> dict[str, Any]:
        """Return what the drift is measured from."""
        return dict(self._history.starts)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._history.starts = dict(state)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _is_within(charge: Charge, parameters: set[int]) -> bool:
    """Return True if all sides that train are among these parameters."""
    for side in charge.sides:
        if side.parameter.requires_grad and id(side.parameter) not in parameters:
            return False
    return True
