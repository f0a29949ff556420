"""A charge: a quantity of a model's weights that its training conserves, and the bilinear form behind it.

A charge comes from a way to change weights that the model's outputs do not see (Noether). For two matrices X, Y (h, n)
that act through XᵀY only, any invertible A does it, X → AX, Y → A⁻ᵀY, and gradients satisfy, whatever the optimiser,

    B(θ, g) = X G_Xᵀ − (Y G_Yᵀ)ᵀ = 0        (the gradient identity)

so gradient flow conserves Q(θ) = B(θ, θ) = XXᵀ − YYᵀ. Here Q is a sum over *sides*, views of parameters with a weight:

    matrix   B = Σ w X Dᵀ over sides with w > 0, plus Σ w (X Dᵀ)ᵀ over those with w < 0      (…, h, h)
    rows     B_i = Σ w ⟨X_i, D_i⟩, one number per row                                         (…, h)
    linear   B = Σ w D, where the quantity itself is linear in the weights                     (…)

with X a side's view of the weights and D that of a gradient or a step. Views are linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from joma._measure.gauges.kernels import widened
from joma.models.sharded import whole

if TYPE_CHECKING:
    from joma._measure.charges.anatomy import Norm

Form = Literal["matrix", "rows", "linear"]
Read = Callable[
    [Tensor], Tensor | None
]  # from a parameter to what is looked at: itself, its gradient, its step


def itself(parameter: Tensor) -> Tensor:
    """Look at the weights."""
    return parameter


class Status(StrEnum):
    """How a charge is conserved by gradient flow."""

    EXACT = "exact"
    EPSILON = "up to ε"  # the ε of a normalisation breaks it a little
    NONE = "none"


@dataclass(frozen=True, eq=False)
class Side:
    """A view of one parameter. ``view`` maps a tensor of the parameter's shape to (…, h, n); it is linear."""

    name: str
    parameter: Tensor
    view: Callable[[Tensor], Tensor]
    weight: float = 1.0
    offset: float = 0.0  # a normalisation that scales by 1 + γ

    def weights(self, read: Read = itself) -> Tensor:
        """The view of the weights, with the offset; ``read`` may take them from elsewhere, as from a file."""
        tensor = read(self.parameter)
        assert tensor is not None
        seen = self._read(tensor)
        return seen + self.offset if self.offset else seen

    def of(self, read: Read) -> Tensor:
        """The view of a gradient or step of this parameter; zeros where it has none."""
        tensor = read(self.parameter)
        return self._read(self.parameter if tensor is None else tensor) * (
            0.0 if tensor is None else 1.0
        )

    def _read(self, tensor: Tensor) -> Tensor:
        tensor = whole(tensor.detach())
        return self.view(tensor if tensor.dtype == torch.float64 else tensor.float())


@dataclass(frozen=True, eq=False)
class Charge:
    """One conserved quantity of a model, or one that might be expected and is not; ``reason`` says why."""

    kind: str  # "qk", "vo", "key_bias", "mlp", "norm", "sum" or "stream"
    name: str
    status: Status
    reason: str
    form: Form = "rows"
    sides: tuple[Side, ...] = ()
    layer: int | None = None
    scale_by: tuple[
        Side, ...
    ] = ()  # of a linear charge: what its gradient is compared with, if not itself
    norms: tuple[Norm, ...] = ()  # of a charge up to ε: the normalisations whose ε it is

    @property
    def conserved(self) -> bool:
        """Exact, or up to ε."""
        return self.status is not Status.NONE

    @property
    def two_sided(self) -> bool:
        """Are there two sides that can be held against each other?"""
        signs = {side.weight > 0 for side in self.sides}
        return self.form != "linear" and len(signs) == 2

    def value(self) -> Tensor:
        """Q(θ)."""
        if self.form == "linear":
            return _total([side.weight * side.weights() for side in self.sides])
        return _total(
            [_product(side, side.weights(), side.weights(), self.form) for side in self.sides]
        )

    def sums(self, read: Read = itself) -> tuple[Tensor, Tensor]:
        """(P, N) with Q = P − N: the sides that count positive and those that count negative, in double precision.

        (heads, numbers) each, heads = 1 for charges that are not per head; zeros where there is no such side.
        """
        signed: dict[bool, list[Tensor]] = {True: [], False: []}
        for side in self.sides:
            x = widened(side.weights(read))
            signed[side.weight > 0].append(
                _product(side, x, x, self.form) * (1 if side.weight > 0 else -1)
            )
        some = (signed[True] or signed[False])[0]
        heads = some.shape[0] if some.dim() == (3 if self.form == "matrix" else 2) else 1
        plus, minus = (
            _total(signed[sign]) if signed[sign] else torch.zeros_like(some)
            for sign in (True, False)
        )
        return plus.reshape(heads, -1), minus.reshape(heads, -1)

    def size(self) -> Tensor:
        """Σ |w| ‖X‖² over the sides, per leading index: what Q is small or large against."""
        if self.form == "linear":
            return _total([abs(side.weight) * side.weights().abs() for side in self.sides])
        return _total(
            [abs(side.weight) * _norms(side.weights(), self.form) ** 2 for side in self.sides]
        )

    def bilinear(self, read: Read) -> Tensor:
        """B(θ, d) of a gradient or step d."""
        if self.form == "linear":
            return _total([side.weight * side.of(read) for side in self.sides])
        return _total(
            [_product(side, side.weights(), side.of(read), self.form) for side in self.sides]
        )

    def square(self, read: Read) -> Tensor:
        """B(d, d) of a gradient or step d; zero for a linear charge."""
        if self.form == "linear":
            return torch.zeros(())
        return _total(
            [_product(side, side.of(read), side.of(read), self.form) for side in self.sides]
        )

    def residual(self, read: Read, right_side: float = 0.0, against: Read | None = None) -> Tensor:
        """|B(θ, g)| relative to Σ |w| ‖X‖‖G‖, per head: zero to rounding for a healthy gradient g.

        (heads,) for charges per head, () for others; zero where there is no gradient at all. Of a charge up to ε, B
        minus its ``right_side``. ``against`` reads G, if that is not g.
        """
        b = self.bilinear(read) - right_side
        against = against or read
        if self.form == "linear":
            compared = self.scale_by or self.sides
            norm = torch.stack([read_norm(side, against) for side in compared]).sum()
            return torch.linalg.vector_norm(b) / norm if norm > 0 else torch.zeros_like(norm)
        heads = self.form == "matrix" or b.dim() > 1
        scale = _total(
            [
                abs(side.weight)
                * _norms(side.weights(), "matrix")
                * _norms(side.of(against), "matrix")
                for side in self.sides
            ]
        )
        if heads:
            norm = torch.linalg.vector_norm(b.flatten(scale.dim()), dim=-1)
        else:
            norm, scale = torch.linalg.vector_norm(b), scale.sum()
        return torch.where(scale > 0, norm / torch.where(scale > 0, scale, 1.0), 0.0)


def read_norm(side: Side, read: Read) -> Tensor:
    """‖gradient‖ of a side's parameter."""
    tensor = read(side.parameter)
    if tensor is None:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(whole(tensor.detach()).double())


def _product(side: Side, x: Tensor, d: Tensor, form: Form) -> Tensor:
    if form == "rows":
        return side.weight * (x * d).sum(dim=-1)
    product = x @ d.mT
    return side.weight * (product if side.weight > 0 else product.mT)


def _norms(x: Tensor, form: Form) -> Tensor:
    """‖x‖ over (h, n), per leading index; "rows": over n."""
    return torch.linalg.vector_norm(x, dim=-1 if form == "rows" else (-2, -1))


def _total(terms: list[Tensor]) -> Tensor:
    out = terms[0]
    for term in terms[1:]:
        out = out + term
    return out
