"""The events that a `EventSource` gives to its observers, and what an observer is.

An event holds what is there anyway (references to tensors of the pass); whatever has to be worked out is worked out
when an observer first asks for it, once for all observers. An observer names the kinds of events it wants; a kind that
nobody wants is never made. Observers see tensors of the running model: they must neither change them nor keep them
longer than they need.

    PassBegins, PassEnds        the outermost module call
    ModuleBegins, ModuleEnds    each module call, with arguments and output
    AttentionEvent              an attention: `DotProduct` (fused, from queries and keys) or `Scores` (eager, a softmax)
    AttentionRefused                     the attention of a module is not what it seemed to be
    BlockInput                  what the block around an attention was given
    Hidden                      hidden neurons of an MLP: what its upper matrix is given
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
    mask_of,
    stats_with_mask,
)
from joma._measure.gauges.logits import EagerLogits, Received, logits_of
from joma._measure.gauges.masks import Mask, causal_mask
from joma._measure.gauges.sinks import with_learned_sink

Place = tuple[
    str, int
]  # module, and which of its calls in a pass (more than one where weights are shared)
_MAX_TOKENS = 1024  # rows that `BlockInput.distinct` gives at most


class Observer(Protocol):
    """Who wants to see a model run. Exceptions are kept as problems of the module and never reach the model."""

    @property
    def wants(self) -> Collection[type[Event]]:
        """The kinds of events that it is given, subclasses included."""
        ...

    def observe(self, event: Any) -> None:
        """Something happened; the event is of one of the kinds wanted."""
        ...


@dataclass(eq=False)
class Call:
    """A module that is running now."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    invocation: int  # 0 for its first call in this pass, 1 for the second (shared weights), …
    products: dict[int, Any] = field(
        default_factory=dict
    )  # size of a product of two activations -> the product
    softmaxes: list[Tensor] = field(default_factory=list)  # inputs of those over no such product
    held: list[Any] = field(default_factory=list)  # attention that is not known to be right yet
    attentions: int = 0  # that were seen in this call
    ran_before: int = 0  # how many modules had run in this step before the first of them
    projections: list[Any] = field(
        default_factory=list
    )  # what modules inside gave, while axes are learnt
    has_attention: bool = False  # in this module, or in one inside it
    examined: list[Any] = field(
        default_factory=list
    )  # attentions that are looked at, whose outputs are followed
    followed: list[Tensor] = field(default_factory=list)  # their outputs, and what is made of them
    combined: bool = False  # two of these were added or subtracted
    real: dict[tuple[int, int], Tensor | None] = field(
        default_factory=dict
    )  # (B, T) -> tokens that are no padding
    confirmed: dict[str, Call | None] = field(
        default_factory=dict
    )  # argument -> the module inside that applies it

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name."""
        return (
            dict(zip(_parameters(self.module.__class__.forward), self.args, strict=False))
            | self.kwargs
        )

    @property
    def states(self) -> Tensor | None:
        """The first floating tensor that the module was given."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        return None


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


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
        """The innermost running module whose name ends in a number, as ``layers.3`` does; else the module itself."""
        return next(
            (call for call in reversed(self.calls) if call.name.rpartition(".")[2].isdigit()),
            self.call,
        )

    @property
    def device(self) -> torch.device:
        """Where it happens."""
        states = self.call.states
        return torch.device("cpu") if states is None else states.device


@dataclass(eq=False)
class Pass:
    """One pass of a model.

    Attributes:
        grad: it computes gradients.
        in_train_mode: the outermost module is in train mode.
        has_backward: gradients went back through its output; known when they have.
    """

    grad: bool
    in_train_mode: bool = True
    has_backward: bool = False


def counted(passes: Sequence[Pass]) -> list[Pass]:
    """Return the passes that are training, of those since the last step.

    These are the ones whose gradients were used. If none were, those in train mode that compute gradients; or all that
    compute gradients; or, where nothing does, all.
    """
    with_gradients = [one for one in passes if one.grad]
    used = [one for one in with_gradients if one.has_backward]
    in_train_mode = [one for one in with_gradients if one.in_train_mode]
    return used or in_train_mode or with_gradients or list(passes)


@dataclass(frozen=True, eq=False, kw_only=True)
class PassBegins(Event):
    """The outermost module is called; ``grad`` if with gradients, as in training.

    ``autocast`` is the type that autocast computes in on the device of the model's parameters, if it does.
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
    """An attention was computed; of one of the two kinds below."""

    real: Tensor | None = field(
        default=None, repr=False
    )  # (B or 1, 1, Tq), False at padding; None if there is none
    ordinal: int = 0  # which of the attentions in this call of the module

    @property
    def place(self) -> Place:
        """Name of the module ("name/1" for a second attention in one call), and which of its calls this is."""
        return _numbered(self.call.name, self.ordinal), self.call.invocation

    @property
    def per_query(self) -> Tensor:
        """One row per query, (B, H, Tq, …)."""
        raise NotImplementedError

    @cached_property
    def stats(self) -> AttentionStats:
        """Entropy, logsumexp and sink mass of each query."""
        raise NotImplementedError

    def stats_at(self, queries: Tensor) -> AttentionStats:
        """The same of some queries (n,) only, (B, H, n) each."""
        raise NotImplementedError

    @cached_property
    def received(self) -> Received:
        """The attention that each key receives from the queries that are not padding."""
        assert self.stats.logits is not None
        return self.stats.logits.received(self.real)

    @property
    def visible(self) -> Tensor:
        """How many keys each query sees, broadcastable to (B, H, Tq)."""
        return self.stats.visible

    def rows(self, b: int, queries: Tensor) -> Tensor:
        """The attention (H, P, Tk) of some queries (P,) of sample ``b``, in float32 or float64."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, H, Tq)"""
        B, H, Tq, _ = self.per_query.shape
        return B, H, Tq

    @property
    def device(self) -> torch.device:
        """Where it happens."""
        return self.per_query.device


@dataclass(frozen=True, eq=False, kw_only=True)
class DotProduct(AttentionEvent):
    """``scaled_dot_product_attention`` with these arguments, brought to four dimensions."""

    query: Tensor = field(repr=False)  # (B, H, Tq, d)
    key: Tensor = field(repr=False)  # (B, Hk, Tk, d)
    value: Tensor = field(repr=False)  # (B, Hk, Tk, dv)
    mask: Tensor | None = field(repr=False)  # boolean (True takes part) or additive
    causal: bool
    scale: float | None
    gqa: bool
    output: Tensor = field(repr=False)  # (B, H, Tq, dv), after dropout
    mask_facts: Mask | None = field(
        default=None, repr=False
    )  # what the mask says, shared by layers
    softcap: float | None = None
    learned_sinks: Tensor | None = field(default=None, repr=False)  # logits (H,)

    @property
    def per_query(self) -> Tensor:
        """One row per query, (B, H, Tq, …)."""
        return self.query

    @cached_property
    def stats(self) -> AttentionStats:
        """Entropy, logsumexp and sink mass of each query, without an attention matrix."""
        mask = self.mask if self.mask_facts is None else self.mask_facts
        return self._stats(self.query, mask, self.causal)

    def _stats(self, query: Tensor, mask: Tensor | Mask | None, causal: bool) -> AttentionStats:
        stats = stats_with_mask(query, self.key, mask, causal, self.scale, self.gqa, self.softcap)
        stats = (
            stats if self.learned_sinks is None else with_learned_sink(stats, self.learned_sinks)
        )
        logits = logits_of(query, self.key, mask, causal, self.scale, self.gqa, self.softcap)
        return replace(
            stats, logits=replace(logits, learned_sinks=self.learned_sinks, value=self.value)
        )

    def stats_at(self, queries: Tensor) -> AttentionStats:
        """The same of some queries (n,) only, (B, H, n) each."""
        mask = self.mask_facts
        if self.mask is not None and mask is None:
            mask = mask_of(self.mask, self.query, self.key)
        few = (
            causal_mask(queries, self.key.shape[2])
            if self.causal
            else None
            if mask is None
            else mask.at(queries)
        )
        return self._stats(self.query[:, :, queries], few, False)

    @property
    def visible(self) -> Tensor:
        """How many keys each query sees, broadcastable to (B, H, Tq)."""
        Tq, Tk = self.query.shape[2], self.key.shape[2]
        if self.causal:
            return torch.arange(1, Tq + 1, device=self.device).clamp(max=Tk)[None, None]
        if self.mask is None:
            return torch.full((1, 1, 1), Tk, device=self.device)
        return (self.mask_facts or mask_of(self.mask, self.query, self.key)).visible

    def rows(self, b: int, queries: Tensor) -> Tensor:
        """The attention (H, P, Tk) of some queries (P,) of sample ``b`` to its keys, in float32 or float64."""
        (_, H, Tq, d), (_, Hk, Tk, _) = self.query.shape, self.key.shape
        scale = 1 / math.sqrt(d) if self.scale is None else self.scale
        keys = wide(self.key[b]).repeat_interleave(H // Hk, dim=0)  # (H, Tk, d)
        scores = wide(self.query[b][:, queries]) @ keys.mT * scale  # (H, P, Tk)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.causal:
            later = torch.arange(Tk, device=queries.device) > queries[:, None]
            scores = scores.masked_fill(later, -math.inf)
        if self.mask is not None:
            mask = self.mask.expand(*self.query.shape[:2], Tq, Tk)[b][:, queries]
            boolean = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -math.inf) if boolean else scores + wide(mask)
        if self.learned_sinks is not None:
            learned = wide(self.learned_sinks)[:, None, None].expand(H, len(queries), 1)
            return torch.cat([scores, learned], dim=-1).softmax(dim=-1)[..., :-1]
        return scores.softmax(dim=-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scores(AttentionEvent):
    """A softmax over scores; a learned sink may be one more column."""

    scores: Tensor = field(repr=False)  # (B, H, Tq, Tk)
    probabilities: Tensor = field(repr=False)  # the same, before dropout
    learned_sink: int | None = None  # the column that is one

    @property
    def per_query(self) -> Tensor:
        """One row per query, (B, H, Tq, …)."""
        return self.scores

    @cached_property
    def stats(self) -> AttentionStats:
        """Entropy, logsumexp and sink mass of each query."""
        stats = attention_stats_from_scores(
            self.scores, probabilities=self.probabilities, learned_sink=self.learned_sink
        )
        return replace(stats, logits=EagerLogits(self.scores.detach(), self.learned_sink))

    def rows(self, b: int, queries: Tensor) -> Tensor:
        """The attention (H, P, Tk) of some queries (P,) of sample ``b``, in float32 or float64."""
        return wide(self.scores[b][:, queries]).softmax(dim=-1)


def wide(tensor: Tensor) -> Tensor:
    """Return float64 as it is, and others in float32: a mask of −1e9 leaves nothing of a score in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _numbered(name: str, ordinal: int) -> str:
    return name if ordinal == 0 else f"{name}/{ordinal}"


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionRefused(Event):
    """What was seen of a module's attention in this pass is not to be used; the reason is a problem of the source."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockInput(Event):
    """The input (B, T, d) of the block around an attention, whose module ``call`` is; it follows that attention."""

    states: Tensor = field(repr=False)
    real: Tensor | None = field(
        default=None, repr=False
    )  # (B or 1, 1, T), False at padding; None if there is none
    ordinal: int = 0  # of that attention

    @property
    def place(self) -> Place:
        """That of the attention."""
        return _numbered(self.call.name, self.ordinal), self.call.invocation

    @property
    def device(self) -> torch.device:
        """Where it happens."""
        return self.states.device

    @cached_property
    def tokens(self) -> Tensor | None:
        """The tokens (B, T) that the innermost enclosing module was given."""
        for call in reversed(self.calls):
            for name, value in call.arguments.items():
                integer = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
                if (
                    integer
                    and value.shape == self.states.shape[:2]
                    and not re.search("mask|position|type|label|target", name)
                ):
                    return value
        return None

    @cached_property
    def distinct(self) -> Tensor:
        """States (n, d) of real tokens: one per distinct token if the model was given tokens; at most 1,024."""
        return self.states.detach().flatten(0, 1)[self.distinct_places]

    @cached_property
    def distinct_places(self) -> Tensor:
        """Where these are (n,), among the B × T tokens of the pass one after the other."""
        B, T, _ = self.states.shape
        keep = torch.ones(B, T, dtype=torch.bool, device=self.device)
        keep = keep if self.real is None else self.real[:, 0].expand(B, T)
        index = keep.flatten().nonzero()[:, 0]
        if self.tokens is not None:
            order = torch.sort(self.tokens.flatten()[index], stable=True)
            first = torch.ones_like(order.values, dtype=torch.bool)
            first[1:] = order.values[1:] != order.values[:-1]
            index = index[order.indices[first].sort().values]
        return index[:: max(1, -(-len(index) // _MAX_TOKENS))]


@dataclass(frozen=True, eq=False, kw_only=True)
class Hidden(Event):
    """An MLP's hidden neurons (B, T, h), which its upper matrix is about to be given.

    That is φ(w·x) in a plain MLP and φ(gate)·up in a gated one; ``layer`` is the MLP's number in the model.
    """

    layer: int
    states: Tensor = field(repr=False)


KINDS: tuple[type[Event], ...] = (
    PassBegins, PassEnds, ModuleBegins, ModuleEnds, DotProduct, Scores, AttentionRefused, BlockInput, Hidden,
)  # fmt: skip
