"""Which tokens are real, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenGrid:
    """The tokens that a question about padding is about."""

    samples: int
    tokens: int
    device: torch.device


@dataclass(frozen=True)
class PaddingEvidence:
    """The evidence for which tokens are padding.

    Attributes:
        summary: the evidence as `joma.explain` words it.
        compared: what was compared with what.
    """

    summary: str
    compared: str = ""


@dataclass(frozen=True, eq=False)
class PaddingAnswer:
    """Which tokens are real.

    Attributes:
        is_real: (B or 1, 1, T), False at padding; None if there is none.
        evidence: what shows it.
    """

    is_real: Tensor | None
    evidence: PaddingEvidence


NO_PADDING = PaddingAnswer(None, PaddingEvidence("none"))


def answer_from_rows(is_real: Tensor, evidence: PaddingEvidence) -> PaddingAnswer:
    """Return the answer for tokens (B or 1, T), True at real ones."""
    if bool(is_real.all()):
        return PaddingAnswer(None, evidence)
    return PaddingAnswer(is_real[:, None], evidence)  # (B or 1, 1, T)
