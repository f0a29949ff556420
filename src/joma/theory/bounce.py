r"""The bounce of attention entropy: Eqn. 6, Theorem 4 (Eqns. 7 and 77-88) and its linear counterpart.

Eqn. 6, v' = (μ - v) exp(v²/2) with v(0) = 0, is solved in s = ln(1/δ), δ = 1 - v/μ. There s' = exp(v²/2),
so t = F(s, μ) with (Eqn. 79, x = 1 - e^{-u})

    F(s, μ) = ∫₀ˢ exp(-μ² (1 - e^{-u})² / 2) du = e^{-μ²/2} s + ρ(s, μ),

and nothing is lost when δ falls below 1e-16, where v itself has long stopped moving in floating point.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.polynomial import legendre, polynomial
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import solve_ivp
from scipy.optimize import minimize_scalar
from scipy.special import softmax

Array = NDArray[np.float64]

LARGEST_MU = 37.0  # e^{μ²/2} reaches 1e297 there; beyond it float64 overflows
_TAIL = 48.0  # μ² e^{-48} < 2e-18 for every allowed μ: from there on F is linear in float64
_ORDER = 10  # Gauss-Legendre nodes in a panel of s
_WORK = 1 << 15  # elements of the arrays a chunk works on: 256 kB each, so that they stay in cache


@dataclass(frozen=True)
class ExpAttention:
    """Attention proportional to exp(v² / temperature); Eqn. 6 has temperature 2."""

    temperature: float = 2.0

    def log_weight(self, v: Array) -> Array:
        """The logarithm of the unnormalised attention, in the shape of ``v``."""
        return v * v / self.temperature


@dataclass(frozen=True)
class LinearAttention:
    """Attention proportional to |z| = sqrt(v² + c), by the invariant z² - v² = c."""

    c: float

    def log_weight(self, v: Array) -> Array:
        """The logarithm of the unnormalised attention, in the shape of ``v``."""
        return 0.5 * np.log(v * v + self.c)


@dataclass(frozen=True)
class Trough:
    """The lowest attention entropy of a bounce, in nats; ``rebound`` is the rise from there to the end."""

    time: float
    entropy: float
    start: float
    rebound: float


@dataclass(frozen=True, eq=False)
class Bounce:
    """The J components of v at T times, kept as s = ln(1/δ)."""

    mu: Array  # (J,)
    t: Array  # (T,)
    log_inverse_delta: Array  # (T, J)
    attention: ExpAttention | LinearAttention = field(default_factory=ExpAttention)

    @property
    def delta(self) -> Array:
        """δ = 1 - v/μ, (T, J); zero once s exceeds 745."""
        return np.exp(-self.log_inverse_delta)

    @property
    def v(self) -> Array:
        """v = μ (1 - δ), (T, J)."""
        return _v(self.log_inverse_delta, self.mu)

    def entropy(self) -> Array:
        """Entropy in nats of the attention over the components, (T,)."""
        rows = max(1, _WORK // self.mu.size)
        blocks = (self.log_inverse_delta[i : i + rows] for i in range(0, self.t.size, rows))
        return np.concatenate([_entropy(self.attention.log_weight(_v(s, self.mu))) for s in blocks])

    def trough(self) -> Trough:
        """Where the entropy is lowest, and how far it comes back."""
        entropy = self.entropy()
        i = int(np.argmin(entropy))
        lowest, start, end = float(entropy[i]), float(entropy[0]), float(entropy[-1])
        return Trough(time=float(self.t[i]), entropy=lowest, start=start, rebound=end - lowest)


def _v(s: Array, mu: Array) -> Array:
    x = np.expm1(-s)
    return np.multiply(x, -mu, out=x)


def _entropy(log_weight: Array) -> Array:  # (T, J) -> (T,)
    z = log_weight - log_weight.max(axis=1, keepdims=True)
    weight = np.exp(z)
    total: Array = weight.sum(axis=1)
    expected: Array = np.einsum("tj,tj->t", weight, z) / total
    return np.log(total) - expected


def solve_bounce(mu: ArrayLike, t: ArrayLike) -> Bounce:
    """Solve Eqn. 6 from v(0) = 0 for every component by inverting F(s, μ) = t.

    ``mu``: (J,), either sign, |μ| <= 37. ``t``: (T,), finite, not negative, not decreasing.
    """
    mu, t = _components(mu, LARGEST_MU), _times(t)
    if t[-1] > 0 and 0.5 * np.max(mu**2) + np.log(t[-1]) > 700:
        worst = float(mu[np.argmax(np.abs(mu))])
        raise ValueError(f"ln(1/δ) overflows for mu = {worst} at t = {t[-1]}: end t earlier or lower mu")
    s = np.empty((t.size, mu.size))
    order = np.argsort(np.abs(mu))  # neighbours in |μ| share one grid of panels

    def work(chunk: NDArray[np.intp]) -> None:
        s[:, chunk] = _invert_flight_time(np.abs(mu[chunk]), t).T

    size = max(1, _WORK // max(t.size, len(_panel_edges(float(np.max(np.abs(mu)))))))
    chunks = [order[i : i + size] for i in range(0, mu.size, size)]
    with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:  # NumPy releases the GIL
        list(pool.map(work, chunks))
    return Bounce(mu, t, s)


def _panel_edges(mu: float) -> Array:  # (P + 1,)
    """Panels of s in which ln F' changes by 0.6 at most, so that degree 9 fits it and Newton is quick."""
    edges = [0.0]
    while (s := edges[-1]) < _TAIL:
        delta = math.exp(-s)
        edges.append(s + min(0.4 + 0.1 * s, 0.6 / (delta * (1 + mu + mu**2 * (1 - delta)))))
    return np.array(edges)


def _mean_matrix(nodes: Array, weights: Array) -> Array:
    """Values of f at the nodes -> monomial coefficients of its running mean ∫₋₁ʷ f / (1 + w)."""
    n = nodes.size
    means = [polynomial.polydiv(legendre.leg2poly(legendre.legint(e, lbnd=-1)), [1, 1])[0] for e in np.eye(n)]
    basis = np.column_stack([np.pad(q, (0, n - q.size)) for q in means])  # Legendre -> mean
    project = (np.arange(n) + 0.5)[:, None] * (legendre.legvander(nodes, n - 1) * weights[:, None]).T
    return np.asarray(basis @ project)


_NODES, _WEIGHTS = legendre.leggauss(_ORDER)
_MEAN = _mean_matrix(_NODES, _WEIGHTS)


def _invert_flight_time(mu: Array, t: Array) -> Array:  # (C,), (T,) -> (C, T)
    """Solve F(s, μ) = t: a table of F over panels of s, then Newton within the panel of each time.

    In a panel that starts at s_j, s = s_j + h y with 0 <= y <= 2 and F = F_j + h y Q(y - 1), where Q is the
    running mean of F'. Keeping y outside the polynomial leaves small s relatively exact.
    """
    edges = _panel_edges(float(mu.max()))
    h = np.append(np.diff(edges) / 2, 1.0)  # (P + 1,): the last "panel" is the linear tail
    x = -np.expm1(-(edges[:-1] + h[:-1] * (1 + _NODES[:, None])))  # (n, P)
    slope = np.exp((-0.5 * mu**2)[:, None] * (x * x)[:, None, :])  # (n, C, P): F' at the nodes
    Q = np.zeros((_ORDER, mu.size, edges.size))
    Q[:, :, :-1] = (_MEAN @ slope.reshape(_ORDER, -1)).reshape(slope.shape)
    Q[0, :, -1] = np.exp(-0.5 * mu**2)
    mean = Q[0].copy()  # (C, P + 1): Q at the right edge, by the quadrature itself to spare its rounding
    mean[:, :-1] = np.tensordot(_WEIGHTS / 2, slope, 1)
    F = np.zeros_like(mean)
    np.cumsum(2 * h[:-1] * mean[:, :-1], axis=1, out=F[:, 1:])

    # Every time t_k falls in the last panel with F_j <= t_k, so a panel is repeated once per time in it.
    repeats = np.diff(np.searchsorted(t, F), axis=1, append=t.size).ravel()
    cell = np.repeat(np.arange(F.size), repeats)  # (C T,)
    panel = cell % edges.size
    scale = h[panel]
    tau = (np.tile(t, mu.size) - F.ravel()[cell]) / scale
    coefficients = np.take(Q.reshape(_ORDER, -1), cell, axis=1)  # (n, C T)

    # F is concave, so after its first step Newton climbs to the root from the left; only y < 0 needs care.
    y = tau / mean.ravel()[cell]
    for _ in range(50):
        w = y - 1
        q, dq = coefficients[-1].copy(), np.zeros_like(y)
        for coefficient in coefficients[-2::-1]:
            dq *= w
            dq += q
            q *= w
            q += coefficient
        dq *= y
        dq += q
        q *= y
        q -= tau
        q /= dq
        y -= q
        np.maximum(y, 0.0, out=y)
        if np.all(np.abs(q) <= 3e-7 * y):  # quadratic: the next step would be about 1e-14
            break
    return np.asarray(edges[panel] + scale * y).reshape(mu.size, t.size)


def _components(mu, largest=np.inf):
    return np.asarray(mu, float)


def _times(t):
    return np.asarray(t, float)
