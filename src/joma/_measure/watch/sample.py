"""Draw the queries that are measured, where a watch measures a sample of them.

`joma._measure.watch.reducers.SampledMean` estimates the mean over all queries from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from joma._measure.events.events import AttentionEvent, DotProduct
from joma._measure.gauges.kinds import ATTENTION_KINDS
from joma._measure.gauges.registry import Gauge


class Sampler:
    """Draws positions from a generator of its own, which starts again with every step."""

    def __init__(self, queries: int) -> None:
        if isinstance(queries, bool) or not isinstance(queries, int) or queries < 2:
            raise ValueError(
                f"queries must be a number of queries to sample, at least 2; got {queries!r}"
            )
        self._queries = queries
        self._generator = torch.Generator()

    def start(self, step: int) -> None:
        """Make the draws of a step depend on its number alone."""
        self._generator.manual_seed(step)

    def draw(self, event: AttentionEvent) -> Tensor | None:
        """Return the positions (n,) to measure, or None for all of them.

        All queries are measured if there are not more, or if attention is eager: its scores exist.
        """
        queries = event.shape[2]
        if queries <= self._queries or not isinstance(event, DotProduct):
            return None
        order = torch.randperm(queries, generator=self._generator)
        return order[: self._queries].sort().values.to(event.device)


def check_sampled(gauges: Sequence[Gauge]) -> None:
    """Refuse gauges of attention that need all queries."""
    for gauge in gauges:
        if gauge.kind not in ATTENTION_KINDS:
            continue
        if gauge.reduce == "max":
            over = "the largest over"
        elif not gauge.kind.can_be_sampled:
            over = "a sum over"
        else:
            continue
        raise ValueError(
            f"{gauge.name} is {over} all queries, which a sample cannot tell: leave out queries="
        )
