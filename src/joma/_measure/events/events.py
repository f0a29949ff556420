"""The events that an `EventSource` gives to its observers.

An event holds what exists anyway: references to tensors of the pass. Whatever has to be computed
is computed when an observer first asks for it, once for all observers. An observer names the kinds
of events that it wants; a kind that nobody wants is never made. Observers see tensors of the
running model: they must neither change them nor hold them longer than needed.

    PassBegins, PassEnds        the outermost module call
    ModuleBegins, ModuleEnds    each module call, with arguments and output
    AttentionEvent              an attention: `DotProduct` (fused, from queries and keys) or
                                `Scores` (eager, a softmax)
    AttentionRefused            the attention of a module is not what it seemed to be
    BlockInput                  the input of the block around an attention
    Hidden                      hidden neurons of an MLP: the input of its upper matrix
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from joma._measure.gauges.attention import (
    AttentionStats,
    attention_stats_from_scores,
    stats_with_mask,
)
from joma._measure.gauges.attention_inputs import mask_of
from joma._measure.gauges.logits import EagerLogits, Received, logits_of
from joma._measure.gauges.masks import Mask, causal_mask
from joma._measure.gauges.sinks import with_learned_sink

# A module, and which of its calls in a pass (more than one where layers share their weights).
Place = tuple[str, int]
# Rows that `BlockInput.distinct` gives at most: coherence compares all pairs of them.
_MAX_TOKENS = 1024
# Integer arguments of the shape of the tokens that are no tokens.
_NOT_TOKENS = re.compile("mask|position|type|label|target")


class Observer(Protocol):
    """Receives events of a model; its exceptions are kept as problems and never reach the model."""

    @property
    def wants(self) -> Collection[type[Event]]:
        """The kinds of events that it receives, subclasses included."""
        ...

    def observe(self, event: Any) -> None:
        """Look at an event of one of the kinds wanted."""
        ...


@dataclass(eq=False)
class Call:
    """A module that is running now, and what has been seen in it so far.

    Attributes:
        name: of the module.
        module: the module.
        args: of the call.
        kwargs: of the call.
        invocation: 0 for the first call of the module in this pass, 1 for the second (shared
            weights), …
        products: number of elements of a product of two activations -> the product.
        softmaxes: inputs of softmaxes that are over no such product.
        chunks: shape (…, Tk) of the first of these that has rows for all tokens, in chunks.
        held: attentions that the guard has not decided on yet.
        attentions: how many attentions were seen in this call.
        ran_before: how many modules had run in this step before the first of them.
        projections: outputs of the modules inside, while axes are learnt.
        has_attention: an attention was seen in this module or in one inside it.
        examined: attentions that the guard examines.
        followed: their outputs, and what is made of these.
        combined: two of these were added or subtracted.
        real: (B, T) -> tokens that are no padding.
        confirmed: argument -> the module inside that applies it as a mask.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    invocation: int
    products: dict[int, Any] = field(default_factory=dict)
    softmaxes: list[Tensor] = field(default_factory=list)
    chunks: tuple[int, ...] | None = None
    held: list[Any] = field(default_factory=list)
    attentions: int = 0
    ran_before: int = 0
    projections: list[Any] = field(default_factory=list)
    has_attention: bool = False
    examined: list[Any] = field(default_factory=list)
    followed: list[Tensor] = field(default_factory=list)
    combined: bool = False
    real: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    confirmed: dict[str, Call | None] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name."""
        names = _parameter_names(self.module.__class__.forward)
        return dict(zip(names, self.args, strict=False)) | self.kwargs

    @property
    def states(self) -> Tensor | None:
        """The first floating tensor among the arguments."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        return None


@cache
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]  # without self


# eq=False, here and below: events hold tensors, and == between tensors is no truth value.
@dataclass(frozen=True, eq=False, kw_only=True)
class Event:
    """Something that a model does.

    Attributes:
        call: the module that does it.
        calls: all modules that are running, the outermost first.
    """

    call: Call
    calls: tuple[Call, ...] = field(repr=False)

    @property
    def place(self) -> Place:
        """Name of the module, and which of its calls in this pass it is."""
        return self.call.name, self.call.invocation

    @property
    def block(self) -> Call:
        """The innermost module whose name ends in a number (``layers.3``), else the module."""
        for call in reversed(self.calls):
            if call.name.rpartition(".")[2].isdigit():
                return call
        return self.call

    @property
    def device(self) -> torch.device:
        """The device of the module's input."""
        states = self.call.states
        if states is None:
            return torch.device("cpu")
        return states.device


@dataclass(eq=False)
class Pass:
    """One pass of a model.

    Attributes:
        grad: it computes gradients.
        in_train_mode: the outermost module is in train mode.
        has_backward: gradients have flowed back through its output.
    """

    grad: bool
    in_train_mode: bool = True
    has_backward: bool = False


def counted(passes: Sequence[Pass]) -> list[Pass]:
    """Return the passes that are training, of those since the last step.

    These are the ones whose gradients were used. If none were, those in train mode that compute
    gradients; or all that compute gradients; or, if none does, all.
    """
    with_gradients = [one for one in passes if one.grad]
    used = [one for one in with_gradients if one.has_backward]
    in_train_mode = [one for one in with_gradients if one.in_train_mode]
    return used or in_train_mode or with_gradients or list(passes)


@dataclass(frozen=True, eq=False, kw_only=True)
class PassBegins(Event):
    """The outermost module is called.

    Attributes:
        grad: the pass computes gradients, as in training.
        current: the pass.
        autocast: the type that autocast computes in on the device of the model's parameters.
    """

    grad: bool
    current: Pass
    autocast: torch.dtype | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PassEnds(Event):
    """The outermost module has returned ``output``; a pass that raises has no such event."""

    grad: bool
    current: Pass
    output: Any = field(repr=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModuleBegins(Event):
    """A module is called; its arguments are in ``call``."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ModuleEnds(Event):
    """A module has returned ``output``."""

    output: Any = field(repr=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionEvent(Event):
    """An attention was computed; a `DotProduct` or `Scores`.

    Attributes:
        real: (B or 1, 1, Tq), False at padding; None if there is none.
        ordinal: which of the attentions in this call of the module.
    """

    real: Tensor | None = field(default=None, repr=False)
    ordinal: int = 0

    @property
    def place(self) -> Place:
        """Name of the module, "name/1" for a second attention in one call, and the invocation."""
        return _numbered(self.call.name, self.ordinal), self.call.invocation

    @property
    def per_query(self) -> Tensor:
        """A tensor with one row per query, (B, H, Tq, …)."""
        raise NotImplementedError

    @cached_property
    def stats(self) -> AttentionStats:
        """Entropy, logsumexp and sink mass of each query."""
        raise NotImplementedError

    def stats_at(self, queries: Tensor) -> AttentionStats:
        """Return the same of some queries (n,) only, (B, H, n) each."""
        raise NotImplementedError

    @cached_property
    def received(self) -> Received:
        """The attention that each key receives from the queries that are not padding."""
        assert self.stats.logits is not None
        return self.stats.logits.received(self.real)

    @property
    def visible(self) -> Tensor:
        """The number of keys that each query sees, broadcastable to (B, H, Tq)."""
        return self.stats.visible

    def rows(self, b: int, queries: Tensor) -> Tensor:
        """Return the attention (H, P, Tk) of queries (P,) of sample ``b``, float32 or float64."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, H, Tq)"""
        samples, heads, queries, _ = self.per_query.shape
        return samples, heads, queries

    @property
    def device(self) -> torch.device:
        """The device of the queries."""
        return self.per_query.device


@dataclass(frozen=True, eq=False, kw_only=True)
class DotProduct(AttentionEvent):
    """Fused attention from queries, keys and values, brought to four dimensions.

    Attributes:
        query: (B, H, Tq, d).
        key: (B, Hk, Tk, d).
        value: (B, Hk, Tk, dv).
        mask: boolean (True takes part) or additive.
        causal: query i sees keys 0 … i only.
        scale: factor of the scores; 1/√d if None.
        gqa: heads share keys, if Hk < H.
        output: (B, H, Tq, dv), after dropout.
        mask_facts: what the mask says, shared by all layers that are given it.
        softcap: c, if scores s become c·tanh(s/c).
        learned_sinks: logits (H,) of one more key per head, which has no value.
    """

    query: Tensor = field(repr=False)
    key: Tensor = field(repr=False)
    value: Tensor = field(repr=False)
    mask: Tensor | None = field(repr=False)
    causal: bool
    scale: float | None
    gqa: bool
    output: Tensor = field(repr=False)
    mask_facts: Mask | None = field(default=None, repr=False)
    softcap: float | None = None
    learned_sinks: Tensor | None = field(default=None, repr=False)

    @property
    def per_query(self) -> Tensor:
        """The queries, (B, H, Tq, d)."""
        return self.query

    @cached_property
    def stats(self) -> AttentionStats:
        """Entropy, logsumexp and sink mass of each query, without an attention matrix."""
        mask: Tensor | Mask | None = self.mask_facts
        if mask is None:
            mask = self.mask
        return self._stats(self.query, mask, self.causal)

    def _stats(self, query: Tensor, mask: Tensor | Mask | None, causal: bool) -> AttentionStats:
        settings = (mask, causal, self.scale, self.gqa, self.softcap)
        stats = stats_with_mask(query, self.key, *settings)
        if self.learned_sinks is not None:
            stats = with_learned_sink(stats, self.learned_sinks)
        logits = logits_of(query, self.key, *settings)
        logits = replace(logits, learned_sinks=self.learned_sinks, value=self.value)
        return replace(stats, logits=logits)

    def stats_at(self, queries: Tensor) -> AttentionStats:
        """Return the same of some queries (n,) only, (B, H, n) each."""
        mask: Mask | None = None
        if self.causal:
            mask = causal_mask(queries, self.key.shape[2])
        elif self.mask is not None:
            mask = self._read_mask(self.mask).at(queries)
        return self._stats(self.query[:, :, queries], mask, causal=False)

    def _read_mask(self, mask: Tensor) -> Mask:
        if self.mask_facts is not None:
            return self.mask_facts
        return mask_of(mask, self.query, self.key)

    @property
    def visible(self) -> Tensor:
        """The number of keys that each query sees, broadcastable to (B, H, Tq)."""
        queries = self.query.shape[2]
        keys = self.key.shape[2]
        if self.causal:
            counts = torch.arange(1, queries + 1, device=self.device).clamp(max=keys)
            return counts[None, None]  # (1, 1, Tq)
        if self.mask is None:
            return torch.full((1, 1, 1), keys, device=self.device)
        return self._read_mask(self.mask).visible

    def rows(self, b: int, queries: Tensor) -> Tensor:
        """Return the attention (H, P, Tk) of queries (P,) of sample ``b``, float32 or float64."""
        _, heads, query_count, width = self.query.shape
        key_heads, key_count = self.key.shape[1:3]
        scale = self.scale
        if scale is None:
            scale = 1 / math.sqrt(width)
        keys = wide(self.key[b]).repeat_interleave(heads // key_heads, dim=0)  # (H, Tk, d)
        scores = wide(self.query[b][:, queries]) @ keys.mT * scale  # (H, P, Tk)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.causal:
            is_later = torch.arange(key_count, device=queries.device) > queries[:, None]
            scores = scores.masked_fill(is_later, -math.inf)
        if self.mask is not None:
            mask = self.mask.expand(*self.query.shape[:2], query_count, key_count)
            mask = mask[b][:, queries]  # (H, P, Tk)
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -math.inf)
            else:
                scores = scores + wide(mask)
        if self.learned_sinks is None:
            return scores.softmax(dim=-1)
        sinks = wide(self.learned_sinks)[:, None, None].expand(heads, len(queries), 1)
        return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(AttentionEvent):
    """A softmax over scores.

    Attributes:
        scores: (B, H, Tq, Tk).
        probabilities: the same, before dropout.
        learned_sink: the column that is a learned sink instead of a key, if there is one.
    """

    scores: Tensor = field(repr=False)
    probabilities: Tensor = field(repr=False)
    learned_sink: int | None = None

    @property
    def per_query(self) -> Tensor:
        """The scores, (B, H, Tq, Tk)."""
        return self.scores

    @cached_property
    def stats(self) -> AttentionStats:
        """Entropy, logsumexp and sink mass of each query."""
        stats = attention_stats_from_scores(
            self.scores, probabilities=self.probabilities, learned_sink=self.learned_sink
        )
        return replace(stats, logits=EagerLogits(self.scores.detach(), self.learned_sink))

    def rows(self, b: int, queries: Tensor) -> Tensor:
        """Return the attention (H, P, Tk) of queries (P,) of sample ``b``, float32 or float64."""
        return wide(self.scores[b][:, queries]).softmax(dim=-1)


def wide(tensor: Tensor) -> Tensor:
    """Return float64 as it is, and other types in float32.

    Float64 must stay: with a mask of −1e9, nothing of a score is left in float32.
    """
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.float()


def _numbered(name: str, ordinal: int) -> str:
    if ordinal == 0:
        return name
    return f"{name}/{ordinal}"


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionRefused(Event):
    """Earlier events of this module's attention in this pass are wrong and not to be used.

    The reason is a problem of the source.
    """


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockInput(Event):
    """The input of the block around an attention; it follows the event of that attention.

    Attributes:
        call: the module of the attention.
        states: the input, (B, T, d).
        real: (B or 1, 1, T), False at padding; None if there is none.
        ordinal: of the attention.
    """

    states: Tensor = field(repr=False)
    real: Tensor | None = field(default=None, repr=False)
    ordinal: int = 0

    @property
    def place(self) -> Place:
        """The place of the attention."""
        return _numbered(self.call.name, self.ordinal), self.call.invocation

    @property
    def device(self) -> torch.device:
        """The device of the states."""
        return self.states.device

    @cached_property
    def tokens(self) -> Tensor | None:
        """The tokens (B, T) that the innermost enclosing module was given."""
        for call in reversed(self.calls):
            for name, value in call.arguments.items():
                if not isinstance(value, Tensor) or value.shape != self.states.shape[:2]:
                    continue
                is_integer = value.dtype in (torch.int64, torch.int32)
                if is_integer and not _NOT_TOKENS.search(name):
                    return value
        return None

    @cached_property
    def distinct(self) -> Tensor:
        """States (n, d) of real tokens, at most 1,024; one per distinct token if tokens exist."""
        return self.states.detach().flatten(0, 1)[self.distinct_places]

    @cached_property
    def distinct_places(self) -> Tensor:
        """The places (n,) of these among the B × T tokens of the pass, one after the other.

        Worked example: of tokens (5, 7, 5, 9) the places are (0, 1, 3), the first of each token.
        """
        samples, length, _ = self.states.shape
        is_real = torch.ones(samples, length, dtype=torch.bool, device=self.device)
        if self.real is not None:
            is_real = self.real[:, 0].expand(samples, length)
        places = is_real.flatten().nonzero()[:, 0]
        if self.tokens is not None:
            order = torch.sort(self.tokens.flatten()[places], stable=True)
            is_first = torch.ones_like(order.values, dtype=torch.bool)
            is_first[1:] = order.values[1:] != order.values[:-1]
            places = places[order.indices[is_first].sort().values]
        stride = max(1, math.ceil(len(places) / _MAX_TOKENS))
        return places[::stride]


@dataclass(frozen=True, eq=False, kw_only=True)
class Hidden(Event):
    """The hidden neurons of an MLP, which its upper matrix is about to be given.

    Attributes:
        layer: the MLP's number in the model.
        states: (B, T, h); φ(w·x) in a plain MLP, φ(gate)·up in a gated one.
    """

    layer: int
    states: Tensor = field(repr=False)


KINDS: tuple[type[Event], ...] = (
    PassBegins,
    PassEnds,
    ModuleBegins,
    ModuleEnds,
    DotProduct,
    Scores,
    AttentionRefused,
    BlockInput,
    Hidden,
)
