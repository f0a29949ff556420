"""Eager attention: a softmax over a product of two activations, whatever the module is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joma._measure.events.backends.function_mode import TorchFunctionBackend
from joma._measure.events.events import Call, Scores
from joma._measure.events.guard import AttentionCandidate
from joma._measure.events.products import Product
from joma._measure.events.tensors import is_plain, shape_of

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_LOG_SOFTMAX = (
    F.log_softmax,
    torch.log_softmax,
    Tensor.log_softmax,
    torch.special.log_softmax,
)


class EagerBackend(TorchFunctionBackend):
    """Attention that a model writes out: scores, softmax, product with the values.

    It gives scores and probabilities; a mask is in the scores. Its axes are open, and so is
    whether it is attention at all: routers and classifiers compute a softmax over a product too.
    The guard holds it until the probabilities are multiplied with values.
    """

    name = "eager softmax"
    functions: ClassVar = (*_SOFTMAX, *_LOG_SOFTMAX)
    event_kinds = (Scores,)
    has_fixed_axes = False

    def on_call(
        self,
        source: EventSource,
        function: Any,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Report a softmax over a product; keep any other as a hint for the guard."""
        scores, dim = _read(*args, **kwargs)
        if dim is None or scores.dim() < 2 or not scores.is_floating_point() or not scores.numel():
            return
        origin = _find_product(source, scores, dim)
        if origin is not None:
            call, product = origin
            probabilities = output
            # Some models keep log-probabilities, and take exp() for the product with values.
            if function in _LOG_SOFTMAX:
                probabilities = output.detach().exp()
            self._report(source, call, product, scores, probabilities, dim)
        elif source.running and is_plain(scores):
            source.guard.on_softmax(scores.movedim(dim, -1))

    def _report(
        self,
        source: EventSource,
        call: Call,
        product: Product,
        scores: Tensor,
        probabilities: Tensor,
        dim: int,
    ) -> None:
        if not self.can_measure(source, Scores, call, scores):
            return
        shape = tuple(scores.shape)
        rows = scores.movedim(dim, -1)  # (…, Tk)
        candidate = AttentionCandidate(
            Scores,
            call,
            source.calls_to(call),
            signature=(shape_of(rows), rows.dtype, shape_of(call.states)),
            keys=product.operands[1],
            fields={"scores": rows, "probabilities": probabilities.movedim(dim, -1)},
            read_queries=lambda: product.queries(shape, dim),
            read_keys=lambda query_axis: product.keys(shape, dim, query_axis),
            backend=self.name,
        )
        source.guard.on_attention(candidate)


def _read(
    input: Tensor, dim: int | None = None, *others: Any, **named: Any
) -> tuple[Tensor, int | None]:
    """Return scores and the axis of the keys, by the signature that all softmaxes share."""
    return input, dim


def _find_product(source: EventSource, scores: Tensor, dim: int) -> tuple[Call, Product] | None:
    """Return the product that the scores come from, and the innermost module that computed it.

    Worked example: scores (2, 4, 14, 14) come from a product of 1,568 numbers. Scores
    (2, 4, 14, 15) may come from the same product, with a learned sink next to the keys.
    """
    size = scores.numel()
    columns = scores.shape[dim]
    size_without_sink = size // columns * (columns - 1)
    for call in reversed(source.running):
        for product_size in (size, size_without_sink):
            if product_size in call.products:
                return call, call.products[product_size]
    return None
