"""Linear maps with low-rank updates (LoRA, in the naming of peft): the matrix that acts, base + update.

A module that holds ``base_layer``, ``lora_A`` and ``lora_B`` (one pair per adapter) computes W x + Σ scaling·B A x over
its active adapters; with DoRA, the rows of that sum have lengths of their own. Merged adapters are in the base already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_lora(module: nn.Module) -> bool:
    """Is this a linear map with low-rank updates?"""
    parts = (getattr(module, "lora_A", None), getattr(module, "lora_B", None))
    return isinstance(getattr(module, "base_layer", None), nn.Module) and all(
        isinstance(part, nn.ModuleDict) for part in parts
    )


def base_of(module: nn.Module) -> nn.Module:
    """The linear map itself, without updates."""
    while is_lora(module):
        module = module.base_layer  # type: ignore[assignment]
    return module


def update_of(module: Any) -> Tensor:
    """Σ scaling·B A over the active adapters, (out, in)."""
    adapters = _active(module)
    total: Tensor | None = None
    for name in adapters:
        update = module.scaling[name] * (module.lora_B[name].weight @ module.lora_A[name].weight)
        total = update if total is None else total + update
    if total is None:
        weight: Any = base_of(module).weight
        turned = not isinstance(base_of(module), nn.Linear)
        total = torch.zeros(weight.shape[::-1] if turned else weight.shape, device=weight.device)
    return total


def with_update(module: Any, base: Tensor) -> Tensor:
    """The matrix (out, in) that acts, from that of the base."""
    if bool(getattr(module, "merged", False)) or not _active(module):
        return base
    w = base.to(torch.float32) + update_of(module).to(torch.float32)
    for name in _active(module):
        if name in getattr(module, "lora_magnitude_vector", {}):  # DoRA
            length = module.lora_magnitude_vector[name].weight
            w = w * (length / torch.linalg.vector_norm(w, dim=1))[:, None]
    return w


def _active(module: Any) -> list[str]:
    """Names of the adapters that act."""
    if bool(getattr(module, "disable_adapters", False)):
        return []
    names = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", None) or list(module.lora_A)
    names = [names] if isinstance(names, str) else list(names)
    return [name for name in names if name in module.lora_A]
