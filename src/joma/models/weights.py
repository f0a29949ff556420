"""The matrix that a module multiplies with, whatever its class: (outputs, inputs).

nn.Linear, GPT-2's Conv1D, convolutions of kernel 1, and each of them with low-rank updates, pruned,
or with a weight that is computed before each pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from joma.models.lora import base_of, is_lora, with_update
from joma.models.sharded import gather


def is_conv1d(module: nn.Module) -> bool:
    """True for GPT-2's Conv1D of transformers, a linear map with its weight transposed."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def is_pointwise_convolution(module: nn.Module) -> bool:
    """True for a convolution of kernel 1, which is a linear map of the channels at each position."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.transposed:
        return False
    is_pointwise = all(size == 1 for size in (*module.kernel_size, *module.stride))
    return is_pointwise and module.groups < module.in_channels


def effective_weight(module: nn.Module) -> Tensor:
    """Return the matrix (outputs, inputs) that acts, with what low-rank adapters add.

    A grouped convolution gives (outputs, inputs / groups); see `block_diagonal`.
    """
    weight = base_weight(base_of(module))
    if is_lora(module):
        weight = with_update(module, weight)
    return weight


def base_weight(module: nn.Module) -> Tensor:
    """Return (outputs, inputs) of a map without updates, as its next pass will compute it."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    # These compute the weight before each pass, from parameters that an optimiser may have stepped
    # since the last one: the attribute is stale.
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == "weight":
            weight = hook.apply_mask(module)
        elif isinstance(hook, WeightNorm) and hook.name == "weight":
            weight = hook.compute_weight(module)
        elif isinstance(hook, SpectralNorm) and hook.name == "weight":
            weight = hook.compute_weight(module, do_power_iteration=False)
    return oriented(module, weight)


def oriented(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a tensor shaped as a module's weight, as (outputs, inputs)."""
    if is_conv1d(module):
        return weight.T
    if weight.dim() > 2:
        return weight.flatten(1)  # (outputs, inputs, 1, 1) of a convolution
    return weight


def flat_rows(view: Tensor) -> Tensor:
    """Return (rows, n) from (…, rows, n)."""
    if view.dim() == 2:
        return view
    return view.flatten(0, -2)


def block_diagonal(groups: int, views: list[Tensor]) -> list[Tensor]:
    """Return (outputs, inputs) of a grouped convolution, from (outputs, inputs / groups)."""
    return [torch.block_diag(*gather(view).chunk(groups)) for view in views]
