"""Root causes of what is wrong as printed: one slip can make several formulas wrong.

Counts of errata are counts of root causes. Each claim of the kind "wrong as printed" names one of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from joma.paper.claims._registry import Claim


class Weight(StrEnum):
    """How much of the paper hangs on a root cause, the heaviest first."""

    ARGUMENT = "the argument rests on it"
    FORMULA = "slip in a formula"
    TYPO = "typo or edge case"


@dataclass(frozen=True)
class RootCause:
    """One reason why formulas are wrong as printed.

    Attributes:
        id: the name that claims refer to.
        title: the slip, in a few words.
        weight: how much of the paper hangs on it.
        consequence: what remains of the statements that it affects, in one or two sentences.
    """

    id: str
    title: str
    weight: Weight
    consequence: str


_NUMBERS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
)
_ARGUMENT = Weight.ARGUMENT
_FORMULA = Weight.FORMULA
_TYPO = Weight.TYPO
ROOTS = (
    RootCause(
        "softmax",
        "The premise of Theorem 1 under softmax",
        _ARGUMENT,
        "A constant mean attention b̄ forces ż = 0, so the softmax case of Theorem 1 says nothing "
        "about attention that moves. The linear and the exp case hold as printed.",
    ),
    RootCause(
        "norm",
        "The norm of v in Lemma 1",
        _ARGUMENT,
        "Lemma 1 is right at ‖v‖ = 1 only. With distances r/‖v‖ in the place of r, Lemmas 2 and 4, "
        "Eqn. 56 and Theorem 3 hold.",
    ),
    RootCause(
        "separation",
        "Eqn. 56 is necessary, not sufficient",
        _ARGUMENT,
        "Critical points exist at one separation of the two centres only, and for no log-concave "
        "marginal. Theorem 3 assumes one.",
    ),
    RootCause(
        "attention",
        "Adding attention back moves the critical point",
        _ARGUMENT,
        "Eqn. 6 keeps μ as its critical point; the flow that it stands for does not. With the same "
        "critical point, the flow itself dips and rebounds at least as much.",
    ),
    RootCause(
        "layerwise",
        "E[g x] moves in layer-wise training, too",
        _ARGUMENT,
        "Fixing the other layers fixes g as a function of this layer's output, not its value. "
        "Assumption 1 holds exactly only for a loss that is linear in the output.",
    ),
    RootCause(
        "erf",
        "A factor √2 in Theorem 2",
        _FORMULA,
        "With erf(v/√2) in the place of erf(v/2), Theorem 2 holds.",
    ),
    RootCause(
        "threshold",
        "A sign in the threshold of Theorem 4",
        _FORMULA,
        "The bound and the order of convergence hold as printed; the threshold needs e^{+μ²/2}.",
    ),
    RootCause(
        "rho0",
        "The definition of ρ₀ in Theorem 5",
        _FORMULA,
        "The proof has 2P − 1, with which Theorem 5 holds.",
    ),
    RootCause(
        "remainder",
        "The order of the remainder in Eqn. 8",
        _FORMULA,
        "The leading term 1 − H/L is right; the remainder is of first order in ε.",
    ),
    RootCause(
        "step",
        "φ for φ′, and two signs, in Lemma 5",
        _TYPO,
        "The derivatives of θ₁ and θ₂ follow with the difference of the two slopes.",
    ),
    RootCause(
        "inverse",
        "An inverse too many after Eqn. 57",
        _TYPO,
        "y± is θ₁(r±); the lines that follow use it so.",
    ),
    RootCause(
        "sign",
        "The sign of ξ in pattern superposition",
        _TYPO,
        "With +ξu, as in Eqn. 60, one node matches both patterns.",
    ),
    RootCause("chain", "The order of a chain in Lemma 9", _TYPO, "The product itself is right."),
)


def root_of(claim: Claim) -> RootCause:
    """Return the root cause that a claim names; a KeyError for a name that is not in the table."""
    return {root.id: root for root in ROOTS}[claim.root]


def by_weight(claims: Iterable[Claim]) -> dict[Weight, list[RootCause]]:
    """Return the root causes that these claims name, by weight, the heaviest first."""
    named = {claim.root for claim in claims if claim.root}
    present = [root for root in ROOTS if root.id in named]
    return {weight: [root for root in present if root.weight is weight] for weight in Weight}


def counts_in_words(claims: Iterable[Claim]) -> str:
    """Return how many root causes of each weight these claims name, as a sentence without a full stop.

    >>> counts_in_words([])
    'no statements that the argument rests on do not hold as printed; no slips in formulas and no typos are corrected'
    """
    causes = by_weight(claims)
    argument, formulas, typos = (_NUMBERS[len(causes[weight])] for weight in Weight)
    return (
        f"{argument} statements that the argument rests on do not hold as printed; {formulas} slips in "
        f"formulas and {typos} typos are corrected"
    )
