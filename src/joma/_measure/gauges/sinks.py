"""A learned sink next to the keys, from the statistics of the keys alone (GPT-OSS under a fused kernel).

A sink with logit a takes m = exp(a − L′) of the attention, L′ = ln(eᴸ + eᵃ); the keys keep their proportions, so that
H′ = h(m) + (1 − m) H.
"""

from __future__ import annotations

from torch import Tensor

from joma._measure.gauges.attention import AttentionStats
from joma._measure.gauges.tiles import combined


def with_learned_sink(stats: AttentionStats, logits: Tensor) -> AttentionStats:
    """The statistics (B, H, Tq) of keys and a sink per head with these logits (H,)."""
    a = logits.float().view(1, -1, 1).expand_as(stats.entropy)
    entropy, logsumexp, m, _ = combined(stats.entropy, stats.logsumexp, a)
    mass = m + (stats.logsumexp - logsumexp).exp() * stats.sink_mass
    entropy, logsumexp, mass = (x.float() for x in (entropy, logsumexp, mass))
    return AttentionStats(entropy, logsumexp, mass, stats.visible + 1, stats.nonsink_entropy)
