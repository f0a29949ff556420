"""The one table of gauge names, for ``watch``, ``scan``, the command line and the docs.

A gauge measures one thing on a model. What its function receives depends on its kind: see
`joma._measure.gauges.kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from joma._measure.gauges.kinds import KINDS, GaugeKind
from joma._suggest import unknown_name

if TYPE_CHECKING:
    from joma._runs.long_table import Precision

Reduce = Literal["mean", "max"]
Given = Literal["matrix", "top"]


@dataclass(frozen=True)
class Gauge:
    """One quantity measured on a model.

    Attributes:
        name: what users call it; "stable_rank.q" for one part.
        kind: what it is measured on.
        function: what measures it.
        help: the first line of the function's docstring.
        reduce: how values of queries become one per head, and how loggers get one per layer.
        given: what a gauge of matrices receives.
        part: the matrix or charge that it is measured on; "" for kinds without parts.
        is_of_training: True if this gauge, unlike others of its kind, needs the steps of a training.
    """

    name: str
    kind: GaugeKind
    function: Callable[[Any], Any]
    help: str
    reduce: Reduce = "mean"
    given: Given = "matrix"
    part: str = ""
    is_of_training: bool = False

    @property
    def on(self) -> str:
        """The name of its kind."""
        return self.kind.name

    @property
    def runs_model(self) -> bool:
        """True if it is measured in passes of the model."""
        return self.kind.runs_model

    @property
    def per_head(self) -> bool:
        """True if it has one value per head of each layer."""
        return self.kind.has_heads or self.part in self.kind.parts_with_heads

    @property
    def axes(self) -> list[str]:
        """The names of the axes of its values."""
        if self.per_head:
            return ["layer", "head"]
        return ["layer"]

    @property
    def precision(self) -> Precision:
        """The precision with which run folders store its values."""
        return "float64" if self.kind.is_stored_exactly else "float32"

    @property
    def needs_steps(self) -> bool:
        """True if it can be measured only while a model trains."""
        return self.kind.needs_training or self.is_of_training or self.kind.read is not None

    def measure(self, w: Any, top: Any = None) -> float | None:
        """Return the value on a matrix, or None where the gauge is not defined.

        ``top`` is the `TopSingular` of the matrix, if a gauge before has computed it.
        """
        from joma._measure.gauges.rank import top_singular
        from joma.models.sharded import gather

        if self.given != "top":
            return number_or_none(self.function(gather(w)))
        if top is None:
            top = top_singular(w)
        return number_or_none(self.function(top))


def number_or_none(value: Any) -> float | None:
    """Return what a gauge's function gave as a float; None, for "not defined here", stays None."""
    if value is None:
        return None
    return float(value)


_GAUGES: dict[str, Gauge] = {}


def gauge(
    name: str,
    on: str | GaugeKind,
    *,
    reduce: Reduce = "mean",
    given: Given = "matrix",
    is_of_training: bool = False,
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
            A `GaugeKind` with ``read`` is a kind of your own.
        reduce: "mean" or "max": over real queries, to one value per head of an attention gauge; and over heads and
            experts, to the one number per layer that a logger is told.
        given: "top" gives a gauge on matrices the largest singular value and the norm, which gauges share, instead of
            the matrix.
        is_of_training: True if it needs the steps of a training, though others of its kind do not.

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
    kind = _find_kind(on)
    if not name.isidentifier():
        raise ValueError(
            f"a gauge's name must be an identifier such as 'stable_rank', got {name!r}"
        )

    def register(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if name in _GAUGES and _GAUGES[name].function is not function:
            raise ValueError(f"there is a gauge {name!r} already; choose another name")
        text = (function.__doc__ or "").strip()
        first_line = text.split("\n")[0]
        _GAUGES[name] = Gauge(
            name, kind, function, first_line, reduce, given, kind.default_part, is_of_training
        )
        return function

    return register


def _find_kind(on: str | GaugeKind) -> GaugeKind:
    if isinstance(on, GaugeKind):
        if on.read is None:
            raise ValueError(f"the kind {on.name!r} needs read=, which gives what gauges receive")
        registered = KINDS.setdefault(on.name, on)
        if registered is not on and registered.read is None:
            raise ValueError(f"joma has a kind {on.name!r} already; choose another name")
        KINDS[on.name] = on
        return on
    if on not in KINDS:
        names = ", ".join(map(repr, KINDS))
        raise ValueError(f"a gauge is measured on one of {names}, not on {on!r}")
    return KINDS[on]


def remove(name: str) -> None:
    """Forget a gauge that was registered."""
    _GAUGES.pop(name, None)


def gauges() -> dict[str, Gauge]:
    """Return all gauges by name.

    They are built in, registered, or brought by installed packages (group ``joma.gauges``).

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
    """Return the entry points. They are read once: a scan would spend 90 ms on it per checkpoint."""
    return tuple(read(group="joma.gauges"))


def names_of(names: str | Iterable[str]) -> list[str]:
    """Return names of gauges from one string with commas between them, or from several strings.

    >>> names_of("entropy, stable_rank.qk")
    ['entropy', 'stable_rank.qk']
    """
    if not isinstance(names, str):
        return list(names)
    stripped = (name.strip() for name in names.split(","))
    return [name for name in stripped if name]


def parts_of(gauge: Gauge) -> dict[str, str]:
    """Return the parts that the gauge can be measured on, each with a description."""
    return dict(gauge.kind.parts)


def get(names: str | Iterable[str]) -> list[Gauge]:
    """Return the gauges with these names; the error for an unknown name suggests the nearest.

    A gauge on matrices or charges may name the part it is measured on: "stable_rank.q" is the
    stable rank of the query projections.
    """
    table = gauges()
    gauges_by_name: dict[str, Gauge] = {}
    for full_name in names_of(names):
        name, _, part = full_name.partition(".")
        if name not in table:
            raise ValueError(unknown_name(name, table, "gauge"))
        gauge = table[name]
        if part:
            _check_part(gauge, part)
            gauge = replace(gauge, name=full_name, part=part)
        gauges_by_name[gauge.name] = gauge
    return list(gauges_by_name.values())


def _check_part(gauge: Gauge, part: str) -> None:
    parts = gauge.kind.parts
    if part in parts:
        return
    remedy = ", which has no parts"
    if parts:
        remedy = f"; parts are {', '.join(parts)}"
    raise ValueError(f"there is no part {part!r} of the gauge {gauge.name!r}{remedy}")


def in_training(names: Iterable[str]) -> list[Gauge]:
    """Return the gauges with these names, if all of them can be measured while a model trains."""
    selected = get(names)
    for gauge in selected:
        if gauge.kind.needs_two_checkpoints:
            instead = gauge.name.replace("change_rank", "update_rank")
            instead = instead.replace("change", "update_ratio")
            raise ValueError(
                f"{gauge.name} is measured between checkpoints (joma.scan), not while a model "
                f"trains; of a step of an optimiser it is {instead}"
            )
    return selected
