"""Matrices and hidden states that lose their rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from joma._measure.watch.alarms.memory import PerPlace
from joma._measure.watch.alarms.rule import Alarm, loss_of
from joma._measure.watch.phases import PATIENCE, Stuck
from joma._measure.watch.readings import Finding, Reading


@dataclass
class RankLossAlarm(Alarm):
    """Alarm for `stable_rank` and `hidden_rank` that fall to one.

    The rank was above `least_first` when it was first measured. It is below `low` for `patience`
    measurements, and the loss reached no new best since it became low.
    """

    kind = "rank loss"
    level = "warning"
    what_to_do = "lower the learning rate or add weight decay; look for tokens that have become one"
    gauges = ("stable_rank", "hidden_rank")

    low: float = 1.1  # 1 is the least: all rows, or all tokens, are multiples of one
    recovered: float = 1.2  # above `low`, so that noise does not end it
    least_first: float = 2.0  # a matrix that starts with a low rank has none to lose
    patience: int = PATIENCE  # measurements
    _first: dict[str, float] = field(default_factory=dict, init=False, repr=False)  # place -> rank
    _stuck: PerPlace[Stuck] = field(default_factory=lambda: PerPlace(Stuck), init=False, repr=False)
    _best: float = field(default=math.inf, init=False, repr=False)  # loss so far

    def observe(self, reading: Reading) -> Iterator[Finding]:
        """Yield the matrices, heads and layers whose rank is lost."""
        loss = loss_of(reading)
        if math.isfinite(loss):
            self._best = min(self._best, loss)
        for measured in self.values(reading):
            rank = measured.value
            if math.isfinite(rank):
                self._first.setdefault(measured.place, rank)
            has_rank_to_lose = self._first.get(measured.place, math.nan) > self.least_first
            if math.isnan(rank) or not has_rank_to_lose:
                continue
            stuck = self._stuck[measured.place]
            stuck.update(rank < self.low, rank > self.recovered, loss, self._best)
            if stuck.is_stuck(self.patience):
                gauge = measured.gauge
                layer = measured.layer
                yield self.finding(gauge, rank, self.low, layer=layer, head=measured.head)
