"""The bounce of attention entropy: Eqn. 6, Theorem 4 (Eqns. 7 and 77-88) and its linear counterpart.

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
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp
from scipy.optimize import minimize_scalar
from scipy.special import softmax

from joma.theory.setting import Array, finite

LARGEST_MU = 37.0  # e^{μ²/2} reaches 1e297 there; beyond it float64 overflows
_TAIL = 48.0  # μ² e^{-48} < 2e-18 for every allowed μ: from there on F is linear in float64
_ORDER = 12  # Gauss-Legendre nodes in a panel of s
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
        blocks = (self.log_inverse_delta[rows] for rows in _blocks(self.t.size, self.mu.size))
        return np.concatenate(
            [softmax_entropy(self.attention.log_weight(_v(s, self.mu))) for s in blocks]
        )

    def trough(self) -> Trough:
        """Where the entropy is lowest, and how far it comes back."""
        entropy = self.entropy()
        i = int(np.argmin(entropy))
        lowest, start, end = float(entropy[i]), float(entropy[0]), float(entropy[-1])
        return Trough(time=float(self.t[i]), entropy=lowest, start=start, rebound=end - lowest)


def _v(s: Array, mu: Array) -> Array:
    x = np.expm1(-s)
    return np.multiply(x, -mu, out=x)


def softmax_entropy(log_weight: Array) -> Array:  # (T, J) -> (T,)
    """Entropy in nats of each row of softmax(log_weight)."""
    z = log_weight - log_weight.max(axis=1, keepdims=True)
    weight = np.exp(z)
    total: Array = weight.sum(axis=1)
    expected: Array = np.einsum("tj,tj->t", weight, z) / total
    return np.log(total) - expected


def solve_bounce(mu: ArrayLike, t: ArrayLike) -> Bounce:
    """Solve Eqn. 6 from v(0) = 0 for every component by inverting F(s, μ) = t.

    Arguments:
        mu: (J,), either sign, |μ| <= 37.
        t: (T,), finite, not negative, not decreasing.

    Returns:
        v, δ and entropy at those times: v is (T, J).

    >>> s_j, s_k = solve_bounce([2.0, 1.0], [1e4]).log_inverse_delta[0]
    >>> print(f"{s_j / s_k:.3f}, in the limit {math.exp((2**2 - 1**2) / 2):.3f}")
    4.482, in the limit 4.482
    """
    mu, t = _row(mu, "mu"), _times(t)
    size = np.abs(mu)
    if (largest := float(size.max())) > LARGEST_MU:
        raise ValueError(
            f"|mu| = {largest} overflows e^(mu²/2): keep every |mu| at or below {LARGEST_MU:g}"
        )
    if t[-1] > 0 and largest**2 / 2 + math.log(t[-1]) > 700:
        raise ValueError(f"ln(1/δ) overflows for |mu| = {largest} at t = {t[-1]}: end t earlier")
    s = np.empty((t.size, mu.size))
    order = np.argsort(size)  # neighbours in |μ| share one grid of panels
    blocks = _blocks(t.size, 1)  # of times, should one component's alone be too many
    chunks = [
        order[part] for part in _blocks(mu.size, max(blocks[0].stop, _panel_edges(largest).size))
    ]
    threads = min(len(chunks), os.cpu_count() or 1)

    def work(first: int) -> None:
        # Fresh pages cost as much as the arithmetic, so each thread keeps one buffer.
        buffer = np.empty((_ORDER + 6, chunks[0].size * blocks[0].stop))
        for chunk in chunks[first::threads]:
            for rows in blocks:
                s[rows, chunk] = _invert_flight_time(size[chunk], t[rows], buffer).T

    with ThreadPoolExecutor(threads) as pool:  # NumPy releases the GIL
        list(pool.map(work, range(threads)))
    return Bounce(mu, t, s)


def _blocks(rows: int, columns: int) -> list[slice]:
    step = min(rows, max(1, _WORK // columns))
    return [slice(i, i + step) for i in range(0, rows, step)]


def _panel_edges(mu: float) -> Array:  # (P + 1,)
    """Panels of s over which ln F' changes by about 0.6 at most: degree 11 fits it, and Newton is quick."""
    edges = [0.0]
    while (s := edges[-1]) < _TAIL:
        delta = math.exp(-s)
        edges.append(s + min(0.4 + 0.1 * s, 0.6 / (delta * (1 + mu + mu**2 * (1 - delta)))))
    return np.array(edges)


def _mean_matrix(nodes: Array, weights: Array) -> Array:
    """Values of f at the nodes -> monomial coefficients of its running mean ∫₋₁ʷ f / (1 + w)."""
    n = nodes.size
    means = [
        polynomial.polydiv(legendre.leg2poly(legendre.legint(e, lbnd=-1)), [1, 1])[0]
        for e in np.eye(n)
    ]
    basis = np.column_stack([np.pad(q, (0, n - q.size)) for q in means])  # Legendre -> mean
    project = (np.arange(n) + 0.5)[:, None] * (
        legendre.legvander(nodes, n - 1) * weights[:, None]
    ).T
    return np.asarray(basis @ project)


_NODES, _WEIGHTS = legendre.leggauss(_ORDER)
_MEAN = _mean_matrix(_NODES, _WEIGHTS)


def _invert_flight_time(mu: Array, t: Array, buffer: Array) -> Array:  # (C,), (T,) -> (C, T)
    """Solve F(s, μ) = t: a table of F over panels of s, then Newton within the panel of each time.

    In a panel that starts at s_j, s = s_j + h y with 0 <= y <= 2 and F = F_j + h y Q(y - 1), where Q is the
    running mean of F'. Keeping y outside the polynomial leaves small s relatively exact.
    """
    edges = _panel_edges(float(mu.max()))
    h = np.append(np.diff(edges) / 2, 1.0)  # (P + 1,): the last "panel" is the linear tail
    x = -np.expm1(-(edges[:-1] + h[:-1] * (1 + _NODES[:, None])))  # (n, P)
    slope = np.exp((-0.5 * mu**2)[:, None] * (x * x)[:, None, :])  # (n, C, P): F' at the nodes
    Q = np.zeros((_ORDER, mu.size, edges.size))
    np.einsum(
        "mn,ncp->mcp", _MEAN, slope, out=Q[:, :, :-1]
    )  # not BLAS, whose threads would fight ours
    Q[0, :, -1] = np.exp(-0.5 * mu**2)
    mean = Q[
        0
    ].copy()  # (C, P + 1): Q at the right edge, by the quadrature itself to spare its rounding
    mean[:, :-1] = np.einsum("n,ncp->cp", _WEIGHTS / 2, slope)
    F = np.zeros_like(mean)
    np.cumsum(2 * h[:-1] * mean[:, :-1], axis=1, out=F[:, 1:])

    # Every time t_k falls in the last panel with F_j <= t_k, so a panel is repeated once per time in it.
    repeats = np.diff(np.searchsorted(t, F), axis=1, append=t.size).ravel()
    cell = np.repeat(np.arange(F.size), repeats)  # (C T,)
    panel = cell % edges.size
    buffer = buffer[:, : cell.size]
    tau, scale, y, w, q, dq = buffer[_ORDER:]
    np.take(h, panel, out=scale, mode="clip")  # "raise" would copy to a fresh array
    np.take(F, cell, out=q, mode="clip")
    np.subtract(np.tile(t, mu.size), q, out=tau)
    tau /= scale
    coefficients = np.take(
        Q.reshape(_ORDER, -1), cell, axis=1, out=buffer[:_ORDER], mode="clip"
    )  # (n, C T)

    # F is concave, so after its first step Newton climbs to the root from the left; only y < 0 needs care.
    np.take(mean, cell, out=q, mode="clip")
    np.divide(tau, q, out=y)
    for _ in range(50):
        np.subtract(y, 1, out=w)
        q[:], dq[:] = coefficients[-1], 0.0
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
        np.abs(q, out=q)
        np.multiply(y, 3e-7, out=w)
        if np.all(q <= w):  # quadratic: the next step would be about 1e-14
            break
    y *= scale
    np.take(edges, panel, out=q, mode="clip")
    y += q
    return np.asarray(y).reshape(mu.size, t.size)


_FINE = legendre.leggauss(
    20
)  # in each of six panels of [0, 1]: relatively exact to 1e-14 up to |μ| = 37
_FINE_NODES = (np.arange(6)[:, None] + 0.5 * (_FINE[0] + 1)).ravel() / 6
_FINE_WEIGHTS = np.tile(_FINE[1] / 12, 6)


def remainder(s: ArrayLike, mu: ArrayLike) -> Array:
    """ρ(s, μ) = F - e^{-μ²/2} s, the middle of Eqn. 88, for broadcastable s (``np.inf`` included) and μ.

    The integral over x = v/μ of e^{-μ²x²/2} (1 - e^{-μ²(1-x²)/2}) / (1 - x): entire, free of cancellation.
    """
    X = -np.expm1(-np.asarray(s, dtype=np.float64))
    a = 0.5 * np.square(np.asarray(mu, dtype=np.float64))
    total = np.zeros(np.broadcast_shapes(X.shape, a.shape))
    for node, weight in zip(_FINE_NODES, _FINE_WEIGHTS, strict=True):
        x = X * node
        total += weight * np.exp(-a * x * x) * -np.expm1(-a * (1 - x * x)) / (1 - x)
    return np.asarray(X * total)


def flight_time(s: ArrayLike, mu: ArrayLike) -> Array:
    """F(s, μ), the time at which ln(1/δ) reaches s (Eqn. 79), for broadcastable s and μ.

    A quadrature in x = v/μ, independent of the table in s that :func:`solve_bounce` inverts.
    """
    mu = np.asarray(mu, dtype=np.float64)
    return np.asarray(np.exp(-0.5 * mu**2) * np.asarray(s, dtype=np.float64) + remainder(s, mu))


def remainder_supremum() -> float:
    """The largest ρ over all s and μ, about 0.864: the sharp form of Eqn. 88's √(π/2) + 1."""
    best = minimize_scalar(
        lambda mu: -float(remainder(np.inf, mu)),
        bounds=(0.1, 10.0),
        method="bounded",
        options={"xatol": 1e-8},
    )
    return -float(best.fun)


@dataclass(frozen=True, eq=False)
class Ratio:
    """Eqn. 7: ``ratio`` = ``leading`` (1 + ``Lambda``), and the latter is ``lam`` e^{μ_k²/2} / s_k."""

    ratio: Array
    leading: Array
    Lambda: Array
    lam: Array


def convergence_ratio(s_j: ArrayLike, s_k: ArrayLike, mu_j: ArrayLike, mu_k: ArrayLike) -> Ratio:
    """Compare ln(1/δ_j) with ln(1/δ_k) at equal times as Theorem 4 does; ``lam`` is ρ_k - ρ_j exactly."""
    j, k = np.asarray(s_j, dtype=np.float64), np.asarray(s_k, dtype=np.float64)
    if np.any(k <= 0):
        raise ValueError(
            f"s_k = {k.min()} is not positive: the ratio is undefined at t = 0, drop that time"
        )
    a_j, a_k = (0.5 * np.square(np.asarray(mu, dtype=np.float64)) for mu in (mu_j, mu_k))
    lam = j * np.exp(-a_j) - k * np.exp(-a_k)
    Lambda = lam * np.exp(a_k) / k
    return Ratio(
        np.asarray(j / k), np.asarray(np.exp(a_j - a_k)), np.asarray(Lambda), np.asarray(lam)
    )


def linear_remainder(s: ArrayLike, mu: ArrayLike, c: float) -> Array:
    """q = ln[(c + μv + R√(v²+c)) / (c + R√c)] with R = √(μ²+c): linear attention has R t = s + q exactly."""
    mu, root = np.asarray(mu, dtype=np.float64), _root(c)
    v, R = -np.expm1(-np.asarray(s, dtype=np.float64)) * mu, np.hypot(mu, root)
    return np.asarray(
        np.log1p((mu * v + R * v * v / (np.hypot(v, root) + root)) / (root * (root + R)))
    )


def linear_remainder_bound(mu: ArrayLike, c: float) -> Array:
    """ln[2R² / (c + R√c)], which q approaches from below as v reaches μ (and 0 <= q)."""
    root = _root(c)
    R = np.hypot(np.asarray(mu, dtype=np.float64), root)
    return np.asarray(np.log(2 * R * R / (root * (root + R))))


def linear_ratio_limit(mu_j: ArrayLike, mu_k: ArrayLike, c: float) -> Array:
    """The limit √(μ_j²+c) / √(μ_k²+c) of ln(1/δ_j) / ln(1/δ_k) under linear attention."""
    j, k = np.asarray(mu_j, dtype=np.float64), np.asarray(mu_k, dtype=np.float64)
    return np.asarray(np.hypot(j, _root(c)) / np.hypot(k, _root(c)))


def solve_linear_bounce(mu: ArrayLike, t: ArrayLike, c: float) -> Bounce:
    """Solve v' = (μ - v) √(v² + c) from v(0) = 0: linear attention, where z² - v² = c = z(0)².

    Arguments:
        mu: (J,), either sign.
        t: (T,), finite, not negative, not decreasing.
        c: z(0)² > 0.

    Returns:
        v, δ and entropy at those times: v is (T, J).
    """
    mu, t, root = _row(mu, "mu"), _times(t), _root(c)
    R, bound = np.hypot(mu, root), linear_remainder_bound(mu, c)
    solution = np.empty((t.size, mu.size))
    for rows in _blocks(t.size, mu.size):
        time = t[rows, None]
        # Newton climbs a concave function without overstepping; q <= bound and s' >= √c start it below.
        s = np.maximum(R * time - bound, root * time)
        for _ in range(200):
            z = np.hypot(_v(s, mu), root)
            step = (R * time - s - linear_remainder(s, mu, c)) * z / R
            s = np.maximum(s + step, 0.0)
            if np.all(np.abs(step) <= 1e-8 * s):
                break
        solution[rows] = s
    return Bounce(mu, t, solution, LinearAttention(c))


def solve_softmax_bounce(
    mu: ArrayLike, t: ArrayLike, temperature: float = 3.0, v0: float = 0.05
) -> Bounce:
    """Solve v' = (μ - v) softmax(v² / temperature) from v = v0, the variant behind the paper's Figure 4.

    Every μ must lie beyond v0 (μ > v0 or μ < 0 when v0 > 0), because ln(1/δ) has no value elsewhere.

    Arguments:
        mu: (J,).
        t: (T,), finite, not negative, not decreasing.
        temperature: divides v²; the figure uses 3.
        v0: where every component starts.

    Returns:
        v, δ and entropy at those times: v is (T, J).
    """
    mu, t = _row(mu, "mu"), _times(t)
    if not temperature > 0:
        raise ValueError(
            f"temperature = {temperature} must be positive (the paper's figure uses 3)"
        )
    short = np.zeros(mu.shape, dtype=bool) if v0 == 0 else mu * mu <= v0 * mu
    if np.any(short):
        raise ValueError(
            f"mu = {mu[short][0]} is not beyond v0 = {v0}: choose v0 between 0 and every mu"
        )
    start = np.zeros(mu.shape) if v0 == 0 else -np.log1p(-v0 / mu)
    attention = ExpAttention(temperature)

    def slope(_: float, s: Array) -> Array:
        return np.asarray(softmax(attention.log_weight(_v(s, mu))))

    times, back = np.unique(t, return_inverse=True)
    if times[-1] == 0:
        return Bounce(mu, t, np.tile(start, (t.size, 1)), attention)
    # In s the flow is not stiff: the slopes are probabilities that settle.
    flow = solve_ivp(slope, (0.0, times[-1]), start, "DOP853", times, rtol=1e-12, atol=1e-13)
    if not flow.success:
        raise RuntimeError(f"the softmax flow stopped at t = {flow.t[-1]}: {flow.message}")
    return Bounce(mu, t, flow.y.T[back], attention)


def _row(values: ArrayLike, name: str) -> Array:
    array = finite(values, name, 1)
    if not array.size:
        raise ValueError(f"{name} is empty: give at least one number")
    return array


def _times(t: ArrayLike) -> Array:
    array = _row(t, "t")
    if array[0] < 0:
        raise ValueError(f"t = {array[0]} is negative: times start at 0")
    falls = np.flatnonzero(np.diff(array) < 0)
    if falls.size:
        raise ValueError(
            f"t falls from {array[falls[0]]} to {array[falls[0] + 1]}: sort the times first"
        )
    return array


def _root(c: float) -> float:
    if not 0 < c < math.inf:
        raise ValueError(
            f"c = z(0)² = {c} must be positive: with z(0) = v(0) = 0 nothing moves, so set z(0)"
        )
    return math.sqrt(c)
