"""A block as a family of vector fields, and the conserved quantities of such families that are known; see ``laws``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import null_space
from scipy.special import erf

from joma.theory._lie import Family, Points
from joma.theory.flows import JointFlow
from joma.theory.invariants import reachable, sign_vectors
from joma.theory.queries import BlockFlow
from joma.theory.setting import Array

AnyFlow = JointFlow | BlockFlow
Values = Callable[[Points], Points]  # of conserved quantities, (P, n) at θ (P, D)


@dataclass(frozen=True)
class Frame:
    """A family of fields, what it is known to conserve, and how a flow's state is read in its coordinates."""

    family: Family
    known: tuple[tuple[str, Values], ...]  # formula and values
    trivial: int = 0  # components of w outside the span of the embeddings
    embedding: Array = field(
        default_factory=lambda: np.empty((0, 0))
    )  # (ρ, H·M + Q) within that span
    units: Array = field(default_factory=lambda: np.empty(0))  # (D,) of the family's coordinates
    still: Callable[[Array], list[tuple[str, Values]]] | None = None

    def start(
        self, flow: AnyFlow, v0: ArrayLike | None, xi0: ArrayLike | None, z0: ArrayLike | None
    ) -> Array:
        """θ (D,) of a start of the flow."""
        v, xi, z = flow.start(v0, xi0, z0)
        both = np.vstack([v, np.atleast_2d(xi)])
        return (
            np.concatenate([(np.linalg.pinv(self.embedding.T) @ both).ravel(), z.ravel()])
            / self.units
        )

    def at_rest(self, place: Array) -> list[tuple[str, Values]]:
        """What never moves from θ (D,), beyond what is conserved everywhere."""
        return [] if self.still is None else self.still(place)


def block_frame(flow: AnyFlow, rng: np.random.Generator, normalised: bool = False) -> Frame:
    """The fields of a flow's block for all data, or all whose frequencies sum to 1."""
    if not isinstance(flow, (JointFlow, BlockFlow)):
        raise TypeError(
            f"laws are counted for a JointFlow, a BlockFlow or a WeightPair, got {type(flow).__name__}"
        )
    M, K = flow.task.tokens, flow.task.nodes
    heads, queries = (flow.heads, flow.queries) if isinstance(flow, BlockFlow) else (1, 1)
    R, kind, T = heads * M, flow.attention.kind, flow.attention.temperature
    share = flow.weight if isinstance(flow, BlockFlow) else np.ones(1)
    E, trivial = _within_span(flow, heads, queries)
    rho = len(E)
    z_rate = np.repeat(flow.attention_lr / share, R)  # (Q·R,)
    D = rho * K + queries * R
    # all gradients are possible, or those with Σ_k g_k = 0; φ′ is a factor that the former absorb
    directions = null_space(np.ones((1, K))).T if flow.task.loss == "classification" else np.eye(K)
    slope = _slope(flow) if flow.task.loss == "classification" else None
    n = D + 4
    x = rng.exponential(1.0, (n, M)) * 2 / M  # (n, M)
    if normalised:
        x /= x.sum(axis=1, keepdims=True)
    query = np.arange(n) % queries
    one_hot = np.eye(queries)[query]

    def attend(z: Points) -> tuple[Points, Points]:
        """b (P, n, H, M), and what multiplies in ∂b/∂z: x/T or b/T."""
        logits = z.reshape(-1, queries, heads, M)[:, query] / T
        inputs = x[:, None, :]
        if kind == "linear":
            return inputs * logits, np.broadcast_to(inputs / T, logits.shape)
        b = inputs * np.exp(logits) / flow.attention.A
        if kind == "softmax":
            b = b / b.sum(axis=-1, keepdims=True)
        return b, b / T

    # z in units of T, v of T/√r: there the first integrals have coefficients of order one
    natural = T / np.sqrt(z_rate.max()) if flow.attention_lr > 0 else 1.0
    units = np.concatenate([np.full(rho * K, np.sqrt(flow.mlp_lr)), np.sqrt(z_rate)]) * natural
    units = np.where(units > 0, units, T)  # frozen attention

    def motion(place: Points, c: Array) -> Points:
        y, P = place * units, len(place)
        w, z = y[:, : rho * K].reshape(P, rho, K), y[:, rho * K :]
        both = E.T @ w  # (P, R + Q, K)
        b, pull = attend(z)
        flat = b.reshape(P, n, R)
        s: Points = c.reshape(P, n, -1) @ directions
        if slope is not None:
            s = s * slope(flat @ both[:, :R] + both[:, R:][:, query])
        inputs = np.concatenate([flat, np.broadcast_to(one_hot, (P, n, queries))], axis=2)
        w_dot = flow.mlp_lr * (E @ (inputs.swapaxes(1, 2) @ s))
        g = (s @ both[:, :R].swapaxes(1, 2)).reshape(b.shape)  # Σ_k s_k v_k
        if kind == "softmax":
            g = g - (b * g).sum(axis=-1, keepdims=True)
        z_dot = (
            np.einsum("nq,pnr->pqr", one_hot, (pull * g).reshape(P, n, R)).reshape(P, -1) * z_rate
        )
        return np.concatenate([w_dot.reshape(P, -1), z_dot], axis=1) / units

    family = Family(motion, D, n * len(directions))
    known = _known(
        flow, E, heads, queries, share, linear_nodes=slope is None, normalised=normalised
    )
    known = tuple(
        (formula, partial(lambda f, place: f(place * units), values)) for formula, values in known
    )

    def resting(place: Array) -> list[tuple[str, Values]]:
        """Under linear attention a token whose v and z are exactly zero, for all queries, never moves."""
        v, z = E.T[:R] @ place[: rho * K].reshape(rho, K), place[rho * K :].reshape(queries, R)
        still = (z == 0).all(axis=0) & (v == 0).all(axis=1)

        def values(y: Points) -> Points:
            w, z = y[:, : rho * K].reshape(-1, rho, K), y[:, rho * K :].reshape(-1, queries, R)
            return np.concatenate(
                [z[:, :, still].reshape(len(y), -1), (E.T[:R] @ w)[:, still].reshape(len(y), -1)], 1
            )

        return [("z_l, v_lk of tokens at v_l = z_l = 0", values)] if still.any() else []

    return Frame(family, known, trivial, E, units, resting if kind == "linear" else None)


def _within_span(flow: AnyFlow, heads: int, queries: int) -> tuple[Array, int]:
    """The embeddings (ρ, H·M + Q) in an orthonormal basis of their span, and how many components of w lie outside."""
    M, K = flow.task.tokens, flow.task.nodes
    gram = flow.block.gram
    if gram is None:
        return np.eye(heads * M + queries), 0
    d = len(flow.embedding) if isinstance(flow, JointFlow) and flow.embedding is not None else None
    values, vectors = np.linalg.eigh(gram)
    kept = values > 1e-12 * values.max()
    return np.sqrt(values[kept])[:, None] * vectors[:, kept].T, 0 if d is None else (
        d - int(kept.sum())
    ) * K


def _slope(flow: AnyFlow) -> Values | None:
    """φ′ for complex arguments; None for linear nodes."""

    def sigmoid(a: Points) -> Points:
        return 1 / (1 + np.exp(-a))

    if flow.activation.name == "linear":
        return None
    if flow.activation.slopes is not None:
        raise ValueError(
            "under a softmax loss the laws of piecewise linear nodes depend on which nodes are active together, so "
            "there is no one count; use a smooth activation, or count the laws of a task with another loss"
        )
    if flow.activation.name == "silu":
        return lambda a: sigmoid(a) * (1 + a * (1 - sigmoid(a)))
    if flow.activation.name == "gelu":
        return lambda a: (
            0.5 * (1 + erf(a / np.sqrt(2))) + a * np.exp(-0.5 * a * a) / np.sqrt(2 * np.pi)
        )
    raise ValueError(
        "with a softmax loss the count needs φ′ at complex arguments, which a custom activation may not have; use a "
        "named activation, or count the laws of a task with another loss"
    )


def _known(
    flow: AnyFlow,
    E: Array,
    heads: int,
    queries: int,
    share: Array,
    *,
    linear_nodes: bool,
    normalised: bool,
) -> tuple[tuple[str, Values], ...]:
    M, K, rho = flow.task.tokens, flow.task.nodes, len(E)
    R, r, T, kind = heads * M, flow.ratio, flow.attention.temperature, flow.attention.kind

    def w_of(y: Points) -> Points:
        return y[:, : rho * K].reshape(-1, rho, K)

    def z_of(y: Points) -> Points:
        return y[:, rho * K :].reshape(-1, queries, R)

    known: list[tuple[str, Values]] = []
    if flow.attention_lr == 0:
        known.append(("z (attention is frozen)", lambda y: y[:, rho * K :]))
    if kind == "softmax":
        known.append(("Σ_l z_mhl", lambda y: z_of(y).reshape(len(y), -1, M).sum(axis=2)))
        signs = reachable(E, sign_vectors(heads, M, queries))
        if signs.shape[1]:
            normal = np.linalg.pinv(E.T) @ signs  # (ρ, n)
            name = (
                "Σ_l v_hlk − Σ_m ξ_mk"
                if np.allclose(E.T @ E, np.eye(R + queries))
                else "nᵀw_k, Eᵀn = (1_h, −1_Q)"
            )
            known.append((name, lambda y: (normal.T @ w_of(y)).reshape(len(y), -1)))
    elif flow.attention_lr > 0:
        alphas, matrices = _quadratic(E, R)

        def charge(y: Points) -> Points:
            z, w = z_of(y), w_of(y)
            summed = (share[:, None] * (z if kind == "exp" else z**2)).sum(
                axis=1
            ) @ alphas.T  # (P, n)
            square = np.einsum("nij,pik,pjk->pn", matrices, w, w, optimize=True)
            return summed - (r / (2 * T) if kind == "exp" else r) * square

        power, factor = ("", "(r/2T)") if kind == "exp" else ("²", "r")
        single = heads * queries == 1 and len(alphas) == M
        formula = (
            f"z_l{power} − {factor} Σ_k v_lk²"
            if single
            else f"Σ α_j z_mj{power} − {factor} Σ_k w_kᵀSw_k"
        )
        known.append((formula, charge))
        known += _between_heads(flow, E, heads, share, z_of, w_of)
        if (
            normalised
            and K == heads == queries == 1
            and np.allclose(E.T @ E, np.eye(M + 1), atol=1e-9)
        ):
            known.append(
                ("Σ_l ∫ e^{−z_l/T} dv_l − ξ", lambda y: _duals(flow, E.T @ w_of(y), z_of(y)))
            )
    if flow.task.loss == "classification" and linear_nodes:
        known.append(("Σ_k v_lk, Σ_k ξ_k", lambda y: w_of(y).sum(axis=2)))
    return tuple(known)


def _duals(flow: AnyFlow, both: Points, z: Points) -> Points:
    """Σ_l θ_l − ξ (P, 1) with θ_l the dual variable of the mirror flow, of velocity η E[s x_l]; see ``final``."""
    v, xi, z = both[:, :-1, 0], both[:, -1, 0], z[:, 0]
    r, T = flow.ratio, flow.attention.temperature
    root = np.sqrt(r)
    if flow.attention.kind == "linear":
        dual = T / (2 * root) * np.log((z + root * v) / (z - root * v) + 0j)
    else:
        c = z - r / (2 * T) * v**2
        dual = (
            flow.attention.A
            * np.exp(-c / T)
            * np.sqrt(np.pi / 2)
            * T
            / root
            * erf(root / T * v / np.sqrt(2))
        )
    return (dual.sum(axis=1) - xi)[:, None]


def _between_heads(
    flow: AnyFlow,
    E: Array,
    heads: int,
    share: Array,
    z_of: Values,
    w_of: Values,
) -> list[tuple[str, Values]]:
    """Laws that tie heads to each other, under linear or exp attention."""
    M, T, kind = flow.task.tokens, flow.attention.temperature, flow.attention.kind
    if heads == 1:
        return []
    R = heads * M
    gram = E.T @ E
    by_head = E[:, :R].reshape(len(E), heads, M)
    if np.allclose(
        by_head, by_head[:, :1], atol=1e-9
    ):  # one value map: the heads feel the same force

        def apart(y: Points) -> Points:
            z = z_of(y)
            level = (z if kind == "linear" else np.exp(-z / T)).reshape(len(y), -1, heads, M)
            return (level[:, :, 1:] - level[:, :, :1]).reshape(len(y), -1)

        return [("z_mh − z_mh′" if kind == "linear" else "e^{−z_mh/T} − e^{−z_mh′/T}", apart)]
    if kind == "linear" and np.allclose(gram, np.eye(len(gram)), atol=1e-9):
        one, other = np.triu_indices(heads, 1)

        def cross(y: Points) -> Points:
            z, v = (
                z_of(y).reshape(len(y), -1, heads, M),
                (E.T[:R] @ w_of(y)).reshape(len(y), heads, M, -1),
            )
            joint = (share[:, None, None] * (z[:, :, one] * z[:, :, other])).sum(axis=1)
            return (joint - flow.ratio * (v[:, one] * v[:, other]).sum(axis=-1)).reshape(len(y), -1)

        return [("Σ_m z_mhl z_mh′l − r Σ_k v_hlk v_h′lk", cross)]
    return []


def _quadratic(E: Array, context: int) -> tuple[Array, Array]:
    """All (α, S) with S symmetric and S E = E diag(α, 0): α (n, R) and S (n, ρ, ρ)."""
    rho, columns = E.shape
    upper = np.triu_indices(rho)
    unknowns = []
    for i, j in zip(*upper, strict=True):
        S = np.zeros((rho, rho))
        S[i, j] = S[j, i] = 1.0
        unknowns.append((S @ E).ravel())
    for token in range(context):
        one = np.zeros((rho, columns))
        one[:, token] = -E[:, token]
        unknowns.append(one.ravel())
    solutions = null_space(np.array(unknowns).T, rcond=1e-10).T  # (n, ρ(ρ+1)/2 + R)
    S = np.zeros((len(solutions), rho, rho))
    S[:, upper[0], upper[1]] = solutions[:, : len(upper[0])]
    S[:, upper[1], upper[0]] = solutions[:, : len(upper[0])]
    return solutions[:, len(upper[0]) :], S
