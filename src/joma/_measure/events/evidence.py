"""Where the queries of an attention come from: rows of queries, found again in what the projections gave.

Shapes alone do not tell heads from samples: (4, 4, 14, 8) may be four samples of four heads or the other way round, and
an axis of 12 may be 3 × 4 or 4 × 3. Values do. A projection gives y (B, T, W), and a query of d numbers is one of the
W/d slices of a row of y. So a few queries along each axis are looked up in y, and only the number of the slice counts:

    y (B=3, T=14, W=32), queries (12, 14, 8): the slices of the queries [i, 7] for i = 0 … 11 are
        0 1 2 3 0 1 2 3 0 1 2 3     samples outside, heads inside: (batch · heads)
        0 0 0 1 1 1 2 2 2 3 3 3     heads outside, samples inside: (heads · batch)
    y (B=4, T=14, W=32), queries (4, 4, 14, 8): along the first axis 0 0 0 0, along the second 0 1 2 3: the second axis
        holds the heads. Along the first 0 1 2 3: the first one does.

A slice that stays the same along an axis means samples, or windows and blocks of tokens, which are averaged over alike.

Queries are seldom the slices themselves. They are scaled or normalised (the direction stays), or rotated by rotary
positions (the energy of each pair of numbers stays, and so does the norm): see `_FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from joma._measure.events.events import Call

_MOST_ROWS = 2048  # rows of queries along one axis that are looked up
_MOST_NUMBERS = 1 << 23  # numbers of a projection's output that are looked through
_PROFILE = 48  # tokens whose norms are compared
# 1 − cosine up to which two vectors are the same one. Rounding of ε makes ε²: 1e-14 in float32, 1e-5 in bfloat16
_EXACT = 1e-9
_ROUNDED = 1e-4


@dataclass(frozen=True, eq=False)
class Projection:
    """What a module inside an attention was given, and what it gave; a convolution gives (B, W, …), others (…, W)."""

    source: Tensor | None
    output: Tensor
    is_convolution: bool = False

    @property
    def positions(self) -> Tensor:
        """(…, W)"""
        output = self.output.detach()
        return output.movedim(1, -1) if self.is_convolution else output

    @property
    def channels(self) -> Tensor | None:
        """(B, W, tokens); None if there are no samples and tokens."""
        positions = self.positions
        return positions.flatten(1, -2).transpose(1, 2) if positions.dim() > 2 else None


@dataclass(frozen=True)
class Axis:
    """What the indices along one leading axis of the queries are.

    Attributes:
        size: how many there are.
        heads: how many heads are among them; 1 if they are samples (or windows) only.
        heads_first: in a merged axis, are heads outside: index = head · samples + sample?
    """

    size: int
    heads: int
    heads_first: bool = False


@dataclass(frozen=True)
class Found:
    """Where queries come from.

    Attributes:
        axes: of the queries, without that of the queries themselves.
        share: of the positions that were projected, how many attend as queries.
        slices_along_queries: does the axis of the queries run over slices: are its "queries" heads?
    """

    axes: tuple[Axis, ...]
    share: float
    slices_along_queries: bool = False


def find_queries(
    queries: Tensor, query_axis: int, projections: Sequence[Projection]
) -> Found | None:
    """Find queries (axes …, d) in the outputs of projections, the last one first; None if they are in none."""
    queries = queries.detach()
    d = queries.shape[-1]
    wide = [n for n, projection in enumerate(projections) if not _has_width(projection, d)]
    narrow = [
        n for n in range(len(projections)) if n not in wide and not _is_norm(n, projections, d)
    ]
    for n in (*reversed(wide), *reversed(narrow)):
        positions = projections[n].positions
        for rows_of in _readings(queries, query_axis, projections, n):
            found = _find_in(queries, query_axis, positions, rows_of)
            if found is not None:
                return found
    for n in (*reversed(wide), *reversed(narrow)):
        found = _find_differences(queries, query_axis, projections[n].positions)
        if found is not None:
            return found
    return None


def _find_differences(queries: Tensor, query_axis: int, positions: Tensor) -> Found | None:
    """Find differences of neighbouring queries, which a bias per head (Transformer-XL, XLNet) leaves as they are."""
    steps = queries - queries.roll(1, dims=query_axis)

    def rows_of(axis: int) -> Tensor | None:
        return _rows_along(steps, axis, query_axis)

    for axis in range(positions.dim() - 1):
        if positions.shape[axis] == queries.shape[query_axis] and positions.dim() > 2:
            found = _find_in(steps, query_axis, positions - positions.roll(1, dims=axis), rows_of)
            if found is not None:
                return found
    return None


def _has_width(projection: Projection, d: int) -> bool:
    return projection.positions.shape[-1] == d


def _is_norm(n: int, projections: Sequence[Projection], d: int) -> bool:
    """Is it a normalisation per head, of d numbers each, of what a wider projection before it gave?

    Its output (B, T, H, d) has an axis of heads among its positions: that queries are found in it does not tell which.
    """
    size = projections[n].output.numel()
    for before in projections[:n]:
        width = before.positions.shape[-1]
        if width > d and width % d == 0 and before.output.numel() in (size, 2 * size, 3 * size):
            return True
    return projections[n].output.dim() > 3


def found_as_columns(queries: Tensor, query_axis: int, projections: Sequence[Projection]) -> bool:
    """Are the "queries" channels: is a row of them one channel of a projection at all tokens?

    Worked example, XCiT: y (B, T=14, W=32) becomes queries (B, 4, 8, 14), of which [b, h, c] is y[b, :, 8 h + c].
    """
    queries = queries.detach()
    row = _rows_along(queries, query_axis, query_axis)[:1].double()  # (1, d)
    for projection in reversed(projections):
        channels = projection.channels  # (B, W, T)
        if (
            channels is None
            or channels.shape[-1] != queries.shape[-1]
            or channels.numel() > _MOST_NUMBERS
        ):
            continue
        if bool(_same_direction(row, channels.double(), _tolerance(queries, channels)).any()):
            return True
    return False


def same_tokens(
    queries: Tensor | None, keys: Tensor | None, call: Call, projections: Sequence[Projection]
) -> bool:
    """True if queries and keys (…, d) come from the same tokens: self-attention, not cross-attention.

    All projections of a self-attention are given the same tensor; if they are given several, what counts is where the
    queries and the keys are found. DETR adds positions for queries and keys, but not for values.
    """
    roots = _roots(projections)
    if len(roots) == 1:
        return True
    if not roots or queries is None or keys is None:
        return len(_inputs(call)) < 2
    query_root, key_root = (_root_of(rows.detach(), projections) for rows in (queries, keys))
    if query_root is None or key_root is None:
        return len(_inputs(call)) < 2
    return _same_values(query_root, key_root)


def _inputs(call: Call) -> list[Tensor]:
    """Different tensors (B, T, d) that a module was given."""
    inputs: list[Tensor] = []
    for value in (*call.args, *call.kwargs.values()):
        is_states = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3
        if is_states and not any(_same_values(value, other) for other in inputs):
            inputs.append(value)
    return inputs


def _roots(projections: Sequence[Projection]) -> list[Tensor]:
    """What the first of a chain of projections was given; two tensors of the same values count once."""
    roots: list[Tensor] = []
    for projection in projections:
        root = _first_source(projection, projections)
        if root is not None and not any(_same_values(root, other) for other in roots):
            roots.append(root)
    return roots


def _first_source(projection: Projection, projections: Sequence[Projection]) -> Tensor | None:
    """What a projection was given, or the one before it, if it was given the output of one."""
    source = projection.source
    computed = [other for other in projections if not _is_view(other)]
    for _ in projections:
        before = [
            other for other in computed if source is not None and _same_memory(other.output, source)
        ]
        if not before or before[-1].source is source:
            break
        source = before[-1].source
    return source


def _is_view(projection: Projection) -> bool:
    """True if a module gives what it was given with other axes (einops' Rearrange)."""
    return projection.source is not None and _same_memory(projection.output, projection.source)


def _root_of(rows: Tensor, projections: Sequence[Projection]) -> Tensor | None:
    """What the projection was given in whose output rows (…, d) are found."""
    d = rows.shape[-1]
    few = rows.reshape(-1, d)[:: max(1, rows[..., 0].numel() // 3)][:3].double()
    for projection in reversed(projections):
        positions = projection.positions
        if positions.shape[-1] % d:
            continue
        for slices in _slices(positions, d):
            for feature in _ROW_FEATURES:
                same = _same_direction(
                    feature(few), feature(slices.double()), _tolerance(rows, positions)
                )
                if bool(same.flatten(1).any(dim=1).all()):
                    return _first_source(projection, projections)
    return None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_values(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(a[:1], b[:1])


# Rows of queries, and how they are read


def _rows_along(queries: Tensor, axis: int, query_axis: int) -> Tensor:
    """Queries (n, d) along one axis, through the longest one in the middle of the tokens (padding may be zero)."""
    token = queries.shape[query_axis] // 2
    lengths = queries.select(query_axis, token).float().norm(dim=-1).nan_to_num()  # (lead …)
    index: list[int | slice] = [
        int(n) for n in torch.unravel_index(lengths.argmax(), lengths.shape)
    ]
    index.insert(query_axis, token)
    index[axis] = slice(0, _MOST_ROWS)
    return queries[tuple(index)]


Rows = Callable[
    [int], Tensor | None
]  # axis -> rows (n, d), or None if they cannot be read this way


def _readings(
    queries: Tensor, query_axis: int, projections: Sequence[Projection], n: int
) -> Iterator[Rows]:
    """The queries as they are; and, where a normalisation per head lies between, as they were before it."""

    def as_they_are(axis: int) -> Tensor | None:
        return _rows_along(queries, axis, query_axis)

    yield as_they_are
    d = queries.shape[-1]
    for norm in projections[n + 1 :]:
        source = norm.source
        if source is None or source.shape != norm.output.shape or source.shape[-1] != d:
            continue
        before = source.detach().reshape(-1, d)
        after = norm.output.detach().reshape(-1, d)
        if after.numel() > _MOST_NUMBERS:
            continue

        def before_norm(axis: int, before: Tensor = before, after: Tensor = after) -> Tensor | None:
            rows = _rows_along(queries, axis, query_axis).double()
            for feature in _ROW_FEATURES:
                same = _same_direction(
                    feature(rows), feature(after.double()), _tolerance(queries, after)
                )  # (n, P)
                is_zero = (rows == 0).all(dim=1)
                if bool((same.any(dim=1) | is_zero).all()):
                    places = same.to(torch.uint8).argmax(dim=1)  # equal rows come from equal rows
                    return torch.where(is_zero[:, None], 0.0, before[places])
            return None

        yield before_norm


# Finding rows in the output of a projection


def _find_in(queries: Tensor, query_axis: int, positions: Tensor, rows_of: Rows) -> Found | None:
    """Find queries in what a projection gave, (…, W)."""
    d = queries.shape[-1]
    lead = [axis for axis in range(queries.dim() - 1) if axis != query_axis]
    tokens = queries.shape[query_axis]
    tolerance = _tolerance(queries, positions)
    if positions.shape[-1] % d or positions.dim() < 2:
        return None
    everywhere = list(_slices(positions, d))  # (P, G, d) each
    for layout, slices in enumerate(_slices(_at_one_token(positions, tokens), d)):
        for feature in _ROW_FEATURES:
            numbers: dict[int, Tensor | None] = {}
            for axis in lead:
                rows = rows_of(axis)
                if rows is not None and queries.shape[axis] > 1:
                    numbers[axis] = _slice_numbers(
                        feature(rows.double()), feature(slices.double()), tolerance
                    )
            few = rows_of(query_axis)
            if few is not None and layout < len(everywhere):
                few = few[
                    :: max(1, tokens // 2)
                ].double()  # the first, the middle and the last query
                numbers[query_axis] = _slice_numbers(
                    feature(few), feature(everywhere[layout].double()), tolerance
                )
            found = _conclude(queries, lead, query_axis, numbers, positions)
            if found is not None:
                return found
    return _find_by_norms(queries, query_axis, positions, lead)


def _conclude(
    queries: Tensor,
    lead: list[int],
    query_axis: int,
    numbers: dict[int, Tensor | None],
    positions: Tensor,
) -> Found | None:
    """What the numbers of slices along each axis mean; None if one of them is not known."""
    axes = []
    for axis in lead:
        size = queries.shape[axis]
        if size == 1:
            axes.append(Axis(1, 1))
            continue
        along = numbers.get(axis)
        if along is None or len(along) != size:
            return None
        meaning = _meaning(along)
        if meaning is None:
            return None
        axes.append(meaning)
    if not any(numbers.get(axis) is not None for axis in (*lead, query_axis)):
        return None
    heads = 1
    for axis_meaning in axes:
        heads *= axis_meaning.heads
    rows = queries[..., 0].numel() / heads
    along_queries = numbers.get(query_axis)
    swapped = along_queries is not None and len(along_queries[along_queries >= 0].unique()) > 1
    return Found(tuple(axes), min(1.0, rows / positions[..., 0].numel()), swapped)


def _meaning(numbers: Tensor) -> Axis | None:
    """What the numbers of slices (n,) along an axis mean, −1 for one that is not known; None if they follow no rule.

    0 0 0 0 → samples; 0 1 2 3 → heads; 0 1 0 1 0 1 → samples outside, heads inside; 0 0 0 1 1 1 → heads outside.
    """
    n = len(numbers)
    is_known = numbers >= 0
    heads = len(numbers[is_known].unique())
    if heads == 1:
        return Axis(n, 1) if int(is_known.sum()) > 1 else None
    if heads == n:
        return Axis(n, n)
    if heads == 0 or n % heads:
        return None
    is_inside = _are_heads(numbers.view(n // heads, heads).T)
    is_outside = _are_heads(numbers.view(heads, n // heads))
    if is_inside == is_outside:
        return None
    return Axis(n, heads, heads_first=is_outside)


def _are_heads(rows: Tensor) -> bool:
    """Does each row (heads, samples) hold one number, and each another one? −1 is any."""
    highest = rows.amax(dim=1)
    lowest = torch.where(rows < 0, highest[:, None], rows).amin(dim=1)
    return (
        bool((highest == lowest).all())
        and len(highest.unique()) == len(rows)
        and int(highest.min()) >= 0
    )


def _at_one_token(positions: Tensor, tokens: int) -> Tensor:
    """Positions (…, W) of the token in the middle, if it is clear which axis holds the tokens and all are too many."""
    fitting = [axis for axis in range(positions.dim() - 1) if positions.shape[axis] == tokens]
    if len(fitting) == 1 and positions.dim() > 2:
        return positions.select(fitting[0], tokens // 2)
    return positions


def _slices(positions: Tensor, d: int) -> Iterator[Tensor]:
    """Slices (P, G, d) of positions (…, W): d numbers in a row, or every G-th number."""
    if positions.numel() > _MOST_NUMBERS:
        return
    flat = positions.reshape(-1, positions.shape[-1])
    yield flat.unflatten(1, (-1, d))
    if flat.shape[1] > d:
        yield flat.unflatten(1, (d, -1)).transpose(1, 2)


def _direction(rows: Tensor) -> Tensor:
    return rows


def _half_pairs(rows: Tensor) -> Tensor:
    """The energy of the pairs (i, i + d/2), which rotary positions leave as it is."""
    first, second = rows.unflatten(-1, (2, -1)).unbind(-2)
    return first.square() + second.square()


def _neighbour_pairs(rows: Tensor) -> Tensor:
    """The energy of the pairs (2i, 2i + 1), likewise."""
    return rows.unflatten(-1, (-1, 2)).square().sum(dim=-1)


def _even(feature: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def of_even(rows: Tensor) -> Tensor:
        # with fewer than four pairs, energies of other rows are too often the same
        return (
            feature(rows)
            if rows.shape[-1] % 2 == 0 and rows.shape[-1] >= 8
            else torch.zeros_like(rows)
        )

    return of_even


def _first_half(rows: Tensor) -> Tensor:
    """The part that rotary positions leave alone, where they turn a part only and that comes last."""
    return rows[..., : rows.shape[-1] // 2]


def _second_half(rows: Tensor) -> Tensor:
    """Likewise where it comes first."""
    return rows[..., rows.shape[-1] // 2 :]


_ROW_FEATURES: tuple[Callable[[Tensor], Tensor], ...] = (
    _direction,
    _even(_half_pairs),
    _even(_neighbour_pairs),
    _even(_second_half),
    _even(_first_half),
)


def _tolerance(*tensors: Tensor) -> float:
    low = any(torch.finfo(tensor.dtype).bits < 32 for tensor in tensors)
    return _ROUNDED if low else _EXACT


def _normed(rows: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros becomes NaN, which equals nothing."""
    norms = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(norms > 0, norms, torch.nan)


def _same_direction(rows: Tensor, candidates: Tensor, tolerance: float) -> Tensor:
    """Boolean (n, …) of rows (n, f) and candidates (…, f)."""
    if rows.shape[-1] == 1:  # all numbers of one sign have one direction
        return torch.zeros(len(rows), *candidates.shape[:-1], dtype=torch.bool, device=rows.device)
    flat = _normed(candidates).reshape(-1, candidates.shape[-1])
    same = _normed(rows) @ flat.T >= 1 - tolerance
    return same.view(len(rows), *candidates.shape[:-1])


def _slice_numbers(rows: Tensor, candidates: Tensor, tolerance: float) -> Tensor | None:
    """The slice (n,) of each of rows (n, f) among candidates (P, G, f), whatever the position; None if unknown.

    A row of zeros (padding) is −1.
    """
    matches = _same_direction(rows, candidates, tolerance).any(dim=1)  # (n, G)
    is_zero = (rows == 0).all(dim=1)
    if matches.numel() == 0 or not bool(((matches.sum(dim=1) == 1) | is_zero).all()):
        return None
    return torch.where(is_zero, -1, matches.to(torch.uint8).argmax(dim=1))


def _find_by_norms(
    queries: Tensor, query_axis: int, positions: Tensor, lead: list[int]
) -> Found | None:
    """By the norms of queries over the tokens, which partial rotary positions and their like leave as they are.

    Norms of queries (B, H, T, d) over the tokens are profiles (B, H, T); those of slices (B, T, G, d) are (B, G, T).
    """
    d = queries.shape[-1]
    tokens = queries.shape[query_axis]
    if tokens < 8 or positions.numel() > _MOST_NUMBERS:
        return None
    norms = queries.double().norm(dim=-1).movedim(query_axis, -1)  # (lead …, T)
    for axis in range(positions.dim() - 1):
        if positions.shape[axis] != tokens or positions.dim() < 3:
            continue
        slices = (
            positions.double().unflatten(-1, (-1, d)).norm(dim=-1).movedim(axis, -1)
        )  # (…, G, T)
        candidates = slices.reshape(-1, *slices.shape[-2:])[..., :_PROFILE]  # (P, G, T)
        numbers: dict[int, Tensor | None] = {}
        for place, query_lead in enumerate(lead):
            index: list[int | slice] = [0] * len(lead)
            index[place] = slice(0, _MOST_ROWS)
            rows = norms[tuple(index)][..., :_PROFILE]
            numbers[query_lead] = _slice_numbers(rows, candidates, _tolerance(queries, positions))
        found = _conclude(queries, lead, query_axis, numbers, positions)
        if found is not None:
            return found
    return None
