"""Isotropic distributions and their one-dimensional marginal p_n (Eqns. 33-36), by quadrature from the density.

x ∈ R^n has density p₀(‖x‖); s = u·x has the same law for every unit u. With r = ‖x‖ and x ≥ 0,

    p_n(x) = |S^{n−2}| ∫_x^∞ p₀(r) r (r² − x²)^{(n−3)/2} dr            (Eqn. 35 with l² = r² − x²)
    P(s > x) = |S^{n−1}| ∫_x^∞ p₀(r) r^{n−1} · ½ I_{1−x²/r²}((n−1)/2, ½) dr
    E[s; s > x] = |B^{n−1}| ∫_x^∞ p₀(r) r (r² − x²)^{(n−1)/2} dr

(I is the regularised incomplete beta function, the share of the sphere beyond a hyperplane). A family with closed forms
puts them in the place of these three; ``by_quadrature`` leads back to the integrals, so that each can check the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import cumulative_trapezoid
from scipy.optimize import brentq
from scipy.special import betainc, gammaln

from joma.theory.isotropic import _quadrature
from joma.theory.setting import Array

_LOG_RADII = np.linspace(-60.0, 60.0, 6001)  # where a density is looked for


def sphere(n: int) -> float:
    """Area of the unit sphere in R^n; 2 for n = 1."""
    return float(2 * np.exp(n / 2 * np.log(np.pi) - gammaln(n / 2)))


@dataclass(frozen=True)
class Radial:
    """An isotropic distribution in R^n. ``scale`` stretches it: x is scale times the family's unit version.

    A family gives ``_density`` (p₀ at unit scale) and, where known, ``_marginal``, ``_upper``, ``_tail`` and ``_isf``
    for x ≥ 0 at unit scale.
    """

    n: int
    scale: float = 1.0
    floor: ClassVar[float] = (
        1e-12  # tail probabilities below this are not to be trusted: a density underflows there
    )

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, (int, np.integer)) or self.n < 1:
            raise ValueError(f"n must be a positive integer, the dimension; got {self.n!r}")
        if not (np.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be a positive number, got {self.scale!r}")

    @property
    def radius(self) -> float:
        """The largest ‖x‖, inf where there is none."""
        return np.inf

    def density(self, r: ArrayLike) -> Array:
        """p₀(r), the density in R^n at distance r ≥ 0."""
        return self._density(np.asarray(r, float) / self.scale) / self.scale**self.n

    def marginal(self, s: ArrayLike) -> Array:
        """p_n(s), the density of u·x for any unit vector u."""
        return self._marginal(np.abs(np.asarray(s, float)) / self.scale) / self.scale

    def cdf(self, s: ArrayLike) -> Array:
        """P(u·x ≤ s), with full relative accuracy in the left tail."""
        x = np.asarray(s, float) / self.scale
        upper = self._upper(np.abs(x))
        return np.where(x < 0, upper, 1 - upper)

    def tail_mean(self, s: ArrayLike) -> Array:
        """E[u·x; u·x > s] = ∫_s^∞ t p_n(t) dt, even in s."""
        return self.scale * self._tail(np.abs(np.asarray(s, float)) / self.scale)

    def ppf(self, y: ArrayLike) -> Array:
        """The quantile: ``cdf(ppf(y)) = y`` for y in (0, 1)."""
        y = np.asarray(y, float)
        if not ((y > 0) & (y < 1)).all():
            raise ValueError(
                f"quantiles are asked for y in (0, 1), got {y[~((y > 0) & (y < 1))].flat[0]:g}"
            )
        x = self._isf(np.minimum(y, 1 - y))
        return self.scale * np.where(y < 0.5, -x, x)

    def sample(self, size: int, rng: np.random.Generator) -> Array:
        """(size, n) independent draws."""
        direction = rng.standard_normal((size, self.n))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        return self.scale * self._radii(size, rng)[:, None] * direction

    def by_quadrature(self) -> Density:
        """The same distribution known by its density alone."""
        return Density(self.n, p0=self.density)

    # -- at unit scale, x ≥ 0 ------------------------------------------------------------------------------

    @property
    def _end(self) -> float:
        return self.radius / self.scale

    def _density(self, r: Array) -> Array:
        raise NotImplementedError

    def _marginal(self, x: Array) -> Array:
        n = self.n
        if n == 1:
            return self._density(x)
        return sphere(n - 1) * self._integral(
            lambda x, step, r: r * (step * (x + r)) ** ((n - 3) / 2), x
        )

    def _upper(self, x: Array) -> Array:
        n = self.n

        def share(x: Array, step: Array, r: Array) -> Array:
            if n == 1:
                return np.asarray(0.5)
            return 0.5 * betainc((n - 1) / 2, 0.5, np.clip(step / r * (1 + x / r), 0.0, 1.0))

        return sphere(n) * self._integral(lambda x, step, r: r ** (n - 1) * share(x, step, r), x)

    def _tail(self, x: Array) -> Array:
        n = self.n
        volume = sphere(n + 1) / (2 * np.pi)  # |B^{n−1}| = |S^n| / 2π
        return volume * self._integral(lambda x, step, r: r * (step * (x + r)) ** ((n - 1) / 2), x)

    def _integral(self, kernel: _quadrature.Kernel, x: Array) -> Array:
        return _quadrature.smooth(self._density, kernel, x, self._end)

    def _isf(self, q: Array) -> Array:
        """x ≥ 0 with P(s > x) = q ≤ ½: Newton in (ln x, ln q) from a table, bisection where that fails."""
        log_x, log_upper = self._quantiles
        q = np.asarray(q, float)
        target = np.log(q)
        x = np.exp(np.interp(-target, -log_upper, log_x))
        with np.errstate(all="ignore"):
            for _ in range(6):
                upper = self._upper(x)
                step = (np.log(upper) - target) * upper / (x * self._marginal(x))
                x = np.minimum(x * np.exp(np.clip(np.nan_to_num(step), -1, 1)), self._end)
                if np.abs(step[q < 0.5]).max(initial=0.0) < 1e-8:  # the next step would be 1e-16
                    break
            bad = (q < 0.5) & ~(np.abs(np.log(self._upper(x)) - target) < 1e-12)
        x = np.where(q >= 0.5, 0.0, x)
        return np.where(bad, _each(self._isf_slowly, np.where(bad, q, 0.5)), x) if bad.any() else x

    def _isf_slowly(self, q: float) -> float:
        if q >= min(0.5, float(self._upper(np.zeros(())))):
            return 0.0
        high = 1.0
        while high < self._end and self._upper(np.asarray(high)) > q:
            high *= 2
        gap = lambda x: math.log(max(float(self._upper(np.asarray(x))), 1e-320)) - math.log(q)  # noqa: E731
        return float(brentq(gap, 0.0, min(high, self._end), xtol=1e-300, rtol=1e-14))

    @cached_property
    def _quantiles(self) -> tuple[Array, Array]:
        """ln x and ln P(s > x) on a grid."""
        x = (
            np.exp(np.linspace(-12, 18, 241))
            if np.isinf(self._end)
            else self._end * (1 - np.exp(-np.linspace(1e-5, 20, 241)))
        )
        upper = self._upper(x)
        keep = np.concatenate([[True], np.diff(upper) < 0]) & (upper > 1e-300)
        return np.log(x[keep]), np.log(upper[keep])

    def _radii(self, size: int, rng: np.random.Generator) -> Array:
        u, cumulative = self._radial_cdf
        return np.exp(np.interp(rng.random(size), cumulative, u))

    @cached_property
    def _radial_cdf(self) -> tuple[Array, Array]:
        """A fine grid of ln r and P(‖x‖ ≤ r) on it, for sampling."""
        u, mass = _LOG_RADII, self._log_mass(_LOG_RADII)
        for _ in range(2):  # refine to where the mass is
            cumulative = np.concatenate([[0.0], cumulative_trapezoid(mass, u)])
            inside = (cumulative > 1e-12 * cumulative[-1]) & (
                cumulative < (1 - 1e-12) * cumulative[-1]
            )
            first, last = np.flatnonzero(inside)[[0, -1]]
            u = np.linspace(u[max(first - 1, 0)], u[min(last + 1, len(u) - 1)], 6001)
            mass = self._log_mass(u)
        cumulative = np.concatenate([[0.0], cumulative_trapezoid(mass, u)])
        keep = np.concatenate([[True], np.diff(cumulative) > 0])
        return u[keep], cumulative[keep] / cumulative[-1]

    def _log_mass(self, u: Array) -> Array:
        return _log_mass(self._density(np.exp(u)), u, self.n)


def _log_mass(density: Array, u: Array, n: int) -> Array:
    """p₀(r) rⁿ at r = e^u, the radial mass per unit of ln r, as a share of its largest value."""
    with np.errstate(divide="ignore"):
        log = np.where(np.isfinite(density), np.log(density) + n * u, -np.inf)
    return np.exp(log - log.max())


def _each(f: Callable[[float], float], x: Array) -> Array:
    return np.vectorize(f, otypes=[float])(x)


@dataclass(frozen=True)
class Density(Radial):
    """Any isotropic distribution, by a callable p₀(r) ≥ 0 of the distance r; it need not be normalised.

    Densities with kinks or jumps inside their support are integrated adaptively, which is a hundred times slower.
    ``scale`` is found (the median distance, in which all integrals are done), and so is ``radius``.

    >>> heavy = Density(3, p0=lambda r: (1 + r**2) ** -4.0)
    >>> print(f"{heavy.cdf(0.5):.6f}")
    0.842814
    """

    scale: float = field(default=1.0, init=False)
    p0: Callable[[Any], Any] = field(kw_only=True)
    _norm: float = field(default=1.0, init=False, repr=False)
    _radius: float = field(default=np.inf, init=False, repr=False)
    _is_smooth: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.p0):
            raise TypeError(
                f"p0 must be a callable density p₀(r) of the distance r ≥ 0, got {self.p0!r}"
            )
        with np.errstate(all="ignore"):
            values = self._raw(np.exp(_LOG_RADII))
            start = int(np.argmax(np.isfinite(values)))  # a pole at 0 may overflow there
            bad = ~(values >= 0) | np.isinf(values) & (min(_LOG_RADII[start], 0.0) < _LOG_RADII)
            if bad.any():
                raise ValueError(
                    f"the density must be a finite number ≥ 0 at every r > 0; at r = {np.exp(_LOG_RADII[bad][0]):.4g} "
                    f"it is {values[bad][0]:g}"
                )
            if not (values > 0).any():
                raise ValueError(
                    "the density is 0 everywhere between r = e⁻⁶⁰ and e⁶⁰: it does not normalise"
                )
            self._judge_ends(values[start:])
            mass = np.concatenate(
                [[0.0], cumulative_trapezoid(_log_mass(values, _LOG_RADII, self.n), _LOG_RADII)]
            )
            object.__setattr__(self, "_radius", self._find_radius(values))
        object.__setattr__(
            self, "scale", float(np.exp(np.interp(0.5 * mass[-1], mass, _LOG_RADII)))
        )
        norm = 2 * float(
            self._upper(np.zeros(()))
        )  # adaptive, as is all until the rules have been compared
        if not (np.isfinite(norm) and norm > 0):
            raise ValueError(
                f"the density does not normalise: its integral over R^{self.n} came out as {norm:g}"
            )
        object.__setattr__(self, "_norm", norm)
        if self._agrees():
            object.__setattr__(self, "_is_smooth", True)
            object.__setattr__(self, "_norm", norm * 2 * float(self._upper(np.zeros(()))))

    @property
    def radius(self) -> float:
        """The largest ‖x‖, inf where there is none."""
        return self._radius

    def _raw(self, r: ArrayLike) -> Array:
        r = np.asarray(r, float)
        try:
            value = np.asarray(self.p0(r), float)
        except (TypeError, ValueError):  # a function of one number
            value = np.empty(0)
        return value if value.shape == r.shape else _each(lambda t: float(self.p0(t)), r)

    def _integral(self, kernel: _quadrature.Kernel, x: Array) -> Array:
        rule = _quadrature.smooth if self._is_smooth else _quadrature.adaptive
        return rule(self._density, kernel, x, self._end)

    def _agrees(self) -> bool:
        """Whether the fast rule gives what the adaptive one gives."""
        x = np.array([0.0, 0.1, 0.5, 1.0, 2.0]) * min(1.0, 0.4 * self._end)
        kernel: _quadrature.Kernel = lambda x, step, r: r * (step * (x + r)) ** ((self.n - 1) / 2)  # noqa: E731
        fast, safe = (
            rule(self._density, kernel, x, self._end)
            for rule in (_quadrature.smooth, _quadrature.adaptive)
        )
        return bool(np.abs(fast - safe).max() <= 1e-9 * safe.max())

    def _judge_ends(self, values: Array) -> None:
        """Refuse densities whose integral, or whose mean distance, diverges: by their powers of r at both ends."""
        wide = _LOG_RADII[250] - _LOG_RADII[0]  # a factor of 148 in r
        if (
            min(values[0], values[250]) > 0
            and np.log(values[250] / values[0]) / wide + self.n <= 1e-9
        ):
            raise ValueError(
                f"the density does not normalise: near r = 0 it grows like 1/r^{self.n} or faster"
            )
        slope = (
            np.log(values[-1] / values[-251]) / wide + 0.0 if values[-1] > 0 else -np.inf
        )  # p₀ ~ r^slope
        text = f"at large r the density behaves like r^{slope:.4g}"
        if slope + self.n >= -1e-9:
            raise ValueError(
                f"the density does not normalise: {text}; in R^{self.n} it must fall faster than r^-{self.n}"
            )
        if slope + self.n >= -1 - 1e-9:
            raise ValueError(
                f"no mean distance: {text}; θ₂ needs a fall faster than r^-{self.n + 1} in R^{self.n}"
            )

    def _find_radius(self, values: Array) -> float:
        """The edge of a compact support, by bisection; a density that merely underflows has none."""
        last = int(np.flatnonzero(values > 0)[-1])
        if last == len(values) - 1:
            return np.inf
        low, high = np.exp(_LOG_RADII[last : last + 2])
        while (middle := 0.5 * (low + high)) not in (low, high):
            low, high = (middle, high) if self._raw(middle) > 0 else (low, middle)
        return float(high) if self._raw(low * (1 - 1e-6)) > 1e-250 * values.max() else np.inf

    def _density(self, r: Array) -> Array:
        return self._raw(self.scale * np.asarray(r)) * (self.scale**self.n / self._norm)
