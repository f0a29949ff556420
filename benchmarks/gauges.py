"""Gauges against what one would use instead: the entropy formula on a materialised attention matrix, and a full SVD."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import joma
from benchmarks._timing import alternate
from joma._gauges.rank import top_singular


def run(rounds: int = 3) -> list[dict[str, Any]]:
    """Attention entropy of one layer at two lengths; stable rank of a hard and of an easy matrix, cold and warm."""
    return [_entropy(2048, rounds), _entropy(4096, rounds), *_ranks("Gaussian"), *_ranks("spiked")]


def _entropy(T: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 8, T, 64, generator=generator)
    causal = torch.ones(T, T, dtype=torch.bool).tril()

    def eager() -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2) / 8).masked_fill(~causal, -torch.inf)
        p = torch.softmax(scores, dim=-1)
        return -(p * torch.log(p + 1e-12)).sum(-1)

    fast, slow, stats, entropy = alternate(lambda: joma.attention_stats(q, k, is_causal=True), eager, rounds)
    error = float((stats.entropy - entropy).abs().max())
    return {
        "what": f"attention entropy, 8 heads, T = {T:,}, causal",
        "joma": "`joma.attention_stats`",
        "against": "softmax of the full matrix and the entropy formula",
        "joma_seconds": fast,
        "against_seconds": slow,
        "ratio": slow / fast,
        "error": error,
        "accuracy": f"largest difference {error:.0e} nats",
    }


def _ranks(kind: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(8192, 2048, generator=generator)
    if kind == "spiked":
        w += 3 * torch.outer(torch.randn(8192, generator=generator), torch.randn(2048, generator=generator))
    later = w + 1e-4 * torch.randn(8192, 2048, generator=generator)  # as after a training step
    before = top_singular(w).vectors

    def svd() -> float:
        sigma = np.linalg.svd(later.numpy(), compute_uv=False).astype(np.float64)
        return float((sigma**2).sum() / sigma[0] ** 2)

    rows = []
    for name, start in (("cold", None), ("warm, after a training step", before)):

        def fast(start: torch.Tensor | None = start) -> float:
            return top_singular(later, start).stable_rank

        seconds, slow, value, exact = alternate(fast, svd, 1)
        rows.append(
            {
                "what": f"stable rank of 8192 × 2048, {kind}, {name}",
                "joma": "`joma.stable_rank`",
                "against": "`numpy.linalg.svd(compute_uv=False)`",
                "joma_seconds": seconds,
                "against_seconds": slow,
                "ratio": slow / seconds,
                "error": abs(value / exact - 1),
                "accuracy": f"relative difference {abs(value / exact - 1):.0e}",
            }
        )
    return rows
