"""Gauges against what one would use instead: the entropy formula on a materialised attention matrix, full SVDs."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import numpy as np
import torch

import joma
from benchmarks._timing import alternate, peak_memory, row
from joma._measure.gauges.rank import top_singular

LONG = 32_768


def run(rounds: int = 3) -> list[dict[str, Any]]:
    """Attention entropy of one layer, also at a length that needs it; stable rank."""
    return [
        _entropy(2048, rounds),
        _entropy(4096, rounds),
        _long(),
        *_ranks("Gaussian"),
        *_ranks("spiked"),
    ]


def _entropy(T: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 8, T, 64, generator=generator)
    causal = torch.ones(T, T, dtype=torch.bool).tril()

    def eager() -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2) / 8).masked_fill(~causal, -torch.inf)
        p = torch.softmax(scores, dim=-1)
        return -(p * torch.log(p + 1e-12)).sum(-1)

    (fast, stats), (slow, entropy) = alternate(
        lambda: joma.attention_stats(q, k, is_causal=True), eager, rounds=rounds
    )
    error = float((stats.entropy - entropy).abs().max())
    return row(
        f"attention entropy, 8 heads, T = {T:,}, causal", "`joma.attention_stats`",
        "softmax of the full matrix and the entropy formula", fast, slow, f"largest difference {error:.0e} nats",
        error=error,
    )  # fmt: skip


def _long() -> dict[str, Any]:
    """One layer that eager attention could not hold: 32 GiB of scores."""
    setup = f"""
import torch, joma
q, k = torch.randn(2, 1, 8, {LONG}, 64)
joma.attention_stats(q[:, :, :64], k[:, :, :64], is_causal=True)
"""
    extra = peak_memory(setup, "joma.attention_stats(q, k, is_causal=True)")
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, LONG, 64, generator=generator)
    (mine, _), (plain, _) = alternate(
        lambda: joma.attention_stats(q, k, is_causal=True),
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        rounds=1,
    )
    return row(
        f"one layer, 8 heads, T = {LONG:,}", "`joma.attention_stats`", "the fused attention call itself", mine, plain,
        "" if extra is None else f"{extra:.0f} MiB extra (the matrix would be 32 GiB)", extra_mib=extra,
    )  # fmt: skip


def _ranks(kind: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(8192, 2048, generator=generator)
    if kind == "spiked":
        w += 3 * torch.outer(
            torch.randn(8192, generator=generator), torch.randn(2048, generator=generator)
        )

    def svd() -> float:
        sigma = np.linalg.svd(w.numpy(), compute_uv=False).astype(np.float64)
        return float((sigma**2).sum() / sigma[0] ** 2)

    def singular_values() -> float:
        sigma = torch.linalg.svdvals(w).double()
        return float((sigma**2).sum() / sigma[0] ** 2)

    rivals = {
        "`numpy.linalg.svd(compute_uv=False)`": svd,
        "`torch.linalg.svdvals`": singular_values,
        "WeightWatcher's `analyze()`": lambda: _weightwatcher(w),
    }
    (seconds, top), *others = alternate(lambda: top_singular(w), *rivals.values(), rounds=1)
    rows = []
    for against, (time, truth) in zip(rivals, others, strict=True):
        error = abs(top.stable_rank / truth - 1)
        accuracy = f"relative difference {error:.0e}; {top.passes:.0f} passes over the matrix"
        rows.append(
            row(
                f"stable rank of 8192 × 2048, {kind}",
                "`joma.stable_rank`",
                against,
                seconds,
                time,
                accuracy,
                error=error,
                passes=top.passes,
            )
        )
    return rows


def _weightwatcher(w: torch.Tensor) -> float:
    import weightwatcher

    logging.getLogger("weightwatcher").setLevel(logging.ERROR)
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data = w
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        details = weightwatcher.WeightWatcher(model=torch.nn.Sequential(layer)).analyze()
    return float(details.stable_rank.iloc[0])
