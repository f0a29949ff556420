"""A joint flow, integrated until it rests: what predictions of its end are held against.

How long that takes is set by the slowest direction of u̇ = −η P(u) ∇_u L, with P ⪰ e^{2z/T}: tokens whose logits have
fallen, and directions in which the samples hardly differ, are slow. Rest is therefore told by the gradient, not by a
time; an implicit method takes steps as long as the slowest direction allows.
"""

from __future__ import annotations

import numpy as np

from joma.theory.flows import JointFlow
from joma.theory.setting import Array


def gradient_size(flow: JointFlow, v: Array, xi: Array, z: Array) -> float:
    """The largest component of the loss's gradient in (u, ξ)."""
    task = flow.task
    g = task.p[:, None] * task.gradient(flow.attention.weights(z, task.x) @ v + xi)
    return max(
        float(np.abs(task.x.T @ g / flow.attention.A).max()), float(np.abs(g.sum(axis=0)).max())
    )


def run_to_rest(
    flow: JointFlow, v: Array, xi: Array, z: Array, tolerance: float = 1e-10, longest: float = 1e9
) -> tuple[Array, Array, Array, float]:
    """(v, ξ, z) of a flow with linear nodes where no component of the loss's gradient exceeds ``tolerance``, and when.

    An ArithmeticError if that takes longer than ``longest``, or the integration ends early.
    """
    span, t = 20.0, 0.0
    while t < longest:
        path = flow.integrate(
            span, v, xi, z, times=2, rtol=1e-9, atol=1e-12, method="LSODA", max_steps=100_000
        )
        if not path.done:
            raise ArithmeticError(f"after t = {t:g}: {path.status}")
        v, xi, z, t = path.v[-1], path.xi[-1], path.z[-1], t + span
        if gradient_size(flow, v, xi, z) <= tolerance:
            return v, xi, z, t
        span *= 3
    raise ArithmeticError(f"at t = {t:g} the gradient is still {gradient_size(flow, v, xi, z):.1e}")
