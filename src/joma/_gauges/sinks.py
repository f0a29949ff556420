"""A learned sink next to the keys, from the statistics of the keys alone (GPT-OSS under a fused kernel).

A sink with logit a takes m = exp(a − L′) of the attention, L′ = ln(eᴸ + eᵃ); the keys keep their proportions, so that
H′ = h(m) + (1 − m) H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from joma._gauges.attention import AttentionStats


def with_learned_sink(stats: AttentionStats, logits: Tensor) -> AttentionStats:
    """The statistics (B, H, Tq) of keys and a sink per head with these logits (H,)."""
    a = logits.float().view(1, -1, 1)
    logsumexp = torch.logaddexp(stats.logsumexp, a)
    m = (a - logsumexp).exp()
    rest = 1 - m
    binary = -(torch.special.xlogy(m, m) + torch.special.xlogy(rest, rest))
    first = rest * stats.sink_mass
    terms = -(torch.special.xlogy(m, m) + torch.special.xlogy(first, first))
    return AttentionStats(binary + rest * stats.entropy, logsumexp, m + first, stats.visible + 1, terms)
