"""Claims on hierarchical data: Lemmas 8 and 9, Theorem 5, Eqns. 8 and 103. The truth is enumeration of all states."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from joma.paper.claims._registry import Kind, Variant, claim
from joma.theory.hierarchy import CLASS, HBLT, Index, theorem5, through_class
from joma.theory.setting import Array


def enumerate_states(tree: HBLT) -> tuple[Array, Array]:
    """All states y (2ᴺ, N) and their probabilities, straight from the definition: Σ_k P(k) Π P(y | parent)."""
    y = np.array(list(itertools.product((0, 1), repeat=tree.size)))
    inner = np.flatnonzero(tree.parent != CLASS)
    copy = y[:, inner] == y[:, tree.parent[inner]]
    p = np.where(copy, (1 + tree.rho[inner]) / 2, (1 - tree.rho[inner]) / 2).prod(axis=1)
    top = y[:, tree.parent == CLASS, None]  # (2ᴺ, n₁, 1)
    return y, p * (np.where(top == 0, tree.q.T, 1 - tree.q.T).prod(axis=1) @ tree.prior)


class Enumerated(NamedTuple):
    """A tree with one ρ, P[y_l = 1 | y_m = 1] (M, M) by enumeration, the heights H (M, M), each token's top latent (M,)."""

    tree: HBLT
    rho: float
    truth: Array
    H: Index
    top: Index


@functools.cache
def _trees() -> tuple[Enumerated, ...]:
    """Trees of up to 15 variables with unequal classes: ρ of both signs, depths 2, 3, 4, two and three children."""
    two = np.array([[0.9, 0.2], [0.35, 0.6], [0.75, 0.95]])
    one = np.array([[0.9], [0.3]])
    out = []
    for depth, children, rho, q, prior in (
        (3, 2, 0.8, two, [0.2, 0.3, 0.5]),
        (3, 2, -0.6, two, [0.5, 0.1, 0.4]),
        (2, 3, 0.5, two, [0.3, 0.3, 0.4]),
        (4, 2, 0.9, one, [0.7, 0.3]),
    ):
        tree = HBLT(depth=depth, children=children, rho=rho, class_to_latent=q, class_prior=prior)
        y, p = enumerate_states(tree)
        tokens = y[:, tree.tokens]
        joint = (tokens * p[:, None]).T @ tokens
        top = np.array(tree.tokens)
        while (tree.parent[top] != CLASS).any():
            top = np.where(tree.parent[top] == CLASS, top, tree.parent[top])
        out.append(Enumerated(tree, rho, joint / np.diag(joint), tree.heights(), top))
    return tuple(out)


def _theorem5(
    variant: Variant, case: Enumerated, rho0: Array, power: float = 2.0
) -> Iterator[float]:
    """Errors of Theorem 5 with this ρ₀ of each top latent, over all pairs below a common latent."""
    one, two, three = (variant.factor(term) if term in variant.terms else 1.0 for term in THEOREM5)
    L = case.tree.L
    for l, m in zip(*np.nonzero((case.H > 0) & (case.H < L)), strict=True):
        top = case.rho ** (L - 1) * rho0[case.top[m]]
        H = case.H[l, m] + (1 if variant.has("H + 1") else 0)
        value = 0.5 * (1 + one * case.rho ** (power * H) - 2 * two * top) / (1 - three * top)
        yield abs(float(value) - float(case.truth[l, m]))


THEOREM5 = ("ρ^{2H}", "2ρ^{L−1}ρ₀", "ρ^{L−1}ρ₀ below")


def _M(rho: float) -> Array:  # noqa: N802
    return np.array([[1 + rho, 1 - rho], [1 - rho, 1 + rho]]) / 2


def _p(rho: float) -> Array:
    return np.array([1 + rho, 1 - rho]) / 2


@claim(
    "L9",
    root="chain",
    kind=Kind.WRONG,
    source="Lemma 9, Eqn. 91",
    statement=(
        "P_{γ|α} = P_{γ|β₁} P_{β₁|β₂} … P_{β_k|α} = M(ρ_{γ|β₁} … ρ_{β_k|α}) along the chain α ≻ β₁ "
        "≻ … ≻ β_k ≻ γ."
    ),
    tolerance=1e-12,
    measures=(
        "largest error of the product of conditional matrices, all by enumeration of a chain of "
        "five variables with unequal ρ and a biased top"
    ),
    correction=(
        "the chain reads α ≻ β_k ≻ … ≻ β₁ ≻ γ: the product starts at γ and its parent, not at γ "
        "and α's child"
    ),
    counterexample=(
        "three variables α → β₁ → β₂ → γ as printed: P_{γ|β₁}P_{β₁|β₂}P_{β₂|α} multiplies "
        "P[β₁|β₂], a child given as condition for its parent"
    ),
    control="the right chain with one factor left out",
    derivation=(
        "P[γ|α] sums over Π P[child|parent], so each factor conditions on a parent and the first "
        "one is γ's: β₁ is next to γ. With the printed order the inner factors P_{β₁|β₂} condition "
        "on a child."
    ),
    paper_formula=(
        r"$P_{\gamma|\beta_1}P_{\beta_1|\beta_2}\cdots P_{\beta_k|\alpha},\quad "
        r"\alpha\succ\beta_1\succ\cdots\succ\beta_k\succ\gamma$"
    ),
    corrected_formula=(
        r"$P_{\gamma|\beta_1}P_{\beta_1|\beta_2}\cdots P_{\beta_k|\alpha},\quad "
        r"\alpha\succ\beta_k\succ\cdots\succ\beta_1\succ\gamma$"
    ),
    terms=("one ρ", "one factor"),
)
def l9(variant: Variant) -> Iterator[float]:
    """The product of conditionals along a chain, in the printed and in the right order."""
    for rho in ([0.9, -0.7, 0.6, 0.8], [-0.5, -0.9, 0.4, 0.7], [0.3, 0.8, 0.9, -0.2]):
        tree = HBLT(depth=5, children=1, rho=rho, class_to_latent=[[0.85], [0.4]])
        y, p = enumerate_states(tree)

        def given(i: int, j: int, y: Array = y, p: Array = p) -> Array:
            joint = np.array(
                [[p[(y[:, i] == a) & (y[:, j] == b)].sum() for b in (0, 1)] for a in (0, 1)]
            )
            return joint / joint.sum(axis=0)

        inner = [1, 2, 3] if variant == "printed" else [3, 2, 1]  # β₁, β₂, β₃
        factors = [given(a, b) for a, b in itertools.pairwise([4, *inner, 0])]
        if variant == "control":
            del factors[1]
        product = variant.factor("one factor") * functools.reduce(np.matmul, factors)
        # both equalities: the product is P_{γ|α}, and it is M of the product of the ρ
        yield float(np.abs(product - given(4, 0)).max())
        yield float(np.abs(product - _M(variant.factor("one ρ") * float(np.prod(rho)))).max())


@claim(
    "E103",
    root="rho0",
    kind=Kind.WRONG,
    source="Theorem 5, Eqn. 103",
    statement="The distribution of the common ancestor is p_c = M(ρ_{c|1} ρ₀).",
    tolerance=1e-12,
    measures=(
        "largest difference from P[y_c] by enumeration, for a latent c two layers below the class"
    ),
    correction="p_c = p(ρ_{c|1} ρ₀), a vector; a 2 × 2 matrix cannot be one",
    counterexample="the left side has two entries that sum to 1, the right side is a 2 × 2 matrix",
    control="p(ρ_{c|1}² ρ₀)",
    derivation="M(ρ_{c|1}) p(ρ₀) = p(ρ_{c|1} ρ₀), the last line of Lemma 8.",
    paper_formula=r"$\boldsymbol p_c=M(\rho_{c|1}\,\boldsymbol p_{\cdot|0}^\top\boldsymbol p_0)$",
    corrected_formula=(
        r"$\boldsymbol p_c=\boldsymbol p(\rho_{c|1}\rho_0),\quad \rho_0=2\,\mathbb P[y_1=0]-1$"
    ),
    terms=("ρ_{c|1}", "ρ₀"),
)
def e103(variant: Variant) -> Iterator[float]:
    """P[y_c] beside the printed matrix and the vector."""
    for case in _trees():
        y, p = enumerate_states(case.tree)
        c = case.tree.q.shape[1]  # the first latent of the second layer
        truth = np.array([p[y[:, c] == value].sum() for value in (0, 1)])
        rho = variant.factor("ρ_{c|1}") * float(case.tree.rho[c])
        rho0 = variant.factor("ρ₀") * float(case.tree.rho0[0])
        if variant == "printed":
            yield float(np.abs(truth[:, None] - _M(rho * rho0)).max())
        else:
            yield float(np.abs(truth - _p((rho**2 if variant == "control" else rho) * rho0)).max())


@claim(
    "T5",
    source="Theorem 5",
    statement=(
        "If l and m have a common latent ancestor of depth H, P[y_l = 1 | y_m = 1] = ½(1 + ρ^{2H} "
        "− 2ρ^{L−1}ρ₀)/(1 − ρ^{L−1}ρ₀)."
    ),
    tolerance=1e-12,
    measures=(
        "largest error over all pairs of tokens below a common latent, against enumeration of all "
        "states of four trees (ρ = 0.8, −0.6, 0.5, 0.9; depths 2 to 4); ρ₀ = 2P[y = 0] − 1 of the "
        "latent below the class (T5.rho0), L the edges from class to token"
    ),
    control="ρ^H in the place of ρ^{2H}",
    terms=THEOREM5,
    mutants={"H + 1": "the depth counted from one level higher"},
)
def t5(variant: Variant) -> Iterator[float]:
    """Theorem 5 against enumeration."""
    for case in _trees():
        yield from _theorem5(variant, case, case.tree.rho0, 1.0 if variant == "control" else 2.0)


@claim(
    "T5.rho0",
    root="rho0",
    kind=Kind.WRONG,
    source="Theorem 5, ρ₀",
    statement="ρ₀ := p_{·|0}ᵀ p₀ with p_{·|0} = [P[y_l = 0 | y₀ = k]].",
    tolerance=1e-12,
    measures=(
        "largest error of Theorem 5 with this ρ₀ over all pairs below a common latent, against "
        "enumeration of all states of four trees"
    ),
    correction="ρ₀ = 2 Σ_k P[y_l = 0 | k] P[k] − 1, as the proof uses it (Eqn. 101)",
    counterexample=(
        "P[y₁ = 0] = ½, ρ = 0.8, L = 3, H = 1: the printed ρ₀ is ½, and Theorem 5 gives 0.74; "
        "enumeration gives 0.82, as ρ₀ = 0 does"
    ),
    control="ρ₀ = 1 − 2 Σ_k P[y_l = 0 | k] P[k], the opposite coding",
    derivation=(
        "Eqn. 101 writes P[y₁ = 0 | k] = ½(1 + p_{k|0}), so p_{k|0} = 2P[y₁ = 0 | k] − 1 and ρ₀ = "
        "Σ_k p_{k|0} P[k] = 2P[y₁ = 0] − 1."
    ),
    paper_formula=(
        r"$\rho_0=\boldsymbol p_{\cdot|0}^\top\boldsymbol p_0,\quad\boldsymbol "
        r"p_{\cdot|0}=[\mathbb P[y_l=0\mid y_0=k]]$"
    ),
    corrected_formula=r"$\rho_0=2\sum_k\mathbb P[y_1=0\mid k]\,\mathbb P[k]-1$",
    terms=("2P", "1"),
)
def t5_rho0(variant: Variant) -> Iterator[float]:
    """Which ρ₀ makes Theorem 5 true."""
    for case in _trees():
        P = case.tree.prior @ case.tree.q
        forms = {"printed": P, "control": 1 - 2 * P}
        rho0 = forms.get(str(variant), variant.factor("2P") * 2 * P - variant.factor("1"))
        yield from _theorem5(variant, case, rho0)


@claim(
    "T5.class",
    kind=Kind.EXTENSION,
    source="Theorem 5, for tokens that share only the class",
    statement=(
        "For tokens whose only common ancestor is the class, with κ = E_k[(2q_l − 1)(2q_m − 1)] of "
        "the two variables right below the class, P[y_l = 1 | y_m = 1] = ½(1 − ρ^{L−1}(ρ₀ˡ + ρ₀ᵐ) "
        "+ ρ^{2L−2} κ)/(1 − ρ^{L−1} ρ₀ᵐ). The paper's theorem is for a common *latent* ancestor."
    ),
    tolerance=1e-12,
    measures=(
        "largest error over all pairs with nothing but the class above both, against enumeration "
        "of all states of three trees"
    ),
    remark=(
        "The class is not binary and its branches have their own ρ₀, so Theorem 5 with H = L does "
        "not cover them"
    ),
    control="κ = ρ₀ˡ ρ₀ᵐ, as if the two branches were independent",
    derivation=(
        "Given the class the branches are independent: E[s_l s_m] = ρ^{2(L−1)} E_k[E[s_a|k] "
        "E[s_b|k]], and P[1, 1] = ¼(1 − E s_l − E s_m + E s_l s_m) with E s_l = ρ^{L−1} ρ₀ˡ."
    ),
    paper_formula=(
        r"common latent ancestor: $\tfrac12\,\frac{1+\rho^{2H}-2\rho^{L-1}\rho_0}{1-\rho^{L-1}"
        r"\rho_0}$"
    ),
    corrected_formula=(
        r"common class: $\tfrac12\,\frac{1-\rho^{L-1}(\rho_0^l+\rho_0^m)+\rho^{2L-2}\,\mathbb "
        r"E_k[(2q^l_k-1)(2q^m_k-1)]}{1-\rho^{L-1}\rho_0^m}$"
    ),
    terms=("κ", "ρ₀ˡ"),
    mutants={
        "Theorem 5, H = L": "the formula for a common latent",
        "l and m exchanged": "ρ₀ˡ below",
    },
)
def t5_class(variant: Variant) -> Iterator[float]:
    """Pairs whose common ancestor is the class."""
    for case in _trees():
        spin, rho0, L = 2 * case.tree.q - 1, case.tree.rho0, case.tree.L
        for l, m in zip(*np.nonzero(case.H == L), strict=True):
            first, second = case.top[l], case.top[m]
            kappa = float(case.tree.prior @ (spin[:, first] * spin[:, second]))
            kappa = (
                float(rho0[first] * rho0[second])
                if variant == "control"
                else variant.factor("κ") * kappa
            )
            a, b = variant.factor("ρ₀ˡ") * rho0[first], rho0[second]
            a, b = (b, a) if variant.has("l and m exchanged") else (a, b)
            if variant.has("Theorem 5, H = L"):
                value = theorem5(case.rho, b, L, L)
            else:
                value = through_class(case.rho, a, b, kappa, L)
            yield abs(float(value) - float(case.truth[l, m]))


@claim(
    "E8",
    root="remainder",
    kind=Kind.WRONG,
    source="Eqn. 8",
    statement="For ρ = ρ₀ = 1 − ε, P[y_l = 1 | y_m = 1] = 1 − H/L + O(ε²).",
    tolerance=0.005,
    measures=(
        "2 − the order in ε at which the remainder vanishes (between ε = 2⁻¹² and 2⁻¹³), the "
        "largest over L ≤ 6 and H < L, with P from exact pair moments of a tree whose classes give "
        "ρ₀ = 1 − ε"
    ),
    correction="1 − H/L + ε H(2H − L)/(2L) + O(ε²): the remainder is of first order unless 2H = L",
    counterexample=(
        "L = 3, H = 1, ε = 0.01: P = 0.66499, 1 − H/L = 0.66667: off by 0.0017 = ε/6, not by O(ε²) "
        "= 0.0001"
    ),
    control="the remainder with H(2H + L)",
    derivation=(
        "P = 1 − ½(1 − ρ^{2H})/(1 − ρ^L) and 1 − (1 − ε)ⁿ = nε(1 − (n − 1)ε/2 + …), so P = 1 − "
        "(H/L)(1 − (2H − L)ε/2 + …)."
    ),
    paper_formula=r"$1-\frac HL+O(\epsilon^2)$",
    corrected_formula=r"$1-\frac HL+\epsilon\,\frac{H(2H-L)}{2L}+O(\epsilon^2)$",
    terms=("first order", "H/L"),
)
def e8(variant: Variant) -> Iterator[float]:
    """How fast the remainder of Eqn. 8 vanishes."""
    for L in range(2, 7):
        remainders = []
        for epsilon in (2.0**-12, 2.0**-13):
            tree = HBLT(
                L, 2, 1 - epsilon, class_to_latent=[[1.0], [1 - epsilon]]
            )  # ρ₀ = 2(1 − ε/2) − 1
            H, P = tree.heights()[0], tree.cooccurrence()[0]
            first = epsilon * H * (2 * H + (L if variant == "control" else -L)) / (2 * L)
            first = 0 * first if variant == "printed" else variant.factor("first order") * first
            remainders.append(np.abs(P - (1 - variant.factor("H/L") * H / L + first))[H > 0])
        large = remainders[1] > 1e-12  # where 2H = L it is zero
        order = np.log2(remainders[0][large] / remainders[1][large])
        yield float((2 - order).max(initial=0.0))


@claim(
    "S5.root_labels",
    kind=Kind.EXTENSION,
    source="Section 5",
    statement=(
        "For the label Y = 1[class = k], E[Y s_l] = ρ^{L−1} E[Y s_top] for every token l below one "
        "latent of the class: a class label does not tell siblings from cousins at first order."
    ),
    tolerance=1e-12,
    measures=(
        "largest error of E[Y s_l] over classes, tokens and trees, with E[Y s_l] by enumeration "
        "of all states"
    ),
    control="ρ^L in the place of ρ^{L−1}",
    derivation=(
        "Given the class, s_l is s_top times the spins of L − 1 edges, which are independent with "
        "mean ρ. So E[s_l | k] = ρ^{L−1} E[s_top | k], whichever path leads from the latent to l."
    ),
    paper_formula=r"m and l co-occur ($\mathbb P[y_l=1\mid y_m=1]$ is large): associated first",
    corrected_formula=r"$\mathbb E[Y s_l]=\rho^{L-1}\,\mathbb E[Y s_{\text{top}}]$",
    terms=("E[Y s_top]",),
    mutants={"E[s_top]": "the mean over all classes"},
)
def root_labels(variant: Variant) -> Iterator[float]:
    """Compare the covariance of a class label with each token with the closed form."""
    for case in _trees():
        tree = case.tree
        power = tree.L if variant == "control" else tree.L - 1
        y, _ = enumerate_states(tree)
        tokens = 1 - 2 * y[:, tree.tokens]  # spins (2ᴺ, M)
        for k in range(len(tree.prior)):
            of_class = HBLT(
                class_to_latent=tree.q[k : k + 1],
                depth=tree.L,
                children=_children(tree),
                rho=case.rho,
            )
            given_class = enumerate_states(of_class)[1]
            enumerated = tree.prior[k] * (given_class @ tokens)  # (M,)
            mean_top = 2 * tree.q[k] - 1  # E[s_top | class], (n₁,)
            if variant.has("E[s_top]"):
                mean_top = tree.rho0
            signal = variant.factor("E[Y s_top]") * tree.prior[k] * mean_top[case.top]
            yield float(np.abs(case.rho**power * signal - enumerated).max())


def _children(tree: HBLT) -> int:
    """Return the number of children of a latent; the trees of these claims have one number."""
    return int(np.count_nonzero(tree.parent == 0))


@claim(
    "S5.leaf_labels",
    kind=Kind.EXTENSION,
    source="Section 5",
    statement=(
        "For the spin s_m of a token as the label, E[s_m s_l] = ρ^{2H} with H the height of the "
        "lowest common latent: a token as the label shows siblings first."
    ),
    tolerance=1e-12,
    measures=(
        "largest error of E[s_m s_l] over pairs of tokens below one latent of the class, by "
        "enumeration of all states"
    ),
    control="ρ^H in the place of ρ^{2H}",
    derivation=(
        "Given their common ancestor c, s_m and s_l are s_c times H independent edge spins each. "
        "Since s_c² = 1, E[s_m s_l] = ρ^H ρ^H, whatever the class does."
    ),
    paper_formula=r"$\mathbb P[y_l=1\mid y_m=1]$ of Theorem 5, for a token $m$ as the query",
    corrected_formula=r"$\mathbb E[s_m s_l]=\rho^{2H}$",
    terms=("ρ^{2H}",),
    mutants={"H + 1": "the ancestor one edge higher"},
)
def leaf_labels(variant: Variant) -> Iterator[float]:
    """Compare the covariance of two tokens with the closed form."""
    for case in _trees():
        tree = case.tree
        y, probability = enumerate_states(tree)
        tokens = 1 - 2 * y[:, tree.tokens]  # spins (2ᴺ, M)
        enumerated = (tokens * probability[:, None]).T @ tokens  # (M, M)
        height = case.H + 1 if variant.has("H + 1") else case.H
        power = height if variant == "control" else 2 * height
        predicted = variant.factor("ρ^{2H}") * case.rho**power
        has_common_latent = (case.H > 0) & (tree.L > case.H)
        yield float(np.abs(predicted - enumerated)[has_common_latent].max())
