"""θ₁, θ₂, F, G of a homogeneous activation, Lemma 1 for any ‖v‖, and the flow of a C-component mixture (Lemma 2).

For x = x̄ + x′ with x′ isotropic and v ≠ 0, s = v̂·x′ has the density p_n whatever ‖v‖ is, so with r = v·x̄ + ξ

    E[ψ(v·x + ξ)] = ∫ ψ(‖v‖ s + r) p_n(s) ds,     E[x ψ] = E[ψ] x̄ + (∫ s ψ(‖v‖ s + r) p_n(s) ds) v̂.

Homogeneous φ has ψ = φ′ = c₋ or c₊ by sign, and only ρ = r/‖v‖ matters: the integrals are θ₁(ρ) and θ₂(ρ), and

    v̇ = Σ_j a_j [θ₁(ρ_j) x̄_j + θ₂(ρ_j) v̂],     ξ̇ = Σ_j a_j θ₁(ρ_j)

is the gradient of E[g φ] = ‖v‖ Σ_j a_j F(ρ_j). In a subspace with orthonormal basis R, v̂ and ‖v‖ are those of RRᵀv.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import quad, solve_ivp

from joma.theory.ending import Ending, EndingKind, done
from joma.theory.flows import JointFlow
from joma.theory.isotropic.radial import Radial
from joma.theory.setting import Activation, Array, Task, finite

DEAD = 1e-9  # a node whose weights have shrunk by this factor has died


@dataclass(frozen=True)
class Thetas:
    """θ₁, θ₂, F and G (Eqns. 40, 48-49, 57) for the activation with slopes (c₋, c₊); ReLU by default.

    >>> from joma.theory.isotropic import Gaussian
    >>> relu = Thetas(Gaussian(3))
    >>> bool(abs(relu.F(0.7) - relu.theta2(0.7) - 0.7 * relu.theta1(0.7)) < 1e-15)
    True
    """

    family: Radial
    slopes: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if len(self.slopes) != 2 or not np.isfinite(self.slopes).all():
            raise ValueError(f"slopes must be two finite numbers (c₋, c₊), got {self.slopes!r}")

    @property
    def jump(self) -> float:
        """c₊ − c₋."""
        return self.slopes[1] - self.slopes[0]

    def theta1(self, r: ArrayLike) -> Array:
        """∫ φ′(s + r) p_n(s) ds."""
        r, (low, high) = np.asarray(r, float), self.slopes
        far = self.family.cdf(-np.abs(r))  # each slope times its own share: exact in either tail
        return np.where(r < 0, high * far + low * (1 - far), low * far + high * (1 - far))

    def theta2(self, r: ArrayLike) -> Array:
        """∫ s φ′(s + r) p_n(s) ds."""
        return self.jump * self.family.tail_mean(r)

    def F(self, r: ArrayLike) -> Array:  # noqa: N802
        """E[φ(s + r)] = θ₂(r) + r θ₁(r), whose derivative is θ₁ (Lemma 3)."""
        return self.theta2(r) + np.asarray(r) * self.theta1(r)

    def density(self, r: ArrayLike) -> Array:
        """dθ₁/dr = (c₊ − c₋) p_n(r); and dθ₂/dr is −r times it (Lemma 5, corrected)."""
        return self.jump * self.family.marginal(r)

    def inverse(self, y: ArrayLike) -> Array:
        """θ₁⁻¹(y), for y strictly between the slopes."""
        if self.jump == 0:
            raise ValueError(
                f"θ₁ is constant for a linear activation (both slopes {self.slopes[0]:g})"
            )
        return self.family.ppf((np.asarray(y, float) - self.slopes[0]) / self.jump)

    def G(self, y: ArrayLike) -> Array:  # noqa: N802
        """F(θ₁⁻¹(y)), Eqn. 57."""
        return self.F(self.inverse(y))

    def level(self, r: ArrayLike) -> Array:
        """F(r)/θ₁(r), the slope of the line from the origin to (y, G(y)) at y = θ₁(r); inf where θ₁ = 0."""
        theta1, F = self.theta1(r), self.F(r)
        return np.where(theta1 == 0, np.inf, F / np.where(theta1 == 0, 1.0, theta1))

    def activation(self) -> Activation:
        """φ, for a ``JointFlow``."""
        low, high = self.slopes
        slopes = None if low == high else self.slopes
        gate: Callable[[Array], Array] = lambda a: np.where(a > 0, high, low)  # noqa: E731
        return Activation("homogeneous", lambda a: gate(a) * a, gate, slopes)


def expectation(
    family: Radial, psi: Callable[[Any], Any], v: ArrayLike, xi: float, mean: ArrayLike, *,
    basis: ArrayLike | None = None, kinks: tuple[float, ...] = (0.0,),
) -> tuple[float, Array]:  # fmt: skip
    """E[ψ(v·x + ξ)] and E[x ψ(v·x + ξ)] for x isotropic about ``mean``: Lemma 1, for any ‖v‖ and any ψ.

    Arguments:
        family: the isotropic distribution.
        psi: any bounded function of a number.
        v, mean: (M,); the projection of v on the distribution's subspace must not be 0.
        xi: the bias ξ.
        basis: (M, n) orthonormal columns that span the subspace; all of R^M by default.
        kinks: where ψ is not smooth.

    Returns:
        A number, and a vector (M,).
    """
    v, mean = finite(v, "v", 1), finite(mean, "mean", 1)
    inside = _project(v, _basis(basis, family, len(v)))
    if len(mean) != len(v):
        raise ValueError(f"v has {len(v)} components and the mean {len(mean)}")
    norm = float(np.linalg.norm(inside))
    if norm == 0:
        raise ValueError(
            "v is zero, or orthogonal to the subspace of the distribution: Lemma 1 needs v ≠ 0"
        )
    r = float(v @ mean + xi)
    cuts = sorted({(k - r) / norm for k in kinks} | {0.0})
    edges = [-family.radius, *(c for c in cuts if abs(c) < family.radius), family.radius]

    def integral(weight: Callable[[float], float]) -> float:
        f = lambda s: weight(s) * float(psi(norm * s + r)) * float(family.marginal(s))  # noqa: E731
        parts = (
            quad(f, *ends, epsabs=1e-13, epsrel=1e-12, limit=200, full_output=1)[0]
            for ends in pairwise(edges)
        )
        return float(sum(parts))

    with np.errstate(over="ignore", under="ignore"):  # ψ far out, where p_n is 0
        first, second = integral(lambda s: 1.0), integral(lambda s: s)
    return first, first * mean + second * inside / norm


def _basis(basis: ArrayLike | None, family: Radial, M: int) -> Array | None:
    if basis is None:
        if family.n != M:
            raise ValueError(
                f"the family lives in R^{family.n} and v has {M} components; give a basis (M, n)"
            )
        return None
    R = finite(basis, "basis", 2)
    if R.shape != (M, family.n) or not np.allclose(R.T @ R, np.eye(family.n), atol=1e-10):
        raise ValueError(
            f"basis must be {(M, family.n)} with orthonormal columns, got shape {R.shape}"
        )
    return R


def _project(v: Array, basis: Array | None) -> Array:
    return v if basis is None else basis @ (basis.T @ v)


@dataclass(frozen=True, eq=False)
class Path:
    """A mixture's flow, integrated. ``ending`` is done, or died where the weights reach 0; ``status`` says it."""

    t: Array = field(repr=False)  # (T,)
    v: Array = field(repr=False)  # (T, M)
    xi: Array = field(repr=False)  # (T,)
    ending: Ending

    @property
    def status(self) -> str:
        """How the flow ended, in a sentence: "done" or "dies at t = …"."""
        return str(self.ending)


@dataclass(frozen=True, eq=False)
class Mixture:
    """C isotropic components about their centres, with weights a_j = E[g | j] P(j), seen by one homogeneous node.

    Arguments:
        family: the isotropic distribution, the same about every centre.
        centres: (C, M).
        a: (C,), of either sign.
        slopes: (c₋, c₊) of the activation; ReLU by default.
        basis: (M, n) orthonormal columns if the distributions live in a subspace.
    """

    family: Radial
    centres: Array
    a: Array
    slopes: tuple[float, float] = (0.0, 1.0)
    basis: Array | None = None

    def __post_init__(self) -> None:
        centres, a = finite(self.centres, "centres", 2), finite(self.a, "a", 1)
        if len(centres) != len(a) or not len(a):
            raise ValueError(
                f"centres has {len(centres)} rows for {len(a)} weights a; give one centre per weight"
            )
        object.__setattr__(self, "centres", centres)
        object.__setattr__(self, "a", a)
        object.__setattr__(self, "basis", _basis(self.basis, self.family, centres.shape[1]))
        Thetas(self.family, self.slopes)

    @property
    def thetas(self) -> Thetas:
        """θ₁, θ₂, F, G of this family and activation."""
        return Thetas(self.family, self.slopes)

    def rho(self, v: ArrayLike, xi: float) -> Array:
        """ρ_j = (v·x̄_j + ξ)/‖v‖, (C,): the signed distances of the centres from the hyperplane; ±inf at v = 0."""
        v = finite(v, "v", 1)
        if v.shape != self.centres.shape[1:]:
            raise ValueError(f"v must have {self.centres.shape[1]} components, got shape {v.shape}")
        r, norm = self.centres @ v + xi, np.linalg.norm(_project(v, self.basis))
        if norm > 0:
            return r / norm
        if (r == 0).any():
            raise ValueError(
                "v and the pre-activation of a centre are both zero: the field has no direction there"
            )
        return np.copysign(np.inf, r)

    def field(self, v: ArrayLike, xi: float) -> tuple[Array, float]:
        """v̇ (M,) and ξ̇: Eqns. 42-43, corrected."""
        rho, thetas = self.rho(v, xi), self.thetas
        inside = _project(np.asarray(v, float), self.basis)
        norm = float(np.linalg.norm(inside))
        pull = self.a * thetas.theta1(rho)
        return pull @ self.centres + (self.a @ thetas.theta2(rho)) * inside / (norm or 1.0), float(
            pull.sum()
        )

    def objective(self, v: ArrayLike, xi: float) -> float:
        """E[g φ(v·x + ξ)] = ‖v‖ Σ_j a_j F(ρ_j), of which the flow is the gradient; ½ d(‖v‖² + ξ²)/dt equals it."""
        v_dot, xi_dot = self.field(v, xi)
        return float(np.asarray(v) @ v_dot + xi * xi_dot)  # Euler: φ is homogeneous

    def jacobian(self, v: ArrayLike, xi: float) -> Array:
        """∂(v̇, ξ̇)/∂(v, ξ), (M + 1, M + 1): the Hessian of the objective; (v, ξ) itself is always a null vector."""
        rho, thetas = self.rho(v, xi), self.thetas
        inside = _project(np.asarray(v, float), self.basis)
        norm = float(np.linalg.norm(inside))
        if norm == 0:
            raise ValueError("the field is not differentiable at v = 0")
        unit, M = inside / norm, len(inside)
        rows = np.hstack([self.centres - np.outer(rho, unit), np.ones((len(rho), 1))])  # ‖v‖ ∂ρ_j
        projector = np.eye(M) if self.basis is None else self.basis @ self.basis.T
        out = rows.T @ ((self.a * thetas.density(rho))[:, None] * rows)
        out[:M, :M] += (self.a @ thetas.theta2(rho)) * (projector - np.outer(unit, unit))
        return out / norm

    def integrate(
        self, t_end: float, v0: ArrayLike, xi0: float = 0.0, *, times: int | ArrayLike = 201, freeze_xi: bool = False,
        rtol: float = 1e-10, method: Literal["DOP853", "LSODA"] = "DOP853",
    ) -> Path:  # fmt: skip
        """The flow from (v0, ξ0). ``freeze_xi`` holds ξ, as Theorem 3 does; LSODA is for long spans of time."""
        start = finite(v0, "v0", 1)
        if not start.any() and xi0 == 0:
            raise ValueError(
                "v0 and xi0 are both zero: the field has no direction there, start elsewhere"
            )
        if not (np.isfinite(t_end) and t_end > 0):
            raise ValueError(f"t_end must be a positive number, got {t_end!r}")
        out = (
            np.linspace(0.0, t_end, times)
            if isinstance(times, (int, np.integer))
            else finite(times, "times", 1)
        )

        def slope(_: float, y: Array) -> Array:
            v_dot, xi_dot = self.field(y[:-1], y[-1])
            return np.append(v_dot, 0.0 if freeze_xi else xi_dot)

        def size(_: float, y: Array) -> float:
            return float(np.linalg.norm(y) - DEAD * np.linalg.norm(y0))

        size.terminal = True  # type: ignore[attr-defined]
        y0 = np.append(start, float(xi0))
        tiny = 0.01 * rtol * float(np.linalg.norm(y0))
        solution = solve_ivp(
            slope, (0.0, float(t_end)), y0, method, out, events=size, rtol=rtol, atol=tiny
        )
        died = solution.t_events[0] if solution.t_events else np.empty(0)
        if len(died):
            ending = Ending(EndingKind.DIED, float(died[0]), f"dies at t = {died[0]:.10g}")
        elif solution.success:
            ending = done(t_end)
        else:
            last = float(solution.t[-1]) if len(solution.t) else 0.0
            ending = Ending(EndingKind.INTEGRATOR, last, str(solution.message))
        return Path(solution.t, solution.y[:-1].T, solution.y[-1], ending)

    def task(self, samples: int, rng: np.random.Generator) -> Task:
        """``samples`` draws per component as a ``Task`` whose gradients are constant in each component."""
        C = len(self.a)
        noise = self.family.sample(C * samples, rng)
        x = np.repeat(self.centres, samples, axis=0) + (
            noise if self.basis is None else noise @ self.basis.T
        )
        return Task(x, C * np.repeat(self.a, samples)[:, None], signed=True)

    def sampled(self, samples: int, rng: np.random.Generator) -> JointFlow:
        """The joint flow on such draws with uniform attention (z = 0, held), which this flow is the limit of."""
        return JointFlow(self.task(samples, rng), "exp", self.thetas.activation(), attention_lr=0.0)
