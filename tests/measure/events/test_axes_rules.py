"""The rules by which axes are decided, each by itself."""

from __future__ import annotations

import pytest
import torch

from joma._measure.events.axes.projections import RecordedProjection
from joma._measure.events.axes.sizes import axes_by_sizes, may_be_heads
from joma._measure.events.axes.values import find_queries

T, D, H = 14, 32, 4
SIZE = D // H


@pytest.mark.parametrize(
    ("sizes", "samples", "widths", "heads"),
    [
        ((3, 4), 3, (4,), (1, 4)),
        ((4, 3), 3, (4,), (4, 1)),
        ((3, 4), 3, (8,), (1, 4)),  # grouped: 4 + 2·2
        ((3, 4), 3, (5,), None),  # no projection has 4 heads
        ((4, 4), 4, (4,), None),  # as many samples as heads
        ((12,), 3, (4,), None),  # merged, in an order that sizes do not show
        ((3,), 3, (1,), (1,)),  # one head
        ((3, 4, 16), 3, (12,), (1, 4, 1)),  # windows
        ((3, 2, 3), 3, (6,), None),  # 6 heads in groups, or 2 or 3 heads in windows
        ((3, 2, 2), 3, (4,), None),  # 4 heads, or queries and keys of 2 heads in windows
        (
            (5, 6, 2),
            5,
            (18,),
            None,
        ),  # 6 heads in windows: 3·6; or 12 heads with 3 key heads: 12 + 2·3
    ],
)
def test_sizes_decide_only_if_they_leave_one_reading(sizes, samples, widths, heads):
    axes = axes_by_sizes(sizes, samples, widths)
    assert (None if axes is None else tuple(axis.heads for axis in axes)) == heads


def test_which_numbers_of_heads_a_projection_may_hold():
    assert [n for n in range(1, 13) if may_be_heads(n, (12,))] == [
        4,
        6,
        8,
        10,
        12,
    ]  # 3·4, 2·6, 8 + 2·2, 10 + 2·1


def test_equal_rows_of_padding_do_not_hide_the_heads():
    """Padding gives the same row at many positions: the slice is the same one, and only that counts."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3, T, D, generator=generator)
    y[1, 3:] = y[1, 3]
    queries = y.unflatten(-1, (H, SIZE)).permute(2, 0, 1, 3).flatten(0, 1)  # (heads · batch, T, d)
    found = find_queries(queries, 1, [RecordedProjection(None, y)])
    assert found is not None
    (axis,) = found.axes
    assert (axis.size, axis.heads, axis.has_heads_first) == (3 * H, H, True)
