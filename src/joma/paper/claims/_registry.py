"""The registry of claims and the rule that turns measurements into verdicts.

A claim measures the error of *variants* of one statement with one and the same function:

    printed     as the paper states it (an extension of ours: as we state it)
    corrected   as the derivation gives it (where the printed one is wrong)
    condition   as printed, under an extra condition (where it holds only then)
    control     deliberately wrong: the check must reject it
    reference   a true statement that the check must accept (for claims that fail, to show that it can)

An error ≤ tolerance is accepted. The first accepted one of printed, corrected, condition decides the verdict. A check
gives one error per case and the largest counts; one without a single case has checked nothing, which is an error.

A claim also declares *mutants* of the accepted variant, each wrong in one place by little: a term × 1.01, × 0.99 or
× −1, an index, a condition dropped. ``joma.paper.claims.mutation`` shows that the check rejects every one of them.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from joma._suggest import unknown_name
from joma.paper.verdict import Verdict
from joma.theory.setting import Array

FACTORS = {"{} × 1.01": 1.01, "{} × 0.99": 0.99, "−{}": -1.0}  # what is done to each declared term


class Kind(StrEnum):
    """What a claim says about the paper."""

    PRINTED = "as printed"  # the paper's statement, which holds as it stands
    WRONG = "wrong as printed"  # a formula of the paper that is refuted; the claim has the corrected one
    UNSAID = "condition left unsaid"  # the paper's statement holds under a condition that it does not name
    EXTENSION = "extension of ours"  # beyond the paper, which says nothing to the contrary
    DRAFT = "author's draft"  # the multi-layer appendix, which its author marks as a draft
    OTHER = "another paper's"  # a statement of another paper that builds on this one

    @property
    def is_papers(self) -> bool:
        """True for the kinds that are counted as the paper's statements."""
        return self in (Kind.PRINTED, Kind.WRONG, Kind.UNSAID)


class Variant(str):
    """The form of a statement that a check measures, as a string ("printed", …), and at most one mutant of it."""

    mutant: str
    terms: tuple[str, ...]
    _factors: Mapping[str, Mapping[str, float]]

    def __new__(cls, form: str, claim: Claim | None = None, mutant: str = "") -> Variant:
        self = super().__new__(cls, form)
        self.mutant = mutant
        self.terms = () if claim is None else claim.terms
        self._factors = {
            term: {name.format(term): f for name, f in FACTORS.items()} for term in self.terms
        }
        return self

    def factor(self, term: str) -> float:
        """What the declared ``term`` is multiplied by: 1, or what the mutant says."""
        return self._factors[term].get(self.mutant, 1.0)

    def has(self, mutant: str) -> bool:
        """Whether this is the mutant of that name."""
        return self.mutant == mutant


Check = Callable[[Variant], float | Iterable[float]]


@dataclass(frozen=True)
class Claim:
    """One statement and how it is checked. Texts may hold LaTeX in $...$ where it says so."""

    id: str
    source: str  # where it stands in the paper
    statement: str  # as printed; of an extension, as joma states it
    tolerance: float
    measures: str  # what the error is
    control: str  # what the wrong variant is
    check: Check = field(repr=False, compare=False)
    correction: str | None = None
    condition: str | None = None
    reference: str | None = None
    _: KW_ONLY
    kind: Kind = Kind.PRINTED
    root: str = ""  # of what is wrong as printed: the id of its root cause (`roots.ROOTS`)
    remark: str = ""  # what a reader should know although the statement holds
    paper_formula: str = ""  # with LaTeX, as are the next three
    corrected_formula: str = ""
    counterexample: str = ""  # the smallest case that refutes what is printed
    derivation: str = ""  # two lines
    terms: tuple[str, ...] = field(
        default=(), compare=False
    )  # each is put wrong by 1 % either way, and in sign
    mutants: Mapping[str, str] = field(
        default_factory=dict, compare=False
    )  # others: name -> what is changed
    equivalent: Mapping[str, str] = field(
        default_factory=dict, compare=False
    )  # of no effect: name -> why

    def all_mutants(self) -> tuple[str, ...]:
        """The names of all declared mutants."""
        return (*(name.format(term) for term in self.terms for name in FACTORS), *self.mutants)


# what a stored result keeps of its claim
_TEXTS = tuple(
    f.name for f in fields(Claim) if f.name not in ("check", "_", "terms", "mutants", "equivalent")
)


@dataclass(frozen=True)
class Result:
    """What checking a claim gave. ``value`` is the error that decided the verdict."""

    claim: Claim
    verdict: Verdict
    value: float | None
    printed_value: float | None
    control_value: float | None
    cases: int  # how many cases the deciding variant was measured on
    seconds: float
    error: str | None = None

    @property
    def id(self) -> str:
        """The claim's id."""
        return self.claim.id

    @property
    def control_rejected(self) -> bool:
        """Whether the check rejected its control."""
        return self.control_value is not None and bool(self.control_value > self.claim.tolerance)

    @property
    def ok(self) -> bool:
        """Whether the check ran and rejected its control."""
        return self.error is None and self.control_rejected

    @property
    def note(self) -> str | None:
        """What has to be said beside the verdict: correction, condition, remark, or what went wrong."""
        claim = self.claim
        notes = {
            Verdict.HOLDS: claim.remark,
            Verdict.CORRECTED: claim.correction,
            Verdict.FAILS: claim.correction,
            Verdict.UNDER: claim.condition,
        }
        return self.error or notes.get(self.verdict) or None

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: the claim's texts and what was measured."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "claim"}
        texts = {name: getattr(self.claim, name) for name in _TEXTS}
        return {
            **texts,
            "tolerance": float(self.claim.tolerance),
            **numbers,
            "control_rejected": self.control_rejected,
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Result:
        """The result that ``as_dict`` gave, with the claim as it read then."""
        texts = {**{name: row[name] for name in _TEXTS}, "kind": Kind(row["kind"])}
        numbers = {f.name: row[f.name] for f in fields(cls) if f.name != "claim"}
        return cls(Claim(check=_stored, **texts), **{**numbers, "verdict": Verdict(row["verdict"])})


def _stored(variant: Variant) -> float:
    raise ArithmeticError(
        "this claim was read from a file, which holds its result and not its check"
    )


_CLAIMS: dict[str, Claim] = {}
_MODULES = (
    "theorem1", (
        "values"
    ), (
        "softmax"
    ), (
        "queries"
    ), (
        "theorem2"
    ), (
        "isotropic"
    ), (
        "critical_points"
    ), (
        "superposition"
    ), (
        "theorem3"
    ), (
        "section4"
    ), (
        "contrast"
    ), (
        "theorem4"
    ), (
        "hierarchy"
    ), (
        "cdag"
    ), (
        "section7"
    ),
    "laws", "final", "optimisers", "folding",
)  # fmt: skip


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
        measures: what the error is.
        control: what the deliberately wrong variant is.
        more: further fields of `Claim`: kind, correction, condition, reference, remark, the formulas, mutants.

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
    """Forget a claim that was registered.

    Arguments:
        id: the claim's; an unknown one is no error.

    Returns:
        Nothing.
    """
    _CLAIMS.pop(id, None)


def claims() -> tuple[Claim, ...]:
    """All claims: joma's, those registered, and those that installed packages bring (group ``joma.claims``).

    Returns:
        The claims, joma's first and in the order of the paper.
    """
    for module in _MODULES:
        importlib.import_module(f"joma.paper.claims.{module}")
    for entry in entry_points(group="joma.claims"):
        entry.load()
    place = {f"joma.paper.claims.{module}": n for n, module in enumerate(_MODULES)}
    # a module may have been imported before the others, so the order of registration is not that of the paper
    return tuple(
        sorted(_CLAIMS.values(), key=lambda claim: place.get(claim.check.__module__, len(place)))
    )


def get(ids: Iterable[str]) -> tuple[Claim, ...]:
    """The claims with these ids.

    Arguments:
        ids: as "T4.ratio"; a prefix such as "T4" stands for all that begin with it.

    Returns:
        The claims, each once; an unknown id is a ValueError that names the nearest.
    """
    known = claims()
    chosen: list[Claim] = []
    for id in ids:
        named = [c for c in known if c.id == id] or [c for c in known if c.id.startswith(id + ".")]
        if not named:
            raise ValueError(unknown_name(id, [c.id for c in known], "claim"))
        chosen += [c for c in named if c not in chosen]
    return tuple(chosen)


def check(claim: Claim) -> Result:
    """Measure all variants of a claim and decide.

    Arguments:
        claim: one of `claims` or `get`.

    Returns:
        The verdict and the numbers behind it; an exception becomes the verdict "error".
    """
    start = time.perf_counter()
    values: dict[str, float] = {}
    verdict, deciding, cases, error = Verdict.FAILS, "printed", 0, None
    try:
        options = [("printed", Verdict.HOLDS)]
        if claim.correction is not None and claim.reference is None:
            options.append(("corrected", Verdict.CORRECTED))
        if claim.condition is not None:
            options.append(("condition", Verdict.UNDER))
        for form, name in options:
            values[form], count = largest_error(claim, form)
            cases = cases or count
            if values[form] <= claim.tolerance:
                verdict, deciding, cases = name, form, count
                break
        if claim.reference is not None:
            values["reference"], _ = largest_error(claim, "reference")
            if values["reference"] > claim.tolerance:
                raise ArithmeticError(
                    f"the check rejects what is true ({claim.reference}): {values['reference']:.3g}"
                )
        values["control"], _ = largest_error(claim, "control")
    except Exception as exception:  # one broken check must not hide the others
        verdict, error = Verdict.ERROR, f"{type(exception).__name__}: {exception}"
    return Result(
        claim=claim,
        verdict=verdict,
        value=values.get(deciding),
        printed_value=values.get("printed"),
        control_value=values.get("control"),
        cases=cases,
        seconds=time.perf_counter() - start,
        error=error,
    )


def largest_error(claim: Claim, form: str, mutant: str = "") -> tuple[float, int]:
    """The largest error of a variant, and the number of cases it was measured on; no case at all is an error."""
    measured = claim.check(Variant(form, claim, mutant))
    errors = (
        [float(measured)]
        if isinstance(measured, (int, float))
        else [float(error) for error in measured]
    )
    if not errors:
        raise ArithmeticError(f"the {form} variant had nothing to check")
    if any(math.isnan(error) for error in errors):
        raise ArithmeticError(f"the {form} variant measured NaN")
    return max(errors), len(errors)


def drift(value: Array, z: Array) -> float:
    """How far a first integral (T, …) moves from its start, relative to max(1, max|z|)."""
    return float(np.abs(value - value[0]).max() / max(1.0, np.abs(z).max()))


def share(failed: int, met: int) -> float:
    """The share of cases that failed among those that met the premises; if none did, nothing was checked."""
    if met == 0:
        raise ArithmeticError("no case met the premises: there was nothing to check")
    return failed / met
