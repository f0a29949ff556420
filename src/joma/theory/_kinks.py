"""Regimes of a flow: the field of a smooth activation, and the gates, events and slides of one with kinks.

With ReLU-like activations the gates γ ∈ {c₋, c₊} are constant between switches, so the field is smooth there and
jumps where a pre-activation a_ik passes through 0. A sample with g < 0 pushes itself down while it is on; when
everything else pushes it up, it can neither stay on nor off and *slides*: the Filippov solution keeps a_ik = 0
with a gate in between. Write the forces of the samples on a kink as p g γ = p g c₋ − β, 0 ≤ β ≤ |p g|(c₊ − c₋).
Their pre-activations move with ȧ = r − G β (r: with gates at c₋; G: tangent kernel), and

    β = 0 ⇒ ȧ ≤ 0 (goes off),     β at its upper end ⇒ ȧ ≥ 0 (goes on),     in between ⇒ ȧ = 0 (slides),

the optimality conditions of a box-constrained QP, convex since G is a Gram matrix. Between events the sliding
forces solve G β = r. Samples with g > 0 are only ever crossed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, lsq_linear

from joma.theory._block import Block, Pairs, Velocity
from joma.theory._charts import Chart
from joma.theory.ending import Ending, EndingKind
from joma.theory.setting import Array

# A switch is noticed when a pre-activation, or a sliding force, is on the wrong side by more than the stepper's
# tolerance explains: a sample that has just left its kink must not be taken for one that arrives. Pre-activations
# by so many times what errors of rtol and atol in the state do to them, forces by so many rtol of their limits.
MARGIN = 5.0
BOX_MARGIN = 100.0
# A sample starts on its kink if its pre-activation vanishes to rounding.
ROUNDING = 1e-14
# Where in a step the event functions are evaluated, and the finer grid on which their quartic is read off.
_NODES = np.linspace(0.0, 1.0, 5)
_FINE = np.linspace(0.0, 1.0, 17)
_QUARTIC = np.vander(_FINE, 5) @ np.linalg.inv(np.vander(_NODES, 5))  # (17, 5)


class Stop(Exception):
    """The flow cannot go on."""

    def __init__(self, kind: EndingKind, t: float, message: str) -> None:
        super().__init__(message)
        self.ending = Ending(kind, float(t), message)


class Smooth:
    """Regime of a smooth activation: one field, no events. It carries the chart that the state is in."""

    switches = 0

    def __init__(self, block: Block, chart: Chart) -> None:
        self.block, self.chart = block, chart

    def __call__(self, t: float, y: Array) -> Array:
        return self.chart.tangent(self.block.smooth_velocity(*self.chart.unpack(y)))

    def rechart(self, y: Array) -> Array | None:
        """Go on in a better conditioned chart: the same point in it, or None while the present one will do."""
        better = self.chart.better(y)
        if better is None:
            return None
        self.chart, y = better
        return y

    def first_event(self, dense: Any, t0: float, t1: float) -> float | None:
        return None

    def switch(self, t: float, y: Array) -> Array:
        return y

    def settle(self, y: Array) -> Array | None:
        return None

    def slides(self, t: float) -> list[tuple[int, int, float, float]]:
        return []


class Kinked(Smooth):
    """Regime of a piecewise linear activation: which gates are on (+1), off (−1) or sliding (0)."""

    def __init__(self, block: Block, chart: Chart, y0: Array, rtol: float, atol: float) -> None:
        super().__init__(block, chart)
        self.rtol, self.atol = rtol, atol
        assert block.slopes is not None
        self.low, self.high = block.slopes
        v, xi, z = chart.unpack(y0)
        _, a = block.forward(v, xi, z)
        self.side = np.where(a > 0, 1, -1).astype(np.int8)  # (n, K)
        self.sliding: Pairs = (np.empty(0, np.intp), np.empty(0, np.intp))
        self.switches = 0
        self._since: dict[tuple[int, int], float] = {}
        self._past: list[tuple[int, int, float, float]] = []
        self._stalled = 0
        self._last = 0.0
        self._margin = self._margins(y0)
        on_kink = _where(
            np.abs(a) <= block.uncertainty(v, z, chart.errors(v, xi, z, ROUNDING, 0.0))
        )
        if on_kink[0].size:
            self._leave_start(y0, on_kink)

    # -- the field ---------------------------------------------------------------------------------------

    def _gates(self) -> Array:
        return np.where(
            self.side > 0, self.high, self.low
        )  # sliding gates count as c₋; β is subtracted

    def __call__(self, t: float, y: Array) -> Array:
        block, chart = self.block, self.chart
        v, xi, z = chart.unpack(y)
        return chart.tangent(self._velocity(v, *block.forward(v, xi, z)))

    def _velocity(self, v: Array, b: Array, a: Array) -> Velocity:
        """The velocity of this regime, with the forces that keep sliding samples on their kinks."""
        s = self.block.forces(a, self._gates())
        velocity = self.block.velocity(v, b, s)
        if self.sliding[0].size:
            s[self.sliding] -= self._beta(v, b, velocity)
            velocity = self.block.velocity(v, b, s)
        return velocity

    def _beta(self, v: Array, b: Array, velocity: Velocity) -> Array:
        """The sliding forces that keep ȧ = 0, given the velocity without them, (n,)."""
        G = self.block.response(v, b, self.sliding)
        return _solve(G, self.block.rates(v, b, velocity, self.sliding))

    def _limits(self, a: Array) -> Array:
        """Upper ends |p g|(c₊ − c₋) of β; 0 where g ≥ 0 (such a sample cannot slide), (n, K)."""
        return np.maximum(-self.block.drives(a, self._gates()), 0.0) * (self.high - self.low)

    # -- events ------------------------------------------------------------------------------------------

    def _margins(self, y: Array) -> Array:
        """How far on the wrong side a pre-activation has switched, (n, K)."""
        v, xi, z = self.chart.unpack(y)
        return MARGIN * self.block.uncertainty(
            v, z, self.chart.errors(v, xi, z, self.rtol, self.atol)
        )

    def _distance(self, y: Array) -> Array:
        """side · a + margin, (n, K): how far each sample is on its own side of the kink."""
        return self.side * self.block.forward(*self.chart.unpack(y))[1] + self._margin

    def _box_distance(self, y: Array) -> Array:
        """How far the β of sliding samples are inside their box (with margin): from 0, from the limits, (2n,)."""
        if not self.sliding[0].size:
            return np.empty(0)
        block, chart = self.block, self.chart
        v, xi, z = chart.unpack(y)
        b, a = block.forward(v, xi, z)
        beta = self._beta(v, b, block.velocity(v, b, block.forces(a, self._gates())))
        limits = self._limits(a)[self.sliding]
        return np.concatenate([beta, limits - beta]) + BOX_MARGIN * self.rtol * np.tile(limits, 2)

    def first_event(self, dense: Any, t0: float, t1: float) -> float | None:
        """The first time in (t0, t1] at which an event function turns negative, or None."""
        states = dense(t0 + (t1 - t0) * _NODES).T  # (5, dim)
        values = np.stack([np.append(self._distance(y), self._box_distance(y)) for y in states])
        fine = _QUARTIC @ values  # (17, functions)
        fine[:: (len(_FINE) - 1) // (len(_NODES) - 1)] = values  # exact at the nodes
        negative = fine < 0
        crossing = np.flatnonzero(negative.any(axis=0))
        if not crossing.size:
            return None
        interval = negative[:, crossing].argmax(
            axis=0
        )  # the point of the fine grid where it is first negative
        first = None
        for j, which in sorted(zip(interval.tolist(), crossing.tolist(), strict=True)):
            lower, upper = t0 + (t1 - t0) * _FINE[max(j - 1, 0)], t0 + (t1 - t0) * _FINE[j]
            if first is not None and lower >= first:
                break

            def value(t: float, which: int = which) -> float:
                kinks = self.side.size
                if which < kinks:
                    return float(self._distance(dense(t)).flat[which])
                return float(self._box_distance(dense(t))[which - kinks])

            if first is not None:
                upper = first
            if value(upper) >= 0:  # later than the first one, or the quartic dipped below 0 alone
                continue
            first = (
                lower
                if j == 0 or value(lower) <= 0
                else brentq(value, lower, upper, xtol=1e-15 * (t1 - t0))
            )
        return first

    def switch(self, t: float, y: Array) -> Array:
        """The regime after the event at (t, y), and y moved onto the kinks that it slides on."""
        block, chart = self.block, self.chart
        self.switches += 1
        self._stalled = self._stalled + 1 if t - self._last <= 1e-13 * max(1.0, t) else 0
        self._last = t
        if self._stalled > 200:
            raise Stop(
                EndingKind.STUCK,
                t,
                f"stuck at t = {t:.6g}: {self._stalled} switches without progress",
            )
        _, a = block.forward(*chart.unpack(y))
        touched = (self.side * a <= 0) & (self.side != 0)
        limits = self._limits(a)
        # g ≥ 0: crossed; its own push then carries it on
        crossed = touched & (limits <= 0)
        self.side[crossed] *= -1
        held = (touched & (limits > 0)) | (self.side == 0)
        back = self._choose(y, _where(held), t)
        self._margin = self._margins(y)
        y = self._project(y, _where((self.side == 0) | (back & (self.side * a < 0))))
        # what cannot be moved back, beside a sample that hardly differs, is not to switch again at once
        self._margin = np.maximum(self._margin, -2 * self.side * block.forward(*chart.unpack(y))[1])
        return y

    def _choose(self, y: Array, pairs: Pairs, t: float) -> NDArray[np.bool_]:
        """Solve the box problem for the samples on a kink and set their sides; True where a side was set."""
        block, chart = self.block, self.chart
        was = set(zip(*(index.tolist() for index in self.sliding), strict=True))
        self.side[pairs] = -1
        chosen = np.zeros(self.side.shape, bool)
        chosen[pairs] = True
        if pairs[0].size:
            v, xi, z = chart.unpack(y)
            b, a = block.forward(v, xi, z)
            velocity = block.velocity(v, b, block.forces(a, self._gates()))
            G, r = block.response(v, b, pairs), block.rates(v, b, velocity, pairs)
            self.side[pairs] = _box(G, r, self._limits(a)[pairs])
        self.sliding = _where(self.side == 0)
        now = set(zip(*(index.tolist() for index in self.sliding), strict=True))
        for pair in was - now:
            self._past.append((*pair, self._since.pop(pair), t))
        for pair in now - was:
            self._since[pair] = t
        return chosen

    def _leave_start(self, y: Array, on_kink: Pairs) -> None:
        """Samples that start on their kink: those with g < 0 slide or leave; g > 0 may have no unique way on."""
        block, chart = self.block, self.chart
        v, xi, z = chart.unpack(y)
        b, a = block.forward(v, xi, z)
        limits = self._limits(a)[on_kink]
        pushing = block.drives(a, self._gates())[on_kink] > 0
        held = tuple(index[limits > 0] for index in on_kink)
        free = tuple(index[pushing] for index in on_kink)
        settled = []
        for begin in (
            -1,
            1,
        ):  # all off and all on: where both settle on the same sides, the way on is unique
            self.side[on_kink] = -1
            self.side[free] = begin
            for _ in range(len(free[0]) + 1):
                self._choose(y, held, 0.0)  # type: ignore[arg-type]
                velocity = self._velocity(v, b, a)
                rate = block.rates(v, b, velocity, free) if free[0].size else np.empty(0)  # type: ignore[arg-type]
                side = np.where(rate > 0, 1, np.where(rate < 0, -1, self.side[free]))
                if (side == self.side[free]).all():
                    break
                self.side[free] = side
            settled.append(self.side.copy())
        if (settled[0] != settled[1]).any():
            i, k = np.argwhere(settled[0] != settled[1])[0]
            raise Stop(
                EndingKind.NOT_UNIQUE,
                0.0,
                f"not unique at t = 0: {len(on_kink[0])} sample-node pairs start on the kink (the first: sample "
                f"{block.first[i]}, node {k}) and may go either way; give a start v0 ≠ 0",
            )

    def settle(self, y: Array) -> Array | None:
        """y moved back onto the sliding kinks if the stepper took it off them by more than ten margins.

        Not more often than that: the stepper then starts anew, which costs a multistep method dearly.
        """
        if not self.sliding[0].size:
            return None
        v, xi, z = self.chart.unpack(y)
        off = np.abs(self.block.forward(v, xi, z)[1][self.sliding])
        if (off <= 10 * self._margin[self.sliding]).all():
            return None
        self._margin = self._margins(y)
        return (
            self._project(y, self.sliding)
            if (off > 10 * self._margin[self.sliding]).any()
            else None
        )

    def _project(self, y: Array, pairs: Pairs) -> Array:
        """The shortest move along the pairs' own gradients to a = 0: it keeps the first integrals to 2nd order."""
        if not pairs[0].size:
            return y
        block, chart = self.block, self.chart
        for _ in range(2):
            v, xi, z = chart.unpack(y)
            b, a = block.forward(v, xi, z)
            s = np.zeros_like(a)
            s[pairs] = -_solve(block.response(v, b, pairs), a[pairs])
            y = y + chart.tangent(block.velocity(v, b, s))
        return y

    def slides(self, t: float) -> list[tuple[int, int, float, float]]:
        """All slides so far, open ones closed at t."""
        return self._past + [(*pair, since, t) for pair, since in self._since.items()]


def _where(mask: NDArray[np.bool_]) -> Pairs:
    i, k = np.nonzero(mask)
    return i, k


def _solve(G: Array, r: Array) -> Array:
    """G⁻¹ r; the shortest least-squares solution where G is singular, as for samples that hardly differ."""
    if not (
        np.isfinite(G).all() and np.isfinite(r).all()
    ):  # a trial step beyond a blow-up; it will be refused
        return np.full(len(r), np.nan)
    try:
        solution = np.asarray(np.linalg.solve(G, r), dtype=np.float64)
        if (np.abs(solution) * np.diag(G)).max() <= 10 * np.abs(r).max():
            return solution
    except np.linalg.LinAlgError:
        pass
    return np.asarray(np.linalg.lstsq(G, r, rcond=1e-12)[0], dtype=np.float64)


def _box(G: Array, r: Array, limits: Array) -> NDArray[np.int8]:
    """Sides −1, 0, +1 of the solution of min ½ βᵀGβ − rᵀβ over 0 ≤ β ≤ limits: at 0, between, at its limit.

    A primal-dual active-set iteration takes a few rounds from the sides of the unconstrained answer. Where it
    cycles, or G is singular (more samples than directions), SciPy's bounded least squares decides.
    """
    values, vectors = np.linalg.eigh((G + G.T) / 2)
    keep = values > 1e-13 * values.max()
    diagonal = np.maximum(np.diag(G), 1e-300)
    side = np.zeros(len(r), np.int8)
    tried: set[bytes] = set()
    while keep.all() and side.tobytes() not in tried and len(tried) < 100:
        tried.add(side.tobytes())
        beta = np.where(side > 0, limits, 0.0)
        inner = side == 0
        if inner.any():
            beta[inner] = _solve(G[np.ix_(inner, inner)], (r - G @ beta)[inner])
        residual = (r - G @ beta) / diagonal
        residual[inner] = 0.0
        trial = beta + residual
        new = np.where(trial <= 0, -1, np.where(trial >= limits, 1, 0)).astype(np.int8)
        if (new == side).all():
            return side
        side = new
    root = np.sqrt(values[keep])
    fit = lsq_linear(
        root[:, None] * vectors[:, keep].T,
        (vectors[:, keep].T @ r) / root,
        (0.0, np.maximum(limits, 1e-300)),
        tol=1e-14,
        method="bvls",
    )
    side = fit.active_mask.astype(np.int8)
    while (inner := side == 0).any():  # as far as the forces that the flow will solve for agree
        beta = _solve(G[np.ix_(inner, inner)], (r - G @ np.where(side > 0, limits, 0.0))[inner])
        beyond = np.maximum(-beta, beta - limits[inner])
        worst = beyond.argmax()
        if beyond[worst] <= 0:
            break
        side[np.flatnonzero(inner)[worst]] = -1 if beta[worst] < 0 else 1
    return side
