"""Pattern superposition constructed: one node trained on the patterns of two queries (Appendix A.4, Eqn. 60)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from joma.theory.claims._registry import Kind, Variant, claim
from joma.theory.setting import Array, Attention

HALF, COMMON, D = 3, 4, 16  # tokens of each pattern, tokens that both queries see, dimensions
STEPS, STEP, SEEDS = 2000, 0.5, 3
ATTENTIONS = ("linear", "exp", "softmax")


class Trained(NamedTuple):
    """One node after training, and what each query's samples brought to it."""

    E: Array  # (d, M + 2) embeddings: context tokens, then the two queries
    way: Array  # (d,) w − w(0)
    v: Array  # (2, M) V_m
    xi: Array  # (2,) ξ_m
    h: Array  # (N,) the node's outputs
    y: Array  # (N,) what they should be


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
def _trained(attention: str, seed: int, angle: float, residual: bool = True) -> Trained:
    """A ReLU node trained by gradient descent on squared loss; its weights w (d,) themselves are what is stepped."""
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
        b = np.vstack([sigma.weights(z[m], x[query == m]) for m in range(2)])  # (N, M): queries come in order
        f = np.hstack([b, one_hot if residual else 0 * one_hot]) @ E.T  # (N, d)
        a = f @ w
        h = np.maximum(a, 0.0)
        s = STEP * (y - h) * (a > 0) / len(y)
        z = z + one_hot.T @ (sigma.pull(x, b, np.outer(s, E[:, :M].T @ w)))
        w = w + s @ f
        v, xi = v + one_hot.T @ (s[:, None] * b), xi + one_hot.T @ s
    return Trained(E, w - w0, v, xi, h, y)


@claim(
    "A4.two_queries",
    source="Appendix A.4, Eqn. 60 and pattern superposition",
    statement="A node that is trained on two queries has w = w(0) + U_C(V₁ + V₂) + ξ₁u₁ + ξ₂u₂, in which U_Cᵀw and u_mᵀw are what the "
    "queries brought. It fires for the patterns of both and not for what lacks a token of them, with ξ₁, ξ₂ < 0 (linear, exp).",
    tolerance=1e-10,
    measures="largest |U_Cᵀ(w − w(0)) − V₁ − V₂| and |u_mᵀ(w − w(0)) − ξ_m|, relative to the way of w, after training the weights w of a "
    "ReLU node on squared loss, three attentions, three draws; 1 if, under linear or exp attention, an output is on the wrong side of ½ "
    "or a ξ_m is not negative",
    remark="With embeddings at an angle the sums still make up w, but no product with an embedding tells them apart. Without the residual "
    "connection the node separates the patterns as well: the tokens that both queries see take over the part of ξ. Under softmax "
    "attention ξ came out positive, and after 2,000 steps complete patterns have outputs of 0.43 to 0.54, others of at most 0.31",
    control="u₁ᵀu₂ = 0.3, and the same between two context tokens",
    derivation=r"$\dot w=\sum_m\mathbb E[g h'(U_Cb+u_m)1(q=m)]$, multiplied by $U_C^\top$ and $u_m^\top$.",
    kind=Kind.PRINTED,
    terms=("V", "ξ"),
    mutants={"the other query's ξ": "ξ₁ and ξ₂ exchanged", "V₁ alone": "V₂ left out", "angle 0.01": "u₁ᵀu₂ = 0.01"},
)
def a4_two_queries(variant: Variant) -> Iterator[float]:
    """What is left of the two queries in one node."""
    angle = 0.3 if variant == "control" else 0.01 if variant.has("angle 0.01") else 0.0
    for attention in ATTENTIONS:
        for seed in range(SEEDS):
            node = _trained(attention, seed, angle)
            brought = node.v[0] if variant.has("V₁ alone") else node.v.sum(axis=0)
            xi = node.xi[::-1] if variant.has("the other query's ξ") else node.xi
            parts = np.concatenate([variant.factor("V") * brought, variant.factor("ξ") * xi])
            off = np.abs(node.E.T @ node.way - parts).max() / np.linalg.norm(node.way)
            right = ((node.h > 0.5) == (node.y > 0.5)).all() and (node.xi < 0).all()
            yield max(float(off), 0.0 if right or attention == "softmax" else 1.0)
