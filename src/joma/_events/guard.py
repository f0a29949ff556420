"""The one guard: an attention is an event only if it is what its module computed.

When a module's attention is first seen, and whenever its shapes change, a few rows of softmax(s)·V are worked out again
and compared with what the call itself gave. The softmax of eager attention is held until its product with the values
is seen, which tells its axes; what is never multiplied, or is changed on the way (differential attention, heads that
are mixed, weights that are normalised again), is refused with that reason. So is a module whose numbers would be a
mixture: of blocks of one sequence, or of a loop over heads or samples. From then on a module of the same shapes is
taken as found, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._events.aside import exactly
from joma._events.events import Attention, Call, DotProduct, Scores
from joma._events.layout import Layout, Product, Unclear, in_pieces, layout_of

if TYPE_CHECKING:
    from joma._events.source import Source

_ROWS = 16  # of each attention that are worked out again
# how far apart the two may be, relative to the largest value: rounding of the type, and of kernels that use TF32
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
_LOW = 3e-2  # of 16-bit types
_NO_PRODUCT = (
    "a softmax of scores {scores} is not multiplied with values as it is (used for something else, or changed before: "
    "a difference of two, heads that are mixed, a second normalisation): no attention that can be measured"
)
_NO_SOFTMAX = (
    "its scores {scores} are multiplied with values, but without a softmax function (exp and sum by hand, a sigmoid, "
    "no normalisation): use torch.softmax or scaled_dot_product_attention"
)

Key = tuple[Any, ...]  # shapes: of the attention, and of what its module was given


@dataclass(eq=False)
class Seen:
    """An attention of a module call, until it is known to be right.

    ``fields`` are those of the event; those of an eager one are brought to (B, H, Tq, Tk) by ``layout``.
    """

    kind: type[Attention]
    call: Call
    calls: tuple[Call, ...]
    key: Key
    keys: Tensor | None = field(repr=False)  # held, as values are, so that no other tensor gets their memory
    fields: dict[str, Any] = field(repr=False)
    replay: Callable[[], Tensor] | None = None  # the output without dropout, if there was dropout
    ordinal: int = 0  # which of the attentions in this call of the module
    values: Tensor | None = field(default=None, repr=False)
    layout: Layout | None = None
    reason: str | None = None

    @property
    def known(self) -> bool:
        """Is there nothing more to wait for?"""
        return self.layout is not None or self.kind is DotProduct or self.reason is not None

    @property
    def queries(self) -> int:
        """Tq"""
        if self.layout is None:
            return int(self.fields["query"].shape[2])
        return int(self.fields["scores"].shape[self.layout.order[-2]])

    def event_fields(self) -> dict[str, Any]:
        """The fields of the event."""
        if self.layout is None:
            return self.fields
        tensors = {name: self.layout(value) for name, value in self.fields.items() if isinstance(value, Tensor)}
        return self.fields | tensors


@dataclass(frozen=True)
class _Verdict:
    key: Key
    layout: Layout | None
    learned_sink: int | None
    reason: str | None


class Guard:
    """Decides what becomes an event.

    Attributes:
        kernels: module -> shapes of a kernel that cannot be looked into, and which keys it was found to see.
        set_aside: module -> why a softmax in it was taken for something else than attention.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.set_aside: dict[str, str] = {}
        self.kernels: dict[str, tuple[Any, str]] = {}
        self._verdicts: dict[tuple[str, int], _Verdict] = {}  # (module, which of the attentions in one call of it)

    def sees(self, seen: Seen) -> None:
        """An attention; an event at once if this module was found right with these shapes before."""
        seen.ordinal = seen.call.attentions
        seen.call.attentions += 1
        verdict = self._verdicts.get((seen.call.name, seen.ordinal))
        if verdict is None or verdict.key != seen.key:
            seen.call.held.append(seen)
        elif verdict.reason is None:
            seen.layout = verdict.layout
            if verdict.learned_sink is not None:
                seen.fields["learned_sink"] = verdict.learned_sink
            self._emit(seen)

    def multiplied(self, product: Product) -> None:
        """A product of two activations: the one that an eager attention waits for, or one that has no softmax."""
        with exactly(product.output.device.type):
            self._multiplied(product)

    def _multiplied(self, product: Product) -> None:
        for weights, values, query_axes in product.weights():
            for call in reversed(self.source.running):
                for seen in call.held:
                    if not seen.known and _matches(seen, weights, query_axes):
                        seen.values = values
                        return
            call = self.source.running[-1]
            scored = weights.numel() in call.products and weights.dim() > 2
            if scored and not call.attentions and values.shape[-2] == weights.shape[-1]:
                reason = _NO_SOFTMAX.format(scores=tuple(weights.shape))
                self.set_aside.setdefault(call.name, reason)

    def settle(self, call: Call, parent: Call | None) -> None:
        """A module call came to its end: what is known of it is decided, what is not goes to the module around it."""
        held, call.held = call.held, []
        for seen in held:
            if not seen.known and parent is not None:
                parent.held.append(seen)
            elif not seen.known:
                seen.reason = _NO_PRODUCT.format(scores=tuple(seen.fields["scores"].shape))
        decided = [seen for seen in held if seen.known]
        for owner in dict.fromkeys(seen.call for seen in decided):
            self._decide(owner, [seen for seen in decided if seen.call is owner])

    def _decide(self, owner: Call, attentions: list[Seen]) -> None:
        reason = _mixture(attentions)
        for seen in attentions:
            if reason is None and seen.reason is None and seen.kind is DotProduct:
                with self.source.guarded(owner):
                    seen.reason = disagreement(seen)
            why = reason or seen.reason
            sink = seen.fields.get("learned_sink")
            self._verdicts[owner.name, seen.ordinal] = _Verdict(seen.key, seen.layout, sink, why)
            if why is not None:
                self._refuse(seen, why)
            else:
                self._emit(seen)

    def _refuse(self, seen: Seen, reason: str) -> None:
        states = seen.call.states
        tokens = states.shape[1] if states is not None and states.dim() == 3 else None
        keys = seen.fields["scores"].shape[-1] if seen.kind is Scores else tokens
        if seen.kind is Scores and seen.layout is None and tokens is not None and keys not in (tokens, tokens + 1):
            self.set_aside.setdefault(seen.call.name, reason)  # as of a router or a classifier
        else:
            self.source.refuse(seen.call, seen.calls, reason)

    def _emit(self, seen: Seen) -> None:
        self.source.emit_attention(seen.kind, seen.call, seen.calls, seen.ordinal, seen.event_fields())


def _mixture(attentions: list[Seen]) -> str | None:
    """Why several attentions in one call of a module cannot be layers of their own, if so."""
    if len(attentions) < 2:
        return None
    known = [seen for seen in attentions if seen.reason is None]
    for n, seen in enumerate(known):
        if in_pieces(seen.call, seen.queries):
            return f"it attends in {len(attentions)} pieces, {seen.queries} queries in one of them"
        for other in known[:n]:
            if seen.key == other.key and _same_memory(seen.keys, other.keys) and not _same(seen.values, other.values):
                return (
                    f"it computes {len(attentions)} attentions in one call, in a loop over heads or samples: it cannot "
                    "be told which; compute them as one"
                )
    return None


def _same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.data_ptr() == b.data_ptr()


def _matches(seen: Seen, weights: Tensor, query_axes: tuple[int, ...]) -> bool:
    """Are these the weights that the softmax gave (after dropout maybe)? Then its layout is known, or why not."""
    scores: Tensor = seen.fields["scores"]  # keys last
    columns = scores.shape[-1]
    rows = scores.numel() // columns
    extra = columns - weights.shape[-1]  # a learned sink that was left out again
    if extra not in (0, 1) or weights.numel() != rows * (columns - extra):
        return False
    for axes, sink in _ways(scores, weights, extra):
        if not _same_rows(scores, weights, axes, sink):
            continue
        try:
            seen.layout = layout_of(scores, _query_axes(scores, weights, axes, query_axes), seen.call)
        except Unclear as error:
            seen.reason = str(error)
        if sink is not None:
            seen.fields["learned_sink"] = sink
        return True
    return False


def _ways(scores: Tensor, weights: Tensor, extra: int) -> Iterator[tuple[tuple[int, ...] | None, int | None]]:
    """How weights may be the scores' softmax: the axis of the scores that each of theirs is (None: rows in the same
    order, axes merged or split), and the column that was left out."""
    lead = tuple(range(scores.dim() - 1))
    for sink in (scores.shape[-1] - 1, 0) if extra else (None,):
        if weights.dim() != scores.dim():
            yield None, sink
            continue
        for order in permutations(lead):  # the order that they have first
            if all(weights.shape[n] == scores.shape[axis] for n, axis in enumerate(order)):
                yield order, sink


def _same_rows(scores: Tensor, weights: Tensor, axes: tuple[int, ...] | None, sink: int | None) -> bool:
    """Are some rows of ``weights`` the softmax of those of the scores, whole or with dropout?"""
    lead = scores.shape[:-1]
    rows = scores.numel() // scores.shape[-1]
    chosen = torch.linspace(0, rows - 1, min(rows, _ROWS), device=scores.device).long()
    at = torch.unravel_index(chosen, lead)
    p = scores[at].float().softmax(dim=-1)  # (rows, Tk)
    if sink is not None:
        p = torch.cat([p[:, :sink], p[:, sink + 1 :]], dim=1)
    theirs = torch.unravel_index(chosen, weights.shape[:-1]) if axes is None else tuple(at[axis] for axis in axes)
    w = weights[theirs].float()
    number = p.isfinite().all(dim=1)  # a row that sees no key has none
    if not bool(number.any()):
        return True  # nothing to tell by: what is not a number will show
    p, w = p[number], w[number]
    tolerance = _tolerance(weights)
    if bool(((w - p).abs() <= tolerance).all()):
        return True
    kept = (w != 0) & (p > tolerance)
    if not bool(kept.any()):
        return False
    factor = float((w[kept] / p[kept]).median())  # 1/(1 − rate)
    return factor > 1 and bool(((w - factor * p).abs()[w != 0] <= factor * tolerance).all())


def _query_axes(
    scores: Tensor, weights: Tensor, axes: tuple[int, ...] | None, query_axes: tuple[int, ...]
) -> tuple[int, ...]:
    """The axes of the scores that are the weights' axes without values."""
    if axes is not None:
        return tuple(axes[n] for n in query_axes)
    last = scores.dim() - 2
    if len(query_axes) == 1 and query_axes[0] == weights.dim() - 2:
        size = weights.shape[-2]
        axes_merged: list[int] = []
        for axis in range(last, -1, -1):  # one axis of the scores, or several that were merged
            axes_merged.append(axis)
            if (merged := _size(scores, axes_merged)) >= size:
                return tuple(axes_merged) if merged == size else ()
    return ()


def _size(scores: Tensor, axes: list[int]) -> int:
    size = 1
    for axis in axes:
        size *= scores.shape[axis]
    return size


def _tolerance(tensor: Tensor) -> float:
    return _TOLERANCE.get(tensor.dtype, _LOW)


def disagreement(seen: Seen) -> str | None:
    """Why what was computed is not the attention of these queries, keys and values, if so."""
    with exactly(seen.fields["query"].device.type):
        event = DotProduct(call=seen.call, calls=seen.calls, **seen.fields)
        output = event.output if seen.replay is None else seen.replay()
        b = event.query.shape[0] - 1
        Tq = event.query.shape[2]
        queries = torch.linspace(0, Tq - 1, min(Tq, _ROWS), device=event.query.device).long()
        p = event.rows(b, queries)  # (H, P, Tk)
        value = event.value[b].float()
        value = value.repeat_interleave(p.shape[0] // value.shape[0], dim=0)
        given = output[b][:, queries].float()
        number = p.isfinite().all(dim=-1, keepdim=True) & given.isfinite()
        number &= (given != 0).any(dim=-1, keepdim=True)  # kernels that leave padding out give 0 there
        apart = torch.where(number, (p @ value - given).abs(), 0.0).max() if given.numel() else torch.zeros(())
        scale = float(value.abs().max()) if value.numel() else 0.0
    if float(apart) <= _tolerance(event.output) * max(scale, 1e-6) or scale != scale:
        return None
    return (
        f"its output is not softmax(s)·V of its queries, keys and mask: they differ by {float(apart):.2g}, with values "
        f"up to {scale:.2g}"
    )
