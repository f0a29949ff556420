"""The first cause of a number that is not finite, from all that was seen of a step.

The evidence, the earliest in a step first: the outputs of modules in the pass, the loss, the weights after the step,
and any gauge. What comes first is the cause; the rest follows from it and is listed.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from joma._events.finite import FiniteTrace, FirstNotFinite, is_finite
from joma._gauges.blocks import Blocks
from joma._gauges.matrices import plain_name
from joma._watch.measurement import Measurement
from joma._watch.processes import Processes
from joma._watch.readings import Finding

_GAUGES = {"weight": "weights", "input": "inputs", "output": "activations"}
_CAUSES = tuple(_GAUGES)


def find_not_finite(
    measurement: Measurement, trace: FiniteTrace, model: nn.Module, blocks: Blocks, processes: Processes
) -> Finding | None:
    """Return the one finding of a measurement in which something is not finite, or None if all is well."""
    first = _first_of_all_processes(trace, list(_names(model)), processes)
    numbers = list(measurement.not_finite())
    loss = measurement.loss
    has_bad_loss = loss is not None and not math.isfinite(loss)
    if first is None and not numbers and not has_bad_loss:
        return None
    gauge_modules = [number.module for number in numbers]
    if first is not None:
        module = f"{first.module}.{first.detail}" if first.detail else first.module
        later = (*trace.later, *gauge_modules, *(["the loss"] if has_bad_loss else []))
        return _finding(_GAUGES[first.cause], first.value, module, later, blocks)
    parameters = bad_parameters(model)
    if has_bad_loss:
        assert loss is not None
        return _finding("loss", loss, "", (*parameters, *gauge_modules), blocks)
    if parameters:
        # the pass was finite, so a gradient was not, or the optimiser made it so
        gauge = "gradients" if has_bad_gradient(model, parameters[0]) else "weights"
        value = numbers[0].value if numbers else math.nan
        return _finding(gauge, value, parameters[0], (*parameters[1:], *gauge_modules), blocks)
    number = numbers[0]
    later = tuple(f"{other.gauge} of {other.module}" for other in numbers[1:])
    head = number.heads[0] if number.heads else None
    return Finding(
        "not finite", number.layer, head, number.gauge, number.value, None, number.module, later
    )  # fmt: skip


def _finding(gauge: str, value: float, module: str, later: tuple[str, ...], blocks: Blocks) -> Finding:
    names = [name for name in dict.fromkeys(later) if name != module]
    layer = blocks.number(module) if module else None
    return Finding("not finite", layer, None, gauge, value, None, module, tuple(names), is_everywhere=True)


def bad_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that are not finite, in the order of the model."""
    with torch.no_grad():
        return [
            plain_name(name)
            for name, parameter in model.named_parameters()
            if _is_local(parameter) and not is_finite(parameter)
        ]


def has_bad_gradient(model: nn.Module, parameter_name: str) -> bool:
    """True if the gradient of a parameter is still there and is not finite."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if plain_name(name) == parameter_name and gradient is not None:
            return not is_finite(gradient)
    return False


def _is_local(parameter: nn.Parameter) -> bool:
    """True if reading the parameter needs no other process and no missing storage."""
    return parameter.is_floating_point() and not hasattr(parameter, "to_local") and not parameter.is_meta


def _names(model: nn.Module) -> list[str]:
    return [plain_name(name) or type(model).__name__ for name, _ in model.named_modules()]


def _first_of_all_processes(trace: FiniteTrace, names: list[str], processes: Processes) -> FirstNotFinite | None:
    """Return the earliest module over all processes that are measured together.

    The name of the weight, if it is one, stays in its process: numbers are exchanged, not words.
    """
    first = trace.first
    if not processes.many:
        return first
    table = torch.zeros(processes.count, 4, dtype=torch.float64)  # module, cause, order, value
    if first is not None:
        place = float(names.index(first.module)) if first.module in names else 0.0
        row = [place, float(_CAUSES.index(first.cause)), float(first.order), first.value]
        table[processes.rank] = torch.tensor(row, dtype=torch.float64)
    processes.sum_(table)
    rows = [row for row in table.tolist() if row[2] > 0]
    if not rows:
        return None
    place, cause, order, value = min(rows, key=lambda row: row[2])
    module = names[int(place)]
    detail = first.detail if first is not None and first.module == module else ""
    return FirstNotFinite(module, _CAUSES[int(cause)], detail, value, int(order))
