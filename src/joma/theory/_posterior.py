"""What tokens say about the latents of a tree: exact posteriors by passing messages up and down (sum-product)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from joma.theory.setting import Array

if TYPE_CHECKING:
    from joma.theory.hierarchy import HBLT


def _exp(logs: Array) -> Array:
    """exp(logs) up to a factor, (…, states, n), with the largest state at 1; zeros where all are impossible."""
    top = logs.max(axis=-2, keepdims=True)
    return np.exp(logs - np.where(np.isfinite(top), top, 0.0))


def _log(values: Array) -> Array:
    with np.errstate(divide="ignore"):  # the logarithm of what is impossible is −inf
        return np.log(values)


def _through(rho: Array, logs: Array) -> Array:
    """A message (k, 2, n) across edges of ρ (k,): the other end is equal with probability ½(1 + ρ)."""
    e = _exp(logs)
    return _log(e.mean(axis=-2, keepdims=True) + rho[:, None, None] * (e - e[:, ::-1]) / 2)


def _others(logs: Array) -> Array:
    """For each entry of the first axis, the sum of all the others (−inf cannot be subtracted again)."""
    before, after = np.zeros_like(logs), np.zeros_like(logs)
    before[1:] = np.cumsum(logs[:-1], axis=0)
    after[:-1] = np.cumsum(logs[:0:-1], axis=0)[::-1]
    return before + after


def posterior(tree: HBLT, tokens: ArrayLike) -> tuple[Array, Array]:
    """P[class | tokens] (n, C) and P[y = 1 | tokens] (n, N) for tokens (n, M) of zeros and ones."""
    values = np.asarray(tokens)
    if values.ndim != 2 or values.shape[1] != len(tree.tokens):
        raise ValueError(
            f"tokens has shape {values.shape}; this tree needs (n, {len(tree.tokens)})"
        )
    top, n = tree.q.shape[1], len(values)
    given_class = np.stack([tree.q, 1 - tree.q])  # (2, C, n₁)
    # up: how likely the tokens below are, for each value of a variable and of what is above it
    below, up, above = (
        np.zeros((tree.size, 2, n)),
        np.empty((tree.size, 2, n)),
        np.empty((tree.size, 2, n)),
    )
    below[tree.tokens] = _log(np.stack([values.T == 0, values.T != 0], axis=1).astype(np.float64))
    for layer in reversed(tree.layers[1:]):
        up[layer] = _through(tree.rho[layer], below[layer])
        np.add.at(below, tree.parent[layer], up[layer])
    to_class = _log(
        np.stack([given_class[:, :, i].T @ _exp(below[i]) for i in range(top)])
    )  # (n₁, C, n)
    prior = _log(tree.prior)[:, None]
    of_class = _exp(to_class.sum(axis=0) + prior)
    impossible = np.flatnonzero(of_class.sum(axis=0) == 0)
    if impossible.size:
        raise ValueError(
            f"tokens[{impossible[0]}] has probability 0 in this tree; it says nothing about the latents"
        )
    # down: what all the rest of the tree says
    rest = _exp(_others(to_class) + prior)
    above[:top] = _log(np.stack([given_class[:, :, i] @ rest[i] for i in range(top)]))
    for p in np.unique(tree.parent[top:]):
        children = np.flatnonzero(tree.parent == p)
        above[children] = _through(tree.rho[children], above[p] + _others(up[children]))
    both = _exp(above + below)
    return (of_class / of_class.sum(axis=0)).T, (both[:, 1] / both.sum(axis=1)).T
