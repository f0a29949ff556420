"""Real tokens and padding, from the mask that a self-attention applies.

The mask is the best evidence: a token that no real query of its sample sees is padding. What a
padded query itself sees shows nothing, since libraries differ. It may see the real keys (only keys
are masked), nothing (queries are masked, too), or everything (rows without keys are unmasked).

Worked examples, one row per query, x for a key that is seen:

    keys masked       both masked       rescued rows,      strictly causal    top-2 of scores
                                        causal, left
    x x x .           x x x .           x x x x  ← pad     . . . .            x x . .
    x x x .           x x x .           . x . .            x . . .            x . x .
    x x x .           x x x .           . x x .            x x . .            . x x .
    x x x .  ← pad    . . . .  ← pad    . x x x            x x x .            x . x .
    token 3           token 3           token 0            none: nobody       none: what is seen
    is padding        is padding        is padding         sees the last      depends on the scores
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from joma._measure.events.padding.patterns import (
    KeyPattern,
    chooses_equally_many,
    depends_on_distance,
    document_numbers,
    is_one_stretch,
    is_strictly_causal,
    reads_one_way,
    rescued_rows,
)

# States of tokens, int8 (B, T).
REAL = 1
PADDING = 0
UNKNOWN = -1  # the mask does not decide: real, unless an argument says padding
DOUBTFUL = -2  # the mask fits padding as well as a real token: an argument has to decide


def states_of_keys(is_seen: Tensor) -> Tensor:
    """Return the states (B, T) by a mask of keys (B, T) that all queries of a sample share."""
    return torch.where(is_seen, REAL, PADDING).to(torch.int8)


def states_of_pattern(sees: Tensor) -> Tensor:
    """Return the states (B, T) by a pattern (B, T, T): query i sees key j where sees[b, i, j]."""
    pattern = KeyPattern(sees)
    states = torch.full(sees.shape[:2], REAL, dtype=torch.int8, device=sees.device)
    if bool(sees.all()):
        return states
    # the pattern without rows that are padding for certain
    support = KeyPattern(sees & ~rescued_rows(pattern)[..., None])
    if bool(support.is_seen.all()):
        states[pattern.is_seen_by_itself_only] = UNKNOWN
        return _settle_lonely_tokens(support, states)
    if is_strictly_causal(pattern, support):
        return _states_of_strictly_causal(sees, support.is_seen)
    is_unseen = ~support.is_seen
    # Keys 0, 1 and 3 of a causal pattern are seen, and each sees itself: key 2 is padding. If what
    # is seen followed no rule, key 2 might be a real token that nobody attends to.
    follows_distance = depends_on_distance(pattern.sees, support.is_seen)[:, None]  # (B, 1)
    is_stretch = is_one_stretch(support.is_seen)[:, None]
    all_see_themselves = (pattern.sees_itself | is_unseen).all(dim=1, keepdim=True)
    may_be_top_k = chooses_equally_many(pattern)[:, None]
    states[is_unseen] = UNKNOWN
    states[is_unseen & ~may_be_top_k] = DOUBTFUL
    # Tokens 0 to 2 are seen and token 3 is not. That is padding, or the two largest scores of each
    # row, by chance: of random patterns of 8 tokens with a strong diagonal 1.5 % look so.
    #     x x . .
    #     x x . .
    #     . x x .
    #     x . x .
    states[is_unseen & all_see_themselves & is_stretch & may_be_top_k] = DOUBTFUL
    states[is_unseen & all_see_themselves & is_stretch & ~may_be_top_k] = PADDING
    states[is_unseen & all_see_themselves & follows_distance] = PADDING
    states[pattern.is_seen_by_itself_only & support.is_seen] = UNKNOWN
    return _settle_lonely_tokens(support, states)


# Samples of 5 and of 3 tokens, T = 5:
#     . . . . .     . . . . .
#     x . . . .     x . . . .
#     x x . . .     x x . . .
#     x x x . .     x x x . .  ← padding: key 3 is seen in the first sample, not in this one
#     x x x x .     x x x . .  ← padding: it comes after padding. In the first sample it is unknown.
def _states_of_strictly_causal(sees: Tensor, is_seen: Tensor) -> Tensor:
    """Return the states (B, T) where no token sees itself, so that nobody sees the last one."""
    is_seen_elsewhere = is_seen.any(dim=0, keepdim=True)  # in any sample, (1, T)
    sees_nothing = ~sees.any(dim=2)
    is_padding = ~is_seen & is_seen_elsewhere
    # where queries of padding are masked as well, a query that sees keys is real
    has_empty_rows = (is_padding & sees_nothing).any(dim=1, keepdim=True)  # (B, 1)
    is_padding = torch.where(has_empty_rows, is_padding & sees_nothing, is_padding)
    states = torch.full(is_seen.shape, REAL, dtype=torch.int8, device=sees.device)
    states[~is_seen & ~is_seen_elsewhere] = UNKNOWN
    states[is_padding] = PADDING
    if states.shape[1] > 1:
        states[:, -1] = torch.where(is_padding[:, -2], PADDING, states[:, -1])
    return states


#     x . . . .  ← doubtful     x . . .                    x x . . .
#     . x . . .  ← doubtful     . x . .  ← padding         x x . . .
#     . . x . .                 x . x .                    . . x x .
#     . . x x .                 x . x x                    . . x x .
#     . . x x x                                            . . . . x  ← a document of one token
def _settle_lonely_tokens(support: KeyPattern, states: Tensor) -> Tensor:
    """Settle tokens that see themselves only and that nobody else sees.

    They are padding where others look past them. At an end, next to one document, they are padding
    or documents of one token: doubtful. Next to several documents they are documents, too.
    """
    tokens = support.sees.shape[1]
    states = states.clone()
    states[reads_one_way(support)] = DOUBTFUL
    is_alone = (support.keys_per_query == 1) & (support.queries_per_key == 1)
    is_lonely = support.sees_itself & is_alone  # (B, T)
    if not bool(is_lonely.any()) or bool(is_lonely.all()):
        return states
    documents = document_numbers(support)  # (B, T)
    document_sizes = (documents[:, :, None] == documents[:, None]).sum(dim=2)  # (B, T)
    # The first and the last document of the other tokens. A sample of lonely tokens alone has
    # last = 0: it is one real token and padding, if other samples have more tokens.
    last = torch.where(is_lonely, 0, documents).amax(dim=1, keepdim=True)
    first = torch.where(is_lonely, tokens + 1, documents).amin(dim=1, keepdim=True)
    states[is_lonely & (last <= first)] = DOUBTFUL
    states[is_lonely & (document_sizes > 1)] = PADDING
    return states


class PatternMemory:
    """The states of the latest patterns, so that the rules run once per pattern.

    All layers of a pass and most passes of a training share a pattern. For 2,048 tokens the rules
    take 230 ms, and the fingerprint of the pattern 3 ms.
    """

    # A pass has few patterns: of full and sliding-window layers, of encoder and decoder.
    MOST_PATTERNS = 8

    def __init__(self) -> None:
        # shape and fingerprint -> states; a dict keeps them in the order of their arrival
        self._states: dict[tuple[tuple[int, ...], bytes], Tensor] = {}

    def states_of(self, sees: Tensor) -> Tensor:
        """Return `states_of_pattern`, from memory if the pattern is among the latest."""
        # on other devices the pattern would have to be copied, which costs as much as the rules
        if sees.device.type != "cpu":
            return states_of_pattern(sees)
        bits = np.packbits(sees.numpy())  # (B · T · T / 8,)
        fingerprint = hashlib.blake2b(bits.tobytes(), digest_size=16).digest()
        pattern = (tuple(sees.shape), fingerprint)
        states = self._states.get(pattern)
        if states is None:
            states = states_of_pattern(sees)
            while len(self._states) >= self.MOST_PATTERNS:
                self._states.pop(next(iter(self._states)))
            self._states[pattern] = states
        return states


latest_patterns = PatternMemory()
