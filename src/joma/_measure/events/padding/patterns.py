"""Properties of a pattern of visible keys: which query sees which key of its own sequence.

The drawings have one row per query and an x for a key that the query sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeyPattern:
    """The keys that the queries of each sample see, with counts that several rules need.

    Attributes:
        sees: booleans (B, T, T); query i of sample b sees key j where sees[b, i, j].
    """

    sees: Tensor

    @cached_property
    def sees_itself(self) -> Tensor:
        """True (B, T) at queries that see the key of their own token."""
        return self.sees.diagonal(dim1=1, dim2=2)

    @cached_property
    def keys_per_query(self) -> Tensor:
        """Numbers (B, T) of keys that a query sees."""
        return self.sees.sum(dim=2)

    @cached_property
    def queries_per_key(self) -> Tensor:
        """Numbers (B, T) of queries that see a key."""
        return self.sees.sum(dim=1)

    @cached_property
    def is_seen(self) -> Tensor:
        """True (B, T) at keys that a query sees."""
        return self.sees.any(dim=1)

    @cached_property
    def is_seen_by_itself_only(self) -> Tensor:
        """True (B, T) at keys that only their own query sees."""
        # padding that a library lets see itself, or the last token of causal attention
        by_others = self.queries_per_key - self.sees_itself.long() > 0
        return ~by_others & self.sees_itself


# Of 4 tokens, the first is padding, attention is causal, and padding is masked. Its row would see
# nothing, so the library lets it see everything (softmax of an empty row is NaN):
#     x x x x  ← rescued
#     . x . .
#     . x x .
#     . x x x
def rescued_rows(pattern: KeyPattern) -> Tensor:
    """Return True (B, T) at rows that see all keys only because they would see none.

    In causal attention these are rows that see all keys, later ones too, as no other row does.
    Elsewhere they are rows that see all keys while only such rows see their own key.
    """
    sees = pattern.sees
    is_full = sees.all(dim=2)  # (B, T)
    is_partial = sees.any(dim=2) & ~is_full
    sees_later = sees.triu(1).any(dim=2)
    has_partial = is_partial.any(dim=1)  # (B,)
    is_causal = ~(sees_later & is_partial).any(dim=1) & has_partial
    by_others = (sees & is_partial[..., None]).any(dim=1)  # keys that a partial row sees, (B, T)
    by_all_others = (sees | ~is_partial[..., None]).all(dim=1)  # keys that all of them see
    elsewhere = is_full & ~by_others & has_partial[:, None]
    if sees.shape[1] > 1:
        # A prefix that sees itself, followed by causal attention: the last row sees everything and
        # is real. It comes after a row that sees all keys but the last.
        #     x x x .
        #     x x x .
        #     x x x .  ← follows
        #     x x x x  ← real, if the rows before see different numbers of keys
        follows = is_partial[:, -2] & sees[:, -2, :-1].all(dim=1)
        grows = follows & (by_others != by_all_others).any(dim=1)
        elsewhere[:, -1] &= ~grows
        # There is no later key than the last, so the causal rule needs help in the last row.
        sees_later[:, -1] |= elsewhere[:, -1] & ~follows
    return torch.where(is_causal[:, None], is_full & sees_later, elsewhere)


# A mask of keys times a pattern of distances (here causal, key 2 is padding):
#     x . . .        key 2 is seen by nobody; among the other tokens, what is seen depends on the
#     x x . .        distance alone: all pairs at distances 0, 1, 2, 3, none at −1, −2, −3
#     x x . .
#     x x . x
def depends_on_distance(sees: Tensor, is_token: Tensor) -> Tensor:
    """Return True (B,) if the distance of query and key decides what is seen among tokens (B, T).

    It does in full and causal attention, and in sliding and dilated windows.
    """
    samples, tokens, _ = sees.shape
    positions = torch.arange(tokens, device=sees.device)
    # shifted so that distances start from 0, (T · T,)
    distances = (positions[:, None] - positions + tokens - 1).flatten()
    index = distances.expand(samples, -1)  # (B, T · T)
    counts = is_token[:, :, None] & is_token[:, None]  # pairs of tokens, (B, T, T)
    zeros = torch.zeros(samples, 2 * tokens - 1, device=sees.device)
    pairs = zeros.scatter_add(1, index, counts.flatten(1).float())  # by distance, (B, 2T − 1)
    seen_pairs = zeros.scatter_add(1, index, (counts & sees).flatten(1).float())
    return ((seen_pairs == 0) | (seen_pairs == pairs)).all(dim=1)


# [. x x x .]: one stretch, padded on both sides. [x x . x x]: two.
def is_one_stretch(is_seen: Tensor) -> Tensor:
    """Return True (B,) if the keys (B, T) that are seen stand next to one another."""
    begins = is_seen.clone()
    begins[:, 1:] &= ~is_seen[:, :-1]
    return begins.sum(dim=1) <= 1


# The two largest scores of each row; causally, the first row has one key only:
#     x . x .        x . . .
#     x x . .        x x . .
#     . x x .        . x x .
#     x . x .        x . x .
def chooses_equally_many(pattern: KeyPattern) -> Tensor:
    """Return True (B,) if all queries see equally many keys, causally or not (top-k attention).

    A key that nobody chose is then not padding.
    """
    tokens = pattern.sees.shape[1]
    counts = pattern.keys_per_query  # (B, T)
    most = counts.amax(dim=1, keepdim=True)  # (B, 1)
    causal_counts = torch.arange(1, tokens + 1, device=counts.device).minimum(most)  # (B, T)
    return (counts == most).all(dim=1) | (counts == causal_counts).all(dim=1)


# Token i sees the tokens before it, and the first one itself instead of nothing:
#     x . . .
#     x . . .
#     x x . .
#     x x x .
def is_strictly_causal(pattern: KeyPattern, support: KeyPattern) -> bool:
    """True if no token, in any sample, sees itself next to others."""
    tokens = pattern.sees.shape[1]
    identity = torch.eye(tokens, dtype=torch.bool, device=pattern.sees.device)
    if bool((support.sees & ~identity).any()):
        sees_itself = support.sees_itself & (pattern.keys_per_query > 1)
    else:
        sees_itself = pattern.sees_itself
    return not bool((sees_itself & support.is_seen).any())


#     x . . . .
#     x x . . .
#     x x x . .
#     x x x x .  ← reads one way
#     x x x . x  ← reads one way
def reads_one_way(pattern: KeyPattern) -> Tensor:
    """Return True (B, T) at tokens that see others while nobody else sees them.

    Padding that a library lets see itself is like that, and so are tokens that only read. It counts
    only in a pattern that is regular without these tokens and irregular with them.
    """
    sees = pattern.sees
    is_one_way = pattern.is_seen_by_itself_only & (pattern.keys_per_query > 1)
    if sees.shape[1] > 1:
        # The last token of causal attention is such a token and real, if the one before it is none.
        is_causal = ~sees.triu(1).any(dim=2).any(dim=1)  # (B,)
        is_one_way[:, -1] &= is_one_way[:, -2] | ~is_causal
    is_regular_without = depends_on_distance(sees, pattern.is_seen & ~is_one_way)
    is_regular_with = depends_on_distance(sees, pattern.is_seen)
    return is_one_way & (is_regular_without & ~is_regular_with)[:, None]


# Two documents of two tokens and one of one token:
#     x x . . .     document 1
#     x x . . .     document 1
#     . . x x .     document 2
#     . . x x .     document 2
#     . . . . x     document 3
def document_numbers(pattern: KeyPattern) -> Tensor:
    """Return the document (B, T) of each token, counted from 1.

    A document begins where neither a token nor any later one has to do with an earlier token.
    """
    tokens = pattern.sees.shape[1]
    is_linked = pattern.sees | pattern.sees.mT  # in either direction, (B, T, T)
    has_link = is_linked.any(dim=2)
    first_link = torch.where(has_link, is_linked.to(torch.uint8).argmax(dim=2), tokens)  # (B, T)
    # the first token that this token or a later one is linked with
    reach = first_link.flip(1).cummin(dim=1).values.flip(1)
    begins = reach >= torch.arange(tokens, device=pattern.sees.device)
    return begins.cumsum(dim=1)
