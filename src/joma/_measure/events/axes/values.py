"""Find queries in the outputs of projections: evidence for axes that does not depend on sizes.

Sizes alone do not tell heads from samples: (4, 4, 14, 8) may be four samples of four heads or the
other way round, and an axis of 12 may be 3 × 4 or 4 × 3. Values do: see `slices`. The output of
each projection is searched in this order, and the first search that settles every axis wins:

1. queries as they attend, by the features that scaling and rotary positions keep (`features`);
2. norms of the queries over the tokens, which every rotation keeps;
3. queries as they were before a normalisation per head (`rows`);
4. after all projections: differences of neighbouring queries, which a bias per head keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from joma._measure.events.axes.features import (
    ROW_FEATURES,
    RowFeature,
    have_same_direction,
    tolerance_of,
)
from joma._measure.events.axes.layout import Axis
from joma._measure.events.axes.projections import RecordedProjection, order_of_search
from joma._measure.events.axes.rows import (
    MOST_ROWS,
    QueryRows,
    RowReading,
    readings_before_norms,
)
from joma._measure.events.axes.slices import (
    ANY_SLICE,
    MOST_NUMBERS,
    axis_of_slices,
    slice_numbers,
    slices_of,
)

MIN_NORMS = 8  # with fewer tokens, the norms of two heads may be alike
MOST_NORMS = 48  # tokens whose norms are compared; more make the comparison slower, not safer

# axis of the queries -> slices (n,) of the rows along it; None if the rows were not found
SlicesByAxis = Mapping[int, Tensor | None]


@dataclass(frozen=True)
class QueryOrigin:
    """The place of queries in the output of a projection.

    Attributes:
        axes: meaning of the leading axes of the queries.
        share: the share of the projected positions that attend as queries.
        slices_along_queries: True if the axis of queries runs over slices, so that its "queries"
            are heads.
        compared: the feature by which they were found.
        tolerance: the 1 − cosine up to which rows counted as equal.
    """

    axes: tuple[Axis, ...]
    share: float
    slices_along_queries: bool
    compared: str
    tolerance: float


def find_queries(
    queries: Tensor, query_axis: int, projections: Sequence[RecordedProjection]
) -> QueryOrigin | None:
    """Find queries (axes …, d) in the output of a projection; None if they are in none."""
    rows = QueryRows(queries.detach(), query_axis)
    search_order = order_of_search(projections, rows.size)
    for number in search_order:
        positions = projections[number].positions
        if positions.shape[-1] % rows.size or positions.dim() < 2:
            continue
        origin = _find_rows(rows, rows, positions) or _find_norms(rows, positions)
        if origin is not None:
            return origin
        for reading in readings_before_norms(rows, projections[number + 1 :]):
            origin = _find_rows(rows, reading, positions)
            if origin is not None:
                return origin
    for number in search_order:
        origin = _find_differences(rows, projections[number].positions)
        if origin is not None:
            return origin
    return None


def _find_rows(rows: QueryRows, reading: RowReading, positions: Tensor) -> QueryOrigin | None:
    """Find rows of queries, read in one way, in positions (…, W), by each feature."""
    ways_at_token = slices_of(_at_middle_token(positions, rows.token_count), rows.size)
    ways_everywhere = slices_of(positions, rows.size)
    for way, slices in enumerate(ways_at_token):
        # An output may be too large to be searched at all tokens, and small enough at one.
        everywhere = ways_everywhere[way] if ways_everywhere else None
        for feature in ROW_FEATURES:
            slices_by_axis = _slices_by_axis(rows, reading, feature, slices, everywhere)
            origin = _conclude(rows, slices_by_axis, positions, feature.name)
            if origin is not None:
                return origin
    return None


def _at_middle_token(positions: Tensor, tokens: int) -> Tensor:
    """Return positions (…, W) of the middle token, if one axis holds the tokens; else all."""
    # y (3, 14, 32) and 14 queries: y[:, 7], (3, 32). With y (14, 14, 32) it is not clear which axis
    # is meant.
    fitting = [axis for axis in range(positions.dim() - 1) if positions.shape[axis] == tokens]
    if len(fitting) == 1 and positions.dim() > 2:
        return positions.select(fitting[0], tokens // 2)
    return positions


def _slices_by_axis(
    rows: QueryRows,
    reading: RowReading,
    feature: RowFeature,
    slices: Tensor,
    everywhere: Tensor | None,
) -> SlicesByAxis:
    """Return the slices of rows along each axis; ``everywhere`` are the slices at all tokens."""
    tolerance = tolerance_of(rows.queries, slices)
    slices_by_axis: dict[int, Tensor | None] = {}
    for axis in rows.leading_axes:
        along = reading.along(axis)
        if along is not None and rows.queries.shape[axis] > 1:
            slices_by_axis[axis] = slice_numbers(
                feature(along.double()), feature(slices.double()), tolerance
            )
    along = reading.along(rows.query_axis)
    if along is not None and everywhere is not None:
        few = along[:: max(1, rows.token_count // 2)].double()  # the first, the middle and the last
        slices_by_axis[rows.query_axis] = slice_numbers(
            feature(few), feature(everywhere.double()), tolerance
        )
    return slices_by_axis


def _conclude(
    rows: QueryRows, slices_by_axis: SlicesByAxis, positions: Tensor, compared: str
) -> QueryOrigin | None:
    """Return what the slices along all axes mean; None if one axis stays undecided."""
    axes = []
    for axis in rows.leading_axes:
        size = rows.queries.shape[axis]
        if size == 1:
            axes.append(Axis(1, 1))
            continue
        along = slices_by_axis.get(axis)
        if along is None or len(along) != size:
            return None
        meaning = axis_of_slices(along)
        if meaning is None:
            return None
        axes.append(meaning)
    # with leading axes of 1 alone, the queries themselves have to be found
    if all(along is None for along in slices_by_axis.values()):
        return None
    heads = prod(axis.heads for axis in axes)
    # queries (3, 4, 14, 8) of y (3, 14, 32): 168 rows, 4 heads, 42 positions, all of which attend
    attending = rows.queries[..., 0].numel() / heads
    share = min(1.0, attending / positions[..., 0].numel())
    along_queries = slices_by_axis.get(rows.query_axis)
    slices_along_queries = False
    if along_queries is not None:
        slices_along_queries = len(along_queries[along_queries != ANY_SLICE].unique()) > 1
    tolerance = tolerance_of(rows.queries, positions)
    return QueryOrigin(tuple(axes), share, slices_along_queries, compared, tolerance)


def _find_norms(rows: QueryRows, positions: Tensor) -> QueryOrigin | None:
    """Find the norms of queries over the tokens, which partial rotary positions keep."""
    # queries (3, 4, 14, 8): norms (3, 4, 14)
    # y (3, 14, 32): norms of its slices (3, 14, 4), moved to (3, 4, 14)
    # One head of one sample is a profile of 14 norms, looked up among the 12 profiles of y.
    if rows.token_count < MIN_NORMS or positions.numel() > MOST_NUMBERS or positions.dim() < 3:
        return None
    tolerance = tolerance_of(rows.queries, positions)
    norms = rows.queries.double().norm(dim=-1).movedim(rows.query_axis, -1)  # (leading axes …, T)
    for token_axis in range(positions.dim() - 1):
        if positions.shape[token_axis] != rows.token_count:
            continue
        slices = positions.double().unflatten(-1, (-1, rows.size)).norm(dim=-1)  # (…, G)
        slices = slices.movedim(token_axis, -1)  # (…, G, T)
        candidates = slices.reshape(-1, *slices.shape[-2:])[..., :MOST_NORMS]  # (P, G, T)
        slices_by_axis: dict[int, Tensor | None] = {}
        for place, axis in enumerate(rows.leading_axes):
            index: list[int | slice] = [0] * len(rows.leading_axes)
            index[place] = slice(0, MOST_ROWS)
            profiles = norms[tuple(index)][..., :MOST_NORMS]  # (n, T)
            slices_by_axis[axis] = slice_numbers(profiles, candidates, tolerance)
        origin = _conclude(rows, slices_by_axis, positions, "norms over the tokens")
        if origin is not None:
            return origin
    return None


def _find_differences(rows: QueryRows, positions: Tensor) -> QueryOrigin | None:
    """Find differences of neighbouring queries, which a bias per head keeps (Transformer-XL)."""
    # queries y + u of head u: (y₅ + u) − (y₄ + u) = y₅ − y₄
    if positions.dim() <= 2 or positions.shape[-1] % rows.size:
        return None
    steps = rows.queries - rows.queries.roll(1, dims=rows.query_axis)
    step_rows = QueryRows(steps, rows.query_axis)
    for token_axis in range(positions.dim() - 1):
        if positions.shape[token_axis] != rows.token_count:
            continue
        position_steps = positions - positions.roll(1, dims=token_axis)
        origin = _find_rows(step_rows, step_rows, position_steps)
        if origin is None:
            origin = _find_norms(step_rows, position_steps)
        if origin is not None:
            return origin
    return None


def are_channels(
    queries: Tensor, query_axis: int, projections: Sequence[RecordedProjection]
) -> bool:
    """True if a row of "queries" is one channel of a projection at all tokens."""
    # XCiT: y (B, 14, 32) becomes "queries" (B, 4, 8, 14), and [b, h, c] is y[b, :, 8 h + c].
    rows = QueryRows(queries.detach(), query_axis)
    row = rows.along(query_axis)[:1].double()  # (1, T)
    for projection in reversed(projections):
        channels = projection.channels  # (B, W, T)
        if channels is None or channels.shape[-1] != rows.size or channels.numel() > MOST_NUMBERS:
            continue
        tolerance = tolerance_of(queries, channels)
        if bool(have_same_direction(row, channels.double(), tolerance).any()):
            return True
    return False
