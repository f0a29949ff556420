"""What kind of pass a call of a model is: training, generation, tracing; under which autocast."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from joma._measure.events.events import Pass
from joma._measure.events.tensors import first_argument, tensors_in


def has_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a pass with these arguments, begun now, is training."""
    return torch.is_grad_enabled() or _is_checkpointed(args, kwargs)


def _is_checkpointed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True in the forward pass of a reentrant checkpoint, which computes without gradients.

    Its inputs distinguish it from validation: they were computed with gradients.
    """
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.requires_grad:
            return _is_called_from("torch.utils.checkpoint", "forward")
    return False


def is_traced() -> bool:
    """True inside of `torch.jit.trace`, which also runs the model to check what it has traced."""
    return _is_called_from("torch.jit._trace")


def _is_called_from(module: str, function: str | None = None) -> bool:
    """True if code of this module, or one function in it, is running in this thread."""
    # By the frames of the stack: a run that checks a trace, and a reentrant checkpoint, show
    # nowhere else.
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file and function in (None, code.co_name):
            return True
        frame = frame.f_back
    return False


def has_one_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the model is given one token per sample, (B, 1) or (B, 1, d)."""
    first = first_argument(args, kwargs)
    return first is not None and first.dim() > 1 and first.shape[1] == 1


def input_versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return how often each tensor among the arguments was written to."""
    versions = []
    for value in (*args, *kwargs.values()):
        # Tensors of inference mode have no version.
        if isinstance(value, Tensor) and not value.is_inference():
            versions.append(value._version)
    return versions


def autocast_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the type that autocast computes in where the parameters are; None without."""
    device = "cpu"
    for parameter in module.parameters():
        device = parameter.device.type
        break
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def mark_backward(output: Any, current: Pass) -> None:
    """Let a pass know when gradients flow back through its output; they are not changed."""

    def mark(gradients: Any) -> None:
        current.has_backward = True

    tensors = list(tensors_in(output))
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(mark)
    # A reentrant checkpoint computes without gradients, and some outputs hide their tensors: such
    # a pass counts as used.
    is_detached = not any(tensor.requires_grad for tensor in tensors)
    if not tensors or (is_detached and not torch.is_grad_enabled()):
        current.has_backward = True
