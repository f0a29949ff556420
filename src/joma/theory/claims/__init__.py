"""Claims: the paper's numbered statements, each with a check, a tolerance, a verdict and a control."""

from joma.theory.claims._registry import Claim, Result, check, claims, get

__all__ = ["Claim", "Result", "check", "claims", "get"]
