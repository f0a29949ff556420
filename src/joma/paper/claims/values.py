"""Claims on the value map W_V, which the paper merges into the embeddings (Section 2)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.integrate import solve_ivp

from joma.paper.claims._registry import Kind, Variant, claim
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Attention, Task, as_activation
from joma.theory.tasks import random_gradients

D, TOKENS, NODES, END = 10, 5, 3, 1.5


class ValuePath(NamedTuple):
    """A block with a value map over time: w (T, d, K), W_V (T, d, d), z (T, M), and its embeddings (d, M + 1)."""

    w: Array
    values: Array
    z: Array
    U: Array


def _flow(
    attention: str, task: Task, U: Array, start: tuple[Array, Array, Array], *, trained: bool
) -> ValuePath:
    """The gradient flow of h = φ(wᵀ(W_V U_C b + u_m)), written down for (w, W_V, z) as they stand."""
    sigma, phi = Attention(attention), as_activation("gelu")
    shapes = [part.shape for part in start]
    edges = np.cumsum([part.size for part in start])[:-1]

    def velocity(_: float, state: Array) -> Array:
        w, W, z = (
            part.reshape(shape) for part, shape in zip(np.split(state, edges), shapes, strict=True)
        )
        b = sigma.weights(z, task.x)
        context = b @ U[:, :-1].T  # (N, d)
        f = context @ W.T + U[:, -1]
        s = task.p[:, None] * task.g * phi.derivative(f @ w)  # (N, K)
        dW = w @ (s.T @ context) if trained else np.zeros_like(W)
        dz = sigma.pull(task.x, b, s @ w.T @ W @ U[:, :-1]).sum(axis=0)
        return np.concatenate([(f.T @ s).ravel(), dW.ravel(), dz])

    first = np.concatenate([part.ravel() for part in start])
    times = np.linspace(0, END, 7)
    solved = solve_ivp(velocity, (0, END), first, "DOP853", times, rtol=1e-12, atol=1e-13)
    if not solved.success:
        raise ArithmeticError(solved.message)
    w, W, z = (
        part.T.reshape(-1, *shape)
        for part, shape in zip(np.split(solved.y, edges), shapes, strict=True)
    )
    return ValuePath(w, W, z, U)


def _draw(attention: str, seed: int) -> tuple[Task, Array, tuple[Array, Array, Array]]:
    rng = np.random.default_rng((17, seed))
    task = random_gradients(rng, samples=12, tokens=TOKENS, nodes=NODES)
    U = np.linalg.qr(rng.standard_normal((D, TOKENS + 1)))[0]
    W = np.eye(D) + 0.4 * rng.standard_normal((D, D))
    return task, U, (0.5 * rng.standard_normal((D, NODES)), W, 0.5 * rng.standard_normal(TOKENS))


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
    """Two flows that should be one."""
    for attention in ("linear", "exp", "softmax"):
        for seed in range(3):
            task, U, start = _draw(attention, seed)
            path = _flow(attention, task, U, start, trained=False)
            W = np.eye(D) if variant == "control" else variant.factor("W_V") * start[1]
            query = U[:, -1:]
            merged = np.hstack(
                [W @ U[:, :-1], W @ query if variant.has("the query too") else query]
            )
            flow = JointFlow(task, attention, "gelu", embedding=merged)
            other = flow.integrate(END, w0=start[0], z0=start[2], times=7, rtol=1e-11, atol=1e-12)
            assert other.w is not None
            off = max(float(np.abs(path.w - other.w).max()), float(np.abs(path.z - other.z).max()))
            yield off / float(np.abs(path.w - path.w[0]).max())


@functools.cache
def _trained(seed: int) -> ValuePath:
    task, U, start = _draw("exp", seed)
    return _flow("exp", task, U, start, trained=True)


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
    """Drift of the two laws, and of the integral that is lost."""
    for seed in range(3):
        path = _trained(seed)
        u = path.U[:, -1]
        P = np.eye(D) - (0 if variant.has("P left out") else 1) * np.outer(u, u)
        W = path.values.transpose(0, 2, 1) if variant == "control" else path.values
        balance = (
            P
            @ (
                path.w @ path.w.transpose(0, 2, 1)
                - variant.factor("W_V W_Vᵀ") * W @ W.transpose(0, 2, 1)
            )
            @ P
        )
        z = path.z[:, 1:] if variant.has("one token missing") else path.z
        total = z.sum(axis=1) - variant.factor("‖W_V‖²") * 0.5 * (path.values**2).sum(axis=(1, 2))
        square = path.values @ path.values.transpose(0, 2, 1)
        yield float(np.abs(balance - balance[0]).max() / np.abs(square - square[0]).max())
        yield float(np.abs(total - total[0]).max() / np.abs(path.z - path.z[0]).max())
        v = np.einsum("dm,ted,tek->tmk", path.U[:, :-1], path.values, path.w)
        lost = path.z - 0.5 * (v**2).sum(axis=2)
        yield float(np.abs(lost - lost[0]).max() < 0.01 * np.abs(path.z - path.z[0]).max())
