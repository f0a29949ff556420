"""Numbers of samples and tokens that a module was given, read from the shape of its input.

An input is (B, T, d) in most libraries, (T, B, d) in some, and (B, C, X, Y) or (B, X, Y, C) for
images.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from joma._measure.events.events import Call


def sequence_sizes(call: Call) -> tuple[int, int] | None:
    """Return the first two sizes of an input (B, T, d) or (T, B, d); None if it has other axes."""
    states = call.states
    if states is None or states.dim() != 3:
        return None
    return states.shape[0], states.shape[1]


def sample_count(calls: Sequence[Call], query_count: int) -> int | None:
    """Return the number of samples of the innermost module that shows it; None if none does."""
    # input (14, 3, 32) and 14 queries: (T, B, d), 3 samples; input (3, 14, 32): 3 samples
    for call in reversed(calls):
        sizes = sequence_sizes(call)
        if sizes is not None:
            first, second = sizes
            if first == query_count != second:
                return second
            return first
    # an image: of a module around the attention first, since the attention may see windows of it as
    # samples
    for call in reversed(calls[:-1]):
        if call.states is not None and call.states.dim() > 3:
            return call.states.shape[0]
    states = calls[-1].states
    if states is None or states.dim() != 4:
        return None
    return states.shape[0]


def token_counts(call: Call, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of tokens that a module may have been given; () if unknown.

    ``sizes`` are the axes of the queries or scores.
    """
    # input (3, 14, 32), scores (3, 4, 14, …): 14 tokens. If one axis other than 3 were a multiple
    # of 14, such as 56 = 14 · 4, the 14 might be samples and the 3 tokens: (14, 3).
    input_sizes = sequence_sizes(call)
    if input_sizes is None:
        return ()
    first, second = input_sizes
    if first != second and any(size % second == 0 for size in sizes if size != first):
        return (second, first)
    return (second,)


def pixel_counts(call: Call) -> tuple[int, ...]:
    """Return the numbers of pixels of an image (B, C, X, Y) or (B, X, Y, C); () without one."""
    states = call.states
    if states is None or states.dim() != 4:
        return ()
    return (states.shape[2] * states.shape[3], states.shape[1] * states.shape[2])


def possible_token_counts(calls: Sequence[Call]) -> set[int]:
    """Return all sizes that may be numbers of tokens, of the two innermost modules."""
    counts: set[int] = set()
    for call in calls[-2:]:
        counts.update(sequence_sizes(call) or ())
    return counts


def attends_in_pieces(call: Call, shape: Sequence[int], query_axis: int) -> bool:
    """True if there are fewer queries than tokens; ``shape`` has all axes but that of the keys."""
    # input (2, 64, 32), scores (2, 4, 16, …): 16 of 64 tokens, a piece of the sequence
    input_sizes = sequence_sizes(call)
    if input_sizes is None:
        return False
    first, second = input_sizes
    others = prod((*shape[:query_axis], *shape[query_axis + 1 :]))
    lengths = lengths_that_fit(input_sizes, others) or (second, first)
    return shape[query_axis] not in lengths and shape[query_axis] < second


def lengths_that_fit(input_sizes: tuple[int, int], others: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which ``others``, all other axes, can hold the samples."""
    # input (3, 14, d): 14 tokens if `others` is a multiple of 3 samples, 3 tokens if it is a
    # multiple of 14
    first, second = input_sizes
    lengths = []
    if others % first == 0:
        lengths.append(second)
    if others % second == 0:
        lengths.append(first)
    return tuple(lengths)
