"""The optimisers that people train with, on the joint flow; and what becomes of Theorem 1's first integrals under them.

With θ = (v, ξ, z), Δ_t = θ_{t+1} − θ_t, step size h and the rates η, η_z = r η as in the flow, let

    exp      Q = z − (r/2T) Σ_k v_k²      B(θ, δ) = δz − (r/T) Σ_k v_k δv_k        B(Δ, N) = −(r/T) Σ_k Δv_k N_k
    linear   Q = z² − r Σ_k v_k²          B(θ, δ) = 2 (z δz − r Σ_k v_k δv_k)      B(Δ, N) = 2 (Δz N_z − r Σ_k Δv_k N_k)

so that ΔQ_t = B(θ_t, Δ_t) + ½B(Δ_t, Δ_t) whatever the optimiser, and B(θ, rate · gradient) = 0: the gradient identity
behind Theorem 1. SGD with momentum μ and weight decay λ (rates λ_v = ηλ, λ_z = η_zλ of v and z) moves by

    N_t = μ N_{t−1} + h · rate · (gradient_t − λθ_t),     Δ_t = N_t      (Nesterov: Δ_t = μN_t + the last term),

which gives an exact law per step, with d_t = B(θ_t, −h · rate · λθ_t) and R_t = B(θ_t, N_t):

    R_t = μ (R_{t−1} + B(Δ_{t−1}, N_{t−1})) + d_t,     ΔQ_t = R_t (Nesterov: μR_t + d_t) + ½B(Δ_t, Δ_t).

In continuous time momentum has Q̈ + γQ̇ = −(r/T) Σ_k v̇_k², and decay

    Q(t) = e^{−λ_z t}Q₀ + (r/T)(λ_v − λ_z/2) ∫ e^{−λ_z(t−s)} Σ_k v_k²(s) ds,     at rest z = (r/T)(λ_v/λ_z) Σ_k v_k².

One ``weight_decay`` for both gives z = Σ_k v_k²/T whatever the rates: twice the printed coefficient at T = 1. Under
softmax attention the sums Σ_l z_l and Σ_l v_lk − ξ_k are linear in θ: SGD and momentum keep them to rounding, decay
shrinks them.

Sign descent (one node) has z − r|v| = const, up to the steps in which v changes sign. Adam divides the averaged
gradient m by D = √ν + ε: with β₁ = 0, D_z Δz = (r/T) Σ_k v_k D_k Δv_k in every step, otherwise with the memory
m_z − (1/T) Σ_k v_k m_k = P_t, P_t = β₁ (P_{t−1} − (1/T) Σ_k Δv_k m_k|_{t−1}).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from joma.theory.setting import Array

if TYPE_CHECKING:
    from joma.theory._integrate import System
    from joma.theory.flows import Flow

Decay = float | tuple[float, float]  # of (v, ξ) and z, or one value for both


def _check(name: str, value: float, below: float = np.inf) -> None:
    if not (np.isfinite(value) and 0 <= value < below):
        limit = f"0 ≤ {name} < {below:g}" if np.isfinite(below) else f"{name} ≥ 0"
        raise ValueError(f"{name} must be a number with {limit}, got {value!r}")


def _pair(decay: Decay) -> tuple[float, float]:
    mlp, attention = decay if isinstance(decay, tuple) else (decay, decay)
    _check("weight_decay", mlp)
    _check("weight_decay", attention)
    return float(mlp), float(attention)


class Step(NamedTuple):
    """One step: Δθ = h · rate · direction − h · rate · decay · θ, and the memory for the next."""

    direction: Array  # (D,)
    memory: tuple[Array, ...]
    decay: Array | float = 0.0  # decoupled decay, (D,)


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum and weight decay, as in ``torch.optim.SGD``.

    Arguments:
        momentum: μ of the heavy ball, or of Nesterov's variant.
        weight_decay: λ for all parameters, or a pair for (v, ξ) and z.
        nesterov: look ahead.
    """

    momentum: float = 0.0
    weight_decay: Decay = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check("momentum", self.momentum, 1.0)
        _pair(self.weight_decay)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs a momentum > 0")

    def step(
        self, gradient: Array, y: Array, decay: Array, memory: tuple[Array, ...], n: int
    ) -> Step:
        """The step from state y (D,) with ascent direction ``gradient`` (D,)."""
        gradient = gradient - decay * y
        if self.momentum == 0:
            return Step(gradient, ())
        m = self.momentum * memory[0] + gradient if memory else gradient
        return Step(gradient + self.momentum * m if self.nesterov else m, (m,))


@dataclass(frozen=True)
class SignDescent:
    """Every parameter moves by its learning rate in the direction of its gradient's sign; 0 where it has none."""

    weight_decay: Decay = 0.0

    def __post_init__(self) -> None:
        _pair(self.weight_decay)

    def step(
        self, gradient: Array, y: Array, decay: Array, memory: tuple[Array, ...], n: int
    ) -> Step:
        """The step from state y (D,) with ascent direction ``gradient`` (D,)."""
        return Step(np.sign(gradient), (), decay)


@dataclass(frozen=True)
class Adam:
    """Adam as in ``torch.optim.Adam``: the averaged gradient over the root of its averaged square.

    Arguments:
        betas: of the two averages; β₁ = 0 is RMSprop with bias correction.
        eps: added to the root.
        weight_decay: λ for all parameters, or a pair for (v, ξ) and z; added to the gradient.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: Decay = 0.0

    def __post_init__(self) -> None:
        for n, beta in enumerate(self.betas):
            _check(f"betas[{n}]", beta, 1.0)
        _check("eps", self.eps)
        _pair(self.weight_decay)

    def step(
        self, gradient: Array, y: Array, decay: Array, memory: tuple[Array, ...], n: int
    ) -> Step:
        """The step from state y (D,) with ascent direction ``gradient`` (D,). The memory is (m, ν, D)."""
        return self._adapted(gradient - decay * y, memory, n)

    def _adapted(
        self, gradient: Array, memory: tuple[Array, ...], n: int, decay: Array | float = 0.0
    ) -> Step:
        first, second = self.betas
        m, nu = memory[:2] if memory else (np.zeros_like(gradient), np.zeros_like(gradient))
        m, nu = first * m + (1 - first) * gradient, second * nu + (1 - second) * gradient**2
        divisor = np.sqrt(nu / (1 - second ** (n + 1))) + self.eps
        safe = np.where(divisor > 0, divisor, 1.0)
        return Step(m / (1 - first ** (n + 1)) / safe, (m, nu, divisor), decay)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, as in ``torch.optim.AdamW`` (whose own default is 0.01)."""

    weight_decay: Decay = 0.01

    def step(
        self, gradient: Array, y: Array, decay: Array, memory: tuple[Array, ...], n: int
    ) -> Step:
        """The step from state y (D,) with ascent direction ``gradient`` (D,). The memory is (m, ν, D)."""
        return self._adapted(gradient, memory, n, decay)


Optimiser = SGD | SignDescent | Adam | AdamW
PLAIN = SGD()  # gradient descent


class Moment(NamedTuple):
    """A state on the way, and the optimiser's memory after the step that led to it."""

    y: Array  # (D,)
    memory: tuple[Array, ...]


def walk(system: System, optimiser: Optimiser, step: float) -> Iterator[Moment]:
    """The states after 1, 2, … steps of the optimiser from the system's start, without end."""
    block, chart, y = system.block, system.chart, system.y0
    logits = chart.unpack(y)[2].size  # they come last in the state vector
    weights = np.arange(y.size) < y.size - logits
    rate = np.where(weights, block.mlp_lr, block.attention_lr)
    decay = np.where(weights, *_pair(optimiser.weight_decay))
    memory: tuple[Array, ...] = ()
    n = 0
    while True:
        with np.errstate(over="ignore", invalid="ignore"):
            tangent = chart.tangent(block.smooth_velocity(*chart.unpack(y)))
            if optimiser == PLAIN:
                y = y + step * tangent
            else:
                moved = optimiser.step(tangent / np.where(rate > 0, rate, 1.0), y, decay, memory, n)
                y = y * (1 - step * rate * moved.decay) + step * rate * moved.direction
                memory = moved.memory
        n += 1
        yield Moment(y, memory)


def sgd_law(flow: Flow, optimiser: SGD, step: float, v: Array, z: Array) -> Array:
    """Q_t − Q_0 (T, M) of exp or linear attention along SGD's path v (T, M, K), z (T, M), from the exact law."""
    r, T, linear = flow.ratio, flow.attention.temperature, flow.attention.kind == "linear"
    if flow.attention.kind == "softmax":
        raise ValueError(
            "softmax attention has linear laws, which SGD keeps as they are; see joma.theory.laws"
        )
    mlp, attention = _pair(optimiser.weight_decay)
    lambda_v, lambda_z = step * flow.mlp_lr * mlp, step * flow.attention_lr * attention

    def product(n: int, dz: Array, dv: Array) -> Array:
        """B(θ_n, δ), (M,)."""
        if linear:
            return 2 * (z[n] * dz - r * (v[n] * dv).sum(axis=1))
        return dz - r / T * (v[n] * dv).sum(axis=1)

    def second(dz: Array, dv: Array, nz: Array, nv: Array) -> Array:
        """B(Δ, N), (M,)."""
        return (
            2 * (dz * nz - r * (dv * nv).sum(axis=1)) if linear else -r / T * (dv * nv).sum(axis=1)
        )

    mu, out = optimiser.momentum, np.zeros_like(z)
    carried = np.zeros(z.shape[1])  # μ (R + B(Δ, N)) of the step before
    last_z, last_v = np.zeros_like(z[0]), np.zeros_like(v[0])  # N of the step before
    for n in range(len(z) - 1):
        dz, dv = z[n + 1] - z[n], v[n + 1] - v[n]
        if optimiser.nesterov:  # Δ = (1 + μ) N − μ N of the step before
            nz, nv = (dz + mu * last_z) / (1 + mu), (dv + mu * last_v) / (1 + mu)
        else:
            nz, nv = dz, dv
        decayed = product(n, -lambda_z * z[n], -lambda_v * v[n])
        memory = carried + decayed
        moved = mu * memory + decayed if optimiser.nesterov else memory
        out[n + 1] = out[n] + moved + second(dz, dv, dz, dv) / 2
        carried = mu * (memory + second(dz, dv, nz, nv))
        last_z, last_v = nz, nv
    return out
