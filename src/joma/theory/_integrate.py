"""Stepping a flow through its regimes to its output times: SciPy's steppers, stiffness, blow-ups, and an ending.

Nothing on the way raises: what ends a flow early is in the solution's ``ending``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import scipy.integrate

from joma._suggest import unknown_name
from joma.theory._block import Block
from joma.theory._charts import Chart
from joma.theory._kinks import Kinked, Smooth, Stop
from joma.theory.ending import Ending, EndingKind, done
from joma.theory.optimisers import Optimiser, walk
from joma.theory.setting import Array

# A state this large, whose squares are still numbers, has overflowed.
OVERFLOW = 1e100


@dataclass(frozen=True)
class System:
    """What is integrated: a block, the chart that its state starts in, and the start there."""

    block: Block
    chart: Chart
    y0: Array


@dataclass(frozen=True, eq=False)
class Solution:
    """A flow at its output times, and how it ended."""

    t: Array  # (T,)
    y: list[Array]  # T state vectors, each in the chart of its time
    v: list[Array]
    xi: list[Array]
    z: list[Array]
    ending: Ending
    switches: int = 0
    slides: list[tuple[int, int, float, float]] = field(
        default_factory=list
    )  # sample, node, from, to


_METHODS = {
    name: getattr(scipy.integrate, name) for name in ("DOP853", "RK45", "Radau", "BDF", "LSODA")
}
METHODS = ("auto", *_METHODS)
# "auto" is DOP853 until it has taken so many steps without a switch that the flow must be stiff (large attention
# sharpens a smooth activation into a kink, and makes moving gradients settle fast), then LSODA to the end.
_PATIENCE = {"smooth": 1000, "kinked": 300}
# Attention that grows by a factor e within this fraction of the elapsed time is blowing up: what is left of the
# solution cannot be told apart on the time axis. Where the flow is stiff as well, its steps get that short first.
_LAST_MOMENT = 1e-12
_LAST_STEPS = 1e-11


def integrate(
    system: System,
    times: Array,
    t_end: float,
    *,
    rtol: float,
    atol: float,
    method: str,
    max_steps: int,
) -> Solution:
    """Step a system through all events to t_end and read it off at ``times``; never raises on the way."""
    if method not in METHODS:
        raise ValueError(unknown_name(method, METHODS, "method"))
    block, chart, y0 = system.block, system.chart, system.y0
    kept: list[tuple[float, Array, Array, Array, Array]] = []

    def emit(t: float, y: Array, chart: Chart) -> None:
        v, xi, z = chart.unpack(y)
        kept.append((t, np.array(y), np.array(v), np.array(xi), np.array(z)))

    t, y, steps, since, pending = 0.0, y0, 0, 0, 0
    h: float | None = None
    patience, stiff = _PATIENCE["smooth" if block.slopes is None else "kinked"], False
    regime: Smooth | None = None
    ending = done(t_end)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        try:
            if times[0] == 0:
                emit(0.0, y0, chart)
                pending = 1
            regime = (
                Smooth(block, chart)
                if block.slopes is None
                else Kinked(block, chart, y0, rtol, atol)
            )
            while t < t_end:
                # each stretch has a clock of its own from 0: a switch can start motion too fast for that of the whole
                begin = t
                stepper = ("LSODA" if stiff else "DOP853") if method == "auto" else method
                # the last step is a fair guess of the first, but LSODA would not refuse it where the field overflows
                guess = None if h is None or stepper == "LSODA" else min(h, t_end - begin)
                solver = _METHODS[stepper](
                    regime, 0.0, y, t_end - begin, first_step=guess, rtol=rtol, atol=atol
                )
                while solver.status == "running":
                    if steps >= max_steps:
                        message = f"gave up at t = {t:.6g} after {steps} steps; raise max_steps, or loosen rtol"
                        raise Stop(EndingKind.STEPS, t, message)
                    complaint = _step(solver)
                    steps, since = steps + 1, since + 1
                    if solver.status == "failed" or not np.isfinite(solver.y).all():
                        raise _why(regime, t, y, complaint)
                    now = begin + solver.t if solver.status == "running" else t_end
                    if np.abs(solver.y).max() > OVERFLOW:
                        message = (
                            f"overflow at t = {now:.10g}: the state has grown beyond {OVERFLOW:g}"
                        )
                        raise Stop(EndingKind.OVERFLOW, now, message)
                    h = solver.t - solver.t_old
                    _stop_at_blow_up(regime, y, solver.y, now, h)
                    dense = solver.dense_output()
                    event = regime.first_event(dense, solver.t_old, solver.t)
                    if event is not None:
                        now = begin + event
                    while pending < len(times) and times[pending] <= now:
                        at = times[pending]
                        emit(at, solver.y if at == t_end else dense(at - begin), regime.chart)
                        pending += 1
                    if event is not None:
                        t, y, since = now, regime.switch(now, dense(event)), 0
                        break
                    t, y = now, solver.y
                    fresh = regime.settle(y)
                    if fresh is None:
                        fresh = regime.rechart(y)
                    if since >= patience and not stiff:
                        stiff, fresh = True, y if fresh is None else fresh
                    if fresh is not None:
                        y = fresh
                        break
        except (Stop, np.linalg.LinAlgError) as stop:
            if isinstance(stop, Stop):
                ending = stop.ending
            else:
                message = f"the samples on a kink could not be resolved at t = {t:.6g}: {stop}"
                ending = Ending(EndingKind.KINK, t, message)
            if not kept or t > kept[-1][0]:
                emit(t, y, chart if regime is None else regime.chart)
    switches, slides = (0, []) if regime is None else (regime.switches, regime.slides(t))
    times_kept, states, v, xi, z = (list(column) for column in zip(*kept, strict=True))
    return Solution(np.array(times_kept), states, v, xi, z, ending, switches, slides)


def descend(system: System, steps: int, step: float, optimiser: Optimiser) -> Solution:
    """Steps of an optimiser with a constant step size from the system's start; time runs as n · step."""
    chart, states, ending = system.chart, [system.y0], done(steps * step)
    for n, moment in enumerate(islice(walk(system, optimiser, step), steps), start=1):
        if not np.abs(moment.y).max() < OVERFLOW:
            message = (
                f"overflow at step {n}: the step size {step:g} is too large, or the flow blows up"
            )
            ending = Ending(EndingKind.OVERFLOW, n * step, message)
            break
        states.append(moment.y)
    v, xi, z = (list(column) for column in zip(*(chart.unpack(y) for y in states), strict=True))
    return Solution(step * np.arange(len(states), dtype=np.float64), states, v, xi, z, ending)


def _step(solver: Any) -> str | None:
    """One step of a SciPy stepper; why it failed, whichever way it says so, or None."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "lsoda: ")
            return solver.step()
    except (
        ValueError,
        np.linalg.LinAlgError,
    ) as error:  # a field that overflows while the Jacobian is estimated
        solver.status = "failed"
        return str(error)


def _stop_at_blow_up(regime: Smooth, y0: Array, y1: Array, t: float, h: float) -> None:
    """End the flow where its attention grows faster than time can be resolved; a step h led from y0 to y1 at t."""
    if not regime.block.can_blow_up:
        return
    (_, _, z0), (_, _, z1) = regime.chart.unpack(y0), regime.chart.unpack(y1)
    growth = max((z1 - z0).max() / regime.block.attention.temperature, 1e-300)
    if h / growth < _LAST_MOMENT * t or (h < _LAST_STEPS * t and h / growth < 1e-6 * t):
        raise _blow_up(t)


def _blow_up(t: float) -> Stop:
    return Stop(
        EndingKind.BLOW_UP, t, f"blow-up at t = {t:.10g}: the solution does not exist beyond"
    )


def _why(regime: Smooth, t: float, y: Array, complaint: str | None) -> Stop:
    """What stopped the stepper at (t, y): a blow-up, an overflow, or something else."""
    speed = np.abs(regime(t, y)).max()
    size = max(1.0, np.abs(y).max())
    if not np.isfinite(speed):
        return Stop(
            EndingKind.OVERFLOW, t, f"overflow at t = {t:.10g}: the state has grown to {size:.3g}"
        )
    if regime.block.can_blow_up and speed * max(t, 1e-300) > 1e6 * size:
        return _blow_up(t)
    message = f"the integrator stopped at t = {t:.10g}: {complaint or 'the state is not finite'}"
    return Stop(EndingKind.INTEGRATOR, t, message)
