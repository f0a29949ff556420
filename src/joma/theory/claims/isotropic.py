"""Claims on isotropic mixtures: Lemmas 1 to 5 (Appendices A.3 and A.4)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import root
from scipy.special import expit

from joma.theory.claims._registry import Kind, claim
from joma.theory.isotropic import (
    ExpNorm,
    Gaussian,
    Laplace,
    Mixture,
    Radial,
    StudentT,
    Thetas,
    UniformBall,
    expectation,
)
from joma.theory.setting import Array

NORMS = (0.5, 1.0, 2.0)
PSI: dict[str, Callable[[Any], Any]] = {
    "relu": lambda u: np.where(u > 0, 1.0, 0.0),
    "leaky": lambda u: np.where(u > 0, 1.0, 0.2),
    "sigmoid": lambda u: expit(3 * u),
}


@claim(
    "L1",
    kind=Kind.WRONG,
    source="Lemma 1, Eqn. 23",
    statement="E[xψ(v·x + ξ)] = θ₁(r)/‖v‖ x̄ + θ₂(r)/‖v‖³ RRᵀv and E[ψ(v·x + ξ)] = θ₁(r)/‖v‖, with r = v·x̄ + ξ and θ₁, θ₂ "
    "that do not depend on v.",
    tolerance=5.0,
    measures="largest deviation from 10⁵ samples in standard errors, five families, three ψ, ‖v‖ = 0.5, 1, 2, in R³ and in a "
    "3-dimensional subspace of R⁴",
    correction="E[ψ] = ∫ψ(‖v‖s + r)p_n(s)ds and E[xψ] = E[ψ] x̄ + (∫sψ(‖v‖s + r)p_n(s)ds) v̂, with v̂ and ‖v‖ of RRᵀv. The printed "
    "form is right at ‖v‖ = 1 only. For φ′ of a homogeneous φ: θ₁(ρ) x̄ + θ₂(ρ) v̂ with ρ = r/‖v‖",
    control="‖v‖² in the place of ‖v‖ inside ψ",
    paper_formula=r"$\mathbb E[x\psi(v^\top x+\xi)]=\frac{\theta_1(r_v)}{\|v\|}\bar x+\frac{\theta_2(r_v)}{\|v\|^3}RR^\top v,\quad "
    r"\mathbb E[\psi]=\frac{\theta_1(r_v)}{\|v\|}$",
    corrected_formula=r"$\mathbb E[x\psi]=\mathbb E[\psi]\,\bar x+\Big(\int s\,\psi(\|v\|s+r_v)p_n(s)\,ds\Big)\frac{v}{\|v\|},\quad "
    r"\mathbb E[\psi]=\int\psi(\|v\|s+r_v)p_n(s)\,ds\quad(v:=RR^\top v)$",
    derivation=r"$y'=v^\top x'$ is $\|v\|$ times a variable with density $p_n$, so its density is $p_n(y'/\|v\|)/\|v\|$; Eqn. 31 keeps the "
    r"factor $1/\|v\|$ and drops the argument $y'/\|v\|$. With $\psi\equiv1$ the printed $\mathbb E[\psi]$ is $1/\|v\|$.",
)
def l1(variant: str) -> float:
    """Monte Carlo against the lemma."""
    rng = np.random.default_rng(0)
    families: list[Radial] = [Gaussian(3), UniformBall(3, 1.5), StudentT(3, nu=5.0), Laplace(3), ExpNorm(3, 0.5)]
    worst = 0.0
    for n, family in enumerate(families):
        M = 4 if n == 0 else 3
        basis = np.linalg.qr(rng.standard_normal((M, 3)))[0]
        mean, direction, xi = 0.5 * rng.standard_normal(M), rng.standard_normal(M), -0.3
        x = mean + family.sample(100_000, rng) @ basis.T
        inside = basis @ (basis.T @ direction)
        for norm in NORMS:
            v = norm * direction / np.linalg.norm(inside)
            unit, r = inside / np.linalg.norm(inside), float(v @ mean + xi)
            for psi in PSI.values():
                if variant == "printed":
                    theta1, theta = expectation(family, psi, [1.0, 0.0, 0.0], r, np.zeros(3))
                    first, second = theta1 / norm, theta1 / norm * mean + theta[0] / norm**2 * unit
                else:
                    power = norm if variant == "control" else 1.0
                    shift = xi + float(v @ mean) * (1 - power)  # the same r
                    first, second = expectation(family, psi, power * v, shift, mean, basis=basis)
                value = psi(x @ v + xi)
                for draws, predicted in ((value[:, None], np.array([first])), (x * value[:, None], second)):
                    error = draws.std(axis=0) / np.sqrt(len(x))
                    worst = max(worst, float((np.abs(draws.mean(axis=0) - predicted) / np.maximum(error, 1e-12)).max()))
    return worst


def _statement_field(mixture: Mixture, variant: str, v: Array, xi: float) -> tuple[Array, float]:
    """Eqns. 42-43 as printed, corrected, or with 1/‖v‖ in front of the corrected ones."""
    norm, thetas, a = float(np.linalg.norm(v)), mixture.thetas, mixture.a
    if variant != "printed":
        v_dot, xi_dot = mixture.field(v, xi)
        factor = 1 / norm if variant == "control" else 1.0
        return factor * v_dot, factor * xi_dot
    r = mixture.centres @ v + xi
    pull = a * thetas.theta1(r) / norm
    return pull @ mixture.centres + (a @ thetas.theta2(r)) * v / norm**3, float(pull.sum())


@functools.cache
def _sampled_paths() -> tuple[Mixture, Array, Array]:
    """A mixture, a start, and eight joint flows on its samples with uniform attention, (8, 151, 4)."""
    rng = np.random.default_rng(2)
    centres = np.array([[0.9, 0.2, 0.0], [-0.1, 0.3, 0.4], [0.0, 0.0, -0.5]])
    mixture = Mixture(StudentT(3, nu=5.0), centres, np.array([0.5, -0.6, 0.3]), slopes=(0.1, 1.0))
    start = np.array([0.15, -0.2, 0.4, -0.1])
    paths = []
    for _ in range(8):
        path = mixture.sampled(15_000, rng).descend(150, 0.02, start[:3, None], start[3:])
        paths.append(np.hstack([path.v[:, :, 0], path.xi]))
    return mixture, start, np.stack(paths)


@claim(
    "L2",
    kind=Kind.WRONG,
    source="Lemma 2, Eqns. 42-43",
    statement="v̇ = Σ_j a_j [θ₁(r_j)/‖v‖ x̄_j + θ₂(r_j)/‖v‖³ v] and ξ̇ = Σ_j a_j θ₁(r_j)/‖v‖ for a mixture of C isotropic components.",
    tolerance=5.0,
    measures="largest deviation of (v, ξ) at t = 1, 2, 3 from the joint flow with uniform attention on 45 000 samples (C = 3, "
    "Student-t, leaky slopes; both with steps of 0.02), in standard errors over eight draws",
    correction="v̇ = Σ_j a_j [θ₁(ρ_j) x̄_j + θ₂(ρ_j) v̂] and ξ̇ = Σ_j a_j θ₁(ρ_j), ρ_j = r_j/‖v‖: the gradient of E[gφ] = ‖v‖ Σ_j a_j F(ρ_j), "
    "0-homogeneous in (v, ξ)",
    control="the corrected field with a factor 1/‖v‖",
    paper_formula=r"$\dot v=\frac1{\|v\|}\sum_ja_j\theta_1(r_j)\bar x_j+\frac1{\|v\|^3}\sum_ja_j\theta_2(r_j)v,\quad "
    r"\dot\xi=\frac1{\|v\|}\sum_ja_j\theta_1(r_j)$",
    corrected_formula=r"$\dot v=\sum_ja_j\theta_1(\rho_j)\bar x_j+\frac1{\|v\|}\sum_ja_j\theta_2(\rho_j)v,\quad "
    r"\dot\xi=\sum_ja_j\theta_1(\rho_j),\quad \rho_j=r_j/\|v\|$",
    derivation=r"Lemma 1, corrected, with $\psi=\phi'$ and $\psi(\|v\|s+r)=\psi(s+r/\|v\|)$. For linear $\phi$: $\theta_1=1,\theta_2=0$ and "
    r"$\dot v=\mathbb E[gx]=\sum_ja_j\bar x_j$, which the printed form divides by $\|v\|$.",
)
def l2(variant: str) -> float:
    """The statement's Euler path beside gradient descent on samples."""
    mixture, y, paths = _sampled_paths()
    states = [y]
    for _ in range(150):
        v_dot, xi_dot = _statement_field(mixture, variant, y[:3], y[3])
        y = y + 0.02 * np.append(v_dot, xi_dot)
        states.append(y)
    times = [50, 100, 150]
    error = paths[:, times].std(axis=0, ddof=1) / np.sqrt(len(paths))
    return float((np.abs(paths[:, times].mean(axis=0) - np.stack(states)[times]) / error).max())


_FAMILIES: tuple[Radial, ...] = (
    Gaussian(3),
    StudentT(3, nu=3.0),
    StudentT(3, nu=1.5),
    Laplace(2),
    ExpNorm(3),
    UniformBall(4),
)


def _derivative(f: Callable[[Array], Array], r: Array, h: float = 1e-3) -> Array:
    """Central differences of fourth order."""
    return (8 * (f(r + h) - f(r - h)) - (f(r + 2 * h) - f(r - 2 * h))) / (12 * h)


def _sum(thetas: Thetas, sign: float, r: Array) -> Array:
    return thetas.theta2(r) + sign * r * thetas.theta1(r)


@claim(
    "L3",
    kind=Kind.UNSAID,
    source="Lemma 3, Eqns. 48-49",
    statement="For homogeneous φ, (θ₂ + rθ₁)′ = θ₁, so θ₂ = F − rθ₁; F is increasing with F(+∞) = +∞; if rθ₁(r) → 0 at −∞ then F(−∞) = 0.",
    tolerance=1e-7,
    measures="largest of: the error of Eqn. 48 by differences, the largest decrease of F over a step of 0.01, |F(−10⁶)| of ReLU (ν = 1.5 left out) and "
    "shortfall of F(10⁶), six families, five pairs of slopes",
    condition="slopes c₋ ≥ 0, c₊ > 0. The identity holds for all slopes; but F′ = θ₁ is negative where φ falls (φ = |x|: F decreases "
    "on r < 0)",
    control="(θ₂ − rθ₁)′ = θ₁",
    paper_formula=r"$F(r)=\theta_2(0)+\int_0^r\theta_1$ is increasing, $F(+\infty)=+\infty$, for every homogeneous $\phi$",
    corrected_formula=r"$F'=\theta_1\ge0$ and $F(+\infty)=+\infty$ if $c_-\ge0,\ c_+>0$",
    derivation=r"$\theta_1$ lies between $c_-$ and $c_+$ and tends to them at $\mp\infty$. For $\phi(x)=|x|$, "
    r"$\theta_1=2P-1<0$ for $r<0$, and $F$ has its minimum at 0.",
)
def l3(variant: str) -> float:
    """Eqn. 48 and the shape of F."""
    slopes = [(0.0, 1.0), (0.2, 1.0), (1.0, 1.0)] + ([(-1.0, 1.0), (-0.5, 1.0)] if variant == "printed" else [])
    sign = -1.0 if variant == "control" else 1.0
    r = np.array([-2.3, -0.9, -0.4, 0.35, 0.8, 1.7])  # off 0 and ±1, where marginals have kinks and edges
    worst = 0.0
    for family in _FAMILIES:
        for pair in slopes:
            thetas = Thetas(family, pair)
            identity = _derivative(functools.partial(_sum, thetas, sign), r) - thetas.theta1(r)
            F = thetas.F(np.linspace(-8, 8, 1601))
            far = float(thetas.F(-1e6)) if pair[0] == 0 and getattr(family, "nu", 9) > 2 else 0.0
            worst = max(
                worst, float(np.abs(identity).max()), float(-np.diff(F).min()), abs(far), 1e5 - float(thetas.F(1e6))
            )
    return worst


@functools.cache
def critical_point(norm: float, a: tuple[float, float] = (0.4, -0.6)) -> tuple[Mixture, Array, float]:
    """A critical point of the flow itself with ‖v‖ = norm, and its mixture (Student-t, ν = 3, x̄₋ = 0): v̇ = 0 and
    ξ̇ = 0 solved for (v, ξ) and the separation, with none of the equations that are to be checked."""
    family = StudentT(3, nu=3.0)
    axis = np.array([2.0, -1.0, 2.0]) / 3

    def residual(y: Array) -> Array:
        mixture = Mixture(family, np.stack([y[4] * axis, np.zeros(3)]), np.array(a))
        return np.append(np.append(*mixture.field(y[:3], y[3])), (y[:3] @ y[:3]) / norm**2 - 1)

    sign = 1.0 if a[0] < -a[1] else -1.0
    guess = np.concatenate([sign * norm * (axis + 0.03), [-0.6 * norm if sign > 0 else -0.3 * norm, 0.45]])
    solution = root(residual, guess, method="lm", options={"xtol": 1e-15, "ftol": 1e-15})
    if np.abs(solution.fun).max() > 1e-12:
        raise ArithmeticError(f"no critical point found: residual {np.abs(solution.fun).max():.2g}")
    v, xi, D = solution.x[:3], float(solution.x[3]), float(solution.x[4])
    return Mixture(family, np.stack([D * axis, np.zeros(3)]), np.array(a)), v, xi


def distances(mixture: Mixture, v: Array, xi: float, variant: str) -> Array:
    """r_j as printed, ρ_j = r_j/‖v‖ otherwise."""
    return mixture.centres @ v + xi if variant == "printed" else mixture.rho(v, xi)


@claim(
    "L4",
    kind=Kind.WRONG,
    source="Lemma 4, Eqns. 50-54",
    statement="Any stationary point satisfies Σ_j a_j F(r_j) = 0.",
    tolerance=1e-10,
    measures="|Σ a_j F|/Σ |a_j F| at critical points of the flow found by solving v̇ = 0, ξ̇ = 0 (Student-t, ν = 3, a = 0.4, −0.6), "
    "‖v‖ = 0.5, 1, 2",
    correction="Σ_j a_j F(ρ_j) = 0 with ρ_j = r_j/‖v‖. More is true: ½ d(‖v‖² + ξ²)/dt = ‖v‖ Σ_j a_j F(ρ_j) = E[gφ] all along the flow",
    control="Σ_j a_j θ₂(ρ_j) = 0",
    paper_formula=r"$\sum_ja_jF(r_j)=0$",
    corrected_formula=r"$\sum_ja_jF(\rho_j)=0,\quad\rho_j=r_j/\|v\|$",
    derivation=r"$v^\top\dot v=\sum_ja_j[\theta_1(\rho_j)(r_j-\xi)+\|v\|\theta_2(\rho_j)]=\|v\|\sum_ja_jF(\rho_j)-\xi\dot\xi$ with "
    r"$r_j=\|v\|\rho_j$ and Lemma 3. Both $\dot v$ and $\dot\xi$ vanish at a stationary point.",
)
def l4(variant: str) -> float:
    """Σ a F at true critical points."""
    worst = 0.0
    for norm in NORMS:
        mixture, v, xi = critical_point(norm)
        at = distances(mixture, v, xi, variant)
        terms = mixture.a * (mixture.thetas.theta2(at) if variant == "control" else mixture.thetas.F(at))
        worst = max(worst, float(abs(terms.sum()) / np.abs(terms).sum()))
    return worst


@claim(
    "L5",
    kind=Kind.WRONG,
    source="Lemma 5, Eqn. 61",
    statement="φ(x) = c₋ 1[x < 0] + c₊ 1[x > 0], dθ₁/dr = (c₋ + c₊) p_n(r), dθ₂/dr = −(c₋ + c₊) r p_n(r).",
    tolerance=1e-7,
    measures="largest error of both derivatives against differences of θ₁, θ₂, six families, slopes (0, 1), (0.2, 1), (−1, 1)",
    correction="φ′ (not φ) is that step function, and both derivatives have c₊ − c₋ in the place of c₋ + c₊ (the same for ReLU only)",
    control="c₋ − c₊",
    paper_formula=r"$\phi(x)=c_-\mathbf 1[x<0]+c_+\mathbf 1[x>0],\quad\theta_1'=(c_-+c_+)p_n,\quad\theta_2'=-(c_-+c_+)\,r\,p_n$",
    corrected_formula=r"$\phi'(x)=c_-\mathbf 1[x<0]+c_+\mathbf 1[x>0],\quad\theta_1'=(c_+-c_-)p_n,\quad\theta_2'=-(c_+-c_-)\,r\,p_n$",
    derivation=r"$\phi=x\phi'$ makes $\phi'$ constant on each side of 0. $\theta_1(r)=c_-P(s<-r)+c_+P(s>-r)$, so "
    r"$\theta_1'=(c_+-c_-)p_n(-r)$, and likewise $\theta_2'=(c_+-c_-)(-r)p_n(-r)$.",
)
def l5(variant: str) -> float:
    """Derivatives of θ₁ and θ₂ by differences."""
    r = np.array([-2.3, -0.9, -0.4, 0.35, 0.8, 1.7])
    worst = 0.0
    for family in _FAMILIES:
        for low, high in ((0.0, 1.0), (0.2, 1.0), (-1.0, 1.0)):
            thetas, p = Thetas(family, (low, high)), family.marginal(r)
            factor = {"printed": low + high, "corrected": high - low, "control": low - high}[variant]
            one, two = _derivative(thetas.theta1, r) - factor * p, _derivative(thetas.theta2, r) + factor * r * p
            worst = max(worst, float(np.abs(one).max()), float(np.abs(two).max()))
    return worst
