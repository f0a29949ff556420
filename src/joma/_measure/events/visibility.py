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

import hashlib

import numpy as np
import torch
from torch import Tensor

REAL, PADDING = 1, 0
UNKNOWN = -1  # the mask says nothing: real, unless an argument says padding
DOUBTFUL = -2  # the mask fits padding as well as a real token: an argument has to decide
# Positions (B, T) of the latest patterns, by fingerprint; a dict keeps them in the order of their arrival.
_remembered: dict[tuple[tuple[int, ...], bytes], Tensor] = {}
_MOST_PATTERNS = 8


def positions_of(sees: Tensor) -> Tensor:
    """Return REAL, PADDING, UNKNOWN or DOUBTFUL (B, T); query i of sample b sees key j where sees[b, i, j]."""
    B, T, _ = sees.shape
    states = torch.full((B, T), REAL, dtype=torch.int8, device=sees.device)
    if bool(sees.all()):
        return states
    supports = sees & ~_unmasked_rows(sees)[..., None]  # what queries see that may be real
    is_seen = supports.any(dim=1)  # (B, T), by key
    is_doubtful = _is_seen_by_itself_only(sees)
    if bool(is_seen.all()):
        states[is_doubtful] = UNKNOWN
        return _with_lonely_tokens(supports, states)
    sees_itself = sees.diagonal(dim1=1, dim2=2)  # (B, T)
    # the first token of strictly causal attention may see itself instead of nothing
    sees_more = supports.diagonal(dim1=1, dim2=2) & (sees.sum(dim=2) > 1)
    looks_elsewhere = bool((supports & ~torch.eye(T, dtype=torch.bool, device=sees.device)).any())
    if not bool(((sees_more if looks_elsewhere else sees_itself) & is_seen).any()):
        return _strictly_causal(sees, is_seen)
    is_regular = (sees_itself | ~is_seen).all(dim=1) & (
        _is_product(sees, is_seen) | is_one_stretch(is_seen)
    )
    states[~is_seen] = UNKNOWN
    states[~is_seen & ~_chooses_as_many(sees)[:, None]] = DOUBTFUL
    states[~is_seen & is_regular[:, None]] = PADDING
    states[is_doubtful & is_seen] = UNKNOWN
    return _with_lonely_tokens(supports, states)


def remembered_positions_of(sees: Tensor) -> Tensor:
    """Return `positions_of`, worked out once per pattern.

    All layers of a pass and most passes of a training share a pattern. For 2,048 tokens the rules take 230 ms, and
    the fingerprint of the pattern 3 ms. On other devices the pattern would have to be copied: there, the rules run.
    """
    if sees.device.type != "cpu":
        return positions_of(sees)
    bits = np.packbits(sees.numpy())
    key = (tuple(sees.shape), hashlib.blake2b(bits.tobytes(), digest_size=16).digest())
    states = _remembered.get(key)
    if states is None:
        states = positions_of(sees)
        while len(_remembered) >= _MOST_PATTERNS:
            _remembered.pop(next(iter(_remembered)))
        _remembered[key] = states
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
        follows = is_partial[:, -2] & sees[:, -2, :-1].all(dim=1)
        grows = follows & (by_others != by_all_others).any(dim=1)
        elsewhere[:, -1] &= ~grows
        sees_later[:, -1] |= elsewhere[:, -1] & ~follows  # there is nothing later than the last one
    return torch.where(is_causal[:, None], is_full & sees_later, elsewhere)


def _is_seen_by_itself_only(sees: Tensor) -> Tensor:
    """Positions (B, T) that only their own query sees: padding that a library lets see itself, or a last token."""
    by_others = sees.sum(dim=1) - sees.diagonal(dim1=1, dim2=2).long() > 0
    return ~by_others & sees.diagonal(dim1=1, dim2=2)


def _is_product(sees: Tensor, is_seen: Tensor) -> Tensor:
    """True (B,) if the mask of a sample is one of keys, times a pattern, as far as real queries go.

    A pattern depends on the distance of query and key alone: full or causal attention, a sliding or a dilated window.
    """
    B, T, _ = sees.shape
    positions = torch.arange(T, device=sees.device)
    distance = (positions[:, None] - positions + T - 1).flatten()  # (T · T,), from 0
    counts = is_seen[:, :, None] & is_seen[:, None]  # queries are padding if their keys are
    zeros = torch.zeros(B, 2 * T - 1, device=sees.device)
    index = distance.expand(B, -1)
    pairs = zeros.scatter_add(1, index, counts.flatten(1).float())  # by distance
    seen_pairs = zeros.scatter_add(1, index, (counts & sees).flatten(1).float())
    return ((seen_pairs == 0) | (seen_pairs == pairs)).all(dim=1)


def _chooses_as_many(sees: Tensor) -> Tensor:
    """True (B,) if queries see equally many keys, as they do if they choose the largest scores, causally or not."""
    T = sees.shape[1]
    counts = sees.sum(dim=2)  # (B, T)
    most = counts.amax(dim=1, keepdim=True)
    earlier = torch.arange(1, T + 1, device=sees.device).minimum(most)  # (B, T)
    return (counts == most).all(dim=1) | (counts == earlier).all(dim=1)


def _with_lonely_tokens(sees: Tensor, states: Tensor) -> Tensor:
    """Settle tokens that see themselves only and that nobody else sees; rows that a library unmasks are left out.

    Where others look over them they are padding. Where they stand at an end, next to one document, they are padding
    or documents of one token: doubtful. Next to several documents they are one, too.

        x . . . .  ← doubtful     x . . .                    x x . . .
        . x . . .  ← doubtful     . x . .  ← padding         x x . . .
        . . x . .                 x . x .                    . . x x .
        . . x x .                 x . x x                    . . x x .
        . . x x x                                            . . . . x  ← a document of one token
    """
    T = sees.shape[1]
    states = states.clone()
    states[_is_one_way(sees)] = DOUBTFUL
    sees_itself = sees.diagonal(dim1=1, dim2=2)
    is_lonely = sees_itself & (sees.sum(dim=2) == 1) & (sees.sum(dim=1) == 1)  # (B, T)
    if not bool(is_lonely.any()) or bool(is_lonely.all()):
        return states
    either = sees | sees.mT
    first = torch.where(either.any(dim=2), either.to(torch.uint8).argmax(dim=2), T)  # (B, T)
    reach = (
        first.flip(1).cummin(dim=1).values.flip(1)
    )  # the first key that this or a later token has to do with
    begins = reach >= torch.arange(T, device=sees.device)
    document = begins.cumsum(dim=1)  # (B, T), numbers from 1
    size = (document[:, :, None] == document[:, None]).sum(dim=2)  # (B, T)
    last = torch.where(is_lonely, 0, document).amax(dim=1, keepdim=True)  # of the other tokens
    first_document = torch.where(is_lonely, T + 1, document).amin(dim=1, keepdim=True)
    # a sample of lonely tokens alone (last is 0) is one real token and padding, if other samples have more of them
    states[is_lonely & (last <= first_document)] = DOUBTFUL
    states[is_lonely & (size > 1)] = PADDING
    return states


def _is_one_way(sees: Tensor) -> Tensor:
    """True (B, T) at tokens that see others, while nobody else sees them, in a mask that is regular without them.

    Padding that a library lets see itself is like that, and so are tokens that only read. The last token of causal
    attention is such a token and real, if the one before it is none.

        x . . . .
        x x . . .
        x x x . .
        x x x x .  ← doubtful
        x x x . x  ← doubtful
    """
    sees_others = sees.sum(dim=2) > 1
    is_one_way = _is_seen_by_itself_only(sees) & sees_others
    if sees.shape[1] > 1:
        is_causal = ~sees.triu(1).any(dim=2).any(dim=1)  # (B,)
        is_one_way[:, -1] &= is_one_way[:, -2] | ~is_causal
    is_seen = sees.any(dim=1)
    is_regular = _is_product(sees, is_seen & ~is_one_way) & ~_is_product(sees, is_seen)
    return is_one_way & is_regular[:, None]


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
