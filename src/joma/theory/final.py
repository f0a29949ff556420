"""Where attention ends, without integrating anything (beyond Theorems 1 and 2).

Linear nodes see their context through u = σ(z/T) v only: h = uᵀx/A + ξ, and the loss is convex in (u, ξ). The first
integral turns u back into logits. With r = η_z/η and, for exp attention, c = z(0) − (r/2T) ‖v(0)‖²,

    exp      z_l = c_l + (T/2) W((r/T²) e^{−2c_l/T} ‖u_l‖²)         (Lambert's W)
    linear   z_l² = (c_l + √(c_l² + 4 r T² ‖u_l‖²)) / 2,   c = z(0)² − r ‖v(0)‖² > 0, z keeps its sign

at all times, for any number of nodes and any start: with q = (r/T²)‖v‖² exp attention has q e^q = (r/T²)e^{−2c/T}‖u‖².
The flow of u is u̇ = −η P(u) ∇_u L with P positive definite, so where the minimiser is unique, that is where it ends.

*Softmax loss*: Σ_k g_k = 0, so Σ_k v_lk never moves. Only the class-centred part of u is determined; it and the
class-centred part of v(0) take the places of u and v(0) above.

*Not unique, one node*: the flow is a mirror flow, d/dt θ = −η ∇_u L with the dual variable, s = √r/T,

    exp      θ_l = e^{−c_l/T} √(π/2)/s · erf(s v_l/√2)           linear   θ_l = (T/√r) sgn(z_l) asinh(√(r/c_l) v_l)

so it ends in the Bregman projection of its start onto the minimisers, under the potential Φ with ∇Φ = θ: for exp
attention ridge regression for small u and the lasso for large, for linear attention the hypentropy.

*Not unique, several nodes*: the metric is not a Hessian, no potential exists, and the end depends on the whole way:
integrate.

*Separable data* have no minimiser: u grows like ln t and exp attention's z like ln ln t. A linear programme decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.optimize
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import null_space
from scipy.sparse import coo_array
from scipy.special import erf, logsumexp, softmax, wrightomega

from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Attention, Task


@dataclass(frozen=True, eq=False)
class FinalAttention:
    """The end of a joint flow: logits z, weights v and biases ξ, and the u = σ(z/T) v in which the loss is convex."""

    z: Array  # (M,)
    v: Array = field(repr=False)  # (M, K)
    xi: Array = field(repr=False)  # (K,)
    u: Array = field(repr=False)  # (M, K)
    loss: float  # at the end: mean cross-entropy in nats, or half the mean squared error
    by: str  # "the unique minimiser", or "the mirror flow"
    kind: Attention = field(repr=False)

    def attention(self, x: ArrayLike) -> Array:
        """Attention scores b (N, M) that samples x (N, M) end with."""
        return self.kind.weights(self.z, np.asarray(x, dtype=np.float64))


def final_attention(
    task: Task,
    v0: ArrayLike | None = None,
    xi0: ArrayLike | None = None,
    z0: ArrayLike | None = None,
    *,
    attention: str | Attention = "exp",
    mlp_lr: float = 1.0,
    attention_lr: float = 1.0,
    temperature: float | None = None,
    A: float | None = None,
) -> FinalAttention:
    """The logits, weights and biases in which a joint flow with linear nodes ends.

    Arguments:
        task: ``Task.classification`` or ``Task.regression``; constant gradients have no end (see ``winner_take_all``).
        v0, xi0, z0: the start, (M, K), (K,) and (M,); zeros where none is given.
        attention: "exp", or "linear" with z(0)² > r Σ_k v(0)².
        mlp_lr, attention_lr, temperature, A: as for ``JointFlow``.

    Returns:
        Where it ends. A ValueError says so where there is no end (separable data), or none that is known without
        integrating (several nodes, and a loss with many minimisers).

    >>> task = Task.regression([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [[2.0], [1.0], [3.0]])
    >>> final_attention(task).z.round(6)  # u* = (2, 1): z = ½ W(u²)
    array([0.601084, 0.283572])
    """
    flow = JointFlow(
        task, attention, mlp_lr=mlp_lr, attention_lr=attention_lr, temperature=temperature, A=A
    )
    kind = flow.attention
    if kind.kind == "softmax":
        raise ValueError(
            "under softmax attention z is no function of v and ξ (see joma.theory.laws), so its end is not known "
            "without integrating; attention='exp' has one"
        )
    if task.loss == "fixed":
        raise ValueError(
            "constant gradients have no end: the loss is linear, and some token wins; see winner_take_all"
        )
    v, xi, z = flow.start(v0, xi0, z0)
    means = v.mean(axis=1, keepdims=True), xi.mean()
    if task.loss == "classification":  # what a softmax loss never moves
        v, xi = v - means[0], xi - means[1]
    else:
        means = np.zeros_like(means[0]), 0.0
    chart = _chart(flow, v, z)
    seen = np.flatnonzero((task.x[task.p > 0] != 0).any(axis=0))
    design = np.hstack([task.x[:, seen] / kind.A, np.ones((task.samples, 1))])  # (N, m + 1)
    fit = _minimiser(task, design)
    free = _null_space(design[task.p > 0])
    u = chart.u(v)
    by = "the unique minimiser"
    if free.shape[1] and flow.attention_lr > 0:
        if task.nodes > 1:
            raise ValueError(
                f"the loss has many minimisers ({free.shape[1]} free directions per node) and several nodes: which one "
                "the flow ends in depends on the whole way, since no potential exists; integrate"
            )
        by = "the mirror flow"
        fit = _project(chart, seen, fit, free, np.append(u[seen], xi[None], axis=0))
    elif free.shape[
        1
    ]:  # attention is frozen: gradient descent in u with constant steps, each node on its own
        by = "the mirror flow"
        weight = np.append(chart.gain(v)[seen], 1.0)[:, None]  # u̇ = −η σ² ∇L
        start = np.append(u[seen], xi[None], axis=0)
        inner = free.T @ (free / weight**2)
        fit = fit - free @ np.linalg.solve(inner, free.T @ ((fit - start) / weight**2))
    u[seen], end_xi = fit[:-1], fit[-1]
    end_v, end_z = chart.back(u)
    h = design @ fit
    return FinalAttention(
        z=end_z,
        v=end_v + means[0],
        xi=end_xi + means[1],
        u=chart.gain_at(end_z)[:, None] * (end_v + means[0]),
        loss=_loss(task, h),
        by=by,
        kind=kind,
    )


# -- the two charts: (v, z) on its invariant, u, and the dual variable ---------------------------------------


def _chart(flow: JointFlow, v: Array, z: Array) -> _Exp | _Linear:
    r, T = flow.ratio, flow.attention.temperature
    square = (v**2).sum(axis=1)
    if flow.attention.kind == "exp":
        return _Exp(z - r / (2 * T) * square, r, T)
    c = z**2 - r * square
    if (c <= 0).any():
        l = int(c.argmin())
        raise ValueError(
            f"linear attention of token {l} has z(0)² − r Σ_k v(0)² = {c[l]:.3g} ≤ 0: its logit can pass through zero, "
            "or stay there, and the end is not known without integrating; start with a larger |z0|"
        )
    return _Linear(c, r, T, np.sign(z))


@dataclass(frozen=True, eq=False)
class _Exp:
    """exp attention: u = e^{z/T} v with z = c + (r/2T) ‖v‖². The factor 1/A is in the design."""

    c: Array  # (M,)
    r: float
    T: float

    @property
    def s(self) -> float:
        return float(np.sqrt(self.r) / self.T)

    def gain_at(self, z: Array) -> Array:
        return np.exp(z / self.T)

    def gain(self, v: Array) -> Array:
        return self.gain_at(self.c + self.r / (2 * self.T) * (v**2).sum(axis=1))

    def u(self, v: Array) -> Array:
        return self.gain(v)[:, None] * v

    def back(self, u: Array) -> tuple[Array, Array]:
        """(v, z) of u (M, K)."""
        half = self._exponent(self.s**2 * (u**2).sum(axis=1), self.c) / 2
        z = self.c + self.T * half
        return np.exp(-z / self.T)[:, None] * u, z

    def _exponent(self, square: Array, c: Array) -> Array:
        """q = W(e^{−2c/T} s²‖u‖²), through Wright's ω(x) = W(eˣ), which does not overflow."""
        with np.errstate(divide="ignore"):
            return wrightomega(np.log(square) - 2 * c / self.T)

    def dual(self, u: Array, tokens: NDArray[np.intp]) -> tuple[Array, Array, Array]:
        """θ, dθ/du and Φ(u) (n,) of one node."""
        c = self.c[tokens]
        q = self._exponent(self.s**2 * u**2, c)
        v = u * np.exp(-c / self.T - q / 2)
        theta = np.exp(-c / self.T) * np.sqrt(np.pi / 2) / self.s * erf(self.s * v / np.sqrt(2))
        return theta, np.exp(-2 * c / self.T - q) / (1 + q), theta * u - v**2 / 2


@dataclass(frozen=True, eq=False)
class _Linear:
    """Linear attention: u = z v / T with z² = c + r ‖v‖² and c > 0, so that z keeps its sign."""

    c: Array  # (M,)
    r: float
    T: float
    sign: Array  # (M,)

    def gain_at(self, z: Array) -> Array:
        return z / self.T

    def gain(self, v: Array) -> Array:
        return self.sign * np.sqrt(self.c + self.r * (v**2).sum(axis=1)) / self.T

    def u(self, v: Array) -> Array:
        return self.gain(v)[:, None] * v

    def back(self, u: Array) -> tuple[Array, Array]:
        """(v, z) of u (M, K)."""
        root = np.hypot(self.c, 2 * np.sqrt(self.r) * self.T * np.linalg.norm(u, axis=1))
        z = self.sign * np.sqrt((self.c + root) / 2)
        return self.T * u / z[:, None], z

    def dual(self, u: Array, tokens: NDArray[np.intp]) -> tuple[Array, Array, Array]:
        """θ, dθ/du and Φ(u) (n,) of one node."""
        scale, c = 2 * np.sqrt(self.r) * self.T, self.c[tokens]  # u = c sinh(2ρ)/scale, θ = T ρ/√r
        double = np.arcsinh(scale * u / c)
        theta = self.T / (2 * np.sqrt(self.r)) * double
        root = np.hypot(c, scale * u)
        return theta, self.T**2 / root, theta * u - (root - c) / (4 * self.r)


# -- the convex problem ------------------------------------------------------------------------------------


def _loss(task: Task, h: Array) -> float:
    if task.loss == "regression":
        return float(0.5 * task.p @ ((task.g - h) ** 2).sum(axis=1))
    return float(task.p @ (logsumexp(h, axis=1) - (task.g * h).sum(axis=1)))


def _null_space(design: Array) -> Array:
    size = np.linalg.norm(design, axis=0)
    triangle = np.linalg.qr(
        design / size, mode="r"
    )  # the same null space, and no more rows than columns
    return null_space(triangle, rcond=1e-10) / size[:, None]


def _minimiser(task: Task, design: Array) -> Array:
    """A minimiser (m + 1, K) of the loss; class-centred under a softmax loss."""
    used = task.p > 0
    if task.loss == "regression":
        root = np.sqrt(task.p[used])[:, None]
        size = np.linalg.norm(root * design[used], axis=0)
        return (
            np.linalg.lstsq(root * design[used] / size, root * task.g[used], rcond=1e-10)[0]
            / size[:, None]
        )
    if task.nodes == 1:
        return np.zeros((design.shape[1], 1))  # the loss of one class is constant
    if _separable(design[used], task.g[used]):
        raise ValueError(
            "the data are separable: the loss has no minimiser and attention no end. u grows like ln t and, under exp "
            "attention, z like ln ln t; add samples that disagree, soften the labels, or integrate to a finite time"
        )
    return _cross_entropy(design[used], task.g[used], task.p[used])


def _separable(design: Array, labels: Array) -> bool:
    """Whether some direction of (u, ξ) raises no sample's loss, and lowers one: then the loss has no minimiser.

    That is D with (xᵀD)_k ≥ (xᵀD)_j for all samples, classes k with positive label and all j, not all equal. The
    largest sum of these margins within a box is zero or positive: a linear programme.
    """
    columns, K = design.shape[1], labels.shape[1]
    sample, k, j = np.nonzero((labels[:, :, None] > 0) & ~np.eye(K, dtype=bool))
    rows = np.arange(len(sample))
    x = design[sample] / np.abs(design).max(axis=0)
    column = np.arange(columns) * K
    entries = np.concatenate([x.ravel(), -x.ravel()])
    places = np.concatenate([(column + k[:, None]).ravel(), (column + j[:, None]).ravel()])
    margins = coo_array(
        (entries, (np.tile(np.repeat(rows, columns), 2), places)), (len(rows), columns * K)
    ).tocsr()
    total: Array = np.asarray(margins.sum(axis=0), dtype=np.float64).ravel()
    best: Any = scipy.optimize.linprog(
        -total, A_ub=-margins, b_ub=np.zeros(len(rows)), bounds=(-1, 1), method="highs"
    )  # type: ignore[call-overload]
    if best.status != 0:
        raise ArithmeticError(f"whether the data are separable was not decided: {best.message}")
    return bool(-best.fun > 1e-6)


def _cross_entropy(design: Array, labels: Array, p: Array) -> Array:
    """The class-centred minimiser (m + 1, K) of the mean cross-entropy, by Newton's method to rounding."""
    K = labels.shape[1]
    centred = null_space(np.ones((1, K)))  # (K, K − 1)
    _, singular, right = np.linalg.svd(np.sqrt(p)[:, None] * design, full_matrices=False)
    kept = singular > 1e-10 * singular[0]
    basis = (
        right[kept].T / singular[kept]
    )  # (m + 1, n): coordinates in which the design is orthonormal
    x = design @ basis
    shape = (basis.shape[1], K - 1)

    def logits(beta: Array) -> Array:
        return x @ beta.reshape(shape) @ centred.T

    def value(beta: Array) -> float:
        h = logits(beta)
        return float(p @ (logsumexp(h, axis=1) - (labels * h).sum(axis=1)))

    def gradient(beta: Array) -> Array:
        return (x.T @ (p[:, None] * (softmax(logits(beta), axis=1) - labels)) @ centred).ravel()

    def hessian(beta: Array) -> Array:
        q = softmax(logits(beta), axis=1)
        inner = np.einsum("ka,nk,kb->nab", centred, q, centred, optimize=True)
        mean = q @ centred
        inner -= mean[:, :, None] * mean[:, None, :]
        return np.einsum("n,ni,nj,nab->iajb", p, x, x, inner, optimize=True).reshape(
            beta.size, beta.size
        )

    beta = newton(value, gradient, hessian, np.zeros(shape[0] * shape[1]))
    return basis @ beta.reshape(shape) @ centred.T


def newton(
    value: Callable[[Array], float],
    gradient: Callable[[Array], Array],
    hessian: Callable[[Array], Array],
    start: Array,
    *,
    steps: int = 200,
) -> Array:
    """The minimiser of a strictly convex smooth function, to rounding: Newton's method with a line search."""
    y = start
    for _ in range(steps):
        g = gradient(y)
        step = -scipy.linalg.solve(hessian(y), g, assume_a="pos")
        decrease = -float(g @ step)
        if np.abs(step).max(initial=0.0) <= 1e-14 * max(1.0, np.abs(y).max(initial=0.0)):
            return y
        size, here = 1.0, value(y)
        # near the minimum the value cannot tell any more; there full steps converge quadratically
        while (
            decrease > 1e-10 * max(abs(here), 1e-3)
            and value(y + size * step) > here - 1e-4 * size * decrease
        ):
            size /= 2
            if size < 1e-12:
                break
        y = y + size * step
        if size == 1.0 and decrease <= 1e-28 * max(1.0, abs(here)):
            return y
    raise ArithmeticError(
        f"Newton's method has not converged in {steps} steps; the decrement is {decrease:.2e}"
    )


def _project(
    chart: _Exp | _Linear, tokens: NDArray[np.intp], fit: Array, free: Array, start: Array
) -> Array:
    """The point of fit + span(free), (m + 1, 1), with the least Bregman divergence from the start; ξ is Euclidean."""
    theta0, _, _ = chart.dual(start[:-1, 0], tokens)

    def parts(n: Array) -> tuple[Array, Array, Array, Array]:
        point = fit[:, 0] + free @ n
        return point, *chart.dual(point[:-1], tokens)

    def value(n: Array) -> float:
        point, _, _, potential = parts(n)
        return float(
            (potential - theta0 * point[:-1]).sum() + 0.5 * (point[-1] - start[-1, 0]) ** 2
        )

    def gradient(n: Array) -> Array:
        point, theta, _, _ = parts(n)
        return free.T @ np.append(theta - theta0, point[-1] - start[-1, 0])

    def hessian(n: Array) -> Array:
        _, _, slope, _ = parts(n)
        return free.T @ (np.append(slope, 1.0)[:, None] * free)

    near = np.linalg.lstsq(free, start[:, 0] - fit[:, 0], rcond=None)[0]
    n = newton(value, gradient, hessian, near.astype(np.float64))
    return (fit[:, 0] + free @ n)[:, None]
