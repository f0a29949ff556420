"""What tokens say about the latents of a tree: exact posteriors by passing messages up and down (sum-product)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from joma.theory.setting import Array

if TYPE_CHECKING:
    from joma.theory.hierarchy import HBLT


def posterior(tree: HBLT, tokens: ArrayLike) -> tuple[Array, Array]:
    """P[class | tokens] (n, C) and P[y = 1 | tokens] (n, N) for tokens (n, M) of zeros and ones."""
    seen = np.asarray(tokens)
    if seen.ndim != 2 or seen.shape[1] != len(tree.tokens):
        raise ValueError(f"tokens has shape {seen.shape}; this tree needs (n, {len(tree.tokens)})")
    top, n = tree.q.shape[1], len(seen)
    # up: how likely the tokens below are for each value of a variable, and of what is above it
    below = np.ones((tree.size, 2, n))
    below[tree.tokens] = np.stack([seen.T == 0, seen.T != 0], axis=1)
    given_class = np.stack([tree.q, 1 - tree.q])  # (2, C, n₁)
    up = np.empty((tree.size, 2, n))
    for i in reversed(range(tree.size)):
        total = below[i].sum(axis=0)
        below[i] /= np.where(total > 0, total, 1.0)
        if i >= top:
            up[i] = below[i].mean(axis=0) + tree.rho[i] * (below[i] - below[i, ::-1]) / 2
            below[tree.parent[i]] *= up[i]
    from_top = [given_class[:, :, i].T @ below[i] for i in range(top)]  # (C, n) each
    of_class = tree.prior[:, None] * np.prod(from_top, axis=0)
    impossible = np.flatnonzero(of_class.sum(axis=0) == 0)
    if impossible.size:
        raise ValueError(f"tokens[{impossible[0]}] has probability 0 in this tree; it says nothing about the latents")
    # down: what the rest of the tree says; dividing by one's own message could divide by zero, so multiply the others
    above = np.empty((tree.size, 2, n))
    for i in range(top):
        rest = tree.prior[:, None] * np.prod([m for j, m in enumerate(from_top) if j != i], axis=0)
        above[i] = given_class[:, :, i] @ rest
    for i in range(top, tree.size):
        p = tree.parent[i]
        siblings = [up[j] for j in np.flatnonzero(tree.parent == p) if j != i]
        rest = above[p] * np.prod(siblings, axis=0)
        rest = rest / rest.sum(axis=0)
        above[i] = rest.mean(axis=0) + tree.rho[i] * (rest - rest[::-1]) / 2
    both = above * below
    return (of_class / of_class.sum(axis=0)).T, (both[:, 1] / both.sum(axis=1)).T
