"""The one guard: an attention is an event only if it is what its module computed.

When a module's attention is first seen, whenever its shapes change, and now and then afterwards, a few rows of
softmax(s)·V are worked out again and compared with what the call itself gave. The softmax of eager attention is held
until its product with the values is seen, which tells its axes; what is never multiplied, or is changed on the way
(differential attention, heads that are mixed, weights that are normalised again), is refused with that reason. So is a
module whose numbers would be a mixture: of blocks of one sequence, or of a loop over heads or samples. In between, a
module of the same shapes is taken as found, at no cost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._measure.events.aside import exactly
from joma._measure.events.axes import (
    AxesQuestion,
    Layout,
    RecordedProjection,
    attends_in_pieces,
    come_from_same_tokens,
    decide_layout,
    find_query_axis,
    possible_token_counts,
)
from joma._measure.events.events import AttentionEvent, Call, DotProduct, Scores, wide
from joma._measure.events.facts import AttentionFacts, refused_facts
from joma._measure.events.products import Product
from joma._measure.events.reasons import Reason, Refusal

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

_ROWS = 16  # of each attention that are worked out again
# A module is looked at again in its measurements 2, 4, 8, 16, 32, … and then in every 16th: what it computes may change
# in training (heads that begin to be mixed), and one look takes about as long as a layer norm.
_LOOK_EVERY = 16
# how far apart two numbers may be, relative to the largest one of those compared: rounding of the type, and of kernels
# that use TF32
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
_LOW = 3e-2  # of 16-bit types
# 1/(1 − rate) from which zeros count as dropout. A factor of 1 means a mask after the softmax.
_LEAST_FACTOR = 1.002
_NO_PRODUCT = (
    "a softmax of scores {scores} is not multiplied with values as it is (used for something else, or changed before: "
    "a difference of two, heads that are mixed, a second normalisation): no attention that can be measured"
)
_NO_SOFTMAX = (
    "its scores {scores} are multiplied with values, but without a softmax function (exp and sum by hand, a sigmoid, "
    "no normalisation, a kernel of its own): use torch.softmax or scaled_dot_product_attention"
)
_LINEAR = (
    "it multiplies keys with values first, and queries with the sum (linear attention): no softmax over keys is "
    "computed, so there is no distribution over tokens"
)
_NOT_DOT_PRODUCT = (
    "its weights {scores} are a softmax, but not of a product of queries and keys (outlook, additive or synthetic "
    "attention)"
)
_CHUNKS = (
    "its softmax is over scores {scores}, and its products of two activations are {products}: it attends in chunks or "
    "sliding blocks; watch it with full attention, if it has that option"
)

OUTPUT_CHECK = "output against softmax(s)·V"
WEIGHTS_CHECK = "weights against softmax(s)"
FUNCTION_CHECK = "certain from the function"

Key = tuple[Any, ...]  # shapes: of the attention, and of what its module was given


@dataclass(eq=False)
class Seen:
    """An attention of a module call, until it is known to be right.

    ``fields`` are those of the event, with the axes that the module gave them; ``layout`` brings them to (B, H, Tq, …).
    """

    kind: type[AttentionEvent]
    call: Call
    calls: tuple[Call, ...]
    key: Key
    keys: Tensor | None = field(
        repr=False
    )  # held, as values are, so that no other tensor gets their memory
    fields: dict[str, Any] = field(repr=False)
    replay: Callable[[int], Tensor] | None = (
        None  # the output (H, Tq, dv) of a sample without dropout, if there was some
    )
    ordinal: int = 0  # which of the attentions in this call of the module
    values: Tensor | None = field(default=None, repr=False)
    queries: Callable[[], Tensor | None] | None = field(
        default=None, repr=False
    )  # (axes of the scores …, d)
    query_axis: int | None = None
    projections: tuple[RecordedProjection, ...] = field(default=(), repr=False)
    is_self: bool | None = None  # do queries and keys come from the same tokens?
    key_rows: Callable[[int], Tensor | None] | None = field(
        default=None, repr=False
    )  # axis of queries -> keys (…, d)
    layout: Layout | None = None
    refusal: Refusal | None = None
    backend: str = ""  # the function that computes it
    check: str = ""  # how it was verified
    difference: float | None = None  # found by that, relative to the largest number compared
    is_new: bool = False  # was it not examined with these shapes before?

    @property
    def known(self) -> bool:
        """Is there nothing more to wait for?"""
        return self.query_axis is not None or self.refusal is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """All axes of the queries or scores but the last."""
        tensor = self.fields["query" if self.kind is DotProduct else "scores"]
        return tuple(tensor.shape[:-1])

    @property
    def key_count(self) -> int:
        """How many keys a query may see."""
        fields = self.fields
        return int(
            fields["key"].shape[-2] if self.kind is DotProduct else fields["scores"].shape[-1]
        )

    def event_fields(self) -> dict[str, Any]:
        """The fields of the event."""
        assert self.layout is not None
        if self.layout.is_plain:
            return self.fields
        if self.kind is Scores:
            tensors = {
                name: self.layout(value)
                for name, value in self.fields.items()
                if isinstance(value, Tensor)
            }
            return self.fields | tensors
        return self.fields | _arranged(self.fields, self.layout)


def _arranged(fields: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Queries, keys, values, mask and output of a fused attention, whatever their axes, as (B, H, T, …)."""
    query: Tensor = fields["query"]
    lead = query.shape[:-2]
    arranged: dict[str, Any] = {
        "query": layout(query),
        "output": layout(fields["output"]),
        "gqa": False,
    }
    for name in ("key", "value"):
        tensor: Tensor = fields[name]
        groups = lead[-1] // tensor.shape[-3] if fields["gqa"] else 1
        if groups > 1:
            tensor = tensor.repeat_interleave(groups, dim=-3)
        arranged[name] = layout(tensor.expand(*lead, *tensor.shape[-2:]))
    mask: Tensor | None = fields["mask"]
    if mask is not None:
        arranged["mask"] = layout(mask.expand(*lead, query.shape[-2], fields["key"].shape[-2]))
    return arranged


@dataclass(frozen=True)
class _Verdict:
    key: Key
    layout: Layout | None
    is_self: bool | None
    learned_sink: int | None
    refusal: Refusal | None


class Guard:
    """Decides what becomes an event.

    Attributes:
        kernels: module -> shapes of a kernel that cannot be looked into, and which keys it was found to see.
        set_aside: module -> why a softmax in it was taken for something else than attention.
        without_heads: modules whose axis of heads is not certain.
        shares: module -> the share of its queries that it attends with, if that is not all of them.
        facts: (module, which of the attentions in one call of it) -> what was found when it was examined.
        collects: are the outputs of projections wanted, to learn the axes of an attention from?
        is_new: was no pass seen yet?
    """

    def __init__(self, source: EventSource) -> None:
        self.source = source
        self.set_aside: dict[str, str] = {}
        self.kernels: dict[str, tuple[Any, str]] = {}
        self.without_heads: list[str] = []
        self.shares: dict[str, float] = {}
        self.facts: dict[tuple[str, int], AttentionFacts] = {}
        self.collects = True
        self.is_new = True
        self._codes: dict[str, Reason] = {}  # of what was set aside
        self._verdicts: dict[
            tuple[str, int], _Verdict
        ] = {}  # (module, which of the attentions in one call of it)
        self._looks: Counter[tuple[str, int]] = Counter()  # how often an attention was seen

    def sees(self, seen: Seen) -> None:
        """An attention; an event at once if this module was found right with these shapes before."""
        seen.ordinal = seen.call.attentions
        if not seen.call.attentions:
            seen.call.ran_before = len(self.source.ran)
        seen.call.attentions += 1
        place = (seen.call.name, seen.ordinal)
        verdict = self._verdicts.get(place)
        if verdict is None or verdict.key != seen.key or self._is_due(place):
            if self.collects:
                seen.projections = _projections(seen.calls)
            seen.call.held.append(seen)
            if seen.kind is DotProduct:
                seen.call.examined.append(seen)
                seen.call.followed.append(seen.fields["output"])
        elif verdict.refusal is None:
            seen.layout = verdict.layout
            seen.is_self = verdict.is_self
            if verdict.learned_sink is not None:
                seen.fields["learned_sink"] = verdict.learned_sink
            self._emit(seen)

    def _is_due(self, place: tuple[str, int]) -> bool:
        """Count a measurement of an attention; True if it is one to look at again."""
        self._looks[place] += 1
        count = self._looks[place] + 1  # the first one made the verdict
        return count % _LOOK_EVERY == 0 or count & (count - 1) == 0

    def multiplied(self, product: Product) -> None:
        """A product of two activations: the one that an eager attention waits for, or one that has no softmax."""
        with exactly(product.output.device.type):
            self._multiplied(product)

    def _multiplied(self, product: Product) -> None:
        for operand in product.weights_candidates():
            weights, values, query_axes = operand.weights, operand.values, operand.query_axes
            for call in reversed(self.source.running):
                for seen in call.held:
                    if not seen.known and _matches(seen, weights, query_axes):
                        seen.values = values
                        seen.call.examined.append(seen)
                        self.source.running[-1].followed.append(product.output)
                        return
        call = self.source.running[-1]
        if not call.attentions and self._codes.get(call.name) is not Reason.LINEAR:
            self._set_aside_product(call, product)

    def normalised(self, scores: Tensor) -> None:
        """Remember the scores (…, Tk) of a softmax that is over no product of its size."""
        call = self.source.running[-1]
        call.softmaxes.append(scores.detach())
        rows = scores[..., 0].numel()
        states = call.states
        if not call.products or scores.dim() < 3 or states is None:
            return
        if rows % max(1, states[..., 0].numel()):  # not as many rows for each token
            return
        shapes = dict.fromkeys(
            str(tuple(product.output.shape)) for product in call.products.values()
        )
        reason = _CHUNKS.format(scores=tuple(scores.shape), products=", ".join(shapes))
        self._set_aside(call, Reason.CHUNKS, reason)

    def _set_aside_product(self, call: Call, product: Product) -> None:
        """Keep why a product that no attention waits for is not one of weights and values."""
        if self._set_aside_linear(call, product.operands):
            return
        for operand in product.weights_candidates():
            weights, values = operand.weights, operand.values
            if weights.dim() < 3:
                continue
            if any(_are_weights(scores, weights) for scores in call.softmaxes):
                reason = _NOT_DOT_PRODUCT.format(scores=tuple(weights.shape))
                self._set_aside(call, Reason.NOT_DOT_PRODUCT, reason)
            elif weights.numel() in call.products and weights.shape[-1] in values.shape[-2:]:
                reason = _NO_SOFTMAX.format(scores=tuple(weights.shape))
                self._set_aside(call, Reason.NO_SOFTMAX, reason)

    def contracted(self, operands: Sequence[Tensor]) -> None:
        """Look at a product of three and more activations, which attention has no use for."""
        call = self.source.running[-1]
        if not call.attentions:
            self._set_aside_linear(call, operands)

    def _set_aside_linear(self, call: Call, operands: Sequence[Tensor]) -> bool:
        """True if one operand is a product that was summed over tokens, as keys times values is."""
        tokens = possible_token_counts(self.source.running)
        for operand in operands:
            earlier = call.products.get(operand.numel())
            if (
                earlier is None
                or earlier.summed_size is None
                or earlier.summed_size < 2
                or not earlier.outer_sizes
            ):
                continue
            sums_tokens = any(count % earlier.summed_size == 0 for count in tokens)
            if sums_tokens and not any(
                size in (*tokens, earlier.summed_size) for size in earlier.outer_sizes
            ):
                self._set_aside(call, Reason.LINEAR, _LINEAR)
                return True
        return False

    def _set_aside(self, call: Call, reason: Reason, message: str) -> None:
        """Keep why no attention is seen in a module.

        The first cause stays, but linear attention explains products that seem to be something else.
        """
        if call.name not in self.set_aside or reason is Reason.LINEAR:
            self.set_aside[call.name] = str(Refusal(reason, message))
            self._codes[call.name] = reason

    def settle(self, call: Call, parent: Call | None) -> None:
        """A module call came to its end: what is known of it is decided, what is not goes to the module around it."""
        held, call.held = call.held, []
        if parent is not None and next(call.module.parameters(), None) is None:
            # a module around a kernel: what is made of its output is seen in the module around it
            parent.held += held
            parent.examined += call.examined
            parent.followed += call.followed
            parent.combined |= call.combined
            return
        for seen in held:
            if not seen.known and parent is not None:
                parent.held.append(seen)
            elif not seen.known:
                shape = tuple(seen.fields["scores"].shape)
                seen.refusal = Refusal(Reason.NO_PRODUCT, _NO_PRODUCT.format(scores=shape))
        decided = [seen for seen in held if seen.known]
        for owner in dict.fromkeys(seen.call for seen in decided):
            self._decide(owner, call, [seen for seen in decided if seen.call is owner])

    def _decide(self, owner: Call, outer: Call, attentions: list[Seen]) -> None:
        """Decide on the attentions of one module.

        ``outer`` is that module, or the one around a module without parameters.
        """
        differences = (_is_difference(seen, outer) for seen in attentions)
        refusal = next(filter(None, differences), None) or _mixture(attentions)
        for seen in attentions:
            why = refusal or seen.refusal or self._examine(seen)
            sink = seen.fields.get("learned_sink")
            self._note_difference(seen)
            self._verdicts[owner.name, seen.ordinal] = _Verdict(
                seen.key, seen.layout, seen.is_self, sink, why
            )
            if why is not None:
                self._refuse(seen, why)
            else:
                self._emit(seen)

    def _note_difference(self, seen: Seen) -> None:
        """Keep the largest difference of an attention that was examined with these shapes before."""
        place = (seen.call.name, seen.ordinal)
        earlier = self._verdicts.get(place)
        facts = self.facts.get(place)
        seen.is_new = (
            facts is None or facts.refusal is not None or earlier is None or earlier.key != seen.key
        )
        if facts is not None and not seen.is_new and seen.difference is not None:
            self.facts[place] = replace(facts, error=max(facts.error or 0.0, seen.difference))

    def _examine(self, seen: Seen) -> Refusal | None:
        """Settle the axes of an attention, and compare it with what its module computed; the reason to refuse it."""
        try:
            with exactly(seen.fields["query" if seen.kind is DotProduct else "scores"].device.type):
                if seen.layout is None:
                    seen.layout = self._layout(seen)
                if seen.is_self is None:
                    seen.is_self = self._is_self(seen)
                return disagreement(seen) if seen.kind is DotProduct else None
        except Refusal as refusal:
            return refusal
        except Exception as error:
            return Refusal(
                Reason.UNCHECKED,
                "it could not be compared with softmax(s)·V of its queries, keys and values "
                f"({type(error).__name__}: {str(error)[:120]})",
            )

    def _layout(self, seen: Seen) -> Layout:
        """The axes: as found before, if the sizes allow it, else by the evidence."""
        assert seen.query_axis is not None
        name = seen.call.name
        earlier = self._verdicts.get((name, seen.ordinal))
        if (
            earlier is not None
            and earlier.layout is not None
            and earlier.layout.query_axis == seen.query_axis
        ):
            resized = earlier.layout.resized(seen.shape)
            if resized is not None:
                return resized
        tensor = seen.fields["query" if seen.kind is DotProduct else "scores"]
        queries = None if seen.queries is None else seen.queries()
        keys = seen.fields["key"].shape[-2] if seen.kind is DotProduct else tensor.shape[-1]
        layout = decide_layout(
            AxesQuestion(
                queries,
                seen.shape,
                seen.query_axis,
                keys,
                seen.calls,
                seen.projections,
                stated_heads=self.source.heads_of(name),
                shared_axis=_shared_axis(seen),
            )
        )
        if not layout.certain and name not in self.without_heads:
            self.without_heads.append(name)
        if layout.share < 1:
            self.shares[name] = layout.share
        return layout

    def _is_self(self, seen: Seen) -> bool:
        """Whether queries and keys come from the same tokens: as found before, else by the evidence."""
        earlier = self._verdicts.get((seen.call.name, seen.ordinal))
        if earlier is not None and earlier.is_self is not None:
            return earlier.is_self
        assert seen.query_axis is not None
        queries = None if seen.queries is None else seen.queries()
        keys = None if seen.key_rows is None else seen.key_rows(seen.query_axis)
        return come_from_same_tokens(queries, keys, seen.call, seen.projections)

    def _refuse(self, seen: Seen, refusal: Refusal) -> None:
        states = seen.call.states
        tokens = states.shape[1] if states is not None and states.dim() == 3 else None
        keys = seen.fields["scores"].shape[-1] if seen.kind is Scores else tokens
        unsettled = seen.kind is Scores and refusal.reason is Reason.NO_PRODUCT
        if unsettled and tokens is not None and keys not in (tokens, tokens + 1):
            self.set_aside.setdefault(
                seen.call.name, str(refusal)
            )  # as of a router or a classifier
        else:
            self.facts[seen.call.name, seen.ordinal] = refused_facts(seen, refusal)
            self.source.refuse(seen.call, seen.calls, refusal)

    def _emit(self, seen: Seen) -> None:
        self.source.emit_attention(seen)


def _projections(calls: tuple[Call, ...]) -> tuple[RecordedProjection, ...]:
    """What modules gave so far, in the three innermost modules that are running; the latest last."""
    return tuple(projection for call in calls[-3:] for projection in call.projections)


def _shared_axis(seen: Seen) -> int | None:
    """An axis of fused queries along which keys or a mask are shared, as they are by heads and never by samples.

    Keys of fewer heads are shared along the last leading axis. So is a mask (B, 1, Tq, Tk).
    """
    if seen.kind is not DotProduct or seen.fields["query"].dim() != 4:
        return None
    query, key, mask = seen.fields["query"], seen.fields["key"], seen.fields["mask"]
    if query.shape[0] == key.shape[0] and key.shape[1] < query.shape[1]:
        return 1
    if (
        mask is not None
        and mask.dim() == 4
        and mask.shape[1] == 1 < query.shape[1]
        and mask.shape[0] > 1
    ):
        return 1
    return None


def _is_difference(seen: Seen, outer: Call) -> Refusal | None:
    """Refuse maps that share values but not keys, if ``outer`` combines their outputs."""
    value, key = seen.values, seen.keys
    if not outer.combined or value is None or key is None or value.dim() < 3 or key.dim() < 3:
        return None
    refusal = Refusal(
        Reason.DIFFERENCE,
        "two attention maps over the same values are combined (a difference of two?): what the module attends to is "
        "neither of them",
    )
    H = value.shape[-3]
    if H % 2 == 0 and key.shape[-3] == H:
        # the two maps of a head stand in the two halves of the heads, or next to one another
        halves = (slice(None, H // 2), slice(H // 2, None))
        neighbours = (slice(None, None, 2), slice(1, None, 2))
        for first, second in (halves, neighbours):
            if torch.equal(value[..., first, :, :], value[..., second, :, :]):
                return (
                    None if torch.equal(key[..., first, :, :], key[..., second, :, :]) else refusal
                )
    others = [other for other in outer.examined if other is not seen and _same(other.values, value)]
    return refusal if any(not _same(other.keys, seen.keys) for other in others) else None


def _mixture(attentions: list[Seen]) -> Refusal | None:
    """Why several attentions in one call of a module cannot be layers of their own, if so."""
    if len(attentions) < 2:
        return None
    known = [seen for seen in attentions if seen.refusal is None]
    for n, seen in enumerate(known):
        assert seen.query_axis is not None
        queries = seen.shape[seen.query_axis]
        if attends_in_pieces(seen.call, seen.shape, seen.query_axis):
            return Refusal(
                Reason.PIECES,
                f"it attends in {len(attentions)} pieces, {queries} queries in one of them (blocks of the sequence, "
                "landmarks); watch it with full attention, if it has that option",
            )
        for other in known[:n]:
            if (
                seen.key == other.key
                and _same_memory(seen.keys, other.keys)
                and not _same(seen.values, other.values)
            ):
                return Refusal(
                    Reason.LOOP,
                    f"it computes {len(attentions)} attentions in one call, in a loop over heads or samples: it cannot "
                    "be told which; compute them as one",
                )
    return None


def _same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    return (
        a is not None
        and b is not None
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.data_ptr() == b.data_ptr()


def _matches(seen: Seen, weights: Tensor, query_axes: tuple[int, ...]) -> bool:
    """Are these the weights that the softmax gave, perhaps after dropout? Then the axis of queries is known."""
    scores: Tensor = seen.fields["scores"]  # keys last
    columns = scores.shape[-1]
    rows = scores.numel() // columns
    extra = columns - weights.shape[-1]  # a learned sink that was left out again
    if extra not in (0, 1) or weights.numel() != rows * (columns - extra):
        return False
    for axes, sink in _ways(scores, weights, extra):
        difference = _row_difference(scores, weights, axes, sink)
        if difference is None:
            continue
        seen.check = WEIGHTS_CHECK
        seen.difference = None if math.isnan(difference) else difference
        along = _query_axes(scores, weights, axes, query_axes)
        seen.query_axis = find_query_axis(
            seen.shape, along, seen.call, seen.queries, seen.projections
        )
        if seen.query_axis is None:
            seen.refusal = Refusal(
                Reason.QUERY_AXIS,
                f"it is not clear which axis of its scores {(*scores.shape[:-1], '…')} is that of the queries",
            )
        if sink is not None:
            seen.fields["learned_sink"] = sink
        return True
    return False


def _are_weights(scores: Tensor, weights: Tensor) -> bool:
    """True if weights are the softmax of scores (…, Tk), perhaps after dropout."""
    if scores.shape[-1] != weights.shape[-1] or scores.numel() != weights.numel():
        return False
    ways = _ways(scores, weights, 0)
    return any(_row_difference(scores, weights, axes, sink) is not None for axes, sink in ways)


def _ways(
    scores: Tensor, weights: Tensor, extra: int
) -> Iterator[tuple[tuple[int, ...] | None, int | None]]:
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


def _row_difference(
    scores: Tensor, weights: Tensor, axes: tuple[int, ...] | None, sink: int | None
) -> float | None:
    """Return how far some rows of ``weights`` are from the softmax of the scores, whole or with dropout.

    None if they are something else, NaN if no row has numbers. The difference and tolerances are relative to the
    largest probability of a row: of 200 keys each gets about 0.005, and an absolute tolerance of 0.03 would let
    everything pass.
    """
    lead = scores.shape[:-1]
    rows = scores.numel() // scores.shape[-1]
    chosen = torch.linspace(0, rows - 1, min(rows, _ROWS), device=scores.device).long()
    at = torch.unravel_index(chosen, lead)
    p = wide(scores[at]).softmax(dim=-1)  # (rows, Tk)
    if sink is not None:
        p = torch.cat([p[:, :sink], p[:, sink + 1 :]], dim=1)
    theirs = (
        torch.unravel_index(chosen, weights.shape[:-1])
        if axes is None
        else tuple(at[axis] for axis in axes)
    )
    w = wide(weights[theirs])
    number = p.isfinite().all(dim=1)  # a row that sees no key has none
    if not bool(number.any()):
        return math.nan  # nothing to tell by: what is not a number will show
    number &= (w != 0).any(dim=1)  # DeBERTa sets the rows of padded queries to 0
    if not bool(number.any()):
        return None
    p, w = p[number], w[number]
    low = scores if torch.finfo(scores.dtype).bits < torch.finfo(weights.dtype).bits else weights
    largest = p.amax(dim=1, keepdim=True)  # (rows, 1)
    tolerance = _tolerance(low) * largest  # (rows, 1)
    if bool(((w - p).abs() <= tolerance).all()):
        return float(((w - p).abs() / largest).max())
    is_kept = (w != 0) & (p > tolerance)
    if not bool(is_kept.any()):
        return None
    factor = float((w[is_kept] / p[is_kept]).median())  # 1/(1 − rate)
    close = (w - factor * p).abs() <= factor * tolerance
    if factor <= _LEAST_FACTOR or not bool((close | (w == 0)).all()):
        return None
    differences = torch.where(w == 0, 0.0, (w / factor - p).abs() / largest)
    return float(differences.max())


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


def _as_computed(fields: dict[str, Any]) -> dict[str, Any]:
    """Under autocast a kernel rounds queries, keys and values to the type of its output."""
    kind = fields["output"].dtype
    return fields | {name: fields[name].to(kind) for name in ("query", "key", "value")}


def disagreement(seen: Seen) -> Refusal | None:
    """Why what was computed is not the attention of these queries, keys and values, if so."""
    with exactly(seen.fields["query"].device.type):
        event = DotProduct(call=seen.call, calls=seen.calls, **_as_computed(seen.event_fields()))
        b = event.query.shape[0] - 1
        Tq = event.query.shape[2]
        output = event.output[b] if seen.replay is None else seen.replay(b)  # (H, Tq, dv)
        queries = torch.linspace(0, Tq - 1, min(Tq, _ROWS), device=event.query.device).long()
        p = event.rows(b, queries)  # (H, P, Tk)
        value = wide(event.value[b])
        value = value.repeat_interleave(p.shape[0] // value.shape[0], dim=0)
        computed = wide(output[:, queries])
        expected = p @ value  # (H, P, dv)
        number = p.isfinite().all(dim=-1, keepdim=True) & computed.isfinite()
        number &= (computed != 0).any(
            dim=-1, keepdim=True
        )  # kernels that leave padding out give 0 there
        if not bool(number.any()):
            return None
        apart = float(torch.where(number, (expected - computed).abs(), 0.0).max())
        # the mean of many values is small: what is compared sets the scale, not the values
        scale = float(torch.where(number, expected.abs(), 0.0).max())
    seen.check = OUTPUT_CHECK
    seen.difference = apart / max(scale, 1e-6)
    if apart <= _tolerance(event.output) * max(scale, 1e-6):
        return None
    return Refusal(
        Reason.GUARD,
        f"its output is not softmax(s)·V of its queries, keys and mask: they differ by {apart:.2g}, with numbers up to "
        f"{scale:.2g}",
    )
