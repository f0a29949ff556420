"""The border between joma and torch.compile: a compiler sees nothing of joma.

A compiled function that is called in a watched pass is traced with whatever surrounds it: the modes
on the stack, and the current `nn.Module.__call__`. So joma's modes and its detour are removed when
a compiled call begins, and put back when it ends. The compiled code and its guards are then the
same as without joma.

Every compiled call sets the callback of frame evaluation when it begins and sets it back when it
ends, both times by ``torch._dynamo.eval_frame._maybe_set_eval_frame``. While joma listens, it
replaces this function.
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
_SETTER = "_maybe_set_eval_frame"

Restore = Callable[[], None]
Hide = Callable[[], Restore]


class UncompiledMode(TorchFunctionMode):
    """A mode that is left while compiled functions run."""


class _CompiledCall(threading.local):
    frame: FrameType | None = None  # of the outermost compiled call
    restore: Restore | None = None


_thread = _CompiledCall()
_hide: Hide | None = None
_original_setter: Callable[[Any], Any] | None = None


def close_border(hide: Hide, code: CodeType) -> None:
    """Call ``hide`` when a compiled call begins, and the function that it returns when it ends.

    Frames of ``code`` are not compiled, those that they call are. Harmless if done already.
    """
    global _hide, _original_setter
    _hide = hide
    # Importing Dynamo takes seconds; as long as it is not imported, nothing is compiled.
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is not None and getattr(dynamo, _SETTER, _at_border) is not _at_border:
        _original_setter = getattr(dynamo, _SETTER)
        setattr(dynamo, _SETTER, _at_border)
        dynamo.skip_code(code)


def open_border() -> None:
    """Undo `close_border`."""
    global _hide
    _hide = None
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is not None and getattr(dynamo, _SETTER, None) is _at_border:
        setattr(dynamo, _SETTER, _original_setter)


def _at_border(callback: Any) -> Any:
    """Set the callback of frame evaluation, in the place of Dynamo's own function.

    None is no callback; anything else begins or continues a compiled call.
    """
    assert _original_setter is not None
    frame = sys._getframe(1)
    if _thread.frame is frame:
        # The outermost compiled call sets the callback back: it ends.
        result = _original_setter(callback)
        restore = _thread.restore
        _thread.frame = None
        _thread.restore = None
        if restore is not None:
            restore()
        return result
    if _thread.frame is None and callback is not None:
        _thread.frame = frame
        _thread.restore = _hide_all()
    # The last call: once a callback is set, Dynamo would trace whatever is called here.
    return _original_setter(callback)


def _hide_all() -> Restore:
    restore_calls: Restore | None = None
    if _hide is not None:
        restore_calls = _hide()
    modes = _get_current_function_mode_stack()
    other_modes = [mode for mode in modes if not isinstance(mode, UncompiledMode)]
    has_own_modes = len(other_modes) < len(modes)
    if has_own_modes:
        _set_modes(other_modes)

    def restore() -> None:
        if has_own_modes:
            _set_modes(modes)
        if restore_calls is not None:
            restore_calls()

    return restore


def _set_modes(modes: list[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
