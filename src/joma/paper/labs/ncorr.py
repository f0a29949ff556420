"""NCorr (Section 6): how well single hidden nodes of an MLP represent the latents of the same layer.

For each latent of layer s the best hidden node of block s: the largest normalised correlation, over samples and after
centring, between the latent and the node's maximal activation over the sequence; then the mean over latents.

A best of hundreds of nodes over few distinct samples is large for any features at all, so a value means something
only beside two baselines: the untrained network, and latents permuted over samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from joma.paper.labs.hierarchy import HierarchyTransformer, Training, train
from joma.paper.labs.hierarchy_data import Hierarchy, HierarchySamples, make_hierarchy

SAMPLES = 1280  # the authors' number of test samples
# Activations have 32 bits. A node that is equal in all samples differs there by some 1e-7 of itself, in
# an order that depends on the processor: taken at unit length, this noise correlates with latents.
ROUNDING = 1e-5
LAYERS = (0, 1)  # of latents: s = 0 next to the tokens

Floats = NDArray[np.float64]


def best_correlation(latents: ArrayLike, activations: ArrayLike) -> Floats:
    """The largest correlation of each latent with any node: (N, n), (N, H) -> (n,).

    NaN for a latent that is the same in all samples: it has no correlation. A node that is constant correlates 0.
    """
    y, a = np.asarray(latents, dtype=np.float64), np.asarray(activations, dtype=np.float64)
    if y.ndim != 2 or a.ndim != 2 or len(y) != len(a) or len(y) < 2 or not a.shape[1]:
        raise ValueError(
            f"latents (N, n) and activations (N, H) need the same N ≥ 2 and H ≥ 1, got shapes {y.shape} and {a.shape}"
        )
    return np.asarray(np.max(_directions(y).T @ np.nan_to_num(_directions(a)), axis=1))


def held_out_correlation(latents: ArrayLike, activations: ArrayLike) -> float:
    """NCorr without the luck of the best of many: each latent's node is chosen on one half of the samples and scored on
    the other, both ways; the mean over latents (N, n) and nodes (N, H). NaN if no latent varies in both halves."""
    y, a = np.asarray(latents, dtype=np.float64), np.asarray(activations, dtype=np.float64)
    halves = [
        (_directions(y[half]), np.nan_to_num(_directions(a[half])))
        for half in (slice(0, None, 2), slice(1, None, 2))
    ]
    scores = []
    for choose, score in (halves, halves[::-1]):
        best = (choose[0].T @ choose[1]).argmax(
            axis=1
        )  # of a latent that is constant here: node 0, and NaN below
        scores.append((score[0] * score[1][:, best]).sum(axis=0) + 0.0 * choose[0].sum(axis=0))
    return _mean(np.mean(scores, axis=0))


def _directions(x: Floats) -> Floats:
    """Return columns centred and of unit length; NaN where they are constant up to rounding."""
    centred = x - x.mean(axis=0)
    constant = np.ptp(x, axis=0) <= ROUNDING * np.abs(x).max(axis=0)
    norm = np.where(constant, np.nan, np.linalg.norm(centred, axis=0))
    return np.asarray(centred / norm)


def _mean(values: Floats) -> float:
    """Mean over the latents that vary; NaN if none does."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


class NCorr(NamedTuple):
    """NCorr of each layer of latents, (2,) each, and what it is to be compared with."""

    value: Floats
    permuted: Floats  # latents permuted over the distinct samples: the mean over permutations
    held_out: (
        Floats  # nodes chosen on one half of the draws and scored on the other; NaN without noise
    )
    held_out_permuted: Floats  # the same with latents permuted over the draws
    permuted_draws: (
        Floats  # latents permuted over `SAMPLES` draws; without noise it takes copies for evidence
    )


def maximal_activations(model: HierarchyTransformer, x: NDArray[np.int64]) -> list[Floats]:
    """Of each block, the maximal activation over the sequence: (N, T) -> (N, hidden) each."""
    device = model.embed.weight.device
    with torch.no_grad():
        parts = [
            model.hidden(torch.from_numpy(part).to(device))[1]
            for part in np.array_split(x, 1 + len(x) // 128)
        ]
    return [
        torch.cat([a.amax(dim=1) for a in block]).double().cpu().numpy()
        for block in zip(*parts, strict=True)
    ]


def measure_ncorr(
    model: HierarchyTransformer, data: Hierarchy, seed: int = 0, permutations: int = 20
) -> NCorr:
    """NCorr of a model and its permuted nulls.

    Without noise the samples are the C sequences, once each: what `SAMPLES` draws tend to. With noise they are drawn.
    """
    if len(model.blocks) < len(LAYERS):
        raise ValueError(
            f"NCorr compares {len(LAYERS)} layers of latents, the model has {len(model.blocks)} block"
        )
    if permutations < 1:
        raise ValueError(f"permutations must be ≥ 1, got {permutations}")
    rng = np.random.default_rng((seed, 2))
    labels = data.draw_labels(SAMPLES, rng)
    samples: HierarchySamples = data.distinct() if data.rho == 1 else data.sample(labels, rng)
    draws = labels if data.rho == 1 else np.arange(SAMPLES)  # rows of samples
    activations = maximal_activations(model, samples.x)
    layers = []
    for s in LAYERS:
        y, a = samples.latents[s], activations[s]
        nulls = [
            _mean(best_correlation(y[rng.permutation(len(y))], a)) for _ in range(permutations)
        ]
        permuted_draws = _mean(best_correlation(y[draws][rng.permutation(SAMPLES)], a[draws]))
        held_out = held_out_permuted = float("nan")
        if data.rho < 1:
            held_out = held_out_correlation(y, a)
            orders = [rng.permutation(len(y)) for _ in range(permutations)]
            held_out_permuted = float(
                np.mean([held_out_correlation(y[order], a) for order in orders])
            )
        layers.append(
            (
                _mean(best_correlation(y, a)),
                float(np.mean(nulls)),
                held_out,
                held_out_permuted,
                permuted_draws,
            )
        )
    return NCorr(*(np.array(values) for values in zip(*layers, strict=True)))


def train_and_measure(
    sizes: tuple[int, int, int, int], d: int, training: Training, seed: int, show: Callable[[int], None],
    rho: float = 1.0,
) -> tuple[dict[str, Floats], dict[str, float], list[float]]:  # fmt: skip
    """Return NCorr of one network on one hierarchy by state, what it has learned of the classes, and its losses.

    Arguments:
        sizes: N0, N1, N_ch and C of the data.
        d: of the embeddings.
        seed: of data, weights and samples.
        show: called with the number of the step.
        rho: of the data; below 1 there are also held-out states.
    """
    data = make_hierarchy(*sizes, rho=rho, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HierarchyTransformer(data.M, data.C, d)
    before = measure_ncorr(model, data, seed)
    losses = train(model, data, training, seed, show).losses
    after = measure_ncorr(model, data, seed)
    distinct = data.distinct()
    with torch.no_grad():
        guess = model(torch.from_numpy(distinct.x)).argmax(dim=1).numpy()
    states = {
        "untrained": before.value, "trained": after.value, "permuted": after.permuted,
        "untrained permuted": before.permuted, "permuted draws": after.permuted_draws,
    }  # fmt: skip
    if rho < 1:
        states |= {"trained held out": after.held_out, "untrained held out": before.held_out}
        states["permuted held out"] = after.held_out_permuted
    scores = {
        "loss": float(np.mean(losses[-10:])),
        "accuracy": float((guess == distinct.labels).mean()),
        # classes with the same tokens cannot be told apart
        "possible accuracy": len(np.unique(distinct.x, axis=0)) / data.C,
    }
    return states, scores, losses
