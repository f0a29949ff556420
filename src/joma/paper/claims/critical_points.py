"""Claims on the critical points of two isotropic components: Eqns. 56 to 59 and the remarks of A.4."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc, gammaln

from joma.paper.claims._registry import Kind, Variant, claim, largest
from joma.paper.claims.isotropic import critical_points, distances
from joma.theory.isotropic import (
    CriticalRay,
    ExpNorm,
    Gaussian,
    Laplace,
    Mixture,
    Radial,
    StudentT,
    Thetas,
    UniformBall,
    critical_rays,
)
from joma.theory.setting import Array


@claim(
    "E56",
    root="norm",
    kind=Kind.WRONG,
    source="Eqn. 56",
    statement="At a critical point of two components F(r₊)/F(r₋) = θ₁(r₊)/θ₁(r₋) = a₋/a₊.",
    tolerance=1e-8,
    measures=(
        "largest relative error of the two ratios at the critical points of L4: six (n, ν, a, "
        "slopes), weights of either sign, ‖v‖ = 0.5, 1, 2"
    ),
    correction="the same with ρ_± = r_±/‖v‖",
    counterexample=(
        "as for Lemma 4: where (v, ξ) is critical, so is (2v, 2ξ), but not both can fulfil a "
        "condition on r = v·x̄ + ξ"
    ),
    control="a₊/a₋ on the right",
    paper_formula=r"$\frac{F(r_+)}{F(r_-)}=\frac{\theta_1(r_+)}{\theta_1(r_-)}=\frac{a_-}{a_+}$",
    corrected_formula=(
        r"$\frac{F(\rho_+)}{F(\rho_-)}=\frac{\theta_1(\rho_+)}{\theta_1(\rho_-)}=\frac{a_-}{a_+},"
        r"\quad\rho_\pm=r_\pm/\|v\|$"
    ),
    derivation=(
        r"$\dot\xi=a_+\theta_1(\rho_+)-a_-\theta_1(\rho_-)=0$ and Lemma 4, corrected. The field is "
        r"0-homogeneous in $(v,\xi)$, so critical points are rays; in $r$ the condition would pick "
        r"single points of them."
    ),
    terms=("F ratio", "θ₁ ratio", "ρ"),
)
def e56(variant: Variant) -> Iterator[float]:
    """Compare the two ratios at true critical points."""
    for mixture, v, xi in critical_points():
        plus, minus = variant.factor("ρ") * distances(mixture, v, xi, variant)
        a_plus, a_minus = mixture.a
        ratio = variant.choose(-a_minus / a_plus, {"control": -a_plus / a_minus})
        thetas = mixture.thetas
        of_F = variant.factor("F ratio") * thetas.F(plus) / thetas.F(minus)
        of_theta1 = variant.factor("θ₁ ratio") * thetas.theta1(plus) / thetas.theta1(minus)
        yield float(abs(of_F / ratio - 1))
        yield float(abs(of_theta1 / ratio - 1))


@dataclass(frozen=True)
class _CriticalCase:
    """A Student-t mixture of two components."""

    n: int
    nu: float
    a_plus: float
    a_minus: float


@claim(
    "E56.sufficiency",
    root="separation",
    kind=Kind.WRONG,
    source="Eqn. 56, “sufficient and necessary”",
    statement="Every (v, ξ) that fulfils Eqn. 56 is a critical point.",
    tolerance=1e-8,
    measures=(
        "largest |v̇|, |ξ̇| over a₊θ₁(ρ₊)‖x̄₊ − x̄₋‖ where Eqn. 56 holds at ‖v‖ = 1, with centres 1.2 "
        "|ρ₊ − ρ₋| apart (the corrected statement: |ρ₊ − ρ₋| apart); Student-t, four (n, ν, a)"
    ),
    correction=(
        "needed besides: v ∥ x̄₊ − x̄₋ and ‖x̄₊ − x̄₋‖ = |ρ₊ − ρ₋|. So critical rays exist at one "
        "separation of the centres per pair (ρ₊, ρ₋); for Student-t, ν = 3, a₋/a₊ = 1.5 at 0.43174"
    ),
    counterexample=(
        "Student-t in R³, ν = 3, a = (0.4, −0.6), ρ₊ = −0.23199, ρ₋ = −0.66373 solve Eqn. 56. Take "
        "centres 1.2 × 0.43174 apart and v with these two distances: v̇ has a component of 0.46 "
        "a₊θ₁(ρ₊)‖x̄₊ − x̄₋‖"
    ),
    control="v ∥ x̄₊ − x̄₋ and ξ̇ = 0, without the condition on the separation",
    paper_formula=(
        r"$(v,\xi)$ is critical $\iff\frac{F(r_+)}{F(r_-)}=\frac{\theta_1(r_+)}{\theta_1(r_-)}="
        r"\frac{a_-}{a_+}$"
    ),
    corrected_formula=(
        r"$(v,\xi)$ is critical $\iff$ the same in $\rho_\pm$, and $v\parallel\bar x_+-\bar x_-$, "
        r"and $\|\bar x_+-\bar x_-\|=|\rho_+-\rho_-|$ (for a node that is alive)"
    ),
    derivation=(
        r"With $\dot\xi=0$: $\dot v=a_+\theta_1(\rho_+)(\bar x_+-\bar "
        r"x_-)+[a_+\theta_2(\rho_+)-a_-\theta_2(\rho_-)]\hat v$, and the bracket is "
        r"$-a_+\theta_1(\rho_+)(\rho_+-\rho_-)$ by Eqn. 56. So $\dot v=0$ iff $\bar x_+-\bar "
        r"x_-=(\rho_+-\rho_-)\hat v$."
    ),
    terms=("separation",),
    mutants={
        "v at 1°": "v one degree off the line of the centres, the distances kept",
        "ρ₊ + 0.01": "ρ₊ put off by 0.01",
    },
    equivalent={"−separation": "the length of a vector, whose sign turns v̂ with it"},
)
def e56_sufficiency(variant: Variant) -> Iterator[float]:
    """Measure the field where Eqn. 56 holds."""
    cases = (
        _CriticalCase(3, 3.0, 0.4, -0.6),
        _CriticalCase(3, 3.0, 0.6, -0.4),
        _CriticalCase(2, 1.5, 0.5, -0.7),
        _CriticalCase(5, 4.0, 0.3, -0.5),
    )
    apart = variant.choose(1.2, {"corrected": 1.0}) * abs(variant.factor("separation"))
    for case in cases:
        family = StudentT(case.n, nu=case.nu)
        a = np.array([case.a_plus, case.a_minus])
        (ray,) = critical_rays(family, a).rays
        plus, minus = ray.rho
        if variant.has("ρ₊ + 0.01"):
            plus += 0.01
        gap = plus - minus
        D = apart * abs(gap)
        if variant.has("v at 1°"):
            D /= np.cos(np.radians(1.0))
        centres = np.zeros((2, case.n))
        centres[0, 0] = D
        if variant == "control":
            gap = float(np.sign(gap)) * D
            minus = _balanced(family, a, gap)
            plus = minus + gap
        cosine = np.clip(gap / D, -1, 1)
        v = np.zeros(case.n)
        v[0] = cosine
        v[1] = np.sqrt(max(0.0, 1 - cosine**2))
        v_dot, xi_dot = Mixture(family, centres, a).field(v, minus)
        yield float(max(largest(v_dot), abs(xi_dot)) / (a[0] * family.cdf(plus) * D))


def _balanced(family: Radial, a: Array, gap: float) -> float:
    """The ρ₋ at which ξ̇ = 0, with ρ₊ = ρ₋ + gap and v along the line of the centres."""

    def xi_dot(minus: float) -> float:
        return float(a[0] * family.cdf(minus + gap) + a[1] * family.cdf(minus))

    grid = np.linspace(-5.0, 5.0, 201)
    signs = np.sign([xi_dot(minus) for minus in grid])
    change = np.flatnonzero(np.diff(signs))[0]
    return float(brentq(xi_dot, grid[change], grid[change + 1]))


@claim(
    "E57.inverse",
    root="inverse",
    kind=Kind.WRONG,
    source="after Eqn. 57",
    statement=(
        "With G(y) = F(θ₁⁻¹(y)), y₊ := θ₁⁻¹(r₊) and y₋ := θ₁⁻¹(r₋) give G(y) = F(r), and Eqn. 56 "
        "reads G(y₊)/G(y₋) = y₊/y₋."
    ),
    tolerance=1e-10,
    measures=(
        "largest |G(y) − F(r)|/F(r), three families, r between 0.05 and 0.95 (where the printed "
        "θ₁⁻¹(r) has a value at all)"
    ),
    correction="y₊ := θ₁(r₊), y₋ := θ₁(r₋)",
    counterexample=(
        "Gaussian, r = 0.5: θ₁⁻¹(0.5) = 0, where G has no value; θ₁(0.5) = 0.69 and G(0.69) = "
        "F(0.5)"
    ),
    control="y = 1 − θ₁(r)",
    paper_formula=r"$y_+:=\theta_1^{-1}(r_+),\quad y_-:=\theta_1^{-1}(r_-)$",
    corrected_formula=r"$y_+:=\theta_1(r_+),\quad y_-:=\theta_1(r_-)$",
    derivation=(
        r"$G(y)=F(\theta_1^{-1}(y))=F(r)$ iff $y=\theta_1(r)$; a distance $r\in\mathbb R$ is no "
        r"argument of $\theta_1^{-1}:(0,1)\to\mathbb R$."
    ),
    terms=("y",),
)
def e57_inverse(variant: Variant) -> Iterator[float]:
    """Compare G at y with F at r."""
    r = np.linspace(0.05, 0.95, 10)
    for family in (Gaussian(3), StudentT(3, nu=3.0), ExpNorm(3)):
        thetas = Thetas(family)
        theta1 = thetas.theta1(r)
        y = variant.choose(theta1, {"printed": thetas.inverse(r), "control": 1 - theta1})
        y = variant.factor("y") * y
        is_inside = (y > 0) & (y < 1)
        G = np.full(len(r), np.inf)  # outside (0, 1) G has no value
        G[is_inside] = thetas.G(y[is_inside])
        yield largest(G / thetas.F(r) - 1)


@functools.cache
def _rays(nu: float, ratio: float) -> tuple[CriticalRay, ...]:
    return critical_rays(StudentT(3, nu=nu), [1.0, -ratio]).rays


@claim(
    "E59.exists",
    root="separation",
    kind=Kind.WRONG,
    source="after Eqn. 59",
    statement="Eqn. 42 has critical points if a₊/a₋ ∈ S.",
    tolerance=1e-8,
    measures=(
        "smallest |v̇|, |ξ̇| over a₊θ₁(ρ₊)‖x̄₊ − x̄₋‖ among directions of v in a plane with both "
        "centres and distances ρ₋ from −6 to 6, at ratios in S and separations 0.8, 1 and 1.2 D* "
        "(the corrected statement: D*); Student-t, three (ν, ratio). D* = |ρ₊ − ρ₋|"
    ),
    correction=(
        "it has critical points if a₊/a₋ ∈ S and the centres are |ρ₊ − ρ₋| apart. At another "
        "separation v and ξ grow or die for ever. The sentence after it, S ⊂ (½, 1) ∪ (1, 2), is "
        "right for intersections at y ≥ ½, as the paper states above it"
    ),
    counterexample=(
        "Student-t in R³, ν = 3, a₋/a₊ = 1.5: with centres 0.43174 apart there is a ray of "
        "critical points, with centres 0.8 or 1.2 times as far apart there is none"
    ),
    control="centres 1.1 D* apart",
    paper_formula=r"$a_+/a_-\in\mathcal S\;\Rightarrow$ Eqn. 42 has critical points",
    corrected_formula=(
        r"$a_+/a_-\in\mathcal S$ and $\|\bar x_+-\bar x_-\|=|\rho_+-\rho_-|\iff$ Eqn. 42 has "
        r"critical points with a node that is alive"
    ),
    derivation=(
        r"$\dot\xi=0$ and Lemma 4 fix $\rho_\pm$ by the ratio alone; $\dot v=0$ then reads $\bar "
        r"x_+-\bar x_-=(\rho_+-\rho_-)\hat v$, "
        "one equation for the separation."
    ),
    terms=("D*",),
    equivalent={"−D*": "a length"},
)
def e59_exists(variant: Variant) -> Iterator[float]:
    """Look for critical points at several separations."""
    factors = variant.choose((1.0,), {"printed": (0.8, 1.0, 1.2), "control": (1.1,)})
    for nu, ratio in ((3.0, 1.5), (3.0, 3.0), (1.5, 1.4)):
        family = StudentT(3, nu=nu)
        a = np.array([1.0, -ratio])
        (ray,) = critical_rays(family, a).rays
        separation = abs(ray.rho[0] - ray.rho[1]) * abs(variant.factor("D*"))
        for factor in factors:
            yield _smallest_field(family, a, factor * separation, ray)


def _smallest_field(family: Radial, a: Array, D: float, ray: CriticalRay) -> float:
    """The smallest field over directions and distances, the ray's own among them."""
    centres = np.zeros((2, 3))
    centres[0, 0] = D
    mixture = Mixture(family, centres, a)
    plus, minus = ray.rho
    distances_minus = np.append(np.linspace(-6.0, 6.0, 121), minus)
    ray_cosine = float(np.clip((plus - minus) / D, -1.0, 1.0))
    cosines = [*np.cos(np.linspace(0.0, np.pi, 5)), ray_cosine]
    smallest = np.inf
    for cosine in cosines:
        v = np.array([cosine, np.sqrt(1 - cosine**2), 0.0])
        for rho in distances_minus:
            v_dot, xi_dot = mixture.field(v, float(rho))
            alive = a[0] * float(family.cdf(rho + D * cosine)) * D
            field = max(largest(v_dot), abs(float(xi_dot)))
            smallest = min(smallest, field / alive)
    return float(smallest)


_HALF_LINE = np.concatenate([np.linspace(0.0, 3.0, 3001), np.geomspace(3.0, 1e5, 1000)[1:]])


@claim(
    "E59.homogeneous",
    kind=Kind.UNSAID,
    source="after Eqn. 59",
    statement=(
        "Similar results also hold for other homogeneous activations: under Eqn. 58 S is not "
        "empty, and S lies in (½, 1) ∪ (1, 2)."
    ),
    tolerance=1e-9,
    measures=(
        "over Student-t laws (ν = 1.1 … 1.9) and slopes (c₋, 1) that fulfil the premise: relative "
        "difference of G(y)/y at two points with y ≥ θ₁(0), halfway down from its value at θ₁(0) "
        "(1 where it does not fall), and by how much the largest ratio of such y exceeds 2; c₋ = 0 "
        "… 0.2 and −0.2, −0.5"
    ),
    condition=(
        "c₋ ≥ 0, and the first form of Eqn. 58 with “>”: F(0)θ₁′(0) > θ₁(0)². The second form is "
        "that of ReLU. With a leak it reads T(0)p_n(0) > ¼ (c₊ + c₋)²/(c₊ − c₋)², T(0) and p_n of "
        "ReLU: the heavier the leak, the heavier the tails that it takes. A linear φ never "
        "fulfils it"
    ),
    counterexample=(
        "leaky ReLU with c₋ = 0.2 c₊ and Student-t, ν = 1.5: θ₂(0)p_n(0) = 0.279 ≥ ¼, yet G(y)/y "
        "increases for all y, and S is empty. With c₋ = −0.2 c₊ and the same law S has ratios up "
        "to 2.18"
    ),
    control="laws and leaks with F(0)θ₁′(0) < θ₁(0)²",
    paper_formula=(
        r"$\tilde\theta_2(0)\,p_n(0)\ge\tfrac14\;\Rightarrow\;\mathcal S\ne\emptyset,\ \mathcal "
        r"S\subset(\tfrac12,1)\cup(1,2)$, for every homogeneous $\phi$"
    ),
    corrected_formula=(
        r"$F(0)\theta_1'(0)>\theta_1(0)^2\;\Rightarrow\;\mathcal S\ne\emptyset,\ \mathcal "
        r"S\subset\big(\tfrac{c_++c_-}{2c_+},1\big)\cup\big(1,\tfrac{2c_+}{c_++c_-}\big)$ for $y\ge\theta_1(0)$"
    ),
    derivation=(
        r"$h=F/\theta_1$ has $h'(0)=1-F(0)\theta_1'(0)/\theta_1(0)^2$ and grows like $\rho$: if "
        r"$h'(0)<0$ it takes values twice on $\rho\ge0$, where $\theta_1$ runs from "
        r"$\tfrac12(c_++c_-)$ to $c_+$. With $c_-<0$ that is more than a factor of 2."
    ),
    mutants={
        "0.9 θ₁(0)²": "the bound weakened by a tenth",
        "slopes of both signs": "the condition c₋ ≥ 0 dropped",
    },
)
def e59_homogeneous(variant: Variant) -> Iterator[float]:
    """Look for two points of G on one line through the origin, at y ≥ θ₁(0)."""
    for nu in (1.1, 1.2, 1.35, 1.5, 1.8, 1.9):
        for low in (0.0, 0.03, 0.1, 0.2, -0.2, -0.5):
            thetas = Thetas(StudentT(3, nu=nu), (low, 1.0))
            if _is_premise(thetas, variant):
                yield from _errors_of_pairs(thetas)


def _is_premise(thetas: Thetas, variant: Variant) -> bool:
    """True if a law and an activation fulfil what the variant asks of them."""
    density = float(thetas.family.marginal(0.0))
    if variant == "printed":
        return float(thetas.theta2(0.0)) * density >= 0.25
    if thetas.slopes[0] < 0 and not variant.has("slopes of both signs"):
        return False
    left = float(thetas.F(0.0) * thetas.density(0.0))
    right = float(thetas.theta1(0.0)) ** 2
    if variant == "control":
        return left < right
    return left > variant.choose(1.0, {"0.9 θ₁(0)²": 0.9}) * right


def _errors_of_pairs(thetas: Thetas) -> Iterator[float]:
    """Errors of a pair on ρ ≥ 0: of its common level, and of the largest ratio, which is below 2."""
    level = thetas.level(_HALF_LINE)
    lowest = int(np.argmin(level))
    if lowest == 0:
        yield 1.0  # G(y)/y does not fall: no line meets G twice
        return
    target = (level[0] + level[lowest]) / 2

    def above(rho: float, wanted: float = target) -> float:
        return float(thetas.level(rho)) - wanted

    bottom = float(_HALF_LINE[lowest])
    end = float(_HALF_LINE[-1])
    pair = np.array([brentq(above, 0.0, bottom), brentq(above, bottom, end)])
    y = thetas.theta1(pair)
    line = thetas.G(y) / y
    yield float(abs(line[1] / line[0] - 1))
    # The widest pair starts at y = θ₁(0).
    widest = brentq(above, bottom, end, args=(float(level[0]),))
    yield float(thetas.theta1(widest) / thetas.theta1(0.0)) - 2


@dataclass(frozen=True)
class _Shells(Radial):
    """A mixture of uniform distributions on spheres: every isotropic law is one, or a limit of them."""

    radii: tuple[float, ...] = (1.0,)
    weights: tuple[float, ...] = (1.0,)

    @property
    def radius(self) -> float:
        """The largest sphere's."""
        return max(self.radii)

    def _mix(self, of_unit: Callable[[Array], Array], x: Array, power: int) -> Array:
        """Σ_j weight_j R_j^power f(x/R_j), f zero beyond 1."""
        total = np.zeros_like(x)
        for weight, radius in zip(self.weights, self.radii, strict=True):
            inside = np.minimum(x / radius, 1.0)
            total = total + weight * radius**power * np.where(x < radius, of_unit(inside), 0.0)
        return total

    @property
    def _constant(self) -> float:
        return float(np.exp(gammaln(self.n / 2) - gammaln((self.n - 1) / 2)) / np.sqrt(np.pi))

    def _marginal(self, x: Array) -> Array:
        with np.errstate(divide="ignore"):  # a circle's marginal has poles at its ends
            return self._mix(lambda u: self._constant * (1 - u * u) ** ((self.n - 3) / 2), x, -1)

    def _upper(self, x: Array) -> Array:
        half = (self.n - 1) / 2
        return self._mix(lambda u: betainc(half, half, (1 - u) / 2), x, 0)

    def _tail(self, x: Array) -> Array:
        scale = self._constant / (self.n - 1)
        return self._mix(lambda u: scale * (1 - u * u) ** ((self.n - 1) / 2), x, 1)


def _laws(dimensions: tuple[int, ...]) -> Iterator[Radial]:
    """Laws with and without a hole about their centre, in these dimensions."""
    rng = np.random.default_rng(23)
    for n in dimensions:
        yield from (Gaussian(n), UniformBall(n), Laplace(n), ExpNorm(n))
        yield from (StudentT(n, nu=1.2), StudentT(n, nu=3.0))
        yield _Shells(n)
        for _ in range(20):
            radii = tuple(np.exp(rng.uniform(-2.0, 2.0, size=3)).tolist())
            weights = tuple(rng.dirichlet(np.ones(3)).tolist())
            yield _Shells(n, radii=radii, weights=weights)


@claim(
    "A4.convex",
    source="Appendix A.4, first remark",
    statement=(
        "G(y) when y > ½ is convex, and there will be at most two intersections between it and a "
        "straight line."
    ),
    tolerance=1e-9,
    measures=(
        "largest fall of the slope of G from one step of y to the next, as a share of it, and the "
        "number of times by which G − ky changes its sign more than twice, for a line through the "
        "origin at each tenth of its range; 27 isotropic laws in each of 3, 4 and 10 dimensions, "
        "most of them mixtures of three spheres"
    ),
    remark=(
        "It is convex exactly where the distribution function P is log-concave. In three "
        "dimensions and more the marginal of every isotropic law falls away from 0, which is "
        "enough; on a circle in the plane it rises, and G is concave for y > ½. That y₋ < ½ "
        "follows for a pair with a y₊ > ½ is another statement (A4.sides)"
    ),
    control="the same in two dimensions",
    derivation=(
        r"$G'(y)=\theta_1/p_n$ at $y=\theta_1=P$, so $G$ is convex iff $p_n/P=(\ln P)'$ falls. In "
        r"$n\ge3$ dimensions $p_n(r)\propto\int_r^\infty p_0(s)s(s^2-r^2)^{(n-3)/2}ds$ falls on "
        r"$r>0$ while $P$ rises."
    ),
    mutants={
        "concave": "the sign of the second difference",
        "y > 0.05": "the left half of the line as well, where heavy tails bend G down",
        "at most one": "at most one intersection with a straight line",
    },
)
def a4_convex(variant: Variant) -> Iterator[float]:
    """Second differences of G in y, and crossings of lines through the origin."""
    least_share = variant.choose(0.5, {"y > 0.05": 0.05})
    sign = variant.choose(1.0, {"concave": -1.0})
    most = variant.choose(2, {"at most one": 1})
    for family in _laws(variant.choose((3, 4, 10), {"control": (2,)})):
        end = min(family.radius, float(family.ppf(0.995)))
        r = np.linspace(float(family.ppf(least_share)), 0.999 * end, 1001)
        thetas = Thetas(family)
        y = thetas.theta1(r)
        G = thetas.F(r)
        slopes = np.diff(G) / np.diff(y)
        yield float((-sign * np.diff(slopes) / slopes[:-1]).max())
        for k in np.quantile(G / y, np.linspace(0.05, 0.95, 10)):
            is_above = k * y < G
            crossings = np.count_nonzero(is_above[1:] != is_above[:-1])
            yield float(crossings - most)


@claim(
    "A4.sides",
    source="Appendix A.4, first remark",
    statement="It is often the case that y₋ < ½ < y₊, that is, r₊* > 0 and r₋* = ξ* < 0.",
    tolerance=0.0,
    measures=(
        "½ − the share of critical pairs with ρ₋ < 0 < ρ₊ (Student-t, ν = 1.2 … 10, a₋/a₊ = 1.05 … "
        "1000); often is read as in most"
    ),
    remark=(
        "In 68 % of these pairs. For a₋ > a₊ it is so iff the common level F/θ₁ of the two points "
        "lies above its value at 0, 2θ₂(0): for ν = 3, a₋/a₊ > 2.4. Below that both are on one "
        "side: both y < ½ for ν > 2, both > ½ for ν < 2"
    ),
    control="ρ₊ < 0 < ρ₋",
    derivation=(
        r"$h=F/\theta_1$ falls to one minimum and rises again, and both points have the level "
        r"$h(\rho_+)=h(\rho_-)$: they lie on either side of 0 iff that level is above "
        r"$h(0)=2\theta_2(0)$."
    ),
    mutants={"a₋ < a₊": "the other order of the weights"},
)
def a4_sides(variant: Variant) -> float:
    """Return ½ − the share of pairs with 0 between the two distances."""
    is_exchanged = variant == "control" or variant.has("a₋ < a₊")
    ratios = (*np.round(np.geomspace(1.05, 60.0, 60), 3), 1000.0)
    is_between = []
    for nu in (1.2, 1.5, 1.9, 2.5, 3.0, 5.0, 10.0):
        for ratio in ratios:
            for ray in _rays(nu, float(ratio)):
                plus, minus = ray.rho
                if is_exchanged:
                    is_between.append(plus < 0 < minus)
                else:
                    is_between.append(minus < 0 < plus)
    return 0.5 - float(np.mean(is_between))


@claim(
    "A4.superposition",
    root="sign",
    kind=Kind.WRONG,
    source="Appendix A.4, pattern superposition",
    statement=(
        "If w = v_{m₁} − ξ_{m₁}u_{m₁} + v_{m₂} − ξ_{m₂}u_{m₂} and they are orthogonal to each "
        "other, w can match both patterns: the node sees v_m·b + ξ_m for either query."
    ),
    tolerance=1e-12,
    measures=(
        "largest |wᵀ(U_C b + u_m) − (v_mᵀb + ξ_m)| over 50 draws of two orthogonal patterns, with "
        "contexts b made of the tokens of their own pattern"
    ),
    correction=(
        "w = v_{m₁} + ξ_{m₁}u_{m₁} + v_{m₂} + ξ_{m₂}u_{m₂}, the sign of Eqn. 60. And the template "
        "of one query must be orthogonal to the *contexts* of the other; orthogonal templates "
        "alone are not enough"
    ),
    counterexample=(
        "ξ = −1: by Eqn. 60 w = v − u, and the node sees v·b − 1, a threshold. The printed w = v − "
        "ξu = v + u sees v·b + 1 and fires always"
    ),
    control="templates orthogonal to each other, contexts of all tokens",
    paper_formula=r"$w=v_{m_1}-\xi_{m_1}u_{m_1}+v_{m_2}-\xi_{m_2}u_{m_2}$",
    corrected_formula=(
        r"$w=v_{m_1}+\xi_{m_1}u_{m_1}+v_{m_2}+\xi_{m_2}u_{m_2}$, with $v_{m_1}^\top b=0$ for the "
        r"contexts $b$ of $m_2$ and vice versa"
    ),
    derivation=(
        r"$w^\top(U_Cb+u_{m_1})=v_{m_1}^\top b+v_{m_2}^\top b+\xi_{m_1}$ for orthonormal "
        r"embeddings and $w$ by Eqn. 60; the middle term must vanish."
    ),
    terms=("v", "ξ"),
    mutants={"query embeddings at an angle": "u_{m₁}ᵀu_{m₂} = 0.05"},
)
def a4_superposition(variant: Variant) -> Iterator[float]:
    """Compare what a node with two patterns receives with each pattern by itself."""
    rng = np.random.default_rng(14)
    sign = variant.choose(1.0, {"printed": -1.0})
    M = 8
    first = slice(0, 4)
    second = slice(4, 8)
    for _ in range(50):
        E = np.linalg.qr(rng.standard_normal((12, M + 2)))[0]  # 8 tokens, 2 queries
        if variant.has("query embeddings at an angle"):
            E[:, -1] = 0.05 * E[:, -2] + np.sqrt(1 - 0.05**2) * E[:, -1]
        tokens = E[:, :M]
        queries = E[:, M:]
        xi = -rng.random(2)
        v = np.zeros((M, 2))
        v[first, 0] = rng.random(4)
        v[second, 1] = rng.random(4)
        b = np.zeros((M, 2))
        b[first, 0] = rng.dirichlet(np.ones(4))
        b[second, 1] = rng.dirichlet(np.ones(4))
        if variant == "control":
            b = rng.dirichlet(np.ones(M), size=2).T
        of_tokens = tokens @ (variant.factor("v") * v.sum(axis=1))
        w = of_tokens + sign * variant.factor("ξ") * queries @ xi
        activations = w @ (tokens @ b + queries)  # (2,)
        yield largest(activations - ((v * b).sum(axis=0) + xi))
