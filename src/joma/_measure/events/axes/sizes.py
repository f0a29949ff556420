"""Read heads from sizes that leave one reading only, or from the user's word about them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from joma._measure.events.axes.layout import Axis

Heads = int | str  # a number of heads, or one of `ORDERS`
ORDERS = ("batch heads", "heads batch")


def axes_by_user(
    sizes: Sequence[int], heads: Heads, samples: int | None
) -> tuple[Axis, ...] | None:
    """Return the leading axes that the user's ``heads=`` describes; None if it does not decide."""
    large = _large_places(sizes)
    if isinstance(heads, int):
        return _axes_by_number(sizes, heads, large)
    is_heads_first = heads == "heads batch"
    # (4, 3), "heads batch": 4 heads, 3 samples
    if len(large) == 2:
        if is_heads_first:
            return _with_heads(sizes, large[:1])
        return _with_heads(sizes, large[1:])
    # (12,) of 3 samples, "heads batch": 4 heads outside, 3 samples inside
    if len(large) == 1 and samples is not None and sizes[large[0]] % samples == 0:
        merged = sizes[large[0]]
        axes = list(_with_heads(sizes, ()))
        axes[large[0]] = Axis(merged, merged // samples, is_heads_first)
        return tuple(axes)
    return None


def _axes_by_number(
    sizes: Sequence[int], heads: int, large: Sequence[int]
) -> tuple[Axis, ...] | None:
    # (4, 3), heads=4: the first axis holds the heads. (4, 4), heads=4: not decided.
    fitting = [place for place in large if sizes[place] == heads]
    if heads == 1 and not fitting:
        return _with_heads(sizes, ())
    if len(fitting) != 1:
        return None
    return _with_heads(sizes, fitting)


def axes_by_sizes(
    sizes: Sequence[int],
    samples: int | None,
    widths: Sequence[int] | None,
    shared_axis: int | None = None,
    is_windowed: bool = False,
) -> tuple[Axis, ...] | None:
    """Return the leading axes if their sizes leave one reading only; else None.

    Arguments:
        sizes: of the leading axes.
        samples: number of samples that the module was given; None if unknown.
        widths: of the projections' outputs, in units of d; None if there were none.
        shared_axis: an axis along which keys or masks are shared, as heads share them.
        is_windowed: True if there are fewer queries than tokens, so that samples may be merged with
            windows.
    """
    large = _large_places(sizes)
    # (1, 1): one sample of one head
    if not large:
        return _with_heads(sizes, ())
    # (3, 4) with keys (3, 2, …): two key heads serve four heads
    if shared_axis in large and len(large) == 2:
        assert shared_axis is not None
        return _with_heads(sizes, [shared_axis])
    if samples is None:
        return _axes_in_usual_order(sizes, large)
    sample_places = []
    other_places = []
    for place in large:
        if sizes[place] == samples:
            sample_places.append(place)
        else:
            other_places.append(place)
    # 4 samples: (4, 4) has two axes of that size
    if len(sample_places) > 1:
        return None
    # 3 samples: (12,) has none. Merged, but in which order?
    if not sample_places and samples != 1:
        return None
    if not other_places:
        return _axes_of_samples_alone(sizes, widths)
    if (
        is_windowed
        and sample_places
        and _may_be_windows(sizes, sample_places[0], other_places, widths)
    ):
        return None
    return _axes_by_widths(sizes, other_places, widths)


def _axes_in_usual_order(sizes: Sequence[int], large: Sequence[int]) -> tuple[Axis, ...] | None:
    """Read two axes of different sizes as (samples, heads), which nothing contradicts."""
    # (3, 4) of a module whose input is no sequence: samples, heads
    if len(large) == 2 and sizes[large[0]] != sizes[large[1]]:
        return _with_heads(sizes, large[1:])
    return None


def _axes_of_samples_alone(
    sizes: Sequence[int], widths: Sequence[int] | None
) -> tuple[Axis, ...] | None:
    """Read an axis as long as the batch as samples of one head, unless as many heads may exist."""
    # (3,) of 3 samples, widths (1,): samples of one head. Widths (3,): it may as well be the three
    # heads of one sample, in a loop over samples.
    (size,) = [size for size in sizes if size > 1]
    if widths is None or 1 in widths or not may_be_heads(size, widths):
        return _with_heads(sizes, ())
    return None


def _may_be_windows(
    sizes: Sequence[int],
    sample_place: int,
    other_places: Sequence[int],
    widths: Sequence[int] | None,
) -> bool:
    """True if an earlier axis may hold samples in windows, and the axis of "samples" heads."""
    # (9, 3) of 3 samples: 9 heads and 3 samples, or 3 samples in three windows each and 3 heads
    samples = sizes[sample_place]
    is_merged = any(place < sample_place and sizes[place] % samples == 0 for place in other_places)
    return is_merged and may_be_heads(samples, widths)


def _axes_by_widths(
    sizes: Sequence[int], other_places: Sequence[int], widths: Sequence[int] | None
) -> tuple[Axis, ...] | None:
    """Read as heads those axes, all or one of them, whose number of heads a projection can hold."""
    # (3, 4, 5) of 3 samples, widths (4,): 4 heads fit, 5 and 20 do not: samples, heads, windows.
    # (5, 6, 2) of 5 samples, widths (18,): queries, keys and values of 6 heads (3 · 6) in windows,
    # or 12 heads with 3 key heads (12 + 2 · 3): not decided.
    candidates: list[tuple[int, ...]] = [tuple(other_places)]
    if len(other_places) > 1:
        for place in other_places:
            candidates.append((place,))
    fitting = []
    for places in candidates:
        heads = prod(sizes[place] for place in places)
        if may_be_heads(heads, widths):
            fitting.append(places)
    if len(fitting) != 1:
        return None
    return _with_heads(sizes, fitting[0])


def may_be_heads(size: int, widths: Sequence[int] | None) -> bool:
    """True if a projection of one of these widths (in units of d) can hold so many heads."""
    # 4 heads fit widths of 4 (queries), 8 (with keys), 12 (with keys and values), and 4 + 2 · 2
    # (with keys and values of 2 heads)
    if widths is None:
        return True
    for width in widths:
        if width in (size, 2 * size, 3 * size):
            return True
        rest = width - size
        if rest > 0 and rest % 2 == 0 and size % (rest // 2) == 0:
            return True
    return False


def _large_places(sizes: Sequence[int]) -> list[int]:
    """Return the places of axes longer than 1, the only ones that need a meaning."""
    return [place for place, size in enumerate(sizes) if size > 1]


def _with_heads(sizes: Sequence[int], head_places: Collection[int]) -> tuple[Axis, ...]:
    """Return axes of samples, with heads at some places."""
    axes = []
    for place, size in enumerate(sizes):
        heads = 1
        if place in head_places:
            heads = size
        axes.append(Axis(size, heads))
    return tuple(axes)
