"""Stepping a flow through its regimes to its output times: SciPy's steppers, stiffness, blow-ups, and a status.

Nothing on the way raises: what ends a flow early is in the solution's ``status``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.integrate

from joma.theory._kinks import Kinked, Smooth, Stop
from joma.theory.setting import Array, nearest

if TYPE_CHECKING:
    from joma.theory.flows import Flow

# A state this large, whose squares are still numbers, has overflowed.
OVERFLOW = 1e100


@dataclass
class Solution:
    """A flow at its output times, and how it ended."""

    t: Array
    y: list[Array]
    v: list[Array]
    xi: list[Array]
    z: list[Array]
    status: str = "done"
    switches: int = 0
    slides: list[tuple[int, int, float, float]] = field(default_factory=list)  # sample, node, from, to


_METHODS = {name: getattr(scipy.integrate, name) for name in ("DOP853", "RK45", "Radau", "BDF", "LSODA")}
METHODS = ("auto", *_METHODS)
# "auto" is DOP853 until it has taken so many steps without a switch that the flow must be stiff (large attention
# sharpens a smooth activation into a kink, and makes moving gradients settle fast), then LSODA to the end.
_PATIENCE = {"smooth": 1000, "kinked": 300}
# Attention that grows by a factor e within this fraction of the elapsed time is blowing up: what is left of the
# solution cannot be told apart on the time axis. Where the flow is stiff as well, its steps get that short first.
_LAST_MOMENT = 1e-12
_LAST_STEPS = 1e-11


def integrate(
    flow: Flow,
    y0: Array,
    times: Array,
    t_end: float,
    *,
    rtol: float,
    atol: float,
    method: str,
    max_steps: int,
) -> Solution:
    """Step ``flow`` from y0 through all events to t_end and read it off at ``times``; never raises on the way."""
    if method not in METHODS:
        raise ValueError(nearest(method, METHODS, "method"))
    out = Solution(np.empty(0), [], [], [], [])
    kept: list[float] = []

    def emit(t: float, y: Array) -> None:
        v, xi, z = flow.unpack(y)
        kept.append(t)
        for store, value in zip((out.y, out.v, out.xi, out.z), (y, v, xi, z), strict=True):
            store.append(np.array(value))

    t, y, steps, since, pending = 0.0, y0, 0, 0, 0
    h: float | None = None
    patience, stiff = _PATIENCE["smooth" if flow.slopes is None else "kinked"], False
    regime: Smooth | None = None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        try:
            if times[0] == 0:
                emit(0.0, y0)
                pending = 1
            regime = Smooth(flow) if flow.slopes is None else Kinked(flow, y0, rtol, atol)
            while t < t_end:
                # each stretch has a clock of its own from 0: a switch can start motion too fast for that of the whole
                begin = t
                stepper = ("LSODA" if stiff else "DOP853") if method == "auto" else method
                # the last step is a fair guess of the first, but LSODA would not refuse it where the field overflows
                guess = None if h is None or stepper == "LSODA" else min(h, t_end - begin)
                solver = _METHODS[stepper](regime, 0.0, y, t_end - begin, first_step=guess, rtol=rtol, atol=atol)
                while solver.status == "running":
                    if steps >= max_steps:
                        raise Stop(f"gave up at t = {t:.6g} after {steps} steps; raise max_steps, or loosen rtol")
                    message = _step(solver)
                    steps, since = steps + 1, since + 1
                    if solver.status == "failed" or not np.isfinite(solver.y).all():
                        raise Stop(_why(regime, t, y, message))
                    now = begin + solver.t if solver.status == "running" else t_end
                    if np.abs(solver.y).max() > OVERFLOW:
                        raise Stop(f"overflow at t = {now:.10g}: the state has grown beyond {OVERFLOW:g}")
                    h = solver.t - solver.t_old
                    _stop_at_blow_up(flow, y, solver.y, now, h)
                    dense = solver.dense_output()
                    event = regime.first_event(dense, solver.t_old, solver.t)
                    if event is not None:
                        now = begin + event
                    while pending < len(times) and times[pending] <= now:
                        at = times[pending]
                        emit(at, solver.y if at == t_end else dense(at - begin))
                        pending += 1
                    if event is not None:
                        t, y, since = now, regime.switch(now, dense(event)), 0
                        break
                    t, y = now, solver.y
                    fresh = regime.settle(y)
                    if fresh is None:
                        fresh = flow.rechart(y)
                    if since >= patience and not stiff:
                        stiff, fresh = True, y if fresh is None else fresh
                    if fresh is not None:
                        y = fresh
                        break
        except (Stop, np.linalg.LinAlgError) as stop:
            failed = isinstance(stop, np.linalg.LinAlgError)
            out.status = f"the samples on a kink could not be resolved at t = {t:.6g}: {stop}" if failed else str(stop)
            if not kept or t > kept[-1]:
                emit(t, y)
    out.t = np.array(kept)
    if regime is not None:
        out.switches, out.slides = regime.switches, regime.slides(t)
    return out


def _step(solver: Any) -> str | None:
    """One step of a SciPy stepper; why it failed, whichever way it says so, or None."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lsoda: ")
            return solver.step()
    except (ValueError, np.linalg.LinAlgError) as error:  # a field that overflows while the Jacobian is estimated
        solver.status = "failed"
        return str(error)


def _stop_at_blow_up(flow: Flow, y0: Array, y1: Array, t: float, h: float) -> None:
    """End the flow where its attention grows faster than time can be resolved; a step h led from y0 to y1 at t."""
    if not _can_blow_up(flow):
        return
    growth = max((flow.unpack(y1)[2] - flow.unpack(y0)[2]).max() / flow.attention.temperature, 1e-300)
    if h / growth < _LAST_MOMENT * t or (h < _LAST_STEPS * t and h / growth < 1e-6 * t):
        raise Stop(f"blow-up at t = {t:.10g}: the solution does not exist beyond")


def _can_blow_up(flow: Flow) -> bool:
    """Only under exp attention and constant gradients: a loss that is bounded below bounds the way y can go."""
    return flow.attention.kind == "exp" and flow.task.loss == "fixed"


def _why(regime: Smooth, t: float, y: Array, message: str | None) -> str:
    """What stopped the stepper at (t, y): a blow-up, an overflow, or something else."""
    speed = np.abs(regime(t, y)).max()
    size = max(1.0, np.abs(y).max())
    if not np.isfinite(speed):
        return f"overflow at t = {t:.10g}: the state has grown to {size:.3g}"
    if _can_blow_up(regime.flow) and speed * max(t, 1e-300) > 1e6 * size:
        return f"blow-up at t = {t:.10g}: the solution does not exist beyond"
    return f"the integrator stopped at t = {t:.10g}: {message or 'the state is not finite'}"
