"""Outputs of the modules inside an attention, in which its queries and keys are found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from joma._measure.events.events import Call
from joma._measure.events.tensors import is_plain

# Modules whose channels come second, (B, W, …).
_CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)
# Outputs that are held per module, the latest ones. An attention needs those of its queries and
# keys; modules around them (LoRA, norms per head) give some more.
_MAX_RECORDED = 12


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


def record_projection(call: Call, parent: Call, output: Any) -> None:
    """Keep the output of a module for the attention around it, while axes are learnt."""
    has_attention = call.has_attention or call.attentions > 0
    parent.has_attention |= has_attention
    if has_attention or not is_plain(output):
        return
    if not output.is_floating_point() or output.dim() < 2:
        return
    is_convolution = isinstance(call.module, _CONVOLUTIONS)
    if not is_convolution and call.projections:
        # A module around a convolution, which returns its output as it is.
        inner = call.projections[-1]
        is_convolution = inner.is_convolution and inner.output.shape == output.shape
    parent.projections.append(RecordedProjection(call.states, output, is_convolution))
    del parent.projections[:-_MAX_RECORDED]


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
