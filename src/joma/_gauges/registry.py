"""The one table of gauge names, for ``watch``, ``scan``, the command line and the docs.

A gauge measures one thing on a model. What its function is given depends on what it is measured ``on``:

    attention   an ``AttentionStats`` -> a tensor (B, H, Tq) that is averaged over real queries, a value a head
    weight      a matrix (m, n)       -> a number
    hidden      states (tokens, d)    -> a number
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal

On = Literal["attention", "weight", "hidden"]
Reduce = Literal["mean", "max"]


@dataclass(frozen=True)
class Gauge:
    """One quantity measured on a model."""

    name: str
    on: On
    function: Callable[[Any], Any]
    help: str
    reduce: Reduce = "mean"  # how an attention gauge becomes one value a head


_GAUGES: dict[str, Gauge] = {}


def gauge(name: str, on: On, *, reduce: Reduce = "mean") -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function as the gauge ``name``.

    >>> @gauge("largest_weight", on="weight")
    ... def largest_weight(w):
    ...     "The largest entry of the matrix by size."
    ...     return float(w.abs().max())
    >>> get(["largest_weight"])[0].help
    'The largest entry of the matrix by size.'
    >>> remove("largest_weight")
    """
    if on not in ("attention", "weight", "hidden"):
        raise ValueError(f"a gauge is measured on 'attention', 'weight' or 'hidden', not on {on!r}")
    if not name.isidentifier():
        raise ValueError(f"a gauge's name must be an identifier such as 'stable_rank', got {name!r}")

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if name in _GAUGES and _GAUGES[name].function is not function:
            raise ValueError(f"there is a gauge {name!r} already; choose another name")
        text = (function.__doc__ or "").strip()
        _GAUGES[name] = Gauge(name, on, function, text.split("\n")[0], reduce)
        return function

    return register


def remove(name: str) -> None:
    """Forget a gauge that was registered."""
    _GAUGES.pop(name, None)


def gauges() -> dict[str, Gauge]:
    """All gauges by name: built in, registered, and those that installed packages bring (group ``joma.gauges``)."""
    from joma._gauges import builtin  # noqa: F401  (registers them)

    for entry in entry_points(group="joma.gauges"):
        if entry.name not in _GAUGES:
            entry.load()
    return dict(_GAUGES)


def get(names: Iterable[str]) -> list[Gauge]:
    """The gauges with these names; an unknown one is an error that tells the nearest."""
    table = gauges()
    chosen = []
    for name in names:
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown gauge {name!r}.{hint} Known: {', '.join(table)}.")
        chosen.append(table[name])
    return chosen
