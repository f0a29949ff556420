"""The one table of gauge names, for ``watch``, ``scan``, the command line and the docs.

A gauge measures one thing on a model. What its function is given depends on what it is measured ``on``:

    attention   an ``AttentionStats`` -> a tensor (B, H, Tq) that is averaged over real queries, one value per head
    keys        a ``Received``        -> a tensor (B, H), from what each key receives; averaged over samples
    stream      a ``Stream``          -> a number: the residual stream after a block, and what was written to it
    neurons     states (tokens, h)    -> a number, from the hidden neurons of an MLP
    router      a ``Routing``         -> a number, from a router's logits and choices
    weight      a matrix (m, n)       -> a number; with given="top", its `TopSingular`, which is shared between gauges,
                                         warm-started from step to step and worked out on shards
    hidden      states (tokens, d)    -> a number
    gradient    the gradient of a matrix (m, n) that the optimiser is about to use; else as "weight"
    update      what an optimiser's step did to a matrix, relative to its size: ΔW/‖W‖_F (m, n); else as "weight"
    change      what has become of a matrix since the checkpoint before, relative to its size then; else as "update"
    charge      a `ChargeState`       -> a number, or one per head
    block       a ``BlockMotion``     -> a number: what happened to a block since the measurement before
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

from joma.models.parts import PARTS, PRODUCTS, UPDATE

On = Literal[
    "attention", "keys", "weight", "hidden", "stream", "neurons", "router", "gradient", "update", "change", "charge",
    "block",
]  # fmt: skip
IN_STREAM: tuple[On, ...] = ("stream", "neurons", "router")
IN_ATTENTION: tuple[On, ...] = ("attention", "keys")  # have one value per head
Reduce = Literal["mean", "max"]
Given = Literal["matrix", "top"]
# kinds of charges, as in "charge.vo"; the first by default
CHARGES = {
    "qk": "queries against keys, per head",
    "vo": "values against outputs, per head",
    "mlp": "what enters a neuron against what leaves it",
    "norm": "a normalisation's channels against all that read them",
    "stream": "all that is written to the residual stream",
}
# products are known up to rotations, which is enough for their singular values, and not for a difference of two
_MATRICES = {part: what for part, what in PARTS.items() if part not in PRODUCTS}
# nor have they a gradient of their own, and neither has what LoRA adds
_PARAMETERS = {part: what for part, what in _MATRICES.items() if not part.endswith(UPDATE)}
_PARTS_ON: dict[On, dict[str, str]] = {
    "attention": {}, "keys": {}, "hidden": {}, "stream": {}, "neurons": {}, "router": {}, "block": {},
    "weight": PARTS, "gradient": _PARAMETERS, "update": _PARAMETERS, "change": _MATRICES, "charge": CHARGES,
}  # fmt: skip


@dataclass(frozen=True)
class Gauge:
    """One quantity measured on a model."""

    name: str
    on: On
    function: Callable[[Any], Any]
    help: str
    reduce: Reduce = "mean"  # over queries, to one value per head; and over heads and experts, for loggers
    given: Given = "matrix"  # what a weight gauge is given
    part: str = ""  # the matrix, or the kind of charge, that it is measured on; "" of attention and hidden states

    @property
    def runs_model(self) -> bool:
        """Is it measured in passes of the model?"""
        return self.on in (*IN_ATTENTION, *IN_STREAM, "hidden", "block")

    @property
    def per_head(self) -> bool:
        """Has it one value per head of each layer?"""
        products = {"weight": PRODUCTS, "charge": PRODUCTS}
        return self.on in IN_ATTENTION or self.part in products.get(self.on, ())

    @property
    def axes(self) -> list[str]:
        """What its values on a model are indexed by."""
        return ["layer", "head"] if self.per_head else ["layer"]

    @property
    def needs_steps(self) -> bool:
        """Can it be measured in training only?"""
        return self.on in ("gradient", "update", "block") or self.name.split(".")[0] in (
            "charge_residual",
            "charge_drift",
        )

    def measure(self, w: Any, top: Any = None) -> float | None:
        """Return the value on a matrix, or None where the gauge is not defined.

        ``top`` is the matrix's `TopSingular`, if it is known already.
        """
        from joma._measure.gauges.rank import top_singular
        from joma.models.sharded import whole

        if self.given != "top":
            return number_or_none(self.function(whole(w)))
        return number_or_none(self.function(top_singular(w) if top is None else top))


def number_or_none(value: Any) -> float | None:
    """Return what a gauge's function gave as a float; None, for "not defined here", stays None."""
    return None if value is None else float(value)


_GAUGES: dict[str, Gauge] = {}


def gauge(
    name: str, on: On, *, reduce: Reduce = "mean", given: Given = "matrix"
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Register a function as the gauge ``name``.

    Arguments:
        name: an identifier; it is what `watch`, `scan` and the command line call it.
        on: what the function is given: "attention" an `AttentionStats` (it returns (B, H, Tq)), "keys" a `Received`
            (it returns (B, H)), "weight" a matrix (m, n), "gradient" its gradient, "update" what a step did to it over
            its norm, "change" what has become of it since the checkpoint before, "hidden" states (tokens, d), "stream"
            a `Stream`, "neurons" states (tokens, h), "router" a `Routing`, "block" a `BlockMotion`; these return a
            number, or None where the gauge is not defined. NaN and Inf mean that the model computed something that
            is not finite, which is an alert.
        reduce: "mean" or "max": over real queries, to one value per head of an attention gauge; and over heads and
            experts, to the one number per layer that a logger is told.
        given: "top" gives a gauge on matrices the largest singular value and the norm, which gauges share, instead of
            the matrix.

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
    if on not in _PARTS_ON:
        raise ValueError(f"a gauge is measured on one of {', '.join(map(repr, _PARTS_ON))}, not on {on!r}")
    if not name.isidentifier():
        raise ValueError(f"a gauge's name must be an identifier such as 'stable_rank', got {name!r}")

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if name in _GAUGES and _GAUGES[name].function is not function:
            raise ValueError(f"there is a gauge {name!r} already; choose another name")
        text = (function.__doc__ or "").strip()
        _GAUGES[name] = Gauge(name, on, function, text.split("\n")[0], reduce, given, next(iter(_PARTS_ON[on]), ""))
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
    from joma._measure.gauges import assumptions, builtin, stream  # noqa: F401  (registers them)

    for entry in _installed(entry_points):
        if entry.name not in _GAUGES:
            entry.load()
    return dict(_GAUGES)


@cache
def _installed(read: Callable[..., Iterable[Any]]) -> tuple[Any, ...]:
    """Entry points, read once: it takes 90 ms, which a scan of many small checkpoints would spend on each of them."""
    return tuple(read(group="joma.gauges"))


def names_of(chosen: str | Iterable[str]) -> list[str]:
    """Names of gauges, from one string with commas between them or from several strings.

    >>> names_of("entropy, stable_rank.qk")
    ['entropy', 'stable_rank.qk']
    """
    return [name.strip() for name in chosen.split(",") if name.strip()] if isinstance(chosen, str) else list(chosen)


def parts_of(gauge: Gauge) -> dict[str, str]:
    """Parts that the gauge can be measured on, and what they are; none of attention and hidden states."""
    return dict(_PARTS_ON[gauge.on])


def get(names: str | Iterable[str]) -> list[Gauge]:
    """The gauges with these names; an unknown one is an error that tells the nearest.

    A gauge on matrices or charges may name the part it is measured on: "stable_rank.q" is the stable rank of the query
    projections.
    """
    table = gauges()
    chosen = []
    for full in names_of(names):
        name, _, part = full.partition(".")
        if name not in table:
            close = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"unknown gauge {name!r}.{hint} Known: {', '.join(table)}.")
        known = _PARTS_ON[table[name].on]
        if part and part not in known:
            parts = f"; parts are {', '.join(known)}" if known else ", which has no parts"
            raise ValueError(f"there is no part {part!r} of the gauge {name!r}{parts}")
        chosen.append(replace(table[name], name=full, part=part) if part else table[name])
    return list({gauge.name: gauge for gauge in chosen}.values())


def in_training(names: Iterable[str]) -> list[Gauge]:
    """The gauges with these names, if all of them can be measured while a model trains."""
    chosen = get(names)
    if between := [gauge.name for gauge in chosen if gauge.on == "change"]:
        instead = between[0].replace("change_rank", "update_rank").replace("change", "update_ratio")
        raise ValueError(
            f"{between[0]} is measured between checkpoints (joma.scan), not while a model trains; of a step of an "
            f"optimiser it is {instead}"
        )
    return chosen
