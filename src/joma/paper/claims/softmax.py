"""Claims on Theorem 1 under softmax attention (Eqns. 17 and 18): what its premises give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from joma.paper.claims._registry import Kind, Variant, claim, largest
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Task
from joma.theory.tasks import class_distributions

# Three tokens, alone and in pairs: E[g b bᵀ] = S/6 with S a = a² and a = S 1 = (1, −1, 0), so
# that ż = 0 for ever.
CONTEXTS = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])
GRADIENTS = np.array([3.0, 1.0, 8.0, 4.0, -8.0, -8.0])


def attention_at_rest(a: Array) -> Array:
    """Return gradients such that E[g b] ∝ a and softmax attention never moves.

    They belong to the tokens alone and in pairs (`contexts`), and have the shape (M (M + 1)/2,).
    From zero start v = a t, so ż = 0 asks for S a = a ∘ a with S = E[g b bᵀ], S 1 = a: linear
    equations for S. The contexts e_i and (e_i + e_j)/2 then determine S entry by entry.
    """
    M = len(a)
    rows, columns = np.triu_indices(M)
    entries = np.arange(len(rows))
    basis = np.zeros((len(rows), M, M))
    basis[entries, rows, columns] = 1.0
    basis[entries, columns, rows] = 1.0
    equations = np.concatenate([basis @ np.ones(M), basis @ a], axis=1).T  # (2 M, entries of S)
    solution = np.linalg.lstsq(equations, np.concatenate([a, a * a]), rcond=None)[0]
    S = np.tensordot(solution, basis, axes=1)  # (M, M)
    pairs = 4 * S * (1 - np.eye(M))
    alone = np.diag(S) - pairs.sum(axis=1) / 4
    return np.concatenate([alone, pairs[np.triu_indices(M, 1)]])


def contexts(M: int) -> Array:
    """Return every token alone, then every pair of tokens, (M (M + 1)/2, M)."""
    i, j = np.triu_indices(M, 1)
    return np.vstack([np.eye(M), (np.eye(M)[i] + np.eye(M)[j]) / 2])


def _no_second_order(d: Array, rng: np.random.Generator, nodes: int, mean: Array) -> Task:
    """A task at z = 0 with E[g_k b bᵀ] = b̄ E[g_k bᵀ] for each node.

    The samples b̄, b̄ ± d, b̄ ± √2 d with gradients c_k, e_k, −e_k/2 make the first and second
    moments of (b − b̄) under g vanish.
    """
    x = np.stack([mean, mean + d, mean - d, mean + np.sqrt(2) * d, mean - np.sqrt(2) * d])
    c = rng.standard_normal(nodes)
    e = rng.standard_normal(nodes)
    return Task(x, np.stack([c, e, e, -e / 2, -e / 2]))


def _centred(rng: np.random.Generator, size: float) -> Array:
    """A direction (4,) with mean 0 whose largest entry has this size."""
    d = rng.standard_normal(4)
    return size * (d - d.mean()) / np.abs(d - d.mean()).max()


@claim(
    "T1.softmax",
    root="softmax",
    kind=Kind.WRONG,
    source="Theorem 1, third case, and Eqn. 18",
    statement="Softmax attention: with b̄ constant and E[Σ_k g h′ b bᵀ] = b̄ E[Σ_k g h′ b]ᵀ, "
    "z(t) = ½ Σ_k (v_k² − ‖v_k‖² b̄) + c.",
    tolerance=1e-9,
    measures=(
        "‖ẑ − z‖ / max(1, ‖z‖) at t = 6 on tasks with linear nodes that fulfil the premises at all "
        "times: as printed (summed over k; z moves by less than 1e-12 there), and for each k"
    ),
    correction=(
        "the second premise must hold for each node k. But E[diag b − b bᵀ] is a graph Laplacian, "
        "so a constant b̄ forces ż = 0: the exact case is one in which attention does not learn. "
        "What is exact for every softmax flow is Σ_l z_l = const; Eqn. 18 itself is an "
        "approximation that predicts the pattern of z (see Figure 2)"
    ),
    counterexample=(
        "Two linear nodes with g₁ = −g₂ = g. Contexts: three tokens, alone (g = 3, 1, 8) and in "
        "the pairs 12, 13, 23 (g = 4, −8, −8), equally often. Σ_k g_k = 0, so the second premise "
        "reads 0 = 0. At z = 0, a = E[g b] = (1, −1, 0)/6 and (diag a − E[g b bᵀ])a = 0, so with "
        "v₁ = −v₂ = a t, ż = 0: z = 0 and b̄ = (⅓, ⅓, ⅓) for ever, the first premise. Eqn. 18 gives "
        "z(6) = (⅓, ⅓, −⅔)"
    ),
    control="Eqn. 18 with a plus sign in the place of the minus",
    derivation=(
        "ż = Σ_k (diag E[g_k h′ b] − E[g_k h′ b bᵀ]) v_k: each node's matrix meets its own v_k, "
        "and their sum says nothing. ḃ̄ = E[diag b − b bᵀ] ż/T; the kernel of that Laplacian holds "
        "only vectors constant on connected sets of tokens, to which ż is orthogonal, so ḃ̄ = 0 "
        "implies ż = 0."
    ),
    paper_formula=(
        r"$\bar b_m$ constant and $\mathbb E[\sum_k g_{h_k}h_k' bb^\top]=\bar b_m\mathbb E[\sum_k "
        r"g_{h_k}h_k' b]\;\Rightarrow\;z_m(t)=\tfrac12\sum_k v_k^2(t)-\|v_k(t)\|_2^2\,\bar b_m+c$"
    ),
    corrected_formula=(
        r"$\bar b_m$ constant and $\mathbb E[g_{h_k}h_k' bb^\top]=\bar b_m\mathbb E[g_{h_k}h_k' "
        r"b]^\top\ \forall k\;\Rightarrow\;z_m(t)=\tfrac12\sum_k (v_k^2-\|v_k\|_2^2\,\bar "
        r"b_m)+c=z_m(0)$. For every softmax flow: $\mathbf 1^\top z_m(t)=\text{const}$"
    ),
    terms=("Σ v²", "‖v‖² b̄"),
)
def t1_softmax(variant: Variant) -> Iterator[float]:
    """Measure the distance of Eqn. 18 from the softmax flow."""
    rng = np.random.default_rng(3)
    tasks = []
    if variant == "printed":
        tasks.append(Task(CONTEXTS, np.outer(GRADIENTS, [1.0, -1.0])))
        for _ in range(4):  # the same for any a that sums to 0, in four tokens
            a = rng.standard_normal(4)
            gradients = attention_at_rest(a - a.mean())
            tasks.append(Task(contexts(4), np.outer(gradients, [1.0, -1.0])))
    else:
        for _ in range(5):
            d = _centred(rng, 0.1)
            tasks.append(_no_second_order(d, rng, nodes=2, mean=np.full(4, 0.25)))
    sign = variant.choose(-1.0, {"control": 1.0})
    for task in tasks:
        path = JointFlow(task, "softmax", "linear").integrate(6.0, times=4)
        if variant == "printed" and largest(path.z) > 1e-12:
            raise ArithmeticError(
                f"attention moved by {largest(path.z):.2g}: the premise is not fulfilled"
            )
        square = (path.v[-1] ** 2).sum(axis=1)
        b_bar = task.p @ path.attention(0)
        drop = variant.factor("‖v‖² b̄") * square.sum() * b_bar
        z_hat = 0.5 * (variant.factor("Σ v²") * square + sign * drop)
        distance = float(np.linalg.norm(z_hat - path.z[-1]))
        yield distance / max(1.0, float(np.linalg.norm(path.z[-1])))


@claim(
    "T1.softmax_hypothesis",
    root="softmax",
    kind=Kind.WRONG,
    source="Theorem 1 and Eqn. 17",
    statement="If E[Σ_k g h′ b bᵀ] = b̄ E[Σ_k g h′ b]ᵀ, then ż = Σ_k (v̇_k ∘ v_k − b̄ v̇_kᵀ v_k).",
    tolerance=1e-10,
    measures=(
        "error of Eqn. 17 relative to its first term, at twenty random states of tasks that fulfil "
        "the hypothesis (and of v̇_k = b̄ ξ̇_k for the corrected statement)"
    ),
    correction=(
        "The hypothesis must hold for each k, since each term meets its own v_k. Multiplied by 1 "
        "(Σ b = 1) it then forces v̇_k = b̄ ξ̇_k: all nodes move along the one direction b̄"
    ),
    counterexample=(
        "Cross-entropy with linear nodes has Σ_k g_k = 0 for every sample, so the hypothesis reads "
        "0 = 0 on every data set; Eqn. 17 is off by up to 15 % of its first term on the class "
        "distributions of Figure 2"
    ),
    control="Eqn. 17 with + b̄ v̇ᵀv on the same tasks",
    derivation=(
        "ż = Σ_k (diag E[g_k h′ b] − E[g_k h′ b bᵀ]) v_k. Cross-entropy with linear nodes has Σ_k "
        "g_k = 0, so the summed hypothesis holds as 0 = 0, yet Σ_k E[g_k b bᵀ] v_k ≠ b̄ Σ_k v̇_kᵀ "
        "v_k."
    ),
    paper_formula=(
        r"$\mathbb E[\textstyle\sum_k g_{h_k}h_k' bb^\top]=\bar b_m\,\mathbb E[\textstyle\sum_k "
        r"g_{h_k}h_k' b]\;\Rightarrow\;\dot z_m=\sum_k\dot v_k\circ v_k-\bar b_m\dot v_k^\top v_k$"
    ),
    corrected_formula=(
        r"$\mathbb E[g_{h_k}h_k' bb^\top]=\bar b_m\,\mathbb E[g_{h_k}h_k' b]^\top\ \forall "
        r"k\;\Rightarrow\;\dot z_m=\sum_k\dot v_k\circ v_k-\bar b_m\dot v_k^\top v_k$ and $\dot "
        r"v_k=\bar b_m\dot\xi_k$"
    ),
    terms=("v̇ ∘ v", "b̄ v̇ᵀv", "b̄ ξ̇"),
    mutants={"one b̄": "b̄ uniform in the place of E[b]"},
)
def t1_softmax_hypothesis(variant: Variant) -> Iterator[float]:
    """Compare Eqn. 17 with ż where the hypothesis holds, summed or node by node."""
    rng = np.random.default_rng(4)
    sign = variant.choose(-1.0, {"control": 1.0})
    for _ in range(20):
        if variant == "printed":
            task = class_distributions(rng, smooth=True)
        else:
            mean = rng.dirichlet(np.full(4, 3.0))
            d = _centred(rng, 0.5 * mean.min())
            task = _no_second_order(d, rng, nodes=3, mean=mean)
        block = JointFlow(task, "softmax", "linear").block
        v = rng.standard_normal((task.tokens, task.nodes))
        xi = rng.standard_normal(task.nodes)
        b, a = block.forward(v, xi, np.zeros(task.tokens))
        velocity = block.velocity(v, b, block.forces(a, np.ones_like(a)))
        b_bar = block.p @ b
        if variant.has("one b̄"):
            b_bar = np.full(task.tokens, 1 / task.tokens)
        products = velocity.v * v  # (M, K)
        first = products.sum(axis=1)
        second = variant.factor("b̄ v̇ᵀv") * b_bar * products.sum()
        off = variant.factor("v̇ ∘ v") * first + sign * second - velocity.z
        yield largest(off) / largest(first)
        if variant == "corrected":
            off = velocity.v - variant.factor("b̄ ξ̇") * np.outer(b_bar, velocity.xi)
            yield largest(off) / largest(velocity.v)
