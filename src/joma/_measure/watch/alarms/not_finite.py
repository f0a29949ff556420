"""Numbers that are NaN or infinite: the alarm, and the search for their first cause.

A step leaves evidence in this order: the outputs of modules in the pass, the loss, the weights
after the step, and the gauges. The earliest one is the cause. The others follow from it and are
listed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from joma._measure.events.finite import FiniteTrace, FirstNotFinite, is_finite
from joma._measure.watch.alarms.rule import LossAlarm
from joma._measure.watch.measurement import Measurement, NotFinite
from joma._measure.watch.processes import Processes
from joma._measure.watch.readings import Finding, Reading
from joma.models.blocks import Blocks
from joma.models.names import plain_name

KIND = "not finite"
_GAUGES = {"weight": "weights", "input": "inputs", "output": "activations"}
_CAUSES = tuple(_GAUGES)


@dataclass
class NotFiniteAlarm(LossAlarm):
    """Alarm for a loss, weight, activation or gauge that was computed and is NaN or infinite.

    It has no threshold. In measured steps `find_not_finite` names the first cause. Between
    measurements the alarm looks at the loss alone.
    """

    kind = KIND
    level = "critical"
    what_to_do = (
        "go back to a checkpoint before it; clip gradients, lower the learning rate, or compute "
        "in a wider type where it began"
    )

    # (step, loss) of the first loss that is not finite, until one is finite again.
    _bad_loss: tuple[int, float] | None = field(default=None, init=False, repr=False)

    def take_loss(self, step: int, loss: float) -> None:
        """Take the loss of a step."""
        if math.isfinite(loss):
            self._bad_loss = None
        elif self._bad_loss is None:
            self._bad_loss = (step, loss)

    def findings(self) -> list[Finding]:
        """Return one finding while the loss is not finite."""
        if self._bad_loss is None:
            return []
        _, loss = self._bad_loss
        return [self.finding("loss", loss, is_everywhere=True)]

    def observe(self, reading: Reading) -> Iterable[Finding]:
        """Return the cause that the search found, or else the loss."""
        causes = [finding for finding in reading.findings if finding.kind == self.kind]
        return causes or self.findings()

    def onset(self, step: int) -> int:
        """Return the step of the first loss that was not finite, or else ``step``."""
        if self._bad_loss is None:
            return step
        return self._bad_loss[0]


def find_not_finite(
    measurement: Measurement,
    trace: FiniteTrace,
    model: nn.Module,
    blocks: Blocks,
    processes: Processes,
) -> Finding | None:
    """Return the first cause in a measurement, or None if everything is finite."""
    first = trace.first
    if processes.is_joint:
        first = _first_of_all_processes(trace, _names(model), processes)
    numbers = list(measurement.not_finite())
    loss = measurement.loss
    has_bad_loss = loss is not None and not math.isfinite(loss)
    if first is None and not numbers and not has_bad_loss:
        return None
    gauge_modules = [number.module for number in numbers]
    if first is not None:
        module = first.module
        if first.detail:
            module = f"{first.module}.{first.detail}"
        later = [*trace.later, *gauge_modules]
        if has_bad_loss:
            later.append("the loss")
        return _finding(_GAUGES[first.cause], first.value, module, later, blocks)
    parameters = bad_parameters(model)
    if has_bad_loss:
        assert loss is not None
        return _finding("loss", loss, "", [*parameters, *gauge_modules], blocks)
    if parameters:
        return _finding_of_weights(model, parameters, numbers, blocks)
    return _finding_of_gauge(numbers)


def _finding_of_weights(
    model: nn.Module,
    parameters: list[str],
    numbers: list[NotFinite],
    blocks: Blocks,
) -> Finding:
    """Return the finding for weights that are not finite after a pass that was."""
    # The pass was finite. So a gradient was not, or the optimiser made the weights so.
    gauge = "weights"
    if has_bad_gradient(model, parameters[0]):
        gauge = "gradients"
    value = math.nan
    if numbers:
        value = numbers[0].value
    later = [*parameters[1:], *(number.module for number in numbers)]
    return _finding(gauge, value, parameters[0], later, blocks)


def _finding_of_gauge(numbers: list[NotFinite]) -> Finding:
    """Return the finding for gauges that are not finite on a model that is."""
    first = numbers[0]
    head = None
    if first.heads:
        head = first.heads[0]
    later = tuple(f"{number.gauge} of {number.module}" for number in numbers[1:])
    return Finding(KIND, first.layer, head, first.gauge, first.value, None, first.module, later)


def _finding(gauge: str, value: float, module: str, later: list[str], blocks: Blocks) -> Finding:
    names = tuple(name for name in dict.fromkeys(later) if name != module)
    layer = None
    if module:
        layer = blocks.number(module)
    return Finding(KIND, layer, None, gauge, value, None, module, names, is_everywhere=True)


def bad_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not finite, in the order of the model."""
    with torch.no_grad():
        return [
            plain_name(name)
            for name, parameter in model.named_parameters()
            if _is_local(parameter) and not is_finite(parameter)
        ]


def has_bad_gradient(model: nn.Module, parameter_name: str) -> bool:
    """Return True if the gradient of a parameter still exists and is not finite."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if plain_name(name) == parameter_name and gradient is not None:
            return not is_finite(gradient)
    return False


def _is_local(parameter: nn.Parameter) -> bool:
    """Return True if reading the parameter needs no other process and no missing storage."""
    is_sharded = hasattr(parameter, "to_local")
    return parameter.is_floating_point() and not is_sharded and not parameter.is_meta


def _names(model: nn.Module) -> list[str]:
    return [plain_name(name) or type(model).__name__ for name, _ in model.named_modules()]


def _first_of_all_processes(
    trace: FiniteTrace,
    names: list[str],
    processes: Processes,
) -> FirstNotFinite | None:
    """Return the earliest module over all processes that are measured together.

    Processes exchange numbers, not names. So the name of a weight stays in its process.
    """
    first = trace.first
    table = torch.zeros(processes.count, 4, dtype=torch.float64)  # module, cause, order, value
    if first is not None:
        place = 0
        if first.module in names:
            place = names.index(first.module)
        row = [place, _CAUSES.index(first.cause), first.order, first.value]
        table[processes.rank] = torch.tensor(row, dtype=torch.float64)
    processes.sum_(table)
    rows = [row for row in table.tolist() if row[2] > 0]
    if not rows:
        return None
    earliest_place, earliest_cause, order, value = min(rows, key=lambda row: row[2])
    module = names[int(earliest_place)]
    detail = ""
    if first is not None and first.module == module:
        detail = first.detail
    return FirstNotFinite(module, _CAUSES[int(earliest_cause)], detail, value, int(order))
