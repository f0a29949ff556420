"""The functions of PyTorch that a pass calls, seen by a `TorchFunctionMode`.

Each function is called first and looked at afterwards, so that the model computes the same bits
and an event holds the output too. Functions without a listener cost one lookup in a dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from joma._measure.events.backends.backend import Backend
from joma._measure.events.backends.combination_listener import CombinationListener
from joma._measure.events.backends.function_listener import FunctionListener, TorchFunction
from joma._measure.events.backends.product_listener import ProductListener
from joma._measure.events.border import UncompiledMode

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

# Not backends: what they see tells the guard which softmax is attention, and whether the outputs
# of two attentions are combined.
_EVIDENCE = (ProductListener(), CombinationListener())


class TorchFunctionBackend(FunctionListener, Backend):
    """A backend that is recognised by a call of a function of PyTorch."""

    @staticmethod
    def watching(
        source: EventSource, backends: Sequence[FunctionListener]
    ) -> AbstractContextManager[object]:
        """Recognise calls of these backends within a block."""
        source.function_mode = FunctionMode(source, backends)
        return source.function_mode


class FunctionMode(UncompiledMode):
    """Passes each call of a function to the listener of that function.

    An `UncompiledMode` is left while compiled functions run. A compiler that traced through it
    would compile the function once more, and a graph break inside a listener crashes the model.
    """

    def __init__(self, source: EventSource, listeners: Sequence[FunctionListener]) -> None:
        super().__init__()
        self._source = source
        self._listeners: dict[TorchFunction, FunctionListener] = {}
        for listener in (*listeners, *_EVIDENCE):
            for function in listener.functions:
                self._listeners[function] = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        listener = self._listeners.get(func)
        if listener is None:
            return func(*args, **(kwargs or {}))
        return listener.call(self._source, func, args, kwargs or {})
