"""Linear activation with exp attention, in closed form: winner takes all (Section 3.1, Theorem 2, corrected).

With φ = id and constant gradients, Δ_l = E[g x_l] ∈ R^K is constant and token l moves on a line,
v_l(t) = v_l(0) + Δ̂_l y_l(t) with Δ̂_l = Δ_l / ‖Δ_l‖. The first integral gives, with s = √r / T and q_l = v_l(0)·Δ̂_l,

    ẏ_l = κ_l exp(s²/2 [(y_l + q_l)² − q_l²]),     κ_l = η ‖Δ_l‖ e^{z_l(0)/T} / A

so that erf(s (y + q)/√2) grows linearly in time. Token l blows up at

    t*_l = √(π/2) / (s κ_l) · erfcx(s q_l / √2)              (zero start: √(π/2) / (s κ_l))

and the token with the least t*_l wins; all others stop at finite values. From zero start and with K = 1 this is
erf(v_l/√2)/Δ_l = erf(v_l′/√2)/Δ_l′: the paper's Eqn. 4 has v/2 in the place of v/√2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import erf, erfc, erfcinv, erfcx, erfinv

from joma.theory.flows import JointFlow
from joma.theory.setting import Array, finite


@dataclass(frozen=True, eq=False)
class WinnerTakeAll:
    """The exact solution of a linear flow with exp attention; make it with ``winner_take_all(flow)``."""

    delta: Array = field(repr=False)  # (M, K)
    blow_up_times: Array = field(repr=False)  # (M,) each token's own t*_l, inf for Δ_l = 0
    blow_up_time: float  # the least of them: the solution ends there
    winners: tuple[int, ...]  # the token that wins, or all that tie
    limits: Array = field(
        repr=False
    )  # (M, K) of v at the blow-up; ±inf for the winners where Δ ≠ 0
    v0: Array = field(repr=False)
    xi0: Array = field(repr=False)
    z0: Array = field(repr=False)
    _s: float = field(repr=False)
    _rate: Array = field(repr=False)  # (M,) κ_l
    _xi_rate: Array = field(repr=False)  # (K,)
    _scale: float = field(repr=False)  # r / 2T

    def at(self, t: ArrayLike) -> tuple[Array, Array, Array]:
        """v (T, M, K), ξ (T, K) and z (T, M) at times t (T,) before the blow-up."""
        times = finite(t, "t", 1)
        if (times < 0).any() or (times >= self.blow_up_time).any():
            bad = times[(times < 0) | (times >= self.blow_up_time)][0]
            raise ValueError(
                f"t = {bad:g} lies outside [0, t* = {self.blow_up_time:.10g}): the solution ends at t*"
            )
        v = self.v0 + self._travel(times)[:, :, None] * _directions(self.delta)
        z = self.z0 + self._scale * ((v**2).sum(axis=2) - (self.v0**2).sum(axis=1))
        return v, self.xi0 + times[:, None] * self._xi_rate, z

    def _travel(self, times: Array) -> Array:
        """y_l(t), (T, M)."""
        return _travel(
            times[:, None], self._rate, self._s, _offsets(self.v0, self.delta), self.blow_up_times
        )


def _directions(delta: Array) -> Array:
    norm = np.linalg.norm(delta, axis=1, keepdims=True)
    return delta / np.where(norm > 0, norm, 1.0)


def _offsets(v0: Array, delta: Array) -> Array:
    return (v0 * _directions(delta)).sum(axis=1)


def _travel(t: Array, rate: Array, s: float, q: Array, t_star: Array) -> Array:
    """y from erfc(s (y + q)/√2) = erfc(s q/√2) (1 − t/t*); linear motion where attention is frozen."""
    if s == 0:
        return rate * t
    u = s * q / np.sqrt(2)
    passed = t / t_star  # 0 for a token that never blows up
    with np.errstate(invalid="ignore"):
        left = np.where(np.isinf(t_star), 1.0, (t_star - t) / t_star)
    u, passed, left = np.broadcast_arrays(u, passed, left)
    above, below = (
        erfc(u) * left,
        erfc(-u) + erfc(u) * passed,
    )  # erfc(w) and 2 − erfc(w) of the answer w
    w = erfinv(np.clip(erf(u) + erfc(u) * passed, -1.0, 1.0))
    w = np.where(
        above < 0.5, erfcinv(np.clip(above, 0.0, 2.0)), w
    )  # each where it has all its digits
    w = np.where(below < 0.5, -erfcinv(np.clip(below, 0.0, 2.0)), w)
    way = np.array(w - u)
    high, low = u > 2, (u < -2) & (below < 0.5)  # far out erfc underflows
    way[high] = _shift(u[high], np.log(left[high]))
    gained = np.broadcast_to(
        np.sqrt(2 / np.pi) * s * rate * t, u.shape
    )  # (erfc(u) − erfc(w)) e^{u²}
    way[low] = -_shift(-u[low], np.log1p(gained[low] / erfcx(-u[low])))
    return np.where(rate == 0, 0.0, np.sqrt(2) / s * way)


def _shift(u: Array, goal: Array) -> Array:
    """d with erfc(u + d) = erfc(u) e^goal, for u > 0: Newton's method on ln erfc, which is concave."""
    d = np.zeros_like(u)
    for _ in range(40):
        scaled = erfcx(u + d)
        d -= (goal - np.log(scaled / erfcx(u)) + d * (2 * u + d)) * (np.sqrt(np.pi) / 2) * scaled
    return d


def winner_take_all(
    flow: JointFlow,
    v0: ArrayLike | None = None,
    xi0: ArrayLike | None = None,
    z0: ArrayLike | None = None,
) -> WinnerTakeAll:
    """The closed-form solution of a linear flow with exp attention (Theorem 2, corrected).

    Arguments:
        flow: exp attention, linear activation, constant gradients; any K, rates and temperature.
        v0, xi0, z0: start, (M, K), (K,) and (M,); zeros where none is given.

    Returns:
        Who wins, when, where the others stop, and v(t), ξ(t), z(t) by its method ``at``.

    >>> from joma.theory import Task
    >>> flow = JointFlow(Task([[1.0, 0.5]], [[1.0]]), attention="exp", activation="linear")
    >>> exact = winner_take_all(flow)
    >>> exact.winners, round(exact.blow_up_time, 6)  # √(π/2) / max|Δ|
    ((0,), 1.253314)
    """
    if (
        flow.attention.kind != "exp"
        or flow.activation.name != "linear"
        or flow.task.loss != "fixed"
    ):
        raise ValueError(
            "the closed form is for exp attention, linear activation and constant gradients; this flow has "
            f"{flow.attention.kind} attention, {flow.activation.name} activation and {flow.task.loss} gradients"
        )
    if flow.embedding is not None:
        raise ValueError("the closed form needs orthonormal embeddings; leave embedding out")
    M = flow.task.tokens
    v, xi, z = flow.start(v0, xi0, z0)
    T, s = flow.attention.temperature, np.sqrt(flow.ratio) / flow.attention.temperature
    delta = flow.task.saliency().delta
    rate = flow.mlp_lr * np.linalg.norm(delta, axis=1) * np.exp(z / T) / flow.attention.A
    q = _offsets(v, delta)
    t_star = np.full(M, np.inf)
    if s > 0:
        moving = rate > 0
        t_star[moving] = np.sqrt(np.pi / 2) / (s * rate[moving]) * erfcx(s * q[moving] / np.sqrt(2))
    end = float(t_star.min())
    tied = t_star <= end * (1 + 1e-12) if np.isfinite(end) else np.zeros(M, bool)
    limits = np.where(delta == 0, v, np.copysign(np.inf, delta))
    if np.isfinite(end):
        last = ~tied
        stops = v + _travel(np.array(end), rate, float(s), q, np.where(tied, np.inf, t_star))[
            :, None
        ] * _directions(delta)
        limits[last] = stops[last]
    return WinnerTakeAll(
        delta=delta,
        blow_up_times=t_star,
        blow_up_time=end,
        winners=tuple(int(l) for l in np.flatnonzero(tied)),
        limits=limits,
        v0=v,
        xi0=xi,
        z0=z,
        _s=float(s),
        _rate=rate,
        _xi_rate=flow.mlp_lr * (flow.task.p @ flow.task.g),
        _scale=flow.ratio / (2 * T),
    )
