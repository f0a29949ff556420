"""Claims beyond Theorem 1: many queries that share the MLP, and many heads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal

import numpy as np

from joma.paper.claims._integrals import logit_part, weight_coefficient
from joma.paper.claims._registry import Kind, Variant, claim, drift
from joma.theory.queries import BlockFlow, BlockTrajectory
from joma.theory.setting import Array
from joma.theory.tasks import random_gradients

ACTIVATIONS = ("linear", "gelu", "relu", "leaky_relu")
SAMPLES = 20
TOKENS = 6
NODES = 3
QUERIES = 3


@functools.cache
def _paths(attention: str) -> tuple[BlockTrajectory, ...]:
    """Flows with three queries of unequal probability, in both conventions.

    z_m moves with the joint expectation or with E_{q=m}.
    """
    rng = np.random.default_rng(7)
    paths = []
    for activation in ACTIVATIONS:
        for conditional in (False, True):
            task = random_gradients(rng, samples=SAMPLES, tokens=TOKENS, nodes=NODES)
            query = np.concatenate([[0, 1, 2], rng.choice(3, size=SAMPLES - 3, p=[0.6, 0.3, 0.1])])
            flow = BlockFlow(
                task,
                query,
                attention,
                activation,
                attention_lr=1.7,
                temperature=0.8,
                conditional=conditional,
            )
            v0 = 0.5 * rng.standard_normal((TOKENS, NODES))
            z0 = 0.3 * rng.standard_normal((QUERIES, TOKENS))
            # z = 0 is a fixed point of linear attention; exp attention could blow up from there.
            if attention == "linear":
                z0 += 1.0
            else:
                z0 -= 1.5
            path = flow.integrate(2.0, v0, None, z0, times=21)
            if not path.done:
                raise ArithmeticError(path.status)
            paths.append(path)
    return tuple(paths)


def _drift(path: BlockTrajectory, summed: Array, factor: float) -> float:
    """Drift of ``summed`` (T, …, M) − factor Σ_k v_k²."""
    square = (path.v**2).sum(axis=2)
    if summed.ndim > 2:
        square = square[:, None]
    return drift(summed - factor * square, path.z)


def _queries(attention: str, variant: Variant) -> Iterator[float]:
    for path in _paths(attention):
        flow = path.flow
        factor = weight_coefficient(attention, flow.ratio, flow.attention.temperature)
        factor *= variant.factor("Σ v²")
        z = logit_part(attention, path.z)  # (T, Q, M)
        # The control takes the weights of the other convention.
        if flow.conditional != (variant == "control"):
            weight = np.bincount(flow.query, flow.task.p)
        else:
            weight = np.ones(QUERIES)
        weight = weight * np.array([variant.factor("one query"), 1.0, 1.0])
        if not variant.has("each query by itself"):
            z = (weight[:, None] * z).sum(axis=1)  # (T, M)
        yield _drift(path, z, factor)


_MEASURES = (
    "largest drift over four activations and both conventions (joint gradient, E_{q=m}), three "
    "queries with probabilities about 0.6, 0.3, 0.1, relative to max(1, max|z|)"
)
_MUTANTS = {
    "each query by itself": "z_m in the place of Σ_m z_m: Theorem 1 applied to one of many queries"
}


@claim(
    "T1.queries.exp",
    kind=Kind.EXTENSION,
    source="Theorem 1, for a block with many queries",
    statement=(
        "Exp attention, queries that share the MLP: Σ_m z_m = (r/2T) Σ_k v_k² + c where z_m moves "
        "with the joint gradient, Σ_m P(m) z_m under the paper's E_{q=m}. The paper has one query."
    ),
    tolerance=1e-9,
    measures=_MEASURES,
    remark=(
        "It needs context embeddings that are orthonormal and orthogonal to all query embeddings "
        "(d ≥ M_C + M_Q). One query's own z_m is not a function of v"
    ),
    control="the weights of the other convention",
    derivation=(
        "v̇_k = η Σ_m B_mk with B_mk = E[s_k b 1(q = m)], and ż_m = (η_z/T) Σ_k v_k ∘ B_mk meets "
        "the v that all queries made: only Σ_m ż_m = (r/T) Σ_k v_k ∘ v̇_k is a total derivative"
    ),
    paper_formula=r"one query: $z_m=\tfrac12\sum_k v_k^2+c$",
    corrected_formula=r"many: $\sum_m z_m=\tfrac{r}{2T}\sum_k v_k^2+c$",
    terms=("Σ v²", "one query"),
    mutants=_MUTANTS,
)
def t1_queries_exp(variant: Variant) -> Iterator[float]:
    """Measure the drift of the sum over queries."""
    return _queries("exp", variant)


@claim(
    "T1.queries.linear",
    kind=Kind.EXTENSION,
    source="Theorem 1, for a block with many queries",
    statement=(
        "Linear attention, queries that share the MLP: Σ_m z_m² = r Σ_k v_k² + c where z_m moves "
        "with the joint gradient, Σ_m P(m) z_m² under the paper's E_{q=m}. The paper has one query."
    ),
    tolerance=1e-9,
    measures=_MEASURES,
    remark="Same embeddings as for exp attention",
    control="the weights of the other convention",
    derivation=(
        "z_m ∘ ż_m = η_z Σ_k v_k ∘ B_mk with B_mk = E[s_k b 1(q = m)], b = x ∘ z_m/T, and v̇_k = η "
        "Σ_m B_mk, so Σ_m z_m ∘ ż_m = r Σ_k v_k ∘ v̇_k"
    ),
    paper_formula=r"one query: $z_m^2=\sum_k v_k^2+c$",
    corrected_formula=r"many: $\sum_m z_m^2=r\sum_k v_k^2+c$",
    terms=("Σ v²", "one query"),
    mutants=_MUTANTS,
)
def t1_queries_linear(variant: Variant) -> Iterator[float]:
    """Measure the drift of the sum over queries."""
    return _queries("linear", variant)


@functools.cache
def _two_heads(embedding: str, attention: str) -> BlockTrajectory:
    """The flow of a block of two heads and two queries, with value maps as ``embedding`` says."""
    rng = np.random.default_rng(8)
    task = random_gradients(rng, samples=SAMPLES, tokens=TOKENS, nodes=NODES)
    query = np.arange(SAMPLES) % 2
    v0 = 0.5 * rng.standard_normal((2 * TOKENS, NODES))
    z0 = 0.3 * rng.standard_normal((2, 2 * TOKENS)) + 1.0
    if attention == "exp":
        z0 -= 2.5
    values: Array | Literal["separate", "shared"] = "separate"
    if embedding == "shared":
        values = "shared"
        v0 = v0[:TOKENS]
    elif embedding != "orthonormal":
        values = _value_maps(embedding, rng)
        v0 = (values.T @ np.vstack([v0, np.zeros((2, NODES))]))[: 2 * TOKENS]
    flow = BlockFlow(task, query, attention, "gelu", heads=2, values=values)
    path = flow.integrate(2.0, v0, None, z0, times=21)
    if not path.done:
        raise ArithmeticError(path.status)
    return path


def _value_maps(embedding: str, rng: np.random.Generator) -> Array:
    """The embeddings (2 M + 2, 2 M + 2) of the tokens in both heads, and of the queries."""
    M = TOKENS
    E = np.eye(2 * M + 2)
    if embedding == "orthogonal subspaces":
        # Each head projects the tokens to M/2 dimensions of its own.
        for head in (slice(0, M), slice(M, 2 * M)):
            directions = np.linalg.qr(rng.standard_normal((M, M)))[0][:, : M // 2]
            E[head, head] = directions @ directions.T
    else:
        # Both heads are orthonormal, at an angle to each other: U₁ᵀU₂ = 0.3 I.
        E[:M, M : 2 * M] = 0.3 * np.eye(M)
        E[M : 2 * M, M : 2 * M] = np.sqrt(1 - 0.09) * np.eye(M)
    return E


@claim(
    "T1.heads",
    kind=Kind.EXTENSION,
    source="Theorem 1, for a block with many heads",
    statement=(
        "If U_hᵀU_h′ = δ_hh′ I, orthogonal to the queries and frozen, each head has its own "
        "integral: Σ_m z_mh = ½ Σ_k v_hk² + c_h (exp), Σ_m z_mh² = Σ_k v_hk² + c_h (linear), v_h = "
        "U_hᵀw. With one value map for all heads only the sum over heads is conserved. The paper "
        "has one head."
    ),
    tolerance=1e-9,
    measures=(
        "largest drift, linear and exp attention, two heads and two queries: per head for "
        "orthonormal maps, of the sum over heads for a shared one"
    ),
    remark="Orthogonal subspaces of lower rank are not enough (d ≥ H·M_C + M_Q is needed)",
    control="U_hᵀU_h = I for each head, but U₁ᵀU₂ = 0.3 I",
    derivation=(
        "v̇_hk = η Σ_h′ U_hᵀU_h′ Σ_m B_mh′k, and Σ_m ż_mh = (η_z/T) Σ_k v_hk ∘ Σ_m B_mhk; they "
        "match token by token for all B only if U_hᵀU_h′ = δ_hh′ I. If all U_h = U, then v̇_k = η "
        "Σ_mh B_mhk"
    ),
    paper_formula=r"one head: $z_m=\tfrac12\sum_k v_k^2+c$",
    corrected_formula=(
        r"$\sum_m z_{mh}=\tfrac12\sum_k v_{hk}^2+c_h$ if $U_h^\top U_{h'}=\delta_{hh'}I$; "
        r"$\sum_{m,h} z_{mh}=\tfrac12\sum_k v_k^2+c$ if $U_h=U$"
    ),
    terms=("Σ v²", "Σ v² (shared)"),
    mutants={
        "each head, shared map": "one integral per head where the heads share a value map",
        ("each head, lower rank"): (
            "one integral per head in orthogonal subspaces of half the dimension"
        ),
        "the other head": "Σ v² of the other head",
    },
)
def t1_heads(variant: Variant) -> Iterator[float]:
    """Measure the drift of the integrals of a two-head block."""
    embedding = variant.choose(
        "orthonormal",
        {
            "control": "at an angle",
            "each head, lower rank": "orthogonal subspaces",
            "each head, shared map": "shared",
        },
    )
    for attention in ("linear", "exp"):
        factor = weight_coefficient(attention)
        path = _two_heads(embedding, attention)
        per_head = logit_part(attention, path.z).sum(axis=1)  # (T, 2 M)
        if variant.has("the other head"):
            per_head = np.roll(per_head, TOKENS, axis=1)
        yield _drift(path, per_head, variant.factor("Σ v²") * factor)
        path = _two_heads("shared", attention)
        per_head = logit_part(attention, path.z).sum(axis=1)
        summed = per_head.reshape(-1, 2, TOKENS).sum(axis=1)  # (T, M)
        # v is the same for both heads: each logit counts once.
        square = variant.factor("Σ v² (shared)") * factor * (path.v[:, :TOKENS] ** 2).sum(axis=2)
        yield drift(summed - square, path.z)
