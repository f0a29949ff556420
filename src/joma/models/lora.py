"""Linear maps with low-rank updates (LoRA): the matrix that acts, base + update.

A map computes W x + Σ scaling·B A x over its active adapters. With DoRA, the rows of that sum have
learned lengths. Merged adapters are in the base already. Libraries differ in where they keep W:
peft in ``base_layer``, with one pair of factors per adapter; litgpt in ``linear``; torchtune and
loralib in the module itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_lora(module: nn.Module) -> bool:
    """True if this is a linear map with low-rank updates."""
    factor_a, factor_b = _factors(module)
    if isinstance(factor_a, nn.ModuleDict) and isinstance(factor_b, nn.ModuleDict):
        return isinstance(getattr(module, "base_layer", None), nn.Module)
    has_factors = _matrix(factor_a) is not None and _matrix(factor_b) is not None
    return has_factors and _base_holder(module) is not None


def is_readable(module: nn.Module) -> bool:
    """True if scale and shape of a map's updates are known."""
    factor_a, factor_b = _factors(module)
    if isinstance(factor_a, nn.ModuleDict) or callable(getattr(module, "get_lora_AB", None)):
        return True
    matrix_a = _matrix(factor_a)
    matrix_b = _matrix(factor_b)
    if matrix_a is None or matrix_b is None:
        return False
    weight: Any = base_of(module).weight
    has_shape_of_base = (len(matrix_b), *matrix_a.shape[1:]) == tuple(weight.shape)
    return has_shape_of_base and _scale(module) is not None


def base_of(module: nn.Module) -> nn.Module:
    """Return the module that has the matrix without updates, which may be the map itself."""
    while is_lora(module):
        inner = _base_holder(module)
        if inner is None or inner is module:
            return module
        module = inner
    return module


def update_of(module: Any) -> Tensor:
    """Return Σ scaling·B A over the active adapters, (outputs, inputs)."""
    if not isinstance(_factors(module)[0], nn.ModuleDict):
        return _single_update(module)
    updates = []
    for name in _active_adapters(module):
        matrix_b = module.lora_B[name].weight.flatten(1)  # (outputs, rank)
        matrix_a = module.lora_A[name].weight.flatten(1)  # (rank, inputs)
        updates.append(module.scaling[name] * (matrix_b @ matrix_a))
    if updates:
        return _sum(updates)
    base = base_of(module)
    weight: Any = base.weight
    shape = weight.shape
    if not isinstance(base, (nn.Linear, nn.modules.conv._ConvNd)):
        shape = shape[::-1]  # GPT-2's Conv1D keeps (inputs, outputs)
    return torch.zeros(shape, device=weight.device)


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def with_update(module: Any, base: Tensor) -> Tensor:
    """Return the matrix (outputs, inputs) that acts, from that of the base."""
    is_off = bool(getattr(module, "merged", False)) or bool(getattr(module, "disabled", False))
    if is_off or not _active_adapters(module):
        return base
    weight = base.to(torch.float32) + update_of(module).to(torch.float32)
    for lengths in _row_lengths(module):
        weight = weight * (lengths / torch.linalg.vector_norm(weight, dim=1))[:, None]
    return weight


def _factors(module: Any) -> tuple[Any, Any]:
    """Return A and B as a library keeps them: modules, parameters, or None."""
    factor_a = _child_or_parameter(module, "lora_A", "lora_a")
    factor_b = _child_or_parameter(module, "lora_B", "lora_b")
    return factor_a, factor_b


def _child_or_parameter(module: Any, *names: str) -> Any:
    # From the dictionaries of a module: hasattr costs an exception per module of a large model.
    for place in (module._modules, module._parameters):
        for name in names:
            if name in place:
                return place[name]
    return None


def _matrix(factor: Any) -> Tensor | None:
    if isinstance(factor, nn.Linear):
        factor = factor.weight
    if not isinstance(factor, Tensor) or factor.dim() != 2:
        return None
    return factor


def _base_holder(module: Any) -> nn.Module | None:
    """Return the module with the base: one inside, or this one."""
    for name in ("base_layer", "linear"):
        inner = module._modules.get(name)
        if isinstance(inner, nn.Module):
            return inner
    if _matrix(module._parameters.get("weight")) is None:
        return None
    holder: nn.Module = module
    return holder


def _scale(module: Any) -> float | None:
    """Return the factor of B A; None if the module has none under a known name."""
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, (int, float)):
        return float(scaling)
    alpha = getattr(module, "alpha", None)
    rank = getattr(module, "rank", None)
    if isinstance(alpha, (int, float)) and isinstance(rank, int) and rank > 0:
        return alpha / rank
    return None


def _single_update(module: Any) -> Tensor:
    # litgpt; of queries, keys and values, some may have no update.
    if callable(getattr(module, "get_lora_AB", None)):
        update: Tensor = module.get_lora_AB()
        return update
    matrix_a = _matrix(_factors(module)[0])
    matrix_b = _matrix(_factors(module)[1])
    scale = _scale(module)
    if matrix_a is None or matrix_b is None or scale is None:
        raise ValueError(
            f"the scale of the low-rank update of {type(module).__name__} is not known"
        )
    return scale * (matrix_b @ matrix_a)


def _row_lengths(module: Any) -> list[Tensor]:
    """Return the lengths of rows that DoRA has learned; none for plain LoRA."""
    if isinstance(_factors(module)[0], nn.ModuleDict):
        vectors = getattr(module, "lora_magnitude_vector", {})
        return [vectors[name].weight for name in _active_adapters(module) if name in vectors]
    magnitude = module._parameters.get("magnitude")
    if magnitude is None:
        return []
    return [magnitude]


def _active_adapters(module: Any) -> list[str]:
    if not isinstance(_factors(module)[0], nn.ModuleDict):
        return ["default"]
    if bool(getattr(module, "disable_adapters", False)):
        return []
    names = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", None)
    names = names or list(module.lora_A)
    if isinstance(names, str):
        names = [names]
    return [name for name in names if name in module.lora_A]
