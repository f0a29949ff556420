"""Eqn. 6 for 100,000 components at 200 times: the exact solver against SciPy's LSODA on a share of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from benchmarks._timing import alternate, row
from joma.theory import solve_bounce

COMPONENTS, TIMES, SHARE = 100_000, 200, 200


def run(rounds: int = 2) -> list[dict[str, Any]]:
    """Time of both sides; the ODE solver does one component in 500 and its time is scaled up."""
    rng = np.random.default_rng(0)
    mu = rng.uniform(0.05, 5.0, COMPONENTS) * rng.choice([-1, 1], COMPONENTS)
    t = np.linspace(0.0, 4.0, TIMES)
    some = mu[:: COMPONENTS // SHARE]

    def ode() -> Any:
        out = []
        for m in some:
            right = solve_ivp(
                lambda _, v, m=m: (m - v) * np.exp(v * v / 2),
                (0, 4),
                [0.0],
                "LSODA",
                t,
                rtol=1e-10,
                atol=1e-12,
            )
            out.append(right.y[0])
        return np.stack(out, axis=1)

    (fast, bounce), (slow, v) = alternate(lambda: solve_bounce(mu, t), ode, rounds=rounds)
    error = float(np.abs(bounce.v[:, :: COMPONENTS // SHARE] - v).max())
    return [
        row(
            f"Eqn. 6, {COMPONENTS:,} components × {TIMES} times",
            "`solve_bounce`",
            f"SciPy LSODA, component by component (timed on {SHARE}, scaled)",
            fast,
            slow * COMPONENTS / SHARE,
            f"largest difference in v {error:.0e} (LSODA at rtol 1e-10)",
            error=error,
        )
    ]
