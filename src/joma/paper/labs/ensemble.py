"""Many joint flows of one shape at once (Eqn. 2): one array per quantity, flows first.

Who asks "how often" needs hundreds of flows to late times. `JointFlow` integrates one of them to rounding, with
switches and slides as events; here all of them step together by the embedded pair of Bogacki and Shampine (orders 3 and
2), each with a step size of its own. A kink needs no event: a step in which no number moves by more than ``rough`` (1 +
its size) is never refused, so a node that slides along a kink chatters across it by that much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.theory.setting import Activation, Array, Task, as_activation
from joma.theory.tasks import Start

# exp attention: where a logit gets here, what is left of time until the blow-up is of the order e^{-2 · 30}
FULL = 30.0


@dataclass(frozen=True, eq=False)
class Ensemble:
    """S flows at T output times. After a blow-up (exp attention) the rows repeat the last state before it."""

    t: Array = field(repr=False)  # (T,)
    v: Array = field(repr=False)  # (T, S, M, K)
    xi: Array = field(repr=False)  # (T, S, K)
    z: Array = field(repr=False)  # (T, S, M)
    blown: Array  # (S,) when a flow blew up, inf for those that did not
    steps: int
    x: Array = field(repr=False)  # (S, N, M)
    p: Array = field(repr=False)  # (S, N)

    def entropy(self) -> Array:
        """Attention entropy in nats, (T, S), as of `Trajectory`: the mean over samples of that of |b|/Σ|b|."""
        out = np.empty(self.z.shape[:2])
        with np.errstate(divide="ignore"):
            frequency = np.log(np.abs(self.x))
        for n, z in enumerate(self.z):
            logits = frequency + z[:, None, :]
            logits -= logits.max(axis=2, keepdims=True)
            e = np.exp(logits)
            total = e.sum(axis=2)
            mean = (e * np.where(e > 0, logits, 0.0)).sum(axis=2) / total
            out[n] = (self.p * (np.log(total) - mean)).sum(axis=1)
        return out

    def stable_rank(self) -> Array:
        """‖V‖²_F / σ₁² of each V (M, K), (T, S)."""
        return stable_rank(self.v)


def stable_rank(matrices: Array) -> Array:
    """‖V‖²_F / σ₁² of each matrix of an array (…, M, K), (…)."""
    s = np.linalg.svd(matrices, compute_uv=False)
    return np.asarray((s**2).sum(axis=-1) / s[..., 0] ** 2)


@dataclass(frozen=True, eq=False)
class _EnsembleField:
    """The right-hand side of S flows; a state is a row (S, M K + K + M)."""

    x: Array  # (S, N, M)
    g: Array  # (S, N, K)
    p: Array  # (S, N, 1)
    loss: str
    softmax: bool
    activation: Activation
    attention_lr: float
    bias_lr: float

    def of(self, rows: NDArray[np.bool_]) -> _EnsembleField:
        return replace(self, x=self.x[rows], g=self.g[rows], p=self.p[rows])

    def unpack(self, y: Array) -> tuple[Array, Array, Array]:
        S, M, K = len(y), self.x.shape[2], self.g.shape[2]
        return y[:, : M * K].reshape(S, M, K), y[:, M * K : M * K + K], y[:, M * K + K :]

    def __call__(self, y: Array) -> Array:
        v, xi, z = self.unpack(y)
        if self.softmax:
            b = self.x * np.exp(z - z.max(axis=1, keepdims=True))[:, None, :]
            b /= b.sum(axis=2, keepdims=True)
        else:  # a trial step may reach far beyond FULL: it is refused, and must not overflow
            b = self.x * np.exp(np.minimum(z, 2 * FULL))[:, None, :]
        inner = b @ v  # (S, N, K)
        a = inner + xi[:, None, :]
        g = self.g
        if self.loss != "fixed":
            h = self.activation.phi(a)
            if self.loss == "classification":
                h = np.exp(h - h.max(axis=2, keepdims=True))
                h /= h.sum(axis=2, keepdims=True)
            g = g - h
        s = self.p * g * self.activation.derivative(a)
        v_dot = b.transpose(0, 2, 1) @ s
        z_dot = (v * v_dot).sum(axis=2)
        if self.softmax:
            z_dot -= (b.transpose(0, 2, 1) @ (inner * s).sum(axis=2)[:, :, None])[:, :, 0]
        xi_dot = self.bias_lr * s.sum(axis=1)
        z_dot *= self.attention_lr
        return np.concatenate([v_dot.reshape(len(y), -1), xi_dot, z_dot], axis=1)


def integrate_all(
    tasks: Sequence[Task], starts: Sequence[Start], times: Array, *, attention: str, activation: Any,
    attention_lr: float = 1.0, bias_lr: float = 1.0, rtol: float = 1e-3, atol: float = 1e-5, rough: float = 1e-3,
    max_steps: int = 2_000_000,
) -> Ensemble:  # fmt: skip
    """Integrate the joint flows of tasks of one shape and one loss; the rate of V and the temperature are 1.

    Arguments:
        tasks, starts: one of each per flow.
        times: (T,) increasing, from the start on.
        attention: "exp" or "softmax".
        activation: as for `JointFlow`.
        attention_lr: the rate of z.
        bias_lr: the rate of ξ; 0 holds it.
        rtol, atol: of the embedded pair, per number of the state.
        rough: the share by which a number may move in a step that is never refused.
        max_steps: a RuntimeError after so many.

    Returns:
        An `Ensemble`.
    """
    kinds = {(task.x.shape, task.g.shape, task.loss) for task in tasks}
    if attention not in ("exp", "softmax") or len(kinds) != 1 or len(tasks) != len(starts):
        raise ValueError(
            f"{len(tasks)} tasks of {len(kinds)} kinds, {len(starts)} starts, {attention!r} attention: give one start "
            "per task, tasks of one shape and loss, and exp or softmax attention"
        )
    x, g, p = (np.stack([getattr(task, name) for task in tasks]) for name in ("x", "g", "p"))
    right = _EnsembleField(
        x,
        g,
        p[:, :, None],
        tasks[0].loss,
        attention == "softmax",
        as_activation(activation),
        attention_lr,
        bias_lr,
    )
    y = np.stack([np.concatenate([start.v0.ravel(), start.xi0, start.z0]) for start in starts])
    rows, blown, step, taken = [y], np.full(len(y), np.inf), np.full(len(y), 1e-3), 0
    for begin, end in pairwise(times):
        y, t = y.copy(), np.where(np.isfinite(blown), end, begin)
        while (on := t < end).any():
            taken += 1
            if taken > max_steps:
                raise RuntimeError(
                    f"{max_steps} steps taken, and t = {t.min():.4g} of {times[-1]:g}"
                )
            left = end - t[on]
            h = np.minimum(step[on], left)
            new, good, wanted = _advance(right.of(on), y[on], h, rtol, atol, rough)
            flows = np.flatnonzero(on)
            # a step that was cut short by an output time tells nothing against the longer one
            step[flows] = np.where(
                good & (h < step[flows]), np.maximum(step[flows], wanted), wanted
            )
            y[flows[good]] = new[good]
            t[flows[good]] = np.where(h == left, end, t[on] + h)[good]
            if attention == "exp":
                full = flows[y[flows, -x.shape[2] :].max(axis=1) > FULL]
                blown[full], t[full] = t[full], end
        rows.append(y)
    v, xi, z = (np.stack(part) for part in zip(*map(right.unpack, rows), strict=True))
    return Ensemble(np.asarray(times), v, xi, z, blown, taken, x, p)


def _advance(
    field: _EnsembleField, y: Array, h: Array, rtol: float, atol: float, rough: float
) -> tuple[Array, NDArray[np.bool_], Array]:
    """States after steps h (S,), which of them are accepted, and the steps to take next."""
    dt = h[:, None]
    k1 = field(y)
    k2 = field(y + dt / 2 * k1)
    k3 = field(y + 0.75 * dt * k2)
    new = y + dt / 9 * (2 * k1 + 3 * k2 + 4 * k3)
    k4 = field(new)
    scale = atol + rtol * np.maximum(np.abs(y), np.abs(new))
    error = (dt * np.abs(-5 / 72 * k1 + k2 / 12 + k3 / 9 - k4 / 8) / scale).max(axis=1)
    floor = rough / np.maximum((np.abs(k1) / (1 + np.abs(y))).max(axis=1), 1e-300)
    good = (error <= 1) | (h <= floor)
    wanted = h * np.clip(0.9 * np.maximum(error, 1e-9) ** (-1 / 3), 0.2, 4.0)
    return new, good, np.maximum(wanted, np.minimum(floor, h))
