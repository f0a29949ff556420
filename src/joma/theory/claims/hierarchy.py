"""Claims on hierarchical data: Lemmas 8 and 9, Theorem 5, Eqns. 8 and 103. The truth is enumeration of all states."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from joma.theory.claims._registry import Kind, claim
from joma.theory.hierarchy import CLASS, HBLT, Index, eqn8, theorem5, through_class
from joma.theory.setting import Array


def enumerate_states(tree: HBLT) -> tuple[Array, Array]:
    """All states y (2ᴺ, N) and their probabilities, straight from the definition: Σ_k P(k) Π P(y | parent)."""
    y = np.array(list(itertools.product((0, 1), repeat=tree.size)))
    inner = np.flatnonzero(tree.parent != CLASS)
    copy = y[:, inner] == y[:, tree.parent[inner]]
    p = np.where(copy, (1 + tree.rho[inner]) / 2, (1 - tree.rho[inner]) / 2).prod(axis=1)
    top = y[:, tree.parent == CLASS, None]  # (2ᴺ, n₁, 1)
    return y, p * (np.where(top == 0, tree.q.T, 1 - tree.q.T).prod(axis=1) @ tree.prior)


@functools.cache
def _small() -> tuple[HBLT, Array, Index]:
    """A uniform tree of 14 variables with three unequal classes; P[y_l = 1 | y_m = 1] by enumeration; the heights H."""
    q = np.array([[0.9, 0.2], [0.35, 0.6], [0.75, 0.95]])
    tree = HBLT(depth=3, children=2, rho=0.8, class_to_latent=q, class_prior=[0.2, 0.3, 0.5])
    y, p = enumerate_states(tree)
    tokens = y[:, tree.tokens]
    joint = (tokens * p[:, None]).T @ tokens
    return tree, joint / np.diag(joint), tree.heights()


def _M(rho: float) -> Array:  # noqa: N802
    return np.array([[1 + rho, 1 - rho], [1 - rho, 1 + rho]]) / 2


def _p(rho: float) -> Array:
    return np.array([1 + rho, 1 - rho]) / 2


@claim(
    "L8",
    source="Lemma 8",
    statement="M(ρ) is symmetric, M(ρ)1 = 1, M(ρ₁)M(ρ₂) = M(ρ₁ρ₂) and M(ρ₁)p(ρ₂) = p(ρ₁ρ₂).",
    tolerance=1e-15,
    measures="largest error of the four properties over a grid of ρ₁, ρ₂ in [−1, 1]",
    control="M(ρ₁)M(ρ₂) = M(ρ₁ + ρ₂)",
)
def l8(variant: str) -> float:
    """The four properties on a grid."""
    worst = 0.0
    for a, b in itertools.product(np.linspace(-1, 1, 21), repeat=2):
        c = a + b if variant == "control" else a * b
        errors = (_M(a) - _M(a).T, _M(a) @ np.ones(2) - 1, _M(a) @ _M(b) - _M(c), _M(a) @ _p(b) - _p(c))
        worst = max(worst, *(float(np.abs(error).max()) for error in errors))
    return worst


@claim(
    "L9",
    kind=Kind.WRONG,
    source="Lemma 9, Eqn. 91",
    statement="P_{γ|α} = P_{γ|β₁} P_{β₁|β₂} … P_{β_k|α} = M(ρ_{γ|β₁} … ρ_{β_k|α}) along the chain α ≻ β₁ ≻ … ≻ β_k ≻ γ.",
    tolerance=1e-12,
    measures="largest error of the product of conditional matrices, all by enumeration of a chain of five variables with "
    "unequal ρ and a biased top",
    correction="the chain reads α ≻ β_k ≻ … ≻ β₁ ≻ γ: the product starts at γ and its parent, not at γ and α's child",
    control="the right chain with one factor left out",
    derivation="P[γ|α] sums over Π P[child|parent], so each factor conditions on a parent and the first one is γ's: β₁ is "
    "next to γ. With the printed order the inner factors P_{β₁|β₂} condition on a child.",
    paper_formula=r"$P_{\gamma|\beta_1}P_{\beta_1|\beta_2}\cdots P_{\beta_k|\alpha},\quad \alpha\succ\beta_1\succ\cdots\succ\beta_k\succ\gamma$",
    corrected_formula=r"$P_{\gamma|\beta_1}P_{\beta_1|\beta_2}\cdots P_{\beta_k|\alpha},\quad \alpha\succ\beta_k\succ\cdots\succ\beta_1\succ\gamma$",
)
def l9(variant: str) -> float:
    """The product of conditionals along a chain, in the printed and in the right order."""
    rho = [0.9, -0.7, 0.6, 0.8]
    tree = HBLT(depth=5, children=1, rho=rho, class_to_latent=[[0.85], [0.4]])
    y, p = enumerate_states(tree)

    def given(i: int, j: int) -> Array:
        joint = np.array([[p[(y[:, i] == a) & (y[:, j] == b)].sum() for b in (0, 1)] for a in (0, 1)])
        return joint / joint.sum(axis=0)

    inner = [1, 2, 3] if variant == "printed" else [3, 2, 1]  # β₁, β₂, β₃
    chain = [4, *inner, 0]
    factors = [given(a, b) for a, b in itertools.pairwise(chain)]
    if variant == "control":
        del factors[1]
    product = functools.reduce(np.matmul, factors)
    # both equalities: the product is P_{γ|α}, and it is M of the product of the ρ
    return float(max(np.abs(product - given(4, 0)).max(), np.abs(product - _M(float(np.prod(rho)))).max()))


@claim(
    "E103",
    kind=Kind.WRONG,
    source="Theorem 5, Eqn. 103",
    statement="The distribution of the common ancestor is p_c = M(ρ_{c|1} ρ₀).",
    tolerance=1e-12,
    measures="largest difference from P[y_c] by enumeration, for a latent c two layers below the class",
    correction="p_c = p(ρ_{c|1} ρ₀), a vector; a 2 × 2 matrix cannot be one",
    control="p(ρ_{c|1}² ρ₀)",
    derivation="M(ρ_{c|1}) p(ρ₀) = p(ρ_{c|1} ρ₀), the last line of Lemma 8.",
    paper_formula=r"$\boldsymbol p_c=M(\rho_{c|1}\,\boldsymbol p_{\cdot|0}^\top\boldsymbol p_0)$",
    corrected_formula=r"$\boldsymbol p_c=\boldsymbol p(\rho_{c|1}\rho_0),\quad \rho_0=2\,\mathbb P[y_1=0]-1$",
)
def e103(variant: str) -> float:
    """P[y_c] beside the printed matrix and the vector."""
    tree, _, _ = _small()
    y, p = enumerate_states(tree)
    c = tree.q.shape[1]  # the first latent of the second layer
    truth = np.array([p[y[:, c] == value].sum() for value in (0, 1)])
    rho, rho0 = float(tree.rho[c]), float(tree.rho0[0])
    if variant == "printed":
        return float(np.abs(truth[:, None] - _M(rho * rho0)).max())
    return float(np.abs(truth - _p((rho**2 if variant == "control" else rho) * rho0)).max())


@claim(
    "T5",
    source="Theorem 5",
    statement="If l and m have a common latent ancestor of depth H, P[y_l = 1 | y_m = 1] = ½(1 + ρ^{2H} − 2ρ^{L−1}ρ₀)/(1 − ρ^{L−1}ρ₀).",
    tolerance=1e-12,
    measures="largest error over all pairs of tokens below a common latent, against enumeration of 2¹⁴ states; ρ₀ = 2P[y = 0] − 1 "
    "of the latent below the class (T5.rho0), L the edges from class to token",
    control="ρ^H in the place of ρ^{2H}",
)
def t5(variant: str) -> float:
    """Theorem 5 against enumeration."""
    tree, truth, H = _small()
    half = 0.5 if variant == "control" else 1.0
    worst = 0.0
    for l, m in zip(*np.nonzero((H > 0) & (H < tree.L)), strict=True):
        rho0 = tree.rho0[0 if m < 4 else 1]
        worst = max(worst, abs(float(theorem5(0.8, rho0, half * H[l, m], 3)) - truth[l, m]))
    return worst


@claim(
    "T5.rho0",
    kind=Kind.WRONG,
    source="Theorem 5, ρ₀",
    statement="ρ₀ := p_{·|0}ᵀ p₀ with p_{·|0} = [P[y_l = 0 | y₀ = k]].",
    tolerance=1e-12,
    measures="largest error of Theorem 5 with this ρ₀ over all pairs below a common latent, against enumeration of 2¹⁴ states",
    correction="ρ₀ = 2 Σ_k P[y_l = 0 | k] P[k] − 1, as the proof uses it (Eqn. 101)",
    control="ρ₀ = 1 − 2 Σ_k P[y_l = 0 | k] P[k], the opposite coding",
    derivation="Eqn. 101 writes P[y₁ = 0 | k] = ½(1 + p_{k|0}), so p_{k|0} = 2P[y₁ = 0 | k] − 1 and ρ₀ = Σ_k p_{k|0} P[k] = 2P[y₁ = 0] − 1.",
    paper_formula=r"$\rho_0=\sum_k\mathbb P[y_1=0\mid k]\,\mathbb P[k]$",
    corrected_formula=r"$\rho_0=2\sum_k\mathbb P[y_1=0\mid k]\,\mathbb P[k]-1$",
)
def t5_rho0(variant: str) -> float:
    """Which ρ₀ makes Theorem 5 true."""
    tree, truth, H = _small()
    P = tree.prior @ tree.q
    rho0 = {"printed": P, "corrected": 2 * P - 1, "control": 1 - 2 * P}[variant]
    pairs = zip(*np.nonzero((H > 0) & (H < tree.L)), strict=True)
    return max(abs(float(theorem5(0.8, rho0[0 if m < 4 else 1], H[l, m], 3)) - truth[l, m]) for l, m in pairs)


@claim(
    "T5.class",
    kind=Kind.EXTENSION,
    source="Theorem 5, the case left out",
    statement="The formula of Theorem 5 with H = L, for tokens whose only common ancestor is the class y₀.",
    tolerance=1e-12,
    measures="largest error over all pairs with nothing but the class above both, against enumeration of 2¹⁴ states",
    correction="with κ = E_k[(2q_l − 1)(2q_m − 1)] of the two variables right below the class, P = ½(1 − ρ^{L−1}(ρ₀ˡ + ρ₀ᵐ) + "
    "ρ^{2L−2} κ)/(1 − ρ^{L−1} ρ₀ᵐ): the class is not binary, and its two branches have their own ρ₀",
    control="κ = ρ₀ˡ ρ₀ᵐ, as if the two branches were independent",
    derivation="Given the class the branches are independent: E[s_l s_m] = ρ^{2(L−1)} E_k[E[s_a|k] E[s_b|k]], and P[1, 1] = "
    "¼(1 − E s_l − E s_m + E s_l s_m) with E s_l = ρ^{L−1} ρ₀ˡ.",
    paper_formula=r"$\tfrac12\,\frac{1+\rho^{2L}-2\rho^{L-1}\rho_0}{1-\rho^{L-1}\rho_0}$",
    corrected_formula=r"$\tfrac12\,\frac{1-\rho^{L-1}(\rho_0^l+\rho_0^m)+\rho^{2L-2}\,\mathbb E_k[(2q^l_k-1)(2q^m_k-1)]}{1-\rho^{L-1}\rho_0^m}$",
)
def t5_class(variant: str) -> float:
    """Pairs whose common ancestor is the class."""
    tree, truth, H = _small()
    spin = 2 * tree.q - 1
    kappa = float(tree.prior @ spin.prod(axis=1)) if variant != "control" else float(tree.rho0.prod())
    worst = 0.0
    for l, m in zip(*np.nonzero(H == tree.L), strict=True):
        a, b = tree.rho0[0 if l < 4 else 1], tree.rho0[0 if m < 4 else 1]
        value = theorem5(0.8, b, 3, 3) if variant == "printed" else through_class(0.8, a, b, kappa, 3)
        worst = max(worst, abs(float(value) - truth[l, m]))
    return worst


@claim(
    "E8",
    kind=Kind.WRONG,
    source="Eqn. 8",
    statement="For ρ = ρ₀ = 1 − ε, P[y_l = 1 | y_m = 1] = 1 − H/L + O(ε²).",
    tolerance=0.05,
    measures="2 − the order in ε at which the remainder vanishes (between ε = 2⁻¹⁰ and 2⁻¹¹), the largest over L ≤ 6 and H < L, "
    "with P from exact pair moments of a tree whose classes give ρ₀ = 1 − ε",
    correction="1 − H/L + ε H(2H − L)/(2L) + O(ε²): the remainder is of first order unless 2H = L",
    control="the remainder with H(2H + L)",
    derivation="P = 1 − ½(1 − ρ^{2H})/(1 − ρ^L) and 1 − (1 − ε)ⁿ = nε(1 − (n − 1)ε/2 + …), so P = 1 − (H/L)(1 − (2H − L)ε/2 + …).",
    paper_formula=r"$1-\frac HL+O(\epsilon^2)$",
    corrected_formula=r"$1-\frac HL+\epsilon\,\frac{H(2H-L)}{2L}+O(\epsilon^2)$",
)
def e8(variant: str) -> float:
    """How fast the remainder of Eqn. 8 vanishes."""
    worst = 0.0
    for L in range(2, 7):
        remainders = []
        for epsilon in (2.0**-10, 2.0**-11):
            tree = HBLT(L, 2, 1 - epsilon, class_to_latent=[[1.0], [1 - epsilon]])  # ρ₀ = 2(1 − ε/2) − 1
            H, P = tree.heights()[0], tree.cooccurrence()[0]
            statement = eqn8(H, L, 0.0 if variant == "printed" else epsilon)
            if variant == "control":
                statement = 1 - H / L + epsilon * H * (2 * H + L) / (2 * L)
            remainders.append(np.abs(P - statement)[H > 0])
        large = remainders[1] > 1e-13  # where 2H = L it is zero
        order = np.log2(remainders[0][large] / remainders[1][large])
        worst = max(worst, float((2 - order).max(initial=0.0)))
    return worst
