"""The order of a series: checkpoints that have changed places, and a series that runs backwards.

For each pair of checkpoints, the path through the series is compared with the path on which the two
have changed places. Per matrix, with d for the relative change between two checkpoints,

    saved = log(Σ d over the stretches that would change / Σ d over what they would become),

and the median over matrices counts. The stretch at either end counts twice. In the order of training
every exchange makes the path longer, whatever the learning rate does: that of the last two by
log(4/3) on a straight line with even steps, by log((√2 + 2)/3) on a random walk. A pair is exchanged
if changing places makes the path shorter, and if the new path is one that training can take. Where an
exchange costs next to nothing, and where weights jitter around a point more than they move, the order
is unknown, and the audit reports that.

Distances are the same backwards. The direction of a series shows in its initialisation, where norms
and biases are constant and after which they no longer are, or in the trainer's own state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from joma._checkpoints.audit.facts import Facts
from joma._checkpoints.audit.fit import MIN_CHECKPOINTS, matrices
from joma._checkpoints.audit.sketch import MAX_CHECKPOINTS, Distances

# An exchange that makes the path shorter by 5 % or more is a fault; one that makes it longer by less
# than 5 % leaves the order unknown. In 45 healthy series with five schedules every exchange makes it
# longer by 10.5 % or more, so that the limit lies about half way.
EXCHANGE_MARGIN = math.log(1.05)
# A random walk has detour √2 = 1.41, jitter around a point has 2. Beyond this, between the two,
# weights jitter more than they move, and distances say nothing about the order.
MAX_TRAINING_DETOUR = 1.55
# Two unrelated checkpoints in a row have detour 2: each is as far from everything as from the other.
# A pair that still has nearly this at its new places consists of strangers, not of exchanged steps.
MAX_DETOUR_AT_NEW_PLACE = 1.8
# Jitter has detour 2; no training makes more. Pairs beyond that are misfits, not of unknown order.
IMPOSSIBLE_DETOUR = 2.1
# A checkpoint belongs to a place if it is at most this many times as far from its new neighbours as
# they are from each other. A stranger is about √2 times its own norm away, which is far more.
MAX_STRANGENESS = 3.0
# The detours of this many checkpoints on either side show whether the new path is one of training.
NEIGHBOURHOOD = 4
# A smaller tensor may be constant by chance or by design (a scale, a temperature).
MIN_NUMBERS_OF_CONSTANT = 16

Pair = tuple[int, int]  # places in the series


@dataclass(frozen=True)
class Order:
    """The order of a series.

    Attributes:
        exchanged: places of checkpoints that would fit if they were exchanged, each with a sentence.
        late: places of an initialisation and of a trained checkpoint before it, with a sentence.
        unknown: sentences about what cannot be decided.
    """

    exchanged: tuple[tuple[Pair, str], ...] = ()
    late: tuple[tuple[Pair, str], ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """Two checkpoints that have changed places, and the log of how much shorter the path would be."""

    first: int
    second: int
    saved: float


def judge_order(
    series: Sequence[Facts], distances: Distances | None, copies: Iterable[int] = ()
) -> Order:
    """Judge the order of the readable checkpoints of a series.

    Arguments:
        series: in the order of steps.
        distances: between all of them; None if there are too many for that.
        copies: places of checkpoints that are the same as another: they have no order.
    """
    if len(series) < MIN_CHECKPOINTS or not matrices(series):
        return Order()
    late, has_direction = _judge_direction(series)
    unknown = [] if has_direction else [_BACKWARDS]
    if distances is None:
        unknown.append(
            f"whether checkpoints are exchanged: that is judged of up to {MAX_CHECKPOINTS:,}, here "
            f"are {len(series):,}"
        )
        return Order((), tuple(late), tuple(unknown))
    excluded = set(copies)
    places = [place for place in range(len(series)) if place not in excluded]
    exchanges: list[Exchange] = []
    open_pairs: list[Pair] = []
    if len(places) >= MIN_CHECKPOINTS:
        exchanges, open_pairs = _find_exchanges(distances, places)
    exchanged = []
    for exchange in exchanges:
        names = f"{series[exchange.first].name} and {series[exchange.second].name}"
        text = (
            f"{names} seem to be exchanged: the way past them is {math.expm1(exchange.saved):.0%} "
            "longer than the other way round"
        )
        exchanged.append(((exchange.first, exchange.second), text))
    if open_pairs:
        unknown.append(_open_text(series, open_pairs))
    return Order(tuple(exchanged), tuple(late), tuple(unknown))


def _open_text(series: Sequence[Facts], open_pairs: Sequence[Pair]) -> str:
    first, second = open_pairs[0]
    more = ""
    if len(open_pairs) > 1:
        more = f", and of {len(open_pairs) - 1} more pairs"
    return (
        f"which of {series[first].name} and {series[second].name} comes first{more}: the way past "
        "them is about as long either way"
    )


def _find_exchanges(distances: Distances, places: list[int]) -> tuple[list[Exchange], list[Pair]]:
    """Return exchanged checkpoints, the largest saving first, and pairs whose order is unknown.

    A pair is put back as soon as it is found: the path past it is then right for the next search.
    """
    order = list(places)
    exchanges: list[Exchange] = []
    while True:
        current = distances.reordered(order)
        saved, size = current.exchanges()  # (checkpoints, checkpoints) each
        shorter = _pairs((saved > EXCHANGE_MARGIN) & (size > 0))
        shorter.sort(key=lambda pair: -size[pair])
        fault = next((pair for pair in shorter if _is_fault(current, pair, order, places)), None)
        if fault is None:
            break
        first, second = fault
        exchanges.append(Exchange(places[first], places[second], float(saved[fault])))
        order[first], order[second] = order[second], order[first]
    open_pairs = []
    for first, second in [*shorter, *_pairs(np.abs(saved) <= EXCHANGE_MARGIN)]:
        if np.nanmax(_detours_around(current, first, second)) < IMPOSSIBLE_DETOUR:
            open_pairs.append((order[first], order[second]))
    return exchanges, open_pairs


def _pairs(flags: NDArray[np.bool_]) -> list[Pair]:
    return [(int(first), int(second)) for first, second in np.argwhere(flags)]


def _is_fault(current: Distances, pair: Pair, order: list[int], places: list[int]) -> bool:
    """True if a pair whose exchange makes the path shorter really is exchanged.

    Both must fit at their new places, and the path must then be one that training can take.
    """
    if any(order[place] != places[place] for place in pair):
        return False  # one of them was put back already
    new_order = _with_exchanged(current, *pair)
    if any(current.strangeness(new_order, place) > MAX_STRANGENESS for place in pair):
        return False
    inner = [place for place in pair if 0 < place < current.count - 1]
    if inner:
        largest = np.nanmax(current.detours(new_order, inner), initial=0.0)
        if not largest < MAX_DETOUR_AT_NEW_PLACE:
            return False
    return bool(np.nanmedian(_detours_around(current, *pair)) < MAX_TRAINING_DETOUR)


def _with_exchanged(current: Distances, first: int, second: int) -> list[int]:
    order = list(range(current.count))
    order[first] = second
    order[second] = first
    return order


def _detours_around(current: Distances, first: int, second: int) -> NDArray[np.float64]:
    """Return the detours around two places, if they were exchanged."""
    near = []
    for place in range(1, current.count - 1):
        if min(abs(place - first), abs(place - second)) <= NEIGHBOURHOOD:
            near.append(place)
    return current.detours(_with_exchanged(current, first, second), near)


_BACKWARDS = (
    "whether the series as a whole runs backwards: it holds no initialisation (constant norms and "
    "biases) and no trainer_state.json that would tell"
)


def put_back(count: int, exchanged: Iterable[Pair]) -> list[int]:
    """Return the places of a series in their right order: with these pairs exchanged."""
    order = list(range(count))
    for first, second in exchanged:
        order[first], order[second] = order[second], order[first]
    return order


def arranged(series: Sequence[Facts], order: Sequence[int], distances: Distances) -> list[Facts]:
    """Return the checkpoints in this order, with the changes that follow from it."""
    result = []
    for place, number in enumerate(order):
        facts = series[number]
        change: dict[str, float] = {}
        change2: dict[str, float] = {}
        if place >= 1:
            change = _change_since(distances, number, order[place - 1], 1, facts.change)
        if place >= 2:
            change2 = _change_since(distances, number, order[place - 2], 2, facts.change2)
        result.append(replace(facts, change=change, change2=change2))
    return result


def _change_since(
    distances: Distances, number: int, earlier: int, back: int, exact: dict[str, float]
) -> dict[str, float]:
    """Return the change between two checkpoints; the exact one if they are still neighbours."""
    if number - earlier == back:
        return exact
    changes = {}
    for name, change in zip(distances.names, distances(number, earlier), strict=True):
        if math.isfinite(change):
            changes[name] = float(change)
    return changes


def _judge_direction(series: Sequence[Facts]) -> tuple[list[tuple[Pair, str]], bool]:
    """Return initialisations that come too late, and True if the direction of the series is known."""
    in_all = set.intersection(*(set(facts.tensors) for facts in series))
    large = set()
    for name in in_all:
        if math.prod(series[0].tensors[name].shape) >= MIN_NUMBERS_OF_CONSTANT:
            large.add(name)
    constant = []  # per checkpoint, the tensors that are constant there
    for facts in series:
        constant.append({name for name in large if facts.tensors[name].constant})
    # Tensors that are constant at first, and not for ever.
    initial_tensors = set()
    for name in large:
        if 0 < sum(name in names for names in constant) < len(series):
            initial_tensors.add(name)
    vectors = [name for name in large if len(series[0].tensors[name].shape) == 1]
    if 2 * len(initial_tensors) < len(vectors):
        # A few tensors that have become constant are no initialisation.
        initial_tensors = set()
    is_initial = [bool(initial_tensors) and initial_tensors <= names for names in constant]
    is_trained = [2 * len(initial_tensors & names) < len(initial_tensors) for names in constant]
    late = []
    for place in range(len(series)):
        if not is_initial[place] or not any(is_trained[:place]):
            continue
        before = is_trained.index(True)
        text = (
            f"{series[place].name} looks like an initialisation: its norms and biases are constant, "
            f"and those of {series[before].name} before it are not"
        )
        late.append(((before, place), text))
    state_count = sum(facts.trained is not None for facts in series)
    return late, any(is_initial) or state_count > 1
