"""How many conserved quantities a block has, whatever its data (beyond Theorem 1).

For any samples, labels and weights the gradient flow is a combination of the fields

    F_{x,m,k}(θ) = ∇_θ a_k(x, m; θ)   (times the learning rates),

and a function of θ that is conserved for all data is one that is constant along all of them. Their number is at most
D − dim Lie{F} (see ``_lie``), and exactly that where as many independent ones are known. With E = [U₁ … U_H, u₁ … u_Q]
the embeddings of H heads' context tokens and Q queries, w_k in their span and v_k = Eᵀw_k, known are:

    linear, exp   Σ_j α_j Σ_m z_mj² − r Σ_k w_kᵀSw_k  and  Σ_j α_j Σ_m z_mj − (r/2T) Σ_k w_kᵀSw_k
                  for each diagonal α and symmetric S with S E = E diag(α, 0): M of them for orthonormal embeddings
                  (α_j = δ_jl gives Theorem 1), one where merely u_m ⊥ U (α = 1), none in general
    many heads    linear attention: Σ_m z_mhl z_mh′l − r Σ_k v_hlk v_h′lk for each pair of heads; with one value map
                  for all heads z_mh − z_mh′ (linear) and e^{−z_mh/T} − e^{−z_mh′/T} (exp)
    softmax       Σ_l z_mhl for each query and head, and nᵀw_k for each k and each n with Eᵀn = (1_h, −1_Q): one query,
                  one head and orthonormal embeddings give Σ_l z_l and Σ_l v_lk − ξ_k, K + 1 in all
    Σ_k g_k = 0   (softmax loss, linear nodes) Σ_k w_k, that is Σ_k v_lk and Σ_k ξ_k

The softmax ones are linear in θ, so they hold to rounding for SGD, any minibatches and momentum too.

**A no-go.** Under softmax attention no function z = F(v, ξ) exists: three samples with b̄ − δ, b̄, b̄ + δ and gradients
1, −2, 1 have v̇ = ξ̇ = 0 and ż = −(2η_z/3T) δ(δᵀv) ≠ 0. Attention cannot be integrated out exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from joma.theory._block_fields import Frame, Values, block_frame
from joma.theory._lie import Family, Points, derivative, endpoint_rank, lie_rank, numerical_rank
from joma.theory.flows import JointFlow
from joma.theory.queries import BlockFlow
from joma.theory.setting import Array


@dataclass(frozen=True)
class Law:
    """A family of conserved quantities that is known, and how many independent ones there are in it."""

    formula: str
    count: int


@dataclass(frozen=True)
class Laws:
    """The conserved quantities of a block that no data can change.

    ``count`` = ``dimension`` − ``rank`` is an upper bound by the Lie algebra; ``certified`` says that as many
    independent ones are known, so that it is exact.
    """

    count: int
    known: tuple[Law, ...]
    certified: bool
    dimension: int  # D, of the state within the span of the embeddings
    rank: int  # of the Lie algebra
    ranks: tuple[int, ...]  # with brackets up to each depth, the fields alone first
    gap: float  # the smallest singular-value gap that a rank rests on; at least 1e6
    trivial: int = (
        0  # components of w outside the embeddings' span: they never move, and are not counted
    )

    def __str__(self) -> str:
        lines = [
            f"{self.count} data-independent laws ({'certified' if self.certified else 'an upper bound'})"
        ]
        return "\n".join(lines + [f"  {law.count:4d}  {law.formula}" for law in self.known])


def laws(
    system: System,
    v0: ArrayLike | None = None,
    xi0: ArrayLike | None = None,
    z0: ArrayLike | None = None,
    *,
    normalised: bool = False,
    seed: int = 0,
) -> Laws:
    """Count the quantities that every training of this block conserves, whatever the data.

    The flow's sizes, attention, rates, embeddings and loss matter; its samples do not.

    Arguments:
        system: a ``JointFlow`` or ``BlockFlow``, or a ``WeightPair``.
        v0, xi0, z0: a start, as for ``integrate``: count the laws on the orbit through it. By default at random
            points, where the count is that of a generic start.
        normalised: only data whose frequencies sum to 1 in each sample. Under linear and exp attention with one node
            this adds a law, Σ_l ∫ e^{−z_l/T} dv_l − ξ.
        seed: of the random points and fields.

    Returns:
        The count, the known laws, and whether they reach it.

    >>> from joma.theory import Task
    >>> task = Task([[0.7, 0.2, 0.1]], [[1.0, -1.0]])
    >>> print(laws(JointFlow(task, "softmax")))
    3 data-independent laws (certified)
         1  Σ_l z_mhl
         2  Σ_l v_hlk − Σ_m ξ_mk
    """
    rng = np.random.default_rng(seed)
    frame = (
        system._frame(rng)
        if isinstance(system, WeightPair)
        else block_frame(system, rng, normalised)
    )
    family = frame.family
    generic = [0.7 * rng.standard_normal(family.dimension) for _ in range(2)]
    ranks = [lie_rank(family, point, rng) for point in generic]
    best = max(ranks, key=lambda rank: rank.rank)
    place, gap = generic[0], min(rank.gap for rank in ranks)
    known = frame.known
    if v0 is not None or xi0 is not None or z0 is not None:
        if isinstance(system, WeightPair):
            raise ValueError(
                "a start v0, xi0, z0 is that of a flow; a WeightPair is counted at random points"
            )
        place = frame.start(system, v0, xi0, z0)
        known = (*known, *frame.at_rest(place))
        best = lie_rank(family, place, rng, goal=best.rank)
        gap = min(gap, best.gap)
    count, certificate = family.dimension - best.rank, _independent(family, known, place, rng)
    if certificate.total > count:
        raise ArithmeticError(
            f"{certificate.total} independent laws are known, but the Lie algebra leaves {count} only"
        )
    return Laws(
        count=count,
        known=tuple(
            Law(formula, n) for (formula, _), n in zip(known, certificate.new, strict=True) if n
        ),
        certified=certificate.total == count,
        dimension=family.dimension,
        rank=best.rank,
        ranks=best.ranks,
        gap=gap,
        trivial=frame.trivial,
    )


@dataclass(frozen=True)
class WeightPair:
    """Two matrices that act through their product only, a = yᵀW_QᵀW_K x: one head's query and key, or value and output.

    Arguments:
        hidden: h, the rows of both; rows, columns: the columns of W_Q and of W_K.

    Known: W_QW_Qᵀ − W_KW_Kᵀ, a symmetric matrix with h(h + 1)/2 entries. Brackets are needed to see that these are all.

    >>> laws(WeightPair(hidden=2, rows=3, columns=4)).count
    3
    """

    hidden: int
    rows: int
    columns: int

    def _frame(self, rng: np.random.Generator) -> Frame:
        h, d, e = self.hidden, self.rows, self.columns
        n = h * (d + e) + 4
        left, right = rng.standard_normal((n, d)), rng.standard_normal((n, e))

        def split(y: Points) -> tuple[Points, Points]:
            return y[:, : h * d].reshape(-1, h, d), y[:, h * d :].reshape(-1, h, e)

        def field(y: Points, c: Array) -> Points:
            first, second = split(y)
            q = np.einsum("pn,nd,ne,phe->phd", c, left, right, second, optimize=True)
            k = np.einsum("pn,nd,ne,phd->phe", c, left, right, first, optimize=True)
            return np.concatenate([q.reshape(len(y), -1), k.reshape(len(y), -1)], axis=1)

        def charge(y: Points) -> Points:
            first, second = split(y)
            both = first @ first.swapaxes(1, 2) - second @ second.swapaxes(1, 2)
            return both[:, *np.triu_indices(h)]

        family = Family(field, h * (d + e), n)
        return Frame(family, (("W_QW_Qᵀ − W_KW_Kᵀ", charge),))


System = JointFlow | BlockFlow | WeightPair


def split_logit_velocity(flow: JointFlow, v: Array, xi: Array, z: Array) -> tuple[Array, Array]:
    """ż under softmax in two parts, exactly: what b̄, v and v̇ tell of it, and what only the samples know, (M,) each.

    With δ = b − b̄, ṽ_k = v_k − (b̄ᵀv_k)1 and s_k = g_k φ′ (per sample, weighted),

        ż = (r/T) Σ_k [v̇_k ∘ ṽ_k − b̄ (v̇_kᵀṽ_k)] − (η_z/T) Σ_k E[s_k δδᵀ] v_k.

    Dropping the second part is a better approximation than Eqn. 17, which lacks the ~ on v.

    Arguments:
        flow: a joint flow with softmax attention.
        v, xi, z: the state, (M, K), (K,) and (M,).

    Returns:
        The first part and the second; their sum is ż.
    """
    if flow.attention.kind != "softmax":
        raise ValueError(
            f"the identity is softmax attention's; this flow has {flow.attention.kind} attention"
        )
    task, rate = flow.task, flow.attention_lr / flow.attention.temperature
    b = flow.attention.weights(z, task.x)  # (N, M)
    a = b @ v + xi
    s = (
        task.p[:, None] * task.gradient(flow.activation.phi(a)) * flow.activation.derivative(a)
    )  # (N, K)
    mean = task.p @ b
    moved, centred, off = b.T @ s, v - mean @ v, b - mean  # E[s b] = v̇/η, ṽ, δ
    product = moved * centred
    transport = rate * (product.sum(axis=1) - mean * product.sum())
    return transport, -rate * (off.T @ (s * (off @ v)).sum(axis=1))


def endpoint_count(
    system: JointFlow | BlockFlow | WeightPair, *, normalised: bool = False, seed: int = 0
) -> tuple[int, float]:
    """D minus the rank of the end-point map's Jacobian, integrated to 1e-12, and the singular-value gap.

    The independent check of ``laws``: no brackets, but trajectories under changing data.
    """
    rng = np.random.default_rng(seed)
    frame = (
        system._frame(rng)
        if isinstance(system, WeightPair)
        else block_frame(system, rng, normalised)
    )
    start = 0.5 * rng.standard_normal(frame.family.dimension)
    rank, gap, _ = endpoint_rank(frame.family, start, rng)
    return frame.family.dimension - rank, gap


@dataclass(frozen=True)
class _Certificate:
    total: int
    new: tuple[int, ...]  # independent ones that each family of known laws adds


def _independent(
    family: Family,
    known: tuple[tuple[str, Values], ...],
    at: Array,
    rng: np.random.Generator,
) -> _Certificate:
    """How many known laws are independent at θ; a "law" that some field changes is an error of this module."""
    rows, counts = np.empty((0, family.dimension)), [0]
    points = np.broadcast_to(at, (4, family.dimension))
    c = rng.standard_normal((4, family.generators))
    motion = family.field(points, c)
    basis = np.eye(family.dimension)
    for formula, values in known:
        change = np.abs(derivative(values, points, motion)).max(initial=0.0)
        if change > 1e-9 * max(1.0, float(np.abs(motion).max())):
            raise ArithmeticError(
                f"{formula} is not conserved: it changes at the rate {change:.2e}"
            )
        gradient = derivative(values, np.broadcast_to(at, basis.shape), basis).real.T  # (n, D)
        rows = np.vstack([rows, gradient])
        counts.append(
            numerical_rank(rows, np.full(len(rows), max(1.0, np.abs(rows).max(initial=0.0))))[0]
            if len(rows)
            else 0
        )
    return _Certificate(counts[-1], tuple(int(n) for n in np.diff(counts)))
