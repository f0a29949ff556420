"""The order of a series: checkpoints that have changed places, and a series that runs backwards.

For each pair of checkpoints, the way through the series is compared with the way on which the two have changed places.
Per matrix, with d for the relative change between two checkpoints,

    saved = log(Σ d over the stretches that would change / Σ d over what they would become),

by the median over matrices; the stretch at either end counts twice. In the order of training every exchange makes the
way longer, whatever the learning rate does: that of the last two by log(4/3) on a straight way with even steps, by
log((√2 + 2)/3) on a random walk. If one makes it shorter, and is itself a way that training can take, the two are
exchanged. Where an exchange costs next to nothing, and where weights jitter around a point more than they move, no
order can be told, and that is said.

Distances are the same backwards. What tells the direction of a series is its initialisation, in which norms and biases
are constant and after which they are not again; or the trainer's own state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from joma._checkpoints.audit.facts import Facts
from joma._checkpoints.audit.fit import FEWEST, matrices
from joma._checkpoints.audit.sketch import MOST, Distances

_SAVED = math.log(
    1.05
)  # an exchange that saves more is a fault; one that costs less cannot be judged
_JITTER = (
    1.55  # the detour from which on weights jitter more than they move: it is √2 of a random walk
)
_BESIDE = 1.8  # the detour over one of the two in its new place: it is 2 of a stranger beside another stranger
_NO_WAY = 2.1  # a detour that no training makes
_STRANGE = 3.0  # what is so much further from its new neighbours than they are from each other does not belong there
_NEAR = 4  # checkpoints to either side, that this is judged by
_LEAST = 16  # numbers: that a smaller tensor is constant tells nothing
Pair = tuple[int, int]  # places in the series


@dataclass(frozen=True)
class Order:
    """What is known of the order of a series.

    Attributes:
        exchanged: places of checkpoints that would fit if they were exchanged, and a sentence for each pair.
        late: places of an initialisation and of one before it that is none, and a sentence.
        unknown: what cannot be told, for people.
    """

    exchanged: tuple[tuple[Pair, str], ...] = ()
    late: tuple[tuple[Pair, str], ...] = ()
    unknown: tuple[str, ...] = ()


def judge_order(
    series: Sequence[Facts], apart: Distances | None, copies: Iterable[int] = ()
) -> Order:
    """The order of the readable checkpoints of a series.

    Arguments:
        series: in the order of steps.
        apart: the distances between them; None if they are too many for that.
        copies: places of checkpoints that are the same as another, which therefore have no order.
    """
    if len(series) < FEWEST or not matrices(series):
        return Order()
    late, told = _direction(series)
    unknown = [] if told else [_BACKWARDS]
    if apart is None:
        unknown.append(
            f"whether checkpoints are exchanged: that is judged of up to {MOST:,}, here are {len(series):,}"
        )
        return Order((), tuple(late), tuple(unknown))
    places = [n for n in range(len(series)) if n not in set(copies)]
    exchanged, open_pairs = _exchanged(apart, places) if len(places) >= FEWEST else ([], [])
    sentences = []
    for i, j, saved in exchanged:
        text = f"{series[i].name} and {series[j].name} seem to be exchanged: the way past them is "
        sentences.append(
            ((i, j), text + f"{math.expm1(saved):.0%} longer than the other way round")
        )
    if open_pairs:
        i, j = open_pairs[0]
        more = f", and of {len(open_pairs) - 1} more pairs" if len(open_pairs) > 1 else ""
        way = "the way past them is about as long either way"
        unknown.append(f"which of {series[i].name} and {series[j].name} comes first{more}: {way}")
    return Order(tuple(sentences), tuple(late), tuple(unknown))


def _exchanged(
    apart: Distances, places: list[int]
) -> tuple[list[tuple[int, int, float]], list[Pair]]:
    """Pairs of places that are exchanged, with what that saves, the most first; and pairs that cannot be told."""
    order, found = list(places), list[tuple[int, int, float]]()
    while True:
        now = apart.reordered(order)
        saved, size = now.exchanges()
        shorter = sorted(_pairs((saved > _SAVED) & (size > 0)), key=lambda pair: -size[pair])
        best = next((pair for pair in shorter if _is_fault(now, pair, order, places)), None)
        if best is None:
            unsure = [*shorter, *_pairs(np.abs(saved) <= _SAVED)]
            return found, [
                (order[i], order[j]) for i, j in unsure if np.nanmax(_detours(now, i, j)) < _NO_WAY
            ]
        i, j = best
        found.append((places[i], places[j], float(saved[i, j])))
        order[i], order[j] = order[j], order[i]


def _pairs(flags: NDArray[np.bool_]) -> list[Pair]:
    return [(int(i), int(j)) for i, j in np.argwhere(flags)]


def _is_fault(now: Distances, pair: Pair, order: list[int], places: list[int]) -> bool:
    """Whether a pair whose exchange makes the way shorter is exchanged: both fit there, and the way is one then."""
    if any(order[n] != places[n] for n in pair):
        return False
    there, inner = _with_exchanged(now, *pair), [n for n in pair if 0 < n < now.count - 1]
    if any(now.strangeness(there, n) > _STRANGE for n in pair):
        return False
    if inner and not np.nanmax(now.detours(there, inner), initial=0.0) < _BESIDE:
        return False
    return bool(np.nanmedian(_detours(now, *pair)) < _JITTER)


def _with_exchanged(now: Distances, i: int, j: int) -> list[int]:
    order = list(range(now.count))
    order[i], order[j] = j, i
    return order


def _detours(now: Distances, i: int, j: int) -> NDArray[np.float64]:
    """Detours around two places, were they exchanged."""
    near = [n for n in range(1, now.count - 1) if min(abs(n - i), abs(n - j)) <= _NEAR]
    return now.detours(_with_exchanged(now, i, j), near)


_BACKWARDS = (
    "whether the series as a whole runs backwards: it holds no initialisation (constant norms and biases) and no "
    "trainer_state.json that would tell"
)


def put_back(count: int, exchanged: Iterable[Pair]) -> list[int]:
    """The places of a series in their right order: with these exchanged."""
    order = list(range(count))
    for i, j in exchanged:
        order[i], order[j] = order[j], order[i]
    return order


def arranged(series: Sequence[Facts], order: Sequence[int], apart: Distances) -> list[Facts]:
    """The checkpoints at these places of a series, in this order, with the changes that follow from it."""

    def since(place: int, back: int, known: dict[str, float]) -> dict[str, float]:
        if place < back:
            return {}
        now, then = order[place], order[place - back]
        if now - then == back:
            return known
        changes = zip(apart.names, apart(now, then), strict=True)
        return {name: float(change) for name, change in changes if math.isfinite(change)}

    return [
        replace(
            series[now],
            change=since(place, 1, series[now].change),
            change2=since(place, 2, series[now].change2),
        )
        for place, now in enumerate(order)
    ]


def _direction(series: Sequence[Facts]) -> tuple[list[tuple[Pair, str]], bool]:
    """Initialisations that come too late, and whether the direction of the series is known."""
    everywhere = set.intersection(*(set(facts.tensors) for facts in series))
    large = {name for name in everywhere if math.prod(series[0].tensors[name].shape) >= _LEAST}
    constant = [{name for name in large if facts.tensors[name].constant} for facts in series]
    start = {
        n for n in large if 0 < sum(n in names for names in constant) < len(series)
    }  # at first, not for ever
    vectors = [name for name in large if len(series[0].tensors[name].shape) == 1]
    if 2 * len(start) < len(vectors):  # a few that have become constant are no initialisation
        start = set()
    initial = [bool(start) and start <= names for names in constant]
    trained = [2 * len(start & names) < len(start) for names in constant]
    late = []
    for n in (n for n, is_initial in enumerate(initial) if is_initial and any(trained[:n])):
        before = trained.index(True)
        text = f"{series[n].name} looks like an initialisation: its norms and biases are constant, and those of "
        late.append(((before, n), text + f"{series[before].name} before it are not"))
    return late, any(initial) or sum(facts.trained is not None for facts in series) > 1
