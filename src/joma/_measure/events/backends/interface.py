"""Attention that models of Hugging Face look up by name: flash, flex, hub kernels and functions
that users register.

All of them come out of `AttentionInterface`, by ``get_interface`` or by item. In a measured pass,
item access (which ``get_interface`` uses as well) returns a function that calls the registered one
and looks at its arguments and its output. If the function calls PyTorch's own attention inside,
that has been seen already. If it is a kernel that cannot be looked into, its arguments say little
about the mask: a function that is registered without a mask function of its name gets none at all.
So the output decides which keys a query sees: a few masks are tried, and the first one that
explains the output is right.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._measure.events.backends.backend import Backend, DotProductCall, first_output
from joma._measure.events.backends.flex import read_block_mask
from joma._measure.events.events import Call, DotProduct
from joma._measure.events.facts import AttentionFacts
from joma._measure.events.guard import check_output
from joma._measure.events.reasons import Reason, Refusal

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

# These call PyTorch's own functions, which the function mode sees.
_SEEN_BY_MODE = ("sdpa", "eager", "paged|eager")
_POSITIONAL = ("module", "query", "key", "value", "attention_mask")


@dataclass(frozen=True, eq=False)
class _MaskGuess:
    """Keys that queries may see: all tensors are broadcastable to (B, H, Tq, Tk)."""

    name: str
    mask: Tensor | None
    causal: bool = False


@dataclass(frozen=True, eq=False)
class _RegisteredCall:
    """One call of a registered function."""

    name: str  # attn_implementation
    function: Callable[..., Any]
    arguments: dict[str, Any]
    output: Any

    @property
    def query(self) -> Tensor:
        query: Tensor = self.arguments["query"]
        return query

    @property
    def key(self) -> Tensor:
        key: Tensor = self.arguments["key"]
        return key

    @property
    def shapes(self) -> tuple[Any, ...]:
        mask_shape = getattr(self.arguments.get("attention_mask"), "shape", None)
        return (self.query.shape, self.key.shape, self.query.dtype, mask_shape)

    def attention(self, guess: _MaskGuess) -> DotProductCall:
        return DotProductCall(
            self.query,
            self.key,
            self.arguments["value"],
            _states(self.output),
            mask=guess.mask,
            causal=guess.causal,
            scale=self.arguments.get("scaling"),
            softcap=self.arguments.get("softcap"),
            learned_sinks=self.arguments.get("s_aux"),
        )

    def without_dropout(self, sample: int) -> Tensor:
        """Return the output (H, Tq, dv) of one sample, computed again but for dropout."""
        positional = [self.arguments.get(name) for name in _POSITIONAL]
        settings = dict(self.arguments)
        for name in _POSITIONAL:
            settings.pop(name, None)
        settings["dropout"] = 0.0
        return _states(self.function(*positional, **settings))[sample]


class InterfaceBackend(Backend):
    """Functions of transformers' `AttentionInterface` that no other backend has seen.

    They give queries, keys, values, scale, soft cap and learned sinks. Their axes are fixed. The
    mask is the one that explains the output.
    """

    name = "kernel"

    @staticmethod
    @contextmanager
    def watching(source: EventSource, backends: Sequence[InterfaceBackend]) -> Iterator[None]:
        """Recognise functions that are taken from the interface within a block."""
        modeling = sys.modules.get("transformers.modeling_utils")
        interface: Any = getattr(modeling, "AttentionInterface", None)
        if interface is None:
            yield
            return
        (backend,) = backends
        inherited_getitem = interface.__getitem__
        # None if the class inherits it: deleting the attribute then brings the inherited one back.
        own_getitem = vars(interface).get("__getitem__")

        def watched_getitem(self: Any, name: str) -> Any:
            function = inherited_getitem(self, name)
            if name in _SEEN_BY_MODE:
                return function
            return backend.watched(source, name, function)

        interface.__getitem__ = watched_getitem
        try:
            yield
        finally:
            if own_getitem is None:
                del interface.__getitem__
            else:
                interface.__getitem__ = own_getitem

    def watched(
        self, source: EventSource, name: str, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function that calls this one, looks at the call, and returns its output."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not source.running:
                return function(*args, **kwargs)
            running = source.running[-1]
            attentions_before = running.attentions
            output = function(*args, **kwargs)
            was_seen = running.attentions > attentions_before
            if not was_seen and not torch.compiler.is_compiling():
                with source.guarded(running):
                    arguments = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
                    registered = _RegisteredCall(name, function, arguments, output)
                    self._report(source, running, registered)
            return output

        return call

    def _report(self, source: EventSource, call: Call, registered: _RegisteredCall) -> None:
        """Report a call as a candidate, with the first mask that explains its output.

        The mask is looked for once per module and shapes; afterwards the name of the guess is
        enough, and the guard repeats the comparison now and then.
        """
        if not self.can_measure(source, DotProduct, call, registered.query, registered.key):
            return
        shapes = registered.shapes
        settled_shapes, settled_name = source.guard.kernels.get(call.name, (None, None))
        is_settled = settled_shapes == shapes
        names_tried = []
        for guess in _guess_masks(registered.arguments):
            if is_settled and guess.name != settled_name:
                continue
            candidate = self.candidate(
                source,
                call,
                registered.attention(guess),
                (*shapes, guess.name),
                f"{self.name} {registered.name}",
            )
            if registered.arguments.get("dropout"):
                candidate.output_without_dropout = registered.without_dropout
            if is_settled:
                source.guard.on_attention(candidate)
                return
            if check_output(candidate) is None:
                source.guard.kernels[call.name] = (shapes, guess.name)
                source.guard.on_attention(candidate)
                return
            names_tried.append(guess.name)
        refusal = Refusal(
            Reason.GUARD,
            f"the output of attn_implementation={registered.name!r} is not softmax(s)·V of its "
            "queries and keys, whichever keys are taken to be seen "
            f"({', '.join(names_tried)}); use attn_implementation='sdpa'",
        )
        facts = AttentionFacts(f"{self.name} {registered.name}", refusal=refusal)
        source.guard.facts[call.name, 0] = facts
        source.refuse(call, source.calls_to(call), refusal)


def _states(output: Any) -> Tensor:
    """Return the states of a function, (B, Tq, H, dv), as (B, H, Tq, dv)."""
    return first_output(output).transpose(1, 2)


def _guess_masks(arguments: dict[str, Any]) -> Iterator[_MaskGuess]:
    """Yield which keys queries may see, the likeliest guess first.

    Worked example: 2 samples of 4 tokens, a mask of padding (2, 4) and no window. Guesses are
    "causal" (the keys up to the query, without padding) and "all keys" (without padding).
    """
    query = arguments["query"]
    mask = arguments.get("attention_mask")
    keys = arguments["key"].shape[2]
    if hasattr(mask, "mask_mod"):
        # A block mask of flex_attention says all there is to know.
        yield _MaskGuess("the block mask", read_block_mask(mask, query, arguments["key"]))
        return
    allowed: Tensor | None = None
    if isinstance(mask, Tensor) and mask.dim() == 4:
        allowed = mask[..., :keys]
        yield _MaskGuess("the mask given", allowed)
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        allowed = mask[:, None, None, -keys:] != 0  # padding: (B, 1, 1, Tk)
    if allowed is not None and allowed.dtype != torch.bool:
        # An additive mask that does not explain the output was not applied.
        yield _MaskGuess("all keys", None)
        return
    key_position = torch.arange(keys, device=query.device)
    # The last query sees all keys: there may be more keys than queries (a cache).
    query_position = key_position[keys - query.shape[2] :, None]  # (Tq, 1)
    is_visible = key_position <= query_position  # (Tq, Tk)
    window = arguments.get("sliding_window")
    if window:
        inside = is_visible & (query_position - key_position < window)
        yield _MaskGuess("causal and the sliding window", _both(inside, allowed))
    if allowed is None and query.shape[2] == keys:
        yield _MaskGuess("causal", None, causal=True)
    else:
        yield _MaskGuess("causal", _both(is_visible, allowed))
    yield _MaskGuess("all keys", allowed)


def _both(mask: Tensor, other: Tensor | None) -> Tensor:
    if other is None:
        return mask
    return mask & other
