"""Sums over queries from a sample of them: unbiased, with the variance of the estimate.

n of T positions are drawn without replacement, the same for all samples of a batch. With y_t the sum of a gauge over
the batch at position t, the total is estimated by T·mean(y), whose variance is T²(1 − n/T) s²/n. How many queries are
real is known exactly, so that the mean is unbiased too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from joma._measure.events.events import AttentionEvent, DotProduct
from joma._measure.gauges.attention import AttentionStats
from joma._measure.gauges.kinds import ATTENTION_KINDS, KEYS
from joma._measure.gauges.registry import Gauge


class Sampler:
    """Draws positions, from a generator of its own that starts anew with every step."""

    def __init__(self, queries: int) -> None:
        if isinstance(queries, bool) or not isinstance(queries, int) or queries < 2:
            raise ValueError(
                f"queries must be a number of queries to sample, at least 2; got {queries!r}"
            )
        self._queries = queries
        self._generator = torch.Generator()

    def start(self, step: int) -> None:
        """The draws of a step are a function of its number."""
        self._generator.manual_seed(step)

    def draw(self, event: AttentionEvent) -> Tensor | None:
        """Positions (n,) to measure; None if all are: there are not more, or attention is eager."""
        Tq = event.shape[2]
        if Tq <= self._queries or not isinstance(event, DotProduct):
            return None
        return (
            torch.randperm(Tq, generator=self._generator)[: self._queries]
            .sort()
            .values.to(event.device)
        )


def check_sampled(gauges: Sequence[Gauge]) -> None:
    """Refuse gauges of attention that need all queries."""
    for gauge in gauges:
        if gauge.kind in ATTENTION_KINDS and (gauge.reduce == "max" or gauge.kind is KEYS):
            over = "the largest over" if gauge.reduce == "max" else "a sum over"
            raise ValueError(
                f"{gauge.name} is {over} all queries, which a sample cannot tell: leave out queries="
            )


def estimate(
    event: AttentionEvent, stats: AttentionStats, values: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Total, count and variance of the total (H,) of values (B, H, n) at these positions, over all real queries."""
    B, H, Tq = event.shape
    n = len(positions)
    rows = None if event.real is None else event.real[..., positions]
    real = stats.is_real(values, rows)
    per_position = torch.where(real, values, 0.0).double().sum(dim=0)  # (H, n)
    total = Tq * per_position.mean(dim=1)
    variance = Tq**2 * (1 - n / Tq) * per_position.var(dim=1) / n
    sampled = real.sum(dim=(0, 2)).double()
    everyone = (event.visible > 0).expand(B, H, Tq)
    everyone = everyone if event.real is None else everyone & event.real
    seen = everyone[..., positions].sum(dim=(0, 2))
    exact = everyone.sum(dim=(0, 2)).double()
    # where a gauge is not defined at some queries, how many there are has to be estimated as well
    return total, torch.where(seen == sampled, exact, sampled * Tq / n), variance
