"""Claims beyond Theorem 1: all data-independent laws, softmax's exact ones, and what no law can give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from joma.theory.claims._registry import Kind, Variant, claim
from joma.theory.flows import JointFlow
from joma.theory.laws import System, WeightPair, endpoint_count, laws, split_logit_velocity
from joma.theory.optimisers import SGD
from joma.theory.setting import Array, Task
from joma.theory.tasks import class_distributions, random_gradients, small_start


@claim(
    "LAWS.count",
    kind=Kind.EXTENSION,
    source="Theorem 1, all laws of the block",
    statement="With M tokens and K nodes, orthonormal embeddings and any data, the block has exactly M data-independent "
    "conserved quantities under linear and exp attention, and K + 1 under softmax (without the residual connection 1). A "
    "softmax loss adds Σ_k v_lk and Σ_k ξ_k. A pair of matrices with h rows that act through their product has h(h + 1)/2.",
    tolerance=0.0,
    measures="|count − stated| by the Lie algebra's rank and by the rank of the end-point map's Jacobian, and whether as "
    "many independent laws are known",
    control="one law more",
    derivation="the flow for any data is a combination of ∇a_k(x; θ); what all of them leave constant are the functions of "
    "the orbit, of codimension D − dim Lie. Singular values must fall by 1e6 at the rank",
)
def laws_count(variant: Variant) -> Iterator[float]:
    """Counts by three ways against the formulas."""
    rng = np.random.default_rng(0)
    more = 1 if variant == "control" else 0
    task = random_gradients(rng, samples=4, tokens=3, nodes=2)
    labelled = Task.classification(task.x, [0, 1, 0, 1])
    alone = np.diag([1.0, 1.0, 1.0, 0.0])  # no residual connection: the query's embedding is zero
    cases: list[tuple[System, int]] = [
        (JointFlow(task, "linear", attention_lr=0.7), 3),
        (JointFlow(task, "exp", attention_lr=0.7, temperature=1.3), 3),
        (JointFlow(task, "softmax", attention_lr=0.7), 3),
        (JointFlow(task, "softmax", embedding=alone), 1),
        (JointFlow(labelled, "exp"), 3 + 4),
        (WeightPair(2, 3, 2), 3),
    ]
    for system, stated in cases:
        counted = laws(system)
        yield abs(counted.count - stated - more) + (0.0 if counted.certified else 1.0)
        yield abs(endpoint_count(system)[0] - stated - more)


@claim(
    "LAWS.softmax",
    kind=Kind.EXTENSION,
    source="Theorem 1, softmax attention",
    statement="Under softmax attention Σ_l z_l and Σ_l v_lk − ξ_k (each k) are conserved by gradient flow, by gradient "
    "descent with any step size, and by momentum.",
    tolerance=1e-12,
    measures="largest drift of the K + 1 sums, relative to the largest of |v|, |z| and 1: flow, 1,000 steps of gradient "
    "descent, 300 with momentum 0.9",
    control="Σ_l v_lk + ξ_k",
    derivation="1ᵀ(diag b − b bᵀ) = 0, and Σ_l v̇_lk = η Σ_i s_ik Σ_l b_il = η Σ_i s_ik = ξ̇_k since Σ_l b_il = 1; linear "
    "laws hold for every combination of gradients",
)
def laws_softmax(variant: Variant) -> Iterator[float]:
    """Drift of the sums."""
    rng = np.random.default_rng(1)
    sign = 1.0 if variant == "control" else -1.0
    for activation in ("linear", "gelu", "relu"):
        task = random_gradients(rng, samples=12, tokens=5, nodes=3)
        start = small_start(task, rng, 0.5)
        flow = JointFlow(task, "softmax", activation, attention_lr=1.6, temperature=0.8)
        paths = (
            flow.integrate(5.0, *start, times=11),
            flow.descend(1000, 0.1, *start),
            flow.descend(300, 0.05, *start, optimiser=SGD(0.9)),
        )
        for path in paths:
            sums = np.column_stack([path.z.sum(axis=1), path.v.sum(axis=1) + sign * path.xi])
            yield float(np.abs(sums - sums[0]).max() / max(1.0, np.abs(path.v).max(), np.abs(path.z).max()))


@claim(
    "LAWS.no_go",
    kind=Kind.EXTENSION,
    source="Theorem 1, softmax attention",
    statement="Under softmax attention no function z = F(v, ξ) exists, whatever the data: attention cannot be integrated "
    "out exactly.",
    tolerance=1e-12,
    measures="largest of |v̇| and |ξ̇| over the largest |ż|, for three samples b̄ − δ, b̄, b̄ + δ with gradients 1, −2, 1",
    control="gradients 1, −1, 1",
    derivation="Σ g = 0 and Σ g b = 0 stop v and ξ, but Σ g b bᵀ = 2δδᵀ moves z by −(2η_z/3T) δ (δᵀv)",
)
def laws_no_go(variant: Variant) -> Iterator[float]:
    """The counterexample, for several states."""
    rng = np.random.default_rng(2)
    for _ in range(5):
        mean = rng.dirichlet(np.full(4, 5.0))
        off = rng.standard_normal(4)
        off = (off - off.mean()) * 0.5 * mean.min() / np.abs(off - off.mean()).max()
        task = Task(np.stack([mean - off, mean, mean + off]), [[1.0], [-1.0 if variant == "control" else -2.0], [1.0]])
        velocity = JointFlow(task, "softmax").block.smooth_velocity(
            rng.standard_normal((4, 1)), np.zeros(1), np.zeros(4)
        )
        yield float(max(np.abs(velocity.v).max(), np.abs(velocity.xi).max()) / np.abs(velocity.z).max())


@claim(
    "LAWS.velocity",
    kind=Kind.EXTENSION,
    source="Eqn. 17, made exact",
    statement="Under softmax attention ż = (r/T) Σ_k [v̇_k ∘ ṽ_k − b̄ (v̇_kᵀṽ_k)] − (η_z/T) Σ_k E[s_k δδᵀ] v_k with δ = b − b̄ and "
    "ṽ_k = v_k − (b̄ᵀv_k) 1.",
    tolerance=1e-12,
    measures="largest deviation from ż at random states, relative to max|ż|",
    control="the last term left out",
    derivation="E[s b bᵀ] = b̄ E[s b]ᵀ + E[s δ] b̄ᵀ + E[s δδᵀ], and E[s δ] = (v̇ − b̄ ξ̇)/η with ξ̇ = 1ᵀv̇",
)
def laws_velocity(variant: Variant) -> Iterator[float]:
    """Both parts against the block's own velocity."""
    rng = np.random.default_rng(3)
    for smooth in (True, False):
        flow = JointFlow(class_distributions(rng, smooth=smooth), "softmax", "gelu", attention_lr=1.7, temperature=0.6)
        M, K = flow.task.tokens, flow.task.nodes
        state: tuple[Array, Array, Array] = (
            rng.standard_normal((M, K)), rng.standard_normal(K), rng.standard_normal(M),
        )  # fmt: skip
        transport, covariance = split_logit_velocity(flow, *state)
        z_dot = flow.block.smooth_velocity(*state).z
        total = transport if variant == "control" else transport + covariance
        yield float(np.abs(total - z_dot).max() / np.abs(z_dot).max())
