"""Which positions are padding, from the mask that a self-attention applies.

The mask is the best evidence there is: a position that no real query of its sample can see as a key is padding. What a
padded query itself sees says nothing, since libraries differ: it may see the real keys (only keys are masked), nothing
(queries are masked too), or everything (a library unmasks rows that would see nothing, or fills them with one number).

Worked examples, one row per query, x for a key that is seen:

    keys masked       both masked       unmasked rows,     strictly causal    top-2 of scores
                                        causal, left
    x x x .           x x x .           x x x x  ← pad     . . . .            x . x .
    x x x .           x x x .           . x . .            x . . .            x x . .
    x x x .           x x x .           . x x .            x x . .            . x x .
    x x x .  ← pad    . . . .  ← pad    . x x x            x x x .            x . x .
    position 3        position 3        position 0         none: nobody       none: what is seen
    is padding        is padding        is padding         sees the last      depends on the scores
"""

from __future__ import annotations

import torch
from torch import Tensor

REAL, PADDING, UNKNOWN = 1, 0, -1


def positions_of(sees: Tensor) -> Tensor:
    """REAL, PADDING or UNKNOWN (B, T), of a self-attention in which query i of sample b sees key j: sees (B, T, T)."""
    B, T, _ = sees.shape
    states = torch.full((B, T), REAL, dtype=torch.int8, device=sees.device)
    if bool(sees.all()):
        return states
    supports = sees & ~_unmasked_rows(sees)[..., None]  # what queries see that may be real
    is_seen = supports.any(dim=1)  # (B, T), by key
    is_doubtful = _is_seen_by_itself_only(sees)
    if bool(is_seen.all()):
        states[is_doubtful] = UNKNOWN
        return states
    sees_itself = sees.diagonal(dim1=1, dim2=2)  # (B, T)
    if not bool((sees_itself & is_seen).any()):
        return _strictly_causal(sees, is_seen)
    is_regular = (sees_itself | ~is_seen).all(dim=1) & (_is_product(sees, is_seen) | is_one_stretch(is_seen))
    states[~is_seen] = UNKNOWN
    states[~is_seen & is_regular[:, None]] = PADDING
    states[is_doubtful & is_seen] = UNKNOWN
    return states


def positions_of_keys(keep: Tensor) -> Tensor:
    """REAL or PADDING (B, T), of a mask (B, T) that all queries of a sample share."""
    return torch.where(keep, REAL, PADDING).to(torch.int8)


def _unmasked_rows(sees: Tensor) -> Tensor:
    """Rows (B, T) that see everything only because they would see nothing else.

    In causal attention: rows that see all keys, later ones too, which no other row does. Otherwise: rows that see all
    keys, while their own key is seen by no row that does not. The last row of a prefix that is followed by causal
    attention is such a row and real; it comes after one that sees all keys but the last.
    """
    is_full = sees.all(dim=2)
    is_partial = sees.any(dim=2) & ~is_full
    sees_later = sees.triu(1).any(dim=2)
    has_partial = is_partial.any(dim=1)  # (B,)
    is_causal = ~(sees_later & is_partial).any(dim=1) & has_partial
    by_others = (sees & is_partial[..., None]).any(dim=1)
    by_all_others = (sees | ~is_partial[..., None]).all(dim=1)
    elsewhere = is_full & ~by_others & has_partial[:, None]
    if sees.shape[1] > 1:
        grows = is_partial[:, -2] & sees[:, -2, :-1].all(dim=1) & (by_others != by_all_others).any(dim=1)
        elsewhere[:, -1] &= ~grows
    return torch.where(is_causal[:, None], is_full & sees_later, elsewhere)


def _is_seen_by_itself_only(sees: Tensor) -> Tensor:
    """Positions (B, T) that only their own query sees: padding that a library lets see itself, or a last token."""
    by_others = sees.sum(dim=1) - sees.diagonal(dim1=1, dim2=2).long() > 0
    return ~by_others & sees.diagonal(dim1=1, dim2=2)


def _is_product(sees: Tensor, is_seen: Tensor) -> Tensor:
    """Is the mask of a sample (B,) one of keys, times causal or full attention, as far as real queries go?"""
    T = sees.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=sees.device).tril()
    ignored = ~is_seen[..., None]  # queries that are padding if their keys are
    full = ((sees == is_seen[:, None]) | ignored).all(dim=2).all(dim=1)
    as_causal = ((sees == (causal & is_seen[:, None])) | ignored).all(dim=2).all(dim=1)
    return full | as_causal


def is_one_stretch(is_seen: Tensor) -> Tensor:
    """Do the keys that are seen stand next to one another, with padding on one or both sides? (B,)"""
    begins = is_seen.clone()
    begins[:, 1:] &= ~is_seen[:, :-1]
    return begins.sum(dim=1) <= 1


def _strictly_causal(sees: Tensor, is_seen: Tensor) -> Tensor:
    """No token sees itself: what is seen in no sample may be real; and a query that sees keys where others see none is.

    Worked example, T = 5: samples of 5 and of 3 tokens. Key 4 is seen in neither sample, and key 3 in the first
    one only: it is padding in the second, and so is key 4, which comes after it.
    """
    is_unseen = ~is_seen
    possible = is_seen.any(dim=0, keepdim=True)  # (1, T)
    sees_nothing = ~sees.any(dim=2)
    is_padding = is_unseen & possible
    has_empty = (is_padding & sees_nothing).any(dim=1, keepdim=True)
    is_padding = torch.where(has_empty, is_padding & sees_nothing, is_padding)
    states = torch.full(is_seen.shape, REAL, dtype=torch.int8, device=sees.device)
    states[is_unseen & ~possible] = UNKNOWN
    states[is_padding] = PADDING
    if states.shape[1] > 1:
        states[:, -1] = torch.where(is_padding[:, -2], PADDING, states[:, -1])
    return states
