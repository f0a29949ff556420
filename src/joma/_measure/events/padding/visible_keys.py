"""The keys that the queries of a self-attention see, whatever the form of its mask."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from joma._measure.events.events import AttentionEvent, DotProduct, Scores
from joma._measure.events.padding.patterns import is_one_stretch
from joma._measure.events.padding.token_states import REAL, latest_patterns, states_of_keys
from joma._measure.gauges.masks import Mask, hidden_scores, lowest_seen

# The layers of a pass share a mask: its states are worked out once. None: the mask is no evidence.
_states_of_masks: WeakKeyDictionary[Mask, Tensor | None] = WeakKeyDictionary()


def states_by_mask(event: AttentionEvent) -> Tensor | None:
    """Return the states of tokens (B or 1, T) by the mask of a self-attention; None if it has none.

    The states are those of `token_states`.
    """
    if not isinstance(event, DotProduct):
        return _states_by_visible_keys(event)
    mask = event.mask_facts
    if mask is None:
        tokens = event.shape[2]
        if event.key.shape[2] == tokens:
            # causal, or everything is seen
            return torch.full((1, tokens), REAL, dtype=torch.int8, device=event.device)
        return _states_by_visible_keys(event)
    if mask not in _states_of_masks:
        _states_of_masks[mask] = _states_by_visible_keys(event)
    return _states_of_masks[mask]


def _states_by_visible_keys(event: AttentionEvent) -> Tensor | None:
    sees = visible_keys(event)
    if sees is None:
        return None
    if sees.shape[1] == 1:
        return states_of_keys(sees[:, 0])
    return latest_patterns.states_of(sees)


def visible_keys(event: AttentionEvent) -> Tensor | None:
    """Return which keys the queries see, (B or 1, T or 1, T).

    None if heads see different keys, or if keys and queries are different tokens.
    """
    query_count = event.shape[2]
    if isinstance(event, Scores):
        return _visible_in_scores(event, query_count)
    assert isinstance(event, DotProduct)
    key_count = event.key.shape[2]
    mask = event.mask_facts
    if key_count != query_count and (event.causal or mask is None):
        return None
    if event.causal:
        causal = torch.ones(query_count, query_count, dtype=torch.bool, device=event.device).tril()
        return causal[None]  # (1, T, T)
    if mask is None:
        return torch.ones(1, 1, key_count, dtype=torch.bool, device=event.device)
    keep = mask.keep.expand(-1, -1, -1, key_count)  # (B or 1, H or 1, Tq or 1, Tk)
    if keep.shape[1] > 1 and not bool((keep == keep[:, :1]).all()):
        return None
    return _keys_of_own_tokens(keep[:, 0], query_count)


def _visible_in_scores(event: Scores, query_count: int) -> Tensor | None:
    """Read visible keys from eager scores (B, H, Tq, columns) of the first and the last head."""
    scores = event.scores
    lowest = lowest_seen(scores.dtype)
    by_head: list[Tensor] = []
    for head in dict.fromkeys((0, scores.shape[1] - 1)):
        columns = scores[:, head].detach()  # (B, Tq, columns)
        is_hidden = hidden_scores(columns, columns.amax(dim=-1, keepdim=True), lowest)
        if event.learned_sink == 0:
            is_hidden = is_hidden[..., 1:]
        elif event.learned_sink is not None:
            is_hidden = is_hidden[..., :-1]
        sees = _keys_of_own_tokens(~is_hidden, query_count)
        if sees is None:
            return None
        by_head.append(sees)
        # Nothing is hidden: the other head would only repeat it.
        if not bool(is_hidden.any()):
            break
    if len(by_head) > 1 and not torch.equal(by_head[0], by_head[1]):
        return None
    return by_head[0]


# Learned or cached keys stand before or behind the queries' own tokens, and every query sees them.
#     x x x . .  with 4 queries: column 0 is seen by all: the own tokens are x x . .
# Where every query sees both ends, the own tokens are those with padding on one side only:
#     x x x . . x  with 5 queries: one key before leaves x x . . x, with a hole;
#                                  one key behind leaves x x x . ., padded at the end
def _keys_of_own_tokens(sees: Tensor, query_count: int) -> Tensor | None:
    """Return the columns of keys (B, Tq or 1, Tk) that are the queries' own tokens.

    None if that is not clear.
    """
    extra = sees.shape[-1] - query_count
    if extra == 0:
        return sees
    if extra < 0:
        return None
    without_first = sees[..., extra:]
    without_last = sees[..., :query_count]
    if bool(sees.all()):
        return without_first
    sees_any = sees.any(dim=-1, keepdim=True)
    can_be_first = bool((sees[..., :extra] | ~sees_any).all())
    can_be_last = bool((sees[..., query_count:] | ~sees_any).all())
    if can_be_first and can_be_last:
        can_be_first = bool(is_one_stretch(without_first.any(dim=1)).all())
        can_be_last = bool(is_one_stretch(without_last.any(dim=1)).all())
    if can_be_first == can_be_last:
        return None
    if can_be_first:
        return without_first
    return without_last
