"""Facts about one attention for `joma.explain`: backend, axes, mask, padding and check.

They are collected when the guard examines an attention with new shapes, never in the steps between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from joma._measure.events.events import AttentionEvent, DotProduct, Scores
from joma._measure.events.reasons import Refusal
from joma._measure.gauges.masks import hidden_scores, key_columns, lowest_seen

if TYPE_CHECKING:
    from joma._measure.events.axes import Layout
    from joma._measure.events.guard import AttentionCandidate
    from joma._measure.events.padding import PaddingAnswer


@dataclass(frozen=True)
class AttentionFacts:
    """Facts about one attention of a module.

    Attributes:
        backend: the function that computes it.
        axes: its axes in the module's own order, with their sizes.
        heads: how many there are; None if they are not certain or the attention is refused.
        heads_evidence: what shows which axis holds the heads.
        share: the share of its queries that the module attends with.
        mask: the form in which the mask is applied.
        hides: which keys it hides.
        queries: how many queries there are, samples × tokens.
        padded: how many of them are padding and left out.
        padding_evidence: what shows which they are.
        check: what was compared with what.
        error: the largest difference, relative to the largest number compared; None if nothing was.
        refusal: why it is not measured, if so.
    """

    backend: str
    axes: str = ""
    heads: int | None = None
    heads_evidence: str = ""
    share: float = 1.0
    mask: str = ""
    hides: str = ""
    queries: int | None = None
    padded: int | None = None
    padding_evidence: str = ""
    check: str = ""
    error: float | None = None
    refusal: Refusal | None = None


def refused_facts(candidate: AttentionCandidate, refusal: Refusal) -> AttentionFacts:
    """Return what is known about an attention that is refused."""
    axes = f"{tuple(candidate.shape)}, keys {candidate.key_count}"
    if candidate.layout is not None:
        axes = _describe_axes(candidate.layout, candidate.shape, candidate.key_count)
    return AttentionFacts(
        candidate.backend,
        axes,
        check=candidate.comparison.compared,
        error=candidate.comparison.error,
        refusal=refusal,
    )


def measured_facts(
    candidate: AttentionCandidate, event: AttentionEvent, padding: PaddingAnswer
) -> AttentionFacts:
    """Return what is known about an attention that is measured."""
    layout = candidate.layout
    assert layout is not None
    samples, heads, queries = event.shape
    padded = 0
    if padding.is_real is not None:
        padded = samples * queries - int(padding.is_real.expand(samples, 1, queries).sum())
    certain_heads = None
    if layout.is_certain:
        certain_heads = heads
    return AttentionFacts(
        backend=candidate.backend,
        axes=_describe_axes(layout, candidate.shape, candidate.key_count),
        heads=certain_heads,
        heads_evidence=layout.evidence.summary,
        share=layout.share,
        mask=_describe_form(event),
        hides=_describe_hidden(event),
        queries=samples * queries,
        padded=padded,
        padding_evidence=padding.evidence.summary,
        check=candidate.comparison.compared,
        error=candidate.comparison.error,
    )


def _describe_axes(layout: Layout, shape: Sequence[int], keys: int) -> str:
    """Return the axes with their sizes.

    Worked example: scores (12, 14, 14) of 4 heads outside give
    "heads 4 · samples 3, queries 14, keys 14".
    """
    parts = []
    other_axes = iter(layout.axes)
    for place, size in enumerate(shape):
        if place == layout.query_axis:
            parts.append(f"queries {size}")
            continue
        axis = next(other_axes)
        if not layout.is_certain:
            parts.append(f"samples or heads {size}")
        elif axis.heads == 1:
            parts.append(f"samples {size}")
        elif axis.heads == axis.size:
            parts.append(f"heads {size}")
        elif axis.has_heads_first:
            parts.append(f"heads {axis.heads} · samples {axis.size // axis.heads}")
        else:
            parts.append(f"samples {axis.size // axis.heads} · heads {axis.heads}")
    parts.append(f"keys {keys}")
    return ", ".join(parts)


def _describe_form(event: AttentionEvent) -> str:
    """Return the form in which a mask is applied."""
    if isinstance(event, Scores):
        return "in the scores"
    assert isinstance(event, DotProduct)
    forms = []
    if event.causal:
        forms.append("causal")
    if event.mask is not None and event.mask.dtype == torch.bool:
        forms.append("boolean")
    elif event.mask is not None:
        forms.append("additive")
    return " and ".join(forms) or "none"


def _describe_hidden(event: AttentionEvent) -> str:
    """Return which keys are hidden, by the first head; a mask may differ from head to head.

    Worked example: two samples of 4 tokens, the second one with a padded key at its end, all of it
    causal: "later keys; 1 of 8 keys from all queries".
    """
    sees = _visible_keys(event)  # (B or 1, Tq or 1, Tk)
    if sees is None:
        return "nothing"
    parts = []
    is_seen_by_any = sees.any(dim=1)  # (B or 1, Tk)
    never_seen = int((~is_seen_by_any).sum())
    queries, keys = sees.shape[1:]
    if queries > 1 and _hides_later(sees, queries, keys):
        parts.append("later keys")
    if never_seen:
        samples = event.shape[0]
        samples_per_mask = samples // sees.shape[0]
        parts.append(f"{never_seen * samples_per_mask} of {samples * keys} keys from all queries")
    if not parts and not bool(sees.all()):
        hidden_share = 1 - float(sees.double().mean())
        parts.append(f"{hidden_share:.0%} of pairs of query and key")
    return "; ".join(parts) or "nothing"


def _visible_keys(event: AttentionEvent) -> Tensor | None:
    """Return True for keys that the queries of the first head see; None if they see all.

    The shape is (B or 1, Tq or 1, Tk).
    """
    if isinstance(event, Scores):
        scores = event.scores[:, 0].detach()  # (B, Tq, columns)
        largest = scores.amax(dim=-1, keepdim=True)
        hidden = hidden_scores(scores, largest, lowest_seen(scores.dtype))
        return ~hidden[..., key_columns(event.learned_sink)]
    assert isinstance(event, DotProduct)
    queries = event.query.shape[2]
    keys = event.key.shape[2]
    visible: Tensor | None = None
    if event.causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=event.device).tril()[None]
    if event.mask_facts is not None:
        by_mask = event.mask_facts.keep[:, 0].expand(-1, -1, keys)  # (B or 1, Tq or 1, Tk)
        if visible is None:
            visible = by_mask
        else:
            visible = by_mask & visible
    return visible


def _hides_later(sees: Tensor, queries: int, keys: int) -> bool:
    """True if no query sees a key behind its own token; the last query stands with the last key."""
    if queries > keys:
        return False
    # One sample at a time: a mask of long sequences is large.
    for sample in sees:
        if bool(sample.triu(1 + keys - queries).any()):
            return False
    return True
