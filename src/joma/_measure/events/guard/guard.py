"""The guard: an attention becomes an event only if its module computed it.

When an attention of a module is first seen, whenever its shapes change, and now and then
afterwards, a few rows of softmax(s)·V are computed again and compared with what the call gave. The
softmax of eager attention is held until its product with the values is seen, which shows its axes.
An attention is refused with the reason if it is never multiplied with values, if it is changed on
the way, or if its module's numbers would be a mixture (`mixtures`). In between, a module with the
same shapes is taken as found before, at no cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from joma._measure.events.aside import exactly
from joma._measure.events.axes import (
    AxesQuestion,
    Layout,
    RecordedProjection,
    come_from_same_tokens,
    decide_layout,
)
from joma._measure.events.events import Call, DotProduct, Scores
from joma._measure.events.facts import AttentionFacts, refused_facts
from joma._measure.events.guard.candidate import AttentionCandidate, Signature, shared_axis
from joma._measure.events.guard.mixtures import refuse_mixture
from joma._measure.events.guard.output import check_output
from joma._measure.events.guard.rejected import RejectedModules
from joma._measure.events.guard.weights import settle_by_weights
from joma._measure.events.products import Product
from joma._measure.events.reasons import Reason, Refusal

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

# A module is examined in its measurements 1, 2, 4, 8, 16 and then in every 16th: what it computes
# may change in training (heads that begin to be mixed). One look costs about as much as a layer
# norm.
_LOOK_EVERY = 16
_MODULES_AROUND = 3  # innermost running modules whose projections may hold the queries
_MOST_CHARACTERS = 120  # of an exception, in a message

_NO_PRODUCT = (
    "a softmax of scores {scores} is not multiplied with values as it is (used for something else, "
    "or changed before: a difference of two, heads that are mixed, a second normalisation): no "
    "attention that can be measured"
)

Place = tuple[str, int]  # module, and number of the attention in one call of it


@dataclass(frozen=True)
class ExaminedAttention:
    """The decision about an attention, made when it was examined."""

    signature: Signature
    layout: Layout | None
    is_self: bool | None
    learned_sink: int | None
    refusal: Refusal | None


class Guard:
    """Decides which attention becomes an event.

    Attributes:
        kernels: module -> shapes of an opaque kernel, and the keys that it was found to see.
        without_heads: modules whose axis of heads is not certain.
        shares: module -> the share of its queries that attend, if that is not all of them.
        facts: (module, number of the attention in one call of it) -> what was found.
        collects: True while outputs of projections are kept, to learn axes from.
        is_new: True until a pass has ended.
    """

    def __init__(self, source: EventSource) -> None:
        self.source = source
        self.kernels: dict[str, tuple[Any, str]] = {}
        self.without_heads: list[str] = []
        self.shares: dict[str, float] = {}
        self.facts: dict[Place, AttentionFacts] = {}
        self.collects = True
        self.is_new = True
        self._rejected = RejectedModules()
        self._examined: dict[Place, ExaminedAttention] = {}
        self._measurements: Counter[Place] = Counter()  # after the first examination

    @property
    def set_aside(self) -> dict[str, str]:
        """Module -> why a softmax or product in it was taken for something else than attention."""
        return self._rejected.sentences

    def on_attention(self, candidate: AttentionCandidate) -> None:
        """Take an attention: emit it at once if it was found right before, else hold it."""
        call = candidate.call
        candidate.ordinal = call.attentions
        if not call.attentions:
            call.ran_before = len(self.source.ran)
        call.attentions += 1
        earlier = self._examined.get(candidate.place)
        is_same = earlier is not None and earlier.signature == candidate.signature
        if earlier is None or not is_same or self._is_due(candidate.place):
            self._hold(candidate)
        elif earlier.refusal is None:
            candidate.layout = earlier.layout
            candidate.is_self = earlier.is_self
            if earlier.learned_sink is not None:
                candidate.fields["learned_sink"] = earlier.learned_sink
            self.source.emit_attention(candidate)

    def _is_due(self, place: Place) -> bool:
        """Count a measurement; True if it is one to examine."""
        self._measurements[place] += 1
        number = self._measurements[place] + 1  # the first one was examined
        is_power_of_two = number & (number - 1) == 0
        return number % _LOOK_EVERY == 0 or is_power_of_two

    def _hold(self, candidate: AttentionCandidate) -> None:
        """Keep an attention until its module returns; follow the output of a fused one."""
        call = candidate.call
        if self.collects:
            candidate.projections = _recent_projections(candidate.calls)
        call.held.append(candidate)
        if candidate.kind is DotProduct:
            call.examined.append(candidate)
            call.followed.append(candidate.fields["output"])

    def on_product(self, product: Product) -> None:
        """Take a product of two activations; an eager attention may wait for it."""
        with exactly(product.output.device.type):
            if self._meets_values(product):
                return
            running = self.source.running
            if not running[-1].attentions:
                self._rejected.on_product(running[-1], running, product)

    def _meets_values(self, product: Product) -> bool:
        """True if an operand is the softmax of a held attention; the other one is its values."""
        for operand in product.weights_candidates():
            for call in reversed(self.source.running):
                for candidate in call.held:
                    if candidate.is_settled or not settle_by_weights(candidate, operand):
                        continue
                    candidate.values = operand.values
                    candidate.call.examined.append(candidate)
                    self.source.running[-1].followed.append(product.output)
                    return True
        return False

    def on_softmax(self, scores: Tensor) -> None:
        """Take the scores (…, Tk) of a softmax over something else than a product of their size."""
        self._rejected.on_softmax(self.source.running[-1], scores)

    def on_contraction(self, operands: Sequence[Tensor]) -> None:
        """Take a product of three and more activations."""
        running = self.source.running
        if not running[-1].attentions:
            self._rejected.on_contraction(running[-1], running, operands)

    def settle(self, call: Call, parent: Call | None) -> None:
        """Decide on what a module call held when it returns; hand the rest to the module around."""
        held = call.held
        call.held = []
        if parent is not None and next(call.module.parameters(), None) is None:
            # A module around a kernel: what happens to its output is seen in the module around it.
            parent.held += held
            parent.examined += call.examined
            parent.followed += call.followed
            parent.combined |= call.combined
            return
        by_owner: dict[Call, list[AttentionCandidate]] = {}
        for candidate in held:
            if not candidate.is_settled:
                if parent is not None:
                    parent.held.append(candidate)
                    continue
                shape = tuple(candidate.fields["scores"].shape)
                candidate.refusal = Refusal(Reason.NO_PRODUCT, _NO_PRODUCT.format(scores=shape))
            by_owner.setdefault(candidate.call, []).append(candidate)
        for attentions in by_owner.values():
            self._decide(attentions, call)

    def _decide(self, attentions: Sequence[AttentionCandidate], outer: Call) -> None:
        """Emit or refuse the attentions of one module.

        ``outer`` is that module, or the one around a module without parameters.
        """
        mixture = refuse_mixture(attentions, outer)
        for candidate in attentions:
            refusal = mixture or candidate.refusal or self._examine(candidate)
            self._note_error(candidate)
            self._examined[candidate.place] = ExaminedAttention(
                candidate.signature,
                candidate.layout,
                candidate.is_self,
                candidate.fields.get("learned_sink"),
                refusal,
            )
            if refusal is None:
                self.source.emit_attention(candidate)
            else:
                self._refuse(candidate, refusal)

    def _note_error(self, candidate: AttentionCandidate) -> None:
        """Keep the largest error of an attention that was examined with this signature before."""
        earlier = self._examined.get(candidate.place)
        facts = self.facts.get(candidate.place)
        is_same = earlier is not None and earlier.signature == candidate.signature
        if facts is None or facts.refusal is not None or not is_same:
            candidate.is_new = True
            return
        candidate.is_new = False
        error = candidate.comparison.error
        if error is not None:
            self.facts[candidate.place] = replace(facts, error=max(facts.error or 0.0, error))

    def _examine(self, candidate: AttentionCandidate) -> Refusal | None:
        """Settle the axes, and compare a fused attention; return why it is refused, if it is."""
        try:
            with exactly(candidate.per_query.device.type):
                if candidate.layout is None:
                    candidate.layout = self._find_layout(candidate)
                if candidate.is_self is None:
                    candidate.is_self = self._find_is_self(candidate)
                if candidate.kind is DotProduct:
                    return check_output(candidate)
                return None
        except Refusal as refusal:
            return refusal
        except Exception as error:
            # A check that fails is no reason to believe a number.
            return Refusal(
                Reason.UNCHECKED,
                "it could not be compared with softmax(s)·V of its queries, keys and values "
                f"({type(error).__name__}: {str(error)[:_MOST_CHARACTERS]})",
            )

    def _find_layout(self, candidate: AttentionCandidate) -> Layout:
        """Return the axes: as found before, if the sizes allow it, else by the evidence."""
        assert candidate.query_axis is not None
        earlier_layout = self._earlier_layout(candidate)
        if earlier_layout is not None:
            return earlier_layout
        name = candidate.call.name
        layout = decide_layout(
            AxesQuestion(
                candidate.queries(),
                candidate.shape,
                candidate.query_axis,
                candidate.key_count,
                candidate.calls,
                candidate.projections,
                stated_heads=self.source.heads_of(name),
                shared_axis=shared_axis(candidate),
            )
        )
        if not layout.is_certain and name not in self.without_heads:
            self.without_heads.append(name)
        if layout.share < 1:
            self.shares[name] = layout.share
        return layout

    def _earlier_layout(self, candidate: AttentionCandidate) -> Layout | None:
        earlier = self._examined.get(candidate.place)
        if earlier is None or earlier.layout is None:
            return None
        if earlier.layout.query_axis != candidate.query_axis:
            return None
        return earlier.layout.resized(candidate.shape)

    def _find_is_self(self, candidate: AttentionCandidate) -> bool:
        """True for self-attention: as found before, else by the evidence."""
        earlier = self._examined.get(candidate.place)
        if earlier is not None and earlier.is_self is not None:
            return earlier.is_self
        assert candidate.query_axis is not None
        keys = None
        if candidate.read_keys is not None:
            keys = candidate.read_keys(candidate.query_axis)
        return come_from_same_tokens(
            candidate.queries(), keys, candidate.call, candidate.projections
        )

    def _refuse(self, candidate: AttentionCandidate, refusal: Refusal) -> None:
        if _is_router(candidate, refusal):
            self.set_aside.setdefault(candidate.call.name, str(refusal))
            return
        self.facts[candidate.place] = refused_facts(candidate, refusal)
        self.source.refuse(candidate.call, candidate.calls, refusal)


# Input (2, 14, 32), scores (2, 14, 8) of 14 tokens for 8 experts, never multiplied with values: not
# an attention that is refused, but no attention.
def _is_router(candidate: AttentionCandidate, refusal: Refusal) -> bool:
    """True for a softmax over other things than tokens, as of a router or a classifier."""
    if candidate.kind is not Scores or refusal.reason is not Reason.NO_PRODUCT:
        return False
    states = candidate.call.states
    if states is None or states.dim() != 3:
        return False
    tokens = states.shape[1]
    # one more column is a learned sink
    return candidate.key_count not in (tokens, tokens + 1)


def _recent_projections(calls: tuple[Call, ...]) -> tuple[RecordedProjection, ...]:
    """Return what modules inside the innermost running ones gave so far, the latest last."""
    projections: list[RecordedProjection] = []
    for call in calls[-_MODULES_AROUND:]:
        projections += call.projections
    return tuple(projections)
