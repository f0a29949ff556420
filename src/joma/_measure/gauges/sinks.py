"""Attention with a learned sink, from the statistics of the keys alone.

GPT-OSS has such sinks, and a fused kernel does not see them.

A sink with logit a takes m = exp(a − L′) of the attention, L′ = ln(eᴸ + eᵃ). The keys keep their
proportions, so that H′ = h(m) + (1 − m) H.
"""

from __future__ import annotations

from torch import Tensor

from joma._measure.gauges.attention import AttentionStats
from joma._measure.gauges.tiles import combined


def with_learned_sink(stats: AttentionStats, logits: Tensor) -> AttentionStats:
    """Return the statistics (B, H, Tq) of keys and one sink per head with these logits (H,)."""
    at_sink = logits.float().view(1, -1, 1).expand_as(stats.entropy)  # (H,) -> (B, H, Tq)
    entropy, logsumexp, learned_mass, _ = combined(stats.entropy, stats.logsumexp, at_sink)
    # The sink among the keys keeps its share of what the learned one leaves.
    mass = learned_mass + (stats.logsumexp - logsumexp).exp() * stats.sink_mass
    return AttentionStats(
        entropy=entropy.float(),
        logsumexp=logsumexp.float(),
        sink_mass=mass.float(),
        visible=stats.visible + 1,
        nonsink_entropy=stats.nonsink_entropy,
    )
