"""Named synthetic tasks: the paper's own (Figures 2-3) and a few small ones to try things on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from joma._suggest import unknown_name
from joma.theory.setting import Array, Task


class Start(NamedTuple):
    """A starting point, in the order in which ``integrate`` and ``descend`` take it."""

    v0: Array  # (M, K)
    xi0: Array  # (K,)
    z0: Array  # (M,)


def small_start(task: Task, rng: np.random.Generator, scale: float = 0.01) -> Start:
    """Independent normal weights and logits, ``scale`` times unit: what the paper's Figure 2 starts from."""
    M, K = task.tokens, task.nodes
    return Start(*(scale * rng.standard_normal(shape) for shape in ((M, K), (K,), (M,))))


def class_distributions(
    rng: np.random.Generator,
    *,
    smooth: bool,
    distinct: int = 10,
    common: int = 10,
    classes: int = 20,
) -> Task:
    """Figure 2: one sample per class, ``distinct`` tokens whose frequency depends on the class, ``common`` others.

    smooth: the distinct tokens' distribution moves smoothly with the class (left two panels); otherwise it is
    drawn at random for each class (right two).
    """
    x = rng.random((classes, distinct + common)) / 2
    if smooth:
        centre = np.arange(classes)[:, None] / classes * distinct
        x[:, :distinct] = np.exp(-((np.arange(distinct) - centre) ** 2) / 30)
    return Task.classification(x / x.sum(axis=1, keepdims=True), np.arange(classes))


def random_gradients(
    rng: np.random.Generator, samples: int = 50, tokens: int = 30, nodes: int = 10
) -> Task:
    """Random frequencies and constant normal gradients (Assumption 1)."""
    x = rng.random((samples, tokens))
    return Task(x / x.sum(axis=1, keepdims=True), rng.standard_normal((samples, nodes)))


def uneven_classification(tokens: int, rng: np.random.Generator, classes: int = 4) -> Task:
    """2 M samples of uneven frequencies, labelled by the largest of some random linear functions."""
    x = rng.gamma(0.3, size=(2 * tokens, tokens))
    x /= x.sum(axis=1, keepdims=True)
    return Task.classification(
        x, (x @ rng.standard_normal((tokens, classes))).argmax(axis=1), classes=classes
    )


def orthogonal_regression(mu: Array) -> Task:
    """The task that Eqn. 6 stands for: under uniform attention it has v̇ = μ − v exactly, and ξ = 0.

    Signed one-token samples ±√M e_l with targets ±√M μ_l and squared loss: E[x xᵀ] = I, E[g] = −ξ.
    """
    mu = np.asarray(mu, dtype=np.float64)
    root = np.sqrt(len(mu))
    x = root * np.vstack([np.eye(len(mu)), -np.eye(len(mu))])
    return Task.regression(x, root * np.concatenate([mu, -mu])[:, None], signed=True)


TASKS: dict[str, tuple[str, Callable[[np.random.Generator], Task]]] = {
    "smooth-classes": (
        "Figure 2, left: class distributions that move smoothly",
        lambda rng: class_distributions(rng, smooth=True),
    ),
    "random-classes": (
        "Figure 2, right: random class distributions",
        lambda rng: class_distributions(rng, smooth=False),
    ),
    "random-gradients": (
        "constant random gradients, 50 samples, 30 tokens, 10 nodes",
        random_gradients,
    ),
    "two-tokens": (
        "one node, a salient token and a weaker one",
        lambda rng: Task([[1.0, 0.5]], [[1.0]]),
    ),
}


def named_task(name: str, rng: np.random.Generator) -> Task:
    """The synthetic task called ``name``; ``TASKS`` lists them."""
    if name not in TASKS:
        raise ValueError(unknown_name(name, TASKS, "task"))
    return TASKS[name][1](rng)
