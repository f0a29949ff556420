"""Claims on pattern superposition: one node trained on two queries (Appendix A.4, Eqn. 60)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from joma.paper.claims._registry import Kind, Variant, claim
from joma.paper.labs.superposition import ATTENTIONS, trained_node

SEEDS = 3


@claim(
    "A4.two_queries",
    source="Appendix A.4, Eqn. 60 and pattern superposition",
    statement=(
        "A node that is trained on two queries has w = w(0) + U_C(V₁ + V₂) + ξ₁u₁ + ξ₂u₂, in which "
        "U_Cᵀw and u_mᵀw are what the queries brought. It fires for the patterns of both and not "
        "for what lacks a token of them, with ξ₁, ξ₂ < 0 (linear, exp)."
    ),
    tolerance=1e-10,
    measures=(
        "largest |U_Cᵀ(w − w(0)) − V₁ − V₂| and |u_mᵀ(w − w(0)) − ξ_m|, relative to the way of w, "
        "after training the weights w of a ReLU node on squared loss, three attentions, three "
        "draws; 1 if, under linear or exp attention, an output is on the wrong side of ½ or a ξ_m "
        "is not negative"
    ),
    remark=(
        "With embeddings at an angle the sums still make up w, but no product with an embedding "
        "tells them apart. Without the residual connection the node separates the patterns as "
        "well: the tokens that both queries see take over the part of ξ. Under softmax attention ξ "
        "came out positive, and after 2,000 steps complete patterns have outputs of 0.43 to 0.54, "
        "others of at most 0.31"
    ),
    control="u₁ᵀu₂ = 0.3, and the same between two context tokens",
    derivation=(
        r"$\dot w=\sum_m\mathbb E[g h'(U_Cb+u_m)1(q=m)]$, multiplied by $U_C^\top$ and $u_m^\top$."
    ),
    kind=Kind.EXTENSION,
    paper_formula=r"one query: $w=w(0)+U_Cv+\xi u_m$ (Eqn. 60)",
    corrected_formula=r"two queries: $w=w(0)+U_C(V_1+V_2)+\xi_1u_1+\xi_2u_2$",
    terms=("V", "ξ"),
    mutants={
        "the other query's ξ": "ξ₁ and ξ₂ exchanged",
        "V₁ alone": "V₂ left out",
        "angle 0.01": "u₁ᵀu₂ = 0.01",
    },
)
def a4_two_queries(variant: Variant) -> Iterator[float]:
    """Compare the weights of one node with what its two queries brought."""
    angle = variant.choose(0.0, {"control": 0.3, "angle 0.01": 0.01})
    for attention in ATTENTIONS:
        for seed in range(SEEDS):
            node = trained_node(attention, seed, angle)
            v = node.v.sum(axis=0)
            if variant.has("V₁ alone"):
                v = node.v[0]
            xi = node.xi
            if variant.has("the other query's ξ"):
                xi = node.xi[::-1]
            parts = np.concatenate([variant.factor("V") * v, variant.factor("ξ") * xi])
            off = float(np.abs(node.E.T @ node.way - parts).max() / np.linalg.norm(node.way))
            is_right = node.separated == 1 and (node.xi < 0).all()
            if attention == "softmax" or is_right:
                yield off
            else:
                yield max(off, 1.0)
