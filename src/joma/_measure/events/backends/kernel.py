"""Functions of Python that compute attention and that no mode of PyTorch sees.

FlexAttention compiles itself, and the functions of flash_attn run kernels of their own. In a
measured pass the names that stand for such a function stand for one that calls it, and then looks
at its arguments and its output (`joma._measure.events.backends.replaced_names`).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from joma._measure.events.backends.backend import Backend, DotProductCall, first_output
from joma._measure.events.backends.replaced_names import names_replaced
from joma._measure.events.events import DotProduct

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

_DROPOUT = "dropout_p"  # the argument of flash_attn; other kernels have no dropout


class KernelBackend(Backend):
    """A function of Python that computes attention.

    A subclass names the function and says how to read its arguments. joma finds the function under
    whatever name a model calls it, compiled, as a static method or in a `functools.partial`, and
    compares a few rows of softmax(s)·V with its output before it measures anything.

    Attributes:
        name: the name that `joma.explain` shows.
        functions: the functions, as "package.module.function". A module that is not imported is
            left alone.
    """

    functions: ClassVar[Sequence[str]]

    @abstractmethod
    def read(self, arguments: dict[str, Any], output: Tensor) -> DotProductCall:
        """Return the attention of one call; see `dot_product`.

        Arguments:
            arguments: all arguments of the function by name, defaults included.
            output: what the function returned, or the first part of it.
        """

    def dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        learned_sinks: Tensor | None = None,
    ) -> DotProductCall:
        """Return an attention by its tensors, for `read`.

        Arguments:
            query: (B, H, Tq, d).
            key: (B, Hk, Tk, d); Hk divides H.
            value: (B, Hk, Tk, dv).
            output: (B, H, Tq, dv).
            mask: broadcastable to (B, H, Tq, Tk); boolean (True takes part) or additive.
            causal: True if query i sees keys 0 … i only, of those that the mask lets it see.
            scale: factor of the scores; 1/√d by default.
            softcap: c, if scores s become c·tanh(s/c).
            learned_sinks: logits (H,) of one more key per head, which has no value.
        """
        if causal and mask is not None:
            # Kernels take one or the other, and so do the statistics: both become one mask.
            mask = _causal_part(mask, query.shape[2], key.shape[2])
            causal = False
        return DotProductCall(
            query, key, value, output, mask, causal, scale, softcap, learned_sinks
        )

    @staticmethod
    @contextmanager
    def watching(source: EventSource, backends: Sequence[KernelBackend]) -> Iterator[None]:
        """Recognise calls of these backends within a block."""
        imported: dict[Any, KernelBackend] = {}
        for backend in backends:
            for path in backend.functions:
                module, _, name = path.rpartition(".")
                function = getattr(sys.modules.get(module), name, None)
                if function is not None:
                    imported[function] = backend

        def replace(function: Callable[..., Any], original: Any) -> Callable[..., Any]:
            return imported[original].watched(source, function)

        with names_replaced(tuple(imported), source.model, replace):
            yield

    def watched(self, source: EventSource, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls this one, looks at the call, and returns its output."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not source.running:
                return function(*args, **kwargs)
            running = source.running[-1]
            attentions_before = running.attentions
            with _without_function_mode(source):
                output = function(*args, **kwargs)
                # A kernel that calls PyTorch's own attention was seen in that.
                was_seen = running.attentions > attentions_before
                if not was_seen and not torch.compiler.is_compiling():
                    # What joma computes must not be seen by modes of the user either.
                    with source.guarded(), torch._C.DisableTorchFunction():
                        self._report(source, function, output, args, kwargs)
            return output

        return call

    def _report(
        self,
        source: EventSource,
        function: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Report a call in the innermost running module as a candidate."""
        call = source.running[-1]
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        arguments: dict[str, Any] = dict(bound.arguments)
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        if not self.can_measure(source, DotProduct, call, *tensors):
            return
        attention = self.read(arguments, first_output(output))
        # A mask that comes or goes changes neither shape nor type of the others.
        absent = [name for name, value in arguments.items() if value is None]
        shapes = (attention.query.shape, attention.key.shape, attention.query.dtype, *absent)
        candidate = self.candidate(source, call, attention, shapes)
        if arguments.get(_DROPOUT):

            def without_dropout(sample: int) -> Tensor:
                states = first_output(function(**arguments | {_DROPOUT: 0.0}))
                return self.read(arguments, states).output[sample]  # (H, Tq, dv)

            candidate.output_without_dropout = without_dropout
        source.guard.on_attention(candidate)


def _without_function_mode(source: EventSource) -> AbstractContextManager[object]:
    """Leave the function mode of the pass for a block, if it is the innermost one.

    Otherwise a compiled kernel would be compiled once more, for a call inside of a mode.
    """
    modes = _get_current_function_mode_stack()
    if modes and modes[-1] is source.function_mode:
        return _pop_mode_temporarily()
    return nullcontext()


def _causal_part(mask: Tensor, query_count: int, key_count: int) -> Tensor:
    """Return a mask (…, Tq, Tk) that hides later keys as well."""
    is_earlier = torch.ones(query_count, key_count, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is torch.bool:
        return mask & is_earlier
    return torch.where(is_earlier, mask, -math.inf)
