"""The kinds of gauges: what a gauge's function receives, when it runs, and what its values look like.

Everything that depends on the kind of a gauge is a field here, so that no other module compares
names. A new kind is one more instance in `KINDS`, and a meter that measures it. A kind with `read`
needs no meter, and may come from a user: ``joma.gauge(name, on=kind)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from joma.models.parts import CHARGES, PARTS, PRODUCTS, UPDATE


@dataclass(frozen=True, eq=False)
class GaugeKind:
    """One kind of gauge.

    Attributes:
        name: what ``@joma.gauge(…, on=…)`` calls it.
        receives: what the function of such a gauge receives.
        returns: what the function returns.
        runs_model: True if it is measured in passes of the model.
        needs_training: True if it can be measured only while a model trains.
        needs_two_checkpoints: True if it compares a checkpoint with the one before.
        has_heads: True if every value belongs to one head.
        can_be_sampled: True if some of the queries are enough to estimate its mean.
        is_averaged_over: what the values of one pass are averaged over.
        parts: the parts of a block that it can be asked for, with what they are; the first is the default.
        parts_with_heads: those of the parts that have one value per head.
        is_stored_exactly: True if run folders keep all digits: the drift of a conserved quantity is
            smaller than the precision of float32.
        read: reads what the gauges receive from a model, one entry per layer: name -> object. Kinds
            that have it need no meter of their own.
    """

    name: str
    receives: str
    returns: str
    runs_model: bool = False
    needs_training: bool = False
    needs_two_checkpoints: bool = False
    has_heads: bool = False
    can_be_sampled: bool = False
    is_averaged_over: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    parts_with_heads: tuple[str, ...] = ()
    is_stored_exactly: bool = False
    read: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def default_part(self) -> str:
        """The part that is measured if none is named; "" for kinds without parts."""
        return next(iter(self.parts), "")


# Products such as W_Q W_Kᵀ are known up to rotations. That is enough for their singular values, but
# not for the difference of two of them.
_MATRICES = {part: text for part, text in PARTS.items() if part not in PRODUCTS}
# What LoRA adds to a matrix is not a parameter: it has no gradient of its own.
_PARAMETERS = {part: text for part, text in _MATRICES.items() if not part.endswith(UPDATE)}

ATTENTION = GaugeKind(
    name="attention",
    receives="an `AttentionStats`",
    returns="a tensor (B, H, Tq)",
    runs_model=True,
    has_heads=True,
    can_be_sampled=True,
    is_averaged_over="real queries",
)
KEYS = GaugeKind(
    name="keys",
    receives="a `Received`: the attention that each key receives",
    returns="a tensor (B, H)",
    runs_model=True,
    has_heads=True,
    is_averaged_over="samples",
)
STREAM = GaugeKind(
    name="stream",
    receives="a `Stream`: the residual stream after a block, and what was written to it",
    returns="a number",
    runs_model=True,
    is_averaged_over="passes",
)
NEURONS = GaugeKind(
    name="neurons",
    receives="states (tokens, h) of the hidden neurons of an MLP",
    returns="a number",
    runs_model=True,
    is_averaged_over="passes",
)
ROUTER = GaugeKind(
    name="router",
    receives="a `Routing`: the logits and choices of a router",
    returns="a number",
    runs_model=True,
    is_averaged_over="passes",
)
HIDDEN = GaugeKind(
    name="hidden",
    receives="states (tokens, d): what a block receives, one row per distinct token",
    returns="a number",
    runs_model=True,
    is_averaged_over="passes",
)
BLOCK = GaugeKind(
    name="block",
    receives="a `BlockMotion`: what happened to a block since the measurement before",
    returns="a number",
    runs_model=True,
    needs_training=True,
)
WEIGHT = GaugeKind(
    name="weight",
    receives='a matrix (m, n), or its `TopSingular` with given="top"',
    returns="a number",
    parts=PARTS,
    parts_with_heads=PRODUCTS,
)
GRADIENT = GaugeKind(
    name="gradient",
    receives="the gradient (m, n) of a matrix that the optimiser is about to use",
    returns="a number",
    needs_training=True,
    parts=_PARAMETERS,
)
UPDATE_OF_STEP = GaugeKind(
    name="update",
    receives="what an optimiser step did to a matrix, relative to its size: ΔW/‖W‖_F (m, n)",
    returns="a number",
    needs_training=True,
    parts=_PARAMETERS,
)
CHANGE = GaugeKind(
    name="change",
    receives="what became of a matrix since the checkpoint before, relative to its size then",
    returns="a number",
    needs_two_checkpoints=True,
    parts=_MATRICES,
)
CHARGE = GaugeKind(
    name="charge",
    receives="a `ChargeState`",
    returns="a number, or one per head",
    parts=CHARGES,
    parts_with_heads=PRODUCTS,
    is_stored_exactly=True,
)

KINDS: dict[str, GaugeKind] = {
    kind.name: kind
    for kind in (
        ATTENTION, KEYS, STREAM, NEURONS, ROUTER, WEIGHT, HIDDEN, GRADIENT, UPDATE_OF_STEP, CHANGE, CHARGE, BLOCK,
    )
}  # fmt: skip
# Gauges of attention are measured on each attention call; those of streams, on modules around it.
ATTENTION_KINDS = (ATTENTION, KEYS)
STREAM_KINDS = (STREAM, NEURONS, ROUTER)
