"""Which module of a model is running, with nothing left on the model.

While a listener is installed, `nn.Module.__call__` takes a detour through this module. The modules
themselves are not touched (no hooks, no replaced `forward`), so that copying, pickling and
compiling a watched model work as ever. Since the detour is an ordinary ``try … finally``, an
exception or Ctrl-C leaves nothing behind; hooks that are always called miss KeyboardInterrupt.

Other libraries replace `nn.Module.__call__`, too. A detour calls the function that it replaced, and
is removed only if it is still in place. Where a library has wrapped it in the meantime, it stays
inside of that wrapper and passes calls on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from joma._measure.events.border import close_border, open_border

ModuleCall = Callable[..., Any]


class Listener(Protocol):
    """Receives the calls of modules."""

    def on_call(
        self,
        module: nn.Module,
        call: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_compiled: bool = False,
    ) -> Any:
        """Return ``call()``; ``is_compiled`` if the call is that of ``torch.compile(module)``."""
        ...

    def on_compiled_call(self) -> bool:
        """Note that a compiled call begins, inside of which nothing is seen.

        Return False if modules of another thread must be seen meanwhile.
        """
        ...


class _Thread(threading.local):
    is_quiet = False  # calls of modules are passed on unseen


# The last listener of a module receives its calls: a model that is inspected while it is watched
# is not measured twice.
_listeners: weakref.WeakKeyDictionary[nn.Module, list[Listener]] = weakref.WeakKeyDictionary()
_installed: list[Listener] = []
_thread = _Thread()
# detour -> the function that it replaced
_replaced: weakref.WeakKeyDictionary[ModuleCall, ModuleCall] = weakref.WeakKeyDictionary()
_detour: ModuleCall | None = None  # the one that is alive


def is_compiled(module: nn.Module) -> bool:
    """True if this module itself, not one inside it, is run by torch.compile."""
    # Looked up in dictionaries: a missing attribute of a module takes 2 µs, and all modules are
    # asked in every pass.
    attributes = vars(module)
    if attributes.get("_compiled_call_impl") is not None:
        return True
    if "_torchdynamo_orig_callable" in attributes:
        return True
    forward = attributes.get("forward") or getattr(type(module), "forward", None)
    return hasattr(forward, "_torchdynamo_inline")


def compiled_original(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` was given, if this is what it returned."""
    attributes = vars(module)
    if "_torchdynamo_orig_callable" not in attributes:
        return None
    original = attributes.get("_modules", {}).get("_orig_mod")
    if not isinstance(original, nn.Module):
        return None
    return original


def call_pristine(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module unseen, with the modules inside; calls of other threads are seen as ever."""
    with quiet():
        return module(*args, **kwargs)


@contextmanager
def quiet() -> Iterator[None]:
    """Pass on the calls of modules that this thread makes within this block unseen."""
    was_quiet = _thread.is_quiet
    _thread.is_quiet = True
    try:
        yield
    finally:
        _thread.is_quiet = was_quiet


def _new_detour(replaced: ModuleCall) -> ModuleCall:
    def detour(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Asked first: a compiler that traces the detour then sees nothing else of it.
        if torch.compiler.is_compiling():
            return replaced(self, *args, **kwargs)
        if detour is not _detour or _thread.is_quiet or torch._C._is_tracing():
            return replaced(self, *args, **kwargs)
        module = self
        listeners = _listeners.get(self)
        if not listeners:
            # torch.compile(model), after a watch has begun, is a module around the watched one.
            original = compiled_original(self)
            if original is not None:
                module = original
                listeners = _listeners.get(original)
        if not listeners:
            return replaced(self, *args, **kwargs)
        # During backward, activation checkpointing computes modules again, which is no new pass.
        if torch._C._current_graph_task_id() >= 0:
            return replaced(self, *args, **kwargs)
        return listeners[-1].on_call(
            module,
            lambda: replaced(self, *args, **kwargs),
            args,
            kwargs,
            is_compiled=module is not self,
        )

    _replaced[detour] = replaced
    return detour


def install(listener: Listener, modules: list[nn.Module]) -> None:
    """Let a listener receive the calls of these modules from now on."""
    for module in modules:
        _listeners.setdefault(module, []).append(listener)
    _installed.append(listener)
    _insert_detour()
    mind_border()


def mind_border() -> None:
    """Have the detour removed during compiled calls.

    To be called in every pass: Dynamo is imported when it is first needed.
    """
    if _detour is not None:
        # torch.compile(model) keeps whatever nn.Module.__call__ is at that time. The frame of the
        # detour is not compiled then, like that of the pristine function; those that it calls are.
        close_border(_hide, _detour.__code__)


def uninstall(listener: Listener) -> bool:
    """Undo ``install``, but leave the detour; return False if it was not done."""
    was_installed = listener in _installed
    if was_installed:
        _installed.remove(listener)
        for listeners in _listeners.values():
            if listener in listeners:
                listeners.remove(listener)
    return was_installed


def remove_unused_detour() -> None:
    """Let module calls take no detour if no listener is installed."""
    if not _installed:
        _remove_detour()
        open_border()


def is_bypassed() -> bool:
    """True if calls take no detour though a listener is installed.

    That is the case if a library has put back what it had replaced earlier.
    """
    current = nn.Module.__call__
    if current is _detour:
        return False
    return current in _replaced or current is nn.Module._wrapped_call_impl


def _insert_detour(former: ModuleCall | None = None) -> None:
    """Let module calls take a detour.

    The ``former`` one is used again if it stood on top of what is called now.
    """
    global _detour
    current = nn.Module.__call__
    if current is _detour:
        return
    target = _without_dead_detours(current)
    can_use_former = former is not None and former is _detour and _replaced[former] is target
    if not can_use_former:
        _detour = _new_detour(target)
    assert _detour is not None
    nn.Module.__call__ = _detour  # type: ignore[method-assign]


def _remove_detour() -> None:
    global _detour
    _detour = None
    current = nn.Module.__call__
    pristine = _without_dead_detours(current)
    if pristine is not current:
        nn.Module.__call__ = pristine  # type: ignore[method-assign]


def _without_dead_detours(call: ModuleCall) -> ModuleCall:
    """Return the function that detours which only pass calls on call in the end."""
    while call in _replaced and call is not _detour:
        call = _replaced[call]
    return call


def _hide() -> Callable[[], None]:
    """Remove the detour while a compiled function runs; return the function that restores it."""
    can_be_removed = True
    # Every listener is asked: each counts compiled calls.
    for listener in _installed:
        if not listener.on_compiled_call():
            can_be_removed = False
    was_quiet = _thread.is_quiet
    _thread.is_quiet = True
    hidden = _detour
    if hidden is not None and nn.Module.__call__ is hidden and can_be_removed:
        nn.Module.__call__ = _replaced[hidden]  # type: ignore[method-assign]

    def restore() -> None:
        _thread.is_quiet = was_quiet
        if _installed:
            _insert_detour(hidden)

    return restore
