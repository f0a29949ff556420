"""The folded flow: attention integrated out of the block by the first integrals of Theorem 1 (Section 3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from joma.theory.flows import Flow, Pairs, Velocity
from joma.theory.setting import Array


class FoldedFlow(Flow):
    """The block with its attention integrated out: the state is (v, ξ) alone, z comes from the first integral.

    Exact for linear and exp attention (Theorem 1). For softmax attention it uses Eqn. 18 with b̄ at the start,
    an approximation whose error is the difference to the ``JointFlow``.

    The arguments, and those of ``integrate``, are those of ``JointFlow``.

    With exp and softmax attention the state holds the way v − v(0), which gives z − z(0) without cancellation.

    Linear attention has z² = r Σ_k v_k² + c, which leaves the sign of z open and is singular where z passes
    through 0. Each token's (v_l, z_l) moves on a quadric with K dimensions, so K numbers a token are carried in
    local charts: whichever coordinate is solved for is one of the large ones, and its sign is kept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.embedding is not None:
            raise ValueError("the folded flow needs orthonormal embeddings, so it takes no embedding; use JointFlow")

    def _start(self, v: Array, xi: Array, z: Array, w: Array | None) -> Array:
        r, T = self.ratio, self.attention.temperature
        self._scale = r / (2 * T)
        self._b_bar = self._p @ self.attention.weights(z, self._x)
        self._v0, self._z0 = v.copy(), z.copy()
        if self.attention.kind != "linear":
            return np.concatenate([np.zeros(v.size), xi])
        self._c = z**2 - r * (v**2).sum(axis=1)
        self._chart = np.full(self.task.tokens, -1)  # -1: z is solved for; k: v_lk is
        self._sign = np.where(z < 0, -1.0, 1.0)
        y = np.concatenate([v.ravel(), xi])
        better = self.rechart(y)
        return y if better is None else better

    def _gain(self, way: Array) -> Array:
        """The change of Σ_k v_k² (− ‖v_k‖² b̄ under softmax) as v moves from v(0) by ``way``, (M,)."""
        gain = (way * (2 * self._v0 + way)).sum(axis=1)
        return gain - gain.sum() * self._b_bar if self.attention.kind == "softmax" else gain

    def unpack(self, y: Array) -> tuple[Array, Array, Array]:
        """(v, ξ, z) of a state vector."""
        M, K = self.task.tokens, self.task.nodes
        slots, xi = y[: M * K].reshape(M, K), y[M * K :]
        if self.attention.kind != "linear":
            return self._v0 + slots, xi, self._z0 + self._scale * self._gain(slots)
        if self.ratio == 0:
            return slots, xi, self._z0
        square = (slots**2).sum(axis=1)
        z = self._sign * np.sqrt(np.maximum(self.ratio * square + self._c, 0.0))
        swapped = np.flatnonzero(self._chart >= 0)
        if swapped.size:
            k = self._chart[swapped]
            v, z = slots.copy(), z.copy()
            held = slots[swapped, k]  # these slots hold z
            rest = square[swapped] - held**2
            solved = np.maximum((held**2 - self._c[swapped]) / self.ratio - rest, 0.0)
            v[swapped, k], z[swapped] = self._sign[swapped] * np.sqrt(solved), held
            return v, xi, z
        return slots, xi, z

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative."""
        slots = velocity.v
        swapped = np.flatnonzero(self._chart >= 0) if self.attention.kind == "linear" else np.empty(0, np.intp)
        if swapped.size:
            slots = slots.copy()
            slots[swapped, self._chart[swapped]] = velocity.z[swapped]
        return np.concatenate([slots.ravel(), velocity.xi])

    def rechart(self, y: Array) -> Array | None:
        """Solve for a larger coordinate where the one solved for has become small (linear attention)."""
        if self.attention.kind != "linear" or self.ratio == 0:
            return None
        v, xi, z = self.unpack(y)
        size = np.abs(np.column_stack([np.sqrt(self.ratio) * v, z]))  # (M, K + 1), z last as chart -1
        token = np.arange(len(z))
        poor = np.flatnonzero(size[token, self._chart] < 0.5 * size.max(axis=1))
        if not poor.size:
            return None
        v, best = v.copy(), size[poor].argmax(axis=1)
        chart, sign = self._chart.copy(), self._sign.copy()
        chart[poor] = np.where(best == v.shape[1], -1, best)
        solved = np.where(chart[poor] < 0, z[poor], v[poor, chart[poor]])
        sign[poor] = np.where(solved < 0, -1.0, 1.0)
        self._chart, self._sign = chart, sign
        swapped = np.flatnonzero(chart >= 0)
        v[swapped, chart[swapped]] = z[swapped]
        return np.concatenate([v.ravel(), xi])

    def z_error(self, v: Array, z: Array, rtol: float, atol: float) -> Array:
        """How far off z is, (M,), since the coordinates that it is computed from are."""
        if self.attention.kind == "linear":  # the charts see to it that dz is of the size of √r dv
            return super().z_error(v, z, rtol, atol) + np.sqrt(self.ratio) * (atol + rtol * np.abs(v)).sum(axis=1)
        return 2 * self._scale * (np.abs(v) * (atol + rtol * np.abs(v - self._v0))).sum(axis=1)

    def z_velocity(self, v: Array, b: Array, s: Array, B: Array) -> Array:
        """ż from the first integral; under softmax with the fixed b̄ instead of each sample's own b."""
        if self.attention.kind != "softmax":
            return super().z_velocity(v, b, s, B)
        vB = v * B
        return (self.attention_lr / self.attention.temperature) * (vB.sum(axis=1) - self._b_bar * vB.sum())

    def z_response(self, v: Array, b: Array, pairs: Pairs) -> Array:
        """ż caused by a unit force on each (sample, node) pair, (n, M)."""
        if self.attention.kind != "softmax":
            return super().z_response(v, b, pairs)
        i, k = pairs
        bv = b[i] * v.T[k]
        pulled = bv - bv.sum(axis=1, keepdims=True) * self._b_bar
        return (self.attention_lr / self.attention.temperature) * pulled
