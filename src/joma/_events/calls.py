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


# the last listener of a module hears of its calls: a model that is inspected while it is watched is not measured twice
_listeners: weakref.WeakKeyDictionary[nn.Module, list[Listener]] = weakref.WeakKeyDictionary()
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
    listeners = _listeners.get(self)
    if not listeners or torch._C._current_graph_task_id() >= 0:  # not ours, or recomputed during backward
        return call_pristine(self, args, kwargs) if is_compiled(self) else _pristine(self, *args, **kwargs)
    return listeners[-1].on_call(self, lambda: _pristine(self, *args, **kwargs), args, kwargs)


def install(listener: Listener, modules: list[nn.Module]) -> None:
    """From now on ``listener`` hears of calls of these modules."""
    for module in modules:
        _listeners.setdefault(module, []).append(listener)
    _installed.append(listener)
    nn.Module.__call__ = _detour  # type: ignore[method-assign]


def uninstall(listener: Listener) -> bool:
    """Undo ``install``; False if it was not done."""
    if listener not in _installed:
        return False
    _installed.remove(listener)
    for listeners in _listeners.values():
        if listener in listeners:
            listeners.remove(listener)
    if not _installed:
        nn.Module.__call__ = _pristine  # type: ignore[method-assign]
    return True
