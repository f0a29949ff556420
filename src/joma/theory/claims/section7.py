"""Claims on Section 7: almost orthogonal embeddings, and embeddings that train."""

from __future__ import annotations

import functools
import math

import numpy as np

from joma.theory.claims._registry import Kind, claim
from joma.theory.embeddings import EmbeddingFlow, EmbeddingPath
from joma.theory.setting import Array
from joma.theory.tasks import random_gradients

CASES = ((400, 0.5), (1000, 0.5), (2000, 0.4))  # M, ε: with 8 ε⁻² ln M well below M


def coherence(U: Array) -> float:
    """The largest |cos| between different columns."""
    U = U / np.linalg.norm(U, axis=0)
    G = np.abs(U.T @ U)
    np.fill_diagonal(G, 0.0)
    return float(G.max())


def welch(d: int, M: int) -> float:
    """No M unit vectors in d < M dimensions have a smaller coherence: √((M − d)/(d (M − 1)))."""
    return math.sqrt(max(M - d, 0) / (d * (M - 1)))


@claim(
    "S7.dimension",
    kind=Kind.WRONG,
    source="Section 7",
    statement="For M embedding vectors to achieve |u_lᵀu_l′| ≤ ε, only d ≤ 8 ε⁻² log M is needed.",
    tolerance=1.0,
    measures="coherence/ε, worst of (M, ε) = (400, 0.5), (1000, 0.5), (2000, 0.4): of random unit vectors, three draws each; for "
    "the printed inequality the least that any M vectors can have (Welch's bound) at d = ⌊ε⁻²/2⌋, which fulfils it",
    correction="d ≥ 8 ε⁻² ln M suffices, and random unit vectors do it; they already do at d ≥ 4 ε⁻² ln M (1 + o(1)). Read as an "
    "upper limit the inequality allows d where no such vectors exist",
    control="d = ε⁻² ln M, random unit vectors",
    derivation="P(|uᵀu′| > ε) ≤ 2 e^{−dε²/2} for random unit vectors, so M²/2 pairs give M² e^{−dε²/2}: below 1 for "
    "d > 4 ε⁻² ln M, and at most M⁻² for d ≥ 8 ε⁻² ln M. Welch: ε² ≥ (M − d)/(d (M − 1)) ≈ 1/d",
    paper_formula=r"$d\le 8\epsilon^{-2}\log M$",
    corrected_formula=r"$d\ge 8\epsilon^{-2}\ln M\ \text{suffices}$",
)
def s7_dimension(variant: str) -> float:
    """Coherence over ε at the dimension that the statement gives."""
    rng = np.random.default_rng(0)
    factor = 1.0 if variant == "control" else 8.0
    ratios = []
    for M, epsilon in CASES:
        if variant == "printed":
            ratios.append(welch(math.floor(0.5 / epsilon**2), M) / epsilon)
        else:
            d = math.ceil(factor * math.log(M) / epsilon**2)
            ratios += [coherence(rng.standard_normal((d, M))) / epsilon for _ in range(3)]
    return min(ratios) if variant == "control" else max(ratios)


@functools.cache
def _trained(attention: str, temperature: float) -> tuple[EmbeddingPath, float, float]:
    rng = np.random.default_rng(11)
    task = random_gradients(rng, samples=20, tokens=8, nodes=4)
    flow = EmbeddingFlow(task, attention, "gelu", attention_lr=1.5, embedding_lr=0.6, temperature=temperature)
    z0 = 0.3 * rng.standard_normal(8) + (1.0 if attention == "linear" else -1.0)
    path = flow.integrate(3.0, 0.5 * rng.standard_normal((6, 4)), rng.standard_normal((6, 9)), z0, times=31)
    if not path.ending.done:
        raise ArithmeticError(path.status)
    return path, 1.5 / 0.6, temperature


@claim(
    "S7.trained",
    kind=Kind.EXTENSION,
    source="Section 7, training embedding vectors",
    statement="Theorem 1's invariants where the embedding vectors are also trained (left open by the paper).",
    tolerance=1e-8,
    measures="largest drift relative to max(1, max|z|), linear and exp attention, T = 0.8 and 1.5, GELU, 8 tokens in d = 6 < M "
    "dimensions",
    correction="z_l = (η_z/2T η_u) ‖u_l‖² + c (exp), z_l² = (η_z/η_u) ‖u_l‖² + c (linear), token by token, for any embeddings in "
    "any dimension: trained, a token's embedding keeps the account that v² kept for frozen ones",
    control="the query's share left in: ‖u_l‖² + ‖u_q‖²",
    derivation="u̇_l = η_u Σ_k B_lk w_k, so u_lᵀu̇_l = η_u Σ_k v_lk B_lk, v_lk = u_lᵀw_k; and ż_l = (η_z/T) Σ_k v_lk B_lk under exp "
    "attention, z_l ż_l = η_z Σ_k v_lk B_lk under linear. No inner product of two embeddings enters",
    paper_formula=r"$z_m=\tfrac12\sum_k v_k^2+c$",
    corrected_formula=r"$z_{ml}=\tfrac{\eta_z}{2T\eta_u}\|u_l\|^2+c_l$",
)
def s7_trained(variant: str) -> float:
    """Drift of the printed invariant and of the one with embedding norms."""
    worst = 0.0
    for attention in ("linear", "exp"):
        for temperature in (0.8, 1.5):
            path, ratio, T = _trained(attention, temperature)
            z, norm = (path.z**2 if attention == "linear" else path.z), (path.U**2).sum(axis=1)  # (T, M + 1)
            factor = ratio if attention == "linear" else ratio / (2 * T)
            if variant == "printed":  # with the rates put in, as T1.rates has them
                factor, square = factor * 0.6, (path.v**2).sum(axis=2)
            else:
                square = norm[:, :-1] + (norm[:, -1:] if variant == "control" else 0.0)
            value = z - factor * square
            worst = max(worst, float(np.abs(value - value[0]).max() / max(1.0, np.abs(path.z).max())))
    return worst
