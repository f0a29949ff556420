"""Attention that models of Hugging Face resolve by name: flash, flex, hub kernels and registered functions.

All of them come out of `AttentionInterface`, by ``get_interface`` or by item. In a measured pass, item access (which
``get_interface`` uses as well) gives a function that calls the one registered, and looks at what it was given and what
it gave. If the function calls PyTorch's own attention inside, that was seen already. If it is a kernel that cannot be
looked into, its arguments say little about the mask (a function that is registered without a mask function of its name
gets none at all), so the guard decides by the output: padding, causal, sliding window, or all keys.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._measure.events.events import BlockInput, Call, DotProduct
from joma._measure.events.facts import AttentionFacts
from joma._measure.events.flash import first_of
from joma._measure.events.flex import mask_of_blocks
from joma._measure.events.functions import plain_layout
from joma._measure.events.guard import Seen, disagreement
from joma._measure.events.reasons import Reason, Refusal

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

_SEEN_ANYWAY = ("sdpa", "eager", "paged|eager")
_ARGUMENTS = ("module", "query", "key", "value", "attention_mask")


@contextmanager
def interface_watched(source: EventSource) -> Iterator[None]:
    """Look at the functions that are taken from `AttentionInterface` within this block."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if interface is None:
        yield
        return
    pristine, own = interface.__getitem__, vars(interface).get("__getitem__")

    def item(self: Any, name: str) -> Any:
        function = pristine(self, name)
        return function if name in _SEEN_ANYWAY else _looked_at(source, name, function)

    interface.__getitem__ = item
    try:
        yield
    finally:
        if own is None:
            del interface.__getitem__
        else:
            interface.__getitem__ = own


def _looked_at(source: EventSource, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        running = source.running[-1] if source.running else None
        before = 0 if running is None else running.attentions
        output = function(*args, **kwargs)
        if (
            running is not None
            and running.attentions == before
            and not torch.compiler.is_compiling()
        ):
            with source.guarded(running):
                given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
                _on_kernel(source, running, name, function, output, given)
        return output

    return call


def _on_kernel(
    source: EventSource,
    call: Call,
    name: str,
    function: Callable[..., Any],
    output: Any,
    given: dict[str, Any],
) -> None:
    """A kernel was called in the module ``call``: an event, if its output says which keys a query sees."""
    query, key, value = given["query"], given["key"], given["value"]  # (B, H or Hk, T, d)
    if not source.wants(DotProduct, BlockInput) or not source.measurable(call, query, key):
        return

    def without_dropout(b: int) -> Tensor:
        settings = {k: v for k, v in given.items() if k not in _ARGUMENTS} | {"dropout": 0.0}
        return _states(function(*(given.get(k) for k in _ARGUMENTS), **settings))[b]

    settings = {
        "query": query, "key": key, "value": value, "scale": given.get("scaling"),
        "gqa": query.shape[1] != key.shape[1], "output": _states(output), "softcap": given.get("softcap"),
        "learned_sinks": given.get("s_aux"),
    }  # fmt: skip
    shapes = (
        query.shape,
        key.shape,
        query.dtype,
        getattr(given.get("attention_mask"), "shape", None),
    )
    verdict = source.guard.kernels.get(call.name)
    tried = []
    for which, mask, causal in _masks(given):
        if verdict is not None and verdict[0] == shapes and verdict[1] != which:
            continue
        seen = Seen(
            DotProduct, call, source.calls_to(call), key=(*shapes, which), keys=key,
            fields={**settings, "mask": mask, "causal": causal}, values=value,
            replay=without_dropout if given.get("dropout") else None,
            query_axis=2, layout=plain_layout(query), backend=f"kernel {name}",
        )  # fmt: skip
        if verdict is not None and verdict[0] == shapes:
            source.guard.sees(seen)
            return
        if disagreement(seen) is None:
            source.guard.kernels[call.name] = (shapes, which)
            source.guard.sees(seen)
            return
        tried.append(which)
    refusal = Refusal(
        Reason.GUARD,
        f"the output of attn_implementation={name!r} is not softmax(s)·V of its queries and keys, whichever keys are "
        f"taken to be seen ({', '.join(tried)}); use attn_implementation='sdpa'",
    )
    source.guard.facts[call.name, 0] = AttentionFacts(f"kernel {name}", refusal=refusal)
    source.refuse(call, source.calls_to(call), refusal)


def _states(output: Any) -> Tensor:
    """What the function gave, (B, Tq, H, dv), as (B, H, Tq, dv)."""
    return first_of(output).transpose(1, 2)


def _masks(given: dict[str, Any]) -> Iterator[tuple[str, Tensor | None, bool]]:
    """What queries may see, by the likeliest first: its name, mask and whether it is plainly causal."""
    query, key, mask = given["query"], given["key"], given.get("attention_mask")
    Tq, Tk = query.shape[2], key.shape[2]
    position = torch.arange(Tk, device=query.device)
    ahead = position > position[Tk - Tq :, None]  # the last query sees all keys
    window = given.get("sliding_window")
    given_mask: Tensor | None = None
    if hasattr(mask, "mask_mod"):  # of flex_attention
        yield "the block mask", mask_of_blocks(mask, query, key), False
        return
    if isinstance(mask, Tensor) and mask.dim() == 4:
        given_mask = mask[..., :Tk]
        yield "the mask given", given_mask, False
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        given_mask = mask[:, None, None, -Tk:] != 0  # padding
    if given_mask is not None and given_mask.dtype != torch.bool:
        yield "all keys", None, False
        return
    everyone = (
        torch.ones((), dtype=torch.bool, device=query.device) if given_mask is None else given_mask
    )
    if window:
        inside = ~ahead & (position[Tk - Tq :, None] - position < window)
        yield "causal and the sliding window", inside & everyone, False
    plain = given_mask is None and Tq == Tk
    yield "causal", None if plain else ~ahead & everyone, plain
    yield "all keys", given_mask, False
