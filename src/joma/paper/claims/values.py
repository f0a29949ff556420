"""Claims on the value map W_V, which the paper merges into the embeddings (Section 2)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.integrate import solve_ivp

from joma.paper.claims._registry import Kind, Variant, claim, largest
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Attention, Task, as_activation
from joma.theory.tasks import random_gradients

DIMENSIONS = 10
TOKENS = 5
NODES = 3
END = 1.5


@dataclass(frozen=True)
class ValuePath:
    """A block with a value map over time, and its embeddings."""

    w: Array  # (T, d, K)
    values: Array  # W_V, (T, d, d)
    z: Array  # (T, M)
    U: Array  # (d, M + 1)


@dataclass(frozen=True)
class Draw:
    """A task with embeddings and a start."""

    task: Task
    U: Array  # (d, M + 1)
    w: Array  # (d, K)
    values: Array  # W_V, (d, d)
    z: Array  # (M,)

    def __iter__(self) -> Iterator[Array]:
        """Yield the parts of the state: w, W_V, z."""
        yield from (self.w, self.values, self.z)


def _flow(attention: str, draw: Draw, *, trained: bool) -> ValuePath:
    """The gradient flow of h = φ(wᵀ(W_V U_C b + u_m)), written down for (w, W_V, z) as they are."""
    sigma = Attention(attention)
    phi = as_activation("gelu")
    task = draw.task
    contexts = draw.U[:, :-1]  # (d, M)
    query = draw.U[:, -1]  # (d,)

    def split(flat: Array) -> list[Array]:
        """(…,) of the state as flat parts: w, W_V, z."""
        return np.split(flat, np.cumsum([part.size for part in draw])[:-1])

    def velocity(_: float, state: Array) -> Array:
        parts = zip(split(state), draw, strict=True)
        w, W, z = (part.reshape(first.shape) for part, first in parts)
        b = sigma.weights(z, task.x)
        context = b @ contexts.T  # (N, d)
        f = context @ W.T + query  # (N, d)
        s = task.p[:, None] * task.g * phi.derivative(f @ w)  # (N, K)
        w_dot = f.T @ s
        W_dot = np.zeros_like(W)
        if trained:
            W_dot = w @ (s.T @ context)
        z_dot = sigma.pull(task.x, b, s @ w.T @ W @ contexts).sum(axis=0)
        return np.concatenate([w_dot.ravel(), W_dot.ravel(), z_dot])

    start = np.concatenate([part.ravel() for part in draw])
    times = np.linspace(0, END, 7)
    solved = solve_ivp(velocity, (0, END), start, "DOP853", times, rtol=1e-12, atol=1e-13)
    if not solved.success:
        raise ArithmeticError(solved.message)
    parts = zip(split(solved.y), draw, strict=True)
    w, W, z = (part.T.reshape(-1, *first.shape) for part, first in parts)
    return ValuePath(w, W, z, draw.U)


def _draw(seed: int) -> Draw:
    rng = np.random.default_rng((17, seed))
    task = random_gradients(rng, samples=12, tokens=TOKENS, nodes=NODES)
    U = np.linalg.qr(rng.standard_normal((DIMENSIONS, TOKENS + 1)))[0]
    W = np.eye(DIMENSIONS) + 0.4 * rng.standard_normal((DIMENSIONS, DIMENSIONS))
    w = 0.5 * rng.standard_normal((DIMENSIONS, NODES))
    z = 0.5 * rng.standard_normal(TOKENS)
    return Draw(task, U, w, W, z)


@claim(
    "S2.values",
    source="Section 2, embedding vectors",
    statement=(
        "The value matrix W_V need not be modelled: it can be merged into the embedding vectors, "
        "u′_l = W_V u_l."
    ),
    tolerance=1e-9,
    measures=(
        "largest difference in w and z between the flow with a frozen W_V and the flow with "
        "embeddings u′ without one, relative to the way of w, three attentions, three draws"
    ),
    remark=(
        "The merged u′ are orthonormal, as Theorem 1 needs them, only if W_V is orthogonal on the "
        "context tokens; and W_V must not train: see S2.trained_values"
    ),
    control="u′ = u: W_V left out",
    derivation="W_V U_C b = (W_V U_C) b: only the product enters h, and neither factor moves.",
    kind=Kind.PRINTED,
    terms=("W_V",),
    mutants={"the query too": "u_m′ = W_V u_m: the residual connection does not pass W_V"},
)
def s2_values(variant: Variant) -> Iterator[float]:
    """Compare two flows that should be one."""
    for attention in ("linear", "exp", "softmax"):
        for seed in range(3):
            draw = _draw(seed)
            path = _flow(attention, draw, trained=False)
            W = variant.factor("W_V") * draw.values
            if variant == "control":
                W = np.eye(DIMENSIONS)
            query = draw.U[:, -1:]
            if variant.has("the query too"):
                query = W @ query
            merged = np.hstack([W @ draw.U[:, :-1], query])
            flow = JointFlow(draw.task, attention, "gelu", embedding=merged)
            other = flow.integrate(END, w0=draw.w, z0=draw.z, times=7, rtol=1e-11, atol=1e-12)
            assert other.w is not None
            off = max(largest(path.w - other.w), largest(path.z - other.z))
            yield off / largest(path.w - path.w[0])


@functools.cache
def _trained(seed: int) -> ValuePath:
    return _flow("exp", _draw(seed), trained=True)


@claim(
    "S2.trained_values",
    kind=Kind.EXTENSION,
    source="Section 2 and Theorem 1, with a value matrix that trains",
    statement=(
        "With a trained W_V, exp attention has Σ_l z_l − ½‖W_V‖² = c, and across the query's "
        "embedding the balance P(Σ_k w_k w_kᵀ − W_V W_Vᵀ)P = C, P = I − u_m u_mᵀ; token by token z "
        "− ½ Σ_k v_k² is no longer constant."
    ),
    tolerance=1e-9,
    measures=(
        "largest drift of both, relative to the way of W_V, W_Vᵀ and z; gelu, three draws; 1 if z "
        "− ½ Σ v² with v = U_CᵀW_Vᵀw drifts by less than a hundredth of the way of z"
    ),
    control="W_VᵀW_V in the place of W_V W_Vᵀ",
    derivation=(
        r"$\dot W_V=\sum_kw_kc_k^\top$ and $\dot w_k=W_Vc_k+\dot\xi_ku_m$ with $c_k=\mathbb "
        r"E[s_kU_Cb]$: $\sum_k\dot w_kw_k^\top=W_V\dot W_V^\top$ across $u_m$, and $\sum_l\dot "
        r"z_l=\sum_kw_k^\top W_Vc_k=\mathrm{tr}\,W_V^\top\dot W_V$."
    ),
    paper_formula=r"without $W_V$: $z=\tfrac12\sum_kv_k^2+c$",
    corrected_formula=(
        r"$\sum_lz_l=\tfrac12\|W_V\|_F^2+c$ and $P(\sum_kw_kw_k^\top-W_VW_V^\top)P=C$"
    ),
    terms=("‖W_V‖²", "W_V W_Vᵀ"),
    mutants={
        "P left out": "the balance in all directions",
        "one token missing": "Σ_l z_l without its first token",
    },
)
def s2_trained_values(variant: Variant) -> Iterator[float]:
    """Measure the drift of the two laws, and of the integral that is lost."""
    for seed in range(3):
        path = _trained(seed)
        transposed = path.values.transpose(0, 2, 1)
        u = path.U[:, -1]
        P = np.eye(DIMENSIONS)
        if not variant.has("P left out"):
            P = P - np.outer(u, u)
        if variant == "control":
            values_product = transposed @ path.values
        else:
            values_product = path.values @ transposed
        weights_product = path.w @ path.w.transpose(0, 2, 1)
        balance = P @ (weights_product - variant.factor("W_V W_Vᵀ") * values_product) @ P
        square = path.values @ transposed
        yield largest(balance - balance[0]) / largest(square - square[0])

        z_way = largest(path.z - path.z[0])
        z = path.z
        if variant.has("one token missing"):
            z = path.z[:, 1:]
        norm = variant.factor("‖W_V‖²") * 0.5 * (path.values**2).sum(axis=(1, 2))
        total = z.sum(axis=1) - norm
        yield largest(total - total[0]) / z_way

        v = np.einsum("dm,ted,tek->tmk", path.U[:, :-1], path.values, path.w)
        lost = path.z - 0.5 * (v**2).sum(axis=2)
        yield float(largest(lost - lost[0]) < 0.01 * z_way)
