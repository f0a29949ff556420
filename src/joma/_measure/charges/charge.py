"""A charge: a quantity of a model's weights that its training conserves, and its bilinear form.

A charge comes from a change of the weights that leaves the model's outputs as they are (Noether).
Two matrices X, Y (h, n) that act through XᵀY only allow any invertible A: X → AX, Y → A⁻ᵀY. Their
gradients satisfy, whatever the optimiser,

    B(θ, g) = X G_Xᵀ − (Y G_Yᵀ)ᵀ = 0        (the gradient identity)

so gradient flow conserves Q(θ) = B(θ, θ) = XXᵀ − YYᵀ. In general B is a sum over *sides*, views of
parameters with a weight w. Let X be a side's view of the weights and D that of a gradient or a
step. A view is linear. There are three forms:

    matrix   B = Σ w X Dᵀ over sides with w > 0, plus Σ w (X Dᵀ)ᵀ over sides with w < 0   (…, h, h)
    rows     B_i = Σ w ⟨X_i, D_i⟩, one number per row                                      (…, h)
    linear   B = Σ w D, for a quantity that is itself linear in the weights                (…)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from joma._measure.gauges.kernels import widened
from joma.models.sharded import gather

if TYPE_CHECKING:
    from joma.models.norms import Normalisation

Form = Literal["matrix", "rows", "linear"]

# From a parameter to the tensor to look at: the parameter itself, its gradient, its step.
Read = Callable[[Tensor], Tensor | None]


def itself(parameter: Tensor) -> Tensor:
    """Return the weights themselves."""
    return parameter


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient that the parameter holds now."""
    return parameter.grad


class Status(StrEnum):
    """Degree to which gradient flow conserves a charge."""

    EXACT = "exact"
    EPSILON = "up to ε"  # the ε of a normalisation breaks it a little
    NONE = "none"


@dataclass(frozen=True, eq=False)
class Side:
    """A view of one parameter.

    Attributes:
        name: of the parameter.
        parameter: the tensor that trains.
        view: a linear map from a tensor of the parameter's shape to (…, h, n).
        weight: of this side in the charge; its sign says on which side of the balance it is.
        offset: added to the weights, for a normalisation that scales by 1 + γ.
    """

    name: str
    parameter: Tensor
    view: Callable[[Tensor], Tensor]
    weight: float = 1.0
    offset: float = 0.0

    def weights(self, read: Read = itself) -> Tensor:
        """Return the view of the weights with the offset; ``read`` may read them from a file."""
        tensor = read(self.parameter)
        assert tensor is not None
        weights = self._view(tensor)  # (…, h, n)
        if self.offset:
            return weights + self.offset
        return weights

    def of(self, read: Read) -> Tensor:
        """Return the view of a gradient or step of this parameter; zeros if it has none."""
        tensor = read(self.parameter)
        if tensor is None:
            return self._view(self.parameter) * 0.0
        return self._view(tensor)

    def _view(self, tensor: Tensor) -> Tensor:
        tensor = gather(tensor.detach())
        if tensor.dtype != torch.float64:
            tensor = tensor.float()
        return self.view(tensor)


class BilinearForm(ABC):
    """One way to combine the sides of a charge.

    Attributes:
        is_linear: True if the quantity is linear in the weights, so that B(d, d) is zero.
    """

    is_linear = False

    @abstractmethod
    def product(self, side: Side, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
        """Return the side's term of B, times ``factor``, from two views (…, h, n)."""

    @abstractmethod
    def size(self, side: Side) -> Tensor:
        """Return the side's share of what Q is small or large against, per leading index."""

    @abstractmethod
    def heads_of(self, total: Tensor) -> int:
        """Return the number of heads of a sum of products; 1 if the charge is not per head."""


class MatrixForm(BilinearForm):
    """B = Σ w X Dᵀ, transposed for the sides of negative weight."""

    def product(self, side: Side, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
        product = left @ right.mT  # (…, h, h)
        if side.weight < 0:
            product = product.mT
        return side.weight * factor * product

    def size(self, side: Side) -> Tensor:
        return abs(side.weight) * matrix_norms(side.weights()) ** 2

    def heads_of(self, total: Tensor) -> int:
        if total.dim() == 3:  # (heads, h, h)
            return total.shape[0]
        return 1


class RowsForm(BilinearForm):
    """B_i = Σ w ⟨X_i, D_i⟩, one number per row."""

    def product(self, side: Side, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
        return side.weight * factor * (left * right).sum(dim=-1)  # (…, h)

    def size(self, side: Side) -> Tensor:
        return abs(side.weight) * torch.linalg.vector_norm(side.weights(), dim=-1) ** 2

    def heads_of(self, total: Tensor) -> int:
        if total.dim() == 2:  # (heads, h)
            return total.shape[0]
        return 1


class LinearForm(BilinearForm):
    """B = Σ w D, whatever the weights are."""

    is_linear = True

    def product(self, side: Side, left: Tensor, right: Tensor, factor: float = 1.0) -> Tensor:
        return side.weight * factor * right

    def size(self, side: Side) -> Tensor:
        return abs(side.weight) * side.weights().abs()

    def heads_of(self, total: Tensor) -> int:
        return 1


FORMS: dict[Form, BilinearForm] = {
    "matrix": MatrixForm(),
    "rows": RowsForm(),
    "linear": LinearForm(),
}


@dataclass(frozen=True, eq=False)
class Charge:
    """One conserved quantity of a model, or one that might be expected and is not conserved.

    Attributes:
        kind: "qk", "vo", "key_bias", "mlp", "norm", "sum" or "stream".
        name: name of its module and kind.
        status: exact, up to ε, or none.
        reason: why it has this status.
        form: how the sides are combined.
        sides: views of the parameters that it is made of.
        layer: number of its layer; None if it is not of one layer.
        scale_by: sides whose gradients a linear charge is compared with; () for its own.
        norms: the normalisations whose ε breaks a charge up to ε.
    """

    kind: str
    name: str
    status: Status
    reason: str
    form: Form = "rows"
    sides: tuple[Side, ...] = ()
    layer: int | None = None
    scale_by: tuple[Side, ...] = ()
    norms: tuple[Normalisation, ...] = ()

    @property
    def conserved(self) -> bool:
        """True if it is conserved exactly or up to ε."""
        return self.status is not Status.NONE

    @property
    def algebra(self) -> BilinearForm:
        """The bilinear form."""
        return FORMS[self.form]

    @property
    def two_sided(self) -> bool:
        """True if there are two sides to compare with each other."""
        signs = {side.weight > 0 for side in self.sides}
        return not self.algebra.is_linear and len(signs) == 2

    def value(self) -> Tensor:
        """Return Q(θ)."""
        terms = []
        for side in self.sides:
            weights = side.weights()
            terms.append(self.algebra.product(side, weights, weights))
        return total_of(terms)

    def sums(self, read: Read = itself) -> tuple[Tensor, Tensor]:
        """Return (P, N) with Q = P − N, in double precision.

        P is the sum over sides of positive weight, N that over sides of negative weight. Both are
        (heads, numbers), with one head if the charge is not per head, and zero without such sides.
        """
        positive: list[Tensor] = []
        negative: list[Tensor] = []
        for side in self.sides:
            weights = widened(side.weights(read))
            term = self.algebra.product(side, weights, weights)
            if side.weight > 0:
                positive.append(term)
            else:
                negative.append(-term)
        example = (positive or negative)[0]
        heads = self.algebra.heads_of(example)
        plus = torch.zeros_like(example)
        if positive:
            plus = total_of(positive)
        minus = torch.zeros_like(example)
        if negative:
            minus = total_of(negative)
        return plus.reshape(heads, -1), minus.reshape(heads, -1)  # (heads, numbers) each

    def size(self) -> Tensor:
        """Return Σ |w| ‖X‖² over the sides, per leading index: what Q is small or large against."""
        return total_of([self.algebra.size(side) for side in self.sides])

    def bilinear(self, read: Read) -> Tensor:
        """Return B(θ, d) for a gradient or step d."""
        return total_of(
            [self.algebra.product(side, side.weights(), side.of(read)) for side in self.sides]
        )

    def square(self, read: Read) -> Tensor:
        """Return B(d, d) for a gradient or step d; zero for a linear charge."""
        if self.algebra.is_linear:
            return torch.zeros(())
        terms = []
        for side in self.sides:
            step = side.of(read)
            terms.append(self.algebra.product(side, step, step))
        return total_of(terms)

    def residual(self, read: Read, right_side: float = 0.0, against: Read | None = None) -> Tensor:
        """Return |B(θ, g)| relative to Σ |w| ‖X‖‖G‖: zero to rounding for a healthy gradient g.

        Arguments:
            read: reads g.
            right_side: subtracted from B, for a charge up to ε.
            against: reads G, if that is not g.

        Returns:
            (heads,) for charges per head, () for others; zero where there is no gradient at all.
        """
        identity = self.bilinear(read) - right_side
        if against is None:
            against = read
        if self.algebra.is_linear:
            return self._linear_residual(identity, against)
        scales = []
        for side in self.sides:
            gradient_norms = matrix_norms(side.of(against))
            scales.append(abs(side.weight) * matrix_norms(side.weights()) * gradient_norms)
        scale = total_of(scales)  # (heads,) or ()
        is_per_head = self.form == "matrix" or identity.dim() > 1
        if is_per_head:
            norm = torch.linalg.vector_norm(identity.flatten(scale.dim()), dim=-1)
        else:
            norm = torch.linalg.vector_norm(identity)
            scale = scale.sum()
        # The inner `where` keeps 0/0 from being computed at all.
        return torch.where(scale > 0, norm / torch.where(scale > 0, scale, 1.0), 0.0)

    def _linear_residual(self, identity: Tensor, against: Read) -> Tensor:
        compared = self.scale_by or self.sides
        scale = torch.stack([read_norm(side, against) for side in compared]).sum()
        if scale > 0:
            return torch.linalg.vector_norm(identity) / scale
        return torch.zeros_like(scale)


def read_norm(side: Side, read: Read) -> Tensor:
    """Return the norm of what ``read`` gives for a side's parameter, in double precision."""
    tensor = read(side.parameter)
    if tensor is None:
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(gather(tensor.detach()).double())


def matrix_norms(matrices: Tensor) -> Tensor:
    """Return ‖x‖ over (h, n), per leading index."""
    return torch.linalg.vector_norm(matrices, dim=(-2, -1))


def total_of(terms: list[Tensor]) -> Tensor:
    """Return the sum of one term or more, added in their order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
