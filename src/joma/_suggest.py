"""Errors for mistyped names, which suggest the nearest names that exist. Needs the standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.5  # of difflib's ratio: "rleu" still suggests "relu"


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return a question with the nearest of ``names``, three at most, after a space; "" if none is near.

    >>> did_you_mean("sofmax", ["linear", "exp", "softmax"])
    " Did you mean 'softmax'?"
    >>> did_you_mean("tanh", ["linear", "exp", "softmax"])
    ''
    """
    similar = difflib.get_close_matches(str(name), list(names), n=3, cutoff=_CUTOFF)
    if not similar:
        return ""
    return f" Did you mean {' or '.join(map(repr, similar))}?"


def unknown_name(name: object, names: Iterable[str], noun: str) -> str:
    """Return the text of an error: the unknown name, what it may mean, and all names.

    >>> unknown_name("rya", ["processes", "ray"], "engine")
    "unknown engine 'rya'. Did you mean 'ray'? Known: processes, ray."
    """
    names = list(names)
    return f"unknown {noun} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}."
