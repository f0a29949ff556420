"""Masks (B, T) among the arguments of running modules, and the ways to read them.

The name of an argument says how it is usually read, but libraries differ:

    attention_mask      [1, 1, 1, 0]         1 at real tokens
    key_padding_mask    [F, F, F, T]         True at padding
    either              [0, 0, 0, -1e4]      added to the scores: very negative at padding
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._measure.events.padding.answer import TokenGrid

if TYPE_CHECKING:
    from joma._measure.events.events import Call

# arguments that are usually True at padding
PADDED_NAMES = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")
# An additive mask is below this at padding: −100, −1e4, −1e9, −inf.
ADDED_LIMIT = -50.0
# Integers (B, T) of 0 and 1 under these names are not masks.
_OTHER_NAMES = re.compile("position|token|type|label|target|ids")


@dataclass(frozen=True, eq=False)
class MaskReading:
    """One way to read a mask.

    Attributes:
        is_real: (B or 1, T), True at real tokens.
        convention: the way, in words.
    """

    is_real: Tensor
    convention: str


@dataclass(frozen=True, eq=False)
class MaskArgument:
    """An argument that claims to say which tokens are padding.

    Attributes:
        name: of the argument.
        rows: its value (B or 1, T).
        readings: the ways to read it, the likeliest first.
        owner: the module that was given it.
        inner: the module inside the owner that leads to the attention; None if the owner attends.
    """

    name: str
    rows: Tensor
    readings: tuple[MaskReading, ...]
    owner: Call
    inner: Call | None


def mask_rows(mask: Any, grid: TokenGrid) -> Tensor | None:
    """Return a mask (B or 1, T); None if the value is something else."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if mask.shape[1] != grid.tokens or mask.shape[0] not in (1, grid.samples):
        return None
    return mask.to(grid.device)


def read_stated_mask(rows: Tensor) -> Tensor:
    """Return True at real tokens, for a mask of the user that is 1 there or additive."""
    if _is_additive(rows):
        return rows > ADDED_LIMIT
    return rows != 0


def readings_of(rows: Tensor, true_is_padding: bool) -> tuple[MaskReading, ...]:
    """Return the ways to read a mask (B or 1, T), the likeliest first."""
    # [0, 0, -1e4]: one way. [1, 1, 0]: the first two are real, or the last one is.
    if _is_additive(rows):
        return (MaskReading(rows > ADDED_LIMIT, "additive"),)
    nonzero = MaskReading(rows != 0, "nonzero at real tokens")
    zero = MaskReading(rows == 0, "zero at real tokens")
    if true_is_padding:
        return (zero, nonzero)
    return (nonzero, zero)


def _is_additive(rows: Tensor) -> bool:
    return rows.is_floating_point() and bool((rows < 0).any())


def find_mask_argument(
    calls: tuple[Call, ...], is_self_attention: bool, grid: TokenGrid
) -> MaskArgument | None:
    """Return the argument of the innermost module that has one by name; None if there is none."""
    inner = None
    for call in reversed(calls):
        arguments = call.arguments
        for name in PADDED_NAMES:
            # in a cross-attention, key_padding_mask is about the memory, not about the queries
            if name == "key_padding_mask" and not is_self_attention:
                continue
            rows = mask_rows(arguments.get(name), grid)
            if rows is not None:
                readings = readings_of(rows, true_is_padding=True)
                return MaskArgument(name, rows, readings, call, inner)
        # likewise the attention_mask of the cross-attention itself; that of a module around it may
        # be about the queries
        if "attention_mask" in arguments and (is_self_attention or call is not calls[-1]):
            mask = arguments["attention_mask"]
            rows = mask_rows(mask, grid)
            if rows is not None:
                readings = readings_of(rows, true_is_padding=False)
                return MaskArgument("attention_mask", rows, readings, call, inner)
            # The library dropped a mask that is all ones: modules around it know nothing better.
            if mask is None:
                return None
        inner = call
    return None


def arguments_like_masks(calls: tuple[Call, ...], grid: TokenGrid) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value (B, T) of all arguments that hold two numbers, the innermost first."""
    # my_mask = [[1, 1, 0], [1, 0, 0]]: yes; token_type_ids, or states of any numbers: no
    for call in reversed(calls):
        for name, value in call.arguments.items():
            rows = mask_rows(value, grid)
            if rows is None or rows.shape[0] != grid.samples or _OTHER_NAMES.search(name):
                continue
            if _holds_two_numbers(rows):
                yield name, rows


def _holds_two_numbers(rows: Tensor) -> bool:
    if rows.dtype == torch.bool:
        return True
    if rows.is_floating_point() and bool(((rows == 0) | (rows < ADDED_LIMIT)).all()):
        return True
    return bool(((rows == 0) | (rows == 1)).all())


def names_padding(calls: tuple[Call, ...], tokens: int) -> bool:
    """True if an argument (any number of samples, T) says by its name that there is padding."""
    for call in calls:
        for name in (*PADDED_NAMES, "attention_mask"):
            mask = call.arguments.get(name)
            if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != tokens:
                continue
            likeliest = readings_of(mask, name in PADDED_NAMES)[0]
            if not bool(likeliest.is_real.all()):
                return True
    return False


def is_about_other_tokens(argument: MaskArgument) -> bool:
    """True if a mask is about another stream of tokens: those of a text, next to an image."""
    if argument.inner is None:
        return False
    # Another module inside the owner was found to apply it.
    confirmed_by = argument.owner.confirmed.get(argument.name)
    if confirmed_by is not None and confirmed_by is not argument.inner:
        return True
    # The module that leads to the attention gets pixel_values (B, 3, X, Y) of the owner, whose
    # second axis is not that of a mask (B, T).
    handed_on = _tensors_handed_on(argument.owner, argument.inner)
    if not handed_on:
        return False
    return all(value.shape[1:2] != argument.rows.shape[1:] for value in handed_on)


def _tensors_handed_on(owner: Call, inner: Call) -> list[Tensor]:
    """Return the arguments of a module that it passes as they are to a module inside it."""
    arguments = [value for value in owner.arguments.values() if isinstance(value, Tensor)]
    handed_on = []
    for value in (*inner.args, *inner.kwargs.values()):
        if isinstance(value, Tensor) and any(value is argument for argument in arguments):
            handed_on.append(value)
    return handed_on
