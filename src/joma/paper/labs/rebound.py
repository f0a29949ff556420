"""Eqn. 6 and the joint exp flow that it stands for, solved in ln t: how far attention entropy dips and rebounds.

With C = I + (ε − 1) ûûᵀ, the part of Theorem 3's C(μ) that Section 4 takes as I (ε = β_∥/β₁, ``along`` below):

    Eqn. 6       v̇ = C (μ − v) ∘ e^{v²/2}                       u = μ
    joint flow   v̇ = C (target − v ∘ e^{v²/2}) ∘ e^{v²/2}       u = target

The joint flow has the critical point v e^{v²/2} = target: the targets μ e^{μ²/2} give it Eqn. 6's critical point μ.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.integrate import solve_ivp

from joma.theory.bounce import softmax_entropy
from joma.theory.setting import Array


def solve_in_log_time(
    field: Callable[[Array], Array], start: Array, end: float
) -> tuple[Array, Array]:
    """Times (T,) up to ``end`` and states (T, …) of v̇ = field(v) from v(0) = 0; ``start`` is field(0).

    The times are the solver's own steps, which are short where v runs: an even grid would step over a narrow trough.
    """
    first = -20.0 - float(np.log(np.abs(start).max()))

    def slope(log_t: float, y: Array) -> Array:
        return np.exp(log_t) * field(y.reshape(start.shape)).ravel()

    span = (first, float(np.log(end)))
    solution = solve_ivp(slope, span, start.ravel() * np.exp(first), "LSODA", rtol=1e-8, atol=1e-12)
    if not solution.success:
        raise RuntimeError(
            f"the flow stopped at t = {np.exp(solution.t[-1]):.3g}: {solution.message}"
        )
    return np.exp(solution.t), np.asarray(solution.y.T.reshape(-1, *start.shape))


def _along(direction: Array, along: float) -> Array:
    """C = I + (along − 1) ûûᵀ, (M, M)."""
    unit = direction / np.linalg.norm(direction)
    return np.asarray(np.eye(len(unit)) + (along - 1) * np.outer(unit, unit))


def eqn6_path(mu: Array, along: float = 1.0, end: float = 1e5) -> tuple[Array, Array]:
    """Times (T,) and v (T, M) of Eqn. 6 with C in front of μ − v."""
    C = _along(mu, along)
    return solve_in_log_time(lambda v: (C @ (mu - v)) * np.exp(v * v / 2), C @ mu, end)


def joint_path(target: Array, along: float = 1.0, end: float = 1e3) -> tuple[Array, Array]:
    """Times (T,) and v (T, M) of the joint flow with C in front of target − v ∘ e^{v²/2}."""
    C = _along(target, along)

    def field(v: Array) -> Array:
        e = np.exp(v * v / 2)
        return (C @ (target - v * e)) * e

    return solve_in_log_time(field, C @ target, end)


def dip_and_rebound(values: Array) -> tuple[float, float]:
    """How far a curve falls from its start, and how far it comes back until its end."""
    low = int(values.argmin())
    return float(values[0] - values[low]), float(values[-1] - values[low])


def entropy(v: Array) -> Array:  # (T, M) -> (T,)
    """Entropy in nats of the attention softmax(v²/2) that Theorem 1 gives to these states."""
    return softmax_entropy(v * v / 2)
