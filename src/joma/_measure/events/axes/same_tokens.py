"""Tell self-attention from cross-attention: do queries and keys come from the same tokens?

All projections of a self-attention are given the same tensor. If they are given several, it counts
where the queries and the keys are found:

    BERT    q = Wq x,        k = Wk x,        v = Wv x    one input: self-attention
    DETR    q = Wq (x + p),  k = Wk (x + p),  v = Wv x    q and k from the same: self-attention
    T5      q = Wq x,        k = Wk m,        v = Wv m    q and k from others: cross-attention
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from joma._measure.events.axes.features import ROW_FEATURES, have_same_direction, tolerance_of
from joma._measure.events.axes.projections import RecordedProjection
from joma._measure.events.axes.slices import slices_of

if TYPE_CHECKING:
    from joma._measure.events.events import Call

_FEW_ROWS = 3  # rows that are looked up to find the projection of queries or keys


def come_from_same_tokens(
    queries: Tensor | None,
    keys: Tensor | None,
    call: Call,
    projections: Sequence[RecordedProjection],
) -> bool:
    """True if queries and keys (…, d) of a module call come from the same tokens."""
    origins = _distinct_origins(projections)
    if len(origins) == 1:
        return True
    if not origins or queries is None or keys is None:
        return len(_distinct_inputs(call)) < 2
    query_origin = _origin_of_rows(queries.detach(), projections)
    key_origin = _origin_of_rows(keys.detach(), projections)
    if query_origin is None or key_origin is None:
        return len(_distinct_inputs(call)) < 2
    return _have_same_values(query_origin, key_origin)


def _distinct_inputs(call: Call) -> list[Tensor]:
    """Return the sequences (B, T, d) that a module was given, equal ones once."""
    inputs: list[Tensor] = []
    for value in (*call.args, *call.kwargs.values()):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() != 3:
            continue
        _add_if_new(inputs, value)
    return inputs


def _add_if_new(tensors: list[Tensor], tensor: Tensor) -> None:
    for other in tensors:
        if _have_same_values(tensor, other):
            return
    tensors.append(tensor)


def _distinct_origins(projections: Sequence[RecordedProjection]) -> list[Tensor]:
    """Return the inputs from which chains of projections start, equal ones once."""
    origins: list[Tensor] = []
    for projection in projections:
        origin = _start_of_chain(projection, projections)
        if origin is not None:
            _add_if_new(origins, origin)
    return origins


def _start_of_chain(
    projection: RecordedProjection, projections: Sequence[RecordedProjection]
) -> Tensor | None:
    """Return what the first of a chain of projections was given: x, for norm(Wq x)."""
    source = projection.source
    computed = [other for other in projections if not _is_view(other)]
    # a chain is at most as long as the list of projections, which ends a cycle of modules that work
    # in place
    for _ in projections:
        if source is None:
            break
        earlier = [other for other in computed if share_memory(other.output, source)]
        if not earlier or earlier[-1].source is source:
            break
        source = earlier[-1].source
    return source


def _is_view(projection: RecordedProjection) -> bool:
    """True if a module only rearranges the axes of its input (einops' Rearrange)."""
    return projection.source is not None and share_memory(projection.output, projection.source)


def _origin_of_rows(rows: Tensor, projections: Sequence[RecordedProjection]) -> Tensor | None:
    """Return the start of the chain of projections in whose output rows (…, d) are found."""
    size = rows.shape[-1]
    step = max(1, rows[..., 0].numel() // _FEW_ROWS)
    few = rows.reshape(-1, size)[::step][:_FEW_ROWS].double()
    for projection in reversed(projections):
        positions = projection.positions
        if positions.shape[-1] % size:
            continue
        tolerance = tolerance_of(rows, positions)
        for slices in slices_of(positions, size):
            for feature in ROW_FEATURES:
                is_same = have_same_direction(feature(few), feature(slices.double()), tolerance)
                if bool(is_same.flatten(1).any(dim=1).all()):
                    return _start_of_chain(projection, projections)
    return None


def share_memory(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors are views of the same memory."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _have_same_values(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors are the same, judged by their first sample."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return tensor.data_ptr() == other.data_ptr() or torch.equal(tensor[:1], other[:1])
