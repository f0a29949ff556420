"""The one table behind docs/paper-index.md: everything in the paper that can be true or false, with code, claims, exhibit.

A row covers one numbered thing, a run of equations that are steps of one derivation, or a sentence of the text. Code is what
can be imported; a row without claim and exhibit says why it cannot be checked. The tests check that nothing numbered is
missing, that all names exist, and that no row is without a check and without a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Row(NamedTuple):
    """One line of the index."""

    item: str  # "Theorem 1", "Eqn. 12-14", with " (multi-layer)" for the appendix that counts anew
    says: str
    code: str = ""  # names that can be imported, separated by spaces
    claims: str = ""  # ids, separated by spaces
    exhibits: str = ""
    why: str = ""  # why there is neither claim nor exhibit


SECTIONS: dict[str, list[Row]] = {
    "Abstract and Section 1": [
        Row("attention is integrated out", "the joint dynamics is one of the MLP alone", "joma.theory.FoldedFlow joma.nn.JoMABlock", "T1.linear T1.exp T1.softmax", "folding block"),
        Row("sparse, then dense", "attention first becomes sparse, then dense, with nonlinear activations", "joma.theory.solve_bounce joma.watch", "F4.joint S4.nonlinear_bounce S4.finite_target S4.committee S4.convex", "fig4 fig6 contrast"),
        Row("which tokens enter when", "first those that often co-occur with the query, then gradually others", "joma.theory.Saliency", "", "entering"),
        Row("linear activations", "attention becomes sparse, consistent with existing works", "joma.theory.winner_take_all", "T2.winner S4.linear_sparse", "fig3 contrast"),
        Row("tokens are combined into hierarchies", "what co-occurs most is picked up first, then one level up", "joma.theory.HBLT", "T5", "fig5 table1"),
        Row("experiments verify the findings", "Wikitext2/103, OPT, Pythia", "joma.watch joma.scan", "", "fig6 fig7"),
        Row("related work", "what others have shown", why="statements about other papers; not checked here"),
    ],
    "Section 2: the setting": [
        Row("Linear, exp and softmax attention", "σ and A of the three", "joma.theory.Attention", "A1.per_hidden_loss"),
        Row("Orthonormal embeddings", "u_lᵀu_l′ = 1[l = l′] for d large", "joma.theory.JointFlow", "E60", "orthogonality"),
        Row("W_V, W_K, W_Q are not modelled", "W_V merges into the embeddings, z = uᵀW_QᵀW_K u", "joma.theory.EmbeddingFlow", "S2.values S2.trained_values", "parameterised"),
        Row("g ~ 1[y₀ = k]", "one layer with softmax loss on the hidden nodes", "joma.theory.Task", "A1.layerwise"),
        Row("Joint training", "the statistics of g may be stationary during most of training", "joma.watch", "", "assumptions"),
        Row("Figure 1", "the framework, and a block: no numbers to reproduce", "joma.theory.JointFlow joma.theory.FoldedFlow joma.nn.JoMABlock", "", "folding block"),
        Row("Eqn. 1", "the block: h = φ(wᵀf), f = U_C b + u_q, b = σ(z) ∘ x/A", "joma.theory.Attention joma.theory.JointFlow", "A1.per_hidden_loss"),
        Row("Assumption 1", "expectations with g are constant; true for layer-wise training", "joma.theory.Task joma.watch", "A1.per_hidden_loss A1.layerwise", "assumptions"),
        Row("Eqn. 2", "gradient flow of w and z", "joma.theory.JointFlow", "A1.per_hidden_loss"),
    ],
    "Section 3: attention integrated out": [
        Row("Theorem 1", "first integrals under linear, exp and softmax attention", "joma.theory.Invariant joma.theory.FoldedFlow joma.theory.BlockFlow",
            "T1.linear T1.exp T1.softmax T1.softmax_hypothesis T1.rates T1.zero_init T1.descent_law T1.queries.exp T1.queries.linear T1.heads", "folding fig2 realtext"),
        Row("Beyond Theorem 1: real training", "all laws, softmax's exact ones, where attention ends, optimisers: left open by the paper",
            "joma.theory.laws joma.theory.final_attention joma.theory.SGD joma.theory.Adam joma.charges",
            "LAWS.count LAWS.softmax LAWS.no_go LAWS.velocity END.identity END.unique END.mirror OPT.sgd OPT.rest OPT.sign OPT.adam OPT.theorem2", "softmax optimisers foretold"),
        Row("GaLore, Lemma B.6", "Eqns. 43 and 44 of arXiv 2403.03507, which build on Theorem 2: v̇_j = Δ_j Σ_k e^{v_k²/2} and Δ_j e^{v_j²/2}; the gradient becomes low-rank before the weight", "joma.theory.winner_take_all joma.watch", "GaLore.B6", "lowrank"),
        Row("Figure 2", "ẑ of the first integral against the true logits, softmax", "joma.theory.Invariant", "T1.softmax", "fig2"),
        Row("Figure 3", "which components of v₀ grow", "joma.theory.JointFlow", "", "fig3"),
        Row("No need to update attention", "it is implicit in the MLP weights", "joma.theory.FoldedFlow joma.nn.JoMABlock", "T1.exp T1.linear FOLD.exp FOLD.linear FOLD.momentum FOLD.queries", "folding block"),
        Row("Softmax: predicts z fairly well", "even with the assumption", "joma.theory.Invariant", "T1.softmax", "fig2"),
        Row("Eqn. 3", "v̇ = Δ ∘ exp(v²/2 + c): Theorem 1 put into Eqn. 2 (1/A is left out)", "joma.theory.FoldedFlow", "T1.exp"),
        Row("Theorem 2", "linear activation: the winner takes all", "joma.theory.winner_take_all", "T2.invariant T2.winner T2.softmax_remark", "fig3"),
        Row("Beyond distinct and common tokens (footnote 1)", "Δ = discriminancy × frequency", "joma.theory.saliency joma.theory.Saliency", "T2.saliency", "saliency"),
        Row("E_{l,q=m}[g] > 0", "token l is positively correlated to the gradient", "joma.theory.Saliency", "T2.correlation"),
        Row("Eqn. 4", "erf(v_l/2)/Δ_l is common to all tokens", "joma.theory.winner_take_all", "T2.invariant"),
    ],
    "Section 4: nonlinear activations": [
        Row("Theorem 3", "the flow near a critical point, uniform attention", "joma.theory.isotropic.linearise", "T3.form T3.stability"),
        Row("Eqn. 5", "v̇ = C(μ)(1 + λ)(μ − v)", "joma.theory.isotropic.Linearisation", "T3.form T3.stability"),
        Row("Figure 4", "salient components first; entropy dips and bounces", "joma.theory.solve_bounce joma.theory.solve_softmax_bounce", "F4.joint", "fig4"),
        Row("The μμᵀ term is omitted", "it mainly adds a constant shift", "joma.theory.isotropic.linearise", "S4.shift"),
        Row("The critical point does not change", "v* = μ with exp(v²/2) as without", "joma.theory.JointFlow", "E6"),
        Row("Linear attention: simpler", "the ratio is different", "joma.theory.solve_linear_bounce", why="a remark without a formula; the closed form, (√(μ_j² + c))/√(μ_k² + c) in the limit, is tested against an integration"),
        Row("Co-occurrence and μ", "a token that co-occurs a lot has a larger μ", "joma.theory.isotropic.Mixture", "S4.cooccurrence"),
        Row("Rank of the lower layer", "drops first, bounces back later", "joma.stable_rank", "S4.rank S4.rank_nodes", "fig7 contrast"),
        Row("Eqn. 6", "v̇ = (μ − v) ∘ exp(v²/2)", "joma.theory.solve_bounce", "E6", "fig4"),
        Row("Theorem 4", "how fast salient and other components converge", "joma.theory.bounce.convergence_ratio joma.theory.solve_linear_bounce",
            "T4.ratio T4.order T4.gap T4.bound T4.threshold"),
        Row("Eqn. 7", "the ratio of ln 1/δ", "joma.theory.bounce.convergence_ratio", "T4.ratio"),
    ],
    "Section 5: hierarchical data": [
        Row("Theorem 5", "co-occurrence of two tokens of a tree", "joma.theory.HBLT joma.theory.hierarchy.theorem5", "T5 T5.rho0 T5.class", "fig5"),
        Row("Eqn. 8", "1 − H/L for ρ = ρ₀ = 1 − ε", "joma.theory.hierarchy.eqn8", "E8"),
        Row("Figure 5", "trees, and the order in which tokens associate", "joma.theory.HBLT joma.theory.solve_bounce", "", "fig5"),
        Row("Many classes, each with its latent", "ρ₀ is close to 1", "joma.theory.HBLT", "T5.rho0", "fig5"),
        Row("m associates with l first, then with l′", "unless another token has picked l′ up", "joma.theory.solve_bounce joma.paper.labs.tree", "T4.order S5.picked_up S5.root_labels S5.leaf_labels", "fig5 hierarchy"),
        Row("The latent hierarchy is implicitly learned", "level by level", "joma.theory.CDAG joma.paper.labs.tree", "", "table1 cdag hierarchy"),
        Row("Slower, with no clear benefit in one layer", "non-salient components still grow", why="a judgement of benefit; the growth itself is F4.joint and T4.order"),
    ],
    "Section 6: experiments": [
        Row("Figure 6", "attention entropy of language models in training", "joma.watch", "", "fig6"),
        Row("Figure 7", "attention and stable rank of OPT and Pythia over checkpoints", "joma.scan joma.attention_stats joma.stable_rank", "", "fig7 sinks"),
        Row("Figure 8", "learning rates", "joma.watch joma.forecast", "", "fig8 clock"),
        Row("Table 1", "hidden nodes and latents", "joma.paper.labs.ncorr joma.paper.labs.hierarchy", "", "table1"),
        Row("Correlation and complexity", "it goes down a bit as N_ch and N_l grow", "joma.paper.labs.ncorr", "", "table1"),
        Row("Large learning rates", "attention becomes extremely sparse", "joma.watch", "", "fig8"),
        Row("Best validation score", "where attention follows the theory", "joma.watch", "", "fig8"),
        Row("Bottom layers are suppressed", "by top-level learning", "joma.watch joma.scan", "", "fig6 fig7"),
        Row("Stable rank is more reliable", "it depends on the parameters only", "joma.stable_rank", why="true by its definition, a function of the weights alone; “more reliable” has no measure"),
    ],
    "Appendix A.1 and A.2: proofs of Theorems 1 and 2": [
        Row("Eqn. 9", "the loss for each hidden node", "joma.theory.Task", "A1.per_hidden_loss"),
        Row("Eqn. 10-11", "ż and v̇ in terms of v and b", "joma.theory.JointFlow", "A1.per_hidden_loss"),
        Row("Eqn. 12-14", "unnormalised attention: ż is a total derivative", "joma.theory.Invariant", "T1.linear T1.exp"),
        Row("Eqn. 15-17", "softmax attention: the two terms of ż", "joma.theory.Invariant", "T1.softmax_hypothesis"),
        Row("Eqn. 18", "z = ½ Σ (v² − ‖v‖² b̄) + c", "joma.theory.Invariant joma.theory.FoldedFlow", "T1.softmax", "fig2"),
        Row("Eqn. 19-22", "from Eqn. 3 to the erf invariant", "joma.theory.winner_take_all", "T2.invariant"),
    ],
    "Appendix A.3: nonlinear nodes without attention": [
        Row("Lemma 1", "expectations under an isotropic distribution; θ₁ increases, θ₂ > 0", "joma.theory.isotropic.expectation", "L1"),
        Row("Eqn. 23", "E[xψ] and E[ψ]", "joma.theory.isotropic.expectation", "L1"),
        Row("Eqn. 24-32", "its proof; Eqn. 31 loses a ‖v‖", "joma.theory.isotropic.expectation", "L1"),
        Row("Eqn. 33-36", "the marginal p_n of a radial density", "joma.theory.isotropic.Radial", "E33"),
        Row("Eqn. 37-41", "θ₁ and θ₂ (39 is empty)", "joma.theory.isotropic.Thetas", "L1"),
        Row("Lemma 2", "the flow of a mixture", "joma.theory.isotropic.Mixture", "L2"),
        Row("Eqn. 42-43", "v̇ and ξ̇", "joma.theory.isotropic.Mixture", "L2"),
        Row("Eqn. 44-47", "the proof of Lemma 2", "joma.theory.isotropic.Mixture", "L2"),
        Row("Lemma 3", "θ₂ = F − rθ₁", "joma.theory.isotropic.Thetas", "L3"),
        Row("Eqn. 48-49", "the same", "joma.theory.isotropic.Thetas", "L3"),
        Row("Lemma 4", "what a stationary point must fulfil", "joma.theory.isotropic.Mixture", "L4"),
        Row("Eqn. 50-54", "its proof: Σ a_j F(r_j) = 0", "joma.theory.isotropic.Mixture", "L4"),
        Row("Eqn. 55-56", "two components: the conditions for a critical point", "joma.theory.isotropic.critical_rays", "E56 E56.sufficiency"),
        Row("Eqn. 57", "G(y) = F(θ₁⁻¹(y)), y± := θ₁⁻¹(r±)", "joma.theory.isotropic.Thetas", "E57.inverse", "fig9"),
        Row("G′ = θ₁/p_n > 0 and the limits of G", "after Eqn. 57", "joma.theory.isotropic.Thetas", "L5 L3", "fig9"),
        Row("Figure 9", "the plot of G(y)", "joma.theory.isotropic.Thetas", "", "fig9"),
        Row("Eqn. 58", "a sufficient condition", "joma.theory.isotropic.critical_rays", "", "fig9"),
        Row("Eqn. 59", "the set S of ratios", "joma.theory.isotropic.critical_rays", "E59.exists", "fig9"),
        Row("Other homogeneous activations", "similar results also hold", "joma.theory.isotropic.Thetas", "E59.homogeneous"),
    ],
    "Appendix A.4: remarks, proofs of Theorems 3 and 4": [
        Row("y₋ < ½ < y₊", "often, so r₊* > 0 and ξ* < 0", "joma.theory.isotropic.critical_rays", "A4.sides"),
        Row("G(y) is convex for y > ½", "at most two intersections with a straight line", "joma.theory.isotropic.Thetas", "A4.convex", "fig9"),
        Row("Eqn. 60", "ξ, the bias hidden in w", "joma.theory.JointFlow", "E60 A4.two_queries", "twoqueries"),
        Row("Pattern superposition", "w = v₁ − ξ₁u₁ + v₂ − ξ₂u₂ matches both, if orthogonal", "joma.superpose", "A4.superposition A4.two_queries", "fig10 twoqueries"),
        Row("Figure 10", "pattern superposition in Pythia", "joma.superpose", "", "fig10"),
        Row("Lemma 5", "θ₁′ and θ₂′ of a homogeneous activation", "joma.theory.isotropic.Thetas", "L5"),
        Row("Eqn. 61", "the same", "joma.theory.isotropic.Thetas", "L5"),
        Row("Eqn. 62-65", "its proof (65 is empty)", "joma.theory.isotropic.Thetas", "L5"),
        Row("Eqn. 66-71", "the expansion about μ; Eqn. 69 has ‖v‖ for v", "joma.theory.isotropic.linearise", "T3.form"),
        Row("Eqn. 72-74", "C = β₁I + β₂μμᵀ", "joma.theory.isotropic.Linearisation", "T3.form"),
        Row("s_μ > 0", "necessary for C to be positive definite", "joma.theory.isotropic.linearise", "T3.necessary"),
        Row("Lemma 6", "(1 − e^{−y²})/y ≤ 1/√2", "", "L6"),
        Row("Eqn. 75-76", "its proof", "", "L6"),
        Row("Lemma 7", "a bound on a Gaussian integral", "", "L7"),
        Row("Eqn. 77-78", "Eqn. 6, separated", "joma.theory.solve_bounce", "T4.ratio"),
        Row("Eqn. 79-80", "F(r, μ), and that it is the time", "joma.theory.bounce.flight_time", "T4.ratio"),
        Row("Eqn. 81-87", "F = e^{−μ²/2} ln 1/(1 − r) + a remainder", "joma.theory.bounce.remainder", "T4.ratio"),
        Row("Eqn. 88", "the bound on the remainder", "joma.theory.bounce.remainder_supremum", "T4.bound"),
    ],
    "Appendix A.5: hierarchical data": [
        Row("Eqn. 89", "P[y_β | y_α] as a matrix", "joma.theory.HBLT", "L9"),
        Row("Definition 1", "M(ρ) and p(ρ)", "joma.theory.HBLT", "L9"),
        Row("Lemma 8", "M(ρ₁)M(ρ₂) = M(ρ₁ρ₂)", "joma.theory.HBLT", "L9"),
        Row("Eqn. 90", "its proof", "joma.theory.HBLT", "L9"),
        Row("Definition 2", "HBLT(ρ)", "joma.theory.HBLT", "L9"),
        Row("Lemma 9", "chains multiply", "joma.theory.HBLT", "L9"),
        Row("Eqn. 91-92", "the same, and its proof", "joma.theory.HBLT", "L9"),
        Row("Eqn. 93-98", "the joint distribution through the common ancestor", "joma.theory.HBLT", "T5"),
        Row("Eqn. 99-103", "the distribution of the ancestor", "joma.theory.HBLT", "E103 T5.rho0"),
        Row("Eqn. 104-105", "Theorem 5", "joma.theory.hierarchy.theorem5", "T5"),
    ],
    "The multi-layer appendix (counts anew)": [
        Row("Eqn. 1 (multi-layer)", "a node of a graph: f_j = σ_j(Σ w_jk f_k)", "joma.theory.CDAG", "CDAG.T1"),
        Row("Theorem 1 (multi-layer)", "what a node asks of the nodes below", "joma.theory.CDAG joma.theory.cdag.implied", "CDAG.T1 CDAG.recursion", "cdag"),
        Row("Figure 1 (multi-layer)", "angles between signals, the proof's drawing", "joma.theory.cdag.implied", "CDAG.T1"),
        Row("Eqn. 2 (multi-layer)", "ẇ_j when z_α decides the input", "joma.theory.CDAG", "CDAG.E3"),
        Row("Eqn. 3 (multi-layer)", "the same with E[g | z_α] = ±1", "joma.theory.CDAG", "CDAG.E3", "cdag"),
        Row("C₁ high near the loss, C₂ near the input", "residual connections help", "joma.theory.CDAG", "", "cdag"),
        Row("Why k learns z_β rather than z_α", "it can be easier", why="no measure of “easier” is given"),
        Row("Without nonlinearity", "f_j is linear and may not replicate z_α", "joma.theory.CDAG", "CDAG.E3"),
    ],
    "Section 7": [
        Row("almost orthogonal embeddings", "d ≤ 8 ε⁻² log M; ε-related terms", "joma.embedding_coherence joma.embedding_geometry joma.theory.EmbeddingFlow", "S7.dimension", "orthogonality embeddings"),
        Row("embeddings that train", "left open by the paper", "joma.theory.EmbeddingFlow", "S7.trained", "parameterised"),
        Row("similar semantics, similar embeddings", "where they train", "joma.theory.EmbeddingFlow", "S7.semantic"),
        Row("many embeddings are highly correlated", "4d hidden neurons are not 4d independent tokens", "joma.embedding_geometry joma.embedding_coherence joma.gauges", "", "embeddings"),
        Row("beyond the paper: fine-tuning", "what it changes, next to random changes of the same norm", "joma.scan joma.stable_rank", "", "finetuning"),
        Row("fewer tokens per layer, better generalisation", "thanks to trained embeddings", why="no experiment is described and no figure given"),
        Row("Z = U W_Q W_Kᵀ Uᵀ", "left open by the paper", "joma.theory.EmbeddingFlow", "", "parameterised"),
    ],
    "The slides, where they say more": [
        Row("any learning rates", "the joint dynamics works for any ratio of attention's and the MLP's", "joma.theory.JointFlow", "T1.rates", "frozen"),
        Row("no assumption on the data distribution", "for the joint dynamics", "joma.theory.JointFlow", "T1.linear T1.exp"),
        Row("there is a residual connection", "ξ, the part of the query itself", "joma.nn.JoMABlock", "A4.two_queries", "twoqueries width"),
        Row("a Transformer block becomes a modified MLP", "attention folded into it", "joma.nn.JoMABlock", "FOLD.exp FOLD.linear FOLD.queries", "block folding"),
        Row("cosine similarity at different layers", "embedding vectors are almost orthogonal", "joma.embedding_geometry", "", "embeddings"),
        Row("Δ ≈ 0: common tokens, |Δ| large: distinct ones", "discriminancy × co-occurrence", "joma.theory.Task", "", "saliency"),
        Row("consistent with Scan & Snap", "attention alone, with the MLP frozen, turns sparser", "joma.theory.JointFlow", "T2.winner", "frozen fig3"),
        Row("μ ~ x̄_c, one of the cluster centres", "a critical point due to nonlinearity", "joma.theory.isotropic.Mixture", "S4.critical S4.finite_target E59.exists", "fig9"),
        Row("linear: takes all; nonlinear: others catch up", "the two panels beside each other", "joma.paper.labs.regimes", "S4.linear_sparse S4.nonlinear_bounce S4.finite_target S4.committee", "contrast"),
        Row("the stable rank bounces as well", "of the lower layer of the MLP", "joma.stable_rank", "S4.rank_nodes", "fig7 contrast"),
        Row("bouncing back seems only to slow training down", "not useful in one layer, useful in several", why="“useful” is not said in terms of anything that could be measured; what bounces, and where, is in fig6 and hierarchy"),
        Row("hierarchy-agnostic learning", "deep and shallow trees, what is not directly correlated is slowed down", "joma.paper.labs.tree", "", "hierarchy"),
        Row("how are embeddings learned?", "future work", "joma.theory.EmbeddingFlow", "S7.trained", "parameterised"),
        Row("positional encoding", "future work", why="named as open, without a statement; gauges of logits refuse layers with rotary positions"),
        Row("the dynamics of multi-layer Transformers", "future work: how intermediate latents are learned", "joma.theory.CDAG", "", "cdag table1 hierarchy"),
        Row("why over-parameterisation?", "future work: a question", "joma.nn.JoMABlock", "", "width"),
    ],
}  # fmt: skip


def numbers(item: str) -> Iterator[str]:
    """The single things a row covers: "Eqn. 12-14" is "Eqn. 12", "Eqn. 13", "Eqn. 14"."""
    if found := re.fullmatch(r"(\D+ )(\d+)-(\d+)(.*)", item):
        kind, first, last, rest = found.groups()
        yield from (f"{kind}{n}{rest}" for n in range(int(first), int(last) + 1))
    else:
        yield item


_EXHIBIT = re.compile(r"`joma reproduce (\w+)`(?:: .+?)?(?=<br>| \|)")


def with_verdicts(text: str, exhibits: Mapping[str, str]) -> str:
    """Return the page with other verdicts of exhibits (id -> verdict)."""
    return _EXHIBIT.sub(lambda match: f"`joma reproduce {match[1]}`: {exhibits[match[1]]}", text)


def page(verdicts: Mapping[str, str], exhibits: Mapping[str, str]) -> str:
    """docs/paper-index.md, with the verdicts (claim id -> verdict, exhibit id -> verdict)."""
    lines = [
        "# From the paper to the code",
        "",
        "Every numbered equation, lemma, theorem, definition, figure and table of the paper, and every sentence of it or of the slides "
        "that can be true or false: where it is in joma and how it fared, or why it cannot be checked. Names without their `joma.` in front. Made by "
        "`make figures` from one table, `docs/_build/paper_index.py`. The paper has no numbered corollaries.",
    ]
    for title, rows in SECTIONS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| | what it says | code | claims and exhibits |",
            "|---|---|---|---|",
        ]
        for row in rows:
            item = (
                row.item.removesuffix(" (multi-layer)").replace("-", "–").replace("Eqn. ", "Eqn. ")
            )
            item = re.sub(r"^Eqn(.*–)", r"Eqns\1", item)
            code = (
                "<br>".join(f"`{name.removeprefix('joma.')}`" for name in row.code.split()) or "–"
            )
            found = [f"[`{id}`](claims.md#{id}): {verdicts[id]}" for id in row.claims.split()]
            for id in row.exhibits.split():
                found.append(f"`joma reproduce {id}`: {exhibits[id]}")
            lines.append(
                f"| {item} | {row.says.replace('|', chr(92) + '|')} | {code} | {'<br>'.join(found) or row.why} |"
            )
    return "\n".join(lines) + "\n"
