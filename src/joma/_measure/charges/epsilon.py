"""The right side of charges up to ε: the effect of each normalisation's ε on a gradient identity.

A normalisation returns γ∘x̂ + β with x̂ = x/√(σ² + ε). Multiply everything that is written to the
stream by a factor a. Where x grows with it, d x̂/da = ε/(σ² + ε) x̂ at a = 1, and nothing else in
the model changes. Hence

    B(θ, g) = dL/da = Σ_n Σ_t ε/(σ_nt² + ε) c_nt,      c_nt = ⟨∂L/∂x̂_nt, x̂_nt⟩

over normalisations n and tokens t, which equals −2 Σ_n ε_n ∂L/∂ε_n. So |B| ≤ Σ ε/(σ² + ε) |c|.
Weights and gradients alone give neither sum: they are sums over tokens in which c may cancel. So
both are recorded during the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from joma._measure.charges.charge import Charge
from joma.models.norms import Normalisation


@dataclass
class _NormSums:
    """Sums over the tokens that passed one normalisation, with share = ε/(σ² + ε)."""

    term: float = 0.0  # Σ share·c
    bound: float = 0.0  # Σ share·|c|


class EpsilonTerm:
    """Records the effect of ε in the passes that run while it is entered.

    `Charges.epsilon` creates it.
    """

    def __init__(self, charges: Iterable[Charge]) -> None:
        self._norms: dict[int, Normalisation] = {}
        for charge in charges:
            for norm in charge.norms:
                self._norms[id(norm.module)] = norm
        self._sums = {key: _NormSums() for key in self._norms}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for norm in self._norms.values():
            self._handles.append(norm.module.register_forward_hook(self._hook(norm)))
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
        """Return B(θ, g) of a charge up to ε; 0 for a charge without normalisations."""
        return sum(self._sums[id(norm.module)].term for norm in charge.norms)

    def bound(self, charge: Charge) -> float:
        """Return the largest |B(θ, g)| possible, whatever the signs."""
        return sum(self._sums[id(norm.module)].bound for norm in charge.norms)

    def _hook(self, norm: Normalisation) -> Callable[[Any, Any, Tensor], None]:
        def forward(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            inputs = args[0].detach().double()  # (…, d)
            if norm.centres:
                inputs = inputs - inputs.mean(dim=-1, keepdim=True)
            shifted = inputs.square().mean(dim=-1) + norm.eps  # (…,): σ² + ε
            scale = norm.weight.detach().double() + norm.offset  # (d,)
            scaled = scale * inputs / shifted.sqrt()[..., None]  # (…, d): γ∘x̂
            share = norm.eps / shifted

            def backward(gradient: Tensor) -> None:
                # ∂L/∂x̂ = γ∘∂L/∂y, so ⟨∂L/∂x̂, x̂⟩ = ⟨∂L/∂y, γ∘x̂⟩.
                products = (gradient.double() * scaled).sum(dim=-1)  # (…,): c
                self._add(norm, share, products)

            output.register_hook(backward)

        return forward

    @torch.no_grad()
    def _add(self, norm: Normalisation, share: Tensor, products: Tensor) -> None:
        sums = self._sums[id(norm.module)]
        sums.term += float((share * products).sum())
        sums.bound += float((share * products.abs()).sum())
