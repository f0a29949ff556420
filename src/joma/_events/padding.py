"""Which queries are padding: from the arguments of the modules that are running."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from joma._events.events import Call

# the model's argument that is 1 at real tokens, or a function of (args, kwargs) of the model that gives it
Padding = str | Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None]

# arguments (True for padding) that say which queries are padding; "attention_mask" says which are not
_PADDED = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")


def real_queries(
    calls: tuple[Call, ...], padding: Padding | None, B: int, T: int, device: torch.device
) -> Tensor | None:
    """(B or 1, 1, T), True for queries that are not padding, from the arguments of the modules that are running."""
    if callable(padding):
        return _rows(padding(calls[0].args, calls[0].kwargs), B, T, device)
    for call in reversed(calls):
        arguments = call.arguments
        if padding is not None:
            if padding in arguments:
                return _rows(arguments[padding], B, T, device)
            continue
        for name in _PADDED:
            if name == "key_padding_mask" and not (len(call.args) > 1 and call.args[0] is call.args[1]):
                continue  # of the memory that is attended to
            if (padded := _rows(arguments.get(name), B, T, device)) is not None:
                return ~padded
        if "attention_mask" in arguments:
            mask = arguments["attention_mask"]
            if mask is None or _rows(mask, B, T, device) is not None:
                return _rows(mask, B, T, device)
    return None


def _rows(mask: Any, B: int, T: int, device: torch.device) -> Tensor | None:
    """A mask (B or 1, T) of real queries as (B or 1, 1, T), or None if it is not one."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != T or mask.shape[0] not in (1, B):
        return None
    return (mask.to(device) != 0)[:, None]
