"""The gradient identity B(θ, g) = 0 of each charge: what rounding allows, and what is off.

The identity ties a gradient to the weights at which it was computed, for every optimiser. Charges
*up to ε* have a right side instead of zero, which `EpsilonTerm` records.

The bound depends on the precision of the passes, which may be lower than that of the parameters. If
the caller does not state it, the gradients may show it (`rounding`). A charge is called off only if
no lower precision explains its residual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._measure.charges.charge import Charge, Side, Status, gradient_of, read_norm
from joma._measure.charges.epsilon import EpsilonTerm
from joma._measure.charges.rounding import (
    COARSEST,
    is_beyond_rounding,
    is_float32,
    rounding_residual,
    shown_precision,
)

# torch.set_float32_matmul_precision -> precision of float32 products that use fewer bits.
_PRODUCT_PRECISIONS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}

# Charges that a normalisation conserves. Rounding affects them more than products of two sides.
_NORM_KINDS = ("sum", "stream")

# Multiple of ε·‖all gradients‖ that rounding in the backward pass of a normalisation may leave.
_CANCELLATION = 16

# Stands in for a gradient of zero in a division.
_TINY = 1e-300


@dataclass(frozen=True)
class Deviation:
    """A charge that broke its law.

    Attributes:
        charge: the charge.
        value: size of the deviation relative to the charge.
        bound: what rounding allows.
        head: number of the head; None if the charge is not per head.
        computed_in: type that the bound is for, if it is coarser than the parameters.
    """

    charge: Charge
    value: float
    bound: float
    head: int | None = None
    computed_in: torch.dtype | None = None

    def __str__(self) -> str:
        place = self.charge.name
        if self.head is not None:
            place += f", head {self.head}"
        rounding = "rounding"
        if self.computed_in is not None:
            rounding += f" in {str(self.computed_in).removeprefix('torch.')}"
        return f"{place}: off by {self.value:.1e} ({rounding} allows {self.bound:.1e})"


@dataclass(frozen=True)
class GradientVerdict:
    """Outcome of a check of the gradients that a model holds now.

    Attributes:
        deviations: charges that are off, in whatever precision the passes were computed.
        undecided: charges that are off if the passes ran in the precision of the parameters, and
            fine if they ran in a lower one. The gradients do not show which.
    """

    deviations: list[Deviation]
    undecided: list[Deviation]


def precision(charge: Charge, computed_in: torch.dtype | None = None) -> float:
    """Return the machine precision of the coarsest type that a charge is computed with.

    Arguments:
        charge: its parameters' types count.
        computed_in: the type that autocast computes in.
    """
    types = {side.parameter.dtype for side in charge.sides}
    if computed_in is not None:
        types.add(computed_in)
    coarsest = 0.0
    if torch.float32 in types:
        coarsest = _PRODUCT_PRECISIONS[torch.get_float32_matmul_precision()]
    for dtype in types:
        coarsest = max(coarsest, float(torch.finfo(dtype).eps))
    return coarsest


def check_gradients(
    charges: Iterable[Charge],
    tolerance: float | None = None,
    computed_in: torch.dtype | None = None,
    epsilon: EpsilonTerm | None = None,
) -> list[Deviation]:
    """Return the charges whose gradient identity is broken by the gradients of now.

    The identity holds for every optimiser, Adam included, and for gradients clipped by their global
    norm. Clipping per parameter breaks it. The bound is the root of the machine precision: a
    healthy float32 gradient is at about 2e-7, and one with a detached path at about 1. Charges up
    to ε are judged only if their right side was recorded.
    """
    return judge_gradients(charges, tolerance, computed_in, epsilon).deviations


def judge_gradients(
    charges: Iterable[Charge],
    tolerance: float | None = None,
    computed_in: torch.dtype | None = None,
    epsilon: EpsilonTerm | None = None,
) -> GradientVerdict:
    """Check the gradients of now, and infer the precision that they were computed in if needed.

    There is nothing to infer if ``tolerance`` or ``computed_in`` is given, or if all is well in the
    precision of the parameters.
    """
    charges = list(charges)
    total = gradient_norm(_all_sides(charges))
    residuals: dict[Charge, Tensor] = {}
    for charge in charges:
        if _is_judged(charge, epsilon):
            right_side = 0.0
            if epsilon is not None:
                right_side = epsilon.of(charge)
            residuals[charge] = charge.residual(gradient_of, right_side)

    def deviations_in(dtype: torch.dtype | None) -> list[Deviation]:
        """List what exceeds the bound of the parameters' types, or of ``dtype`` if coarser."""
        deviations: list[Deviation] = []
        for charge, residual in residuals.items():
            if tolerance is not None:
                deviations += over(charge, residual, tolerance)
                continue
            eps = precision(charge, dtype)
            coarser_type = None
            if eps > precision(charge):
                coarser_type = dtype
            deviations += over(charge, residual, bound_of(charge, eps, total), coarser_type)
        return deviations

    deviations = deviations_in(computed_in)
    # Autocast leaves float64 alone, so there is nothing to infer for it.
    float32_eps = torch.finfo(torch.float32).eps
    doubtful = [each for each in deviations if precision(each.charge) >= float32_eps]
    if tolerance is not None or computed_in is not None or not doubtful:
        return GradientVerdict(deviations, [])
    dtype = shown_precision(_gradients(charges))
    if dtype is not None:
        return GradientVerdict(deviations_in(dtype), [])
    certain = {(each.charge, each.head) for each in deviations_in(COARSEST)}
    float32_kinds = _kinds_in_float32(residuals)
    undecided = []
    for deviation in doubtful:
        is_certain = (deviation.charge, deviation.head) in certain
        is_certain = is_certain or deviation.charge.kind in float32_kinds
        if not is_certain and not _is_beyond_rounding(deviation):
            undecided.append(deviation)
    return GradientVerdict([each for each in deviations if each not in undecided], undecided)


def _all_sides(charges: Iterable[Charge]) -> list[Side]:
    sides: list[Side] = []
    for charge in charges:
        sides += charge.sides
    return sides


def _is_judged(charge: Charge, epsilon: EpsilonTerm | None) -> bool:
    if all(side.parameter.grad is None for side in charge.sides):
        return False
    if charge.status is Status.EPSILON:
        return epsilon is not None
    return charge.status is Status.EXACT


def _gradients(charges: Iterable[Charge]) -> list[Tensor]:
    """Return the gradients of all matrices that charges look at, each once."""
    parameters = {id(side.parameter): side.parameter for side in _all_sides(charges)}
    gradients = []
    for parameter in parameters.values():
        if parameter.grad is not None and parameter.dim() >= 2:
            gradients.append(parameter.grad)
    return gradients


def _kinds_in_float32(residuals: Mapping[Charge, Tensor]) -> set[str]:
    """Return the kinds of charges that show passes in float32.

    A kind shows it if one of its charges, or a head of one, holds that well. Key biases follow
    queries and keys, and sums and streams any kind. Other kinds do not follow each other: some
    models compute attention alone in a lower precision.
    """
    kinds = set()
    for charge, residual in residuals.items():
        rounding = rounding_residual(charge)
        if rounding is not None and bool(is_float32(residual, rounding).any()):
            kinds.add(charge.kind)
    if "qk" in kinds:
        kinds.add("key_bias")
    if kinds:
        kinds.update(_NORM_KINDS)
    return kinds


def _is_beyond_rounding(deviation: Deviation) -> bool:
    rounding = rounding_residual(deviation.charge)
    if rounding is None:
        return False
    rounding_of_head = rounding.reshape(-1)[deviation.head or 0]
    return bool(is_beyond_rounding(torch.as_tensor(deviation.value), rounding_of_head))


def bound_of(charge: Charge, eps: float, total: float) -> float:
    """Return what rounding may do to a gradient identity.

    Products of two sides use the same rounded gradient, so their identities hold however small it
    is. The charges of a normalisation are different: its backward pass subtracts the part along the
    input from gradients of the size that come from above. Where little is left (a loss that the
    normalisation pins), rounding is much of it.

    Arguments:
        charge: the charge.
        eps: machine precision of the passes.
        total: norm of all gradients.
    """
    bound = eps**0.5
    if charge.kind in _NORM_KINDS:
        bound += _CANCELLATION * eps * total / max(gradient_norm(charge.sides), _TINY)
    return bound


def gradient_norm(sides: Iterable[Side]) -> float:
    """Return the norm of all gradients that sides look at, each parameter once."""
    by_parameter = {id(side.parameter): side for side in sides}
    squares = [float(read_norm(side, gradient_of)) ** 2 for side in by_parameter.values()]
    return sum(squares) ** 0.5


def over(
    charge: Charge, residual: Tensor, bound: float, computed_in: torch.dtype | None = None
) -> list[Deviation]:
    """Return the heads whose residual is above the bound or NaN."""
    values = residual.reshape(-1).tolist()  # one per head
    deviations = []
    for index, value in enumerate(values):
        if value <= bound:
            continue
        head = None
        if len(values) > 1:
            head = index
        deviations.append(Deviation(charge, value, bound, head, computed_in))
    return deviations
