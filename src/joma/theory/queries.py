"""Many queries and many heads: the flow of a whole block, and the first integrals that are left (beyond Theorem 1).

Sample i ends with query m_i and is seen by H heads, each with its own logits z_mh (M,) for every query:

    b_ih = σ(z_{m_i h}) ∘ x_i / A,     a_ik = Σ_h v_hkᵀ b_ih + ξ_{m_i k},     v_hk = U_hᵀ w_k,  ξ_mk = u_mᵀ w_k

With s_ik = p_i g_ik φ′(a_ik) and B_mhk = Σ_{i: m_i = m} s_ik b_ih the gradient flow of (w, z) has, for exp attention,

    v̇_hk = η Σ_h′ U_hᵀU_h′ Σ_m B_mh′k (+ η Σ_m U_hᵀu_m …),     ż_mh = (η_z/T) Σ_k v_hk ∘ B_mhk.

So if U_hᵀU_h′ = δ_hh′ I and U_hᵀu_m = 0 (separate query and context embeddings: d ≥ H·M + Q), all of them frozen,
then Σ_m ż_mh = (r/T) Σ_k v_hk ∘ v̇_hk: one integral per head, summed over queries. With one value map for all heads
(U_h = U) v̇ = η Σ_mh B_mh, and only the sum over heads as well is conserved:

    exp      Σ_m z_mh  − (r/2T) Σ_k v_hk² = c_h        shared value map: Σ_mh z_mh  − (r/2T) Σ_k v_k² = c
    linear   Σ_m z_mh² −  r     Σ_k v_hk² = c_h        shared value map: Σ_mh z_mh² −  r     Σ_k v_k² = c
    softmax  Σ_l z_mhl = c_mh                          for every query and head, whatever the embeddings

If z_m moves with E_{q=m} (the paper's convention) instead of the joint expectation, query m counts with weight P(m).
The sums hold step by step for SGD on any minibatches, with the same exact laws as for one query.

What one query's logits do is not a function of v. With V_m, the part of v that query m's samples brought,
v = v(0) + Σ_m V_m, and

    z_m − z_m(0) = (r/T) Σ_k ∫ v_k ∘ dV_mk
                 = (r/2T) Σ_k V_mk ∘ (v_k + v_k(0)) + (r/2T) Σ_k ∫ ((v_k − v_k(0)) ∘ dV_mk − V_mk ∘ dv_k).

The last term is the area between V_m and v − v(0), zero if query m's share of v stays what it is. ``predicted_logits``
is the first term; summed over queries it is the exact integral.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma._suggest import unknown_name
from joma.theory._block import Block, Errors, Pairs, Velocity, checked
from joma.theory._charts import JointChart, State
from joma.theory._integrate import Solution, System
from joma.theory.flows import Flow, Start, starts
from joma.theory.invariants import Invariant, cumulative, normalised_correlation, softmax_sums
from joma.theory.optimisers import PLAIN, SGD, Optimiser
from joma.theory.setting import Array, Attention, Task, finite
from joma.theory.trajectory import Trajectory, long_table, row_entropies

if TYPE_CHECKING:
    import pandas as pd

_VALUES = ("separate", "shared")


@dataclass(frozen=True, eq=False)
class SharedBlock(Block):
    """A block whose MLP is shared by Q queries and H heads, on the distinct (sample, query) pairs.

    Its v is (R, K), R = H·M, head by head; ξ (Q, K); z (Q, R); x (n, R) repeats the samples for each head.
    """

    query: NDArray[np.intp]  # (n,)
    one_hot: Array  # (n, Q) the same as rows of 0 and 1
    weight: (
        Array  # (Q,) of each query in the summed integral: P(m) if z_m moves with E_{q=m}, else 1
    )
    heads: int

    def split(self, rows: Array) -> Array:
        """(n, H·M) as (n·H, M)."""
        return rows.reshape(-1, self.samples.tokens)

    def attend(self, z: Array, x: Array, query: NDArray[np.intp]) -> Array:
        """b (n, R) of samples x (n, R) with queries (n,)."""
        logits = z[query]
        if self.attention.kind != "softmax":
            return self.attention.weights(logits, x)
        logits, x = self.split(logits / self.attention.temperature), self.split(x)
        logits = np.where(x > 0, logits, -np.inf)
        b = x * np.exp(logits - logits.max(axis=1, keepdims=True))
        return (b / b.sum(axis=1, keepdims=True)).reshape(len(query), -1)

    def _pull(self, x: Array, b: Array, u: Array) -> Array:
        """(∂b/∂z) u for each sample, head by head, (n, R)."""
        return self.attention.pull(self.split(x), self.split(b), self.split(u)).reshape(b.shape)

    def _z_rate(self) -> Array:
        return (self.attention_lr / self.weight)[:, None]

    def forward(self, v: Array, xi: Array, z: Array) -> tuple[Array, Array]:
        """Attention b (n, R) and pre-activations a (n, K) of the distinct samples."""
        b = self.attend(z, self.x, self.query)
        return b, b @ v + xi[self.query]

    def velocity(self, v: Array, b: Array, s: Array) -> Velocity:
        """The gradient flow for forces ``s`` (n, K)."""
        B, sigma = b.T @ s, self.one_hot.T @ s
        both = np.vstack([B, sigma]) if self.gram is None else self.gram @ np.vstack([B, sigma])
        v_dot, xi_dot = self.mlp_lr * both[: len(B)], self.mlp_lr * both[len(B) :]
        z_dot = self._z_rate() * (self.one_hot.T @ self._pull(self.x, b, s @ v.T))
        return Velocity(v_dot, xi_dot, z_dot, B, sigma)

    def uncertainty(self, v: Array, z: Array, errors: Errors) -> Array:
        """How far off the pre-activations are if v, ξ and z are off by ``errors``, (n, K)."""
        z_error = errors.z[self.query] / self.attention.temperature  # (n, R)
        b = np.abs(self.attend(z, self.x, self.query))
        moved = ((np.abs(self.x) if self.attention.kind == "linear" else b) * z_error) @ np.abs(v)
        if self.attention.kind == "softmax":
            total = (self.split(b) * self.split(z_error)).sum(axis=1)  # (n·H,)
            moved += (b * np.repeat(total, self.samples.tokens).reshape(b.shape)) @ np.abs(v)
        return b @ errors.v + errors.xi[self.query] + moved

    def response(self, v: Array, b: Array, pairs: Pairs) -> Array:
        """The tangent kernel of (sample, node) pairs, (n, n)."""
        i, k = pairs
        f = np.hstack([b[i], self.one_hot[i]])
        kernel = f @ f.T if self.gram is None else f @ self.gram @ f.T
        pull = self._pull(self.x[i], b[i], v.T[k])
        same = self.query[i][:, None] == self.query[i][None, :]
        return self.mlp_lr * kernel * (k[:, None] == k) + same * (
            pull @ (self._z_rate()[self.query[i]] * pull).T
        )

    def rates(self, v: Array, b: Array, velocity: Velocity, pairs: Pairs) -> Array:
        """ȧ of the pairs, (n,)."""
        i, k = pairs
        moved = (self._pull(self.x[i], b[i], v.T[k]) * velocity.z[self.query[i]]).sum(axis=1)
        return (b[i] * velocity.v.T[k]).sum(axis=1) + velocity.xi[self.query[i], k] + moved


class BlockFlow(Flow):
    """One block with shared MLP weights, Q queries and H heads, by gradient flow or by gradient descent.

    Arguments:
        task: all samples, whatever their query.
        query: (N,) which query each sample ends with, 0 … Q − 1; every query must occur.
        attention, activation, mlp_lr, attention_lr, temperature, A: as for ``JointFlow``.
        heads: H.
        values: "separate" (U_hᵀU_h′ = δI) or "shared" (U_h = U), both orthonormal and orthogonal to the queries; or
            an explicit frozen embedding (d, H·M + Q) with columns U_1 … U_H, u_1 … u_Q.
        conditional: z_m moves with E_{q=m}, as in Eqn. 2, instead of the joint expectation.

    The state is v (H·M, K), head by head, ξ (Q, K) and z (Q, H·M).

    >>> task = Task([[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]], [[1.0, -1.0], [-0.5, 1.0], [0.3, 0.2]])
    >>> path = BlockFlow(task, [0, 1, 1], "exp", "gelu").integrate(1.0)
    >>> path.z.shape, bool(path.invariant().max_drift < 1e-9)
    ((201, 2, 2), True)
    """

    block: SharedBlock

    def __init__(
        self,
        task: Task,
        query: ArrayLike,
        attention: str | Attention = "softmax",
        activation: Any = "linear",
        mlp_lr: float = 1.0,
        attention_lr: float = 1.0,
        *,
        temperature: float | None = None,
        A: float | None = None,
        heads: int = 1,
        values: Literal["separate", "shared"] | ArrayLike = "separate",
        conditional: bool = False,
    ) -> None:
        settings = checked(task, attention, activation, mlp_lr, attention_lr, temperature, A)
        number = finite(query, "query", 1)
        if len(number) != task.samples or (number < 0).any() or (number != np.round(number)).any():
            raise ValueError(
                f"query must be {task.samples} integers ≥ 0, one per sample; got shape {number.shape}"
            )
        self.query = number.astype(int)
        self.queries = int(self.query.max()) + 1
        probability = np.bincount(self.query, task.p, self.queries).astype(np.float64)
        if (probability == 0).any():
            unseen = int(probability.argmin())
            raise ValueError(
                f"query {unseen} has no sample with positive weight; number them 0 … Q − 1"
            )
        if int(heads) != heads or heads < 1:
            raise ValueError(f"heads must be a positive integer, got {heads!r}")
        self.heads, self.conditional = int(heads), bool(conditional)
        self.shared = isinstance(values, str) and values == "shared"
        rows = np.hstack([settings.attention.rows(task.x), self.query[:, None] + 1.0])
        samples, first = task.merged(rows)
        block = SharedBlock(
            samples,
            first,
            np.tile(samples.x, self.heads),
            *settings,
            gram=_embedding_gram(values, task.tokens, self.queries, self.heads),
            query=self.query[first],
            one_hot=np.eye(self.queries)[self.query[first]],
            weight=probability if conditional else np.ones(self.queries),
            heads=self.heads,
        )
        super().__init__(task, block)

    @property
    def weight(self) -> Array:
        """(Q,) the weight of each query in the summed integral."""
        return self.block.weight

    def start(
        self, v0: ArrayLike | None = None, xi0: ArrayLike | None = None, z0: ArrayLike | None = None
    ) -> State:
        """(v, ξ, z) at the start, checked: zeros where none is given; one map for all heads is repeated for each."""
        R, Q, K, M = self.heads * self.task.tokens, self.queries, self.task.nodes, self.task.tokens
        rows = M if self.shared else R
        v, xi, z = starts({"v0": (v0, (rows, K)), "xi0": (xi0, (Q, K)), "z0": (z0, (Q, R))})
        return np.tile(v, (self.heads, 1)) if self.shared else v, xi, z

    def _system(self, given: Start) -> System:
        if given[3] is not None:
            raise ValueError(
                "a block takes v0 and xi0; with an explicit embedding give v0 = U_Cᵀw, xi0 = u_mᵀw"
            )
        v, xi, z = self.start(*given[:3])
        chart = JointChart(v.shape, xi.shape, z.shape)
        return System(self.block, chart, chart.pack(v, xi, z))

    def integrate(self, *args: Any, **kwargs: Any) -> BlockTrajectory:
        """As ``JointFlow.integrate``, from v0 (H·M, K) (one map for all heads: (M, K)), xi0 (Q, K), z0 (Q, H·M)."""
        return cast(BlockTrajectory, super().integrate(*args, **kwargs))

    def descend(
        self,
        steps: int,
        step: float = 0.1,
        v0: ArrayLike | None = None,
        xi0: ArrayLike | None = None,
        z0: ArrayLike | None = None,
        *,
        w0: ArrayLike | None = None,
        optimiser: Optimiser = PLAIN,
    ) -> BlockTrajectory:
        """As ``JointFlow.descend``, from the same starts as ``integrate``.

        ``invariant().law`` is that of gradient descent, and under softmax that of SGD without weight decay, which keeps
        sums; it is None for other optimisers. Sign descent and Adam need embeddings of which v is a parameter.
        """
        if self.block.gram is not None and not isinstance(optimiser, SGD):
            raise ValueError(
                f"{type(optimiser).__name__} acts on each parameter by itself, and with shared values or an explicit "
                "embedding v is a combination of them; values='separate' has v as its parameters"
            )
        return cast(BlockTrajectory, self._descend(steps, step, (v0, xi0, z0, w0), optimiser))

    def _trajectory(self, solution: Solution, step: float | None) -> BlockTrajectory:
        return BlockTrajectory(**self._fields(solution, step))


def _embedding_gram(values: Any, tokens: int, queries: int, heads: int) -> Array | None:
    """EᵀE of all head and query embeddings (R + Q, R + Q), None for the identity."""
    M, Q, H = tokens, queries, heads
    if isinstance(values, str):
        if values not in _VALUES:
            raise ValueError(unknown_name(values, _VALUES, "values"))
        if values == "separate" or H == 1:
            return None
        gram = np.eye(H * M + Q)
        gram[: H * M, : H * M] = np.tile(np.eye(M), (H, H))
        return gram
    E = finite(values, "values", 2)
    if E.shape[1] != H * M + Q:
        raise ValueError(
            f"values must be (d, H·M + Q) = (d, {H * M + Q}), the heads' embeddings and then the queries'; "
            f"got shape {E.shape}"
        )
    return np.asarray(E.T @ E)


@dataclass(frozen=True, eq=False)
class BlockTrajectory(Trajectory):
    """A block over time: v (T, H·M, K), ξ (T, Q, K), z (T, Q, H·M)."""

    flow: BlockFlow = field(repr=False)

    def attention(self, n: int = -1) -> Array:
        """Attention scores b (N, H·M) of all samples at output time ``n``."""
        flow = self.flow
        return flow.block.attend(self.z[n], np.tile(flow.task.x, flow.heads), flow.query)

    def preactivation(self, n: int = -1) -> Array:
        """Pre-activations a (N, K) of all samples at output time ``n``."""
        return self.attention(n) @ self.v[n] + self.xi[n][self.flow.query]

    def entropy(self) -> Array:
        """Attention entropy in nats over time, (T,): the weighted mean over samples and the mean over heads."""
        flow, out = self.flow, np.empty(len(self.t))
        for n in range(len(self.t)):
            h, _ = row_entropies(flow.block.split(self.attention(n)))
            out[n] = flow.task.p @ h.reshape(-1, flow.heads).mean(axis=1)
        return out

    def parts(self) -> Array:
        """V_m (Q, H·M, K): what each query's samples brought to v under gradient descent; they add up to v − v(0)."""
        flow = self.flow
        if self.step is None or flow.block.gram is not None:
            raise ValueError(
                "parts are kept track of for gradient descent with orthonormal separate embeddings"
            )
        out = np.zeros((flow.queries, *self.v.shape[1:]))
        for n in range(len(self.t) - 1):
            b, a = flow.block.forward(self.v[n], self.xi[n], self.z[n])
            s = flow.block.forces(a, flow.activation.derivative(a))
            for m in range(flow.queries):
                rows = flow.block.query == m
                out[m] += self.step * flow.mlp_lr * (b[rows].T @ s[rows])
        return out

    def invariant(self, b_bar: str = "start") -> Invariant:
        """The summed first integral: one per head and token, or one per token with a shared value map; see the module.

        Under softmax the integrals are the sums Σ_l z_mhl, one per query and head (``b_bar`` plays no part).
        """
        flow, M = self.flow, self.flow.task.tokens
        kind, r, temperature = flow.attention.kind, flow.ratio, flow.attention.temperature
        scale = max(1.0, float(np.abs(self.z).max()))
        if kind == "softmax":
            total = self.z.reshape(len(self.t), -1, M).sum(axis=2)
            linear = isinstance(self.optimiser, SGD) and not np.any(self.optimiser.weight_decay)
            law = np.zeros_like(total) if self.step is not None and linear else None
            start = np.broadcast_to(total[0], total.shape)
            sums = np.hstack([total, softmax_sums(flow.block.gram, self.v, self.xi, flow.heads)])
            unknown = np.full(len(self.t), np.nan)
            return Invariant("Σ_l z_mhl", True, total, start, scale, unknown, law=law, sums=sums)
        weight, v = flow.weight[:, None], self.v
        summed = (weight * (self.z if kind == "exp" else self.z**2)).sum(axis=1)  # (T, R)
        dz2 = (weight * np.diff(self.z, axis=0) ** 2).sum(axis=1)  # (T - 1, R)
        if flow.shared:
            summed, dz2 = (a.reshape(-1, flow.heads, M).sum(axis=1) for a in (summed, dz2))
            v = v[:, :M]
        factor = r / (2 * temperature) if kind == "exp" else r
        square, dv2 = (v**2).sum(axis=2), (np.diff(v, axis=0) ** 2).sum(axis=2)
        value = summed - factor * square
        predicted = factor * square + value[0]
        law = None
        if self.step is not None and self.optimiser == PLAIN:
            steps = (dz2 if kind == "linear" else 0.0) - factor * dv2
            law = cumulative(steps)
        formula = "Σ_m z_m − (r/2T) Σ v²" if kind == "exp" else "Σ_m z_m² − r Σ v²"
        return Invariant(
            formula,
            True,
            value,
            predicted,
            scale,
            normalised_correlation(predicted, summed),
            law=law,
        )

    def to_frame(self) -> pd.DataFrame:
        """Long table: t, quantity ("v", "xi", "z"), query, head, token, node, value."""
        H, M = self.flow.heads, self.flow.task.tokens
        T, _, K = self.v.shape
        parts = {
            "v": (self.v.reshape(T, H, M, K), ("head", "token", "node")),
            "xi": (self.xi, ("query", "node")),
            "z": (self.z.reshape(T, -1, H, M), ("query", "head", "token")),
        }
        return long_table(self.t, parts, ("query", "head", "token", "node"))


def predicted_logits(
    part: Array,
    v: Array,
    v0: Array,
    *,
    ratio: float = 1.0,
    temperature: float = 1.0,
    b_bar: Array | None = None,
) -> Array:
    """The logits of one query, from what its samples brought to the weights that all queries share.

    Exact for exp attention while the query's share of v does not change.

    Arguments:
        part: V_m (M, K), what the query's samples brought to v.
        v, v0: the weights now and at the start, (M, K).
        ratio: r, the learning rate of attention over that of the MLP.
        temperature: divides the logits.
        b_bar: (M,), the query's mean attention; with it, the counterpart of Eqn. 18 for softmax attention.

    Returns:
        z_m − z_m(0), (M,).
    """
    both = (part * (v + v0)).sum(axis=1)
    if b_bar is not None:
        both = both - b_bar * both.sum()
    return ratio / (2 * temperature) * both
