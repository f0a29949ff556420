"""Isotropic families with closed forms: Gaussian, uniform ball, Student-t, symmetric Laplace, and p₀ ∝ exp(−‖x‖)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from scipy.special import betainc, betaincinv, gammaln, kv, kve, ndtr, ndtri, stdtr, stdtrit

from joma.theory.isotropic.radial import Radial, sphere
from joma.theory.setting import Array


@dataclass(frozen=True)
class Gaussian(Radial):
    """Independent normal coordinates with standard deviation ``scale``."""

    floor: ClassVar[float] = 1e-300

    def _density(self, r: Array) -> Array:
        return np.exp(-0.5 * r * r) / (2 * np.pi) ** (self.n / 2)

    def _marginal(self, x: Array) -> Array:
        return np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)

    def _upper(self, x: Array) -> Array:
        return ndtr(-x)

    def _tail(self, x: Array) -> Array:
        return self._marginal(x)

    def _isf(self, q: Array) -> Array:
        return -ndtri(q)

    def sample(self, size: int, rng: np.random.Generator) -> Array:
        """(size, n) independent draws."""
        return self.scale * rng.standard_normal((size, self.n))


@dataclass(frozen=True)
class UniformBall(Radial):
    """Uniform in the ball of radius ``scale``: (1 + s)/2 has a beta law with both parameters (n + 1)/2."""

    floor: ClassVar[float] = 1e-300

    @property
    def radius(self) -> float:
        """The ball's."""
        return self.scale

    @property
    def _constant(self) -> float:
        return float(np.exp(gammaln(self.n / 2 + 1) - gammaln((self.n + 1) / 2)) / np.sqrt(np.pi))

    def _density(self, r: Array) -> Array:
        return np.where(r <= 1, self.n / sphere(self.n), 0.0)

    def _marginal(self, x: Array) -> Array:
        inside = np.maximum(0.0, (1 - x) * (1 + x))
        return self._constant * np.where(x <= 1, inside ** ((self.n - 1) / 2), 0.0)

    def _upper(self, x: Array) -> Array:
        half = (self.n + 1) / 2
        return betainc(half, half, np.clip((1 - x) / 2, 0.0, 1.0))

    def _tail(self, x: Array) -> Array:
        return (
            self._constant / (self.n + 1) * np.maximum(0.0, (1 - x) * (1 + x)) ** ((self.n + 1) / 2)
        )

    def _isf(self, q: Array) -> Array:
        half = (self.n + 1) / 2
        return 1 - 2 * betaincinv(half, half, q)

    def _radii(self, size: int, rng: np.random.Generator) -> Array:
        return rng.random(size) ** (1 / self.n)


@dataclass(frozen=True)
class StudentT(Radial):
    """Multivariate Student-t with ν > 1 degrees of freedom: a normal vector over √(χ²_ν/ν). Its marginal is t_ν."""

    floor: ClassVar[float] = 1e-300

    nu: float = field(default=np.nan, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (np.isfinite(self.nu) and self.nu > 1):
            raise ValueError(
                f"nu must be a number > 1: Student-t has no mean at nu ≤ 1 and θ₂ needs one; got {self.nu!r}"
            )

    @property
    def _constant(self) -> float:
        nu = self.nu
        return float(np.exp(gammaln((nu + 1) / 2) - gammaln(nu / 2)) / np.sqrt(nu * np.pi))

    def _density(self, r: Array) -> Array:
        nu, n = self.nu, self.n
        log = float(gammaln((nu + n) / 2) - gammaln(nu / 2) - n / 2 * np.log(nu * np.pi))
        return np.exp(log - (nu + n) / 2 * np.log1p(r * r / nu))

    def _marginal(self, x: Array) -> Array:
        return self._constant * np.exp(-(self.nu + 1) / 2 * np.log1p(x * x / self.nu))

    def _upper(self, x: Array) -> Array:
        return np.asarray(stdtr(self.nu, -x), np.float64)

    def _tail(self, x: Array) -> Array:
        nu = self.nu
        return self._constant * nu / (nu - 1) * np.exp(-(nu - 1) / 2 * np.log1p(x * x / nu))

    def _isf(self, q: Array) -> Array:
        x: Array = np.asarray(-stdtrit(self.nu, q), float)
        safe = np.maximum(x, 1e-300)
        for _ in range(2):  # stdtrit is good to five digits in far tails: Newton in (ln x, ln q)
            upper = self._upper(safe)
            safe = safe * np.exp(np.log(upper / q) * upper / (safe * self._marginal(safe)))
        return np.where(x > 1e-6, safe, x)

    def sample(self, size: int, rng: np.random.Generator) -> Array:
        """(size, n) independent draws."""
        normal = rng.standard_normal((size, self.n))
        return self.scale * normal / np.sqrt(rng.chisquare(self.nu, size) / self.nu)[:, None]


@dataclass(frozen=True)
class Laplace(Radial):
    """Symmetric multivariate Laplace with unit covariance: √W times a normal vector, W exponential.

    In every dimension its marginal is the one-dimensional Laplace e^{−√2|s|}/√2.
    """

    floor: ClassVar[float] = 1e-300

    def _density(self, r: Array) -> Array:
        r, n = np.asarray(r, float), self.n
        safe = np.maximum(r, 1e-300)
        with np.errstate(over="ignore"):
            return (
                2
                / (2 * np.pi) ** (n / 2)
                * (safe / np.sqrt(2)) ** (1 - n / 2)
                * kv(n / 2 - 1, np.sqrt(2) * safe)
            )

    def _marginal(self, x: Array) -> Array:
        return np.exp(-np.sqrt(2) * x) / np.sqrt(2)

    def _upper(self, x: Array) -> Array:
        return 0.5 * np.exp(-np.sqrt(2) * x)

    def _tail(self, x: Array) -> Array:
        return 0.5 * (np.minimum(x, 1e300) + 1 / np.sqrt(2)) * np.exp(-np.sqrt(2) * x)

    def _isf(self, q: Array) -> Array:
        return -np.log(2 * q) / np.sqrt(2)

    def sample(self, size: int, rng: np.random.Generator) -> Array:
        """(size, n) independent draws."""
        return (
            self.scale
            * np.sqrt(rng.exponential(size=size))[:, None]
            * rng.standard_normal((size, self.n))
        )


@dataclass(frozen=True)
class ExpNorm(Radial):
    """Density ∝ exp(−‖x‖/scale). p_n(s) ∝ |s|^{n/2} K_{n/2}(|s|) by closed form, its integral by quadrature."""

    def _density(self, r: Array) -> Array:
        return np.exp(-r - gammaln(self.n)) / sphere(self.n)

    def _bessel(self, x: Array, order: float) -> Array:
        """x^order K_order(x) over its value at 0."""
        x = np.asarray(x, float)
        safe = np.clip(x, 1e-9, 1e3)  # beyond, e^{−x} is 0
        log = order * np.log(safe) + np.log(kve(order, safe)) - safe
        return np.where(
            x < 1e-9,
            1.0,
            np.where(x > 700, 0.0, np.exp(log - gammaln(order) - (order - 1) * np.log(2))),
        )

    def _marginal(self, x: Array) -> Array:
        half = self.n / 2
        top = np.exp(gammaln(half) - gammaln(half + 0.5)) / (2 * np.sqrt(np.pi))
        return top * self._bessel(x, half)

    def _tail(self, x: Array) -> Array:
        half = self.n / 2
        top = np.exp(gammaln(half + 1) - gammaln(half + 0.5)) / np.sqrt(np.pi)
        return top * self._bessel(x, half + 1)

    def _radii(self, size: int, rng: np.random.Generator) -> Array:
        return rng.gamma(self.n, size=size)
