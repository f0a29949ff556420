"""Distances between any two checkpoints of a series, from a sketch of each.

Neighbours are compared on all numbers that were read. For all pairs, every checkpoint would have to
stay in memory, so each is reduced to a sketch: some numbers of some of its matrices, 256 kB at most.
A thousand numbers give the norm of a difference to about 2 %, and the median over matrices is better
than that.
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
from joma._checkpoints.audit.fit import MIN_NUMBERS, matrices, middle

# 64 matrices of 1,024 float32 numbers are 256 kB.
SKETCH_MATRICES = 64
SKETCH_NUMBERS = 1024
# Checkpoints of which all pairs are compared: the search for exchanges takes quadratic time.
MAX_CHECKPOINTS = 1000
# Up to 500 checkpoints all matrices of the sketch are compared. Beyond, fewer, so that the table of
# distances does not grow; the median of eight matrices is still robust.
_CHECKPOINTS_WITH_ALL_MATRICES = 500
_MIN_MATRICES = 8


def sketch(facts: Facts, samples: Samples) -> Samples:
    """Return some numbers of some matrices, at the same places in every checkpoint."""
    names = []
    for name in samples:
        shape = facts.tensors[name].shape
        if len(shape) > 1 and math.prod(shape) >= MIN_NUMBERS:
            names.append(name)
    # By a hash of the name: the choice does not depend on which other tensors there are.
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    result = {}
    for name in sorted(names[:SKETCH_MATRICES]):
        numbers = samples[name]
        stride = -(-len(numbers) // SKETCH_NUMBERS)  # rounded up
        result[name] = numbers[::stride].clone()
    return result


class Distances:
    """Relative changes between all checkpoints of a series, in the order of steps.

    Attributes:
        names: the matrices that are compared.
    """

    def __init__(self, series: Sequence[Facts], sketches: Sequence[Samples]) -> None:
        count = len(series)
        in_sketches = {name for numbers in sketches for name in numbers}
        most = SKETCH_MATRICES * _CHECKPOINTS_WITH_ALL_MATRICES**2 // max(count, 1) ** 2
        most = max(_MIN_MATRICES, most)
        self.names = sorted(set(matrices(series)) & in_sketches)[:most]
        # (matrices, checkpoints, checkpoints)
        self._apart = np.full((len(self.names), count, count), np.nan, dtype=np.float32)
        for row, name in enumerate(self.names):
            self._apart[row] = _all_pairs([numbers.get(name) for numbers in sketches])
        for place, facts in enumerate(series):
            self._set_exact(place, place - 1, facts.change)
            self._set_exact(place, place - 2, facts.change2)

    def _set_exact(self, place: int, earlier: int, changes: dict[str, float]) -> None:
        """Replace estimates by the changes of neighbours, which are measured on all numbers."""
        for row, name in enumerate(self.names):
            if name in changes:
                self._apart[row, place, earlier] = changes[name]
                self._apart[row, earlier, place] = changes[name]

    @property
    def count(self) -> int:
        """The number of checkpoints."""
        return self._apart.shape[1]

    def __call__(self, first: int, second: int) -> NDArray[np.float64]:
        """Return the distances between the checkpoints at two places, (matrices,)."""
        return self._apart[:, first, second].astype(np.float64)

    def reordered(self, order: Sequence[int]) -> Distances:
        """Return the distances of the same checkpoints in another order."""
        other = copy(self)
        other._apart = self._apart[:, order][:, :, order]
        return other

    def detours(self, order: Sequence[int], places: Sequence[int]) -> NDArray[np.float64]:
        """Return the median detours (`fit.py`) at these places of an order, (places,).

        The places must not include the first or the last one.
        """
        apart = self._apart
        path = np.array(order)
        at = np.array(places)
        with np.errstate(all="ignore"):
            steps = apart[:, path[at - 1], path[at]] + apart[:, path[at], path[at + 1]]
            detours = steps / apart[:, path[at - 1], path[at + 1]]  # (matrices, places)
        return middle(np.where(np.isfinite(detours), detours, np.nan).astype(np.float64), 0)

    def strangeness(self, order: Sequence[int], place: int) -> float:
        """Return how far a checkpoint is from its nearer neighbour, relative to what is usual there.

        Usual is the distance between the two neighbours; at an end of the order, the distance of the
        only neighbour from the next checkpoint.
        """
        last = len(order) - 1
        here = order[place]
        neighbours = [order[at] for at in (place - 1, place + 1) if 0 <= at <= last]
        if len(neighbours) == 2:
            first, second = neighbours
        else:
            first = neighbours[0]
            second = order[2] if place == 0 else order[last - 2]
        with np.errstate(all="ignore"):
            nearest = np.min([self(here, neighbour) for neighbour in neighbours], axis=0)
            ratio = nearest / self(first, second)  # (matrices,)
        return float(middle(np.where(np.isfinite(ratio), ratio, np.nan), 0))

    def exchanges(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what it saves of the path through the series if two checkpoints change places.

        Returns:
            Two arrays (checkpoints, checkpoints), filled above the diagonal, medians over matrices:
            the log of the length of the stretches that change over what it then is, and the length
            that is saved, in relative changes. NaN where too little is known, and for copies.
        """
        count = self.count
        saved = np.full((count, count), np.nan)
        size = np.full((count, count), np.nan)
        for first in range(count - 1):
            lengths = [self._exchange(first, second) for second in range(first + 1, count)]
            now = np.stack([before for before, _ in lengths], axis=1)  # (matrices, others)
            then = np.stack([after for _, after in lengths], axis=1)  # (matrices, others)
            with np.errstate(all="ignore"):
                is_moved = self._apart[:, first, first + 1 :] > 0
                ratio = np.where(is_moved, np.log(now / then), np.nan)
            ratio[~np.isfinite(ratio)] = np.nan
            is_enough = 2 * np.isfinite(ratio).sum(axis=0) >= len(self.names)
            saved[first, first + 1 :] = np.where(is_enough, middle(ratio, 0), np.nan)
            size[first, first + 1 :] = np.where(is_enough, middle(now - then, 0), np.nan)
        return saved, size

    def _exchange(self, first: int, second: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the length of the stretches that change, now and after an exchange: (matrices,) each.

        The stretch at an end counts twice. Otherwise a stranger would do best there, with one
        neighbour instead of two.
        """
        last = self.count - 2
        moved_to = {first: second, second: first}
        stretches = set()
        for place in (first, second):
            stretches |= {start for start in (place - 1, place) if 0 <= start <= last}
        now = np.zeros(len(self.names))
        then = np.zeros(len(self.names))
        for start in stretches:
            weight = 2.0 if start in (0, last) else 1.0
            end = start + 1
            now += weight * self._apart[:, start, end]
            then += weight * self._apart[:, moved_to.get(start, start), moved_to.get(end, end)]
        return now, then


def _all_pairs(vectors: Sequence[Tensor | None]) -> NDArray[np.float64]:
    """Return relative changes between all vectors; NaN for one that is missing or of another size."""
    lengths = Counter(len(vector) for vector in vectors if vector is not None)
    usual_length = lengths.most_common(1)[0][0]
    missing = torch.full((usual_length,), math.nan)
    rows = []
    for vector in vectors:
        if vector is not None and len(vector) == usual_length:
            rows.append(vector)
        else:
            rows.append(missing)
    stack = torch.stack(rows).double()  # (checkpoints, numbers)
    norms = stack.norm(dim=1)
    size = (norms[:, None] + norms) / 2  # (checkpoints, checkpoints)
    # Not by matrix products: they lose all digits of a small difference.
    change = torch.cdist(stack, stack, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.where(size > 0, change / size, torch.where(size == 0, 0.0, math.nan)).numpy()
