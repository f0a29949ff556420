"""The words for how a statement fared; the same for claims and exhibits, on the command line and in the report."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """How a statement fared under its rule."""

    HOLDS = "holds"
    CORRECTED = "holds as corrected"
    UNDER = "holds under a condition"
    INDISTINCT = "reproduces; does not discriminate"
    FAILS = "fails"
    ERROR = "error"
    UNDECIDED = "not decided here"  # last: counted apart

    @property
    def meaning(self) -> str:
        """The word, explained in a line."""
        return _MEANINGS[self]

    @classmethod
    def _missing_(cls, value: object) -> Verdict | None:
        """Files from before the word was a whole one are still read."""
        return cls.UNDER if value == "holds under" else None


_MEANINGS = {
    Verdict.HOLDS: "as stated",
    Verdict.CORRECTED: "with another formula, which is given and derived",
    Verdict.UNDER: "only under a condition, which is given",
    Verdict.INDISTINCT: "the paper's numbers come out, but as well without what they are said to show",
    Verdict.FAILS: "not as printed, nor in a form close to it",
    Verdict.ERROR: "the check itself did not work: nothing is said about the statement",
    Verdict.UNDECIDED: "these settings cannot test the statement; it is said what would decide it",
}
