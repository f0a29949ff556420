"""The two parts of Theorem 1's first integral, for linear and for exp attention."""

from __future__ import annotations

from joma.theory.setting import Array


def logit_part(attention: str, z: Array) -> Array:
    """Return z for exp attention and z² for linear attention."""
    if attention == "exp":
        return z
    return z**2


def weight_coefficient(attention: str, ratio: float = 1.0, temperature: float = 1.0) -> float:
    """Return the factor of Σ_k v_k²: r/2T for exp attention and r for linear attention."""
    if attention == "exp":
        return ratio / (2 * temperature)
    return ratio
