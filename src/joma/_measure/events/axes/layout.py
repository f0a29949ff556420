"""Bring a tensor with any order of axes to (samples, heads, queries, …)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """The meaning of one leading axis of queries or scores: samples, heads, or both.

    Windows and blocks of tokens count as samples: values are averaged over them alike.

    Attributes:
        size: length of the axis.
        heads: number of heads along it; 1 if it holds samples only.
        has_heads_first: for an axis that holds both, True if index = head · samples + sample.
    """

    size: int
    heads: int
    has_heads_first: bool = False

    @property
    def samples(self) -> int:
        """Number of samples along the axis."""
        return self.size // self.heads


@dataclass(frozen=True)
class AxesEvidence:
    """The evidence for which axes hold the heads.

    Attributes:
        summary: the evidence as `joma.explain` words it.
        compared: what was compared with what.
        tolerance: the error up to which the two counted as equal; None where sizes are compared.
    """

    summary: str
    compared: str = ""
    tolerance: float | None = None


FROM_FUNCTION = AxesEvidence("certain from the function")
NO_EVIDENCE = AxesEvidence("nothing decides")


@dataclass(frozen=True)
class Layout:
    """The meaning of a tensor's axes: any leading axes, one axis of queries, keys or channels last.

    Attributes:
        axes: the leading axes in their order, without the axis of queries.
        query_axis: place of the axis of queries among all axes.
        is_certain: False if nothing shows which axes are heads. All leading axes then count as
            samples of one "head".
        share: the share of the module's queries that attend here.
        evidence: what decided the axes.
    """

    axes: tuple[Axis, ...]
    query_axis: int
    is_certain: bool = True
    share: float = 1.0
    evidence: AxesEvidence = field(default=FROM_FUNCTION, compare=False)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return prod(axis.heads for axis in self.axes)

    @property
    def is_plain(self) -> bool:
        """True if the axes are (samples, heads, queries, …) already."""
        if len(self.axes) != 2 or self.query_axis != 2:
            return False
        samples, heads = self.axes
        return samples.heads == 1 and heads.heads == heads.size

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor as (samples, heads, queries, …)."""
        # Scores (12, 14, 14) with 4 heads outside and 3 samples inside:
        #     split    (4, 3, 14, 14)
        #     permute  (3, 4, 14, 14)
        if self.is_plain:
            return tensor
        sizes: list[int] = []
        sample_places: list[int] = []
        head_places: list[int] = []
        query_place = 0
        leading_axes = iter(self.axes)
        for place in range(tensor.dim() - 1):
            if place == self.query_axis:
                query_place = len(sizes)
                sizes.append(tensor.shape[place])
                continue
            axis = next(leading_axes)
            parts = [(sample_places, axis.samples), (head_places, axis.heads)]
            if axis.has_heads_first:
                parts.reverse()
            for places, size in parts:
                places.append(len(sizes))
                sizes.append(size)
        split = tensor.reshape(*sizes, tensor.shape[-1])
        moved = split.permute(*sample_places, *head_places, query_place, len(sizes))
        return moved.reshape(-1, self.heads, tensor.shape[self.query_axis], tensor.shape[-1])

    def resized(self, shape: Sequence[int]) -> Layout | None:
        """Return the layout for other sizes (all but the last); None if the heads would change."""
        # Two samples of 4 heads, (2, 4, 14), carry over to (6, 4, 20), but not to (2, 8, 14).
        sizes = [*shape[: self.query_axis], *shape[self.query_axis + 1 :]]
        if len(sizes) != len(self.axes):
            return None
        axes = []
        for axis, size in zip(self.axes, sizes, strict=True):
            holds_heads_only = axis.heads == axis.size and axis.heads > 1
            if size % axis.heads or (holds_heads_only and size != axis.size):
                return None
            axes.append(Axis(size, axis.heads, axis.has_heads_first))
        return Layout(tuple(axes), self.query_axis, self.is_certain, self.share, self.evidence)
