"""Modules that ran and should attend, without an attention being seen in them, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from joma._measure.events.reasons import Reason
from joma._measure.events.source import EventSource
from joma._measure.watch.inputs import looks_like_attention

_SCRIPTED = f"it is TorchScript, which runs outside of Python: watch the model before torch.jit {Reason.TORCHSCRIPT}"
_NOTHING = (
    "neither scaled_dot_product_attention nor a softmax over a product of queries and keys ran in it (a recurrence, or "
    "a kernel that is not PyTorch's); if it attends, use scaled_dot_product_attention or torch.softmax"
)
# operations of a TorchScript graph
_FUSED = "aten::scaled_dot_product_attention"
_SOFTMAX = "aten::softmax"
_PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum")


def unseen_modules(
    source: EventSource, explained: Iterable[str], is_complete: bool = False
) -> dict[str, str]:
    """Return module -> a sentence with the cause, of modules that ran and look like attention.

    Modules in or around one that is ``explained`` (measured, or refused) are left out, and so are modules around
    another one in the table: the innermost has the cause. If ``is_complete``, other modules that computed something
    similar to attention, such as routers, have a row, too.
    """
    set_aside = source.guard.set_aside
    ran = {name: module for module, name in source.names.items() if name in source.ran}
    names = [
        name
        for name, module in ran.items()
        if looks_like_attention(type(module)) or _is_scripted(module)
    ]
    if is_complete:
        names += [name for name in set_aside if name in ran and name not in names]
    explained = list(explained)
    causes: dict[str, str] = {}
    for name in names:
        is_around = any(_is_in(other, name) for other in names)
        is_explained = any(
            other == name or _is_in(other, name) or _is_in(name, other) for other in explained
        )
        if is_around or is_explained:
            continue
        inside = [
            reason for other, reason in set_aside.items() if other == name or _is_in(other, name)
        ]
        cause = _cause(ran[name], inside[0] if inside else None)
        causes[name] = (
            f"{name} ({_class_name(ran[name])}) ran, but no attention was seen in it: {cause}"
        )
    return causes


def _is_in(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")


def _cause(module: nn.Module, set_aside: str | None) -> str:
    if _is_scripted(module):
        return _SCRIPTED
    if set_aside is not None:
        return set_aside
    kernel = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if isinstance(kernel, str) and kernel not in ("eager", "sdpa"):
        return f"attn_implementation={kernel!r} is a kernel that was not seen; load the model with 'sdpa' {Reason.UNSEEN}"
    return f"{_NOTHING} {Reason.UNSEEN}"


def _is_scripted(module: nn.Module) -> bool:
    """True for TorchScript that attends: fused, or with a softmax and two products."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    graph: Any = module.inlined_graph
    products = sum(len(graph.findAllNodes(kind)) for kind in _PRODUCTS)
    return bool(graph.findAllNodes(_FUSED)) or (
        bool(graph.findAllNodes(_SOFTMAX)) and products >= 2
    )


def _class_name(module: nn.Module) -> str:
    return (
        module.original_name
        if isinstance(module, torch.jit.ScriptModule)
        else type(module).__name__
    )
