"""The right side of charges up to ε, exactly: what the ε in each normalisation does to a gradient identity.

A normalisation gives out γ∘x̂ + β with x̂ = x/√(σ² + ε). Let all that is written to the stream grow by the factor a:
where x grows with it, d x̂/da = ε/(σ² + ε) x̂ at a = 1, and nothing else in the model changes, so

    B(θ, g) = dL/da = Σ_n Σ_t ε/(σ_nt² + ε) c_nt,      c_nt = ⟨∂L/∂x̂_nt, x̂_nt⟩

over normalisations n and tokens t (the same as −2 Σ_n ε_n ∂L/∂ε_n). So |B| ≤ Σ ε/(σ² + ε) |c|. Neither can be had from
weights and gradients alone, which are sums over tokens in which c may cancel; they are recorded in the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from joma._measure.charges.anatomy import Norm
from joma._measure.charges.charge import Charge


class EpsilonTerm:
    """Records, while it is entered, what ε does in forward and backward passes; made by ``Charges.epsilon``."""

    def __init__(self, charges: Iterable[Charge]) -> None:
        self._norms = {id(norm.module): norm for charge in charges for norm in charge.norms}
        self._terms = dict.fromkeys(
            self._norms, (0.0, 0.0)
        )  # Σ share·c and Σ share·|c| per normalisation
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        self._handles = [
            norm.module.register_forward_hook(self._hook(norm)) for norm in self._norms.values()
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def of(self, charge: Charge) -> float:
        """B(θ, g) of a charge up to ε; 0 of one that has no normalisation."""
        return sum(self._terms[id(norm.module)][0] for norm in charge.norms)

    def bound(self, charge: Charge) -> float:
        """What |B(θ, g)| is at most, whatever the signs."""
        return sum(self._terms[id(norm.module)][1] for norm in charge.norms)

    def _hook(self, norm: Norm) -> Callable[[Any, Any, Tensor], None]:
        def forward(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            x = args[0].detach().double()
            x = x - x.mean(dim=-1, keepdim=True) if norm.centres else x
            shifted = x.square().mean(dim=-1) + norm.eps
            scaled = (norm.weight.detach().double() + norm.offset) * x / shifted.sqrt()[..., None]
            output.register_hook(
                lambda g: self._add(norm, norm.eps / shifted, (g.double() * scaled).sum(dim=-1))
            )

        return forward

    def _add(self, norm: Norm, share: Tensor, c: Tensor) -> None:
        term, bound = self._terms[id(norm.module)]
        with torch.no_grad():
            self._terms[id(norm.module)] = (
                term + float((share * c).sum()),
                bound + float((share * c.abs()).sum()),
            )
