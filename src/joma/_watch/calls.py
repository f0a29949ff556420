"""Knowing which module of a model is running, with nothing left on the model.

While a listener is installed, `nn.Module.__call__` passes through here. Modules themselves are not touched (no hooks,
no replaced `forward`), so copying, pickling and compiling a watched model work as ever; and since the detour is an
ordinary ``try … finally``, an exception or Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

_pristine: Callable[..., Any] = nn.Module.__call__


class Listener(Protocol):
    """Who wants to know that a module is called."""

    def on_call(self, module: nn.Module, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Must return ``call()``."""
        ...


_listeners: weakref.WeakKeyDictionary[nn.Module, Listener] = weakref.WeakKeyDictionary()
_installed: list[Listener] = []


def is_compiled(module: nn.Module) -> bool:
    """Is this module itself, not one inside it, run by torch.compile?"""
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or hasattr(module, "_torchdynamo_orig_callable") or hasattr(module.forward, "_torchdynamo_inline")


def call_pristine(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module without the detour: nothing of it may be seen by a compiler."""
    nn.Module.__call__ = _pristine  # type: ignore[method-assign]
    try:
        return module(*args, **kwargs)
    finally:
        if _installed:
            nn.Module.__call__ = _detour  # type: ignore[method-assign]


def _detour(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _pristine(self, *args, **kwargs)
    listener = _listeners.get(self)
    if listener is None or torch._C._current_graph_task_id() >= 0:  # not ours, or recomputed during backward
        return call_pristine(self, args, kwargs) if is_compiled(self) else _pristine(self, *args, **kwargs)
    return listener.on_call(self, lambda: _pristine(self, *args, **kwargs), args, kwargs)


def install(listener: Listener, modules: list[nn.Module]) -> None:
    """From now on ``listener`` hears of calls of these modules."""
    for module in modules:
        _listeners[module] = listener
    _installed.append(listener)
    nn.Module.__call__ = _detour  # type: ignore[method-assign]


def uninstall(listener: Listener) -> None:
    """Undo ``install``; harmless if it was not done."""
    if listener not in _installed:
        return
    _installed.remove(listener)
    for module in [module for module, other in _listeners.items() if other is listener]:
        del _listeners[module]
    if not _installed:
        nn.Module.__call__ = _pristine  # type: ignore[method-assign]
