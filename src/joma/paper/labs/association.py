"""When attention associates the tokens of a hierarchy: Eqn. 6 on the two trees of Figure 5.

shallow   class → α, α′ → m l, l′: m and l′ share nothing but the class
deep      class → α → β, β′ → m l, m′ l′: β–β′ can only begin when m–l and m′–l′ are done, and is counted from t = 0

The association time of a pair is the time at which v reaches a level of its target, with μ = scale · P(l | m), or from
the *excess* P(l | m) − P(l).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.integrate import quad
from scipy.special import lambertw

from joma.theory.bounce import flight_time
from joma.theory.hierarchy import HBLT
from joma.theory.setting import Array

# tree -> pair -> the two variables (context, query), numbered as in the tree
PAIRS = {
    "shallow": {"m–l": (3, 2), "m–l′": (4, 2)},
    "deep": {"m–l": (4, 3), "m′–l′": (6, 5), "β–β′": (2, 1), "m–l′": (6, 3)},
}


def trees(classes: int, epsilon: float) -> dict[str, HBLT]:
    """The two trees; each class triggers one latent, so that ρ₀ = 1 − 2/C, and ρ = 1 − ε below."""
    one_each = 1 - np.eye(classes)
    return {
        "shallow": HBLT(2, 2, 1 - epsilon, class_to_latent=one_each[:, :2]),
        "deep": HBLT(3, 2, 1 - epsilon, class_to_latent=one_each[:, :1]),
    }


def probabilities(
    tree: HBLT, case: str, samples: int = 0, rng: np.random.Generator | None = None
) -> dict[str, dict[str, float]]:
    """P(l | m) of each pair, and its excess over P(l): exact, or from ``samples`` drawn with ``rng``."""
    if rng is None:
        given, base = tree.cooccurrence(range(tree.size)), tree.marginal()
        together = {pair: float(given[l, m]) for pair, (l, m) in PAIRS[case].items()}
    else:
        y = tree.sample(samples, rng).y
        base = y.mean(axis=0)
        together = {pair: float(y[y[:, m] == 1, l].mean()) for pair, (l, m) in PAIRS[case].items()}
    excess = {pair: together[pair] - float(base[l]) for pair, (l, _) in PAIRS[case].items()}
    return {"co-occurrence": together, "excess": excess}


def count_with_first(tree: HBLT, samples: int, rng: np.random.Generator) -> tuple[Array, int]:
    """How often each token occurs together with token 0, and how often that one does, in ``samples`` or a few more."""
    counts, occurrences = np.zeros(len(tree.tokens)), 0
    for _ in range(-(-samples // 25_000)):  # in parts: all variables of all samples are large
        tokens = tree.sample(min(25_000, samples), rng).tokens
        with_first = tokens[tokens[:, 0] == 1]
        counts, occurrences = (
            counts + with_first.sum(axis=0, dtype=np.int64),
            occurrences + len(with_first),
        )
    return counts, occurrences


def association_time(mu: float, level: float, dynamics: str = "eqn6") -> float:
    """When v reaches ``level`` of its final value, from 0: by Eqn. 6, or by the "joint" flow that it stands for.

    The joint flow (`orthogonal_regression` under exp attention) is v̇ = (μ − v e^{v²/2}) e^{v²/2}, with v² → W(μ²).
    """
    if dynamics == "eqn6":
        return float(flight_time(-np.log1p(-level), mu))
    end = level * np.sqrt(lambertw(mu**2).real)
    return float(
        quad(
            lambda v: np.exp(-v * v / 2) / (abs(mu) - v * np.exp(v * v / 2)), 0, end, epsabs=1e-12
        )[0]
    )


def association_times(
    probability: dict[str, float],
    levels: Sequence[float] | Array,
    scales: Sequence[float],
    dynamics: str = "eqn6",
) -> dict[str, Array]:
    """The association times of each pair (level, scale), β–β′ after what it waits for."""
    times = {
        pair: np.array(
            [[association_time(scale * p, level, dynamics) for scale in scales] for level in levels]
        )
        for pair, p in probability.items()
    }
    if "β–β′" in times:
        times["β–β′"] += np.maximum(times["m–l"], times["m′–l′"])
    return times
