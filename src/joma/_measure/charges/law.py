"""Laws of motion per step: what an optimiser's step does to a charge, exactly.

SGD moves each side's weights by X ← X − lr·D with m = μ m + (1 − τ)(G + λX) and D = m; Nesterov: D = G + λX + μ m. The
dampening τ is left out in the first step; lr and the decay λ may differ between sides and change over time. So

    P_t = B(θ_t, m_t) = μ (P_{t−1} − Σ w lr D mᵀ|_{t−1}) + (1 − τ) Λ_t,     Λ_t = B(θ_t, G_t) + Σ w λ XXᵀ,
    ΔQ = −(P + Pᵀ) + Σ w lr DDᵀ                      (Nesterov: Λ_t + μ P_t in the place of P)

for Q = Σ (w/lr) XXᵀ, the charge with each side weighed by one over its learning rate. Nothing but Q before the step and
the optimiser's own buffers are needed: no weights are copied. A deviation is an error of the *update*: a matrix stepped
twice, a rate that one side does not know of.

B(θ, G) is zero but for rounding, which autocast makes large beside that of the step. It is taken as it is, and whether
the gradient is right is the question of its own identity, which is asked before the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from joma._measure.charges.charge import Charge, Side, Status, read_norm
from joma._measure.charges.identity import (
    Deviation,
    bound_of,
    check_gradients,
    gradient_norm,
    over,
    precision,
)


@dataclass(frozen=True)
class _Rule:
    """What the optimiser does to one parameter."""

    lr: float
    momentum: float
    dampening: float
    decay: float
    nesterov: bool
    sign: float  # −1 if it maximises


class StepLaw:
    """Checks the steps of a ``torch.optim.SGD`` against the laws of a model's charges.

    Call ``before()`` when the gradients are there and ``after()`` when the step is done; ``after`` returns what is off.
    Charges up to ε have no law per step, nor have those with a side that trains but is not in this optimiser.
    """

    def __init__(self, charges: Iterable[Charge], optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            raise TypeError(
                f"the law per step is known for torch.optim.SGD, not for {type(optimizer).__name__}; the gradient "
                "identity holds for every optimiser: check_gradients()"
            )
        self.optimizer = optimizer
        rules = self._rules()
        self._known = list(charges)
        self.charges = [
            c
            for c in self._known
            if c.status is Status.EXACT
            and all(
                id(side.parameter) in rules or not side.parameter.requires_grad for side in c.sides
            )
        ]
        self._memory: dict[
            int, Tensor
        ] = {}  # μ-weighted part of P from the step before, per charge
        self._stepped: set[int] = set()
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._of_gradients: list[Deviation] = []
        self._total = 0.0  # the norm of all gradients

    def _rules(self) -> dict[int, _Rule]:
        rules = {}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                rules[id(parameter)] = _Rule(
                    lr=float(group["lr"]),
                    momentum=float(group["momentum"]),
                    dampening=float(group["dampening"]),
                    decay=float(group["weight_decay"]),
                    nesterov=bool(group["nesterov"]),
                    sign=-1.0 if group.get("maximize") else 1.0,
                )
        return rules

    @torch.no_grad()
    def before(self) -> None:
        """Check the gradients, and note the charges and what decay is about to do to them."""
        rules = self._rules()
        # of all charges, since what rounding allows depends on the norm of all gradients
        self._of_gradients = [d for d in check_gradients(self._known) if d.charge in self.charges]
        self._held = {}
        for charge in self.charges:
            used = [
                (side, rules[id(side.parameter)])
                for side in charge.sides
                if side.parameter.requires_grad
            ]
            if (
                not used
                or any(rule.lr == 0 for _, rule in used)
                or len({_common(rule) for _, rule in used}) > 1
            ):
                continue  # no one law for sides that are stepped by different rules
            decay = _sum(
                charge, [(side, side.weights(), side.weights(), rule.decay) for side, rule in used]
            )
            self._held[id(charge)] = (_weighed(charge, used), decay)

    @torch.no_grad()
    def after(self) -> list[Deviation]:
        """What is off of the gradients and of what the step did; empty if all is well."""
        rules, out = self._rules(), self._of_gradients
        self._of_gradients = []
        self._total = gradient_norm(side for charge in self._known for side in charge.sides)
        for charge in self.charges:
            if id(charge) not in self._held:
                continue
            earlier, decay = self._held[id(charge)]
            used = [
                (side, rules[id(side.parameter)])
                for side in charge.sides
                if side.parameter.requires_grad
            ]
            if any(side.parameter.grad is None for side, _ in used):
                self._memory.pop(id(charge), None)
                continue
            out += self._judge(charge, used, earlier, decay)
        return out

    def _judge(
        self, charge: Charge, used: list[tuple[Side, _Rule]], earlier: Tensor, decay: Tensor
    ) -> list[Deviation]:
        rule = used[0][1]
        first = id(charge) not in self._stepped
        steps = [(side, *self._directions(side, own), own.lr) for side, own in used]  # D, m, lr
        added = decay + _of_gradient(charge, used, steps)
        product = added * (1.0 if first else 1.0 - rule.dampening)
        if rule.momentum:
            product = product + self._memory.get(id(charge), torch.zeros_like(decay))
        whole_step = added + rule.momentum * product if rule.nesterov else product
        if charge.form == "linear":
            law = -whole_step
        else:
            square = _sum(charge, [(side, d, d, lr) for side, d, _, lr in steps])
            law = (
                -(whole_step + (whole_step.mT if charge.form == "matrix" else whole_step)) + square
            )
        if rule.momentum:
            carried = product
            if charge.form != "linear":
                carried = product - _sum(charge, [(side, d, m, lr) for side, d, m, lr in steps])
            self._memory[id(charge)] = rule.momentum * carried
        self._stepped.add(id(charge))
        off = _weighed(charge, used) - earlier - law
        bound = 8 * precision(charge)
        return over(
            charge,
            _relative(charge, off, steps, bound_of(charge, precision(charge), self._total) / bound),
            bound,
        )

    def _directions(self, side: Side, rule: _Rule) -> tuple[Tensor, Tensor]:
        """What was subtracted, over the learning rate, and the momentum buffer, in the side's view."""
        p = side.parameter
        gradient: Any = p.grad
        state = self.optimizer.state.get(p, {})
        buffer = state.get("momentum_buffer")
        if rule.momentum and buffer is not None:
            m = side.of(lambda _: buffer)
            if not rule.nesterov:
                return m, m
            # D = G + λX + μm before the step; X before = X now + lr D
            held = (
                rule.sign * side.of(lambda _: gradient)
                + rule.decay * side.weights()
                + rule.momentum * m
            )
            return held / (1 - rule.lr * rule.decay), m
        d = rule.sign * side.of(lambda _: gradient)
        d = (d + rule.decay * side.weights()) / (1 - rule.lr * rule.decay)
        return d, d


def _common(rule: _Rule) -> tuple[float, float, bool]:
    return rule.momentum, rule.dampening, rule.nesterov


def _sum(charge: Charge, terms: list[tuple[Side, Tensor, Tensor, float]]) -> Tensor:
    """Σ w f X Dᵀ over (side, X, D, f), in the charge's form; of a linear charge Σ w f X."""
    total: Tensor | None = None
    for side, x, d, factor in terms:
        x, d = x.double(), d.double()
        if charge.form == "linear":
            term = side.weight * factor * x
        elif charge.form == "rows":
            term = side.weight * factor * (x * d).sum(dim=-1)
        else:
            product = x @ d.mT
            term = side.weight * factor * (product if side.weight > 0 else product.mT)
        total = term if total is None else total + term
    assert total is not None
    return total


def _of_gradient(
    charge: Charge, used: list[tuple[Side, _Rule]], steps: list[tuple[Side, Tensor, Tensor, float]]
) -> Tensor:
    """Return B(θ, G) at the weights before the step, X + lr D if X are those after it."""
    terms = []
    for (side, rule), (_, direction, _, lr) in zip(used, steps, strict=True):
        gradient = side.of(lambda p: p.grad)
        if charge.form == "linear":
            terms.append((side, gradient, gradient, rule.sign))
        else:
            earlier = side.weights().double() + lr * direction.double()
            terms.append((side, earlier, gradient, rule.sign))
    return _sum(charge, terms)


def _weighed(charge: Charge, used: list[tuple[Side, _Rule]]) -> Tensor:
    return _sum(
        charge, [(side, side.weights(), side.weights(), 1 / rule.lr) for side, rule in used]
    )


def _relative(
    charge: Charge, off: Tensor, steps: list[tuple[Side, Tensor, Tensor, float]], noise: float
) -> Tensor:
    """The deviation over Σ |w| (‖X‖² + ‖lr D‖²)/lr, per head; of a linear charge over Σ |w| (‖X‖/lr + noise ‖G‖)."""
    if charge.form == "linear":
        size = sum(
            float(torch.linalg.vector_norm(side.parameter.detach().double())) / lr
            + noise * float(read_norm(side, lambda p: p.grad))
            for side, _, _, lr in steps
        )
        return torch.linalg.vector_norm(off) / max(size, 1e-300)

    def square(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x.double(), dim=(-2, -1)) ** 2

    terms = [
        abs(side.weight) * (square(side.weights()) / lr + lr * square(d))
        for side, d, _, lr in steps
    ]
    total = torch.stack(terms).sum(dim=0)
    return torch.linalg.vector_norm(off.flatten(total.dim()), dim=-1) / total.clamp_min(1e-300)
