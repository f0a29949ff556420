"""The dynamics of Figure 4, case by case: the authors' script, Eqn. 6, and the joint flow."""

from __future__ import annotations

import numpy as np

from joma.paper.labs.rebound import entropy, eqn6_path, joint_path
from joma.theory import solve_bounce, solve_softmax_bounce
from joma.theory.bounce import softmax_entropy
from joma.theory.setting import Array


def path(case: str, mu: Array, along: float = 1.0) -> tuple[Array, Array]:
    """Times and v of Eqn. 6 or of a joint flow, until they are at rest; ``along``: the ε of C = I + (ε − 1)μ̂μ̂ᵀ."""
    target = mu * np.exp(mu * mu / 2) if case == "joint" else mu
    return eqn6_path(mu, along, end=1e3) if case == "eqn6" else joint_path(target, along)


def curves(mu: Array, times: int, end: float) -> dict[str, tuple[Array, Array, Array]]:
    """Times, v and entropy per case; of a solver's steps about ``times``, the lowest entropy among them.

    ``end`` is the last time of the authors' script.
    """
    t = np.linspace(0.0, end, times)
    script = solve_softmax_bounce(mu, t)
    found = {"paper": (t, script.v, script.entropy())}
    for case in ("eqn6", "joint", "target"):
        t, v = path(case, mu)
        v = solve_bounce(mu, t).v if case == "eqn6" else v
        found[case] = (t, v, entropy(v))
        if case == "eqn6":
            found["caption"] = (t, v, softmax_entropy(v * v))
    for case, (t, v, nats) in found.items():
        kept = np.unique([*range(0, len(t), -(-len(t) // times)), nats.argmin(), len(t) - 1])
        found[case] = (t[kept], v[kept], nats[kept])
    return found
