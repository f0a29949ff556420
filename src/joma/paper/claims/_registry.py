"""The registry of claims and the rule that turns measurements into verdicts.

A claim measures the error of *variants* of one statement with one function:

    printed     as the paper states it (an extension of ours: as we state it)
    corrected   as the derivation gives it (where the printed one is wrong)
    condition   as printed, under an extra condition (where it holds only then)
    control     deliberately wrong: the check must reject it
    reference   a true statement that the check must accept (shows that a claim that fails can hold)

An error ≤ tolerance is accepted. The first accepted one of printed, corrected, condition decides
the verdict. A check gives one error per case, and the largest counts. A check without a single
case has checked nothing, which is an error.

A claim also declares *mutants* of the accepted variant. Each is wrong in one place by little: a
term × 1.01, × 0.99 or × −1, an index, a condition dropped. ``joma.paper.claims.mutation`` shows
that the check rejects every one of them.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Any, TypeVar

import numpy as np

from joma._suggest import unknown_name
from joma.paper.verdict import Verdict
from joma.theory.setting import Array

T = TypeVar("T")

# Each declared term gives these mutants: name and factor.
FACTORS = {"{} × 1.01": 1.01, "{} × 0.99": 0.99, "−{}": -1.0}


class Kind(StrEnum):
    """What a claim says about the paper."""

    # The paper's statement, which holds as it stands.
    PRINTED = "as printed"
    # A formula of the paper that is refuted; the claim has the corrected one.
    WRONG = "wrong as printed"
    # The paper's statement, which holds under a condition that the paper does not name.
    UNSAID = "condition left unsaid"
    # A statement beyond the paper, which says nothing to the contrary.
    EXTENSION = "extension of ours"
    # A statement of the multi-layer appendix, which its author marks as a draft.
    DRAFT = "author's draft"
    # A statement of another paper that builds on this one.
    OTHER = "another paper's"

    @property
    def is_papers(self) -> bool:
        """True for the kinds that are counted as the paper's statements."""
        return self in (Kind.PRINTED, Kind.WRONG, Kind.UNSAID)


class Variant(str):
    """One form of a statement ("printed", "control", …), with at most one mutant of it.

    A variant is the string of its form, so that a check can write ``variant == "control"``.
    """

    mutant: str
    terms: tuple[str, ...]
    _factors: Mapping[str, Mapping[str, float]]

    def __new__(cls, form: str, claim: Claim | None = None, mutant: str = "") -> Variant:
        self = super().__new__(cls, form)
        self.mutant = mutant
        self.terms = ()
        if claim is not None:
            self.terms = claim.terms
        self._factors = {term: _factors_by_mutant(term) for term in self.terms}
        return self

    def factor(self, term: str) -> float:
        """Return the factor of a declared term: 1, unless the mutant changes this term."""
        return self._factors[term].get(self.mutant, 1.0)

    def has(self, mutant: str) -> bool:
        """Return True if this is the mutant of that name."""
        return self.mutant == mutant

    def choose(self, usual: T, cases: Mapping[str, T]) -> T:
        """Return the case of this mutant, else the case of this form, else the usual value."""
        if self.mutant in cases:
            return cases[self.mutant]
        return cases.get(str(self), usual)

    def shift(self, mutant: str, values: Array, axis: int = 0) -> Array:
        """Return the values; for that mutant, each in the place of the next one along the axis."""
        if self.mutant == mutant:
            return np.roll(values, 1, axis=axis)
        return values


def _factors_by_mutant(term: str) -> dict[str, float]:
    return {name.format(term): factor for name, factor in FACTORS.items()}


Check = Callable[[Variant], float | Iterable[float]]


@dataclass(frozen=True)
class Claim:
    """One statement and how it is checked."""

    id: str
    # Where the statement stands in the paper.
    source: str
    # As printed; for an extension, as joma states it.
    statement: str
    tolerance: float
    # The definition of the error.
    measures: str
    # The definition of the wrong variant.
    control: str
    check: Check = field(repr=False, compare=False)
    correction: str | None = None
    condition: str | None = None
    reference: str | None = None
    _: KW_ONLY
    kind: Kind = Kind.PRINTED
    # For a statement that is wrong as printed: the id of its root cause (`roots.ROOTS`).
    root: str = ""
    # What a reader should know although the statement holds.
    remark: str = ""
    # These four may hold LaTeX in $...$.
    paper_formula: str = ""
    corrected_formula: str = ""
    # The smallest case that refutes what is printed.
    counterexample: str = ""
    # Two lines.
    derivation: str = ""
    # Each term gives three mutants: × 1.01, × 0.99 and × −1.
    terms: tuple[str, ...] = field(default=(), compare=False)
    # Other mutants: name -> what is changed.
    mutants: Mapping[str, str] = field(default_factory=dict, compare=False)
    # Mutants without effect: name -> why.
    equivalent: Mapping[str, str] = field(default_factory=dict, compare=False)

    def all_mutants(self) -> tuple[str, ...]:
        """Return the names of all declared mutants."""
        of_terms = [name for term in self.terms for name in _factors_by_mutant(term)]
        return (*of_terms, *self.mutants)


_UNSTORED = ("check", "_", "terms", "mutants", "equivalent")
# The fields of a claim that a stored result keeps.
_TEXTS = tuple(f.name for f in fields(Claim) if f.name not in _UNSTORED)


@dataclass(frozen=True)
class Result:
    """The verdict on a claim. ``value`` is the error that decided it."""

    claim: Claim
    verdict: Verdict
    value: float | None
    printed_value: float | None
    control_value: float | None
    # The number of cases that the deciding variant was measured on.
    cases: int
    seconds: float
    error: str | None = None

    @property
    def id(self) -> str:
        """The claim's id."""
        return self.claim.id

    @property
    def control_rejected(self) -> bool:
        """True if the check rejected its control."""
        return self.control_value is not None and bool(self.control_value > self.claim.tolerance)

    @property
    def ok(self) -> bool:
        """True if the check ran and rejected its control."""
        return self.error is None and self.control_rejected

    @property
    def note(self) -> str | None:
        """The sentence next to the verdict: correction, condition, remark, or what went wrong."""
        if self.error:
            return self.error
        notes = {
            Verdict.HOLDS: self.claim.remark,
            Verdict.CORRECTED: self.claim.correction,
            Verdict.FAILS: self.claim.correction,
            Verdict.UNDER: self.claim.condition,
        }
        return notes.get(self.verdict) or None

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary: the claim's texts and the measured numbers."""
        row: dict[str, Any] = {name: getattr(self.claim, name) for name in _TEXTS}
        row["tolerance"] = float(self.claim.tolerance)
        row.update((name, getattr(self, name)) for name in _numbers())
        row["control_rejected"] = self.control_rejected
        return row

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Result:
        """Return the result that ``as_dict`` stored, with the claim as it read then."""
        texts = {name: row[name] for name in _TEXTS}
        texts["kind"] = Kind(row["kind"])
        numbers = {name: row[name] for name in _numbers()}
        numbers["verdict"] = Verdict(row["verdict"])
        return cls(Claim(check=_stored, **texts), **numbers)


def _numbers() -> list[str]:
    return [f.name for f in fields(Result) if f.name != "claim"]


def _stored(variant: Variant) -> float:
    raise ArithmeticError(
        "this claim was read from a file, which holds its result and not its check"
    )


_CLAIMS: dict[str, Claim] = {}
# In the order of the paper.
_MODULES = (
    "theorem1",
    "values",
    "softmax",
    "queries",
    "theorem2",
    "isotropic",
    "critical_points",
    "superposition",
    "theorem3",
    "section4",
    "contrast",
    "theorem4",
    "hierarchy",
    "cdag",
    "section7",
    "laws",
    "final",
    "optimisers",
    "folding",
)


def claim(
    id: str,
    *,
    source: str,
    statement: str,
    tolerance: float,
    measures: str,
    control: str,
    **more: Any,
) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a claim.

    Arguments:
        id: as "T4.ratio"; claims with the same first part form a group.
        source: where the statement stands.
        statement: as printed there.
        tolerance: the largest error that is accepted.
        measures: the definition of the error.
        control: the definition of the deliberately wrong variant.
        more: further fields of `Claim`: kind, correction, condition, reference, remark, the
            formulas, mutants.

    Returns:
        A decorator for a function from a `Variant` to an error, or to one error per case.

    >>> @claim(
    ...     "X.half",
    ...     source="here",
    ...     statement="½ + ½ = 1.",
    ...     tolerance=0.0,
    ...     measures="|½ + ½ − 1|",
    ...     control="⅓ + ½",
    ... )
    ... def half(variant):
    ...     return abs((1 / 3 if variant == "control" else 0.5) + 0.5 - 1)
    >>> check(get(["X.half"])[0]).verdict.value
    'holds'
    >>> remove("X.half")
    """

    def register(check: Check) -> Check:
        if id in _CLAIMS:
            raise ValueError(f"there is a claim {id!r} already; choose another id")
        _CLAIMS[id] = Claim(id, source, statement, tolerance, measures, control, check, **more)
        return check

    return register


def remove(id: str) -> None:
    """Remove a claim from the registry.

    Arguments:
        id: the claim's; an unknown one is no error.

    Returns:
        Nothing.
    """
    _CLAIMS.pop(id, None)


def claims() -> tuple[Claim, ...]:
    """Return all claims: joma's, registered ones, and those of packages (group ``joma.claims``).

    Returns:
        The claims, joma's first and in the order of the paper.
    """
    names = [f"joma.paper.claims.{module}" for module in _MODULES]
    for name in names:
        importlib.import_module(name)
    for entry in entry_points(group="joma.claims"):
        entry.load()

    def position(claim: Claim) -> int:
        if claim.check.__module__ in names:
            return names.index(claim.check.__module__)
        return len(names)

    # A module may have been imported before the others: registration has another order.
    return tuple(sorted(_CLAIMS.values(), key=position))


def get(ids: Iterable[str]) -> tuple[Claim, ...]:
    """Return the claims with these ids.

    Arguments:
        ids: as "T4.ratio"; a prefix such as "T4" stands for all that begin with it.

    Returns:
        The claims, each once; an unknown id is a ValueError that names the nearest.
    """
    registered = claims()
    selected: list[Claim] = []
    for id in ids:
        matches = [claim for claim in registered if claim.id == id]
        if not matches:
            matches = [claim for claim in registered if claim.id.startswith(f"{id}.")]
        if not matches:
            raise ValueError(unknown_name(id, [claim.id for claim in registered], "claim"))
        selected += [claim for claim in matches if claim not in selected]
    return tuple(selected)


@dataclass
class _Measurement:
    """The errors of the variants of one claim, and the verdict that follows from them."""

    verdict: Verdict = Verdict.FAILS
    deciding_form: str = "printed"
    cases: int = 0
    error: str | None = None
    values: dict[str, float] = field(default_factory=dict)

    def decide(self, claim: Claim) -> None:
        """Measure printed, corrected and condition in this order, until one is accepted."""
        forms = {"printed": Verdict.HOLDS}
        if claim.correction is not None and claim.reference is None:
            forms["corrected"] = Verdict.CORRECTED
        if claim.condition is not None:
            forms["condition"] = Verdict.UNDER
        for form, verdict in forms.items():
            self.values[form], cases = largest_error(claim, form)
            if form == "printed":
                self.cases = cases
            if self.values[form] <= claim.tolerance:
                self.verdict = verdict
                self.deciding_form = form
                self.cases = cases
                return

    def test(self, claim: Claim) -> None:
        """Measure the reference, which must be accepted, and the control."""
        if claim.reference is not None:
            value, _ = largest_error(claim, "reference")
            self.values["reference"] = value
            if value > claim.tolerance:
                raise ArithmeticError(
                    f"the check rejects what is true ({claim.reference}): {value:.3g}"
                )
        self.values["control"], _ = largest_error(claim, "control")


def check(claim: Claim) -> Result:
    """Measure all variants of a claim and decide.

    Arguments:
        claim: one of `claims` or `get`.

    Returns:
        The verdict and the numbers behind it; an exception becomes the verdict "error".
    """
    start = time.perf_counter()
    measurement = _Measurement()
    try:
        measurement.decide(claim)
        measurement.test(claim)
    except Exception as exception:  # one broken check must not hide the others
        measurement.verdict = Verdict.ERROR
        measurement.error = f"{type(exception).__name__}: {exception}"
    values = measurement.values
    return Result(
        claim=claim,
        verdict=measurement.verdict,
        value=values.get(measurement.deciding_form),
        printed_value=values.get("printed"),
        control_value=values.get("control"),
        cases=measurement.cases,
        seconds=time.perf_counter() - start,
        error=measurement.error,
    )


def largest_error(claim: Claim, form: str, mutant: str = "") -> tuple[float, int]:
    """Return the largest error of a variant and the number of cases; no case is an error."""
    measured = claim.check(Variant(form, claim, mutant))
    if isinstance(measured, (int, float)):
        measured = [measured]
    errors = [float(error) for error in measured]
    if not errors:
        raise ArithmeticError(f"the {form} variant had nothing to check")
    if any(math.isnan(error) for error in errors):
        raise ArithmeticError(f"the {form} variant measured NaN")
    return max(errors), len(errors)


def largest(values: Array) -> float:
    """Return the largest absolute value."""
    return float(np.abs(values).max())


def drift(value: Array, z: Array) -> float:
    """Return how far a first integral (T, …) moves from its start, relative to max(1, max|z|)."""
    return largest(value - value[0]) / max(1.0, largest(z))


def share(failed: int, met: int) -> float:
    """Return the share of failed cases among those that met the premises.

    If no case met them, nothing was checked, which is an error.
    """
    if met == 0:
        raise ArithmeticError("no case met the premises: there was nothing to check")
    return failed / met
