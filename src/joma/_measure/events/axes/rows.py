"""Read rows of queries along each axis, as they attend or as they were before a normalisation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from joma._measure.events.axes.features import ROW_FEATURES, have_same_direction, tolerance_of
from joma._measure.events.axes.projections import RecordedProjection
from joma._measure.events.axes.slices import MOST_NUMBERS

MOST_ROWS = 2048  # rows along one axis that are compared; longer axes stay undecided


class RowReading(ABC):
    """A way to read rows of queries along an axis."""

    @abstractmethod
    def along(self, axis: int) -> Tensor | None:
        """Return rows (n, d) along an axis of the queries; None if they cannot be read this way."""


@dataclass(frozen=True, eq=False)
class QueryRows(RowReading):
    """Queries (axes …, d), as they attend.

    Attributes:
        queries: the queries.
        query_axis: the axis along which they belong to different tokens.
    """

    queries: Tensor
    query_axis: int

    @property
    def size(self) -> int:
        """Numbers per query, d."""
        return self.queries.shape[-1]

    @property
    def token_count(self) -> int:
        """Number of queries along the axis of queries."""
        return self.queries.shape[self.query_axis]

    @property
    def leading_axes(self) -> list[int]:
        """All axes but those of queries and of numbers."""
        axes = list(range(self.queries.dim() - 1))
        axes.remove(self.query_axis)
        return axes

    @cached_property
    def _centre(self) -> tuple[int, ...]:
        """Index of the longest query at the middle token. Queries of padding may be zero."""
        token = self.token_count // 2
        at_token = self.queries.select(self.query_axis, token)  # (leading axes …, d)
        lengths = at_token.float().norm(dim=-1).nan_to_num()  # (leading axes …)
        longest = torch.unravel_index(lengths.argmax(), lengths.shape)
        index = list(map(int, longest))
        index.insert(self.query_axis, token)
        return tuple(index)

    def along(self, axis: int) -> Tensor:
        """Return the queries (n, d) along an axis, through one long query at the middle token."""
        index: list[int | slice] = list(self._centre)
        index[axis] = slice(0, MOST_ROWS)
        return self.queries[tuple(index)]


@dataclass(frozen=True, eq=False)
class RowsBeforeNorm(RowReading):
    """Queries as they were before a normalisation per head, whose weights change the direction.

    Each query is looked up in the output of the normalisation, and replaced by the input of the
    same row.

    Attributes:
        rows: the queries as they attend.
        before: the input of the normalisation, (P, d).
        after: its output, (P, d).
    """

    rows: QueryRows
    before: Tensor
    after: Tensor

    def along(self, axis: int) -> Tensor | None:
        """Return rows (n, d) of the normalisation's input; None if a query is not in its output."""
        rows = self.rows.along(axis).double()
        tolerance = tolerance_of(self.rows.queries, self.after)
        is_zero = (rows == 0).all(dim=1)
        for feature in ROW_FEATURES:
            is_same = have_same_direction(
                feature(rows), feature(self.after.double()), tolerance
            )  # (n, P)
            if bool((is_same.any(dim=1) | is_zero).all()):
                # the first of several equal rows: they come from equal rows
                places = is_same.to(torch.uint8).argmax(dim=1)
                return torch.where(is_zero[:, None], 0.0, self.before[places])
        return None


def readings_before_norms(
    rows: QueryRows, later_projections: Sequence[RecordedProjection]
) -> Iterator[RowReading]:
    """Yield the queries as they were before each normalisation per head that ran later."""
    for norm in later_projections:
        source = norm.source
        if source is None or source.shape != norm.output.shape or source.shape[-1] != rows.size:
            continue
        if norm.output.numel() > MOST_NUMBERS:
            continue
        before = source.detach().reshape(-1, rows.size)
        after = norm.output.detach().reshape(-1, rows.size)
        yield RowsBeforeNorm(rows, before, after)
