"""Knowing which module of a model is running, with nothing left on the model.

While a listener is installed, `nn.Module.__call__` passes through here. Modules themselves are not touched (no hooks,
no replaced `forward`), so copying, pickling and compiling a watched model work as ever; and since the detour is an
ordinary ``try … finally``, an exception or Ctrl-C leaves nothing behind.

Other libraries replace `nn.Module.__call__`, too. A detour calls what it found, and is taken away only if it is still
the one in place. Where a library has wrapped it in the meantime, it stays inside of that wrapper and passes calls on.
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
    """Who wants to know that a module is called."""

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
        """A compiled call begins, and nothing inside of it is seen; False if modules of another thread must be."""
        ...


class _Thread(threading.local):
    is_quiet = False  # calls of modules are passed on unseen


# the last listener of a module hears of its calls: a model that is inspected while it is watched is not measured twice
_listeners: weakref.WeakKeyDictionary[nn.Module, list[Listener]] = weakref.WeakKeyDictionary()
_installed: list[Listener] = []
_thread = _Thread()
_replaced: weakref.WeakKeyDictionary[ModuleCall, ModuleCall] = (
    weakref.WeakKeyDictionary()
)  # detour -> what it found
_detour: ModuleCall | None = None  # the one that is alive


def is_compiled(module: nn.Module) -> bool:
    """True if this module itself, not one inside it, is run by torch.compile."""
    # Looked up in dictionaries: a missing attribute of a module takes 2 µs, and all modules are asked in every pass.
    own = vars(module)
    if own.get("_compiled_call_impl") is not None or "_torchdynamo_orig_callable" in own:
        return True
    forward = own.get("forward") or getattr(type(module), "forward", None)
    return hasattr(forward, "_torchdynamo_inline")


def compiled_original(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` was given, if this is what it returned."""
    own = vars(module)
    if "_torchdynamo_orig_callable" not in own:
        return None
    original = own.get("_modules", {}).get("_orig_mod")
    return original if isinstance(original, nn.Module) else None


def call_pristine(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module, and let nobody hear of it or of the modules inside; other threads are heard as ever."""
    with quiet():
        return module(*args, **kwargs)


@contextmanager
def quiet() -> Iterator[None]:
    """Let nobody hear of the modules that this thread calls within this block."""
    before = _thread.is_quiet
    _thread.is_quiet = True
    try:
        yield
    finally:
        _thread.is_quiet = before


def _new_detour(replaced: ModuleCall) -> ModuleCall:
    def detour(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
        ):  # asked first: a compiler that traces this sees nothing else of it
            return replaced(self, *args, **kwargs)
        if detour is not _detour or _thread.is_quiet or torch._C._is_tracing():
            return replaced(self, *args, **kwargs)
        listeners = _listeners.get(self)
        module = self
        if not listeners:
            # torch.compile(model) after the watch has begun is a module around the one that is watched
            original = compiled_original(self)
            listeners = None if original is None else _listeners.get(original)
            module = self if original is None else original
        if (
            not listeners or torch._C._current_graph_task_id() >= 0
        ):  # not ours, or recomputed during backward
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
    """From now on ``listener`` hears of calls of these modules."""
    for module in modules:
        _listeners.setdefault(module, []).append(listener)
    _installed.append(listener)
    _put_in_place()
    mind_border()


def mind_border() -> None:
    """Take the detour away in compiled calls; to be called again later, since Dynamo is imported when it is needed."""
    if _detour is not None:
        # torch.compile(model) keeps whatever nn.Module.__call__ is at that time. The detour's frame is not compiled
        # then, as that of the pristine function is not; those that it calls are.
        close_border(_hide, _detour.__code__)


def uninstall(listener: Listener) -> bool:
    """Undo ``install``; return False if it was not done."""
    was_installed = listener in _installed
    if was_installed:
        _installed.remove(listener)
        for listeners in _listeners.values():
            if listener in listeners:
                listeners.remove(listener)
    if not _installed:
        _take_away()
        open_border()
    return was_installed


def is_bypassed() -> bool:
    """True if calls do not pass through here though somebody listens: a library has put back what it had found."""
    current = nn.Module.__call__
    return current is not _detour and (
        current in _replaced or current is nn.Module._wrapped_call_impl
    )


def _put_in_place(former: ModuleCall | None = None) -> None:
    """Let module calls pass through a detour; through the ``former`` one, if it was on top of what is called now."""
    global _detour
    current = nn.Module.__call__
    if current is _detour:
        return
    found = _without_dead_detours(current)
    if former is None or former is not _detour or _replaced[former] is not found:
        _detour = _new_detour(found)
    nn.Module.__call__ = _detour  # type: ignore[method-assign]


def _take_away() -> None:
    global _detour
    _detour = None
    current = nn.Module.__call__
    pristine = _without_dead_detours(current)
    if pristine is not current:
        nn.Module.__call__ = pristine  # type: ignore[method-assign]


def _without_dead_detours(call: ModuleCall) -> ModuleCall:
    """Return what is called in the end by detours that only pass calls on."""
    while call in _replaced and call is not _detour:
        call = _replaced[call]
    return call


def _hide() -> Callable[[], None]:
    """Take the detour away while a compiled function runs; return how to put it back."""
    may_be_taken_away = [listener.on_compiled_call() for listener in _installed]
    was_quiet = _thread.is_quiet
    _thread.is_quiet = True
    hidden = _detour
    if hidden is not None and nn.Module.__call__ is hidden and all(may_be_taken_away):
        nn.Module.__call__ = _replaced[hidden]  # type: ignore[method-assign]

    def show() -> None:
        _thread.is_quiet = was_quiet
        if _installed:
            _put_in_place(hidden)

    return show
