"""The hidden neurons of MLPs: which modules are given them, and how they are read."""

from __future__ import annotations

import math

from torch import Tensor, nn

from joma._measure.events.events import Call
from joma._measure.events.tensors import first_argument
from joma.models.structure import find


def upper_mlps(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return name and module of the upper matrix of each MLP, in the order of the layers."""
    structure = find(model)
    modules = structure.modules
    uppers = []
    for matrix in structure.matrices("mlp_out"):
        name = matrix.name
        if name not in modules:
            raise ValueError(
                f"{name} is one of a stack of experts, whose neurons see only the tokens routed "
                "to them; superposition is measured on models without experts"
            )
        if isinstance(modules[name], nn.modules.conv._ConvNd):
            raise ValueError(
                f"{name} is a convolution, whose neurons come before the tokens; superposition is "
                "measured on MLPs of linear maps"
            )
        uppers.append((name, modules[name]))
    if not uppers:
        raise ValueError(
            f"no MLP was found in {type(model).__name__}: no block maps d → h and then h → d"
        )
    return uppers


def hidden_states(upper: Call, outermost: Call) -> Tensor:
    """Return the input (B, T, h) of the upper matrix of an MLP.

    Worked example: OPT puts all tokens of a batch one after the other here. Given tokens (3, 14),
    states (42, h) become (3, 14, h).
    """
    states = first_argument(upper.args, upper.kwargs)
    if states is None:
        raise ValueError("it is given no tensor; expected states of shape (B, T, h)")
    tokens = first_argument(outermost.args, outermost.kwargs)
    if tokens is not None and tokens.dim() == 2 and states.dim() == 2:
        shape = tuple(tokens.shape)  # (B, T)
        if len(states) == math.prod(shape):
            states = states.unflatten(0, shape)
    if states.dim() != 3:
        raise ValueError(f"it is given states of shape {tuple(states.shape)}, not (B, T, h)")
    return states
