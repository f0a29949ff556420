"""Charge gauges on a checkpoint: the charges of the model that its config describes, with weights from the files."""

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
    """By gauge: values (layers,) or (layers, heads), names of the layers, heads of each if it has any.

    ``problems``: gauge -> why it could not be measured.
    """

    values: dict[str, list[float | None] | list[list[float | None]]] = field(default_factory=dict)
    layers: dict[str, list[str]] = field(default_factory=dict)
    heads: dict[str, list[int]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@torch.no_grad()
def measure_charges(tensors: Tensors, gauges: list[Gauge]) -> MeasuredCharges:
    """All charge gauges; what one layer needs is read, and nothing of it stays in memory."""
    if why := tensors.incomplete or tensors.no_model:
        raise BadCheckpoint(why)
    model = model_of(tensors.config, len(tensors.names()), head=True)
    if model is None:
        raise BadCheckpoint("charges need a config.json of a family that transformers knows")
    charges = find(model)
    by_kind, places = by_part(charges, Blocks(model)), _places(model, tensors)

    def read(parameter: Tensor) -> Tensor:
        tensor, shape = places[id(parameter)], tuple(parameter.shape)
        if tensor is None:
            name = next(name for name, other in model.named_parameters() if other is parameter)
            raise BadCheckpoint(f"the tensor {name} is missing")
        whole = ParameterSlice.whole(tensor, shape)
        whole.check(tensors)
        return tensors.read(whole.view(tensors))

    measured = MeasuredCharges()
    for part in dict.fromkeys(gauge.part for gauge in gauges):
        concerned = [gauge for gauge in gauges if gauge.part == part]
        try:
            if part not in by_kind:
                raise BadCheckpoint(explain_missing(charges, part))
            _measure_kind(measured, by_kind[part], concerned, read)
        except BadCheckpoint as error:  # the other kinds may be complete
            measured.problems |= dict.fromkeys((gauge.name for gauge in concerned), str(error))
    return measured


def _measure_kind(
    measured: MeasuredCharges, layers: list[LayerCharges], gauges: list[Gauge], read: Read
) -> None:
    """Add the gauges of one kind of charges."""
    states = [_state(layer, read) if layer.charges else None for layer in layers]
    for gauge in gauges:
        rows = [
            torch.as_tensor(gauge.function(s)).reshape(-1).tolist() if s else [] for s in states
        ]
        width = max(map(len, rows))
        padded: list[list[float | None]] = [
            row + [None] * (width - len(row)) for row in rows
        ]  # (layers, heads)
        measured.values[gauge.name] = padded if gauge.per_head else [row[0] for row in padded]
        measured.layers[gauge.name] = [layer.name for layer in layers]
        if gauge.per_head:
            measured.heads[gauge.name] = [len(row) for row in rows]


def _places(model: nn.Module, tensors: Tensors) -> dict[int, str | None]:
    """Parameter -> its name in the file; one that has another name there is known by its shape, if no other has that.

    Pythia's head is ``embed_out`` in the files and ``lm_head`` in the model.
    """
    match = matcher(tensors.names())
    places = {id(parameter): match(name) for name, parameter in model.named_parameters()}
    rest = [name for name in tensors.names() if name not in places.values()]
    lost = [parameter for parameter in model.parameters() if places[id(parameter)] is None]
    for parameter in lost:
        same = [name for name in rest if tensors.view(name).shape == tuple(parameter.shape)]
        alike = [other for other in lost if other.shape == parameter.shape]
        places[id(parameter)] = same[0] if len(same) == len(alike) == 1 else None
    return places


def _state(layer: LayerCharges, read: Read) -> ChargeNumbers:
    once: dict[int, Tensor | None] = {}  # queries and keys may be parts of one tensor

    def kept(parameter: Tensor) -> Tensor | None:
        if id(parameter) not in once:
            once[id(parameter)] = read(parameter)
        return once[id(parameter)]

    balance = layer.balance(layer.sums(kept))
    unknown = torch.full_like(balance, math.nan)
    return ChargeNumbers(balance, unknown, None)
