"""The gradient identity B(θ, g) = 0 of each charge: what rounding allows, and what is off.

It ties a gradient to the weights at which it was taken, for every optimiser. Charges *up to ε* have a right side,
B(θ, g) = Σ_n Σ_t ε/(σ² + ε) ⟨∂L/∂x̂_nt, x̂_nt⟩ over normalisations n and tokens t; `EpsilonTerm` records it.

What rounding allows depends on the precision of the passes, which may be lower than that of the
parameters. If it is not given, it is read from the gradients (`rounding`), and a charge is called
off only if no lower precision explains it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._measure.charges.charge import Charge, Side, Status, read_norm
from joma._measure.charges.epsilon import EpsilonTerm
from joma._measure.charges.rounding import (
    COARSEST,
    is_beyond_rounding,
    is_float32,
    rounding_residual,
    shown_precision,
)

# float32 products that are computed with fewer bits, as torch.set_float32_matmul_precision says
_PRODUCTS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


@dataclass(frozen=True)
class Deviation:
    """A charge that did not do what its law says: by how much, relative to its size, and in which head."""

    charge: Charge
    value: float
    bound: float
    head: int | None = None
    computed_in: torch.dtype | None = (
        None  # the type that the bound is for, if coarser than the parameters
    )

    def __str__(self) -> str:
        where = "" if self.head is None else f", head {self.head}"
        kind = (
            ""
            if self.computed_in is None
            else f" in {str(self.computed_in).removeprefix('torch.')}"
        )
        return f"{self.charge.name}{where}: off by {self.value:.1e} (rounding{kind} allows {self.bound:.1e})"


@dataclass(frozen=True)
class Verdict:
    """What the gradients of now say about the charges of a model.

    Attributes:
        deviations: what is off, in whatever precision the passes were computed.
        undecided: what is off if the passes ran in the precision of the parameters, and rounding if
            they ran in a lower one; the gradients do not show which.
    """

    deviations: list[Deviation]
    undecided: list[Deviation]


def precision(charge: Charge, computed_in: torch.dtype | None = None) -> float:
    """The machine precision of the coarsest parameter that a charge looks at, or of what is computed with them.

    ``computed_in``: the type that autocast computes in.
    """
    kinds = {side.parameter.dtype for side in charge.sides} | (
        {computed_in} if computed_in is not None else set()
    )
    products = _PRODUCTS[torch.get_float32_matmul_precision()] if torch.float32 in kinds else 0.0
    return max([products, *(float(torch.finfo(kind).eps) for kind in kinds)])


def check_gradients(
    charges: Iterable[Charge],
    tolerance: float | None = None,
    computed_in: torch.dtype | None = None,
    epsilon: EpsilonTerm | None = None,
) -> list[Deviation]:
    """Charges whose gradient identity is broken by the gradients that the parameters hold now.

    It holds for every optimiser, Adam included, and for gradients clipped by their global norm; per-parameter clipping
    breaks it. The bound is the root of the machine precision: a healthy float32 gradient is at about 2e-7, and one in
    which a path is detached at about 1. Charges up to ε are judged if their right side was recorded.
    """
    return judge_gradients(charges, tolerance, computed_in, epsilon).deviations


def judge_gradients(
    charges: Iterable[Charge],
    tolerance: float | None = None,
    computed_in: torch.dtype | None = None,
    epsilon: EpsilonTerm | None = None,
) -> Verdict:
    """Check the gradients that the parameters hold now, and find out in which precision they were computed.

    Nothing has to be found out if ``tolerance`` or ``computed_in`` is given, or if all is well in
    the precision of the parameters.
    """
    charges = list(charges)
    total = gradient_norm(side for charge in charges for side in charge.sides)
    residuals: dict[Charge, Tensor] = {}
    for charge in charges:
        if _is_judged(charge, epsilon):
            right_side = epsilon.of(charge) if epsilon is not None else 0.0
            residuals[charge] = charge.residual(lambda p: p.grad, right_side)

    def deviations_in(kind: torch.dtype | None) -> list[Deviation]:
        """List what is above the bound of the parameters' types, or that of ``kind`` if it is coarser."""
        deviations = []
        for charge, residual in residuals.items():
            eps = precision(charge, kind)
            is_coarser = tolerance is None and eps > precision(charge)
            bound = bound_of(charge, eps, total) if tolerance is None else tolerance
            deviations += over(charge, residual, bound, kind if is_coarser else None)
        return deviations

    deviations = deviations_in(computed_in)
    # Autocast leaves float64 alone: there is nothing to be found out.
    doubtful = [d for d in deviations if precision(d.charge) >= torch.finfo(torch.float32).eps]
    if tolerance is not None or computed_in is not None or not doubtful:
        return Verdict(deviations, [])
    shown = shown_precision(_gradients(charges))
    if shown is not None:
        return Verdict(deviations_in(shown), [])
    certain = {(d.charge, d.head) for d in deviations_in(COARSEST)}
    shows_float32 = _kinds_in_float32(residuals)
    undecided = []
    for deviation in doubtful:
        is_certain = (deviation.charge, deviation.head) in certain
        is_certain = is_certain or deviation.charge.kind in shows_float32
        if not is_certain and not _is_beyond_rounding(deviation):
            undecided.append(deviation)
    return Verdict([d for d in deviations if d not in undecided], undecided)


def _is_judged(charge: Charge, epsilon: EpsilonTerm | None) -> bool:
    if all(side.parameter.grad is None for side in charge.sides):
        return False
    return charge.status is Status.EXACT or (
        charge.status is Status.EPSILON and epsilon is not None
    )


def _gradients(charges: Iterable[Charge]) -> list[Tensor]:
    """Return the gradients of all matrices that charges look at, each once."""
    parameters = {id(side.parameter): side.parameter for charge in charges for side in charge.sides}
    return [p.grad for p in parameters.values() if p.grad is not None and p.dim() >= 2]


def _kinds_in_float32(residuals: Mapping[Charge, Tensor]) -> set[str]:
    """Return the kinds of charges that show passes in float32: one of them, or a head of it, holds that well.

    Key biases follow queries and keys, and sums and streams any kind. Other kinds do not follow each
    other: some models compute attention alone in a lower precision.
    """
    kinds = set()
    for charge, residual in residuals.items():
        rounding = rounding_residual(charge)
        if rounding is not None and bool(is_float32(residual, rounding).any()):
            kinds.add(charge.kind)
    if "qk" in kinds:
        kinds.add("key_bias")
    if kinds:
        kinds |= {"sum", "stream"}
    return kinds


def _is_beyond_rounding(deviation: Deviation) -> bool:
    rounding = rounding_residual(deviation.charge)
    if rounding is None:
        return False
    here = rounding.reshape(-1)[deviation.head or 0]
    return bool(is_beyond_rounding(torch.as_tensor(deviation.value), here))


def bound_of(charge: Charge, eps: float, total: float) -> float:
    """What rounding at machine precision ``eps`` may do to a gradient identity; ``total``: the norm of all gradients.

    Products of two sides meet the same rounded gradient, so their identities hold however small it is. What a
    normalisation does not see is different: its backward pass subtracts the part along it from gradients of the size
    that come from above, and where little is left (a loss that the normalisation pins), rounding is much of it.
    """
    bound = eps**0.5
    if charge.kind in ("sum", "stream"):
        bound += 16 * eps * total / max(gradient_norm(charge.sides), 1e-300)
    return bound


def gradient_norm(sides: Iterable[Side]) -> float:
    """The norm of all gradients that sides look at, each parameter once."""
    parameters = {id(side.parameter): side for side in sides}
    return sum(float(read_norm(side, lambda p: p.grad)) ** 2 for side in parameters.values()) ** 0.5


def over(
    charge: Charge, residual: Tensor, bound: float, computed_in: torch.dtype | None = None
) -> list[Deviation]:
    """What is above the bound, or no number, per head."""
    values = residual.reshape(-1).tolist()
    per_head = len(values) > 1
    return [
        Deviation(charge, value, bound, head if per_head else None, computed_in)
        for head, value in enumerate(values)
        if not value <= bound
    ]
