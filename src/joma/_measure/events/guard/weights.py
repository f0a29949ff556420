"""Eager attention: find the product in which the softmax of the scores meets the values.

The softmax of scores s gives p, and p·V tells which axis holds the queries. In between a model may
apply dropout, leave a learned sink out, reorder axes, or merge and split them. If it does anything
else (a difference of two maps, heads that are mixed, a second normalisation), no product has the
weights p, and the attention is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from math import prod

import torch
from torch import Tensor

from joma._measure.events.axes import find_query_axis
from joma._measure.events.events import wide
from joma._measure.events.guard.candidate import AttentionCandidate
from joma._measure.events.guard.comparison import (
    WEIGHTS_CHECK,
    Comparison,
    relative_tolerance,
    spread_rows,
)
from joma._measure.events.products import WeightsCandidate
from joma._measure.events.reasons import Reason, Refusal

# Dropout multiplies what it keeps by 1/(1 − rate). Zeros together with a smaller factor are a mask
# that is applied after the softmax: the weights no longer sum to 1, so this is no dropout.
MIN_DROPOUT_FACTOR = 1.002


@dataclass(frozen=True)
class WeightsOrder:
    """A way in which weights may be the softmax of scores.

    Attributes:
        axes: for each leading axis of the weights, the axis of the scores that it is; None if axes
            were merged or split and rows are in the same order.
        sink: the column of the scores that was left out, a learned sink; None if all are there.
    """

    axes: tuple[int, ...] | None
    sink: int | None


def settle_by_weights(candidate: AttentionCandidate, operand: WeightsCandidate) -> bool:
    """Settle the axis of queries if an operand is the candidate's softmax; False if it is not."""
    scores: Tensor = candidate.fields["scores"]  # keys last
    weights = operand.weights
    for order in _possible_orders(scores, weights):
        comparison = compare_weights(scores, weights, order)
        if comparison is None:
            continue
        candidate.comparison = comparison
        possible_axes = _query_axes_of_scores(scores, weights, order, operand.query_axes)
        candidate.query_axis = find_query_axis(
            candidate.shape,
            possible_axes,
            candidate.call,
            candidate.read_queries,
            candidate.projections,
        )
        if candidate.query_axis is None:
            shape = (*scores.shape[:-1], "…")
            candidate.refusal = Refusal(
                Reason.QUERY_AXIS,
                f"it is not clear which axis of its scores {shape} is that of the queries",
            )
        if order.sink is not None:
            candidate.fields["learned_sink"] = order.sink
        return True
    return False


def are_weights_of(scores: Tensor, weights: Tensor) -> bool:
    """True if weights are the softmax of all scores (…, Tk), perhaps after dropout."""
    if scores.shape[-1] != weights.shape[-1]:
        return False
    for order in _possible_orders(scores, weights):
        if compare_weights(scores, weights, order) is not None:
            return True
    return False


# Scores (3, 4, 14, 14) and weights
#     (3, 4, 14, 14)    the same order
#     (4, 3, 14, 14)    the axes 1 0 2 of the scores
#     (12, 14, 14)      axes were merged
#     (3, 4, 14, 13)    the last or the first column of the scores is a learned sink
def _possible_orders(scores: Tensor, weights: Tensor) -> Iterator[WeightsOrder]:
    """Yield the ways in which weights may be the softmax of scores, by their sizes."""
    columns = scores.shape[-1]
    rows = scores.numel() // columns
    extra = columns - weights.shape[-1]
    if extra not in (0, 1) or weights.numel() != rows * (columns - extra):
        return
    sinks: tuple[int | None, ...] = (None,)
    if extra:
        sinks = (columns - 1, 0)
    for sink in sinks:
        if weights.dim() != scores.dim():
            yield WeightsOrder(None, sink)
            continue
        for axes in permutations(range(scores.dim() - 1)):  # the unchanged order comes first
            sizes = tuple(scores.shape[axis] for axis in axes)
            if sizes == tuple(weights.shape[:-1]):
                yield WeightsOrder(axes, sink)


def compare_weights(scores: Tensor, weights: Tensor, order: WeightsOrder) -> Comparison | None:
    """Compare some rows of weights with the softmax of scores; None if they are something else."""
    # Differences and tolerances are relative to the largest probability of a row. Of 200 keys each
    # gets about 0.005, and an absolute tolerance of 0.03 would let everything pass.
    probabilities = _rows_of_softmax(scores, order.sink)  # (rows, Tk)
    actual = _same_rows_of_weights(scores, weights, order)  # (rows, Tk)
    # A row that sees no key has no numbers. If there is no other, nothing contradicts.
    has_numbers = probabilities.isfinite().all(dim=1)
    if not bool(has_numbers.any()):
        return Comparison(WEIGHTS_CHECK)
    # DeBERTa sets the rows of padded queries to 0.
    has_numbers &= (actual != 0).any(dim=1)
    if not bool(has_numbers.any()):
        return None
    coarser = _coarser(scores, weights)
    error = _error_of_rows(probabilities[has_numbers], actual[has_numbers], coarser)
    if error is None:
        return None
    return Comparison(WEIGHTS_CHECK, error)


def _rows_of_softmax(scores: Tensor, sink: int | None) -> Tensor:
    lead = scores.shape[:-1]
    numbers = spread_rows(prod(lead), scores.device)
    rows = wide(scores[torch.unravel_index(numbers, lead)]).softmax(dim=-1)  # (rows, columns)
    if sink is None:
        return rows
    return torch.cat([rows[:, :sink], rows[:, sink + 1 :]], dim=1)  # (rows, Tk)


def _same_rows_of_weights(scores: Tensor, weights: Tensor, order: WeightsOrder) -> Tensor:
    lead = scores.shape[:-1]
    numbers = spread_rows(prod(lead), scores.device)
    if order.axes is None:
        return wide(weights[torch.unravel_index(numbers, weights.shape[:-1])])
    places = torch.unravel_index(numbers, lead)
    return wide(weights[tuple(places[axis] for axis in order.axes)])


def _coarser(scores: Tensor, weights: Tensor) -> Tensor:
    """Return the tensor whose type has fewer bits."""
    if torch.finfo(scores.dtype).bits < torch.finfo(weights.dtype).bits:
        return scores
    return weights


# p = [0.5, 0.3, 0.2]:
#     w = [0.5, 0.3, 0.2]        the same: error 0
#     w = [0.625, 0, 0.25]       dropout at rate 0.2: what is left is 1.25 · p
#     w = [0.5, 0, 0.2]          a factor of 1: a mask after the softmax, something else
def _error_of_rows(probabilities: Tensor, actual: Tensor, coarser: Tensor) -> float | None:
    """Return the largest relative difference of rows (n, Tk), whole or dropped out.

    None if they are something else.
    """
    largest = probabilities.amax(dim=1, keepdim=True)  # (n, 1)
    tolerance = relative_tolerance(coarser) * largest  # (n, 1)
    if bool(((actual - probabilities).abs() <= tolerance).all()):
        return float(((actual - probabilities).abs() / largest).max())
    is_left = (actual != 0) & (probabilities > tolerance)
    if not bool(is_left.any()):
        return None
    factor = float((actual[is_left] / probabilities[is_left]).median())  # 1/(1 − rate)
    is_close = (actual - factor * probabilities).abs() <= factor * tolerance
    if factor <= MIN_DROPOUT_FACTOR or not bool((is_close | (actual == 0)).all()):
        return None
    relative = (actual / factor - probabilities).abs() / largest
    return float(torch.where(actual == 0, 0.0, relative).max())


def _query_axes_of_scores(
    scores: Tensor, weights: Tensor, order: WeightsOrder, query_axes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the axes of the scores that are the weights' axes without values."""
    if order.axes is not None:
        return tuple(order.axes[axis] for axis in query_axes)
    if query_axes != (weights.dim() - 2,):
        return ()
    # weights (3, 56, 14) of scores (3, 4, 14, 14): 56 = 14 · 4 are the axes 2 and 1
    merged_axes: list[int] = []
    for axis in reversed(range(scores.dim() - 1)):
        merged_axes.append(axis)
        merged_size = prod(scores.shape[merged] for merged in merged_axes)
        if merged_size == weights.shape[-2]:
            return tuple(merged_axes)
        if merged_size > weights.shape[-2]:
            return ()
    return ()
