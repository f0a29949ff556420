"""Which tensors can be read, and where they are in the arguments and the output of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Types that are never sharded.
_ORDINARY_TYPES = (Tensor, nn.Parameter)


def is_plain(tensor: Any) -> bool:
    """True for an ordinary tensor, all of whose values are in this process."""
    return isinstance(tensor, Tensor) and not is_sharded(tensor) and not is_transformed(tensor)


def is_sharded(tensor: Tensor) -> bool:
    """True if this process holds only a part of the tensor (DTensor and its like)."""
    # Asked some hundred times per pass, and looking for a missing attribute is slow.
    if type(tensor) in _ORDINARY_TYPES:
        return False
    # DTensor has to_local, AsyncCollectiveTensor has elem. By attribute: importing either loads
    # torch.distributed.
    return hasattr(tensor, "to_local") or hasattr(tensor, "elem")


def is_transformed(tensor: Tensor) -> bool:
    """True for the stand-ins that torch.func (grad, vmap, …) computes with."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    return None


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a model, whatever holds them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from tensors_in(part)
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors_in(part)
    elif hasattr(output, "__dict__"):
        # Only direct attributes: an object may refer to itself.
        for part in vars(output).values():
            if isinstance(part, Tensor):
                yield part


def shape_of(tensor: Tensor | None) -> tuple[int, ...] | None:
    """Return the shape of a tensor as a tuple, or None without one."""
    if tensor is None:
        return None
    return tuple(tensor.shape)
