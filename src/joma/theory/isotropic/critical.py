"""Critical points of two components: rays, which exist only at particular separations of the centres.

The field is 0-homogeneous in (v, ξ), so a critical point is a whole ray. With weights a₁, a₂ (of either sign),
ρ_j = (v·x̄_j + ξ)/‖v‖ and a node that is alive (θ₁ ≠ 0), v̇ = 0 and ξ̇ = 0 are together equivalent to

    a₁ θ₁(ρ₁) + a₂ θ₁(ρ₂) = 0,    a₁ F(ρ₁) + a₂ F(ρ₂) = 0,    v ∥ x̄₁ − x̄₂,    v̂·(x̄₁ − x̄₂) = ρ₁ − ρ₂.

The first two (Eqn. 56) hold ρ₁ and ρ₂; the last two then ask for ‖x̄₁ − x̄₂‖ = |ρ₁ − ρ₂|. All solutions are found by a
scan along the curve of the first equation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from joma.theory.isotropic.mixture import Mixture, Thetas
from joma.theory.isotropic.radial import Radial
from joma.theory.setting import Array, finite

_FLAT = 1e-11  # |a₁F₁ + a₂F₂| below this share of its terms, point after point, is a continuum
_GRID = np.linspace(-17.0, 17.0, 409)  # ρ = unit · sinh(u) reaches ± 1.2e7 units


@dataclass(frozen=True)
class CriticalRay:
    """A ray of critical points: c · (v, ξ) for every c > 0."""

    rho: tuple[float, float]  # ρ₁, ρ₂
    separation: float  # ‖x̄₁ − x̄₂‖ at which it exists
    sign: int  # v̂ = sign · (x̄₁ − x̄₂)/separation

    def point(self, centres: ArrayLike, norm: float = 1.0) -> tuple[Array, float]:
        """(v, ξ) with ‖v‖ = ``norm`` for these two centres (2, M), which must be ``separation`` apart."""
        one, two = finite(centres, "centres", 2)
        D = float(np.linalg.norm(one - two))
        if abs(D - self.separation) > 1e-6 * self.separation:
            raise ValueError(
                f"the centres are {D:.8g} apart; this ray exists at {self.separation:.8g} only"
            )
        v = self.sign * norm * (one - two) / D
        return v, float(norm * self.rho[0] - v @ one)


@dataclass(frozen=True)
class Continuum:
    """Critical rays for every ρ₁ in an interval, all at one separation (marginals with exactly exponential tails)."""

    rho1: tuple[float, float]
    separation: float
    sign: int


@dataclass(frozen=True)
class CriticalRays:
    """All critical rays of two components; empty is an answer, and ``reason`` says why."""

    rays: tuple[CriticalRay, ...]
    continua: tuple[Continuum, ...] = ()
    reason: str = ""
    dead_below: float | None = (
        None  # compact support, ReLU: with both ρ below this the node is dead and nothing moves
    )
    orthogonal: float | None = None  # a₁ = −a₂: critical for every v ⊥ x̄₁ − x̄₂ with ρ₁ = ρ₂ = this

    def __bool__(self) -> bool:
        return bool(self.rays or self.continua or self.orthogonal is not None)

    @property
    def separations(self) -> tuple[float, ...]:
        """Where they exist."""
        return tuple(
            sorted(
                {ray.separation for ray in self.rays} | {run.separation for run in self.continua}
            )
        )


def critical_rays(
    family: Radial, a: ArrayLike, separation: float | None = None, *, slopes: tuple[float, float] = (0.0, 1.0),
    rtol: float = 1e-8,
) -> CriticalRays:  # fmt: skip
    """All critical rays of two components with weights a = (a₁, a₂) and centres ``separation`` apart.

    Looked for are rays with |ρ| below 10⁷ E|s| of nodes that fire for more than ``family.floor`` of each component.

    Arguments:
        family: the isotropic distribution about both centres.
        a: (2,), weights that are not zero.
        separation: of the centres; without one, all separations that have critical rays are found.
        slopes: (c₋, c₊) of the activation; ReLU by default.
        rtol: how near to ``separation`` a ray's own separation must be.

    Returns:
        The rays; none is an answer, with a reason.

    >>> from joma.theory.isotropic import Gaussian, StudentT
    >>> print(critical_rays(Gaussian(3), [0.4, -0.6]).reason)
    none: F/θ₁ takes no value twice at points with θ₁ in the ratio 1.5
    >>> [f"{d:.4f}" for d in critical_rays(StudentT(3, nu=3), [0.4, -0.6]).separations]
    ['0.4317']
    """
    weights, thetas = finite(a, "a", 1), Thetas(family, slopes)
    if weights.shape != (2,) or not weights.all():
        raise ValueError(f"a must be two weights that are not zero, got {weights.tolist()}")
    if separation is not None and not (np.isfinite(separation) and separation > 0):
        raise ValueError(
            f"the separation of the centres must be a positive number, got {separation!r}"
        )
    rectified = 0.0 in slopes and slopes != (0.0, 0.0)
    dead = -family.radius if rectified and np.isfinite(family.radius) else None
    if thetas.jump == 0:
        return CriticalRays((), reason="none: a linear activation has a constant field")
    if slopes[0] * slopes[1] >= 0 and weights.prod() > 0:
        return CriticalRays(
            (), reason="none: the weights have one sign, so has ξ̇ = Σ a θ₁", dead_below=dead
        )
    if weights.sum() == 0:
        if slopes[0] * slopes[1] >= 0:
            reason = "none: equal weights force ρ₁ = ρ₂, and then v̇ = a₁θ₁(ρ)(x̄₁ − x̄₂) ≠ 0"
            return CriticalRays((), reason=reason, dead_below=dead)
        return CriticalRays(
            (), orthogonal=float(thetas.inverse(0.0)), reason="only v ⊥ x̄₁ − x̄₂ at the zero of θ₁"
        )
    rays, continua = _scan(thetas, weights)
    ratio = float(np.abs(weights).max() / np.abs(weights).min())
    if not (rays or continua):
        reason = f"none: F/θ₁ takes no value twice at points with θ₁ in the ratio {ratio:.6g}"
        return CriticalRays((), reason=reason, dead_below=dead)
    if separation is None:
        return CriticalRays(rays, continua, dead_below=dead)
    every = CriticalRays(rays, continua, dead_below=dead)
    here = CriticalRays(
        tuple(ray for ray in rays if abs(ray.separation - separation) <= rtol * separation),
        tuple(run for run in continua if abs(run.separation - separation) <= rtol * separation),
        dead_below=dead,
    )
    needed = ", ".join(f"{D:.8g}" for D in every.separations)
    return (
        here
        if here
        else replace(
            here, reason=f"none at separation {separation:.8g}: critical rays need {needed}"
        )
    )


def critical_points(mixture: Mixture, *, rtol: float = 1e-8) -> CriticalRays:
    """All critical rays of a mixture of two components, at the separation that its centres have.

    Arguments:
        mixture: of two components.
        rtol: how near to the centres' separation a ray's own must be.

    Returns:
        The rays; none is an answer, with a reason.
    """
    if len(mixture.a) != 2:
        raise ValueError(
            f"critical points are found for two components, the mixture has {len(mixture.a)}"
        )
    D = float(np.linalg.norm(mixture.centres[0] - mixture.centres[1]))
    if D == 0:
        raise ValueError("the two centres coincide: x̄₁ − x̄₂ is the zero vector")
    return critical_rays(mixture.family, mixture.a, D, slopes=mixture.slopes, rtol=rtol)


def _scan(thetas: Thetas, a: Array) -> tuple[tuple[CriticalRay, ...], tuple[Continuum, ...]]:
    """Zeros of a₁F(ρ₁) + a₂F(ρ₂) along a₁θ₁(ρ₁) + a₂θ₁(ρ₂) = 0."""
    mirror = 1 if abs(thetas.slopes[0]) <= abs(thetas.slopes[1]) else -1
    if (
        mirror < 0
    ):  # φ(−x) is the same problem with ρ → −ρ; quantiles are accurate where θ₁ is small on the left
        thetas = Thetas(thetas.family, (-thetas.slopes[1], -thetas.slopes[0]))
    lead = int(
        np.argmin(np.abs(a))
    )  # the component with the larger |θ₁|: the other's quantile is then well determined
    ratio, unit = -a[lead] / a[1 - lead], 2 * float(thetas.family.tail_mean(0.0))

    def other(rho: Array) -> Array:
        """ρ of the other component, NaN where there is none."""
        share = (ratio * thetas.theta1(rho) - thetas.slopes[0]) / thetas.jump
        valid = (share > thetas.family.floor) & (share < 1)
        return np.where(valid, thetas.family.ppf(np.where(valid, share, 0.5)), np.nan)

    def gap(rho: Array) -> Array:
        """a₁F₁ + a₂F₂ over the sum of their sizes, in (−1, 1)."""
        one, two = a[lead] * thetas.F(rho), a[1 - lead] * thetas.F(other(rho))
        return (one + two) / (np.abs(one) + np.abs(two))

    def at(u: float) -> float:
        return float(gap(unit * np.sinh(np.float64(u))))

    def solution(u: float) -> tuple[tuple[float, float], float, int]:
        rho = unit * np.sinh(np.float64(u))
        pair = (mirror * float(rho), mirror * float(other(rho)))
        first, second = pair if lead == 0 else pair[::-1]
        return (first, second), abs(first - second), int(np.sign(first - second))

    with np.errstate(invalid="ignore", divide="ignore"):
        values = gap(unit * np.sinh(_GRID))
        flat = np.abs(values) < _FLAT
        continua, covered = [], np.zeros(len(values), bool)
        for first, last in _runs(flat):
            if last - first < 3:
                continue
            covered[first : last + 1] = True
            low = _edge(at, _GRID[first], _GRID[max(first - 1, 0)])
            high = _edge(at, _GRID[last], _GRID[min(last + 1, len(_GRID) - 1)])
            _, separation, sign = solution(0.5 * (max(low, -3.0) + high))
            ends = [solution(u)[0][0] for u in (low, high)]
            if (
                thetas.family.cdf(unit * np.sinh(low)) < 1e8 * thetas.family.floor
            ):  # sight ends there, the run does not
                ends[0] = -mirror * np.inf
            continua.append(Continuum((min(ends), max(ends)), separation, sign))
        rays = []
        for i in np.flatnonzero(values[:-1] * values[1:] <= 0):
            if not (covered[i] or covered[i + 1] or values[i] == 0):
                u = brentq(at, _GRID[i], _GRID[i + 1], xtol=1e-15, rtol=1e-14)
                rays.append(CriticalRay(*solution(u)))
    return tuple(rays), tuple(continua)


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [(int(first), int(stop) - 1) for first, stop in edges.reshape(-1, 2)]


def _edge(at: Callable[[float], float], inside: float, outside: float) -> float:
    """Where a continuum ends, by bisection between a point in it and one that is not."""
    for _ in range(40):
        middle = 0.5 * (inside + outside)
        inside, outside = (middle, outside) if abs(at(middle)) < _FLAT else (inside, middle)
    return inside
