"""Claims on the critical points of two isotropic components: Eqns. 56 to 59 (Appendix A.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from joma.theory.claims._registry import Kind, claim
from joma.theory.claims.isotropic import NORMS, critical_point, distances
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
)
from joma.theory.setting import Array


@claim(
    "E56",
    kind=Kind.WRONG,
    source="Eqn. 56",
    statement="At a critical point of two components F(r₊)/F(r₋) = θ₁(r₊)/θ₁(r₋) = a₋/a₊.",
    tolerance=1e-9,
    measures="largest error of the two ratios at critical points of the flow, found as for L4, ‖v‖ = 0.5, 1, 2",
    correction="the same with ρ_± = r_±/‖v‖",
    control="a₊/a₋ on the right",
    paper_formula=r"$\frac{F(r_+)}{F(r_-)}=\frac{\theta_1(r_+)}{\theta_1(r_-)}=\frac{a_-}{a_+}$",
    corrected_formula=r"$\frac{F(\rho_+)}{F(\rho_-)}=\frac{\theta_1(\rho_+)}{\theta_1(\rho_-)}=\frac{a_-}{a_+},\quad\rho_\pm=r_\pm/\|v\|$",
    derivation=r"$\dot\xi=a_+\theta_1(\rho_+)-a_-\theta_1(\rho_-)=0$ and Lemma 4, corrected. The field is 0-homogeneous in $(v,\xi)$, so critical "
    r"points are rays; in $r$ the condition would pick single points of them.",
)
def e56(variant: str) -> float:
    """The two ratios at true critical points."""
    worst = 0.0
    for norm in NORMS:
        mixture, v, xi = critical_point(norm)
        plus, minus = distances(mixture, v, xi, variant)
        ratio = -mixture.a[1] / mixture.a[0] if variant != "control" else -mixture.a[0] / mixture.a[1]
        thetas = mixture.thetas
        found = [thetas.F(plus) / thetas.F(minus), thetas.theta1(plus) / thetas.theta1(minus)]
        worst = max(worst, float(np.abs(np.array(found) - ratio).max()))
    return worst


@claim(
    "E56.sufficiency",
    kind=Kind.WRONG,
    source="Eqn. 56, “sufficient and necessary”",
    statement="Every (v, ξ) that fulfils Eqn. 56 is a critical point.",
    tolerance=1e-9,
    measures="largest |v̇|, |ξ̇| over a₊θ₁(ρ₊)‖x̄₊ − x̄₋‖ where Eqn. 56 holds at ‖v‖ = 1, with centres 1.2 |ρ₊ − ρ₋| apart (the corrected "
    "statement: |ρ₊ − ρ₋| apart)",
    correction="needed besides: v ∥ x̄₊ − x̄₋ and ‖x̄₊ − x̄₋‖ = |ρ₊ − ρ₋|. So critical rays exist at one separation of the centres a pair "
    "(ρ₊, ρ₋); for Student-t, ν = 3, a₋/a₊ = 1.5 at 0.43174",
    control="v ∥ x̄₊ − x̄₋ and ξ̇ = 0, without the condition on the separation",
    paper_formula=r"$(v,\xi)$ is critical $\iff\frac{F(r_+)}{F(r_-)}=\frac{\theta_1(r_+)}{\theta_1(r_-)}=\frac{a_-}{a_+}$",
    corrected_formula=r"$(v,\xi)$ is critical $\iff$ the same in $\rho_\pm$, and $v\parallel\bar x_+-\bar x_-$, and "
    r"$\|\bar x_+-\bar x_-\|=|\rho_+-\rho_-|$ (for a node that is alive)",
    derivation=r"With $\dot\xi=0$: $\dot v=a_+\theta_1(\rho_+)(\bar x_+-\bar x_-)+[a_+\theta_2(\rho_+)-a_-\theta_2(\rho_-)]\hat v$, and the bracket is "
    r"$-a_+\theta_1(\rho_+)(\rho_+-\rho_-)$ by Eqn. 56. So $\dot v=0$ iff $\bar x_+-\bar x_-=(\rho_+-\rho_-)\hat v$.",
)
def e56_sufficiency(variant: str) -> float:
    """The field where Eqn. 56 holds."""
    family, a = StudentT(3, nu=3.0), np.array([0.4, -0.6])
    (ray,) = critical_rays(family, a).rays
    plus, minus = ray.rho
    D = (1.0 if variant == "corrected" else 1.2) * ray.separation
    mixture = Mixture(family, np.array([[D, 0.0, 0.0], [0.0, 0.0, 0.0]]), a)
    if variant == "control":  # along the axis, ξ̇ = 0 solved for ρ₋ with ρ₊ = ρ₋ + D
        minus = float(brentq(lambda m: float(a[0] * family.cdf(m + D) + a[1] * family.cdf(m)), minus, 5.0))
        plus = minus + D
    cosine = (plus - minus) / D
    v = np.array([cosine, np.sqrt(max(0.0, 1 - cosine**2)), 0.0])
    v_dot, xi_dot = mixture.field(v, minus)
    return float(max(np.abs(v_dot).max(), abs(xi_dot)) / (a[0] * family.cdf(plus) * D))


@dataclass(frozen=True)
class _Tent(Radial):
    """In one dimension: weight w on a tent of half-width ε, 1 − w uniform on (−1, 1), with θ₂(0) p(0) = ¼ exactly."""

    epsilon: float = 0.05

    @property
    def radius(self) -> float:
        """1."""
        return 1.0

    @property
    def _weight(self) -> float:
        e = self.epsilon  # (w/ε + (1 − w)/2)(wε/6 + (1 − w)/4) = ¼
        return float(
            min(
                w.real
                for w in np.roots([(1 / e - 0.5) * (e / 6 - 0.25), (1 / e - 0.5) / 4 + (e / 6 - 0.25) / 2, -0.125])
            )
        )

    def _density(self, r: Array) -> Array:
        w, e = self._weight, self.epsilon
        return w / e * np.maximum(0.0, 1 - r / e) + (1 - w) / 2 * (r < 1)

    def _upper(self, x: Array) -> Array:
        w, e = self._weight, self.epsilon
        return w / 2 * np.maximum(0.0, 1 - x / e) ** 2 + (1 - w) / 2 * np.maximum(0.0, 1 - x)

    def _tail(self, x: Array) -> Array:
        w, u = self._weight, np.maximum(0.0, 1 - x / self.epsilon)
        return w * self.epsilon * (u**2 / 2 - u**3 / 3) + (1 - w) / 4 * np.maximum(0.0, 1 - x * x)


def _meets_twice(family: Radial) -> bool:
    """Whether F/θ₁ (ReLU) takes a value twice while the node is alive, on a fine grid."""
    r = 2 * float(family.tail_mean(0.0)) * np.sinh(np.linspace(-9, 9, 4001))
    r = r[family.cdf(r) > 1e-280]
    level = Thetas(family).level(r)
    return bool((np.diff(level) <= 1e-13 * level[1:]).any())


@claim(
    "E58",
    kind=Kind.WRONG,
    source="Eqn. 58",
    statement="θ₂(0) p_n(0) ≥ ¼ suffices for a line through the origin that meets G twice.",
    tolerance=0.0,
    measures="number of families that fulfil the inequality but have F/θ₁ strictly increasing (no line meets G twice)",
    correction="θ₂(0) p_n(0) > ¼. It is sufficient only: Student-t fulfils it for ν < 2 (with equality at 2) and has such lines for every ν; "
    "no log-concave marginal does. And it gives critical points only at the separation of E56.sufficiency",
    control="θ₂(0) p_n(0) < ¼ suffices",
    paper_formula=r"$\theta_2(0)\,p_n(0)\ge\frac14\;\Rightarrow\;\exists k:$ the line $y=kx$ meets $G$ twice",
    corrected_formula=r"$\theta_2(0)\,p_n(0)>\frac14\;\Rightarrow\;\exists k:$ the line $y=kx$ meets $G$ twice, both times at $y\ge\frac12$; not necessary",
    derivation=r"$h=F/\theta_1$ has $h'(0)=1-4\theta_2(0)p_n(0)$ and $h(+\infty)=\infty$: $h'(0)<0$ makes it fall and rise again. With equality "
    r"$h'(0)=0$ and $h$ can still increase strictly: a tent on a uniform density, with $p_n'(0^-)>p_n(0)/(2\theta_2(0))$, does.",
)
def e58(variant: str) -> float:
    """Count the families that refute the inequality."""
    families: list[Radial] = [StudentT(3, nu=nu) for nu in (1.2, 1.5, 1.9, 2.0, 3.0, 10.0)]
    families += [Laplace(3), Gaussian(3), UniformBall(3), ExpNorm(3), ExpNorm(2), _Tent(1)]
    count = 0
    for family in families:
        product = float(family.tail_mean(0.0) * family.marginal(0.0))
        fulfils = {
            "printed": product >= 0.25 - 1e-12,
            "corrected": product > 0.25 + 1e-12,
            "control": product < 0.25 - 1e-12,
        }
        count += fulfils[variant] and not _meets_twice(family)
    return float(count)


@claim(
    "E59.range",
    kind=Kind.UNSAID,
    source="after Eqn. 59",
    statement="Every ratio in S lies in (½, 1) ∪ (1, 2).",
    tolerance=0.0,
    measures="largest |log₂ s| − 1 over pairs of points on one line, for Student-t with ν = 1.2, 1.5, 3 and ratios s up to 1000",
    condition="both intersections at y ≥ ½ (a line that meets G left of ½ has no such bound: heavy tails have pairs for every ratio ≠ 1)",
    control="under the condition, s in (1/1.4, 1) ∪ (1, 1.4)",
    paper_formula=r"$\forall s\in\mathcal S:\ s\in(\frac12,1)\cup(1,2)$",
    corrected_formula=r"the same for pairs with $y_1,y_2\ge\frac12$ only; for Student-t $\mathcal S=(0,1)\cup(1,\infty)$",
    derivation=r"$y_1,y_2\in[\frac12,1)$ bounds their ratio by 2, nothing else does. For $p_n\sim|s|^{-\nu-1}$: $F/\theta_1\sim|r|/(\nu-1)\to\infty$ at "
    r"$r\to-\infty$ as at $+\infty$, so high levels are met at $y_1\to0$ and $y_2\to1$.",
)
def e59_range(variant: str) -> float:
    """Ratios of pairs that exist."""
    bound = 1.4 if variant == "control" else 2.0
    worst = -np.inf
    for nu in (1.2, 1.5, 3.0):
        for ratio in (1.05, 1.2, 1.5, 1.9, 2.5, 10.0, 1000.0):
            for ray in critical_rays(StudentT(3, nu=nu), [1.0, -ratio]).rays:
                if variant == "printed" or min(ray.rho) >= 0:
                    worst = max(worst, float(np.log(ratio) / np.log(bound) - 1))
    return worst
