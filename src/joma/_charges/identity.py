"""The gradient identity B(θ, g) = 0 of each charge: what rounding allows, and what is off.

It ties a gradient to the weights at which it was taken, for every optimiser. Charges *up to ε* have a right side,
B(θ, g) = Σ_n Σ_t ε/(σ² + ε) ⟨∂L/∂x̂_nt, x̂_nt⟩ over normalisations n and tokens t; `EpsilonTerm` records it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._charges.charge import Charge, Side, Status, read_norm
from joma._charges.epsilon import EpsilonTerm

# float32 products that are computed with fewer bits, as torch.set_float32_matmul_precision says
_PRODUCTS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


@dataclass(frozen=True)
class Deviation:
    """A charge that did not do what its law says: by how much, relative to its size, and in which head."""

    charge: Charge
    value: float
    bound: float
    head: int | None = None

    def __str__(self) -> str:
        where = "" if self.head is None else f", head {self.head}"
        return f"{self.charge.name}{where}: off by {self.value:.1e} (rounding allows {self.bound:.1e})"


def precision(charge: Charge, computed_in: torch.dtype | None = None) -> float:
    """The machine precision of the coarsest parameter that a charge looks at, or of what is computed with them.

    ``computed_in``: the type that autocast computes in.
    """
    kinds = {side.parameter.dtype for side in charge.sides} | ({computed_in} if computed_in is not None else set())
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
    charges = list(charges)
    total = gradient_norm(side for charge in charges for side in charge.sides)
    out = []
    for charge in charges:
        judged = charge.status is Status.EXACT or (charge.status is Status.EPSILON and epsilon is not None)
        if not judged or all(side.parameter.grad is None for side in charge.sides):
            continue
        bound = bound_of(charge, precision(charge, computed_in), total) if tolerance is None else tolerance
        right_side = epsilon.of(charge) if epsilon is not None else 0.0
        out += over(charge, charge.residual(lambda p: p.grad, right_side), bound)
    return out


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


def over(charge: Charge, residual: Tensor, bound: float) -> list[Deviation]:
    """What is above the bound, or no number, per head."""
    values = residual.reshape(-1).tolist()
    per_head = len(values) > 1
    return [Deviation(charge, v, bound, n if per_head else None) for n, v in enumerate(values) if not v <= bound]
