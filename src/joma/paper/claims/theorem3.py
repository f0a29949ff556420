"""Claims on Theorem 3: the flow near a critical point of two isotropic components."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from scipy.optimize import brentq

from joma.paper.claims._registry import Kind, Variant, claim, share
from joma.paper.claims.isotropic import critical_points
from joma.theory.isotropic import Mixture, StudentT, Thetas, critical_rays, linearise
from joma.theory.setting import Array

PUSH = 1e-3


def _differentiated(mixture: Mixture, v: Array, xi: float) -> Array:
    """−∂v̇/∂v with ξ held, by central differences."""
    h = 1e-5 * float(np.linalg.norm(v))
    columns = []
    for direction in np.eye(len(v)):
        ahead, _ = mixture.field(v + h * direction, xi)
        behind, _ = mixture.field(v - h * direction, xi)
        columns.append((ahead - behind) / (2 * h))
    return -np.stack(columns, axis=1)


@functools.cache
def _points() -> tuple[tuple[Mixture, Array, float], ...]:
    """The critical points with a₊ > 0 > a₋, as Theorem 3 has them."""
    return tuple(point for point in critical_points() if point[0].a[0] > 0)


@claim(
    "T3.form",
    root="norm",
    kind=Kind.WRONG,
    source="Theorem 3, Eqns. 5 and 72-74",
    statement="Near μ, v̇ = C(μ)(μ − v) with C = s_μ{β₁I + β₂μμᵀ}, β₁ = s_μ a₊‖x̄₊‖θ₁(r₊)/‖μ‖², "
    "β₂ = s_μ a₊‖x̄₊‖(ξ*θ₁′(r₊) − 2θ₁(r₊))/‖μ‖⁴.",
    tolerance=5e-7,
    measures=(
        "relative error of C against differences of the field with ξ held, at critical points with "
        "s_μ = ±1 (Student-t, five (n, ν, a, slopes)), ‖μ‖ = 0.5, 1, 2"
    ),
    correction=(
        "C = β₁I + β₂μμᵀ with β₁ = s_μ a₊‖x̄₊‖θ₁(ρ₊)/‖μ‖ and, along μ, β₁ + β₂‖μ‖² = −[a₊θ₁′(ρ₊) − "
        "a₋θ₁′(ρ₋)]ξ*²/‖μ‖³. s_μ is counted twice in the theorem, and the printed β's follow from "
        "the uncorrected Lemma 2: they give β₁ + β₂‖μ‖² ∝ ξ*θ₁′ − θ₁ < 0 whenever ξ* ≤ 0, so that "
        "C could never be positive definite where A.4 says the critical points are"
    ),
    counterexample=(
        "Student-t, ν = 3, a = (0.4, −0.6), ‖μ‖ = 1: printed β₁ + β₂‖μ‖² = −0.112, by differences "
        "of the field +0.0114"
    ),
    control="the corrected form with the sign along μ reversed",
    paper_formula=(
        r"$C=s_\mu\{\beta_1I+\beta_2\mu\mu^\top\},\ \beta_1=s_\mu\frac{a_+\|\bar "
        r"x_+\|}{\|\mu\|^2}\theta_1(r_+^*),\ \beta_2=s_\mu\frac{a_+\|\bar "
        r"x_+\|}{\|\mu\|^4}\big(\xi^*\theta_1'(r_+^*)-2\theta_1(r_+^*)\big)$"
    ),
    corrected_formula=(
        r"$C=\beta_1I+\beta_2\mu\mu^\top,\ \beta_1=s_\mu\frac{a_+\|\bar "
        r"x_+\|}{\|\mu\|}\theta_1(\rho_+),\ "
        r"\beta_1+\beta_2\|\mu\|^2=-\frac{\xi^{*2}}{\|\mu\|^3}\big(a_+\theta_1'(\rho_+)-a_-"
        r"\theta_1'(\rho_-)\big)$"
    ),
    derivation=(
        r"$\partial\rho_\pm/\partial v=-\xi^*\mu/\|\mu\|^3$ at $v=\mu\parallel\bar x_+$, $\bar "
        r"x_-=0$, and $\theta_2'=-\rho\theta_1'$: along $\mu$ the terms add up to "
        r"$(a_+\theta_1'(\rho_+)-a_-\theta_1'(\rho_-))\xi^{*2}/\|\mu\|^3$. Across it only $\hat v$ "
        r"turns, with the factor $a_+\theta_2(\rho_+)-a_-\theta_2(\rho_-)=-s_\mu a_+\|\bar "
        r"x_+\|\theta_1(\rho_+)$."
    ),
    terms=("β₁", "β₁ + β₂‖μ‖²"),
)
def t3_form(variant: Variant) -> Iterator[float]:
    """Compare the statement's C with differences of the field."""
    sign = variant.choose(1.0, {"control": -1.0})
    for mixture, mu, xi in _points():
        linear = linearise(mixture, mu, xi)
        norm = float(np.linalg.norm(mu))
        true = _differentiated(mixture, mu, xi)
        if variant == "printed":
            C = linear.s_mu * linear.matrix(linear.printed)
        else:
            across, second = linear.corrected
            along = sign * variant.factor("β₁ + β₂‖μ‖²") * (across + second * norm**2)
            across = variant.factor("β₁") * across
            C = linear.matrix((across, (along - across) / norm**2))
        # Along and across μ by themselves: one of them can be much the smaller.
        unit = mu / norm
        yield float(abs(unit @ (C - true) @ unit) / abs(unit @ true @ unit))
        others = np.eye(len(mu)) - np.outer(unit, unit)
        error = np.linalg.norm(others @ (C - true) @ others)
        yield float(error / np.linalg.norm(others @ true @ others))


def _jacobian(mixture: Mixture, mu: Array, xi: float) -> Array:
    return -mixture.jacobian(mu, xi)[:-1, :-1]


@functools.cache
def _classified() -> tuple[tuple[bool, bool], ...]:
    """Whether s_μ > 0, and whether C is positive definite by differences, at many critical points.

    Student-t with either component the heavier one, and a point with ξ* = 0, where C is singular.
    """
    rng = np.random.default_rng(31)
    cases = [(1.5, _ratio_without_bias(1.5))]
    for _ in range(40):
        nu = float(rng.uniform(1.3, 8.0))
        ratio = float(np.exp(rng.uniform(-2.0, 2.0)))
        cases.append((nu, ratio))
    found = []
    for nu, ratio in cases:
        family = StudentT(3, nu=nu)
        a = np.array([1.0, -ratio])
        (ray,) = critical_rays(family, a).rays
        centres = np.zeros((2, 3))
        centres[0] = rng.standard_normal(3)
        centres[0] *= ray.separation / np.linalg.norm(centres[0])
        mixture = Mixture(family, centres, a)
        mu, xi = ray.point(centres, float(rng.uniform(0.5, 2.0)))
        C = _differentiated(mixture, mu, xi)
        eigenvalues = np.linalg.eigvalsh((C + C.T) / 2)
        is_definite = bool(eigenvalues.min() > 1e-6 * np.abs(eigenvalues).max())
        found.append((bool(mu @ centres[0] > 0), is_definite))
    return tuple(found)


def _ratio_without_bias(nu: float) -> float:
    """The a₋/a₊ at which a pair of Student-t, ν < 2, has ρ₋ = 0, so that ξ* = 0."""
    thetas = Thetas(StudentT(3, nu=nu))

    def above(rho: float) -> float:
        return float(thetas.level(rho) - thetas.level(0.0))

    rho_plus = brentq(above, 0.5, 100.0, xtol=1e-14)
    return float(thetas.theta1(rho_plus) / thetas.theta1(0.0))


@claim(
    "T3.necessary",
    source="Appendix A.4, after Eqn. 74",
    statement=(
        "The necessary condition for C(μ) to be a positive-definite matrix is that s_μ = sgn(μᵀx̄₊) "
        "> 0."
    ),
    tolerance=0.0,
    measures=(
        "share of critical points with C positive definite, by differences of the field, that have "
        "s_μ < 0; ReLU and Student-t, 41 draws of ν from 1.3 to 8 and a₋/a₊ from e⁻² to e²"
    ),
    remark=(
        "s_μ > 0 iff a₋ > a₊, since θ₁(ρ₊)/θ₁(ρ₋) = a₋/a₊ and θ₁ increases. It is not sufficient: "
        "at ξ* = 0 (Student-t, ν = 1.5: a₋/a₊ = 1.4328) C is singular along μ. For a φ that falls, "
        "such as ReLU(−x), θ₁ < 0 and the condition turns round"
    ),
    control="s_μ < 0 in the place of s_μ > 0",
    derivation=(
        r"Across $\mu$, $C$ is $\beta_1I$ with $\beta_1=s_\mu a_+\|\bar "
        r"x_+\|\theta_1(\rho_+)/\|\mu\|$ (T3.form), which has the sign of $s_\mu$ where "
        r"$\theta_1(\rho_+)>0$."
    ),
    mutants={"s_μ > 0 is sufficient": "the converse: C is positive definite wherever s_μ > 0"},
)
def t3_necessary(variant: Variant) -> float:
    """Return the share of definite points without the condition."""
    points = _classified()
    if variant.has("s_μ > 0 is sufficient"):
        met = [is_definite for is_aligned, is_definite in points if is_aligned]
        return share(met.count(False), len(met))
    met = [is_aligned for is_aligned, is_definite in points if is_definite]
    return share(met.count(variant == "control"), len(met))


@claim(
    "T3.stability",
    source="Theorem 3, last sentence",
    statement="If C(μ) is positive definite, μ is a stable critical point.",
    tolerance=0.005,
    measures=(
        "how much farther than at the start the flow ever gets from (μ, ξ*) after a push of 0.1 %, "
        "as a share of the push, and with ξ held at ξ* the share of the push that is left at the "
        "end; three critical points with C positive definite, six directions each"
    ),
    remark=(
        "Stable in Lyapunov's sense: the flow is the gradient of E[gφ], so it does not leave. It "
        "comes back to μ itself with ξ held at ξ*, as the proof has it; with ξ moving, to a nearby "
        "point of the ray {c(μ, ξ*)}, along which the flow is neutral ((v, ξ) is a null vector of "
        "the Jacobian)"
    ),
    control="critical points with C negative definite",
    derivation=(
        r"The field is the gradient of $\mathbb E[g\phi]$, so its Jacobian is symmetric. Its "
        r"eigenvalues are 0 along the ray, $-\beta_1$ on $\mu^\perp$ and "
        r"$\frac{\kappa}{\|\mu\|}(1+\xi^{*2}/\|\mu\|^2)$, "
        r"$\kappa=a_+\theta_1'(\rho_+)-a_-\theta_1'(\rho_-)$; $C\succ0$ iff $\beta_1>0$, "
        r"$\kappa<0$ and $\xi^*\ne0$."
    ),
    mutants={"C indefinite": "the condition on C dropped: critical points with β₁ < 0"},
)
def t3_stability(variant: Variant) -> Iterator[float]:
    """Perturb critical points and follow the flow."""
    is_unstable = variant == "control" or variant.has("C indefinite")
    directions = 2 if is_unstable else 6
    rng = np.random.default_rng(0)
    for mixture, mu, xi in _points():
        if abs(np.linalg.norm(mu) - 1) >= 1e-6:
            continue
        if mixture.slopes[0] < 0:  # slopes of both signs: φ falls somewhere
            continue
        if linearise(mixture, mu, xi).definite == is_unstable:
            continue
        start = np.append(mu, xi)
        for _ in range(directions):
            push = _push(rng, len(start))
            path = mixture.integrate(300.0, mu + push[:-1], xi + push[-1], times=31)
            states = np.column_stack([path.v, path.xi])  # (T, M + 1)
            yield float(np.linalg.norm(states - start, axis=1).max() / PUSH - 1)
        if not is_unstable:
            push = _push(rng, len(mu))
            slowest = float(np.linalg.eigvalsh(_jacobian(mixture, mu, xi)).min())
            end = 7.0 / slowest
            held = mixture.integrate(end, mu + push, xi, times=2, freeze_xi=True, method="LSODA")
            yield float(np.linalg.norm(held.v[-1] - mu) / PUSH)


def _push(rng: np.random.Generator, dimensions: int) -> Array:
    """A random vector of length PUSH."""
    push = rng.standard_normal(dimensions)
    push *= PUSH / np.linalg.norm(push)
    return push
