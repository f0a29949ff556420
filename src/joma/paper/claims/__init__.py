"""Claims: the paper's statements, each with a check, a verdict, a control and mutants."""

from joma.paper.claims._registry import (
    Claim,
    Kind,
    Result,
    Variant,
    check,
    claim,
    claims,
    get,
    remove,
)

__all__ = ["Claim", "Kind", "Result", "Variant", "check", "claim", "claims", "get", "remove"]
