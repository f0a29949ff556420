"""Which modules are watched, by whom: a model has one watch at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn

_watched: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def check_free(names: Mapping[nn.Module, str]) -> None:
    """Refuse modules (-> their names) that are watched already."""
    clash = next((module for module in names if module in _watched), None)
    if clash is not None:
        raise ValueError(
            f"{names[clash]} of this model is watched already ({_watched[clash]}); close that watch first, or give it "
            "more gauges"
        )


def claim(modules: Iterable[nn.Module], watch: str) -> None:
    """They are watched from now on, by what ``watch`` describes."""
    for module in modules:
        _watched[module] = watch


def release(modules: Iterable[nn.Module]) -> None:
    """They are not any more."""
    for module in modules:
        _watched.pop(module, None)
