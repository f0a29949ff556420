"""`F.multi_head_attention_forward`, which `nn.MultiheadAttention` calls.

The function hides its inside from a function mode. So a dispatch mode, pushed for this one call
only, looks for the fused operator or the softmax. (A dispatch mode around a whole pass would leave
a compiled model eager for good.)
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from joma._measure.events.backends.backend import DotProductCall, fixed_layout
from joma._measure.events.backends.function_mode import TorchFunctionBackend
from joma._measure.events.events import DotProduct, Scores
from joma._measure.events.guard import FUNCTION_CHECK, AttentionCandidate
from joma._measure.events.tensors import shape_of

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

_FUSED_PREFIX = "_scaled_dot_product_"  # of the flash, efficient, cuDNN, … operators
_SOFTMAX_OPERATORS = ("_softmax", "_safe_softmax")


class MultiHeadBackend(TorchFunctionBackend):
    """PyTorch's own attention module, fused or, if weights are asked for, with a softmax.

    It gives queries, keys, values, mask, causal flag and scale, or scores and probabilities. Its
    axes are fixed: the query is (T, B, d) or (T, d), the inside (B, H, T, d) or (B·H, T, T).
    """

    name = "multi-head forward"
    functions: ClassVar = (F.multi_head_attention_forward,)
    event_kinds = (DotProduct, Scores)

    def call(
        self,
        source: EventSource,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the function with a mode around it that looks inside."""
        inside: AbstractContextManager[object] = nullcontext()
        with source.guarded():
            query, key = _read(*args, **kwargs)
            inside = _InsideMode(self, source, query, key)
        with inside:
            return function(*args, **kwargs)

    def on_call(
        self,
        source: EventSource,
        function: Any,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Do nothing: the mode has reported what was inside."""

    def report_fused(
        self, source: EventSource, attention: DotProductCall, is_self_attention: bool
    ) -> None:
        """Report a fused operator as a candidate."""
        call = source.running[-1]
        if not self.can_measure(source, DotProduct, call, attention.query, attention.key):
            return
        shapes = (
            attention.query.shape,
            attention.key.shape,
            shape_of(attention.mask),
            attention.causal,
            attention.output.dtype,
            shape_of(call.states),
        )
        candidate = self.candidate(source, call, attention, shapes, f"{self.name}, fused")
        candidate.is_self = is_self_attention
        source.guard.on_attention(candidate)

    def report_softmax(
        self,
        source: EventSource,
        scores: Tensor,
        probabilities: Tensor,
        samples: int,
        is_self_attention: bool,
    ) -> None:
        """Report a softmax over scores (B·H, Tq, Tk), which is sure to be multiplied with values."""
        call = source.running[-1]
        if not self.can_measure(source, Scores, call, scores):
            return
        *lead, queries, keys = scores.shape
        heads = math.prod(lead) // samples
        scores = scores.reshape(samples, heads, queries, keys)  # (B, H, Tq, Tk)
        probabilities = probabilities.reshape(samples, heads, queries, keys)
        candidate = AttentionCandidate(
            Scores,
            call,
            source.calls_to(call),
            signature=(shape_of(scores), scores.dtype, shape_of(call.states)),
            keys=None,
            fields={"scores": scores, "probabilities": probabilities},
            query_axis=2,
            layout=fixed_layout(scores),
            is_self=is_self_attention,
            backend=f"{self.name}, softmax",
            comparison=FUNCTION_CHECK,
        )
        source.guard.on_attention(candidate)


class _InsideMode(TorchDispatchMode):
    """Sees the operators that one call of the function runs."""

    def __init__(
        self, backend: MultiHeadBackend, source: EventSource, query: Tensor, key: Tensor
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend
        self._source = source
        self._samples = 1
        if query.dim() == 3:
            self._samples = query.shape[1]  # (T, B, d)
        # The module transposes its inputs, each by itself if they are not one tensor: equal values
        # count, not only the same memory.
        self._is_self_attention = query.shape == key.shape and (
            query.data_ptr() == key.data_ptr() or torch.equal(query, key)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        # "aten::_softmax" -> "_softmax"
        operator = func._schema.name.removeprefix("aten::")
        if operator.startswith(_FUSED_PREFIX):
            with self._source.guarded():
                attention = _read_operator(func, output[0], args, kwargs)
                self._backend.report_fused(self._source, attention, self._is_self_attention)
        elif operator in _SOFTMAX_OPERATORS:
            with self._source.guarded():
                self._backend.report_softmax(
                    self._source, args[0], output, self._samples, self._is_self_attention
                )
        return output


def _read(query: Tensor, key: Tensor, *others: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Return query and key, by the signature of the function."""
    return query, key


def _read_operator(
    operator: Any, output: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DotProductCall:
    """Return the call of a fused operator; each of them has its own order of arguments."""
    names = [argument.name for argument in operator._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    return DotProductCall(
        arguments["query"],
        arguments["key"],
        arguments["value"],
        output,
        mask=arguments.get("attn_mask", arguments.get("attn_bias")),
        causal=arguments.get("is_causal", False),
        scale=arguments.get("scale"),
    )
