"""Outputs of the modules inside an attention, in which its queries and keys are found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RecordedProjection:
    """The input and output of a module (or of a product with a parameter) inside an attention.

    Attributes:
        source: what it was given; None if that is not a tensor.
        output: (…, W); of a convolution (B, W, …).
        is_convolution: True if the channels come second.
    """

    source: Tensor | None
    output: Tensor
    is_convolution: bool = False

    @property
    def positions(self) -> Tensor:
        """The output with its channels last, (…, W)."""
        output = self.output.detach()
        if self.is_convolution:
            return output.movedim(1, -1)  # (B, W, …) -> (B, …, W)
        return output

    @property
    def width(self) -> int:
        """Number of channels W."""
        return self.positions.shape[-1]

    @property
    def channels(self) -> Tensor | None:
        """One row per channel, (B, W, tokens); None for an output without samples and tokens."""
        positions = self.positions
        if positions.dim() <= 2:
            return None
        return positions.flatten(1, -2).transpose(
            1, 2
        )  # (B, …, W) -> (B, tokens, W) -> (B, W, tokens)


def order_of_search(projections: Sequence[RecordedProjection], head_size: int) -> list[int]:
    """Return the numbers of the projections that may hold queries, the likeliest first.

    Projections of all heads (W > d) come before those of one head (W = d), and late ones before
    early ones. Normalisations per head are left out.
    """
    wide = []
    narrow = []
    for number, projection in enumerate(projections):
        if projection.width != head_size:
            wide.append(number)
        elif not _is_norm_per_head(number, projections, head_size):
            narrow.append(number)
    return [*reversed(wide), *reversed(narrow)]


def _is_norm_per_head(
    number: int, projections: Sequence[RecordedProjection], head_size: int
) -> bool:
    """True for a normalisation per head of the output of a wider projection."""
    # y (3, 14, 32), then a norm of (3, 14, 4, 8): 4 heads are among the norm's *positions*. Queries
    # that are found in it may come from any of them, so the norm does not tell heads from samples.
    numbers = projections[number].output.numel()
    for earlier in projections[:number]:
        is_split_into_heads = earlier.width > head_size and earlier.width % head_size == 0
        # queries alone, queries and keys, or queries, keys and values in one projection
        holds_as_many = earlier.output.numel() in (numbers, 2 * numbers, 3 * numbers)
        if is_split_into_heads and holds_as_many:
            return True
    return projections[number].output.dim() > 3
