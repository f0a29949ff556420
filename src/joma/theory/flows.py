"""The joint flow of MLP and attention (Eqn. 2), and what it shares with the folded one.

With s_ik = p_i g_ik φ′(a_ik) the gradient flow reads, for orthonormal embeddings,

    v̇_k = η Σ_i s_ik b_i,     ξ̇_k = η Σ_i s_ik,     ż = η_z Σ_ik s_ik (∂b_i/∂z)ᵀ v_k

with η = ``mlp_lr`` and η_z = ``attention_lr``. An explicit embedding U = [U_C, u_m] (d, M + 1) makes
``w`` (d, K) the state: v = U_Cᵀ w, ξ = u_mᵀ w and ẇ = η U [Σ s b; Σ s].
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.theory._integrate import OVERFLOW, Solution, integrate
from joma.theory.setting import Array, Attention, Task, as_activation, finite
from joma.theory.trajectory import Slide, Trajectory

Pairs = tuple[NDArray[np.intp], NDArray[np.intp]]  # samples (n,) and nodes (n,)


@dataclass(frozen=True, eq=False)
class Velocity:
    """The right-hand side in the coordinates (v, ξ, z), with what the kink solver needs to know beside it."""

    v: Array  # (M, K)
    xi: Array  # (K,)
    z: Array  # (M,)
    B: Array  # (M, K)  Σ_i s_ik b_i, the MLP gradient before embedding and rate
    sigma: Array  # (K,)  Σ_i s_ik


class Flow:
    """What joint and folded flow share: the block of Eqn. 1, its gradients, and the integration."""

    def __init__(
        self,
        task: Task,
        attention: str | Attention = "softmax",
        activation: Any = "linear",
        mlp_lr: float = 1.0,
        attention_lr: float = 1.0,
        *,
        temperature: float | None = None,
        A: float | None = None,
        embedding: ArrayLike | None = None,
    ) -> None:
        if not isinstance(task, Task):
            raise TypeError(f"task must be a joma.theory.Task, got {type(task).__name__}; make one with Task(x, g)")
        if isinstance(attention, Attention):
            if temperature is not None or A is not None:
                raise ValueError("temperature and A are already part of the given Attention; give them once")
        else:
            attention = Attention(attention, 1.0 if temperature is None else temperature, 1.0 if A is None else A)
        attention.check(task)
        if not (np.isfinite(mlp_lr) and mlp_lr > 0):
            raise ValueError(f"mlp_lr must be a positive number, got {mlp_lr}")
        if not (np.isfinite(attention_lr) and attention_lr >= 0):
            raise ValueError(f"attention_lr must be ≥ 0 (0 freezes attention), got {attention_lr}")
        self.task, self.attention, self.activation = task, attention, as_activation(activation)
        self.mlp_lr, self.attention_lr = float(mlp_lr), float(attention_lr)
        self.embedding: Array | None = None
        self._gram: Array | None = None
        if embedding is not None:
            self.embedding = finite(embedding, "embedding", 2)
            if self.embedding.shape[1] != task.tokens + 1:
                raise ValueError(
                    f"embedding must be (d, M + 1) = (d, {task.tokens + 1}): one column a context token, the query "
                    f"last; got shape {self.embedding.shape}"
                )
            self._gram = self.embedding.T @ self.embedding
        # samples with equal attention never part, so the flow integrates them as one
        self._merged, self._first = task.merged(attention.rows(task.x))
        self._x, self._p = self._merged.x, self._merged.p

    @property
    def ratio(self) -> float:
        """r = attention_lr / mlp_lr, the only way in which the two rates enter the first integrals."""
        return self.attention_lr / self.mlp_lr

    @property
    def slopes(self) -> tuple[float, float] | None:
        """(c₋, c₊) of a piecewise linear activation, None for a smooth one."""
        return self.activation.slopes

    # -- the block ---------------------------------------------------------------------------------------

    def forward(self, v: Array, xi: Array, z: Array) -> tuple[Array, Array]:
        """Attention b (n, M) and pre-activations a (n, K) of the distinct samples."""
        b = self.attention.weights(z, self._x)
        return b, b @ v + xi

    def drives(self, a: Array, gates: Array) -> Array:
        """p_i g_ik, (n, K). Piecewise linear outputs are h = γ a with the gates given, also a little beyond a kink:
        within one regime the field stays smooth, or a step across a kink would be refused again and again."""
        return self._p[:, None] * self._merged.gradient(self.activation.phi(a) if self.slopes is None else gates * a)

    def forces(self, a: Array, gates: Array) -> Array:
        """s_ik = p_i g_ik γ_ik, (n, K)."""
        return self.drives(a, gates) * gates

    def velocity(self, v: Array, b: Array, s: Array) -> Velocity:
        """Eqn. 2 for forces ``s`` (n, K)."""
        B, sigma = b.T @ s, s.sum(axis=0)
        if self._gram is None:
            v_dot, xi_dot = self.mlp_lr * B, self.mlp_lr * sigma
        else:
            both = self.mlp_lr * (self._gram @ np.vstack([B, sigma]))
            v_dot, xi_dot = both[:-1], both[-1]
        return Velocity(v_dot, xi_dot, self.z_velocity(v, b, s, B), B, sigma)

    def z_velocity(self, v: Array, b: Array, s: Array, B: Array) -> Array:
        """ż = η_z Σ_ik s_ik (∂b_i/∂z)ᵀ v_k, (M,)."""
        if self.attention.kind == "linear":
            pulled = (v * (self._x.T @ s)).sum(axis=1)
        else:
            pulled = (v * B).sum(axis=1)
            if self.attention.kind == "softmax":
                pulled -= b.T @ ((b @ v) * s).sum(axis=1)
        return (self.attention_lr / self.attention.temperature) * pulled

    def uncertainty(self, v: Array, xi: Array, z: Array, rtol: float, atol: float) -> Array:
        """How far off the pre-activations are if the state is, by atol + rtol |·| in each coordinate, (n, K)."""
        size = np.abs(np.vstack([v, xi]))  # (M + 1, K)
        if self.embedding is not None:  # they are sums over the coordinates w
            size = np.abs(self.embedding).T @ np.abs(self.embedding) @ size
        v_error, xi_error, T = atol + rtol * size[:-1], atol + rtol * size[-1], self.attention.temperature
        z_error = self.z_error(v, z, rtol, atol)
        b = np.abs(self.attention.weights(z, self._x))
        moved = (np.abs(self._x) if self.attention.kind == "linear" else b) @ (z_error[:, None] * np.abs(v)) / T
        if self.attention.kind == "softmax":
            moved += (b @ z_error)[:, None] * (b @ np.abs(v)) / T
        return b @ v_error + xi_error + moved

    def z_error(self, v: Array, z: Array, rtol: float, atol: float) -> Array:
        """How far off z is then, (M,)."""
        return atol + rtol * np.abs(z)

    # -- samples on a kink -------------------------------------------------------------------------------

    def z_response(self, v: Array, b: Array, pairs: Pairs) -> Array:
        """ż caused by a unit force on each (sample, node) pair, (n, M)."""
        i, k = pairs
        return self.attention_lr * self.attention.pull(self._x[i], b[i], v.T[k])

    def response(self, v: Array, b: Array, pairs: Pairs) -> Array:
        """G (n, n): the rate of change of pre-activation r caused by a unit force on pair c.

        For the joint flow it is the tangent-kernel Gram matrix, symmetric and positive semi-definite.
        """
        i, k = pairs
        f = np.hstack([b[i], np.ones((len(i), 1))])
        kernel = f @ f.T if self._gram is None else f @ self._gram @ f.T
        G = self.mlp_lr * kernel * (k[:, None] == k[None, :])
        return G + self.attention.pull(self._x[i], b[i], v.T[k]) @ self.z_response(v, b, pairs).T

    def rates(self, v: Array, b: Array, velocity: Velocity, pairs: Pairs) -> Array:
        """ȧ of the pairs, (n,)."""
        i, k = pairs
        moved = self.attention.pull(self._x[i], b[i], v.T[k]) @ velocity.z
        return (b[i] * velocity.v.T[k]).sum(axis=1) + velocity.xi[k] + moved

    # -- state vectors -----------------------------------------------------------------------------------

    def unpack(self, y: Array) -> tuple[Array, Array, Array]:
        """(v, ξ, z) of a state vector."""
        raise NotImplementedError

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative."""
        raise NotImplementedError

    def rechart(self, y: Array) -> Array | None:
        """A better conditioned state vector of the same point, or None; the integrator restarts from it."""
        return None

    def _start(self, v: Array, xi: Array, z: Array, w: Array | None) -> Array:
        raise NotImplementedError

    def _initial(
        self, v0: ArrayLike | None, xi0: ArrayLike | None, z0: ArrayLike | None, w0: ArrayLike | None
    ) -> Array:
        M, K = self.task.tokens, self.task.nodes
        shapes = {"v0": (v0, (M, K)), "xi0": (xi0, (K,)), "z0": (z0, (M,))}
        start = {}
        for name, (value, shape) in shapes.items():
            start[name] = np.zeros(shape) if value is None else finite(value, name, len(shape))
            if start[name].shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {start[name].shape}")
        w = None
        if w0 is not None:
            if self.embedding is None:
                raise ValueError("w0 goes with an explicit embedding; without one give v0 and xi0")
            if v0 is not None or xi0 is not None:
                raise ValueError("give either w0 or (v0, xi0), not both")
            w = finite(w0, "w0", 2)
            if w.shape != (len(self.embedding), K):
                raise ValueError(f"w0 must have shape {(len(self.embedding), K)}, got {w.shape}")
        elif self.embedding is not None:
            w = self.embedding @ np.vstack([start["v0"], start["xi0"]])
        return self._start(start["v0"], start["xi0"], start["z0"], w)

    # -- integration -------------------------------------------------------------------------------------

    def integrate(
        self,
        t_end: float,
        v0: ArrayLike | None = None,
        xi0: ArrayLike | None = None,
        z0: ArrayLike | None = None,
        *,
        w0: ArrayLike | None = None,
        times: int | ArrayLike = 201,
        rtol: float = 1e-12,
        atol: float = 1e-13,
        method: str = "auto",
        max_steps: int = 20_000,
    ) -> Trajectory:
        """Integrate the flow from the given start (zeros where none is given) to ``t_end``.

        Arguments:
            t_end: end of the time span, which starts at 0.
            v0, xi0, z0: start, (M, K), (K,) and (M,).
            w0: start of the weights (d, K) instead of v0 and xi0, with an explicit embedding.
            times: how many evenly spaced output times, or the times themselves.
            rtol, atol: tolerances of the integrator.
            method: a SciPy stepper ("DOP853", "RK45", "Radau", "BDF", "LSODA"), or "auto": DOP853, and LSODA from
                where the flow turns out to be stiff.
            max_steps: give up, with the trajectory so far, after that many steps.

        Returns:
            a ``Trajectory``; its ``status`` is "done", or says why and when the flow ended early.
        """
        if not (isinstance(t_end, (int, float, np.number)) and np.isfinite(t_end) and t_end > 0):
            raise ValueError(f"t_end must be a positive number, got {t_end!r}")
        if isinstance(times, (int, np.integer)):
            if times < 2:
                raise ValueError(f"times must be at least 2 output times, got {times}")
            out = np.linspace(0.0, t_end, int(times))
        else:
            out = finite(times, "times", 1)
            if out.size == 0 or (np.diff(out) <= 0).any() or out[0] < 0 or out[-1] > t_end:
                raise ValueError(f"times must increase within [0, t_end = {t_end:g}]")
        system = copy.copy(self)  # a folded flow's constants and charts belong to one integration
        y0 = system._initial(v0, xi0, z0, w0)
        solution = integrate(system, y0, out, float(t_end), rtol=rtol, atol=atol, method=method, max_steps=max_steps)
        return self._trajectory(solution)

    def _trajectory(self, solution: Solution) -> Trajectory:
        slides = tuple(Slide(int(self._first[i]), k, a, b) for i, k, a, b in solution.slides)
        return Trajectory(
            flow=self,
            t=solution.t,
            v=np.stack(solution.v),
            xi=np.stack(solution.xi),
            z=np.stack(solution.z),
            status=solution.status,
            switches=solution.switches,
            slides=slides,
            w=self._weights(solution),
        )

    def _weights(self, solution: Solution) -> Array | None:
        return None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(N={self.task.samples}, M={self.task.tokens}, K={self.task.nodes}, "
            f"attention={self.attention.kind!r}, activation={self.activation.name!r}, mlp_lr={self.mlp_lr:g}, "
            f"attention_lr={self.attention_lr:g}, temperature={self.attention.temperature:g})"
        )


class JointFlow(Flow):
    """MLP and attention trained together (Eqn. 2), by gradient flow or by gradient descent.

    Arguments:
        task: what the query token sees.
        attention: "linear", "exp" or "softmax".
        activation: "linear", "relu", "leaky_relu", "gelu", "silu", or a pair of callables (φ, φ′).
        mlp_lr, attention_lr: learning rates of (v, ξ) and of z; ``attention_lr=0`` freezes attention.
        temperature: divides the logits; A: the constant normaliser of exp attention.
        embedding: (d, M + 1) with the query's column last; the weights w are then integrated themselves.

    >>> task = Task.classification([[0.7, 0.3], [0.2, 0.8]], [0, 1])
    >>> path = JointFlow(task, attention="exp").integrate(2.0)
    >>> path.status, path.v.shape, bool(path.invariant().max_drift < 1e-9)
    ('done', (201, 2, 2), True)
    """

    def unpack(self, y: Array) -> tuple[Array, Array, Array]:
        """(v, ξ, z) of a state vector."""
        M, K = self.task.tokens, self.task.nodes
        if self.embedding is None:
            return y[: M * K].reshape(M, K), y[M * K : M * K + K], y[M * K + K :]
        both = self.embedding.T @ y[:-M].reshape(-1, K)
        return both[:-1], both[-1], y[-M:]

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative."""
        if self.embedding is None:
            return np.concatenate([velocity.v.ravel(), velocity.xi, velocity.z])
        w_dot = self.mlp_lr * (self.embedding @ np.vstack([velocity.B, velocity.sigma]))
        return np.concatenate([w_dot.ravel(), velocity.z])

    def _start(self, v: Array, xi: Array, z: Array, w: Array | None) -> Array:
        return np.concatenate([v.ravel(), xi, z] if w is None else [w.ravel(), z])

    def _weights(self, solution: Solution) -> Array | None:
        if self.embedding is None:
            return None
        return np.stack([y[: -self.task.tokens].reshape(-1, self.task.nodes) for y in solution.y])

    def descend(
        self,
        steps: int,
        step: float = 0.1,
        v0: ArrayLike | None = None,
        xi0: ArrayLike | None = None,
        z0: ArrayLike | None = None,
        *,
        w0: ArrayLike | None = None,
    ) -> Trajectory:
        """Plain full-batch gradient descent with the given step size, the paper's own experiments.

        Time runs as n · step, so the trajectory lies beside the flow's. φ′(0) is taken as PyTorch takes it.
        """
        if int(steps) != steps or steps < 1:
            raise ValueError(f"steps must be a positive integer, got {steps!r}")
        if not (np.isfinite(step) and step > 0):
            raise ValueError(f"step must be a positive number, got {step!r}")
        y = self._initial(v0, xi0, z0, w0)
        states, status = [y], "done"
        for n in range(int(steps)):
            v, xi, z = self.unpack(y)
            with np.errstate(over="ignore", invalid="ignore"):
                b, a = self.forward(v, xi, z)
                s = self.forces(a, self.activation.derivative(a))
                y = y + step * self.tangent(self.velocity(v, b, s))
            if not np.abs(y).max() < OVERFLOW:
                status = f"overflow at step {n + 1}: the step size {step:g} is too large, or the flow blows up"
                break
            states.append(y)
        parts = [self.unpack(y) for y in states]
        v_all, xi_all, z_all = ([part[n] for part in parts] for n in range(3))
        times = step * np.arange(len(states), dtype=np.float64)
        solution = Solution(times, states, v_all, xi_all, z_all, status=status)
        trajectory = self._trajectory(solution)
        object.__setattr__(trajectory, "step", float(step))
        return trajectory
