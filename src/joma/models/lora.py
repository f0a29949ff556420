"""Linear maps with low-rank updates (LoRA): the matrix that acts, base + update.

A map computes W x + Σ scaling·B A x over its active adapters; with DoRA, the rows of that sum have lengths of their
own. Merged adapters are in the base already. Libraries differ in where they keep W: peft in ``base_layer``, with one
pair of factors per adapter; litgpt in ``linear``; torchtune and loralib in the module itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_lora(module: nn.Module) -> bool:
    """True if this is a linear map with low-rank updates."""
    a, b = _factors(module)
    if isinstance(a, nn.ModuleDict) and isinstance(b, nn.ModuleDict):
        return isinstance(getattr(module, "base_layer", None), nn.Module)
    return _matrix(a) is not None and _matrix(b) is not None and _holder(module) is not None


def is_readable(module: nn.Module) -> bool:
    """True if what the updates add is known: their scale, and how the factors make a matrix of the base's shape."""
    if isinstance(_factors(module)[0], nn.ModuleDict) or callable(
        getattr(module, "get_lora_AB", None)
    ):
        return True
    a, b = (_matrix(factor) for factor in _factors(module))
    weight: Any = base_of(module).weight
    has_shape = a is not None and b is not None and (len(b), *a.shape[1:]) == tuple(weight.shape)
    return has_shape and _scale(module) is not None


def base_of(module: nn.Module) -> nn.Module:
    """The module that has the matrix without updates; the map itself, if it has both."""
    while is_lora(module):
        inner = _holder(module)
        if inner is None or inner is module:
            return module
        module = inner
    return module


def update_of(module: Any) -> Tensor:
    """Σ scaling·B A over the active adapters, (out, in)."""
    if not isinstance(_factors(module)[0], nn.ModuleDict):
        return _single_update(module)
    adapters = _active(module)
    total: Tensor | None = None
    for name in adapters:
        b, a = module.lora_B[name].weight.flatten(1), module.lora_A[name].weight.flatten(1)
        update = module.scaling[name] * (b @ a)
        total = update if total is None else total + update
    if total is None:
        weight: Any = base_of(module).weight
        turned = not isinstance(base_of(module), (nn.Linear, nn.modules.conv._ConvNd))
        total = torch.zeros(weight.shape[::-1] if turned else weight.shape, device=weight.device)
    return total


def with_update(module: Any, base: Tensor) -> Tensor:
    """The matrix (out, in) that acts, from that of the base."""
    is_off = bool(getattr(module, "merged", False)) or bool(getattr(module, "disabled", False))
    if is_off or not _active(module):
        return base
    w = base.to(torch.float32) + update_of(module).to(torch.float32)
    for length in _lengths(module):  # DoRA
        w = w * (length / torch.linalg.vector_norm(w, dim=1))[:, None]
    return w


def _factors(module: Any) -> tuple[Any, Any]:
    """A and B, as a library keeps them; None for what is not there."""
    # from the dicts of a module: hasattr costs an exception per module of a large model
    places = (module._modules, module._parameters)
    names = (("lora_A", "lora_a"), ("lora_B", "lora_b"))
    found = [
        next((place[n] for place in places for n in pair if n in place), None) for pair in names
    ]
    return found[0], found[1]


def _matrix(factor: Any) -> Tensor | None:
    weight = factor.weight if isinstance(factor, nn.Linear) else factor
    return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _holder(module: Any) -> nn.Module | None:
    """Which module has the base: one inside, or this one."""
    for name in ("base_layer", "linear"):
        inner = module._modules.get(name)
        if isinstance(inner, nn.Module):
            return inner
    weight = module._parameters.get("weight")
    return module if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _scale(module: Any) -> float | None:
    """The factor of B A; None if it is not known."""
    scaling = getattr(module, "scaling", None)
    if isinstance(scaling, (int, float)):
        return float(scaling)
    alpha, rank = getattr(module, "alpha", None), getattr(module, "rank", None)
    if isinstance(alpha, (int, float)) and isinstance(rank, int) and rank > 0:
        return alpha / rank
    return None


def _single_update(module: Any) -> Tensor:
    if callable(
        getattr(module, "get_lora_AB", None)
    ):  # litgpt; of queries, keys and values, some have none
        update: Tensor = module.get_lora_AB()
        return update
    a, b = (_matrix(factor) for factor in _factors(module))
    scale = _scale(module)
    if a is None or b is None or scale is None:
        raise ValueError(
            f"the scale of the low-rank update of {type(module).__name__} is not known"
        )
    return scale * (b @ a)


def _lengths(module: Any) -> list[Tensor]:
    """Of the rows, where DoRA has learnt them."""
    if isinstance(_factors(module)[0], nn.ModuleDict):
        vectors = getattr(module, "lora_magnitude_vector", {})
        return [vectors[name].weight for name in _active(module) if name in vectors]
    magnitude = module._parameters.get("magnitude")
    return [] if magnitude is None else [magnitude]


def _active(module: Any) -> list[str]:
    """Names of the adapters that act."""
    if not isinstance(_factors(module)[0], nn.ModuleDict):
        return ["default"]
    if bool(getattr(module, "disable_adapters", False)):
        return []
    names = (
        getattr(module, "active_adapters", None)
        or getattr(module, "active_adapter", None)
        or list(module.lora_A)
    )
    names = [names] if isinstance(names, str) else list(names)
    return [name for name in names if name in module.lora_A]
