"""Laws per step: the exact effect of an optimiser's step on a charge.

SGD moves each side's weights by X ← X − lr·D with m = μ m + (1 − τ)(G + λX) and D = m. With
Nesterov, D = G + λX + μ m. The dampening τ does not apply to the first step. The rate lr and the
decay λ may differ between sides and change over time. So

    P_t = B(θ_t, m_t) = μ (P_{t−1} − Σ w lr D mᵀ|_{t−1}) + (1 − τ) Λ_t,
    Λ_t = B(θ_t, G_t) + Σ w λ XXᵀ,
    ΔQ = −(P + Pᵀ) + Σ w lr DDᵀ                      (Nesterov: Λ_t + μ P_t instead of P)

for Q = Σ (w/lr) XXᵀ, the charge with each side divided by its learning rate. This needs only Q
before the step and the optimiser's own buffers: no weights are copied. A deviation is an error of
the *update*: a matrix that was stepped twice, or a rate that one side does not use.

B(θ, G) is zero but for rounding, which under autocast is large compared with that of the step. It
is taken as it is. Its own identity, checked before the step, judges whether the gradient is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._measure.charges.charge import (
    Charge,
    Side,
    Status,
    gradient_of,
    matrix_norms,
    read_norm,
    total_of,
)
from joma._measure.charges.identity import (
    Deviation,
    bound_of,
    check_gradients,
    gradient_norm,
    over,
    precision,
)

# Machine precisions that the sums of a step may be off by, relative to the charge.
_BOUND_PRECISIONS = 8

# Stands in for a size of zero in a division.
_TINY = 1e-300


@dataclass(frozen=True)
class SgdRule:
    """Settings with which SGD steps one parameter; ``sign`` is −1 if it maximises."""

    lr: float
    momentum: float
    dampening: float
    decay: float
    nesterov: bool
    sign: float


@dataclass(frozen=True)
class TrainedSide:
    """A side of a charge whose parameter trains, with the settings of its steps."""

    side: Side
    rule: SgdRule


@dataclass(frozen=True)
class SideStep:
    """A step of one side: what was subtracted, divided by the rate, and the momentum buffer."""

    trained: TrainedSide
    direction: Tensor  # D, (…, h, n)
    momentum: Tensor  # m, (…, h, n)

    @property
    def side(self) -> Side:
        return self.trained.side

    @property
    def lr(self) -> float:
        return self.trained.rule.lr


@dataclass(frozen=True)
class BeforeStep:
    """A charge just before a step: Q weighed by the rates, and Σ w λ XXᵀ of the decay."""

    charge: Tensor
    decay: Tensor


@dataclass(frozen=True)
class Term:
    """One term w f X Dᵀ of a sum over sides."""

    side: Side
    left: Tensor
    right: Tensor
    factor: float


class StepLaw:
    """Checks the steps of a ``torch.optim.SGD`` against the laws of a model's charges.

    Call ``before()`` after the backward pass and ``after()`` after the step, which returns what is
    off. Charges up to ε have no law per step. Neither do charges with a side that trains in another
    optimiser.
    """

    def __init__(self, charges: Iterable[Charge], optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            raise TypeError(
                "the law per step is known for torch.optim.SGD, not for "
                f"{type(optimizer).__name__}; the gradient identity holds for every optimiser: "
                "check_gradients()"
            )
        self.optimizer = optimizer
        self._all_charges = list(charges)
        rules = self._rules()
        self.charges = [charge for charge in self._all_charges if _has_law(charge, rules)]
        # By the id of a charge: the part of P that momentum carries over from the step before.
        self._carried: dict[int, Tensor] = {}
        self._stepped: set[int] = set()
        self._before: dict[int, BeforeStep] = {}
        self._gradient_deviations: list[Deviation] = []
        self._gradient_norm = 0.0  # over all charges

    def _rules(self) -> dict[int, SgdRule]:
        """Return the settings of now, by the id of the parameter."""
        rules = {}
        for group in self.optimizer.param_groups:
            sign = 1.0
            if group.get("maximize"):
                sign = -1.0
            rule = SgdRule(
                lr=float(group["lr"]),
                momentum=float(group["momentum"]),
                dampening=float(group["dampening"]),
                decay=float(group["weight_decay"]),
                nesterov=bool(group["nesterov"]),
                sign=sign,
            )
            for parameter in group["params"]:
                rules[id(parameter)] = rule
        return rules

    @torch.no_grad()
    def before(self) -> None:
        """Check the gradients, and note the charges and what decay is about to do to them."""
        rules = self._rules()
        # Check all charges: what rounding allows depends on the norm of all gradients.
        deviations = check_gradients(self._all_charges)
        self._gradient_deviations = [each for each in deviations if each.charge in self.charges]
        self._before = {}
        for charge in self.charges:
            sides = _trained_sides(charge, rules)
            if not _have_one_law(sides):
                continue
            decay_terms = []
            for trained in sides:
                weights = trained.side.weights()
                decay_terms.append(Term(trained.side, weights, weights, trained.rule.decay))
            decay = _sum(charge, decay_terms)
            self._before[id(charge)] = BeforeStep(_weighed(charge, sides), decay)

    @torch.no_grad()
    def after(self) -> list[Deviation]:
        """Return what is off in the gradients and in the step; empty if all is well."""
        rules = self._rules()
        deviations = self._gradient_deviations
        self._gradient_deviations = []
        all_sides: list[Side] = []
        for charge in self._all_charges:
            all_sides += charge.sides
        self._gradient_norm = gradient_norm(all_sides)
        for charge in self.charges:
            before = self._before.get(id(charge))
            if before is None:
                continue
            sides = _trained_sides(charge, rules)
            if any(trained.side.parameter.grad is None for trained in sides):
                self._carried.pop(id(charge), None)
                continue
            deviations += self._judge(charge, sides, before)
        return deviations

    def _judge(
        self, charge: Charge, sides: Sequence[TrainedSide], before: BeforeStep
    ) -> list[Deviation]:
        rule = sides[0].rule  # momentum, dampening and nesterov are those of all sides
        is_linear = charge.algebra.is_linear
        steps = [self._side_step(trained) for trained in sides]
        added = before.decay + _gradient_term(charge, steps)  # Λ_t
        dampening = rule.dampening
        if id(charge) not in self._stepped:
            dampening = 0.0
        product = added * (1.0 - dampening)  # P_t
        if rule.momentum:
            product = product + self._carried.get(id(charge), torch.zeros_like(before.decay))
        applied = product
        if rule.nesterov:
            applied = added + rule.momentum * product
        law = -applied
        if not is_linear:
            transposed = applied
            if charge.form == "matrix":
                transposed = applied.mT
            squares = [Term(step.side, step.direction, step.direction, step.lr) for step in steps]
            law = -(applied + transposed) + _sum(charge, squares)
        if rule.momentum:
            carried = product
            if not is_linear:
                moved = [Term(step.side, step.direction, step.momentum, step.lr) for step in steps]
                carried = product - _sum(charge, moved)
            self._carried[id(charge)] = rule.momentum * carried
        self._stepped.add(id(charge))
        deviation = _weighed(charge, sides) - before.charge - law
        eps = precision(charge)
        bound = _BOUND_PRECISIONS * eps
        noise = bound_of(charge, eps, self._gradient_norm) / bound
        return over(charge, _relative(charge, deviation, steps, noise), bound)

    def _side_step(self, trained: TrainedSide) -> SideStep:
        """Return the step of a side, from the optimiser's buffers and the weights after it."""
        side = trained.side
        rule = trained.rule
        buffer = self.optimizer.state.get(side.parameter, {}).get("momentum_buffer")
        if rule.momentum and buffer is not None:
            momentum = side.of(lambda _: buffer)
            if not rule.nesterov:
                return SideStep(trained, momentum, momentum)
            # D = G + λX + μm with X before the step, and X before = X now + lr D.
            gradient = rule.sign * side.of(gradient_of)
            direction = gradient + rule.decay * side.weights() + rule.momentum * momentum
            return SideStep(trained, direction / (1 - rule.lr * rule.decay), momentum)
        gradient = rule.sign * side.of(gradient_of)
        direction = (gradient + rule.decay * side.weights()) / (1 - rule.lr * rule.decay)
        return SideStep(trained, direction, direction)


def _has_law(charge: Charge, rules: dict[int, SgdRule]) -> bool:
    """Return True for an exact charge whose sides all train in this optimiser, or not at all."""
    if charge.status is not Status.EXACT:
        return False
    for side in charge.sides:
        if side.parameter.requires_grad and id(side.parameter) not in rules:
            return False
    return True


def _trained_sides(charge: Charge, rules: dict[int, SgdRule]) -> list[TrainedSide]:
    sides = []
    for side in charge.sides:
        if side.parameter.requires_grad:
            sides.append(TrainedSide(side, rules[id(side.parameter)]))
    return sides


def _have_one_law(sides: Sequence[TrainedSide]) -> bool:
    """Return True if all sides move, and with the same kind of momentum."""
    if not sides or any(trained.rule.lr == 0 for trained in sides):
        return False
    kinds = set()
    for trained in sides:
        rule = trained.rule
        kinds.add((rule.momentum, rule.dampening, rule.nesterov))
    return len(kinds) == 1


def _sum(charge: Charge, terms: Iterable[Term]) -> Tensor:
    """Return Σ w f X Dᵀ in the charge's form, in double precision; Σ w f D of a linear charge."""
    products = []
    for term in terms:
        left = term.left.double()
        right = term.right.double()
        products.append(charge.algebra.product(term.side, left, right, term.factor))
    return total_of(products)


def _gradient_term(charge: Charge, steps: Sequence[SideStep]) -> Tensor:
    """Return B(θ, G) at the weights before the step: X + lr D, if X are the weights after it."""
    terms = []
    for step in steps:
        gradient = step.side.of(gradient_of)
        earlier = step.side.weights().double() + step.lr * step.direction.double()
        terms.append(Term(step.side, earlier, gradient, step.trained.rule.sign))
    return _sum(charge, terms)


def _weighed(charge: Charge, sides: Sequence[TrainedSide]) -> Tensor:
    """Return Q with each side divided by its learning rate."""
    terms = []
    for trained in sides:
        weights = trained.side.weights()
        terms.append(Term(trained.side, weights, weights, 1 / trained.rule.lr))
    return _sum(charge, terms)


def _relative(charge: Charge, deviation: Tensor, steps: Sequence[SideStep], noise: float) -> Tensor:
    """Return the deviation divided by Σ |w| (‖X‖² + ‖lr D‖²)/lr, per head.

    That of a linear charge is divided by Σ |w| (‖X‖/lr + noise ‖G‖).
    """
    if charge.algebra.is_linear:
        size = 0.0
        for step in steps:
            weights = step.side.parameter.detach().double()
            size += float(torch.linalg.vector_norm(weights)) / step.lr + noise * float(
                read_norm(step.side, gradient_of)
            )
        return torch.linalg.vector_norm(deviation) / max(size, _TINY)
    sizes = []
    for step in steps:
        weight_size = matrix_norms(step.side.weights().double()) ** 2
        step_size = matrix_norms(step.direction.double()) ** 2
        sizes.append(abs(step.side.weight) * (weight_size / step.lr + step.lr * step_size))
    total = torch.stack(sizes).sum(dim=0)  # (heads,) or ()
    deviation_norm = torch.linalg.vector_norm(deviation.flatten(total.dim()), dim=-1)
    return deviation_norm / total.clamp_min(_TINY)
