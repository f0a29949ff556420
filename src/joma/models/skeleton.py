"""A skeleton of a model from the names and shapes of its tensors.

A tensor ``layers.0.mlp.up_proj.weight`` of shape (4d, d) is the weight of a linear map.
`skeleton` builds one module per name on the meta device, so that the same finder serves live models
and files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from joma.models.names import EMBEDDING, INTO_NEURONS, OUT_OF_NEURONS, natural_order

Shape = tuple[int, ...]

# GPT-2's fused projection. A shape (d, 3d) shows that the file stores matrices transposed.
_FUSED_OF_GPT2 = re.compile(r"(^|\.)c_attn\.weight$")


class BadTensorName(ValueError):
    """A name that no tensor of a model can have, such as ``a`` next to ``a.b``."""


class Conv1D(nn.Module):
    """GPT-2's linear map, whose weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))


def skeleton(
    names: Sequence[str],
    shape_of: Callable[[str], Shape],
    config: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build modules on the meta device that have the matrices of a checkpoint under its names.

    Arguments:
        names: Names of all tensors of the checkpoint.
        shape_of: Returns the shape of a tensor. It is not called for embeddings.
        config: Content of ``config.json``. Every module gets it, since heads are counted there.

    Raises:
        BadTensorName: If a name cannot belong to a tensor of a model.

    Example:
        >>> shapes = {"layers.0.mlp.down.weight": (4, 16), "layers.0.mlp.up.weight": (16, 4)}
        >>> [name for name, _ in skeleton(list(shapes), shapes.__getitem__).named_parameters()]
        ['layers.0.mlp.up.weight', 'layers.0.mlp.down.weight']
    """
    shapes = {name: shape_of(name) for name in names if not _is_embedding(name)}
    is_transposed = any(_shows_transposed(name, shape) for name, shape in shapes.items())
    settings = {key: value for key, value in (config or {}).items() if isinstance(key, str)}
    config_of_all = SimpleNamespace(**settings)
    root = nn.Module()
    with torch.device("meta"):
        for name in sorted(shapes, key=lambda name: _position(name, shapes[name], is_transposed)):
            try:
                _plant(root, name, shapes[name], is_transposed, config_of_all)
            # torch refuses "a" next to "a.b", and names of attributes such as "forward".
            except (KeyError, AttributeError, TypeError, ValueError):
                raise BadTensorName(
                    f"{name!r} is no name that a tensor of a model can have"
                ) from None
    return root


def _is_embedding(name: str) -> bool:
    return any(EMBEDDING.search(part) for part in name.split("."))


def _shows_transposed(name: str, shape: Shape) -> bool:
    if len(shape) != 2 or not _FUSED_OF_GPT2.search(name):
        return False
    rows, columns = shape
    return columns == 3 * rows


def _position(name: str, shape: Shape, is_transposed: bool) -> tuple[tuple[int, int, str], ...]:
    """Return the sorting key of a tensor: by layer, and maps out of the neurons last in each layer.

    The finder expects a lower MLP matrix before its upper one; the order of a file means nothing.
    """
    parts = name.split(".")
    end_of_layer = 0
    for place, part in enumerate(parts):
        if part.isdigit():
            end_of_layer = place + 1
    layer: list[tuple[int, int, str]] = []
    if end_of_layer:
        layer = natural_order(".".join(parts[:end_of_layer]))
    is_upper = _leads_out(parts[end_of_layer:], shape, is_transposed)
    return (*layer, (2, int(is_upper), ""), *natural_order(name))


def _leads_out(parts: Sequence[str], shape: Shape, is_transposed: bool) -> bool:
    # The innermost part that says either decides: "output.dense" of BERT, "mlp.fc_in".
    for part in reversed(parts):
        if OUT_OF_NEURONS.search(part):
            return True
        if INTO_NEURONS.search(part):
            return False
    if len(shape) != 2:
        return False
    # Without a name, shapes decide: most MLPs are wider inside.
    rows, columns = shape
    if is_transposed:
        return rows > columns
    return columns > rows


def _plant(root: nn.Module, name: str, shape: Shape, is_transposed: bool, config: Any) -> None:
    """Add the module of a tensor, and those around it. Vectors and 4-D tensors are left out."""
    if len(shape) not in (2, 3):
        return
    *path, key = name.split(".")
    is_linear = len(shape) == 2 and key == "weight" and bool(path)
    if is_linear:
        key = path.pop()
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part] or module
        module.config = config
    if not is_linear:
        module.register_parameter(key, nn.Parameter(torch.empty(shape)))
    elif is_transposed:
        module.add_module(key, Conv1D(*shape))
    else:
        module.add_module(key, nn.Linear(shape[1], shape[0], bias=False))
