"""The one table of gauge names, for ``watch``, ``scan``, the command line and the docs.

A gauge measures one thing on a model. What its function is given depends on what it is measured ``on``:

    attention   an ``AttentionStats`` -> a tensor (B, H, Tq) that is averaged over real queries, one value per head
    weight      a matrix (m, n)       -> a number; with given="top", its `TopSingular`, which is shared between gauges,
                                         warm-started from step to step and worked out on shards
    hidden      states (tokens, d)    -> a number
    block       a ``BlockMotion``     -> a number: what happened to a block since the measurement before
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Literal

On = Literal["attention", "weight", "hidden", "block"]
Reduce = Literal["mean", "max"]
Given = Literal["matrix", "top"]
# parts of a block that weight gauges can be measured on, as in "stable_rank.qk"; the first by default
PARTS = {
    "mlp_in": "the lower MLP matrix: projection into the hidden neurons",
    "mlp_out": "the upper MLP matrix: projection out of the hidden neurons",
    "q": "query projection",
    "k": "key projection",
    "v": "value projection",
    "o": "output projection of attention",
    "qk": "W_Q W_Kᵀ per head",
}
UPDATE = "_update"  # as in "stable_rank.q_update": what LoRA adds to a matrix
PARTS |= {f"{part}{UPDATE}": f"LoRA's update of it: {what}" for part, what in PARTS.items() if part != "qk"}


@dataclass(frozen=True)
class Gauge:
    """One quantity measured on a model."""

    name: str
    on: On
    function: Callable[[Any], Any]
    help: str
    reduce: Reduce = "mean"  # how an attention gauge becomes one value per head
    given: Given = "matrix"  # what a weight gauge is given
    part: str = "mlp_in"  # the matrix that a weight gauge is measured on

    def measure(self, w: Any, top: Any = None) -> float:
        """The value of a weight gauge on a matrix; ``top`` is its `TopSingular` if that is known already."""
        from joma._gauges.rank import top_singular
        from joma._gauges.sharded import whole

        if self.given == "top":
            return float(self.function(top_singular(w) if top is None else top))
        return float(self.function(whole(w)))


_GAUGES: dict[str, Gauge] = {}


def gauge(
    name: str, on: On, *, reduce: Reduce = "mean", given: Given = "matrix"
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function as the gauge ``name``.

    Arguments:
        name: an identifier; it is what `watch`, `scan` and the command line call it.
        on: what the function is given: "attention" an `AttentionStats` (it returns (B, H, Tq)), "weight" a matrix
            (m, n), "hidden" states (tokens, d), "block" a `BlockMotion` (it returns a number).
        reduce: how an attention gauge becomes one value per head: "mean" or "max" over real queries.
        given: "top" gives a weight gauge the largest singular value and the norm, which gauges share, not the matrix.

    Returns:
        A decorator. The first line of the function's docstring is what `joma gauges` shows.

    >>> @gauge("largest_weight", on="weight")
    ... def largest_weight(w):
    ...     "The largest entry of the matrix by size."
    ...     return float(w.abs().max())
    >>> get(["largest_weight"])[0].help
    'The largest entry of the matrix by size.'
    >>> remove("largest_weight")
    """
    if on not in ("attention", "weight", "hidden", "block"):
        raise ValueError(f"a gauge is measured on 'attention', 'weight', 'hidden' or 'block', not on {on!r}")
    if not name.isidentifier():
        raise ValueError(f"a gauge's name must be an identifier such as 'stable_rank', got {name!r}")

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if name in _GAUGES and _GAUGES[name].function is not function:
            raise ValueError(f"there is a gauge {name!r} already; choose another name")
        text = (function.__doc__ or "").strip()
        _GAUGES[name] = Gauge(name, on, function, text.split("\n")[0], reduce, given)
        return function

    return register


def remove(name: str) -> None:
    """Forget a gauge that was registered."""
    _GAUGES.pop(name, None)


def gauges() -> dict[str, Gauge]:
    """All gauges by name: built in, registered, and those that installed packages bring (group ``joma.gauges``).

    Returns:
        Name -> gauge, with what it is measured on and a line of help.
    """
    from joma._gauges import assumptions, builtin  # noqa: F401  (registers them)

    for entry in entry_points(group="joma.gauges"):
        if entry.name not in _GAUGES:
            entry.load()
    return dict(_GAUGES)


def get(names: Iterable[str]) -> list[Gauge]:
    """The gauges with these names; an unknown one is an error that tells the nearest.

    A weight gauge may name the part it is measured on: "stable_rank.q" is the stable rank of the query projections.
    """
    table = gauges()
    chosen = []
    for full in [names] if isinstance(names, str) else names:
        name, _, part = full.partition(".")
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown gauge {name!r}.{hint} Known: {', '.join(table)}.")
        if part and (table[name].on != "weight" or part not in PARTS):
            parts = f"; parts are {', '.join(PARTS)}" if table[name].on == "weight" else ", which has no parts"
            raise ValueError(f"there is no part {part!r} of the gauge {name!r}{parts}")
        chosen.append(replace(table[name], name=full, part=part) if part else table[name])
    return list({gauge.name: gauge for gauge in chosen}.values())
