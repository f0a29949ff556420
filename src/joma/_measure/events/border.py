"""The border between joma and torch.compile: a compiler sees nothing of joma.

A compiled function that is called in a watched pass is traced with whatever surrounds it: modes on the stack, and what
`nn.Module.__call__` is. So joma's modes and its detour are taken away when a compiled call begins, and put back when it
ends. The compiled code and its guards are then those that the function has without joma.

Every compiled call sets the callback of frame evaluation when it begins, and sets it back when it ends, both times by
``torch._dynamo.eval_frame._maybe_set_eval_frame``. This is where joma stands, while it listens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

_DYNAMO = "torch._dynamo.eval_frame"
_NAME = "_maybe_set_eval_frame"

Hide = Callable[[], Callable[[], None]]


class UncompiledMode(TorchFunctionMode):
    """A mode that is left while compiled functions run."""


class _CompiledCall(threading.local):
    frame: FrameType | None = None  # of the outermost compiled call
    show: Callable[[], None] | None = None


_thread = _CompiledCall()
_hide: Hide | None = None
_original: Callable[[Any], Any] | None = None


def close_border(hide: Hide, code: CodeType) -> None:
    """Call ``hide`` when a compiled call begins, and what it returns when the call ends; harmless if done already.

    Frames of ``code`` are not compiled, those that they call are.
    """
    global _hide, _original
    _hide = hide
    dynamo = sys.modules.get(_DYNAMO)  # importing it takes seconds; without it nothing is compiled
    if dynamo is not None and getattr(dynamo, _NAME, _at_border) is not _at_border:
        _original = getattr(dynamo, _NAME)
        setattr(dynamo, _NAME, _at_border)
        dynamo.skip_code(code)


def open_border() -> None:
    """Undo `close_border`."""
    global _hide
    _hide = None
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is not None and getattr(dynamo, _NAME, None) is _at_border:
        setattr(dynamo, _NAME, _original)


def _at_border(callback: Any) -> Any:
    """Set the callback of frame evaluation: None is none, anything else begins or continues a compiled call."""
    assert _original is not None
    frame = sys._getframe(1)
    if _thread.frame is frame:
        result = _original(callback)
        show = _thread.show
        _thread.frame = None
        _thread.show = None
        if show is not None:
            show()
        return result
    if _thread.frame is None and callback is not None:
        _thread.frame = frame
        _thread.show = _hide_all()
    # The last call: once a callback is set, Dynamo would trace whatever is called here.
    return _original(callback)


def _hide_all() -> Callable[[], None]:
    show_calls = None if _hide is None else _hide()
    modes = _get_current_function_mode_stack()
    has_modes = any(isinstance(mode, UncompiledMode) for mode in modes)
    if has_modes:
        _set_modes([mode for mode in modes if not isinstance(mode, UncompiledMode)])

    def show() -> None:
        if has_modes:
            _set_modes(modes)
        if show_calls is not None:
            show_calls()

    return show


def _set_modes(modes: list[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
