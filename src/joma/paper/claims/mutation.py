"""Mutants of claims: each is wrong in one place, and the claim's check must reject it.

``python -m joma.paper.claims.mutation`` checks the mutants of all claims, ``mutate`` those of one.
Mutants that say the same as the statement (an overall factor of a homogeneous one, the sign of an
odd function) are declared as such, with the reason. They must be accepted: a check that rejected
them would test something else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from joma.paper.claims._registry import Claim, check, claims, get, largest_error
from joma.paper.verdict import Verdict

_FORMS = {Verdict.HOLDS: "printed", Verdict.CORRECTED: "corrected", Verdict.UNDER: "condition"}


@dataclass(frozen=True)
class MutantResult:
    """The error of one mutant of a claim."""

    claim: Claim
    mutant: str
    value: float

    @property
    def rejected(self) -> bool:
        """True if the check rejects the mutant."""
        return self.value > self.claim.tolerance

    @property
    def equivalent(self) -> bool:
        """True if the mutant is declared to say the same as the statement."""
        return self.mutant in self.claim.equivalent

    @property
    def ok(self) -> bool:
        """True if the check rejects the mutant, or accepts one that says the same."""
        return self.rejected != self.equivalent

    def describe(self) -> str:
        """Return one line: claim, mutant, error, and the outcome."""
        if self.equivalent:
            outcome = f"equivalent: {self.claim.equivalent[self.mutant]}"
            if self.rejected:
                outcome += " BUT REJECTED"
        elif self.rejected:
            outcome = "rejected"
        else:
            outcome = "NOT REJECTED"
        name = self.mutant
        if name in self.claim.mutants:
            name += f" ({self.claim.mutants[name]})"
        return f"{self.claim.id}: {name}: {self.value:.2g}, {outcome}"


def accepted_form(claim: Claim) -> str:
    """Return the form of the statement that the check accepts; the mutants are mutants of it."""
    verdict = check(claim).verdict
    if verdict not in _FORMS:
        raise ValueError(
            f"claim {claim.id!r} has no accepted form to mutate: its verdict is {verdict.value!r}"
        )
    return _FORMS[verdict]


def mutate(claim: Claim, form: str | None = None) -> list[MutantResult]:
    """Measure all declared mutants of a claim's accepted form."""
    form = form or accepted_form(claim)
    results = []
    for mutant in claim.all_mutants():
        value, _ = largest_error(claim, form, mutant)
        results.append(MutantResult(claim, mutant, value))
    return results


def main(ids: Sequence[str]) -> int:
    """Print every mutant of these claims (by default of all) and its outcome.

    Returns 1 if a mutant is accepted, or if a claim has no mutants.
    """
    selected = claims()
    if ids:
        selected = get(ids)
    results: list[MutantResult] = []
    claims_without_mutants = 0
    for claim in selected:
        of_claim = mutate(claim)
        if not of_claim:
            print(f"{claim.id}: NO MUTANTS DECLARED")
            claims_without_mutants += 1
        for result in of_claim:
            print(result.describe(), flush=True)
        results += of_claim
    wrong = claims_without_mutants + sum(not result.ok for result in results)
    equivalent = sum(result.equivalent for result in results)
    print(f"{len(results)} mutants, {equivalent} of them equivalent; {wrong} not as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
