"""Claims on isotropic mixtures: Lemmas 1 to 5 and Eqns. 33-36 (Appendices A.3 and A.4)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import root
from scipy.special import expit, factorial2, gamma

from joma.paper.claims._registry import Kind, Variant, claim, largest
from joma.theory.isotropic import (
    ExpNorm,
    Gaussian,
    Laplace,
    Mixture,
    Radial,
    StudentT,
    Thetas,
    UniformBall,
    critical_rays,
    expectation,
)
from joma.theory.setting import Array

NORMS = (0.5, 1.0, 2.0)
PSI: dict[str, Callable[[Any], Any]] = {
    "relu": lambda u: np.where(u > 0, 1.0, 0.0),
    "leaky": lambda u: np.where(u > 0, 1.0, 0.2),
    "sigmoid": lambda u: expit(3 * u),
}
_GAUSS = np.polynomial.legendre.leggauss(80)


def _panel(low: float, high: float) -> tuple[Array, Array]:
    """Gauss-Legendre nodes and weights on [low, high], or on [low, ∞) by r = low + t/(1 − t)."""
    t = (_GAUSS[0] + 1) / 2
    weight = _GAUSS[1] / 2
    if math.isinf(high):
        return low + t / (1 - t), weight / (1 - t) ** 2
    return low + (high - low) * t, weight * (high - low)


def spherical(
    family: Radial, psi: Callable[[Any], Any], v: Array, xi: float, mean: Array
) -> tuple[float, Array]:
    """Return E[ψ(v·x + ξ)] and E[x ψ(v·x + ξ)] in R³.

    The quadrature runs over radius, latitude about v and longitude, straight from the density
    p₀(‖x − x̄‖). It uses no marginal, no θ, nothing that the lemmas are about.
    """
    norm = float(np.linalg.norm(v))
    r = float(v @ mean + xi)
    axis = v / norm
    others = np.linalg.svd(axis[None, :])[2][1:]  # (2, 3), orthogonal to v
    touch = abs(r) / norm  # the radius at which the sphere meets the kink
    cuts = sorted({0.0, min(touch, family.radius), min(touch + 2.0, family.radius), family.radius})
    first = 0.0
    second = np.zeros(3)
    for low, high in itertools.pairwise(cuts):
        radius, radial = _panel(low, high)
        radial = radial * family.density(radius) * radius**2
        kink = np.clip(-r / (norm * radius), -1, 1)  # the cosine at which ψ jumps
        for start, end in ((-np.ones_like(kink), kink), (kink, np.ones_like(kink))):
            width = (end - start)[:, None]
            cosine = start[:, None] + width * (_GAUSS[0] + 1) / 2  # (radii, cosines)
            sine = np.sqrt(1 - cosine**2)
            weight = radial[:, None] * width * _GAUSS[1] / 2
            value = weight * psi(norm * radius[:, None] * cosine + r)
            along = (value * radius[:, None] * cosine).sum()
            across = (value * radius[:, None] * sine).sum()
            for angle in 2 * np.pi * np.arange(3) / 3:
                direction = np.cos(angle) * others[0] + np.sin(angle) * others[1]
                first += 2 * np.pi / 3 * value.sum()
                second += 2 * np.pi / 3 * (along * axis + across * direction)
    return float(first), second + first * mean


@dataclass(frozen=True)
class _Expectation:
    """E[ψ] and E[xψ] of one isotropic component at one (v, ξ), by quadrature."""

    family: Radial
    psi: str
    norm: float  # ‖v‖ inside the subspace
    v: Array  # (M,)
    mean: Array  # x̄, (M,)
    basis: Array  # of the subspace, (M, 3)
    xi: float
    first: float  # E[ψ]
    second: Array  # E[xψ], (M,)


@functools.cache
def _expectations() -> tuple[_Expectation, ...]:
    """Families, ψ and ‖v‖ with random v, x̄ and ξ."""
    rng = np.random.default_rng(0)
    families = (Gaussian(3), UniformBall(3, 1.5), StudentT(3, nu=5.0), Laplace(3), ExpNorm(3, 0.5))
    cases = []
    for n, family in enumerate(families):
        M = 4 if n == 0 else 3  # the first one lives in a subspace
        for norm in NORMS:
            for name, psi in PSI.items():
                basis = np.linalg.qr(rng.standard_normal((M, 3)))[0]
                mean = 0.5 * rng.standard_normal(M)
                direction = rng.standard_normal(M)
                xi = float(rng.normal(0, 0.4))
                v = norm * direction / np.linalg.norm(basis.T @ direction)
                outside = mean - basis @ (basis.T @ mean)  # of x̄, outside the subspace
                bias = xi + float(v @ outside)
                first, inside = spherical(family, psi, basis.T @ v, bias, basis.T @ mean)
                second = basis @ inside + first * outside
                cases.append(_Expectation(family, name, norm, v, mean, basis, xi, first, second))
    return tuple(cases)


@functools.cache
def _integrals(family: Radial, psi: str, scale: float, r: float) -> tuple[float, float]:
    """∫ψ(scale·s + r)p_n(s)ds and ∫sψ(scale·s + r)p_n(s)ds."""
    first, second = expectation(
        family, PSI[psi], scale * np.eye(family.n)[0], r, np.zeros(family.n)
    )
    return first, float(second[0])


@claim(
    "L1",
    root="norm",
    kind=Kind.WRONG,
    source="Lemma 1, Eqn. 23",
    statement=(
        "E[xψ(v·x + ξ)] = θ₁(r)/‖v‖ x̄ + θ₂(r)/‖v‖³ RRᵀv and E[ψ(v·x + ξ)] = θ₁(r)/‖v‖, with r = "
        "v·x̄ + ξ and θ₁, θ₂ that do not depend on v."
    ),
    tolerance=1e-10,
    measures=(
        "largest deviation from a quadrature over radius and angles, five families, three ψ, ‖v‖ = "
        "0.5, 1, 2, random v, x̄, ξ, in R³ and in a 3-dimensional subspace of R⁴"
    ),
    correction=(
        "E[ψ] = ∫ψ(‖v‖s + r)p_n(s)ds and E[xψ] = E[ψ] x̄ + (∫sψ(‖v‖s + r)p_n(s)ds) v̂, with v̂ and "
        "‖v‖ of RRᵀv. The printed form is right at ‖v‖ = 1 only. For φ′ of a homogeneous φ: θ₁(ρ) "
        "x̄ + θ₂(ρ) v̂ with ρ = r/‖v‖"
    ),
    counterexample="ψ ≡ 1 (a linear φ): E[ψ] = 1 for every v, while the printed θ₁/‖v‖ = 1/‖v‖",
    control="‖v‖² in the place of ‖v‖ inside ψ",
    paper_formula=(
        r"$\mathbb E[x\psi(v^\top x+\xi)]=\frac{\theta_1(r_v)}{\|v\|}\bar "
        r"x+\frac{\theta_2(r_v)}{\|v\|^3}RR^\top v,\quad \mathbb "
        r"E[\psi]=\frac{\theta_1(r_v)}{\|v\|}$"
    ),
    corrected_formula=(
        r"$\mathbb E[x\psi]=\mathbb E[\psi]\,\bar x+\Big(\int "
        r"s\,\psi(\|v\|s+r_v)p_n(s)\,ds\Big)\frac{v}{\|v\|},\quad \mathbb "
        r"E[\psi]=\int\psi(\|v\|s+r_v)p_n(s)\,ds\quad(v:=RR^\top v)$"
    ),
    derivation=(
        r"$y'=v^\top x'$ is $\|v\|$ times a variable with density $p_n$, so its density is "
        r"$p_n(y'/\|v\|)/\|v\|$; Eqn. 31 keeps the factor $1/\|v\|$ and drops the argument "
        r"$y'/\|v\|$. With $\psi\equiv1$ the printed $\mathbb E[\psi]$ is $1/\|v\|$."
    ),
    terms=("E[ψ]", "x̄", "v̂"),
    mutants={"‖v‖ × 1.01 in ψ": "ψ(1.01 ‖v‖ s + r)"},
)
def l1(variant: Variant) -> Iterator[float]:
    """Compare the lemma's one-dimensional integrals with three-dimensional ones."""
    for case in _expectations():
        r = float(case.v @ case.mean + case.xi)
        inside = case.basis @ (case.basis.T @ case.v)
        unit = inside / np.linalg.norm(inside)
        scale = variant.choose(case.norm, {"printed": 1.0, "control": case.norm**2})
        if variant.has("‖v‖ × 1.01 in ψ"):
            scale = 1.01 * scale
        theta1, theta2 = _integrals(case.family, case.psi, scale, r)
        if variant == "printed":
            first = theta1 / case.norm
            second = theta1 / case.norm * case.mean + theta2 / case.norm**2 * unit
        else:
            first = variant.factor("E[ψ]") * theta1
            along_mean = variant.factor("x̄") * theta1 * case.mean
            second = along_mean + variant.factor("v̂") * theta2 * unit
        yield max(abs(first - case.first), largest(second - case.second))


@claim(
    "E33",
    source="Eqns. 33-36",
    statement=(
        "p_n(y) = (n−1)π^{(n−1)/2}/Γ((n+1)/2) ∫₀^∞ p₀(√(y² + l²)) l^{n−2} dl, and the same with "
        "2^{n/2}π^{n/2−1}/(n−3)!! for even n, 2π^{(n−1)/2}/((n−3)/2)! for odd n."
    ),
    tolerance=1e-8,
    measures=(
        "largest relative error against the marginals in closed form, three families, n = 2 … 7, "
        "four y"
    ),
    control="S_n in the place of S_{n−1}, the sphere of one dimension more",
    terms=("factor of Eqn. 35", "factor of Eqn. 36"),
    mutants={"even and odd": "the factors of even and odd n exchanged"},
)
def e33(variant: Variant) -> Iterator[float]:
    """Compare both printed factors, times a quadrature, with closed forms."""
    for n in range(2, 8):
        m = variant.choose(n, {"control": n + 1})
        factors = (
            variant.factor("factor of Eqn. 35") * _factor_of_eqn_35(m),
            variant.factor("factor of Eqn. 36") * _factor_of_eqn_36(m, variant),
        )
        for family in (Gaussian(n), StudentT(n, nu=3.0), UniformBall(n, 1.7)):
            for y in (0.0, 0.3, -0.8, 1.4):
                integral = _marginal_integral(family, y)
                true = float(family.marginal(y))
                yield max(abs(factor * integral / true - 1) for factor in factors)


def _factor_of_eqn_35(n: int) -> float:
    return float((n - 1) * np.pi ** ((n - 1) / 2) / gamma((n + 1) / 2))


def _factor_of_eqn_36(n: int, variant: Variant) -> float:
    is_even = n % 2 == 0
    if variant.has("even and odd"):
        is_even = not is_even
    if not is_even:
        return float(2 * np.pi ** ((n - 1) / 2) / gamma((n - 1) / 2))
    double_factorial = 1.0  # (−1)!!, which SciPy gives as 0
    if n > 2:
        double_factorial = float(factorial2(n - 3))
    return float(2 ** (n / 2) * np.pi ** (n / 2 - 1) / double_factorial)


def _marginal_integral(family: Radial, y: float) -> float:
    """∫₀^∞ p₀(√(y² + l²)) l^{n−2} dl."""
    if np.isfinite(family.radius):
        # Up to the edge, without its square root: l = L sin(angle).
        L = np.sqrt(family.radius**2 - y * y)
        angle, weight = _panel(0.0, np.pi / 2)
        l = L * np.sin(angle)
        weight = weight * L * np.cos(angle)
    else:
        l, weight = _panel(0.0, np.inf)
    return float((weight * family.density(np.hypot(y, l)) * l ** (family.n - 2)).sum())


@dataclass(frozen=True)
class _Field:
    """E[g φ′ x] and E[g φ′] of a mixture at one (v, ξ), by quadrature."""

    mixture: Mixture
    v: Array
    xi: float
    v_dot: Array
    xi_dot: float


@functools.cache
def _fields() -> tuple[_Field, ...]:
    """Mixtures of three components of either sign at random (v, ξ)."""
    rng = np.random.default_rng(2)
    signs = np.array([1, -1, 1])
    fields = []
    for family in (StudentT(3, nu=5.0), Gaussian(3), ExpNorm(3)):
        for low in (0.0, 0.1, -0.5):
            centres = 0.6 * rng.standard_normal((3, 3))
            a = rng.uniform(0.2, 1.0, size=3) * signs
            mixture = Mixture(family, centres, a, slopes=(low, 1.0))
            gate = mixture.thetas.activation().derivative
            for norm in NORMS:
                v = rng.standard_normal(3)
                xi = float(rng.normal(0, 0.4))
                v *= norm / np.linalg.norm(v)
                v_dot = np.zeros(3)
                xi_dot = 0.0
                for weight, mean in zip(a, centres, strict=True):
                    first, second = spherical(family, gate, v, xi, mean)
                    v_dot = v_dot + weight * second
                    xi_dot = xi_dot + float(weight * first)
                fields.append(_Field(mixture, v, xi, v_dot, xi_dot))
    return tuple(fields)


@claim(
    "L2",
    root="norm",
    kind=Kind.WRONG,
    source="Lemma 2, Eqns. 42-43",
    statement=(
        "v̇ = Σ_j a_j [θ₁(r_j)/‖v‖ x̄_j + θ₂(r_j)/‖v‖³ v] and ξ̇ = Σ_j a_j θ₁(r_j)/‖v‖ for a mixture "
        "of C isotropic components."
    ),
    tolerance=1e-10,
    measures=(
        "largest deviation from E[gφ′x] and E[gφ′] by quadrature over radius and angles: C = 3 "
        "components with weights of both signs, three families, slopes (0, 1), (0.1, 1), (−0.5, "
        "1), ‖v‖ = 0.5, 1, 2"
    ),
    correction=(
        "v̇ = Σ_j a_j [θ₁(ρ_j) x̄_j + θ₂(ρ_j) v̂] and ξ̇ = Σ_j a_j θ₁(ρ_j), ρ_j = r_j/‖v‖: the "
        "gradient of E[gφ] = ‖v‖ Σ_j a_j F(ρ_j), 0-homogeneous in (v, ξ)"
    ),
    counterexample=(
        "a linear node: θ₁ ≡ 1, θ₂ ≡ 0 (the paper's own remark), and v̇ = E[gx] = Σ_j a_j x̄_j for "
        "every v, while the printed form divides it by ‖v‖"
    ),
    control="the corrected field with a factor 1/‖v‖",
    paper_formula=(
        r"$\dot v=\frac1{\|v\|}\sum_ja_j\theta_1(r_j)\bar "
        r"x_j+\frac1{\|v\|^3}\sum_ja_j\theta_2(r_j)v,\quad "
        r"\dot\xi=\frac1{\|v\|}\sum_ja_j\theta_1(r_j)$"
    ),
    corrected_formula=(
        r"$\dot v=\sum_ja_j\theta_1(\rho_j)\bar x_j+\frac1{\|v\|}\sum_ja_j\theta_2(\rho_j)v,\quad "
        r"\dot\xi=\sum_ja_j\theta_1(\rho_j),\quad \rho_j=r_j/\|v\|$"
    ),
    derivation=(
        r"Lemma 1, corrected, with $\psi=\phi'$ and $\psi(\|v\|s+r)=\psi(s+r/\|v\|)$. For linear "
        r"$\phi$: $\theta_1=1,\theta_2=0$ and $\dot v=\mathbb E[gx]=\sum_ja_j\bar x_j$, which the "
        r"printed form divides by $\|v\|$."
    ),
    terms=("θ₁ x̄", "θ₂ v̂", "ξ̇", "one a"),
    mutants={"ρ × 1.01": "ρ_j = 1.01 r_j/‖v‖"},
)
def l2(variant: Variant) -> Iterator[float]:
    """Compare the statement's field with quadrature."""
    for case in _fields():
        norm = float(np.linalg.norm(case.v))
        thetas = case.mixture.thetas
        a = case.mixture.a * np.array([variant.factor("one a"), 1.0, 1.0])
        r = case.mixture.centres @ case.v + case.xi
        stretch = variant.choose(1.0, {"ρ × 1.01": 1.01})
        distance = variant.choose(r / norm * stretch, {"printed": r})
        outer = variant.choose(1.0, {"printed": 1 / norm, "control": 1 / norm})
        inner = variant.choose(outer, {"printed": 1 / norm**2})
        of_theta1 = outer * (a * thetas.theta1(distance)) @ case.mixture.centres
        of_theta2 = inner * (a @ thetas.theta2(distance)) * case.v / norm
        v_dot = variant.factor("θ₁ x̄") * of_theta1 + variant.factor("θ₂ v̂") * of_theta2
        xi_dot = variant.factor("ξ̇") * outer * float(a @ thetas.theta1(distance))
        yield max(largest(v_dot - case.v_dot), abs(xi_dot - case.xi_dot))


_FAMILIES: tuple[Radial, ...] = (
    Gaussian(3),
    StudentT(3, nu=3.0),
    StudentT(3, nu=1.5),
    Laplace(2),
    ExpNorm(3),
    UniformBall(4),
)
# Not 0 and ±1, where marginals have kinks and edges.
_OFF = np.array([-2.3, -0.9, -0.4, 0.35, 0.8, 1.7])


def _derivative(f: Callable[[Array], Array], r: Array, h: float = 1e-3) -> Array:
    """Central differences of fourth order."""
    return (8 * (f(r + h) - f(r - h)) - (f(r + 2 * h) - f(r - 2 * h))) / (12 * h)


@claim(
    "L3",
    kind=Kind.UNSAID,
    source="Lemma 3, Eqns. 48-49",
    statement=(
        "For homogeneous φ, (θ₂ + rθ₁)′ = θ₁, so θ₂ = F − rθ₁; F is increasing with F(+∞) = +∞; if "
        "rθ₁(r) → 0 at −∞ then F(−∞) = 0."
    ),
    tolerance=1e-7,
    measures=(
        "largest of: the error of Eqn. 48 by differences, the largest decrease of F over a step of "
        "0.01, |F(−10⁶)| of ReLU (ν = 1.5 left out) and shortfall of F(10⁶), six families, five "
        "pairs of slopes"
    ),
    condition=(
        "slopes c₋ ≥ 0, c₊ > 0. The identity holds for all slopes; but F′ = θ₁ is negative where φ "
        "falls (φ = |x|: F decreases on r < 0)"
    ),
    counterexample=(
        "φ(x) = |x| = xφ′(x): θ₁(r) = P(s > −r) − P(s < −r) < 0 for r < 0, so F falls there"
    ),
    control="(θ₂ − rθ₁)′ = θ₁",
    paper_formula=(
        r"$F(r)=\theta_2(0)+\int_0^r\theta_1$ is increasing, $F(+\infty)=+\infty$, for every "
        r"homogeneous $\phi$"
    ),
    corrected_formula=r"$F'=\theta_1\ge0$ and $F(+\infty)=+\infty$ if $c_-\ge0,\ c_+>0$",
    derivation=(
        r"$\theta_1$ lies between $c_-$ and $c_+$ and tends to them at $\mp\infty$. For "
        r"$\phi(x)=|x|$, $\theta_1=2P-1<0$ for $r<0$, and $F$ has its minimum at 0."
    ),
    terms=("θ₂", "rθ₁", "θ₁ on the right"),
    mutants={"c₋ = −0.01": "the condition c₋ ≥ 0 weakened to c₋ ≥ −0.01"},
)
def l3(variant: Variant) -> Iterator[float]:
    """Check Eqn. 48 and the shape of F."""
    slopes = [(0.0, 1.0), (0.2, 1.0), (1.0, 1.0)]
    if variant == "printed":
        slopes += [(-1.0, 1.0), (-0.5, 1.0)]
    if variant.has("c₋ = −0.01"):
        slopes += [(-0.01, 1.0)]
    for family in _FAMILIES:
        for pair in slopes:
            thetas = Thetas(family, pair)
            yield _error_of_eqn_48(thetas, variant)
            yield float(-np.diff(thetas.F(np.linspace(-8, 8, 1601))).min())
            yield 1e5 - float(thetas.F(1e6))
            # rθ₁(r) → 0 at −∞: ReLU, and ν > 2.
            if pair[0] == 0 and getattr(family, "nu", 9) > 2:
                yield abs(float(thetas.F(-1e6)))


def _error_of_eqn_48(thetas: Thetas, variant: Variant) -> float:
    """The largest |(θ₂ + rθ₁)′ − θ₁|, as the variant has it."""
    sign = variant.choose(1.0, {"control": -1.0})

    def left(r: Array) -> Array:
        second = sign * variant.factor("rθ₁") * r * thetas.theta1(r)
        return variant.factor("θ₂") * thetas.theta2(r) + second

    right = variant.factor("θ₁ on the right") * thetas.theta1(_OFF)
    return largest(_derivative(left, _OFF) - right)


@dataclass(frozen=True)
class _Case:
    """A Student-t mixture of two components with x̄₋ = 0 that has critical rays."""

    n: int
    nu: float
    a: tuple[float, float]
    slopes: tuple[float, float] = (0.0, 1.0)

    def mixture(self, axis: Array, separation: float) -> Mixture:
        """Return the mixture whose centres are this far apart along the axis."""
        centres = np.stack([separation * axis, np.zeros(self.n)])
        return Mixture(StudentT(self.n, nu=self.nu), centres, np.array(self.a), slopes=self.slopes)


# Both signs, unequal weights.
CASES = (
    _Case(3, 3.0, (0.4, -0.6)),
    _Case(3, 3.0, (0.6, -0.4)),
    _Case(2, 1.5, (0.5, -0.7)),
    _Case(5, 4.0, (0.3, -0.5)),
    _Case(3, 2.5, (-0.4, 0.5)),
    _Case(3, 3.0, (0.4, -0.6), slopes=(-0.5, 1.0)),
)


@functools.cache
def critical_points() -> tuple[tuple[Mixture, Array, float], ...]:
    """Return critical points (v, ξ) and their mixtures, for all `CASES` and ‖v‖ = 0.5, 1, 2.

    v̇ = 0 and ξ̇ = 0 are solved for (v, ξ) and the separation of the centres. The properties that
    the paper derives for them are not used: `critical_rays` only gives the start, which is put
    off by 3 %.
    """
    rng = np.random.default_rng(1)
    points = []
    for case in CASES:
        axis = rng.standard_normal(case.n)
        axis /= np.linalg.norm(axis)
        family = StudentT(case.n, nu=case.nu)
        for ray in critical_rays(family, case.a, slopes=case.slopes).rays:
            centres = np.stack([ray.separation * axis, np.zeros(case.n)])
            for norm in NORMS:
                v, xi = ray.point(centres, norm)
                start = np.concatenate([v, [xi, ray.separation]])
                start = start * (1 + 0.03 * rng.standard_normal(case.n + 2))
                points.append(_critical_point(case, axis, norm, start))
    return tuple(points)


def _critical_point(
    case: _Case, axis: Array, norm: float, start: Array
) -> tuple[Mixture, Array, float]:
    """Solve v̇ = 0, ξ̇ = 0 and ‖v‖ = norm for v, ξ and the separation."""

    def residual(y: Array) -> Array:
        v = y[: case.n]
        v_dot, xi_dot = case.mixture(axis, y[-1]).field(v, y[case.n])
        return np.concatenate([v_dot, [xi_dot, (v @ v) / norm**2 - 1]])

    solution = root(residual, start, method="lm", options={"xtol": 1e-15, "ftol": 1e-15})
    separation = solution.x[-1]
    error = largest(solution.fun)
    if error > 1e-11 or abs(separation) < 1e-3:
        raise ArithmeticError(f"no critical point found: residual {error:.2g}")
    return case.mixture(axis, separation), solution.x[: case.n], float(solution.x[case.n])


def distances(mixture: Mixture, v: Array, xi: float, variant: Variant) -> Array:
    """Return the distances: r_j as printed, otherwise ρ_j = r_j/‖v‖."""
    if variant == "printed":
        return mixture.centres @ v + xi
    return mixture.rho(v, xi)


@claim(
    "L4",
    root="norm",
    kind=Kind.WRONG,
    source="Lemma 4, Eqn. 54",
    statement="Any stationary point satisfies Σ_j a_j F(r_j) = 0.",
    tolerance=1e-9,
    measures=(
        "|Σ a_j F|/Σ |a_j F| at critical points of the flow found by solving v̇ = 0, ξ̇ = 0: "
        "Student-t with six (n, ν, a, slopes), weights of either sign, ‖v‖ = 0.5, 1, 2"
    ),
    correction=(
        "Σ_j a_j F(ρ_j) = 0 with ρ_j = r_j/‖v‖. More is true: ½ d(‖v‖² + ξ²)/dt = ‖v‖ Σ_j a_j "
        "F(ρ_j) = E[gφ] all along the flow"
    ),
    counterexample=(
        "Student-t, ν = 3, a = (0.4, −0.6), centres 0.43174 apart: with (v, ξ), (2v, 2ξ) is "
        "stationary too (φ′ sees the sign of v·x + ξ only), and F(r₊)/F(r₋) is 1.5 at ‖v‖ = 1 and "
        "2.18 at ‖v‖ = 2"
    ),
    control="Σ_j a_j θ₂(ρ_j) = 0",
    paper_formula=r"$\sum_ja_jF(r_j)=0$",
    corrected_formula=r"$\sum_ja_jF(\rho_j)=0,\quad\rho_j=r_j/\|v\|$",
    derivation=(
        r"$v^\top\dot v=\sum_ja_j[\theta_1(\rho_j)(r_j-\xi)+\|v\|\theta_2(\rho_j)]=\|v\|\sum_ja_jF("
        r"\rho_j)-\xi\dot\xi$ with $r_j=\|v\|\rho_j$ and Lemma 3. Both $\dot v$ and $\dot\xi$ "
        r"vanish at a stationary point."
    ),
    terms=("a₊", "θ₂ in F", "ρ"),
)
def l4(variant: Variant) -> Iterator[float]:
    """Measure Σ a F at true critical points."""
    for mixture, v, xi in critical_points():
        distance = variant.factor("ρ") * distances(mixture, v, xi, variant)
        theta1 = mixture.thetas.theta1(distance)
        theta2 = mixture.thetas.theta2(distance)
        F = variant.factor("θ₂ in F") * theta2 + distance * theta1
        a = mixture.a * np.array([variant.factor("a₊"), 1.0])
        terms = a * variant.choose(F, {"control": theta2})
        yield float(abs(terms.sum()) / np.abs(terms).sum())


@claim(
    "L5",
    root="step",
    kind=Kind.WRONG,
    source="Lemma 5, Eqn. 61",
    statement=(
        "φ(x) = c₋ 1[x < 0] + c₊ 1[x > 0], dθ₁/dr = (c₋ + c₊) p_n(r), dθ₂/dr = −(c₋ + c₊) r p_n(r)."
    ),
    tolerance=1e-7,
    measures=(
        "largest error of both derivatives against differences of θ₁, θ₂, six families, slopes (0, "
        "1), (0.2, 1), (−1, 1)"
    ),
    correction=(
        "φ′ (not φ) is that step function, and both derivatives have c₊ − c₋ in the place of c₋ + "
        "c₊ (the same for ReLU only)"
    ),
    counterexample="a linear φ, c₋ = c₊ = 1: θ₁ ≡ 1 has the derivative 0, not 2p_n",
    control="c₋ − c₊",
    paper_formula=(
        r"$\phi(x)=c_-\mathbf 1[x<0]+c_+\mathbf "
        r"1[x>0],\quad\theta_1'=(c_-+c_+)p_n,\quad\theta_2'=-(c_-+c_+)\,r\,p_n$"
    ),
    corrected_formula=(
        r"$\phi'(x)=c_-\mathbf 1[x<0]+c_+\mathbf "
        r"1[x>0],\quad\theta_1'=(c_+-c_-)p_n,\quad\theta_2'=-(c_+-c_-)\,r\,p_n$"
    ),
    derivation=(
        r"$\phi=x\phi'$ makes $\phi'$ constant on each side of 0. "
        r"$\theta_1(r)=c_-P(s<-r)+c_+P(s>-r)$, so $\theta_1'=(c_+-c_-)p_n(-r)$, and likewise "
        r"$\theta_2'=(c_+-c_-)(-r)p_n(-r)$."
    ),
    terms=("θ₁′", "θ₂′"),
    mutants={"θ₂′ without r": "dθ₂/dr = −(c₊ − c₋) p_n"},
)
def l5(variant: Variant) -> Iterator[float]:
    """Compare the derivatives of θ₁ and θ₂ with differences."""
    for family in _FAMILIES:
        p = family.marginal(_OFF)
        for low, high in ((0.0, 1.0), (0.2, 1.0), (-1.0, 1.0)):
            thetas = Thetas(family, (low, high))
            factor = variant.choose(high - low, {"printed": low + high, "control": low - high})
            r = variant.choose(_OFF, {"θ₂′ without r": np.ones_like(_OFF)})
            of_theta1 = variant.factor("θ₁′") * factor * p
            of_theta2 = variant.factor("θ₂′") * factor * r * p
            first = _derivative(thetas.theta1, _OFF) - of_theta1
            second = _derivative(thetas.theta2, _OFF) + of_theta2
            yield max(largest(first), largest(second))
