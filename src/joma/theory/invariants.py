"""First integrals of the joint flow (Theorem 1), for any learning rates and temperature.

With r = attention_lr / mlp_lr and temperature T (orthonormal embeddings):

    linear   z² − r Σ_k v_k² = c                                     exact; T drops out
    exp      z − (r / 2T) Σ_k v_k² = c                               exact
    softmax  z − (r / 2T) Σ_k (v_k² − ‖v_k‖² b̄) ≈ c                  Eqn. 18, approximate;   Σ_l z_l = const exactly

Proof for exp: ż = (η_z/T) Σ_k v_k ∘ E[s_k b] = (r/T) Σ_k v_k ∘ v̇_k. Linear: z ∘ ż = r Σ_k v_k ∘ v̇_k, since both
sides hold E[s_k x] z/T. Softmax: 1ᵀ(diag(b) − b bᵀ) = 0.

One step of gradient descent changes them by exactly Δz² − r Σ_k Δv_k² (linear), −(r/2T) Σ_k Δv_k² (exp) and 0 (the
softmax sum): the terms linear in the step cancel as above, the quadratic ones stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import null_space

from joma._suggest import unknown_name
from joma.theory.optimisers import PLAIN, SGD, sgd_law
from joma.theory.setting import Array

if TYPE_CHECKING:
    from joma.theory.trajectory import Trajectory


def normalised_correlation(a: Array, b: Array) -> Array:
    """NC: the centred cosine of the rows of a and b, (T,); NaN where a row is constant."""
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(axis=1) / np.sqrt((a**2).sum(axis=1)) / np.sqrt((b**2).sum(axis=1))


@dataclass(frozen=True, eq=False)
class Invariant:
    """The first integral along a trajectory.

    ``drift`` is the largest deviation of ``value`` from its start, relative to max(1, max|z|). For gradient
    descent ``law`` is the deviation that the exact per-step law gives, and ``law_error`` how far off it is.
    """

    formula: str
    exact: bool
    value: Array = field(repr=False)  # (T, M)
    z_hat: Array = field(repr=False)  # (T, M) the logits as predicted from v
    scale: float = field(repr=False)  # max(1, max|z|)
    nc: Array = field(repr=False)  # (T,) of z_hat with z
    z1: Array | None = field(default=None, repr=False)  # (T, M) (r/2T) Σ v², softmax only
    z2: Array | None = field(default=None, repr=False)  # (T, M) −(r/2T) Σ ‖v‖² b̄, softmax only
    nc1: Array | None = field(default=None, repr=False)
    nc2: Array | None = field(default=None, repr=False)
    sum_drift: Array | None = field(
        default=None, repr=False
    )  # (T,) of Σ_l z_l, exact under softmax
    sums: Array | None = field(
        default=None, repr=False
    )  # (T, K + 1) Σ_l z_l and Σ_l v_lk − ξ_k, exact under softmax
    law: Array | None = field(default=None, repr=False)  # (T, M) gradient descent only

    @property
    def drift(self) -> Array:
        """(T,) max_l |value − value(0)| / max(1, max|z|)."""
        return np.abs(self.value - self.value[0]).max(axis=1) / self.scale

    @property
    def max_drift(self) -> float:
        """The largest drift over time."""
        return float(self.drift.max())

    @property
    def law_error(self) -> float | None:
        """Largest |deviation − law| relative to max(1, max|z|), for gradient descent with an exact law."""
        return (
            None
            if self.law is None
            else float(np.abs(self.value - self.value[0] - self.law).max() / self.scale)
        )


def cumulative(steps: Array) -> Array:
    """What steps (T − 1, n) add up to, (T, n), from zeros."""
    return np.concatenate([np.zeros((1, steps.shape[1])), np.cumsum(steps, axis=0)])


def first_integral(path: Trajectory, b_bar: str = "start") -> Invariant:
    """The first integral of ``path``'s attention along ``path``; see ``Trajectory.invariant``."""
    flow, v, z = path.flow, path.v, path.z
    kind, r, T = flow.attention.kind, flow.ratio, flow.attention.temperature
    square = (v**2).sum(axis=2)  # (T, M)
    scale = max(1.0, float(np.abs(z).max()))
    descends = path.step is not None and path.optimiser == PLAIN
    dv2 = (np.diff(v, axis=0) ** 2).sum(axis=2) if descends else None  # (T - 1, M)
    trained: Array | None = None
    if (
        path.step is not None
        and not descends
        and isinstance(path.optimiser, SGD)
        and kind != "softmax"
    ):
        trained = sgd_law(flow, path.optimiser, path.step, v, z)

    if kind == "linear":
        value = z**2 - r * square
        z_hat = np.where(z < 0, -1.0, 1.0) * np.sqrt(np.maximum(r * square + value[0], 0.0))
        law = trained if dv2 is None else cumulative(np.diff(z, axis=0) ** 2 - r * dv2)
        return Invariant(
            "z² − r Σ v²", True, value, z_hat, scale, normalised_correlation(z_hat, z), law=law
        )
    if kind == "exp":
        value = z - r / (2 * T) * square
        z_hat = r / (2 * T) * square + value[0]
        law = trained if dv2 is None else cumulative(-r / (2 * T) * dv2)
        return Invariant(
            "z − (r/2T) Σ v²", True, value, z_hat, scale, normalised_correlation(z_hat, z), law=law
        )

    if b_bar == "start":
        mean = flow.task.p @ path.attention(0)
    elif b_bar == "current":
        mean = np.stack([flow.task.p @ path.attention(n) for n in range(len(path.t))])
    elif b_bar == "input":
        mean = flow.task.p @ (flow.task.x / flow.task.x.sum(axis=1, keepdims=True))
    else:
        raise ValueError(unknown_name(b_bar, ("start", "current", "input"), "b_bar"))
    z1 = r / (2 * T) * square
    z2 = -r / (2 * T) * square.sum(axis=1, keepdims=True) * mean
    value = z - z1 - z2
    total = z.sum(axis=1)
    z_hat = z1 + z2 + value[0]
    return Invariant(
        "z − (r/2T) Σ (v² − ‖v‖² b̄)",
        False,
        value,
        z_hat,
        scale,
        normalised_correlation(z_hat, z),
        z1=z1,
        z2=z2,
        nc1=normalised_correlation(z1, z),
        nc2=normalised_correlation(z2, z),
        sum_drift=np.abs(total - total[0]) / scale,
        sums=np.column_stack([total, softmax_sums(flow.block.gram, v, path.xi[:, None])]),
    )


def softmax_sums(gram: Array | None, v: Array, xi: Array, heads: int = 1) -> Array:
    """Σ_l v_hlk − Σ_m ξ_mk along a trajectory, (T, n K), from v (T, H·M, K) and ξ (T, Q, K); conserved under softmax.

    With embeddings E that are not orthonormal, EᵀE = ``gram``, they are nᵀw_k for the n with Eᵀn = (1_h, −1_Q), and
    combinations of them over heads; n = 0 if there is none, since the embeddings are linearly dependent.
    """
    both = np.concatenate([v, xi], axis=1)  # (T, H·M + Q, K)
    queries = xi.shape[1]
    weights = sign_vectors(heads, (both.shape[1] - queries) // heads, queries)
    if gram is not None:
        weights = np.linalg.pinv(gram) @ reachable(gram, weights)  # nᵀw = (1_h, −1_Q)ᵀ (EᵀE)⁺ Eᵀw
    return np.einsum("jn,tjk->tnk", weights, both).reshape(len(both), -1)


def sign_vectors(heads: int, tokens: int, queries: int) -> Array:
    """(1_h, −1_Q) for each head, (H·M + Q, H)."""
    return np.vstack([np.kron(np.eye(heads), np.ones((tokens, 1))), -np.ones((queries, heads))])


def reachable(E: Array, vectors: Array) -> Array:
    """A basis of those combinations of the columns that are Eᵀn for some n."""
    outside = vectors - np.linalg.pinv(E) @ (E @ vectors)
    return vectors @ null_space(outside, rcond=1e-9) if np.abs(outside).max() > 1e-9 else vectors
