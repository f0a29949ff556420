"""The words for how a statement fared; the same for claims and exhibits, on the command line and in the report."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of a statement under its rule."""

    HOLDS = "holds"
    CORRECTED = "wrong as printed, corrected"
    UNDER = "holds under a condition"
    INDISTINCT = "reproduces; does not discriminate"
    FAILS = "fails"
    ERROR = "error"
    INCONCLUSIVE = "inconclusive"  # last: counted apart

    @property
    def meaning(self) -> str:
        """The word, explained in a line."""
        return _MEANINGS[self]


_MEANINGS = {
    Verdict.HOLDS: "as stated",
    Verdict.CORRECTED: "with another formula, which is given and derived",
    Verdict.UNDER: "only under a condition, which is given",
    Verdict.INDISTINCT: "the paper's numbers come out, but as well without what they are said to show",
    Verdict.FAILS: "not as printed, nor in a form close to it",
    Verdict.ERROR: "the check itself did not work: nothing is said about the statement",
    Verdict.INCONCLUSIVE: "these settings cannot test the statement; it is said what would decide it",
}
