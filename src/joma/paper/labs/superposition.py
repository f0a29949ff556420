"""A node that is trained on the patterns of two queries (Appendix A.4, Eqn. 60: pattern superposition)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from joma.theory.setting import Array, Attention

HALF, COMMON, D = 3, 4, 16  # tokens of each pattern, tokens that both queries see, dimensions
STEPS, STEP = 2000, 0.5
ATTENTIONS = ("linear", "exp", "softmax")


class TrainedNode(NamedTuple):
    """One node after training, and what each query's samples brought to it."""

    E: Array  # (d, M + 2) embeddings: context tokens, then the two queries
    way: Array  # (d,) w − w(0)
    v: Array  # (2, M) V_m
    xi: Array  # (2,) ξ_m
    h: Array  # (N,) the node's outputs
    y: Array  # (N,) what they should be

    @property
    def separated(self) -> float:
        """Share of the outputs that are on the right side of ½."""
        return float(((self.h > 0.5) == (self.y > 0.5)).mean())

    @property
    def apart(self) -> float:
        """How far Eᵀ(w − w(0)) is from (V₁ + V₂, ξ₁, ξ₂), the largest entry, relative to the way of w."""
        parts = np.concatenate([self.v.sum(axis=0), self.xi])
        return float(np.abs(self.E.T @ self.way - parts).max() / np.linalg.norm(self.way))


def _contexts(rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Frequencies (N, M), queries (N,) and targets (N,): a query's pattern is complete, or lacks one of its tokens."""
    M, rows, query, y = 2 * HALF + COMMON, [], [], []
    for m in range(2):
        pattern = np.arange(HALF) + m * HALF
        for missing in (None, *pattern):
            for _ in range(4):
                x = np.zeros(M)
                x[2 * HALF :] = rng.dirichlet(np.ones(COMMON))
                x[pattern] = 1.0
                if missing is not None:
                    x[missing] = 0.0
                rows.append(x / x.sum())
                query.append(m)
                y.append(float(missing is None))
    return np.array(rows), np.array(query), np.array(y)


@functools.cache
def trained_node(attention: str, seed: int, angle: float, residual: bool = True) -> TrainedNode:
    """A ReLU node trained by gradient descent on squared loss; its weights w (d,) themselves are what is stepped.

    Arguments:
        attention: "linear", "exp" or "softmax".
        seed: of the contexts and the embeddings.
        angle: cosine between the two queries' embeddings, and between those of two tokens; all others are orthogonal.
        residual: whether the query's embedding is added to what it attends to.
    """
    rng = np.random.default_rng((16, seed))
    x, query, y = _contexts(rng)
    M, sigma = x.shape[1], Attention(attention)
    E = np.linalg.qr(rng.standard_normal((D, M + 2)))[0]
    E[:, -1] = angle * E[:, -2] + np.sqrt(1 - angle**2) * E[:, -1]
    E[:, 0] = angle * E[:, 1] + np.sqrt(1 - angle**2) * E[:, 0]
    w0 = E @ np.concatenate([np.full(M, 0.5), np.zeros(2)])  # alive: every context is seen at first
    w, z = w0, np.full((2, M), 1.0 if attention == "linear" else 0.0)
    v, xi, one_hot = np.zeros((2, M)), np.zeros(2), np.eye(2)[query]
    h = np.zeros(len(y))
    for _ in range(STEPS):
        b = np.vstack(
            [sigma.weights(z[m], x[query == m]) for m in range(2)]
        )  # (N, M): queries come in order
        f = np.hstack([b, one_hot if residual else 0 * one_hot]) @ E.T  # (N, d)
        a = f @ w
        h = np.maximum(a, 0.0)
        s = STEP * (y - h) * (a > 0) / len(y)
        z = z + one_hot.T @ (sigma.pull(x, b, np.outer(s, E[:, :M].T @ w)))
        w = w + s @ f
        v, xi = v + one_hot.T @ (s[:, None] * b), xi + one_hot.T @ s
    return TrainedNode(E, w - w0, v, xi, h, y)
