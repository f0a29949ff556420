"""The same inputs under gradients of different kinds: what linear and nonlinear nodes are contrasted on (Section 4).

fixed           g of the start, held: Assumption 1, and Theorem 3's own setting
cross-entropy   g = 1[y = k] − softmax(h)_k, which moves; separable classes have no finite target
targets         g = y − h with y = φ(scale (x − x̄)B): every weight has a finite target, and the scale sets its size
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from joma.paper.labs.ensemble import Ensemble, integrate_all
from joma.theory.isotropic import Mixture, StudentT
from joma.theory.setting import Array, Task, as_activation
from joma.theory.tasks import class_distributions, small_start, uneven_classification

GRADIENTS = ("fixed", "cross-entropy", "targets")
INPUTS = ("smooth", "random", "uneven", "mixture")


def inputs(name: str, rng: np.random.Generator, tokens: int = 6) -> Task:
    """Figure 2's classes ("smooth", "random"), uneven frequencies ("uneven"), or Theorem 3's mixture of two isotropic
    distributions with constant gradients of either sign ("mixture", 60 draws of each, one node)."""
    if name == "mixture":
        centre = rng.standard_normal(tokens)
        centre *= 1.5 / np.linalg.norm(centre)
        centres = np.stack([centre, np.zeros(tokens)])
        return Mixture(StudentT(tokens, nu=3), centres, np.array([0.6, -0.4])).task(60, rng)
    if name == "uneven":
        return uneven_classification(tokens, rng)
    half = tokens // 2
    return class_distributions(
        rng, smooth=name == "smooth", distinct=half, common=tokens - half, classes=tokens + 2
    )


def with_gradients(
    task: Task, kind: str, activation: str, rng: np.random.Generator, scale: float
) -> Task:
    """The inputs of ``task`` with gradients of this kind; ``scale`` is that of the targets."""
    if kind == "targets":
        B = rng.standard_normal((task.tokens, task.nodes))
        y = as_activation(activation).phi(scale * (task.x - task.p @ task.x) @ B)
        return Task.regression(task.x, y, p=task.p, signed=task.signed)
    if kind == "fixed":
        return Task(
            task.x, task.gradient(np.zeros((task.samples, task.nodes))), task.p, task.signed
        )
    return task


def flows(
    name: str, kind: str, attention: str, activation: str, seeds: Sequence[object], times: Array, *,
    scale: float = 32.0, tokens: int = 6,
) -> Ensemble:  # fmt: skip
    """One flow per seed, from a small random start; the inputs and the start depend on nothing but the seed."""
    tasks, starts = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)  # type: ignore[arg-type]
        task = inputs(name, rng, tokens)
        starts.append(small_start(task, rng))
        tasks.append(with_gradients(task, kind, activation, rng, scale))
    return integrate_all(tasks, starts, times, attention=attention, activation=activation)


def late_times(end: float, count: int = 81) -> Array:
    """0 and times evenly spaced in ln t, from 0.01 to ``end``."""
    return np.concatenate([[0.0], np.geomspace(0.01, end, count - 1)])
