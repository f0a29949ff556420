"""Decide which leading axes are samples and which are heads: the first rule that answers wins.

In p·V, keys are the axis that is summed over. An axis of p that V does not have is an axis of
queries; if there are several (heads that share keys and values have no axis in V either), sizes and
values decide in `find_query_axis`. The other axes are samples, heads, or windows and blocks of
tokens, which count as samples. `RULES` decides about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from joma._measure.events.axes.inputs import (
    lengths_that_fit,
    pixel_counts,
    sample_count,
    sequence_sizes,
    token_counts,
)
from joma._measure.events.axes.layout import NO_EVIDENCE, AxesEvidence, Axis, Layout
from joma._measure.events.axes.projections import RecordedProjection
from joma._measure.events.axes.sizes import Heads, axes_by_sizes, axes_by_user
from joma._measure.events.axes.values import QueryOrigin, are_channels, find_queries
from joma._measure.events.reasons import Reason, Refusal

if TYPE_CHECKING:
    from joma._measure.events.events import Call


@dataclass(frozen=True, eq=False)
class AxesQuestion:
    """An attention whose leading axes are to be decided.

    Attributes:
        queries: (shape …, d); None if they were not seen.
        shape: all axes of the queries or scores but the last.
        query_axis: the axis of queries among them.
        key_count: number of keys.
        calls: the running modules, the innermost last.
        projections: outputs of modules that ran inside them before.
        stated_heads: the user's ``heads=``.
        shared_axis: an axis along which keys or masks are shared, as heads share them and samples
            never do.
    """

    queries: Tensor | None
    shape: tuple[int, ...]
    query_axis: int
    key_count: int
    calls: Sequence[Call]
    projections: Sequence[RecordedProjection]
    stated_heads: Heads | None = None
    shared_axis: int | None = None

    @property
    def call(self) -> Call:
        """The module that attends."""
        return self.calls[-1]

    @property
    def query_count(self) -> int:
        """Number of queries."""
        return self.shape[self.query_axis]

    @property
    def sizes(self) -> list[int]:
        """Sizes of the leading axes."""
        return [*self.shape[: self.query_axis], *self.shape[self.query_axis + 1 :]]

    @cached_property
    def samples(self) -> int | None:
        """Number of samples that the module was given; None if unknown."""
        return sample_count(self.calls, self.query_count)

    @cached_property
    def attends_with_all_tokens(self) -> bool:
        """True if there are as many queries as the module was given tokens."""
        return self.query_count in token_counts(self.call, self.shape)

    @property
    def widths(self) -> tuple[int, ...] | None:
        """Widths of the projections' outputs in units of d; None without queries or projections."""
        if self.queries is None or not self.projections:
            return None
        size = self.queries.shape[-1]
        widths = [projection.width for projection in self.projections]
        return tuple(width // size for width in widths if width % size == 0)


AxesRule = Callable[[AxesQuestion], Layout | None]


def decide_layout(question: AxesQuestion) -> Layout:
    """Return the first answer of a rule; a `Refusal` is raised if attention is not over tokens."""
    for rule in RULES:
        layout = rule(question)
        if layout is not None:
            return layout
    # The mean over samples, heads and queries is right without knowing which axis is which.
    axes = tuple(Axis(size, 1) for size in question.sizes)
    return Layout(axes, question.query_axis, is_certain=False, evidence=NO_EVIDENCE)


# heads=4 and scores (4, 3, 14, 14): axis 0 holds the heads, whatever else the sizes may mean.
def heads_stated_by_user(question: AxesQuestion) -> Layout | None:
    """Follow the user's ``heads=``, if it fits."""
    if question.stated_heads is None:
        return None
    axes = axes_by_user(question.sizes, question.stated_heads, question.samples)
    if axes is None:
        return None
    evidence = AxesEvidence("the user's heads=", f"heads={question.stated_heads!r} with the sizes")
    return Layout(axes, question.query_axis, evidence=evidence)


# y (3, 14, 32) and queries (3, 4, 14, 8): along axis 0 the queries are slice 2 of y everywhere,
# along axis 1 they are the slices 0 1 2 3: axis 1 holds the heads.
def heads_found_in_projection(question: AxesQuestion) -> Layout | None:
    """Find the queries again in the output of a projection; heads are its slices."""
    if question.queries is None:
        return None
    origin = find_queries(question.queries, question.query_axis, question.projections)
    if origin is None:
        return None
    if origin.slices_along_queries:
        raise _swapped_axes(question.query_count, max(question.sizes))
    if _has_too_many_samples(origin, question):
        return None
    evidence = AxesEvidence("found in the projection's output", origin.compared, origin.tolerance)
    return Layout(origin.axes, question.query_axis, share=origin.share, evidence=evidence)


def _has_too_many_samples(origin: QueryOrigin, question: AxesQuestion) -> bool:
    """True if there would be more samples than the module has, though all of its tokens attend."""
    # JetMoe: 2 of 4 experts project the queries of 2 heads each. Along the 4 heads the slices are
    #     0 1 0 1
    # which looks like two windows of 2 heads. But all 14 tokens attend, so there are no windows.
    # In bfloat16, the queries of 4 heads may all look like slice 0, as 4 · B samples of one head
    # would. There are only B samples.
    if question.samples is None or not question.attends_with_all_tokens:
        return False
    return prod(axis.samples for axis in origin.axes) > question.samples


# XCiT: x (3, 14, 32) and "queries" (3, 4, 8, 14), of which each has one number per token.
def refuse_channels(question: AxesQuestion) -> None:
    """Refuse attention of channels to channels."""
    queries = question.queries
    if queries is None:
        return
    channel_size = queries.shape[-1]
    tokens = token_counts(question.call, queries.shape[:-1]) or pixel_counts(question.call)
    is_one_number_per_token = channel_size in tokens
    attends_over_other_things = question.key_count not in tokens
    is_square = question.query_count == question.key_count
    is_over_channels = is_one_number_per_token and is_square and attends_over_other_things
    if is_over_channels or are_channels(queries, question.query_axis, question.projections):
        raise Refusal(
            Reason.CHANNELS,
            f"it attends over {question.key_count} channels, each of which has a number at each of "
            f"{channel_size} tokens, not over tokens",
        )


# x (3, 14, 32) and scores (3, 14, 4, 4) instead of (3, 4, 14, 14): 4 heads attend to 4 heads at
# each token.
def refuse_swapped_axes(question: AxesQuestion) -> None:
    """Refuse attention of heads to heads, where the sizes show it."""
    sizes = question.sizes
    tokens = token_counts(question.call, (*sizes, question.query_count))
    is_square = question.query_count == question.key_count
    if not tokens or question.query_count in tokens or not is_square:
        return
    if sizes and sizes[-1] in tokens:
        raise _swapped_axes(question.query_count, sizes[-1])


def _swapped_axes(heads: int, tokens: int) -> Refusal:
    return Refusal(
        Reason.SWAPPED_AXES,
        f"it attends over {heads} heads at each of {tokens} tokens, not over tokens: "
        "are two axes swapped?",
    )


# x (3, 14, 32) and scores (4, 3, 14, 14): 3 is the batch, and a projection of 32 = 4 · 8 numbers
# holds 4 heads: axis 0 holds the heads. Scores (12, 14, 14) may be 3 · 4 or 4 · 3: not decided.
def heads_by_sizes(question: AxesQuestion) -> Layout | None:
    """Read the heads from sizes, if they leave one reading only."""
    is_windowed = not question.attends_with_all_tokens
    axes = axes_by_sizes(
        question.sizes, question.samples, question.widths, question.shared_axis, is_windowed
    )
    if axes is None:
        return None
    compared = f"sizes with {question.samples} samples and projections of {question.widths} heads"
    return Layout(axes, question.query_axis, evidence=AxesEvidence("by sizes", compared))


RULES: tuple[AxesRule, ...] = (
    heads_stated_by_user,
    heads_found_in_projection,
    refuse_channels,
    refuse_swapped_axes,
    heads_by_sizes,
)


def find_query_axis(
    shape: Sequence[int],
    possible_axes: tuple[int, ...],
    call: Call,
    queries: Callable[[], Tensor | None] | None,
    projections: Sequence[RecordedProjection],
) -> int | None:
    """Return which of ``possible_axes`` of scores (shape …, Tk) holds queries; None if unclear."""
    axis = _query_axis_by_sizes(shape, possible_axes, call)
    if axis is not None or queries is None:
        return axis
    return _query_axis_by_values(queries(), possible_axes, projections)


# Scores (4, 3, 14, Tk) with heads that share their keys have two axes without values, 3 and 14. The
# module was given (4, 14, d), so the one of 14 holds the queries.
def _query_axis_by_sizes(
    shape: Sequence[int], possible_axes: tuple[int, ...], call: Call
) -> int | None:
    """Return the possible axis that is as long as the module's input."""
    if len(possible_axes) == 1:
        return possible_axes[0]
    tokens = token_counts(call, shape)
    input_sizes = sequence_sizes(call)
    if input_sizes is not None:
        # Heads share keys, samples do not, so the other axes must hold the samples. Input
        # (4, 14, d), scores (4, 4, 14, Tk), possible axes 1 and 2: with 14 queries there are 4
        # samples, as long as axis 0. With 4 queries there would be 14 samples, and no axis is left.
        others = prod(size for axis, size in enumerate(shape) if axis not in possible_axes)
        tokens = lengths_that_fit(input_sizes, others) or tokens
    return _only([axis for axis in possible_axes if shape[axis] in tokens])


# y (4, 4, 32) and queries (4, 4, 4, 8): along the axis of tokens, a query stays in its slice of y;
# along that of heads the slices are 0 1 2 3.
def _query_axis_by_values(
    queries: Tensor | None,
    possible_axes: tuple[int, ...],
    projections: Sequence[RecordedProjection],
) -> int | None:
    """Return the possible axis along which queries are found to be tokens, not heads."""
    if queries is None:
        return None
    fitting = []
    for axis in possible_axes:
        origin = find_queries(queries, axis, projections)
        if origin is not None and not origin.slices_along_queries:
            fitting.append(axis)
    return _only(fitting)


def _only(axes: Sequence[int]) -> int | None:
    if len(axes) == 1:
        return axes[0]
    return None
