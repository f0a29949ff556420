"""Coordinates of a flow: which numbers its state vector holds, and how (v, ξ, z) is read off them.

A chart does not change. Where one becomes ill-conditioned, ``better`` gives another one for the same point, and the
integrator goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from joma.theory._block import Errors, Velocity
from joma.theory.setting import Array

State = tuple[Array, Array, Array]  # v, ξ, z


class Chart(Protocol):
    """What the integrator asks of coordinates."""

    def unpack(self, y: Array) -> State:
        """(v, ξ, z) of a state vector."""

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative."""

    def errors(self, v: Array, xi: Array, z: Array, rtol: float, atol: float) -> Errors:
        """How far off v, ξ and z are if each coordinate is off by atol + rtol |·|."""

    def better(self, y: Array) -> tuple[Chart, Array] | None:
        """A better conditioned chart and the same point in it, or None while this one will do."""


class FixedChart:
    """A chart that is well conditioned everywhere."""

    def better(self, y: Array) -> tuple[Chart, Array] | None:
        """None: this chart will always do."""
        return None


@dataclass(frozen=True)
class JointChart(FixedChart):
    """The state holds v, ξ and z themselves, in these shapes."""

    v_shape: tuple[int, ...]
    xi_shape: tuple[int, ...]
    z_shape: tuple[int, ...]

    def unpack(self, y: Array) -> State:
        """(v, ξ, z) of a state vector."""
        n, m = prod(self.v_shape), prod(self.xi_shape)
        return (
            y[:n].reshape(self.v_shape),
            y[n : n + m].reshape(self.xi_shape),
            y[n + m :].reshape(self.z_shape),
        )

    def pack(self, v: Array, xi: Array, z: Array) -> Array:
        """The state vector of (v, ξ, z)."""
        return np.concatenate([v.ravel(), xi.ravel(), z.ravel()])

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative."""
        return self.pack(velocity.v, velocity.xi, velocity.z)

    def errors(self, v: Array, xi: Array, z: Array, rtol: float, atol: float) -> Errors:
        """How far off v, ξ and z are if each coordinate is off by atol + rtol |·|."""
        return Errors(atol + rtol * np.abs(v), atol + rtol * np.abs(xi), atol + rtol * np.abs(z))


@dataclass(frozen=True, eq=False)
class EmbeddedChart(FixedChart):
    """The state holds the weights w (d, K) and z (M,): v = U_Cᵀ w, ξ = u_mᵀ w."""

    embedding: Array  # (d, M + 1), the query's column last
    mlp_lr: float

    @property
    def tokens(self) -> int:
        """M."""
        return self.embedding.shape[1] - 1

    def weights(self, y: Array) -> Array:
        """w (d, K) of a state vector."""
        return y[: -self.tokens].reshape(len(self.embedding), -1)

    def unpack(self, y: Array) -> State:
        """(v, ξ, z) of a state vector."""
        both = self.embedding.T @ self.weights(y)
        return both[:-1], both[-1], y[-self.tokens :]

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative: ẇ = η U [Σ s b; Σ s]."""
        w_dot = self.mlp_lr * (self.embedding @ np.vstack([velocity.B, velocity.sigma]))
        return np.concatenate([w_dot.ravel(), velocity.z])

    def errors(self, v: Array, xi: Array, z: Array, rtol: float, atol: float) -> Errors:
        """How far off v, ξ and z are if each coordinate is off by atol + rtol |·|: v and ξ are sums over w."""
        size = np.abs(np.vstack([v, xi]))  # (M + 1, K)
        size = np.abs(self.embedding).T @ np.abs(self.embedding) @ size
        return Errors(atol + rtol * size[:-1], atol + rtol * size[-1], atol + rtol * np.abs(z))


@dataclass(frozen=True, eq=False)
class WayChart(FixedChart):
    """Folded exp and softmax attention: the state holds v − v(0) and ξ, so z − z(0) has no cancellation."""

    v0: Array  # (M, K)
    z0: Array  # (M,)
    scale: float  # r / 2T
    b_bar: Array | None  # (M,) under softmax, None under exp

    def unpack(self, y: Array) -> State:
        """(v, ξ, z) of a state vector."""
        way, xi = y[: self.v0.size].reshape(self.v0.shape), y[self.v0.size :]
        gain = (way * (2 * self.v0 + way)).sum(axis=1)  # of Σ_k v_k²
        if self.b_bar is not None:
            gain = gain - gain.sum() * self.b_bar
        return self.v0 + way, xi, self.z0 + self.scale * gain

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative."""
        return np.concatenate([velocity.v.ravel(), velocity.xi])

    def errors(self, v: Array, xi: Array, z: Array, rtol: float, atol: float) -> Errors:
        """How far off v, ξ and z are if each coordinate is off by atol + rtol |·|."""
        z_error = 2 * self.scale * (np.abs(v) * (atol + rtol * np.abs(v - self.v0))).sum(axis=1)
        return Errors(atol + rtol * np.abs(v), atol + rtol * np.abs(xi), z_error)


@dataclass(frozen=True, eq=False)
class QuadricChart:
    """Folded linear attention, z² = r Σ_k v_k² + c, which leaves the sign of z open and is singular where z = 0.

    Each token's (v_l, z_l) moves on a quadric with K dimensions, so K numbers per token are carried: one coordinate,
    z or some v_lk, is solved for, one of the large ones, and its sign is kept.
    """

    c: Array  # (M,)
    ratio: float
    solved: NDArray[np.intp]  # (M,) -1: z is solved for; k: v_lk is, and its slot holds z
    sign: Array  # (M,) of what is solved for
    nodes: int

    @classmethod
    def at(cls, v: Array, xi: Array, z: Array, ratio: float) -> tuple[Chart, Array]:
        """A chart for the point (v, ξ, z), and the point in it."""
        c = z**2 - ratio * (v**2).sum(axis=1)
        chart = cls(c, ratio, np.full(len(z), -1), np.where(z < 0, -1.0, 1.0), v.shape[1])
        y = np.concatenate([v.ravel(), xi])
        return chart.better(y) or (chart, y)

    def unpack(self, y: Array) -> State:
        """(v, ξ, z) of a state vector."""
        M, K = len(self.c), self.nodes
        slots, xi = y[: M * K].reshape(M, K), y[M * K :]
        square = (slots**2).sum(axis=1)
        z = self.sign * np.sqrt(np.maximum(self.ratio * square + self.c, 0.0))
        swapped = np.flatnonzero(self.solved >= 0)
        if not swapped.size:
            return slots, xi, z
        k = self.solved[swapped]
        v, z = slots.copy(), z.copy()
        held = slots[swapped, k]  # these slots hold z
        rest = square[swapped] - held**2
        solution = np.maximum((held**2 - self.c[swapped]) / self.ratio - rest, 0.0)
        v[swapped, k], z[swapped] = self.sign[swapped] * np.sqrt(solution), held
        return v, xi, z

    def tangent(self, velocity: Velocity) -> Array:
        """The state vector's derivative."""
        slots, swapped = velocity.v, np.flatnonzero(self.solved >= 0)
        if swapped.size:
            slots = slots.copy()
            slots[swapped, self.solved[swapped]] = velocity.z[swapped]
        return np.concatenate([slots.ravel(), velocity.xi])

    def errors(self, v: Array, xi: Array, z: Array, rtol: float, atol: float) -> Errors:
        """How far off v, ξ and z are; what is solved for is large, so that dz is of the size of √r dv."""
        z_error = (
            atol + rtol * np.abs(z) + np.sqrt(self.ratio) * (atol + rtol * np.abs(v)).sum(axis=1)
        )
        return Errors(atol + rtol * np.abs(v), atol + rtol * np.abs(xi), z_error)

    def better(self, y: Array) -> tuple[Chart, Array] | None:
        """Solve for a larger coordinate where the one solved for has become small."""
        v, xi, z = self.unpack(y)
        size = np.abs(np.column_stack([np.sqrt(self.ratio) * v, z]))  # (M, K + 1), z last as -1
        poor = np.flatnonzero(size[np.arange(len(z)), self.solved] < 0.5 * size.max(axis=1))
        if not poor.size:
            return None
        v, best = v.copy(), size[poor].argmax(axis=1)
        solved, sign = self.solved.copy(), self.sign.copy()
        solved[poor] = np.where(best == v.shape[1], -1, best)
        values = np.where(solved[poor] < 0, z[poor], v[poor, solved[poor]])
        sign[poor] = np.where(values < 0, -1.0, 1.0)
        swapped = np.flatnonzero(solved >= 0)
        v[swapped, solved[swapped]] = z[swapped]
        return replace(self, solved=solved, sign=sign), np.concatenate([v.ravel(), xi])
