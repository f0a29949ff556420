"""What is known about one attention and how: backend, axes, mask, padding and check, for `joma.explain`.

Facts are written when the guard examines an attention with new shapes, never in the steps between.
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
    """What is known about one attention of a module.

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
    B, H, Tq = event.shape
    padded = 0
    if padding.is_real is not None:
        padded = B * Tq - int(padding.is_real.expand(B, 1, Tq).sum())
    return AttentionFacts(
        backend=candidate.backend,
        axes=_describe_axes(layout, candidate.shape, candidate.key_count),
        heads=H if layout.is_certain else None,
        heads_evidence=layout.evidence.summary,
        share=layout.share,
        mask=_describe_form(event),
        hides=_describe_hidden(event),
        queries=B * Tq,
        padded=padded,
        padding_evidence=padding.evidence.summary,
        check=candidate.comparison.compared,
        error=candidate.comparison.error,
    )


def _describe_axes(layout: Layout, shape: Sequence[int], keys: int) -> str:
    """Return the axes with their sizes.

    Worked example: scores (12, 14, 14) of 4 heads outside give "heads 4 · samples 3, queries 14, keys 14".
    """
    parts = []
    meanings = iter(layout.axes)
    for place, size in enumerate(shape):
        if place == layout.query_axis:
            parts.append(f"queries {size}")
            continue
        axis = next(meanings)
        if not layout.is_certain:
            parts.append(f"samples or heads {size}")
        elif axis.heads == 1:
            parts.append(f"samples {size}")
        elif axis.heads == axis.size:
            parts.append(f"heads {size}")
        else:
            merged = [f"samples {axis.size // axis.heads}", f"heads {axis.heads}"]
            parts.append(" · ".join(reversed(merged) if axis.has_heads_first else merged))
    return ", ".join([*parts, f"keys {keys}"])


def _describe_form(event: AttentionEvent) -> str:
    """Return the form in which a mask is applied."""
    if isinstance(event, Scores):
        return "in the scores"
    assert isinstance(event, DotProduct)
    if event.mask is None:
        return "causal" if event.causal else "none"
    form = "boolean" if event.mask.dtype == torch.bool else "additive"
    return f"causal and {form}" if event.causal else form


def _describe_hidden(event: AttentionEvent) -> str:
    """Return which keys are hidden, by the first head; a mask may differ from head to head.

    Worked example: two samples of 4 tokens, the second one with a padded key at its end, all of it
    causal: "later keys; 1 of 8 keys from all queries".
    """
    sees = _visible_keys(event)  # (B or 1, Tq or 1, Tk)
    if sees is None:
        return "nothing"
    parts = []
    by_key = sees.any(dim=1)  # (B or 1, Tk), True if a query sees the key
    never = int((~by_key).sum())
    queries, keys = sees.shape[1:]
    if queries > 1 and _hides_later(sees, queries, keys):
        parts.append("later keys")
    if never:
        samples = event.shape[0]
        factor = samples // sees.shape[0]
        parts.append(f"{never * factor} of {samples * keys} keys from all queries")
    if not parts and not bool(sees.all()):
        share = 1 - float(sees.double().mean())
        parts.append(f"{share:.0%} of pairs of query and key")
    return "; ".join(parts) or "nothing"


def _visible_keys(event: AttentionEvent) -> Tensor | None:
    """Return True for keys that the queries of the first head see, (B or 1, Tq or 1, Tk); None if all are candidate."""
    if isinstance(event, Scores):
        scores = event.scores[:, 0].detach()  # (B, Tq, columns)
        hidden = hidden_scores(scores, scores.amax(dim=-1, keepdim=True), lowest_seen(scores.dtype))
        return ~hidden[..., key_columns(event.learned_sink)]
    assert isinstance(event, DotProduct)
    Tq, Tk = event.query.shape[2], event.key.shape[2]
    causal = (
        torch.ones(Tq, Tk, dtype=torch.bool, device=event.device).tril()[None]
        if event.causal
        else None
    )
    if event.mask_facts is None:
        return causal
    keep = event.mask_facts.keep[:, 0].expand(-1, -1, Tk)
    return keep if causal is None else keep & causal


def _hides_later(sees: Tensor, queries: int, keys: int) -> bool:
    """True if no query sees a key behind its own token; the last query stands with the last key."""
    if queries > keys:
        return False
    # one sample at a time: a mask of long sequences is large
    return not any(bool(sample.triu(1 + keys - queries).any()) for sample in sees)
