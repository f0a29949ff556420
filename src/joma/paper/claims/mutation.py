"""Mutants of claims: each puts the accepted form of a statement wrong in one place, and its check must reject it.

``python -m joma.paper.claims.mutation`` goes through all claims; ``mutate`` through one. Mutants that say the same as
the statement (an overall factor of a homogeneous one, the sign of an odd function) are declared as such, with the
reason, and must be accepted: a check that rejected them would test something else.
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
    """What a check made of one mutant."""

    claim: Claim
    mutant: str
    value: float

    @property
    def rejected(self) -> bool:
        """Whether the check noticed."""
        return self.value > self.claim.tolerance

    @property
    def equivalent(self) -> bool:
        """Whether the mutant is declared to say the same as the statement."""
        return self.mutant in self.claim.equivalent

    @property
    def ok(self) -> bool:
        """Whether it was rejected, or accepted where it says the same."""
        return self.rejected != self.equivalent


def accepted_form(claim: Claim) -> str:
    """The form of the statement that the check accepts, of which the mutants are mutants."""
    result = check(claim)
    if result.verdict not in _FORMS:
        raise ValueError(
            f"claim {claim.id!r} has no accepted form to mutate: its verdict is {result.verdict.value!r}"
        )
    return _FORMS[result.verdict]


def mutate(claim: Claim, form: str | None = None) -> list[MutantResult]:
    """All declared mutants of a claim's accepted form, measured."""
    form = form or accepted_form(claim)
    return [
        MutantResult(claim, name, largest_error(claim, form, name)[0])
        for name in claim.all_mutants()
    ]


def main(ids: Sequence[str]) -> int:
    """Print every mutant of the claims named (all by default) and what its check made of it; 1 if one got through."""
    wrong = count = same = 0
    for claim in get(ids) if ids else claims():
        results = mutate(claim)
        if not results:
            print(f"{claim.id}: NO MUTANTS DECLARED")
            wrong += 1
        for r in results:
            what = claim.mutants.get(r.mutant, "")
            state = (
                ("rejected" if r.rejected else "NOT REJECTED")
                if not r.equivalent
                else f"equivalent: {claim.equivalent[r.mutant]}"
            )
            if r.equivalent and r.rejected:
                state += " BUT REJECTED"
            print(
                f"{claim.id}: {r.mutant}{f' ({what})' if what else ''}: {r.value:.2g}, {state}",
                flush=True,
            )
            wrong, count, same = wrong + (not r.ok), count + 1, same + r.equivalent
    print(f"{count} mutants, {same} of them equivalent; {wrong} not as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
