"""A listener to calls of functions of PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

TorchFunction = Callable[..., Any]


class FunctionListener(ABC):
    """Looks at calls of some functions of PyTorch.

    Attributes:
        functions: the functions, as a `TorchFunctionMode` receives them.
    """

    functions: ClassVar[Collection[TorchFunction]]

    def call(
        self,
        source: EventSource,
        function: TorchFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the function, look at the call, and return the output."""
        output = function(*args, **kwargs)
        with source.guarded():
            self.on_call(source, function, output, args, kwargs)
        return output

    @abstractmethod
    def on_call(
        self,
        source: EventSource,
        function: TorchFunction,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Look at a call that has returned; exceptions become problems of the running module."""
