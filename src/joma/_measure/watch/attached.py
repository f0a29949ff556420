"""Which modules are watched, by whom: a model has one watch at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping

from torch import nn

_lock = threading.Lock()  # two threads may ask for the same model
_watched: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def claim(names: Mapping[nn.Module, str], watch: str) -> None:
    """Modules (-> their names) are watched from now on, by what ``watch`` describes; refused if they are already."""
    with _lock:
        check_free(names)
        for module in names:
            _watched[module] = watch


def check_free(names: Mapping[nn.Module, str]) -> None:
    """Refuse modules (-> their names) that are watched already."""
    clash = next((module for module in names if module in _watched), None)
    if clash is not None:
        raise ValueError(
            f"{names[clash]} of this model is watched already ({_watched[clash]}); close that watch first, or give it "
            "more gauges"
        )


def release(modules: Iterable[nn.Module]) -> None:
    """They are not any more."""
    for module in modules:
        _watched.pop(module, None)
