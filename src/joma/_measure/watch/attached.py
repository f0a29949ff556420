"""The modules that are watched, and by which watch: a model has one at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping

from torch import nn

_lock = threading.Lock()  # two threads may ask for the same model
_watched: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def claim(names: Mapping[nn.Module, str], watch: str) -> None:
    """Record that modules (-> their names) are watched; refuse those that are already.

    ``watch`` describes by whom, for the message.
    """
    with _lock:
        check_free(names)
        for module in names:
            _watched[module] = watch


def check_free(names: Mapping[nn.Module, str]) -> None:
    """Refuse modules (-> their names) that are watched already."""
    for module, name in names.items():
        if module in _watched:
            raise ValueError(
                f"{name} of this model is watched already ({_watched[module]}); close that watch "
                "first, or give it more gauges"
            )


def release(modules: Iterable[nn.Module]) -> None:
    """Record that modules are not watched any more."""
    for module in modules:
        _watched.pop(module, None)
