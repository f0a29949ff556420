"""The gauges that joma brings."""

from __future__ import annotations

import math

from torch import Tensor

from joma._gauges.attention import AttentionStats
from joma._gauges.embedding import centred, correlated_share, embedding_coherence
from joma._gauges.rank import TopSingular
from joma._gauges.rank import effective_rank as _effective_rank
from joma._gauges.registry import gauge


@gauge("entropy", on="attention")
def entropy(stats: AttentionStats) -> Tensor:
    """Attention entropy in nats: low is sparse, ln(visible keys) is uniform."""
    return stats.entropy


@gauge("normalised_entropy", on="attention")
def normalised_entropy(stats: AttentionStats) -> Tensor:
    """Attention entropy over that of uniform attention: between 0 and 1 at any length."""
    return stats.normalised_entropy


@gauge("nonsink_entropy", on="attention")
def nonsink_entropy(stats: AttentionStats) -> Tensor:
    """Entropy in nats of the attention that is not on the first token."""
    return stats.nonsink_entropy


@gauge("sink_mass", on="attention")
def sink_mass(stats: AttentionStats) -> Tensor:
    """Share of attention on the first token."""
    return stats.sink_mass


@gauge("effective_tokens", on="attention")
def effective_tokens(stats: AttentionStats) -> Tensor:
    """exp(entropy): over how many tokens attention is spread."""
    return stats.effective_tokens


@gauge("max_logsumexp", on="attention", reduce="max")
def max_logsumexp(stats: AttentionStats) -> Tensor:
    """Largest logsumexp of the scores: grows without bound where logits do."""
    return stats.logsumexp


@gauge("stable_rank", on="weight", given="top")
def stable_rank(top: TopSingular) -> float:
    """‖W‖_F² / σ_max² of the lower MLP matrix (or the part asked for)."""
    return top.stable_rank


@gauge("spectral_norm", on="weight", given="top")
def spectral_norm(top: TopSingular) -> float:
    """The largest singular value."""
    return top.sigma


@gauge("effective_rank", on="weight")
def effective_rank(w: Tensor) -> float:
    """exp of the entropy of the normalised singular values."""
    return float(_effective_rank(w))


@gauge("correlated_neurons", on="weight")
def correlated_neurons(w: Tensor) -> float:
    """Share of neurons whose weights have |cos| ≥ ½ with those of another neuron (Section 7)."""
    return correlated_share(w) if bool(w.isfinite().all()) else math.nan


@gauge("effective_neurons", on="weight")
def effective_neurons(w: Tensor) -> float:
    """M²/Σ cos² over pairs of neurons' weights: how many independent ones there are, at most d (Section 7)."""
    return _cosines(w, "effective_number")


@gauge("effective_vocabulary", on="hidden")
def effective_vocabulary(states: Tensor) -> float:
    """M²/Σ cos² over pairs of tokens' representations: how many independent ones there are, at most d (Section 7)."""
    return _cosines(states, "effective_number")


def _cosines(states: Tensor, statistic: str) -> float:
    """One number of `Coherence`; NaN where states are not finite."""
    return float(getattr(embedding_coherence(states), statistic)) if bool(states.isfinite().all()) else math.nan


@gauge("coherence", on="hidden")
def coherence(states: Tensor) -> float:
    """Largest |cos| between the representations of different tokens."""
    return _cosines(states, "maximum")


@gauge("coherence_centred", on="hidden")
def coherence_centred(states: Tensor) -> float:
    """Largest |cos| between different tokens, their common mean taken away."""
    return _cosines(centred(states), "maximum")


@gauge("mean_cosine", on="hidden")
def mean_cosine(states: Tensor) -> float:
    """Mean |cos| between the representations of different tokens; √(2/(πd)) for random ones."""
    return _cosines(states, "mean")


@gauge("mean_cosine_centred", on="hidden")
def mean_cosine_centred(states: Tensor) -> float:
    """Mean |cos| between different tokens, their common mean taken away."""
    return _cosines(centred(states), "mean")
