"""Products of two activations: the scores of eager attention, and its weights with the values.

Worked example, one head of width 8 and 14 tokens:

    q (3, 14, 8) @ kᵀ (3, 8, 14)    a product of 588 numbers; a softmax over 588 numbers in the
                                    same module is attention
    p (3, 14, 14) @ v (3, 14, 8)    the product that this attention waits for
    x (3, 14, 8) @ w (8, 24)        w is a parameter: a projection, evidence for the axes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from joma._measure.events.axes import RecordedProjection
from joma._measure.events.backends.function_listener import FunctionListener, TorchFunction
from joma._measure.events.products import read_product
from joma._measure.events.tensors import is_plain

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource


class ProductListener(FunctionListener):
    """Keeps products of two activations, and projections that are no modules."""

    functions: ClassVar[Sequence[TorchFunction]] = (
        torch.matmul,
        torch.linalg.matmul,
        torch.bmm,
        torch.baddbmm,
        torch.einsum,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.bmm,
        Tensor.baddbmm,
    )

    def on_call(
        self,
        source: EventSource,
        function: TorchFunction,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Hand a product to the guard, or keep it as a projection."""
        operands = (*args, *kwargs.values())
        product = read_product(function, output, operands)
        if product is None:
            self._on_contraction(source, operands)
            return
        if not output.numel() or not all(map(is_plain, product.operands)):
            return
        first_is_parameter, second_is_parameter = map(source.is_parameter, product.operands)
        if not (first_is_parameter or second_is_parameter):
            source.guard.on_product(product)
            # By its number of elements: scores are reshaped and transposed on their way to a
            # softmax, which changes the shape but not the number.
            source.running[-1].products[output.numel()] = product
        elif source.guard.collects:
            parameter = 1
            if first_is_parameter:
                parameter = 0
            states = product.operands[1 - parameter]
            projection = RecordedProjection(states, product.projected(parameter))
            source.running[-1].projections.append(projection)

    def _on_contraction(self, source: EventSource, operands: Sequence[Any]) -> None:
        """Hand a product of three and more activations to the guard: linear attention."""
        tensors = [operand for operand in operands if is_plain(operand)]
        if len(tensors) > 2 and not any(map(source.is_parameter, tensors)):
            source.guard.on_contraction(tensors)
