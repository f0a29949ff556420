"""What each exhibit says, as a heading: one message per verdict, true whenever its rule gives that verdict.

What is not decided is a question. An exhibit without a message for its verdict is headed by its title and the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping

from joma.paper.exhibits.base import Exhibit
from joma.paper.verdict import Verdict

HOLDS, CORRECTED, UNDER, INDISTINCT = (
    Verdict.HOLDS,
    Verdict.CORRECTED,
    Verdict.UNDER,
    Verdict.INDISTINCT,
)
FAILS, UNDECIDED = Verdict.FAILS, Verdict.UNDECIDED
_REASONS = {UNDECIDED: "Not decided here", Verdict.ERROR: "Not made"}

MESSAGES: Mapping[str, Mapping[Verdict, str]] = {
    "folding": {
        UNDER: "Linear and exp attention can be integrated out exactly: free logits, frozen orthonormal embeddings, "
        "plain gradient flow",
        FAILS: "A block without attention parameters does not follow the block with them",
    },
    "fig2": {
        HOLDS: "The first integral follows softmax's logits, and neither of its parts alone does",
        UNDER: "The first integral follows softmax's logits; its first part alone does so only later",
        FAILS: "The first integral does not follow softmax's logits throughout",
    },
    "saliency": {
        HOLDS: "On real text there are distinct words, common words, and words in between",
        FAILS: "On real text, distinct, common and in-between words are not there beyond chance",
    },
    "fig3": {
        HOLDS: "A few components keep growing while most saturate",
        FAILS: "Components do not part into a few that grow and most that saturate",
    },
    "frozen": {
        HOLDS: "With the MLP frozen, attention turns sparser: the limit of the joint dynamics",
        UNDER: "A frozen MLP is the limit of the joint dynamics; softmax attention need not turn sparser in it",
        FAILS: "The joint dynamics does not go to that of a frozen MLP as expected",
    },
    "fig4": {
        HOLDS: "Attention turns sparse, then dense",
        UNDER: "Attention turns sparse, then dense; by Eqn. 6 only if C = I",
        FAILS: "Sparse, then dense: not in most draws",
    },
    "contrast": {
        HOLDS: "From a small start, attention comes back with nonlinear nodes, and less with linear ones",
        UNDER: "From a small start, attention comes back towards large finite targets",
        FAILS: "From a small start, nonlinear nodes do not bring attention back as stated",
        UNDECIDED: "from a small start, do nonlinear nodes bring attention back?",
    },
    "fig9": {
        HOLDS: "A line through the origin meets G twice, in every family that was tried",
        UNDER: "A line meets G twice only where G(y)/y does not increase",
        FAILS: "Lines through the origin do not meet G as stated",
    },
    "fig5": {
        HOLDS: "Near tokens associate first, then their latents, the far pair last",
        UNDER: "Near tokens first, then latents: over a part of the levels and scales",
        FAILS: "Tokens do not associate in the paper's order",
    },
    "hierarchy": {
        HOLDS: "The small Transformers trained here learn the hierarchy level by level",
        UNDER: "Level by level in attention or in latents, not in both",
        FAILS: "The small Transformers trained here do not learn the hierarchy level by level",
        UNDECIDED: "do trained Transformers learn a hierarchy level by level?",
    },
    "cdag": {
        HOLDS: "The hierarchy is learned bottom-up",
        UNDER: "The hierarchy is learned bottom-up, under conditions that are not named",
        FAILS: "The hierarchy is not learned bottom-up as stated",
        UNDECIDED: "is the hierarchy learned bottom-up?",
    },
    "fig6": {
        HOLDS: "In language models the top layer turns sparse, then dense; the bottom layer stays sparser",
        UNDER: "In some language models the top layer turns sparse, then dense",
        FAILS: "In no language model here does the top layer turn sparse, then dense",
        UNDECIDED: "does the attention of language models turn sparse, then dense?",
    },
    "fig7": {
        HOLDS: "The rank of top layers drops and bounces; that of bottom layers only drops",
        UNDER: "The rank of top layers drops and bounces in some pretrained models",
        FAILS: "In no pretrained model here does the rank of the top layers drop and bounce",
        UNDECIDED: "does the rank of pretrained models drop and bounce?",
    },
    "fig8": {
        HOLDS: "The best run is the one that dips and bounces",
        UNDER: "At some depth the best run dips and bounces, which alone is no evidence for the pattern",
        FAILS: "The best run is not one that dips and bounces",
        UNDECIDED: "is the best run the one that dips and bounces?",
    },
    "fig10": {
        HOLDS: "Single neurons are fired by unlike patterns, more often than chance explains",
        FAILS: "No neuron is fired by two unlike patterns",
        UNDECIDED: "are single neurons fired by unlike patterns?",
    },
    "twoqueries": {
        HOLDS: "One weight holds the patterns of two queries, under all three attentions",
        UNDER: "One weight holds the patterns of two queries, under some attentions",
        FAILS: "Under no attention does one weight hold the patterns of two queries as stated",
    },
    "embeddings": {
        HOLDS: "In the model that was read, embeddings are almost orthogonal at every layer",
        UNDER: "In the model that was read, embeddings are almost orthogonal at the first layer or without their mean",
        FAILS: "In the model that was read, embeddings are not almost orthogonal",
        UNDECIDED: "are embeddings almost orthogonal?",
    },
    "table1": {
        HOLDS: "Hidden nodes learn the latents of both layers",
        UNDER: "Hidden nodes learn the latents of one layer",
        INDISTINCT: "The values of Table 1 come out, and do not show that training made them",
        FAILS: "The values of Table 1 do not come out",
        UNDECIDED: "do hidden nodes learn the latents of their layer?",
    },
    "orthogonality": {
        CORRECTED: "Almost orthogonal is not enough: the extra terms add up over tokens",
        FAILS: "The extra terms do not follow the law that was derived for them",
    },
    "parameterised": {
        HOLDS: "Theorem 1 carries over to attention through embeddings",
        CORRECTED: "Theorem 1 does not carry over as it stands; what replaces it is exact",
        FAILS: "What should replace Theorem 1 is not conserved",
    },
    "realtext": {
        HOLDS: "On real text, the first integral summed over queries foretells attention",
        UNDER: "On real text, the first integral is exact for the sum of queries, not for each",
        FAILS: "On real text, the first integral drifts otherwise than its law says",
    },
    "block": {
        HOLDS: "Folded attention is exact where the theory says so, and good elsewhere",
        UNDER: "Folded attention is exact where the theory says so, and not everywhere",
        FAILS: "Folded attention is not exact where the theory says so",
    },
    "width": {UNDECIDED: "what does over-parameterisation bring?"},
    "softmax": {
        HOLDS: "Softmax conserves K + 1 sums exactly; a centred velocity beats Eqn. 18 early on",
        FAILS: "Softmax's sums drift, or the centred velocity is no better than Eqn. 18",
    },
    "assumptions": {
        HOLDS: "Back-propagated gradients are stationary in all three models",
        UNDER: "Back-propagated gradients are stationary in layer-wise training, and not in all models",
        FAILS: "Back-propagated gradients are not stationary, nor in layer-wise training",
        UNDECIDED: "are back-propagated gradients stationary?",
    },
    "optimisers": {
        UNDER: "SGD turns attention far sparser than Adam, which orders tokens otherwise",
        FAILS: "SGD and Adam do not part as expected",
    },
    "foretold": {
        HOLDS: "Final attention is known before training, in order also on real text",
        UNDER: "Final attention is known before training under exp attention; on real text that is not shown",
        FAILS: "Final attention is not foretold exactly, even under exp attention",
    },
    "clock": {
        HOLDS: "Runs at different learning rates are one curve over the sum of their rates",
        UNDER: "Over the sum of learning rates some curves of different rates agree, and some do not",
        FAILS: "Curves of different learning rates do not agree over the sum of their rates",
        UNDECIDED: "are runs at different learning rates one curve over the sum of their rates?",
    },
    "sinks": {
        HOLDS: "In the model that was read, most heads of low entropy are parked on the first token",
        FAILS: "In the model that was read, most heads of low entropy are not merely parked on the first token",
        UNDECIDED: "are heads of low entropy sparse, or parked on the first token?",
    },
    "lowrank": {
        HOLDS: "The gradient is of lower rank than the weight, and is so earlier",
        UNDER: "The gradient is of lower rank than the weight, or falls earlier; not both throughout",
        FAILS: "Not in every layer is the gradient of lower rank than the weight, nor does it fall earlier",
        UNDECIDED: "is the gradient of lower rank than the weight, and earlier?",
    },
}  # fmt: skip


def message(exhibit: Exhibit, verdict: Verdict) -> str:
    """The heading of an exhibit with this verdict.

    >>> from joma.paper.exhibits import get
    >>> message(get(["fig8"])[0], Verdict.UNDECIDED)
    'Not decided here: is the best run the one that dips and bounces?'
    """
    said = MESSAGES.get(exhibit.id, {}).get(verdict)
    if verdict in _REASONS:
        return f"{_REASONS[verdict]}: {said or exhibit.title}"
    return said or f"{exhibit.title}: {verdict}"
