"""Who comes back in a regime: linear nodes, nonlinear ones, both or neither, by paired differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from joma._runs.curve import ENTROPY
from joma.paper.exhibits._statistics import mean_interval
from joma.theory.setting import Array

# Nats. The smallest rise that the rule for entropies counts; what is less is as good as none.
MARGIN = ENTROPY.least_bounce
FLOWS = replace(ENTROPY, window=1)  # solutions without noise need no median


class Returns(StrEnum):
    """In which nodes attention comes back."""

    NONLINEAR = "nonlinear only"
    BOTH = "both"
    NEITHER = "neither"
    LINEAR = "linear only"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Interval:
    """Mean of independent values, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Array) -> Interval:
        """Return the mean of values (n,) with its interval by Student's t."""
        return cls(*mean_interval(pd.Series(values)))

    @property
    def is_above(self) -> bool:
        """True if the whole interval is above the margin."""
        return self.low > MARGIN

    @property
    def is_below(self) -> bool:
        """True if the whole interval is below the margin."""
        return self.high < MARGIN

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"

    def numbers(self) -> list[float]:
        """Return mean, lower and upper end, in nats to three digits."""
        return [round(value, 3) for value in (self.mean, self.low, self.high)]


@dataclass(frozen=True)
class Contrast:
    """Linear against nonlinear nodes in one regime.

    Attributes:
        rebound: activation -> mean rebound in nats.
        difference: nonlinear activation -> paired difference of its rebound from that of linear nodes.
        end: activation -> mean entropy at the end.
        end_difference: nonlinear activation -> paired difference of its end from that of linear nodes.
        count: number of pairs.
    """

    rebound: Mapping[str, Interval]
    difference: Mapping[str, Interval]
    end: Mapping[str, Interval]
    end_difference: Mapping[str, Interval]
    count: int

    @property
    def returns(self) -> Returns:
        """In which nodes attention comes back; of several nonlinear activations, all have to agree."""
        linear = self.rebound["linear"]
        nonlinear = [self.rebound[activation] for activation in self.difference]
        linear_returns = linear.is_above
        linear_stays = linear.is_below
        nonlinear_returns = all(interval.is_above for interval in nonlinear)
        nonlinear_stays = all(interval.is_below for interval in nonlinear)
        is_more = all(interval.is_above for interval in self.difference.values())
        if nonlinear_returns and linear_stays and is_more:
            return Returns.NONLINEAR
        if nonlinear_returns and linear_returns:
            return Returns.BOTH
        if nonlinear_stays and linear_stays:
            return Returns.NEITHER
        if nonlinear_stays and linear_returns:
            return Returns.LINEAR
        return Returns.UNDECIDED

    @property
    def is_equivalent(self) -> bool:
        """True if the activation moves the mean rebound by less than the margin."""
        return all(
            interval.low > -MARGIN and interval.high < MARGIN
            for interval in self.difference.values()
        )

    @property
    def ends_denser(self) -> bool:
        """True if nonlinear nodes end at a higher entropy than linear ones, by more than the margin."""
        return all(interval.is_above for interval in self.end_difference.values())

    def numbers(self) -> dict[str, Any]:
        """Return all intervals and the verdict, for a judgement."""
        return {
            "returns": str(self.returns),
            "equivalent": self.is_equivalent,
            "pairs": self.count,
            "rebound": {name: interval.numbers() for name, interval in self.rebound.items()},
            "difference": {name: interval.numbers() for name, interval in self.difference.items()},
            "end": {name: interval.numbers() for name, interval in self.end.items()},
            "end difference": {
                name: interval.numbers() for name, interval in self.end_difference.items()
            },
        }


def rebounds(start: Array, trough: Array, end: Array) -> Array:
    """Return how far curves come back after their dip, in nats; 0 for a curve that does not dip (n,)."""
    least = np.maximum(FLOWS.least_dip, FLOWS.dip * start)
    has_dipped = start - trough >= least
    return np.where(has_dipped, end - trough, 0.0)


def compare(rebound: Mapping[str, Array], end: Mapping[str, Array]) -> Contrast:
    """Compare activations on the same seeds.

    Arguments:
        rebound, end: activation -> values (n,), one per seed and in the same order; "linear" is one of them.
    """
    nonlinear = [activation for activation in rebound if activation != "linear"]
    return Contrast(
        rebound={name: Interval.of(values) for name, values in rebound.items()},
        difference={name: Interval.of(rebound[name] - rebound["linear"]) for name in nonlinear},
        end={name: Interval.of(values) for name, values in end.items()},
        end_difference={name: Interval.of(end[name] - end["linear"]) for name in nonlinear},
        count=len(rebound["linear"]),
    )
