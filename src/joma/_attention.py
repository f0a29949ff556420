"""The attention function of the paper (Section 2, Eqn. 1), which the theory and `joma.nn` share. Needs NumPy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from joma._suggest import unknown_name

Array = NDArray[np.float64]


class ContextSamples(Protocol):
    """What attention reads from a `joma.theory.Task`."""

    @property
    def x(self) -> Array:
        """(N, M) context frequencies."""

    @property
    def signed(self) -> bool:
        """True if x may have negative entries."""


@dataclass(frozen=True)
class Attention:
    """The attention function: b = σ(z/T) ∘ x / A with σ = id or exp and A constant, or A = Σ σ(z/T) ∘ x.

    Arguments:
        kind: "linear", "exp" or "softmax".
        temperature: T > 0 divides the logits.
        A: the constant normaliser of exp attention.
    """

    kind: str = "softmax"
    temperature: float = 1.0
    A: float = 1.0

    def __post_init__(self) -> None:
        kinds = ("linear", "exp", "softmax")
        if self.kind not in kinds:
            raise ValueError(unknown_name(self.kind, kinds, "attention"))
        for name in ("temperature", "A"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, got {value}")
        if self.A != 1.0 and self.kind != "exp":
            raise ValueError(
                f"A = {self.A} is the constant of exp attention; {self.kind} attention has none"
            )

    def check(self, task: ContextSamples) -> None:
        """Refuse tasks on which this attention is not defined."""
        if self.kind == "softmax":
            if task.signed and (task.x < 0).any():
                raise ValueError(
                    "softmax attention divides by Σ x e^z, which can vanish for signed x; use exp or linear"
                )
            empty = np.flatnonzero(task.x.sum(axis=1) == 0)
            if empty.size:
                raise ValueError(
                    f"sample {empty[0]} has no context token (its row of x is zero); softmax is undefined, drop it"
                )

    def rows(self, x: Array) -> Array:
        """x (N, M) with rows that are equal exactly where the samples' attention is the same for all z."""
        return x / x.sum(axis=1, keepdims=True) if self.kind == "softmax" else x

    def weights(self, z: Array, x: Array) -> Array:
        """Attention scores b (N, M) for logits z (M,) and frequencies x (N, M)."""
        if self.kind == "linear":
            return x * (z / self.temperature)
        if self.kind == "exp":
            with np.errstate(over="ignore"):
                return x * (np.exp(z / self.temperature) / self.A)
        e = np.exp((z - z.max()) / self.temperature)
        total = x @ e
        if total.min() > 1e-200:
            return (x * e) / total[:, None]
        # some sample holds only tokens far below the largest logit: normalise it by its own largest
        logits = np.where(x > 0, z / self.temperature, -np.inf)
        b = x * np.exp(logits - logits.max(axis=1, keepdims=True))
        return b / b.sum(axis=1, keepdims=True)

    def pull(self, x: Array, b: Array, u: Array) -> Array:
        """Rows (∂b/∂z) u, (n, M). The Jacobian is symmetric: diag(x)/T, diag(b)/T or (diag(b) − b bᵀ)/T."""
        if self.kind == "linear":
            return x * u / self.temperature
        bu = b * u
        if self.kind == "softmax":
            bu -= b * bu.sum(axis=1, keepdims=True)
        return bu / self.temperature
