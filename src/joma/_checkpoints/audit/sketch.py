"""How far apart any two checkpoints of a series are, from a sketch of each: some numbers of some of its matrices.

Neighbours are compared on all numbers that were read. For all pairs, each checkpoint would have to stay in memory; a
sketch is 256 kB at most. A thousand numbers tell the norm of a difference to about 2 %, and the median over matrices
better than that.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joma._checkpoints.audit.facts import Facts, Samples
from joma._checkpoints.audit.fit import LEAST, matrices, middle

_MATRICES, _NUMBERS = 64, 1024
MOST = 1000  # checkpoints of which all pairs are compared


def sketch(facts: Facts, samples: Samples) -> Samples:
    """Up to so many numbers of up to so many matrices, evenly over what was read; the same ones of each checkpoint."""
    of = [
        n
        for n in samples
        if len(facts.tensors[n].shape) > 1 and math.prod(facts.tensors[n].shape) >= LEAST
    ]
    chosen = sorted(of, key=lambda name: hashlib.sha256(name.encode()).digest())[
        :_MATRICES
    ]  # whatever else there is
    return {
        name: samples[name][:: -(-len(samples[name]) // _NUMBERS)].clone()
        for name in sorted(chosen)
    }


class Distances:
    """Relative changes between all checkpoints of a series, in the order of steps.

    Attributes:
        names: the matrices that are compared.
    """

    @property
    def count(self) -> int:
        """How many checkpoints there are."""
        return self._apart.shape[1]

    def __init__(self, series: Sequence[Facts], sketches: Sequence[Samples]) -> None:
        moving, count = set(matrices(series)), len(series)
        most = max(8, _MATRICES * 500**2 // max(count, 1) ** 2)
        self.names = sorted(moving & {name for each in sketches for name in each})[:most]
        self._apart = np.full((len(self.names), count, count), np.nan, dtype=np.float32)
        for row, name in enumerate(self.names):
            self._apart[row] = _pairs([each.get(name) for each in sketches])
        for n, facts in enumerate(series):  # on all numbers, where they are known
            for back, changes in ((1, facts.change), (2, facts.change2)):
                for row, name in enumerate(self.names):
                    if name in changes:
                        self._apart[row, n, n - back] = self._apart[row, n - back, n] = changes[
                            name
                        ]

    def __call__(self, a: int, b: int) -> NDArray[np.float64]:
        """Between the checkpoints at two places: (matrices,)."""
        return self._apart[:, a, b].astype(np.float64)

    def reordered(self, order: Sequence[int]) -> Distances:
        """Those of the same checkpoints in another order."""
        other = copy(self)
        other._apart = self._apart[:, order][:, :, order]
        return other

    def detours(self, order: Sequence[int], places: Sequence[int]) -> NDArray[np.float64]:
        """Of checkpoints at these places of an order, neither the first nor the last, detours (`fit.py`) by medians."""
        d, way, at = self._apart, np.array(order), np.array(places)
        with np.errstate(all="ignore"):
            steps = d[:, way[at - 1], way[at]] + d[:, way[at], way[at + 1]]
            detour = steps / d[:, way[at - 1], way[at + 1]]
        return middle(np.where(np.isfinite(detour), detour, np.nan).astype(np.float64), 0)

    def strangeness(self, order: Sequence[int], place: int) -> float:
        """How far the checkpoint at a place of an order is from the nearer of its neighbours, over what is usual there.

        That is how far the neighbours are from each other; at an end, how far the one neighbour is from the next.
        """
        last = len(order) - 1
        here = order[place]
        beside = [order[n] for n in (place - 1, place + 1) if 0 <= n <= last]
        a, b = (
            beside if len(beside) == 2 else (beside[0], order[2] if place == 0 else order[last - 2])
        )
        with np.errstate(all="ignore"):
            ratio = np.min([self(here, neighbour) for neighbour in beside], axis=0) / self(a, b)
        return float(middle(np.where(np.isfinite(ratio), ratio, np.nan), 0))

    def exchanges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What it saves of the way through the series if two checkpoints change places, by medians over matrices.

        Returns:
            (checkpoints, checkpoints), above the diagonal: log of the length of the stretches that change over what it
            then is; and what is saved, in relative changes. NaN where too little is known, and of copies.
        """
        count = self.count
        saved, size = np.full((2, count, count), np.nan)
        for i in range(count - 1):
            pairs = [self._exchange(i, j) for j in range(i + 1, count)]
            given, other = (
                np.stack(ways, axis=1) for ways in zip(*pairs, strict=True)
            )  # (matrices, others)
            with np.errstate(all="ignore"):
                ratio = np.where(self._apart[:, i, i + 1 :] > 0, np.log(given / other), np.nan)
            ratio[~np.isfinite(ratio)] = np.nan
            enough = 2 * np.isfinite(ratio).sum(axis=0) >= len(self.names)
            saved[i, i + 1 :] = np.where(enough, middle(ratio, 0), np.nan)
            size[i, i + 1 :] = np.where(enough, middle(given - other, 0), np.nan)
        return saved, size

    def _exchange(self, i: int, j: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The length of the stretches that change if two checkpoints change places, and what it then is: (matrices,).

        The stretch at an end counts twice: a stranger would else do best there, with one neighbour instead of two.
        """
        last = self.count - 2
        places = {i: j, j: i}
        given, other = np.zeros((2, len(self.names)))
        for n in {n for at in (i, j) for n in (at - 1, at) if 0 <= n <= last}:
            weight = 2.0 if n in (0, last) else 1.0
            given += weight * self._apart[:, n, n + 1]
            other += weight * self._apart[:, places.get(n, n), places.get(n + 1, n + 1)]
        return given, other


def _pairs(vectors: Sequence[Tensor | None]) -> NDArray[np.float64]:
    """Relative changes between all of them; NaN of one that is not there, or has not the size of most."""
    lengths = Counter(len(vector) for vector in vectors if vector is not None)
    length = lengths.most_common(1)[0][0]
    nothing = torch.full((length,), math.nan)
    stack = torch.stack(
        [v if v is not None and len(v) == length else nothing for v in vectors]
    ).double()
    norms = stack.norm(dim=1)
    size = (norms[:, None] + norms) / 2
    change = torch.cdist(stack, stack, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.where(size > 0, change / size, torch.where(size == 0, 0.0, math.nan)).numpy()
