"""Claims beyond Theorem 1: all data-independent laws, softmax's exact ones, and what no law can give."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from joma.paper.claims._registry import Kind, Variant, claim
from joma.theory.flows import JointFlow
from joma.theory.laws import System, WeightPair, endpoint_count, laws, split_logit_velocity
from joma.theory.optimisers import SGD
from joma.theory.setting import Array, Task
from joma.theory.tasks import class_distributions, random_gradients, small_start
from joma.theory.trajectory import Trajectory


@claim(
    "LAWS.count",
    kind=Kind.EXTENSION,
    source="Theorem 1, all laws of the block",
    statement=(
        "With M tokens and K nodes, orthonormal embeddings and any data, the block has exactly M "
        "data-independent conserved quantities under linear and exp attention, and K + 1 under "
        "softmax (without the residual connection 1). A softmax loss adds Σ_k v_lk and Σ_k ξ_k. A "
        "pair of matrices with h rows that act through their product has h(h + 1)/2."
    ),
    tolerance=0.0,
    measures=(
        "|count − stated| by the Lie algebra's rank and by the rank of the end-point map's "
        "Jacobian, and whether as many independent laws are known"
    ),
    control="one law more",
    derivation=(
        "the flow for any data is a combination of ∇a_k(x; θ); what all of them leave constant are "
        "the functions of the orbit, of codimension D − dim Lie. Singular values must fall by 1e6 "
        "at the rank"
    ),
    paper_formula=(
        r"linear $z^2-\sum_k v_k^2$ and exp $z-\tfrac12\sum_k v_k^2$ are conserved: $M$ laws"
    ),
    corrected_formula=r"these are all; softmax has $K+1$: $\sum_l z_l$ and $\sum_l v_{lk}-\xi_k$",
    mutants={
        "exp has M + 1": "one law more",
        "softmax has K": "one law less: Σ_l z_l forgotten",
        "without residual none": "the law of the logits forgotten",
        "softmax loss adds M": "Σ_k ξ_k forgotten",
        "pair has h²": "a matrix that is not symmetric",
    },
)
def laws_count(variant: Variant) -> Iterator[float]:
    """Counts by three ways against the formulas."""
    more = 1 if variant == "control" else 0
    M, K, h = 3, 2, 2
    stated = (
        M,
        M + variant.has("exp has M + 1"),
        K + 1 - variant.has("softmax has K"),
        1 - variant.has("without residual none"),
        M + (M + 1) - variant.has("softmax loss adds M"),
        h**2 if variant.has("pair has h²") else h * (h + 1) // 2,
    )
    for number, (count, certified, by_endpoints) in zip(stated, _counts(), strict=True):
        yield abs(count - number - more) + (0.0 if certified else 1.0)
        yield abs(by_endpoints - number - more)


@functools.cache
def _counts() -> tuple[tuple[int, bool, int], ...]:
    """(count by the Lie algebra, certified, count by the end-point map) of six systems, in the order of the formulas."""
    rng = np.random.default_rng(0)
    task = random_gradients(rng, samples=4, tokens=3, nodes=2)
    labelled = Task.classification(task.x, [0, 1, 0, 1])
    alone = np.diag([1.0, 1.0, 1.0, 0.0])  # no residual connection: the query's embedding is zero
    systems: tuple[System, ...] = (
        JointFlow(task, "linear", attention_lr=0.7),
        JointFlow(task, "exp", attention_lr=0.7, temperature=1.3),
        JointFlow(task, "softmax", attention_lr=0.7),
        JointFlow(task, "softmax", embedding=alone),
        JointFlow(labelled, "exp"),
        WeightPair(2, 3, 2),
    )
    return tuple(
        (counted.count, counted.certified, endpoint_count(s)[0])
        for s in systems
        for counted in (laws(s),)
    )


@claim(
    "LAWS.softmax",
    kind=Kind.EXTENSION,
    source="Theorem 1, softmax attention",
    statement=(
        "Under softmax attention Σ_l z_l and Σ_l v_lk − ξ_k (each k) are conserved by gradient "
        "flow, by gradient descent with any step size, and by momentum."
    ),
    tolerance=1e-12,
    measures=(
        "largest drift of the K + 1 sums, relative to the largest of |v|, |z| and 1: flow, 1,000 "
        "steps of gradient descent, 300 with momentum 0.9"
    ),
    control="Σ_l v_lk + ξ_k",
    derivation=(
        "1ᵀ(diag b − b bᵀ) = 0, and Σ_l v̇_lk = η Σ_i s_ik Σ_l b_il = η Σ_i s_ik = ξ̇_k since Σ_l "
        "b_il = 1; linear laws hold for every combination of gradients"
    ),
    paper_formula=r"approximately $z=\tfrac12\sum_k(v_k^2-\|v_k\|^2\bar b)+c$ (Eqn. 18)",
    corrected_formula=r"exactly $\sum_l z_l=c$ and $\sum_l v_{lk}-\xi_k=c_k$",
    terms=("ξ",),
    mutants={"one token left out": "of Σ_l z_l"},
)
def laws_softmax(variant: Variant) -> Iterator[float]:
    """Drift of the sums."""
    xi_factor = 1.0 if variant == "control" else -variant.factor("ξ")
    first = 1 if variant.has("one token left out") else 0
    for path in _softmax_paths():
        sums = np.column_stack(
            [path.z[:, first:].sum(axis=1), path.v.sum(axis=1) + xi_factor * path.xi]
        )
        yield float(
            np.abs(sums - sums[0]).max() / max(1.0, np.abs(path.v).max(), np.abs(path.z).max())
        )


@functools.cache
def _softmax_paths() -> tuple[Trajectory, ...]:
    """Flow, gradient descent and momentum, for three activations."""
    rng = np.random.default_rng(1)
    out: list[Trajectory] = []
    for activation in ("linear", "gelu", "relu"):
        task = random_gradients(rng, samples=12, tokens=5, nodes=3)
        start = small_start(task, rng, 0.5)
        flow = JointFlow(task, "softmax", activation, attention_lr=1.6, temperature=0.8)
        out += (
            flow.integrate(5.0, *start, times=11),
            flow.descend(1000, 0.1, *start),
            flow.descend(300, 0.05, *start, optimiser=SGD(0.9)),
        )
    return tuple(out)


@claim(
    "LAWS.no_go",
    kind=Kind.EXTENSION,
    source="Theorem 1, softmax attention",
    statement=(
        "Under softmax attention no function z = F(v, ξ) exists, whatever the data: attention "
        "cannot be integrated out exactly."
    ),
    tolerance=1e-12,
    measures=(
        "largest of |v̇| and |ξ̇| over the largest |ż|, for three samples b̄ − δ, b̄, b̄ + δ with "
        "gradients 1, −2, 1"
    ),
    control="gradients 1, −1, 1",
    derivation=(
        "Σ g = 0 and Σ g b = 0 stop v and ξ, but Σ g b bᵀ = 2δδᵀ moves z by −(2η_z/3T) δ (δᵀv)"
    ),
    paper_formula=r"approximately $z=F(v)$ (Eqn. 18)",
    corrected_formula=(
        r"$\dot v=0$, $\dot\xi=0$ and yet $\dot z=-\tfrac{2\eta_z}{3T}\delta\delta^\top v$"
    ),
    terms=("the middle gradient", "the third δ"),
)
def laws_no_go(variant: Variant) -> Iterator[float]:
    """The counterexample, for several states."""
    rng = np.random.default_rng(2)
    for _ in range(5):
        mean = rng.dirichlet(np.full(4, 5.0))
        off = rng.standard_normal(4)
        off = (off - off.mean()) * 0.5 * mean.min() / np.abs(off - off.mean()).max()
        middle = -1.0 if variant == "control" else -2.0 * variant.factor("the middle gradient")
        samples = np.stack([mean - off, mean, mean + variant.factor("the third δ") * off])
        task = Task(samples, [[1.0], [middle], [1.0]])
        velocity = JointFlow(task, "softmax").block.smooth_velocity(
            rng.standard_normal((4, 1)), np.zeros(1), np.zeros(4)
        )
        yield float(
            max(np.abs(velocity.v).max(), np.abs(velocity.xi).max()) / np.abs(velocity.z).max()
        )


@claim(
    "LAWS.velocity",
    kind=Kind.EXTENSION,
    source="Eqn. 17, made exact",
    statement=(
        "Under softmax attention ż = (r/T) Σ_k [v̇_k ∘ ṽ_k − b̄ (v̇_kᵀṽ_k)] − (η_z/T) Σ_k E[s_k δδᵀ] "
        "v_k with δ = b − b̄ and ṽ_k = v_k − (b̄ᵀv_k) 1."
    ),
    tolerance=1e-12,
    measures="largest deviation from ż at random states, relative to max|ż|",
    control="the last term left out",
    derivation=(
        "E[s b bᵀ] = b̄ E[s b]ᵀ + E[s δ] b̄ᵀ + E[s δδᵀ], and E[s δ] = (v̇ − b̄ ξ̇)/η with ξ̇ = 1ᵀv̇"
    ),
    paper_formula=r"approximately $\dot z=\sum_k[\dot v_k\circ v_k-\bar b(\dot v_k^\top v_k)]$",
    corrected_formula=(
        r"$\dot z=\tfrac rT\sum_k[\dot v_k\circ\tilde v_k-\bar b(\dot v_k^\top\tilde "
        r"v_k)]-\tfrac{\eta_z}{T}\sum_k E[s_k\delta\delta^\top]v_k$"
    ),
    terms=("the first part", "the last term"),
)
def laws_velocity(variant: Variant) -> Iterator[float]:
    """Both parts against the block's own velocity."""
    rng = np.random.default_rng(3)
    for smooth in (True, False):
        flow = JointFlow(
            class_distributions(rng, smooth=smooth),
            "softmax",
            "gelu",
            attention_lr=1.7,
            temperature=0.6,
        )
        M, K = flow.task.tokens, flow.task.nodes
        state: tuple[Array, Array, Array] = (
            rng.standard_normal((M, K)), rng.standard_normal(K), rng.standard_normal(M),
        )  # fmt: skip
        transport, covariance = split_logit_velocity(flow, *state)
        z_dot = flow.block.smooth_velocity(*state).z
        transport, covariance = (
            variant.factor("the first part") * transport,
            variant.factor("the last term") * covariance,
        )
        total = transport if variant == "control" else transport + covariance
        yield float(np.abs(total - z_dot).max() / np.abs(z_dot).max())
