"""Attentions of one module that make no sense one by one: differences, pieces, loops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from joma._measure.events.axes import attends_in_pieces
from joma._measure.events.axes.same_tokens import share_memory
from joma._measure.events.events import Call
from joma._measure.events.guard.candidate import AttentionCandidate
from joma._measure.events.reasons import Reason, Refusal


def refuse_mixture(attentions: Sequence[AttentionCandidate], outer: Call) -> Refusal | None:
    """Return why the attentions of one call of a module cannot be measured one by one, if so.

    ``outer`` is the module, or the one around it if it has no parameters.
    """
    for attention in attentions:
        refusal = _refuse_difference(attention, outer)
        if refusal is not None:
            return refusal
    refusal = _refuse_part(attentions[0])
    if refusal is not None:
        return refusal
    if len(attentions) < 2:
        return None
    measurable = [attention for attention in attentions if attention.refusal is None]
    for number, attention in enumerate(measurable):
        refusal = _refuse_pieces(attention, len(attentions))
        if refusal is not None:
            return refusal
        for earlier in measurable[:number]:
            refusal = _refuse_loop(attention, earlier, len(attentions))
            if refusal is not None:
                return refusal
    return None


# Differential attention: (softmax(q₁k₁) − λ softmax(q₂k₂)) V. Two maps share V and differ in K, and
# their outputs are subtracted.
def _refuse_difference(attention: AttentionCandidate, outer: Call) -> Refusal | None:
    """Refuse maps that share values but not keys, if ``outer`` adds or subtracts their outputs."""
    values = attention.values
    keys = attention.keys
    if not outer.combined or values is None or keys is None or values.dim() < 3 or keys.dim() < 3:
        return None
    has_two_maps = _has_two_maps_per_head(keys, values)
    if has_two_maps is None:
        others = [other for other in outer.examined if other is not attention]
        sharing = [other for other in others if _is_same_tensor(other.values, values)]
        has_two_maps = any(not _is_same_tensor(other.keys, keys) for other in sharing)
    if not has_two_maps:
        return None
    return Refusal(
        Reason.DIFFERENCE,
        "two attention maps over the same values are combined (a difference of two?): what the "
        "module attends to is neither of them",
    )


# values (2, 6, 14, 8) of 3 heads, each twice:
#     heads 0 1 2 0 1 2    two halves
#     heads 0 0 1 1 2 2    neighbours
def _has_two_maps_per_head(keys: Tensor, values: Tensor) -> bool | None:
    """True if values are there twice, with different keys; None if they are not there twice."""
    heads = values.shape[-3]
    if heads % 2 or keys.shape[-3] != heads:
        return None
    halves = (slice(None, heads // 2), slice(heads // 2, None))
    neighbours = (slice(None, None, 2), slice(1, None, 2))
    for first, second in (halves, neighbours):
        if torch.equal(values[..., first, :, :], values[..., second, :, :]):
            return not torch.equal(keys[..., first, :, :], keys[..., second, :, :])
    return None


# Input (2, 64, 32), four attentions with queries (2, 4, 16, 8): 16 of 64 tokens each.
def _refuse_pieces(attention: AttentionCandidate, count: int) -> Refusal | None:
    """Refuse attention over blocks of one sequence."""
    assert attention.query_axis is not None
    if not attends_in_pieces(attention.call, attention.shape, attention.query_axis):
        return None
    queries = attention.shape[attention.query_axis]
    return Refusal(
        Reason.PIECES,
        f"it attends in {count} pieces, {queries} queries in one of them (blocks of the sequence, "
        "landmarks); watch it with full attention, if it has that option",
    )


# PegasusX, input (2, 40, 32), 4 heads: scores (2, 4, 4, 44) of 4 global tokens are a product. Scores
# (2, 4, 5, 8, 12) of all other tokens, in 5 blocks of 8, are two products next to each other.
def _refuse_part(attention: AttentionCandidate) -> Refusal | None:
    """Refuse attention of a module whose other queries attend in a way that cannot be read."""
    chunks = attention.call.chunks
    if chunks is None:
        return None
    return Refusal(
        Reason.PIECES,
        f"what can be read of it is only a part: another softmax of the module, of {chunks}, is over "
        "scores that are put together from several products (chunks, blocks); watch it with full "
        "attention, if it has that option",
    )


# for h in range(4): attention of q[:, h], k[:, h], v[:, h]. Keys are views of one tensor, values
# are different views.
def _refuse_loop(
    attention: AttentionCandidate, earlier: AttentionCandidate, count: int
) -> Refusal | None:
    """Refuse a loop over heads or samples."""
    if attention.signature != earlier.signature or attention.keys is None or earlier.keys is None:
        return None
    if not share_memory(attention.keys, earlier.keys):
        return None
    if _is_same_tensor(attention.values, earlier.values):
        return None
    return Refusal(
        Reason.LOOP,
        f"it computes {count} attentions in one call, in a loop over heads or samples: it cannot "
        "be told which; compute them as one",
    )


def _is_same_tensor(tensor: Tensor | None, other: Tensor | None) -> bool:
    return tensor is not None and other is not None and tensor.data_ptr() == other.data_ptr()
