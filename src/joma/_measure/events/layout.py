"""Which axes of an attention are samples, heads, queries and keys.

In p·V, keys are what is summed over. An axis of p that V does not have is an axis of queries; where there are several
(groups of heads that share keys and values have none of their own in V either), the one as long as the module's input
is that of the queries. The other axes are samples, heads, or windows and blocks of tokens, which count as samples. What
they are is decided by the first of these that gives an answer:

1.  the user (``heads=``);
2.  values: queries that are found again in what the projections gave (`joma._measure.events.evidence`);
3.  sizes that leave one reading only (`by_sizes`).

If none does, the layer is reported without heads: its mean over samples, heads and queries is right all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor

from joma._measure.events.events import Call
from joma._measure.events.evidence import Axis, Projection, find_queries, found_as_columns
from joma._measure.events.reasons import Reason, Refusal

Heads = (
    int | str
)  # how many heads, or the order of the leading axes: "batch heads" or "heads batch"
ORDERS = ("batch heads", "heads batch")


class AxesEvidence(Enum):
    """What shows which axes are heads; the value is how `joma.explain` words it."""

    FUNCTION = "certain from the function"
    USER = "the user's heads="
    VALUES = "found in the projection's output"
    SIZES = "by sizes"
    NOTHING = "nothing decides"


@dataclass(frozen=True)
class Layout:
    """How a tensor (any axes, one of them queries; keys or channels last) becomes (B, H, Tq, …).

    Attributes:
        axes: what the leading axes are, in their order, that of the queries left out.
        query_axis: where that one is.
        certain: is it certain which are heads? If not, all leading axes count as samples, and there is one "head".
        share: of the queries that the module could attend with, how many it does attend with.
        evidence: what decided the axes.
    """

    axes: tuple[Axis, ...]
    query_axis: int
    certain: bool = True
    share: float = 1.0
    evidence: AxesEvidence = field(default=AxesEvidence.FUNCTION, compare=False)

    @property
    def heads(self) -> int:
        """H"""
        return prod(axis.heads for axis in self.axes)

    @property
    def is_plain(self) -> bool:
        """Are the axes (samples, heads, queries, …) already?"""
        if len(self.axes) != 2 or self.query_axis != 2:
            return False
        samples, heads = self.axes
        return samples.heads == 1 and heads.heads == heads.size

    def __call__(self, tensor: Tensor) -> Tensor:
        """(B, H, Tq, …)

        Worked example: scores (12, 14, 14) with 4 heads outside become (4, 3, 14, 14), then (3, 4, 14, 14).
        """
        if self.is_plain:
            return tensor
        sizes: list[int] = []
        samples: list[int] = []
        heads: list[int] = []
        meanings = iter(self.axes)
        query = 0
        for place in range(tensor.dim() - 1):
            if place == self.query_axis:
                query = len(sizes)
                sizes.append(tensor.shape[place])
                continue
            axis = next(meanings)
            parts = [(samples, axis.size // axis.heads), (heads, axis.heads)]
            for places, size in reversed(parts) if axis.heads_first else parts:
                places.append(len(sizes))
                sizes.append(size)
        split = tensor.reshape(*sizes, tensor.shape[-1])
        moved = split.permute(*samples, *heads, query, len(sizes))
        return moved.reshape(-1, self.heads, tensor.shape[self.query_axis], tensor.shape[-1])

    def resized(self, shape: Sequence[int]) -> Layout | None:
        """The same for other sizes (axes without the last); None if the number of heads would be another one."""
        sizes = [size for place, size in enumerate(shape) if place != self.query_axis]
        if len(sizes) != len(self.axes):
            return None
        axes = []
        for axis, size in zip(self.axes, sizes, strict=True):
            only_heads = axis.heads == axis.size and axis.heads > 1
            if size % axis.heads or (only_heads and size != axis.size):
                return None
            axes.append(Axis(size, axis.heads, axis.heads_first))
        return Layout(tuple(axes), self.query_axis, self.certain, self.share, self.evidence)


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two activations, as `torch.einsum` or as matrices."""

    operands: tuple[Tensor, ...]
    labels: (
        tuple[str, ...] | None
    )  # of the operands' axes, and of the output's; None for a product of matrices
    output: Tensor
    is_einsum: bool = False

    @classmethod
    def of(cls, function: Any, output: Any, args: tuple[Any, ...]) -> Product | None:
        """What a function that multiplies was given; None if that is not two tensors."""
        flat = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args
        tensors = tuple(
            a for a in (args[:1] if flat is not args else ()) + tuple(flat) if isinstance(a, Tensor)
        )
        if function in (torch.baddbmm, Tensor.baddbmm):
            tensors = tensors[1:]
        if len(tensors) != 2 or min(t.dim() for t in tensors) < 2 or not isinstance(output, Tensor):
            return None
        if function is not torch.einsum:
            return cls(tensors, None, output)
        if not isinstance(args[0], str):
            return None
        return cls(tensors, _labels(args[0], tensors, output), output, is_einsum=True)

    def weights(self) -> list[tuple[Tensor, Tensor, tuple[int, ...]]]:
        """Return operands that may be attention, each with the other operand and the axes that one lacks.

        Keys are the axis that is summed over; it is moved to the end. Weights may stand on either
        side: p @ v, or v @ p.mT with channels first.
        """
        a, b = self.operands
        if self.labels is None and self.is_einsum:
            return []
        if self.labels is None:
            return [(a, b, (a.dim() - 2,)), (b.mT, a.mT, (b.dim() - 2,))]
        *given, out = self.labels
        candidates = []
        for n, (labels, others) in enumerate(zip(given, reversed(given), strict=True)):
            summed = [label for label in labels if label in others and label not in out]
            if len(summed) != 1 or len(set(labels)) != len(labels):
                continue
            keys = labels.index(summed[0])
            rest = labels[:keys] + labels[keys + 1 :]
            alone = tuple(axis for axis, label in enumerate(rest) if label not in others)
            candidates.append((self.operands[n].movedim(keys, -1), self.operands[1 - n], alone))
        return candidates

    @property
    def summed(self) -> int | None:
        """Size of the axis that is summed over; None if there are several."""
        if self.labels is None:
            return None if self.is_einsum else self.operands[0].shape[-1]
        first, second, out = self.labels
        axes = [axis for axis, label in enumerate(first) if label in second and label not in out]
        return self.operands[0].shape[axes[0]] if len(axes) == 1 else None

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of the output's axes that come from one operand alone."""
        if self.labels is None:
            return () if self.is_einsum else tuple(self.output.shape[-2:])
        first, second, out = self.labels
        return tuple(
            size
            for label, size in zip(out, self.output.shape, strict=True)
            if (label in first) != (label in second)
        )

    def queries(self, shape: Sequence[int], dim: int) -> Tensor | None:
        """The queries (…, d) of scores of this shape that were normalised along ``dim``; None if that is not clear.

        The axes are those of the scores without the one of the keys, in their order.
        """
        out = self.output
        keys = dim % len(shape)
        same_axes = len(shape) == out.dim() and all(
            size == out.shape[axis] for axis, size in enumerate(shape) if axis != keys
        )
        if same_axes:
            return self._queries(keys)
        if keys == len(shape) - 1 and prod(shape[:-1]) == prod(out.shape[:-1]):
            queries = self._queries(out.dim() - 1)  # axes were merged or split on the way
            return None if queries is None else queries.reshape(*shape[:-1], queries.shape[-1])
        return None

    def projected(self, parameter: int) -> Tensor:
        """The output of a product with a parameter, with all the axes that the parameter gives it as one, the last.

        Worked example: "tbd,dhk->tbhk" gives (T, B, H, k); it becomes (T, B, H · k).
        """
        if self.labels is None:
            return self.output
        *given, out = self.labels
        others = given[1 - parameter]
        first = [axis for axis, label in enumerate(out) if label in others]
        last = [axis for axis, label in enumerate(out) if label not in others]
        return self.output.permute(*first, *last).flatten(len(first)) if last else self.output

    def keys(self, shape: Sequence[int], dim: int, query_axis: int) -> Tensor | None:
        """Return the keys (…, d) of scores with queries along an axis (that of keys left out); None if unclear."""
        keys = dim % len(shape)
        axis = query_axis if query_axis < keys else query_axis + 1
        if len(shape) == self.output.dim():
            return self._queries(axis)
        if keys == len(shape) - 1 and axis == len(shape) - 2:
            return self._queries(self.output.dim() - 2)
        return None

    def _queries(self, key_axis: int) -> Tensor | None:
        first, second = self.operands
        lead = self.output.shape[:-2]
        if self.labels is None and self.is_einsum:
            return None
        if self.labels is None:
            if key_axis == self.output.dim() - 1:
                return first.expand(*lead, *first.shape[-2:])
            if key_axis == self.output.dim() - 2:
                return second.transpose(-1, -2).expand(*lead, second.shape[-1], second.shape[-2])
            return None
        *given, out = self.labels
        key = out[key_axis]
        holders = [n for n, labels in enumerate(given) if key in labels]
        summed = [label for label in given[0] if label in given[1] and label not in out]
        if len(holders) != 1 or len(summed) != 1:
            return None
        operand, labels = self.operands[1 - holders[0]], given[1 - holders[0]]
        wanted = [label for label in out if label != key]
        present = [label for label in wanted if label in labels]
        if len(set(labels)) != len(labels) or len(present) + 1 != len(labels):
            return None
        moved = operand.permute(*(labels.index(label) for label in (*present, summed[0])))
        for place, label in enumerate(wanted):
            if label not in labels:
                moved = moved.unsqueeze(place)
        sizes = [self.output.shape[out.index(label)] for label in wanted]
        return moved.expand(*sizes, moved.shape[-1])


def _labels(equation: str, operands: tuple[Tensor, ...], output: Tensor) -> tuple[str, ...] | None:
    """One letter per axis of the operands and of the output; digits stand for what "..." does."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    given = left.split(",")
    if len(given) != len(operands):
        return None
    if not arrow:  # the output has the letters that occur once, in alphabetical order
        letters = left.replace(",", "").replace(".", "")
        right = "..." * ("..." in left) + "".join(
            sorted(x for x in letters if letters.count(x) == 1)
        )
    sides = []
    for text, tensor in zip((*given, right), (*operands, output), strict=True):
        hidden = tensor.dim() - len(text.replace("...", ""))
        sides.append(text.replace("...", "".join(chr(0x2460 + n) for n in reversed(range(hidden)))))
    return tuple(sides)


def which_query_axis(shape: Sequence[int], query_axes: tuple[int, ...], call: Call) -> int | None:
    """Return the axis of the queries, of scores (shape …, Tk) whose queries are along one of ``query_axes``.

    None if sizes do not decide. Keys that heads share have no axis of heads either. They have one of
    samples, so samples must fit into the other axes: of a module that was given (4, 14, d), scores
    (4, 4, 14, Tk) with shared axes (4,) have 14 queries; 4 queries of 14 samples would need a shared
    axis of 14.
    """
    if len(query_axes) == 1:
        return query_axes[0]
    tokens = _tokens(call, shape)
    states = call.states
    if states is not None and states.dim() == 3:
        shared = prod(size for axis, size in enumerate(shape) if axis not in query_axes)
        B, T = states.shape[:2]
        possible = [length for length, samples in ((T, B), (B, T)) if shared % samples == 0]
        tokens = tuple(possible) or tokens
    fitting = [axis for axis in query_axes if shape[axis] in tokens]
    return fitting[0] if len(fitting) == 1 else None


def query_axis_by_values(
    queries: Tensor | None, query_axes: tuple[int, ...], projections: Sequence[Projection]
) -> int | None:
    """Return the axis along which queries are tokens, not heads; None if values do not decide."""
    if queries is None:
        return None
    fitting = []
    for axis in query_axes:
        found = find_queries(queries, axis, projections)
        if found is not None and not found.slices_along_queries:
            fitting.append(axis)
    return fitting[0] if len(fitting) == 1 else None


def decide_layout(
    queries: Tensor | None, shape: Sequence[int], query_axis: int, keys: int, calls: Sequence[Call],
    projections: Sequence[Projection], heads: Heads | None = None, shared_over: int | None = None,
) -> Layout:  # fmt: skip
    """Decide what the axes of queries or scores are.

    Arguments:
        queries: (shape …, d), if they are there.
        shape: all axes but the last one.
        query_axis: which of them is that of the queries.
        keys: how many keys there are.
        calls: the modules that are running, the innermost last.
        projections: what modules in them gave before.
        heads: the user's word.
        shared_over: an axis along which keys or masks are shared, as they are by heads.
    """
    sizes = [size for axis, size in enumerate(shape) if axis != query_axis]
    stated = None if heads is None else by_user(sizes, heads, _samples(calls, shape[query_axis]))
    if stated is not None:
        return Layout(stated, query_axis, evidence=AxesEvidence.USER)
    if queries is not None:
        found = find_queries(queries, query_axis, projections)
        if found is not None and found.slices_along_queries:
            raise Refusal(
                Reason.SWAPPED_AXES,
                f"it attends over {shape[query_axis]} heads at each of {max(sizes)} tokens, not over tokens: "
                "are two axes swapped?",
            )
        if found is not None and not _has_too_many_samples(found.axes, shape, query_axis, calls):
            return Layout(found.axes, query_axis, share=found.share, evidence=AxesEvidence.VALUES)
        check_over_tokens(queries, query_axis, keys, calls, projections)
    check_not_swapped(calls[-1], sizes, shape[query_axis], keys)
    widths = None if queries is None else _widths(projections, queries.shape[-1])
    is_windowed = shape[query_axis] not in _tokens(calls[-1], shape)
    axes = by_sizes(sizes, _samples(calls, shape[query_axis]), widths, shared_over, is_windowed)
    if axes is not None:
        return Layout(axes, query_axis, evidence=AxesEvidence.SIZES)
    samples = tuple(Axis(size, 1) for size in sizes)
    return Layout(samples, query_axis, certain=False, evidence=AxesEvidence.NOTHING)


def _has_too_many_samples(
    axes: Sequence[Axis], shape: Sequence[int], query_axis: int, calls: Sequence[Call]
) -> bool:
    """True if the axes would hold more samples than the module was given, though its queries are all its tokens.

    Worked examples: 2 of 4 experts project the queries of 2 heads each (JetMoe). Along the 4 heads, slices are 0 1 0 1:
    that looks like two windows of 2 heads, but there are no windows. In bfloat16 the queries of 4 heads may all look
    like slice 0, that is, like 4 · B samples of one head; there are B samples.
    """
    samples = _samples(calls, shape[query_axis])
    if samples is None or shape[query_axis] not in _tokens(calls[-1], shape):
        return False
    return prod(axis.size // axis.heads for axis in axes) > samples


def by_user(sizes: Sequence[int], heads: Heads, samples: int | None) -> tuple[Axis, ...] | None:
    """What the user says; None if it does not decide.

    Worked example: of sizes (4, 3), ``heads=4`` means (heads, samples). Of sizes (12,) with 3 samples, "heads batch"
    means 4 heads outside.
    """
    large = [place for place, size in enumerate(sizes) if size > 1]
    axes = [Axis(size, 1) for size in sizes]
    if isinstance(heads, int):
        fitting = [place for place in large if sizes[place] == heads]
        if heads == 1 and not fitting:
            return tuple(axes)
        if len(fitting) != 1:
            return None
        axes[fitting[0]] = Axis(heads, heads)
        return tuple(axes)
    heads_first = heads == "heads batch"
    if len(large) == 2:
        place = large[0] if heads_first else large[1]
        axes[place] = Axis(sizes[place], sizes[place])
        return tuple(axes)
    if len(large) == 1 and samples is not None and sizes[large[0]] % samples == 0:
        size = sizes[large[0]]
        axes[large[0]] = Axis(size, size // samples, heads_first)
        return tuple(axes)
    return None


def by_sizes(
    sizes: Sequence[int], samples: int | None, widths: Sequence[int] | None, shared_over: int | None = None,
    is_windowed: bool = False,
) -> tuple[Axis, ...] | None:  # fmt: skip
    """What the leading axes are if their sizes leave one reading only; None if they do not.

    Worked examples, with 3 samples and a query projection of 4 · d channels:
        (3, 4): samples, heads.         (4, 3): heads, samples.         (3,): samples of one head, not 3 of 4 heads.
        (3, 4, 5): neither 5 · d nor 20 · d is the width of a projection, and 4 · d is: samples, heads, windows.
        (12,): merged, but in which order? Not decided. With 4 samples, (4, 4): not decided.

    Arguments:
        widths: of the projections' outputs, in units of d; None if none were seen.
        shared_over: an axis along which keys or masks are shared, as they are by heads.
        is_windowed: are there fewer queries than tokens, so that samples may be merged with windows?
    """
    large = [place for place, size in enumerate(sizes) if size > 1]
    axes = [Axis(size, 1) for size in sizes]

    def with_heads(*places: int) -> tuple[Axis, ...]:
        return tuple(
            Axis(axis.size, axis.size) if n in places else axis for n, axis in enumerate(axes)
        )

    if not large:
        return tuple(axes)
    batch = [place for place in large if sizes[place] == samples]
    others = [place for place in large if place not in batch]
    if samples == 1:
        batch = []
    if shared_over in large and len(large) == 2:
        return with_heads(shared_over)
    if len(batch) > 1 or (not batch and samples not in (1, None)):
        return None
    if not batch and samples is None:  # nothing contradicts the usual order
        return (
            with_heads(large[1]) if len(large) == 2 and sizes[large[0]] != sizes[large[1]] else None
        )
    if not others:
        alone = not may_be_heads(sizes[batch[0]], widths) or widths is None or 1 in widths
        return tuple(axes) if alone else None
    # (9, 3) with 3 samples: heads and samples, or samples in three windows each, and 3 heads
    is_merged = (
        any(place < batch[0] and sizes[place] % sizes[batch[0]] == 0 for place in others)
        if batch
        else False
    )
    if is_windowed and is_merged and may_be_heads(sizes[batch[0]], widths):
        return None
    # a projection of 18 · d may hold the queries of 12 heads with 3 key heads, or of 6 heads in each of two windows
    candidates: list[tuple[int, ...]] = [tuple(others)]
    if len(others) > 1:
        candidates += [(place,) for place in others]
    fitting = [
        places for places in candidates if may_be_heads(prod(sizes[n] for n in places), widths)
    ]
    return with_heads(*fitting[0]) if len(fitting) == 1 else None


def may_be_heads(size: int, widths: Sequence[int] | None) -> bool:
    """Can a projection of one of these widths (in units of d) hold the queries of so many heads?

    Alone, with keys, with keys and values, or with those of fewer heads: 4 fits widths of 4, 8, 12 and 4 + 2 · 2.
    """
    if widths is None:
        return True
    for width in widths:
        rest = width - size
        grouped = rest > 0 and rest % 2 == 0 and size % (rest // 2) == 0
        if width in (size, 2 * size, 3 * size) or grouped:
            return True
    return False


def check_over_tokens(
    queries: Tensor,
    query_axis: int,
    keys: int,
    calls: Sequence[Call],
    projections: Sequence[Projection],
) -> None:
    """Refuse attention over channels: "queries" of T numbers each, which are one channel at all T tokens."""
    tokens = _tokens(calls[-1], queries.shape[:-1]) or _pixels(calls[-1])
    over_channels = (
        queries.shape[-1] in tokens and queries.shape[query_axis] == keys and keys not in tokens
    )
    if over_channels or found_as_columns(queries, query_axis, projections):
        raise Refusal(
            Reason.CHANNELS,
            f"it attends over {keys} channels, each of which has a number at each of {queries.shape[-1]} tokens, "
            "not over tokens",
        )


def check_not_swapped(call: Call, sizes: Sequence[int], queries: int, keys: int) -> None:
    """Refuse attention over heads instead of tokens, where sizes show it: (B, T, H, H) instead of (B, H, T, T)."""
    tokens = _tokens(call, (*sizes, queries))
    if not tokens or queries in tokens or queries != keys:
        return
    if sizes and sizes[-1] in tokens:
        raise Refusal(
            Reason.SWAPPED_AXES,
            f"it attends over {queries} heads at each of {sizes[-1]} tokens, not over tokens: are two axes swapped?",
        )


def _widths(projections: Sequence[Projection], d: int) -> tuple[int, ...] | None:
    """The widths of the projections' outputs, in units of d; None if there are no projections."""
    if not projections:
        return None
    channels = [projection.positions.shape[-1] for projection in projections]
    return tuple(width // d for width in channels if width % d == 0)


def _samples(calls: Sequence[Call], queries: int) -> int | None:
    """How many samples the innermost module with an input (B, T, d), (T, B, d) or (B, …) was given; None if unknown."""
    for call in reversed(calls):
        states = call.states
        if states is not None and states.dim() == 3:
            first, second = states.shape[:2]
            return second if first == queries != second else first
    for call in reversed(calls):
        if call.states is not None and call.states.dim() > 3 and call is not calls[-1]:
            return call.states.shape[0]
    states = calls[-1].states
    return None if states is None or states.dim() != 4 else states.shape[0]


def _pixels(call: Call) -> tuple[int, ...]:
    """How many tokens an image (B, C, X, Y) or (B, X, Y, C) has; () if the module was given none."""
    states = call.states
    if states is None or states.dim() != 4:
        return ()
    return (states.shape[2] * states.shape[3], states.shape[1] * states.shape[2])


def _tokens(call: Call, sizes: Sequence[int]) -> tuple[int, ...]:
    """How many tokens the module was given, (B, T, d), or (T, B, d) if an axis fits that batch; () if unknown."""
    states = call.states
    if states is None or states.dim() != 3:
        return ()
    B, T = states.shape[:2]
    return (T, B) if T != B and any(size % T == 0 for size in sizes if size != B) else (T,)


def in_pieces(call: Call, shape: Sequence[int], query_axis: int) -> bool:
    """True if there are fewer queries than tokens; ``shape`` has all axes but that of the keys."""
    states = call.states
    if states is None or states.dim() != 3:
        return False
    B, T = states.shape[:2]
    others = prod(size for axis, size in enumerate(shape) if axis != query_axis)
    lengths = [tokens for tokens, samples in ((T, B), (B, T)) if others % samples == 0]
    return shape[query_axis] not in (lengths or (T, B)) and shape[query_axis] < T


def token_counts(calls: Sequence[Call]) -> set[int]:
    """Return sizes that may be numbers of tokens: the first two axes of the innermost modules' inputs."""
    counts: set[int] = set()
    for call in calls[-2:]:
        if call.states is not None and call.states.dim() == 3:
            counts.update(call.states.shape[:2])
    return counts
