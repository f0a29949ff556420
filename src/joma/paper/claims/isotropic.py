"""Claims on isotropic mixtures: Lemmas 1 to 5 and Eqns. 33-36 (Appendices A.3 and A.4)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.optimize import root
from scipy.special import expit, factorial2, gamma

from joma.paper.claims._registry import Kind, Variant, claim
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
    t, weight = (_GAUSS[0] + 1) / 2, _GAUSS[1] / 2
    if math.isinf(high):
        return low + t / (1 - t), weight / (1 - t) ** 2
    return low + (high - low) * t, weight * (high - low)


def spherical(
    family: Radial, psi: Callable[[Any], Any], v: Array, xi: float, mean: Array
) -> tuple[float, Array]:
    """E[ψ(v·x + ξ)] and E[x ψ(v·x + ξ)] in R³, by quadrature over radius, latitude about v and longitude.

    Straight from the density p₀(‖x − x̄‖): no marginal, no θ, none of what the lemmas are about.
    """
    norm, r = float(np.linalg.norm(v)), float(v @ mean + xi)
    axis = v / norm
    others = np.linalg.svd(axis[None, :])[2][1:]  # (2, 3), orthogonal to v
    touch = abs(r) / norm  # the radius at which the sphere meets the kink
    cuts = sorted({0.0, min(touch, family.radius), min(touch + 2.0, family.radius), family.radius})
    first, second = 0.0, np.zeros(3)
    for low, high in itertools.pairwise(cuts):
        radius, radial = _panel(low, high)
        radial = radial * family.density(radius) * radius**2
        kink = np.clip(-r / (norm * radius), -1, 1)  # the cosine at which ψ jumps
        for ends in ((-np.ones_like(kink), kink), (kink, np.ones_like(kink))):
            c = (
                ends[0][:, None] + (ends[1] - ends[0])[:, None] * (_GAUSS[0] + 1) / 2
            )  # (radii, cosines)
            weight = radial[:, None] * (ends[1] - ends[0])[:, None] * _GAUSS[1] / 2
            value = weight * psi(norm * radius[:, None] * c + r)
            for angle in 2 * np.pi * np.arange(3) / 3:
                across = np.sqrt(1 - c**2)
                first += 2 * np.pi / 3 * value.sum()
                moment = (value * radius[:, None] * c).sum() * axis + (
                    value * radius[:, None] * across
                ).sum() * (np.cos(angle) * others[0] + np.sin(angle) * others[1])
                second += 2 * np.pi / 3 * moment
    return float(first), second + first * mean


@functools.cache
def _expectations() -> tuple[
    tuple[Radial, str, float, Array, Array, Array, float, float, Array], ...
]:
    """Families, ψ and ‖v‖ with random v, x̄ and ξ: (family, ψ, ‖v‖, v, x̄, basis, ξ, E[ψ], E[xψ]) by quadrature."""
    rng = np.random.default_rng(0)
    cases = []
    for n, family in enumerate(
        (Gaussian(3), UniformBall(3, 1.5), StudentT(3, nu=5.0), Laplace(3), ExpNorm(3, 0.5))
    ):
        M = 4 if n == 0 else 3  # the first one lives in a subspace
        for norm in NORMS:
            for name, psi in PSI.items():
                basis = np.linalg.qr(rng.standard_normal((M, 3)))[0]
                mean, direction, xi = (
                    0.5 * rng.standard_normal(M),
                    rng.standard_normal(M),
                    float(rng.normal(0, 0.4)),
                )
                v = norm * direction / np.linalg.norm(basis.T @ direction)
                outside = mean - basis @ (basis.T @ mean)  # of x̄, outside the subspace
                first, second = spherical(
                    family, psi, basis.T @ v, xi + float(v @ outside), basis.T @ mean
                )
                cases.append(
                    (
                        family,
                        name,
                        norm,
                        v,
                        mean,
                        basis,
                        xi,
                        first,
                        basis @ second + first * outside,
                    )
                )
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
    """The lemma's one-dimensional integrals against three-dimensional ones."""
    for family, name, norm, v, mean, basis, xi, true_first, true_second in _expectations():
        r, inside = float(v @ mean + xi), basis @ (basis.T @ v)
        unit = inside / np.linalg.norm(inside)
        scale = {"printed": 1.0, "control": norm**2}.get(str(variant), norm)
        theta1, theta2 = _integrals(
            family, name, 1.01 * scale if variant.has("‖v‖ × 1.01 in ψ") else scale, r
        )
        if variant == "printed":
            first, second = theta1 / norm, theta1 / norm * mean + theta2 / norm**2 * unit
        else:
            first = variant.factor("E[ψ]") * theta1
            second = variant.factor("x̄") * theta1 * mean + variant.factor("v̂") * theta2 * unit
        yield float(max(abs(first - true_first), np.abs(second - true_second).max()))


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
    """Both printed factors times a quadrature, against closed forms."""
    radius, weight = _panel(0.0, np.inf)
    for n in range(2, 8):
        m = n + 1 if variant == "control" else n
        one = (
            variant.factor("factor of Eqn. 35")
            * (m - 1)
            * np.pi ** ((m - 1) / 2)
            / gamma((m + 1) / 2)
        )
        even = (m % 2 == 0) != variant.has("even and odd")
        bottom = (float(factorial2(m - 3)) if m > 2 else 1.0) if even else float(gamma((m - 1) / 2))
        two = (2 ** (m / 2) * np.pi ** (m / 2 - 1) if even else 2 * np.pi ** ((m - 1) / 2)) / bottom
        two *= variant.factor("factor of Eqn. 36")
        for family in (Gaussian(n), StudentT(n, nu=3.0), UniformBall(n, 1.7)):
            for y in (0.0, 0.3, -0.8, 1.4):
                l, w = radius, weight
                if np.isfinite(family.radius):  # up to the edge, without its square root: l = L sin
                    L = np.sqrt(family.radius**2 - y * y)
                    angle, w = _panel(0.0, np.pi / 2)
                    l, w = L * np.sin(angle), w * L * np.cos(angle)
                integral = float((w * family.density(np.hypot(y, l)) * l ** (n - 2)).sum())
                true = float(family.marginal(y))
                yield max(abs(factor * integral / true - 1) for factor in (one, two))


@functools.cache
def _fields() -> tuple[tuple[Mixture, Array, float, Array, float], ...]:
    """Mixtures of three components of either sign at random (v, ξ): E[g φ′ x] and E[g φ′] by quadrature."""
    rng = np.random.default_rng(2)
    cases = []
    for family in (StudentT(3, nu=5.0), Gaussian(3), ExpNorm(3)):
        for low in (0.0, 0.1, -0.5):
            centres, a = (
                0.6 * rng.standard_normal((3, 3)),
                rng.uniform(0.2, 1.0, size=3) * np.array([1, -1, 1]),
            )
            mixture = Mixture(family, centres, a, slopes=(low, 1.0))
            for norm in NORMS:
                v, xi = rng.standard_normal(3), float(rng.normal(0, 0.4))
                v *= norm / np.linalg.norm(v)
                parts = [
                    spherical(family, mixture.thetas.activation().derivative, v, xi, mean)
                    for mean in centres
                ]
                v_dot = sum(weight * part[1] for weight, part in zip(a, parts, strict=True))
                xi_dot = sum(weight * part[0] for weight, part in zip(a, parts, strict=True))
                cases.append((mixture, v, xi, np.asarray(v_dot), float(xi_dot)))
    return tuple(cases)


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
    """The statement's field against quadrature."""
    for mixture, v, xi, v_true, xi_true in _fields():
        norm, thetas = float(np.linalg.norm(v)), mixture.thetas
        a = mixture.a * np.array([variant.factor("one a"), 1.0, 1.0])
        r = mixture.centres @ v + xi
        at = r if variant == "printed" else r / norm * (1.01 if variant.has("ρ × 1.01") else 1.0)
        outer = 1 / norm if variant in ("printed", "control") else 1.0
        inner = 1 / norm**2 if variant == "printed" else outer
        v_dot = variant.factor("θ₁ x̄") * outer * (a * thetas.theta1(at)) @ mixture.centres
        v_dot = v_dot + variant.factor("θ₂ v̂") * inner * (a @ thetas.theta2(at)) * v / norm
        xi_dot = variant.factor("ξ̇") * outer * float(a @ thetas.theta1(at))
        yield float(max(np.abs(v_dot - v_true).max(), abs(xi_dot - xi_true)))


_FAMILIES: tuple[Radial, ...] = (
    Gaussian(3),
    StudentT(3, nu=3.0),
    StudentT(3, nu=1.5),
    Laplace(2),
    ExpNorm(3),
    UniformBall(4),
)
# off 0 and ±1, where marginals have kinks and edges
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
    """Eqn. 48 and the shape of F."""
    slopes = [(0.0, 1.0), (0.2, 1.0), (1.0, 1.0)]
    slopes += [(-1.0, 1.0), (-0.5, 1.0)] if variant == "printed" else []
    slopes += [(-0.01, 1.0)] if variant.has("c₋ = −0.01") else []
    sign = -1.0 if variant == "control" else 1.0
    for family in _FAMILIES:
        for pair in slopes:
            thetas = Thetas(family, pair)

            def both(r: Array, thetas: Thetas = thetas) -> Array:
                return variant.factor("θ₂") * thetas.theta2(r) + sign * variant.factor(
                    "rθ₁"
                ) * r * thetas.theta1(r)

            yield float(
                np.abs(
                    _derivative(both, _OFF)
                    - variant.factor("θ₁ on the right") * thetas.theta1(_OFF)
                ).max()
            )
            yield float(-np.diff(thetas.F(np.linspace(-8, 8, 1601))).min())
            yield 1e5 - float(thetas.F(1e6))
            if pair[0] == 0 and getattr(family, "nu", 9) > 2:
                yield abs(float(thetas.F(-1e6)))


# (n, ν, a, slopes) of Student-t mixtures with x̄₋ = 0 that have critical rays: both signs, unequal weights
PAIRS = (
    (3, 3.0, (0.4, -0.6), (0.0, 1.0)),
    (3, 3.0, (0.6, -0.4), (0.0, 1.0)),
    (2, 1.5, (0.5, -0.7), (0.0, 1.0)),
    (5, 4.0, (0.3, -0.5), (0.0, 1.0)),
    (3, 2.5, (-0.4, 0.5), (0.0, 1.0)),
    (3, 3.0, (0.4, -0.6), (-0.5, 1.0)),
)


@functools.cache
def critical_points() -> tuple[tuple[Mixture, Array, float], ...]:
    """Critical points of the flow itself and their mixtures, for all `PAIRS` and ‖v‖ = 0.5, 1, 2.

    v̇ = 0 and ξ̇ = 0 are solved for (v, ξ) and the separation of the centres; what they must fulfil according to the paper
    is not used (`critical_rays` tells only where to start, and the start is put off by 3 %).
    """
    rng = np.random.default_rng(1)
    out = []
    for n, nu, a, slopes in PAIRS:
        family = StudentT(n, nu=nu)
        axis = rng.standard_normal(n)
        axis /= np.linalg.norm(axis)
        for ray in critical_rays(family, a, slopes=slopes).rays:
            for norm in NORMS:
                start, xi0 = ray.point(np.stack([ray.separation * axis, np.zeros(n)]), norm)
                guess = np.concatenate([start, [xi0, ray.separation]]) * (
                    1 + 0.03 * rng.standard_normal(n + 2)
                )

                def residual(
                    y: Array,
                    n: int = n,
                    family: Radial = family,
                    a: Any = a,
                    slopes: Any = slopes,
                    axis: Array = axis,
                    norm: float = norm,
                ) -> Array:
                    mixture = Mixture(
                        family, np.stack([y[-1] * axis, np.zeros(n)]), np.array(a), slopes=slopes
                    )
                    v_dot, xi_dot = mixture.field(y[:n], y[n])
                    return np.concatenate([v_dot, [xi_dot, (y[:n] @ y[:n]) / norm**2 - 1]])

                solution = root(
                    residual, guess, method="lm", options={"xtol": 1e-15, "ftol": 1e-15}
                )
                if np.abs(solution.fun).max() > 1e-11 or abs(solution.x[-1]) < 1e-3:
                    raise ArithmeticError(
                        f"no critical point found: residual {np.abs(solution.fun).max():.2g}"
                    )
                centres = np.stack([solution.x[-1] * axis, np.zeros(n)])
                out.append(
                    (
                        Mixture(family, centres, np.array(a), slopes=slopes),
                        solution.x[:n],
                        float(solution.x[n]),
                    )
                )
    return tuple(out)


def distances(mixture: Mixture, v: Array, xi: float, variant: Variant) -> Array:
    """r_j as printed, ρ_j = r_j/‖v‖ otherwise."""
    return mixture.centres @ v + xi if variant == "printed" else mixture.rho(v, xi)


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
    """Σ a F at true critical points."""
    for mixture, v, xi in critical_points():
        at, thetas = variant.factor("ρ") * distances(mixture, v, xi, variant), mixture.thetas
        F = variant.factor("θ₂ in F") * thetas.theta2(at) + at * thetas.theta1(at)
        a = mixture.a * np.array([variant.factor("a₊"), 1.0])
        terms = a * (thetas.theta2(at) if variant == "control" else F)
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
    """Derivatives of θ₁ and θ₂ by differences."""
    for family in _FAMILIES:
        for low, high in ((0.0, 1.0), (0.2, 1.0), (-1.0, 1.0)):
            thetas, p = Thetas(family, (low, high)), family.marginal(_OFF)
            factor = {"printed": low + high, "corrected": high - low, "control": low - high}[
                str(variant)
            ]
            one = _derivative(thetas.theta1, _OFF) - variant.factor("θ₁′") * factor * p
            r = 1.0 if variant.has("θ₂′ without r") else _OFF
            two = _derivative(thetas.theta2, _OFF) + variant.factor("θ₂′") * factor * r * p
            yield float(max(np.abs(one).max(), np.abs(two).max()))
