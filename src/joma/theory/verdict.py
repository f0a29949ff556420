"""The words for how a statement fared; the same for claims and exhibits, on the command line and in the report."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """How a statement fared under its rule."""

    HOLDS = "holds"
    CORRECTED = "holds as corrected"
    UNDER = "holds under"  # a condition that the statement does not name
    INDISTINCT = "reproduces; does not discriminate"  # the numbers come out, and so they do without the cause
    FAILS = "fails"
    UNDECIDED = "not decided here"  # the settings of this preset cannot test the statement
    ERROR = "error"  # the check itself did not work
