"""The registry of claims and the rule that turns measurements into verdicts.

A claim measures the error of *variants* of one statement with one and the same function:

    printed     as the paper states it
    corrected   as the derivation gives it (where the printed one is wrong)
    condition   as printed, under an extra condition (where it holds only then)
    control     deliberately wrong: the check must reject it
    reference   a true statement that the check must accept (for claims that fail, to show that it can)

An error ≤ tolerance is accepted. The first accepted one of printed, corrected, condition decides the verdict.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

from joma.theory.setting import nearest

Check = Callable[[str], float]


@dataclass(frozen=True)
class Claim:
    """One numbered statement of the paper and how it is checked."""

    id: str
    source: str  # where it stands in the paper
    statement: str  # as printed
    tolerance: float
    measures: str  # what the error is
    control: str  # what the wrong variant is
    check: Check = field(repr=False)
    correction: str | None = None
    condition: str | None = None
    reference: str | None = None
    _: KW_ONLY
    paper_formula: str = ""  # Markdown with LaTeX in $...$, as are the next two
    corrected_formula: str = ""
    derivation: str = ""  # two lines


@dataclass(frozen=True)
class Result:
    """What checking a claim gave. ``value`` is the error that decided the verdict."""

    id: str
    source: str
    statement: str
    verdict: str  # "holds", "holds as corrected", "holds under", "fails", or "error"
    value: float | None
    tolerance: float
    correction: str | None
    condition: str | None
    control_rejected: bool
    printed_value: float | None
    control_value: float | None
    measures: str
    control: str
    seconds: float
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the check ran and rejected its control."""
        return self.error is None and self.control_rejected

    @property
    def note(self) -> str | None:
        """What has to be said beside the verdict: the correction, the condition, or what went wrong."""
        notes = {"holds as corrected": self.correction, "fails": self.correction, "holds under": self.condition}
        return self.error or notes.get(self.verdict)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)


_CLAIMS: dict[str, Claim] = {}
_MODULES = (
    "theorem1", "queries", "theorem2", "isotropic", "critical_points", "theorem3", "theorem4", "hierarchy", "cdag", "section7",
)  # fmt: skip


def claim(id: str, **fields: Any) -> Callable[[Check], Check]:
    """Register the decorated function (variant -> error) as the check of a claim."""

    def register(check: Check) -> Check:
        if id in _CLAIMS:
            raise ValueError(f"claim {id!r} is registered twice")
        _CLAIMS[id] = Claim(id=id, check=check, **fields)
        return check

    return register


def claims() -> tuple[Claim, ...]:
    """All claims.

    Returns:
        The claims, in the order of the paper.
    """
    for module in _MODULES:
        importlib.import_module(f"joma.theory.claims.{module}")
    return tuple(_CLAIMS.values())


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
        found = [c for c in known if c.id == id] or [c for c in known if c.id.startswith(id + ".")]
        if not found:
            raise ValueError(nearest(id, [c.id for c in known], "claim"))
        chosen += [c for c in found if c not in chosen]
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
    verdict, deciding, error = "fails", "printed", None
    try:
        options = [("printed", "holds")]
        if claim.correction is not None and claim.reference is None:
            options.append(("corrected", "holds as corrected"))
        if claim.condition is not None:
            options.append(("condition", "holds under"))
        for variant, name in options:
            values[variant] = _measure(claim, variant)
            if values[variant] <= claim.tolerance:
                verdict, deciding = name, variant
                break
        if claim.reference is not None:
            values["reference"] = _measure(claim, "reference")
            if values["reference"] > claim.tolerance:
                raise ArithmeticError(f"the check rejects what is true ({claim.reference}): {values['reference']:.3g}")
        values["control"] = _measure(claim, "control")
    except Exception as exception:  # one broken check must not hide the others
        verdict, error = "error", f"{type(exception).__name__}: {exception}"
    return Result(
        id=claim.id,
        source=claim.source,
        statement=claim.statement,
        verdict=verdict,
        value=values.get(deciding),
        tolerance=float(claim.tolerance),
        correction=claim.correction,
        condition=claim.condition,
        control_rejected=bool(values.get("control", -math.inf) > claim.tolerance),
        printed_value=values.get("printed"),
        control_value=values.get("control"),
        measures=claim.measures,
        control=claim.control,
        seconds=time.perf_counter() - start,
        error=error,
    )


def _measure(claim: Claim, variant: str) -> float:
    value = float(claim.check(variant))
    if math.isnan(value):
        raise ArithmeticError(f"the {variant} variant measured NaN")
    return value
