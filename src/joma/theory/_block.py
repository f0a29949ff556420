"""The block as physics: attention, pre-activations, and the velocities that its gradients give (Eqns. 1 and 2).

With s_ik = p_i g_ik φ′(a_ik) the gradient flow reads, for orthonormal embeddings,

    v̇_k = η Σ_i s_ik b_i,     ξ̇_k = η Σ_i s_ik,     ż = η_z Σ_ik s_ik (∂b_i/∂z)ᵀ v_k

with η = ``mlp_lr`` and η_z = ``attention_lr``. A block knows (v, ξ, z) only; which numbers a state vector holds is
the chart's business (``_charts``), and how it is stepped the integrator's (``_integrate``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from joma.theory.setting import Activation, Array, Attention, Task, as_activation

Pairs = tuple[NDArray[np.intp], NDArray[np.intp]]  # samples (n,) and nodes (n,)


@dataclass(frozen=True, eq=False)
class Velocity:
    """The right-hand side in the coordinates (v, ξ, z), and the MLP gradient that it was made from."""

    v: Array  # (M, K)
    xi: Array  # (K,)
    z: Array  # (M,)
    B: Array  # (M, K)  Σ_i s_ik b_i, the MLP gradient before embedding and rate
    sigma: Array  # (K,)  Σ_i s_ik


class Errors(NamedTuple):
    """How far off v, ξ and z may be, in their shapes."""

    v: Array
    xi: Array
    z: Array


@dataclass(frozen=True, eq=False)
class Block:
    """One query's block on the distinct samples of a task."""

    samples: Task  # equal rows merged
    first: NDArray[
        np.intp
    ]  # (n,) the first index of each distinct sample in the task as it was given
    x: Array  # (n, M)
    attention: Attention
    activation: Activation
    mlp_lr: float
    attention_lr: float
    gram: (
        Array | None
    )  # (M + 1, M + 1) inner products of the embeddings, the query's last; None for orthonormal ones

    @property
    def p(self) -> Array:
        """(n,) weights of the distinct samples."""
        return self.samples.p

    @property
    def slopes(self) -> tuple[float, float] | None:
        """(c₋, c₊) of a piecewise linear activation, None for a smooth one."""
        return self.activation.slopes

    @property
    def ratio(self) -> float:
        """r = attention_lr / mlp_lr, the only way in which the two rates enter the first integrals."""
        return self.attention_lr / self.mlp_lr

    @property
    def can_blow_up(self) -> bool:
        """Only under exp attention and constant gradients: a loss that is bounded below bounds the way v can go."""
        return self.attention.kind == "exp" and self.samples.loss == "fixed"

    def forward(self, v: Array, xi: Array, z: Array) -> tuple[Array, Array]:
        """Attention b (n, M) and pre-activations a (n, K) of the distinct samples."""
        b = self.attention.weights(z, self.x)
        return b, b @ v + xi

    def drives(self, a: Array, gates: Array) -> Array:
        """p_i g_ik, (n, K). Piecewise linear outputs are h = γ a with the gates given, also a little beyond a kink:
        within one regime the field stays smooth, or a step across a kink would be refused again and again."""
        return self.p[:, None] * self.samples.gradient(
            self.activation.phi(a) if self.slopes is None else gates * a
        )

    def forces(self, a: Array, gates: Array) -> Array:
        """s_ik = p_i g_ik γ_ik, (n, K)."""
        return self.drives(a, gates) * gates

    def smooth_velocity(self, v: Array, xi: Array, z: Array) -> Velocity:
        """Eqn. 2 with φ′ as PyTorch takes it, also on a kink."""
        b, a = self.forward(v, xi, z)
        return self.velocity(v, b, self.forces(a, self.activation.derivative(a)))

    def velocity(self, v: Array, b: Array, s: Array) -> Velocity:
        """Eqn. 2 for forces ``s`` (n, K)."""
        B, sigma = b.T @ s, s.sum(axis=0)
        if self.gram is None:
            v_dot, xi_dot = self.mlp_lr * B, self.mlp_lr * sigma
        else:
            both = self.mlp_lr * (self.gram @ np.vstack([B, sigma]))
            v_dot, xi_dot = both[:-1], both[-1]
        return Velocity(v_dot, xi_dot, self.z_velocity(v, b, s, B), B, sigma)

    def z_velocity(self, v: Array, b: Array, s: Array, B: Array) -> Array:
        """ż = η_z Σ_ik s_ik (∂b_i/∂z)ᵀ v_k, (M,)."""
        if self.attention.kind == "linear":
            pulled = (v * (self.x.T @ s)).sum(axis=1)
        else:
            pulled = (v * B).sum(axis=1)
            if self.attention.kind == "softmax":
                pulled -= b.T @ ((b @ v) * s).sum(axis=1)
        return (self.attention_lr / self.attention.temperature) * pulled

    def uncertainty(self, v: Array, z: Array, errors: Errors) -> Array:
        """How far off the pre-activations are if v, ξ and z are off by ``errors``, (n, K)."""
        T = self.attention.temperature
        b = np.abs(self.attention.weights(z, self.x))
        moved = (
            (np.abs(self.x) if self.attention.kind == "linear" else b)
            @ (errors.z[:, None] * np.abs(v))
            / T
        )
        if self.attention.kind == "softmax":
            moved += (b @ errors.z)[:, None] * (b @ np.abs(v)) / T
        return b @ errors.v + errors.xi + moved

    def folded(self, b_bar: Array) -> FoldedBlock:
        """The same block with ż by Eqn. 17, b̄ (M,) held."""
        return FoldedBlock(
            **{field.name: getattr(self, field.name) for field in fields(self)}, b_bar=b_bar
        )

    # -- samples on a kink -------------------------------------------------------------------------------

    def z_response(self, v: Array, b: Array, pairs: Pairs) -> Array:
        """ż caused by a unit force on each (sample, node) pair, (n, M)."""
        i, k = pairs
        return self.attention_lr * self.attention.pull(self.x[i], b[i], v.T[k])

    def response(self, v: Array, b: Array, pairs: Pairs) -> Array:
        """G (n, n): the rate of change of pre-activation r caused by a unit force on pair c.

        For the joint flow it is the tangent-kernel Gram matrix, symmetric and positive semi-definite.
        """
        i, k = pairs
        f = np.hstack([b[i], np.ones((len(i), 1))])
        kernel = f @ f.T if self.gram is None else f @ self.gram @ f.T
        G = self.mlp_lr * kernel * (k[:, None] == k[None, :])
        return G + self.attention.pull(self.x[i], b[i], v.T[k]) @ self.z_response(v, b, pairs).T

    def rates(self, v: Array, b: Array, velocity: Velocity, pairs: Pairs) -> Array:
        """ȧ of the pairs, (n,)."""
        i, k = pairs
        moved = self.attention.pull(self.x[i], b[i], v.T[k]) @ velocity.z
        return (b[i] * velocity.v.T[k]).sum(axis=1) + velocity.xi[k] + moved


@dataclass(frozen=True, eq=False)
class FoldedBlock(Block):
    """Softmax attention by Eqn. 17: ż with one b̄ for all samples in the place of each sample's own b."""

    b_bar: Array  # (M,)

    def z_velocity(self, v: Array, b: Array, s: Array, B: Array) -> Array:
        """ż = (η_z/T) Σ_k (v_k ∘ B_k − b̄ v_kᵀB_k), (M,)."""
        vB = v * B
        return (self.attention_lr / self.attention.temperature) * (
            vB.sum(axis=1) - self.b_bar * vB.sum()
        )

    def z_response(self, v: Array, b: Array, pairs: Pairs) -> Array:
        """ż caused by a unit force on each (sample, node) pair, (n, M)."""
        i, k = pairs
        bv = b[i] * v.T[k]
        pulled = bv - bv.sum(axis=1, keepdims=True) * self.b_bar
        return (self.attention_lr / self.attention.temperature) * pulled


class BlockSettings(NamedTuple):
    """What every flow is made from, checked."""

    attention: Attention
    activation: Activation
    mlp_lr: float
    attention_lr: float


def checked(
    task: Task,
    attention: str | Attention,
    activation: Any,
    mlp_lr: float,
    attention_lr: float,
    temperature: float | None,
    A: float | None,
) -> BlockSettings:
    """A flow's arguments, or an error that says which one is wrong."""
    if not isinstance(task, Task):
        raise TypeError(
            f"task must be a joma.theory.Task, got {type(task).__name__}; make one with Task(x, g)"
        )
    if isinstance(attention, Attention):
        if temperature is not None or A is not None:
            raise ValueError(
                "temperature and A are already part of the given Attention; give them once"
            )
    else:
        attention = Attention(
            attention, 1.0 if temperature is None else temperature, 1.0 if A is None else A
        )
    attention.check(task)
    if not (np.isfinite(mlp_lr) and mlp_lr > 0):
        raise ValueError(f"mlp_lr must be a positive number, got {mlp_lr}")
    if not (np.isfinite(attention_lr) and attention_lr >= 0):
        raise ValueError(f"attention_lr must be ≥ 0 (0 freezes attention), got {attention_lr}")
    return BlockSettings(attention, as_activation(activation), float(mlp_lr), float(attention_lr))


def one_query_block(task: Task, settings: BlockSettings, gram: Array | None = None) -> Block:
    """The block of one query. Samples with equal attention never part, so they are integrated as one."""
    samples, first = task.merged(settings.attention.rows(task.x))
    return Block(samples, first, samples.x, *settings, gram=gram)
