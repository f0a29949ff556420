"""Charge gauges on a checkpoint: the charges of the model that its config describes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from joma._checkpoints.model import model_of
from joma._checkpoints.plan import ParameterSlice, matcher
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors
from joma._measure.charges.by_layer import ChargeNumbers, LayerCharges, by_part, explain_missing
from joma._measure.charges.charge import Read
from joma._measure.charges.find import find
from joma._measure.gauges.registry import Gauge
from joma.models.blocks import Blocks


@dataclass
class MeasuredCharges:
    """Charges of a checkpoint.

    Attributes:
        values: gauge -> (layers,) or (layers, heads).
        layers: gauge -> names of the layers.
        heads: gauge -> heads per layer, for gauges that have heads.
        problems: gauge -> why it could not be measured.
    """

    values: dict[str, list[float | None] | list[list[float | None]]] = field(default_factory=dict)
    layers: dict[str, list[str]] = field(default_factory=dict)
    heads: dict[str, list[int]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def measure_charges(tensors: Tensors, gauges: list[Gauge]) -> MeasuredCharges:
    """Measure all charge gauges; the tensors of one layer are in memory at a time."""
    problem = tensors.incomplete or tensors.no_model
    if problem:
        raise BadCheckpoint(problem)
    model = model_of(tensors.config, len(tensors.names()), head=True)
    if model is None:
        raise BadCheckpoint("charges need a config.json of a family that transformers knows")
    charges = find(model)
    layers_by_part = by_part(charges, Blocks(model))
    tensor_of = _tensor_names(model, tensors)

    def read(parameter: Tensor) -> Tensor:
        tensor = tensor_of[id(parameter)]
        if tensor is None:
            raise BadCheckpoint(f"the tensor {_name_of(parameter, model)} is missing")
        complete = ParameterSlice.whole(tensor, tuple(parameter.shape))
        complete.check(tensors)
        return tensors.read(complete.view(tensors))

    measured = MeasuredCharges()
    for part in dict.fromkeys(gauge.part for gauge in gauges):
        concerned = [gauge for gauge in gauges if gauge.part == part]
        try:
            if part not in layers_by_part:
                raise BadCheckpoint(explain_missing(charges, part))
            _measure_part(measured, layers_by_part[part], concerned, read)
        except BadCheckpoint as error:  # the other parts may be complete
            for gauge in concerned:
                measured.problems[gauge.name] = str(error)
    return measured


def _measure_part(
    measured: MeasuredCharges, layers: list[LayerCharges], gauges: list[Gauge], read: Read
) -> None:
    numbers = []
    for layer in layers:
        numbers.append(_charge_numbers(layer, read) if layer.charges else None)
    for gauge in gauges:
        rows: list[list[float | None]] = []  # per layer, one value per head
        for of_layer in numbers:
            if of_layer is None:
                rows.append([])
            else:
                rows.append(torch.as_tensor(gauge.function(of_layer)).reshape(-1).tolist())
        head_count = max(len(row) for row in rows)
        padded = [row + [None] * (head_count - len(row)) for row in rows]  # (layers, heads)
        measured.layers[gauge.name] = [layer.name for layer in layers]
        if gauge.per_head:
            measured.values[gauge.name] = padded
            measured.heads[gauge.name] = [len(row) for row in rows]
        else:
            measured.values[gauge.name] = [row[0] for row in padded]


def _name_of(parameter: Tensor, model: nn.Module) -> str:
    return next(name for name, other in model.named_parameters() if other is parameter)


def _tensor_names(model: nn.Module, tensors: Tensors) -> dict[int, str | None]:
    """Return id of a parameter -> its name in the file; None if there is none.

    A parameter with another name in the file is recognised by its shape, if no other one has that:
    Pythia's head is ``embed_out`` in the files and ``lm_head`` in the model.
    """
    match = matcher(tensors.names())
    tensor_of = {id(parameter): match(name) for name, parameter in model.named_parameters()}
    unused = [name for name in tensors.names() if name not in tensor_of.values()]
    unmatched = [parameter for parameter in model.parameters() if tensor_of[id(parameter)] is None]
    for parameter in unmatched:
        shape = tuple(parameter.shape)
        candidates = [name for name in unused if tensors.view(name).shape == shape]
        rivals = [other for other in unmatched if other.shape == parameter.shape]
        if len(candidates) == len(rivals) == 1:
            tensor_of[id(parameter)] = candidates[0]
    return tensor_of


def _charge_numbers(layer: LayerCharges, read: Read) -> ChargeNumbers:
    cache: dict[int, Tensor | None] = {}  # queries and keys may be parts of one tensor

    def read_once(parameter: Tensor) -> Tensor | None:
        if id(parameter) not in cache:
            cache[id(parameter)] = read(parameter)
        return cache[id(parameter)]

    balance = layer.balance(layer.sums(read_once))
    unknown_drift = torch.full_like(balance, math.nan)
    return ChargeNumbers(balance, unknown_drift, None)
