"""Around a critical point: the Jacobian, Theorem 3's C(μ) as printed and as derived, and what the flow does instead.

At a critical ray of a₊ > 0 about x̄₊ and a₋ < 0 about x̄₋ = 0, with s = sgn(μ·x̄₊) and ξ held at ξ*, −∂v̇/∂v is

    C = β₁ (I − μ̂μ̂ᵀ) + β_∥ μ̂μ̂ᵀ,    β₁ = s a₊ ‖x̄₊‖ θ₁(ρ₊)/‖μ‖,    β_∥ = −κ ξ*²/‖μ‖³,    κ = Σ_j a_j θ₁′(ρ_j).

With ξ moving too, the Hessian has the null vector (μ, ξ*), the eigenvalue −β₁ on μ^⊥, and κ (1 + ξ*²/‖μ‖²)/‖μ‖ across
the ray: a ray attracts if s > 0 and κ < 0. Where there is no critical ray, E[gφ] decides what becomes of a node: it
only grows along the flow, and ½ d(‖v‖² + ξ²)/dt equals it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

from joma.theory.isotropic.mixture import Mixture
from joma.theory.setting import Array, finite


@dataclass(frozen=True, eq=False)
class Linearisation:
    """A critical point (μ, ξ*) of two components with x̄₋ = 0, and the flow to first order about it."""

    mixture: Mixture = field(repr=False)
    mu: Array
    xi: float
    jacobian: Array = field(repr=False)  # (M + 1, M + 1) of (v̇, ξ̇) in (v, ξ)
    printed: tuple[float, float]  # β₁, β₂ of Eqns. 73-74
    corrected: tuple[float, float]  # β₁, β₂ with C = β₁ I + β₂ μμᵀ
    s_mu: int  # sgn(μ·x̄₊)

    @property
    def C(self) -> Array:  # noqa: N802
        """−∂v̇/∂v with ξ held, (M, M), by differentiation."""
        return -self.jacobian[:-1, :-1]

    def matrix(self, beta: tuple[float, float]) -> Array:
        """β₁ I + β₂ μμᵀ (Eqn. 72)."""
        return beta[0] * np.eye(len(self.mu)) + beta[1] * np.outer(self.mu, self.mu)

    @property
    def definite(self) -> bool:
        """Whether C is positive definite: with ξ held, μ attracts."""
        return bool(np.linalg.eigvalsh(self.C).min() > 0)

    @property
    def null(self) -> Array:
        """(μ, ξ*) normalised: the direction in which the whole flow is neutral."""
        ray = np.append(self.mu, self.xi)
        return ray / np.linalg.norm(ray)

    @property
    def attracts(self) -> bool:
        """Whether the ray attracts with ξ moving: all eigenvalues but the neutral one are negative."""
        values = np.sort(np.linalg.eigvalsh(self.jacobian - np.outer(self.null, self.null)))
        return bool(values.max() < 0)

    def neighbourhood(self, tolerance: float = 0.05, angles: int = 31) -> float:
        """γ/‖μ‖: the largest ball about μ in which Eqn. 5 gives v̇ to ``tolerance`` of ‖C(μ − v)‖, with ξ held."""

        def off(gamma: float, direction: Array) -> float:
            step = gamma * float(np.linalg.norm(self.mu)) * direction
            v_dot, _ = self.mixture.field(self.mu + step, self.xi)
            return float(np.linalg.norm(v_dot + self.C @ step) / np.linalg.norm(self.C @ step))

        return _reach(off, self._directions(angles), tolerance, np.geomspace(1e-6, 0.999, 40), 1e-6)

    def flow_neighbourhood(self, tolerance: float = 0.05, angles: int = 9) -> float:
        """γ/‖μ‖: from the largest ball about μ in which Eqn. 5 keeps v(t) to ``tolerance`` of ‖v(0) − μ‖, for all t."""
        values, vectors = np.linalg.eigh(self.C)
        if values.min() <= 0:
            raise ValueError(
                f"C is not positive definite (least eigenvalue {values.min():.3g}): the flow leaves μ"
            )
        times = np.concatenate([[0.0], np.geomspace(0.05, 8.0, 40) / values.min()])

        def off(gamma: float, direction: Array) -> float:
            step = gamma * float(np.linalg.norm(self.mu)) * direction
            path = self.mixture.integrate(
                times[-1],
                self.mu + step,
                self.xi,
                times=times,
                freeze_xi=True,
                rtol=1e-7,
                method="LSODA",
            )
            linear = (np.exp(-np.outer(path.t, values)) * (vectors.T @ step)) @ vectors.T
            return float(
                np.linalg.norm(path.v - self.mu - linear, axis=1).max() / np.linalg.norm(step)
            )

        return _reach(off, self._directions(angles), tolerance, np.geomspace(0.01, 0.999, 8), 1e-3)

    def _directions(self, angles: int) -> list[Array]:
        """Unit vectors at angles 0 … π from μ; the flow is symmetric about μ."""
        along = self.mu / np.linalg.norm(self.mu)
        if len(along) == 1:
            return [along, -along]
        across = np.linalg.svd(along[None, :])[2][-1]
        return [
            np.cos(angle) * along + np.sin(angle) * across
            for angle in np.linspace(0.0, np.pi, angles)
        ]


def _reach(
    off: Callable[[float, Array], float],
    directions: list[Array],
    tolerance: float,
    radii: Array,
    rtol: float,
) -> float:
    """The least γ at which off(γ, direction) passes the tolerance in any direction; 1 if none does."""
    best = 1.0
    for direction in directions:
        if best < 1 and max(off(best, direction), off(best / 2, direction)) <= tolerance:
            continue
        low = 0.0
        for gamma in radii:
            if off(gamma, direction) > tolerance:
                if low == 0:
                    return 0.0
                best = min(
                    best,
                    float(
                        brentq(lambda g, d=direction: off(g, d) - tolerance, low, gamma, rtol=rtol)
                    ),
                )
                break
            low = gamma
    return best


def linearise(mixture: Mixture, mu: ArrayLike, xi: float) -> Linearisation:
    """The flow about the critical point (μ, ξ*) of a mixture with components a₊ > 0 and a₋ < 0, the second at 0.

    Arguments:
        mixture: two components.
        mu, xi: the critical point, (M,) and a number; `CriticalRay.point` gives them.

    Returns:
        The Jacobian, C, and the printed and corrected coefficients of Theorem 3.
    """
    mu = finite(mu, "mu", 1)
    if len(mixture.a) != 2 or not mixture.a[0] > 0 > mixture.a[1] or mixture.centres[1].any():
        raise ValueError(
            "Theorem 3 takes two components: first one with a > 0, then one with a < 0 about the centre 0"
        )
    if not mu.any():
        raise ValueError("μ is the zero vector: Theorem 3 needs μ ≠ 0")
    v_dot, xi_dot = mixture.field(mu, xi)
    size = float(np.abs(mixture.a).sum() * (np.abs(mixture.centres).max() + mixture.family.scale))
    if max(np.abs(v_dot).max(), abs(xi_dot)) > 1e-7 * size:
        raise ValueError(
            f"(μ, ξ) is not critical: v̇ and ξ̇ there have sizes {np.abs(v_dot).max():.2g}, {abs(xi_dot):.2g}"
        )
    rho, thetas, a, norm = mixture.rho(mu, xi), mixture.thetas, mixture.a, float(np.linalg.norm(mu))
    D, s = float(np.linalg.norm(mixture.centres[0])), int(np.sign(mu @ mixture.centres[0]))
    theta1, slope = float(thetas.theta1(rho[0])), thetas.density(rho)
    pull = s * a[0] * D * theta1 / norm
    radial = -float(a @ slope) * xi**2 / norm**3
    r_plus = norm * rho[0]  # Eqns. 73-74 take θ₁ at r, not at ρ
    printed = (
        s * a[0] * D / norm**2 * float(thetas.theta1(r_plus)),
        s
        * a[0]
        * D
        / norm**4
        * (xi * float(thetas.density(r_plus)) - 2 * float(thetas.theta1(r_plus))),
    )
    jacobian = mixture.jacobian(mu, xi)
    return Linearisation(
        mixture, mu, float(xi), jacobian, printed, (pull, (radial - pull) / norm**2), s
    )


@dataclass(frozen=True, eq=False)
class Fate:
    """Where the direction of (v, ξ) goes, and what the weights do there."""

    v: Array  # (M,), with ξ of unit length together
    xi: float
    rate: float  # E[gφ] there: ‖(v, ξ)‖ changes at this rate
    kind: str  # "grows", "dies" (the node falls silent or its weights reach 0) or "rests" (a critical ray)
    firing: Array  # (C,) share of each component that activates the node


def fate(
    mixture: Mixture, v0: ArrayLike, xi0: float, *, horizon: float = 1e4, tolerance: float = 1e-6
) -> Fate:
    """Follow the direction u of (v, ξ) in its own time, u′ = ∇L − (u·∇L) u with L = E[gφ], to its end.

    dt = ‖(v, ξ)‖ dτ turns the flow into gradient ascent of L on the unit sphere: it ends where ∇L ∥ u.

    Arguments:
        mixture: what the node sees.
        v0, xi0: the start, (M,) and a number, not both zero.
        horizon: the longest own time τ.
        tolerance: a rate of growth within this of 0 counts as none.

    Returns:
        The direction at the end, and whether the node grows, rests or dies there.
    """
    start = np.append(finite(v0, "v0", 1), float(xi0))
    if not start.any():
        raise ValueError("v0 and xi0 are both zero: there is no direction to follow")

    def slope(_: float, y: Array) -> Array:
        u = y / np.linalg.norm(y)
        gradient = np.append(*mixture.field(u[:-1], u[-1]))
        return gradient - (u @ gradient) * u

    unit = start / np.linalg.norm(start)
    end = solve_ivp(slope, (0.0, horizon), unit, "LSODA", rtol=1e-9, atol=1e-11).y[:, -1]
    end /= np.linalg.norm(end)
    v, xi = end[:-1], float(end[-1])
    rate, firing = mixture.objective(v, xi), mixture.family.cdf(mixture.rho(v, xi))
    quiet = "rests" if rate > -tolerance and firing.max() > 0.01 else "dies"
    kind = "grows" if rate > tolerance else quiet
    return Fate(v, xi, rate, kind, firing)
