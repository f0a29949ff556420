"""Modules that look like attention and ran, but showed none, and the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from joma._measure.events.reasons import Reason
from joma._measure.events.source import EventSource
from joma._measure.watch.inputs import looks_like_attention

_SCRIPTED = (
    "it is TorchScript, which runs outside of Python: watch the model before torch.jit "
    f"{Reason.TORCHSCRIPT}"
)
_NOTHING = (
    "neither scaled_dot_product_attention nor a softmax over a product of queries and keys ran in "
    "it (a recurrence, or a kernel that is not PyTorch's); if it attends, use "
    "scaled_dot_product_attention or torch.softmax"
)
# Operations of a TorchScript graph.
_FUSED = "aten::scaled_dot_product_attention"
_SOFTMAX = "aten::softmax"
_PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum")


def unseen_modules(
    source: EventSource, explained: Iterable[str], is_complete: bool = False
) -> dict[str, str]:
    """Return module -> a sentence with the cause, for modules that ran and look like attention.

    Arguments:
        source: the events of the passes.
        explained: modules that were measured or refused. They are left out, and so are the modules
            in and around them.
        is_complete: True to include modules that computed something similar to attention, such as
            routers.

    Returns:
        One sentence per module. Of modules inside each other, only the innermost has one.
    """
    set_aside = source.guard.set_aside
    explained = list(explained)
    # A wrapper and the module in it may have one name: the module comes last, and counts.
    ran = {name: module for module, name in source.names.items() if name in source.ran}
    names = []
    for name, module in ran.items():
        if looks_like_attention(type(module)) or _is_scripted(module):
            names.append(name)
    if is_complete:
        names += [name for name in set_aside if name in ran and name not in names]
    causes: dict[str, str] = {}
    for name in names:
        is_around = any(_is_in(other, name) for other in names)
        is_explained = any(_are_nested(name, other) for other in explained)
        if is_around or is_explained:
            continue
        cause = _cause(ran[name], _reason_inside(name, set_aside))
        title = _class_name(ran[name])
        causes[name] = f"{name} ({title}) ran, but no attention was seen in it: {cause}"
    return causes


def _reason_inside(name: str, set_aside: Mapping[str, str]) -> str | None:
    """Return why the first attention in a module was set aside; None if there was none."""
    for other, reason in set_aside.items():
        if other == name or _is_in(other, name):
            return reason
    return None


def _are_nested(name: str, other: str) -> bool:
    return other == name or _is_in(other, name) or _is_in(name, other)


def _is_in(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")


def _cause(module: nn.Module, set_aside: str | None) -> str:
    if _is_scripted(module):
        return _SCRIPTED
    if set_aside is not None:
        return set_aside
    kernel = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if isinstance(kernel, str) and kernel not in ("eager", "sdpa"):
        return (
            f"attn_implementation={kernel!r} is a kernel that was not seen; load the model with "
            f"'sdpa' {Reason.UNSEEN}"
        )
    return f"{_NOTHING} {Reason.UNSEEN}"


def _is_scripted(module: nn.Module) -> bool:
    """True for TorchScript that attends: fused, or with a softmax and two products."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    graph: Any = module.inlined_graph
    products = sum(len(graph.findAllNodes(kind)) for kind in _PRODUCTS)
    if graph.findAllNodes(_FUSED):
        return True
    return bool(graph.findAllNodes(_SOFTMAX)) and products >= 2


def _class_name(module: nn.Module) -> str:
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    return type(module).__name__
