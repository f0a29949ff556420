"""Outputs of attention that are added or subtracted, as in differential attention.

Differential attention computes softmax(s₁)·V − λ·softmax(s₂)·V. Each map by itself is a correct
attention, but the module attends with neither. So the outputs of attentions that the guard is
examining are followed through views, copies and scaling; it asks whether two of them meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joma._measure.events.backends.function_listener import FunctionListener, TorchFunction
from joma._measure.events.events import Call
from joma._measure.events.tensors import is_plain

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

# Combine two tensors.
_SUBTRACTIONS: set[TorchFunction] = {
    torch.sub,
    torch.subtract,
    torch.rsub,
    Tensor.sub,
    Tensor.sub_,
    Tensor.subtract,
    Tensor.subtract_,
    Tensor.__sub__,
    Tensor.__rsub__,
    Tensor.__isub__,
}
_ADDITIONS: set[TorchFunction] = {
    torch.add,
    torch.addcmul,
    torch.lerp,
    Tensor.add,
    Tensor.add_,
    Tensor.addcmul,
    Tensor.addcmul_,
    Tensor.lerp,
    Tensor.lerp_,
    Tensor.__add__,
    Tensor.__radd__,
    Tensor.__iadd__,
}
_COMBINING = _SUBTRACTIONS | _ADDITIONS
# Combine the parts of one tensor that holds both maps, stacked or as halves of the heads.
_REDUCING: set[TorchFunction] = {torch.sum, torch.diff, Tensor.sum, Tensor.diff}
# Give the same states in another form.
_SCALING: set[TorchFunction] = {
    torch.mul,
    torch.multiply,
    torch.div,
    torch.neg,
    Tensor.mul,
    Tensor.mul_,
    Tensor.multiply,
    Tensor.div,
    Tensor.neg,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.__imul__,
    Tensor.__truediv__,
    Tensor.__neg__,
    F.dropout,
}
_RESHAPING: set[TorchFunction] = {
    torch.reshape,
    torch.flatten,
    torch.clone,
    torch.cat,
    torch.stack,
    Tensor.reshape,
    Tensor.flatten,
    Tensor.clone,
    Tensor.contiguous,
    Tensor.to,
    Tensor.float,
    Tensor.type_as,
}
_PASSING_ON = _SCALING | _RESHAPING


class CombinationListener(FunctionListener):
    """Marks module calls in which outputs of attention are combined."""

    functions: ClassVar = _COMBINING | _REDUCING | _PASSING_ON

    def call(
        self,
        source: EventSource,
        function: TorchFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the function; look at the call only while an attention is examined.

        Additions and multiplications are the most frequent functions of a model, and attentions
        are examined in a few passes only.
        """
        running = source.running
        if running and running[-1].followed:
            return super().call(source, function, args, kwargs)
        return function(*args, **kwargs)

    def on_call(
        self,
        source: EventSource,
        function: TorchFunction,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Note that outputs were combined, or follow what the function made of one."""
        call = source.running[-1]
        if not isinstance(output, Tensor):
            return
        operands: Sequence[Any] = (*args, *kwargs.values())
        if operands and isinstance(operands[0], (list, tuple)):
            operands = operands[0]
        followed_operands = 0
        for operand in operands:
            if is_plain(operand) and _is_followed(call, operand):
                followed_operands += 1
        if function in _COMBINING:
            call.combined |= followed_operands >= 2
        elif function in _REDUCING:
            call.combined |= followed_operands >= 1
        elif followed_operands:
            call.followed.append(output)


def _is_followed(call: Call, tensor: Tensor) -> bool:
    # Views share the storage of the tensor that they are views of.
    storage = tensor.untyped_storage().data_ptr()
    return any(storage == other.untyped_storage().data_ptr() for other in call.followed)
