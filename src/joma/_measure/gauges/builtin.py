"""The gauges that joma brings."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from joma._measure.gauges.attention import AttentionStats
from joma._measure.gauges.embedding import (
    centred,
    correlated_share,
    effective_number,
    embedding_coherence,
)
from joma._measure.gauges.logits import SINK, DotProductLogits, Logits, Received
from joma._measure.gauges.rank import TopSingular
from joma._measure.gauges.rank import effective_rank as _effective_rank
from joma._measure.gauges.registry import gauge


@gauge("entropy", on="attention")
def entropy(stats: AttentionStats) -> Tensor:
    """Attention entropy in nats: low is sparse, ln(visible keys) is uniform. A learned sink counts as one key."""
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


@gauge("max_logit", on="attention", reduce="max")
def max_logit(stats: AttentionStats) -> Tensor:
    """Largest attention logit, as the softmax is given it; certified to 0.1 %. For QK-clip."""
    return stats.max_logit


@gauge("query_norm", on="attention", reduce="max")
def query_norm(stats: AttentionStats) -> Tensor:
    """Largest ‖q‖ of a query; not of eager attention."""
    return _dot_product(stats.logits).query.float().norm(dim=-1)


@gauge("key_norm", on="keys", reduce="max")
def key_norm(received: Received) -> Tensor:
    """Largest ‖k‖ of a key that is seen; not of eager attention."""
    return _largest_norm(_dot_product(received.logits).key, received)


@gauge("value_norm", on="keys", reduce="max")
def value_norm(received: Received) -> Tensor:
    """Largest ‖v‖ of a value that is seen; not of eager attention."""
    value = _dot_product(received.logits).value
    assert value is not None
    return _largest_norm(value, received)


def _largest_norm(x: Tensor, received: Received) -> Tensor:
    """Return the largest norm (B, H) of the keys or values (B, Hk, Tk, d) that a query sees."""
    norms = x.float().norm(dim=-1)  # (B, Hk, Tk)
    group = received.weights.shape[1] // norms.shape[1]
    norms = norms.repeat_interleave(group, dim=1)  # (B, H, Tk)
    return torch.where(received.seen_by > 0, norms, 0.0).amax(dim=-1)


def _dot_product(logits: Logits | None) -> DotProductLogits:
    if not isinstance(logits, DotProductLogits):
        raise ValueError("eager attention shows its scores only, not queries, keys and values")
    return logits


@gauge("largest_share", on="keys")
def largest_share(received: Received) -> Tensor:
    """Largest mean attention that a key gets from the queries that see it: a sink, wherever it is."""
    return received.largest_share


@gauge("sink_rate", on="keys")
def sink_rate(received: Received) -> Tensor:
    """Share of samples in which some key gets more than 0.3 of the attention of the queries that see it."""
    share = received.largest_share
    return torch.where(share.isnan(), math.nan, (share > SINK).to(share.dtype))


@gauge("stable_rank", on="weight", given="top")
def stable_rank(top: TopSingular) -> float:
    """‖W‖_F² / σ_max² of the lower MLP matrix (or the part asked for)."""
    return top.stable_rank


@gauge("spectral_norm", on="weight", given="top", reduce="max")
def spectral_norm(top: TopSingular) -> float:
    """The largest singular value."""
    return top.sigma


@gauge("effective_rank", on="weight")
def effective_rank(w: Tensor) -> float:
    """exp of the entropy of the normalised singular values."""
    return float(_effective_rank(w))


@gauge("gradient_norm", on="gradient")
def gradient_norm(g: Tensor) -> float:
    """‖G‖_F of the gradient that the optimiser uses (after clipping and unscaling); needs optimizer=."""
    has_float64 = g.device.type in ("cpu", "cuda")
    if has_float64:
        g = g.double()
    else:
        g = g.float()
    return float(torch.linalg.vector_norm(g))


@gauge("gradient_rank", on="gradient", given="top")
def gradient_rank(top: TopSingular) -> float:
    """Stable rank of the gradient; needs optimizer=."""
    return top.stable_rank


@gauge("update_ratio", on="update")
def update_ratio(d: Tensor) -> float:
    """‖ΔW‖_F / ‖W‖_F of an optimiser's step; needs optimizer=."""
    return gradient_norm(d)


@gauge("update_rank", on="update", given="top")
def update_rank(top: TopSingular) -> float:
    """Stable rank of what an optimiser's step adds; needs optimizer=."""
    return top.stable_rank


@gauge("change", on="change")
def change(d: Tensor) -> float:
    """‖ΔW‖_F / ‖W‖_F since the checkpoint before; in scans."""
    return gradient_norm(d)


@gauge("change_rank", on="change", given="top")
def change_rank(top: TopSingular) -> float | None:
    """Stable rank of ΔW since the checkpoint before; none if nothing has changed; in scans."""
    if top.sigma == 0:
        return None
    return top.stable_rank


class ChargeState(Protocol):
    """A charge of one layer at one time: numbers, or one per head (heads,); NaN where they are not known."""

    balance: Tensor
    drift: Tensor
    residual: Tensor | None


@gauge("charge", on="charge")
def charge(state: ChargeState) -> Tensor:
    """Balance of a charge: ‖X − Y‖/(‖X‖ + ‖Y‖) of its sides, 0 if equal, 1 if one is missing; stream: mean square."""
    return state.balance


@gauge("charge_drift", on="charge", is_of_training=True)
def charge_drift(state: ChargeState) -> Tensor:
    """Motion of a charge since the first measurement, relative to its sides then; in training only."""
    return state.drift


@gauge("charge_residual", on="charge", is_of_training=True)
def charge_residual(state: ChargeState) -> Tensor | None:
    """Relative error of the gradient identity of a charge: rounding, or a bug; needs optimizer=."""
    return state.residual


@gauge("correlated_neurons", on="weight")
def correlated_neurons(w: Tensor) -> float:
    """Share of neurons whose weights have |cos| ≥ ½ with those of another neuron (Section 7)."""
    if not bool(w.isfinite().all()):
        return math.nan
    return correlated_share(w)


@gauge("effective_neurons", on="weight")
def effective_neurons(w: Tensor) -> float | None:
    """M²/Σ cos² over pairs of neurons' weights: how many independent ones there are, at most d (Section 7)."""
    return _effective_number(w)


@gauge("effective_vocabulary", on="hidden")
def effective_vocabulary(states: Tensor) -> float | None:
    """M²/Σ cos² over pairs of tokens' representations: how many independent ones there are, at most d (Section 7)."""
    return _effective_number(states)


def _effective_number(rows: Tensor) -> float | None:
    """Return NaN if rows (M, d) are not finite, and None if there are no two of them."""
    if not bool(rows.isfinite().all()):
        return math.nan
    return effective_number(rows)


def _cosines(states: Tensor, statistic: str) -> float | None:
    """Return one number of `Coherence`: NaN if states are not finite, None if there are no two rows to compare."""
    if not bool(states.isfinite().all()):
        return math.nan
    coherence = embedding_coherence(states)
    if coherence.rows < 2:
        return None
    return float(getattr(coherence, statistic))


@gauge("coherence", on="hidden")
def coherence(states: Tensor) -> float | None:
    """Largest |cos| between the representations of different tokens."""
    return _cosines(states, "maximum")


@gauge("coherence_centred", on="hidden")
def coherence_centred(states: Tensor) -> float | None:
    """Largest |cos| between different tokens, their common mean taken away."""
    return _cosines(centred(states), "maximum")


@gauge("mean_cosine", on="hidden")
def mean_cosine(states: Tensor) -> float | None:
    """Mean |cos| between the representations of different tokens; √(2/(πd)) for random ones."""
    return _cosines(states, "mean")


@gauge("mean_cosine_centred", on="hidden")
def mean_cosine_centred(states: Tensor) -> float | None:
    """Mean |cos| between different tokens, their common mean taken away."""
    return _cosines(centred(states), "mean")
