"""Misfits: checkpoints that do not lie between the one before and the one after.

With d for the relative change of a matrix between two checkpoints, its *detour* over checkpoint i is

    (d(i-1, i) + d(i, i+1)) / d(i-1, i+1).

It is 1 on a straight line, √2 on a random walk and 2 where weights only jitter around a point,
whatever the number of steps between the checkpoints. It is much larger if i belongs to another model
or another step, or is damaged. A checkpoint is a misfit if its detour is far above those of the other
checkpoints. Medians decide: over all matrices (a step), over those in one file (a shard), or one
matrix by itself.

A misfit spoils the detours of its neighbours, too. Where several checkpoints stand out, the one
without which the others fit best comes first, and the rest is judged without it. The first and the
last checkpoint have no detour: a shard there is judged by its change against that of the other shards.
Exchanged checkpoints are put back before all this (`order.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joma._checkpoints.audit.facts import Facts

# The series without the checkpoints of these names, with changes over the gaps.
Without = Callable[[Container[str]], Sequence[Facts]]

# All limits are on logarithms of detours.
# An outlier is this many robust standard deviations above the median. With this and the factors below,
# none of 60 healthy series of 14 checkpoints is accused (docs/audit.md).
OUTLIER_DEVIATIONS = 6.0
# In a smooth series the deviation is tiny, and six of them mean little. An outlier must therefore also
# be larger than usual by a factor. The factor grows as fewer matrices are behind the median: a whole
# step, one file, one matrix, and one file at an end of the series, where only its change is known.
STEP_EXCESS = math.log(1.6)
SHARD_EXCESS = math.log(2.5)
MATRIX_EXCESS = math.log(4.0)
END_EXCESS = math.log(8.0)
# Weights that only jitter around a point have detour 2. No training has more, so this counts as a
# misfit even in a series whose other checkpoints scatter widely.
IMPOSSIBLE_DETOUR = math.log(2.1)
# Fewer checkpoints have at most one detour, and nothing to compare it with.
MIN_CHECKPOINTS = 4
# The change of a smaller tensor is too noisy to compare.
MIN_NUMBERS = 256
# The median absolute deviation of a normal distribution is its standard deviation divided by this.
_NORMAL_DEVIATION = 1.4826


@dataclass(frozen=True)
class Misfit:
    """A checkpoint that does not fit: all of it, or the tensors named."""

    checkpoint: str
    text: str
    tensors: tuple[str, ...] = ()


def misfits(series: Sequence[Facts], without: Without | None = None) -> list[Misfit]:
    """Return the checkpoints of a series that do not fit between their neighbours.

    Arguments:
        series: in the order of steps.
        without: gives the series without some checkpoints; None if the changes over the gaps are not
            known.
    """
    names = matrices(series)
    if len(series) < MIN_CHECKPOINTS or not names:
        return []
    result: list[Misfit] = []
    detours = _log_detours(series, names)  # (matrices, checkpoints)
    by_step = middle(detours, 0)  # (checkpoints,)
    is_outlier = _outliers(by_step, STEP_EXCESS, IMPOSSIBLE_DETOUR)
    while without is not None and is_outlier.sum() > 1 and len(series) > MIN_CHECKPOINTS:
        gone = {misfit.checkpoint for misfit in result}
        worst = min(
            _places(is_outlier),
            key=lambda place: _largest_detour(without({*gone, series[place].name}), names),
        )
        result.append(_step_misfit(series, worst, by_step))
        series = without({*gone, series[worst].name})
        detours = _log_detours(series, names)
        by_step = middle(detours, 0)
        is_outlier = _outliers(by_step, STEP_EXCESS, IMPOSSIBLE_DETOUR)
    result += [_step_misfit(series, place, by_step) for place in _places(is_outlier)]
    # What a file or a matrix has more than its checkpoint; (matrices, checkpoints)
    excess = np.where(is_outlier, np.nan, detours - by_step)
    rows_by_file = _rows_by_file(series, names)
    result += _shard_misfits(series, names, rows_by_file, excess)
    for row, name in enumerate(names):
        for place in _places(_outliers(excess[row], MATRIX_EXCESS)):
            result.append(_part_misfit(series, place, name, [name], excess[row, place]))
    return result + _end_misfits(series, names, rows_by_file, result)


def _largest_detour(series: Sequence[Facts], names: list[str]) -> float:
    by_step = middle(_log_detours(series, names), 0)
    return float(np.nanmax(by_step, initial=0.0))


def _shard_misfits(
    series: Sequence[Facts],
    names: list[str],
    rows_by_file: dict[str, list[int]],
    excess: NDArray[np.float64],
) -> list[Misfit]:
    """Return files that do not fit, and set their matrices in `excess` to NaN: they are judged."""
    result = []
    for file, rows in rows_by_file.items():
        by_step = middle(excess[rows], 0)  # (checkpoints,)
        for place in _places(_outliers(by_step, SHARD_EXCESS)):
            inside = [names[row] for row in rows]
            result.append(_part_misfit(series, place, file, inside, by_step[place]))
            excess[rows, place] = np.nan
    return result


def _step_misfit(series: Sequence[Facts], place: int, by_step: NDArray[np.float64]) -> Misfit:
    name = series[place].name
    detour = math.exp(by_step[place])
    usual = math.exp(np.nanmedian(by_step))
    return Misfit(
        name,
        f"{name} does not lie between {series[place - 1].name} and {series[place + 1].name}: the "
        f"detour over it is {detour:.3g}, {usual:.3g} is usual",
    )


def _part_misfit(
    series: Sequence[Facts], place: int, part: str, names: list[str], excess: float
) -> Misfit:
    name = series[place].name
    factor = math.exp(excess)
    text = f"{part} of {name} does not fit: its detour is {factor:.3g} × that of the rest"
    return Misfit(name, text, tuple(names))


def _end_misfits(
    series: Sequence[Facts],
    names: list[str],
    rows_by_file: dict[str, list[int]],
    earlier: Sequence[Misfit],
) -> list[Misfit]:
    """Return shards of the first or last checkpoint with a change out of proportion to the others."""
    already_named = {misfit.checkpoint for misfit in earlier}
    with np.errstate(all="ignore"):
        change = np.log(_table(series, names, "change"))  # (matrices, checkpoints)
    change = np.where(np.isfinite(change), change, np.nan)
    rest = change - middle(change, 0)  # more than the other matrices of the checkpoint
    rest = rest - middle(rest, 1)[:, None]  # more than the same matrix in other checkpoints
    result = []
    last = len(series) - 1
    # The change at place 1 is that between the first two checkpoints.
    for end, change_place, neighbour in ((0, 1, 1), (last, last, last - 1)):
        if {series[end].name, series[neighbour].name} & already_named:
            continue
        for file, rows in rows_by_file.items():
            excess = middle(rest[rows], 0)  # (checkpoints,)
            if not _outliers(excess, END_EXCESS)[change_place]:
                continue
            factor = math.exp(excess[change_place])
            text = (
                f"{file} of {series[end].name} does not fit: it differs from that of "
                f"{series[neighbour].name} by {factor:.3g} × what the change of the others makes one "
                "expect"
            )
            result.append(Misfit(series[end].name, text, tuple(names[row] for row in rows)))
    return result


def matrices(series: Sequence[Facts]) -> list[str]:
    """Return the tensors that the rules are about: matrices of some size that move."""
    shapes = {}
    moving = set()
    for facts in series:
        for name, tensor in facts.tensors.items():
            shapes[name] = tensor.shape
        for name, change in facts.change.items():
            if change > 0:
                moving.add(name)
    return sorted(
        name for name in moving if len(shapes[name]) > 1 and math.prod(shapes[name]) >= MIN_NUMBERS
    )


def middle(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Return medians that ignore NaN; NaN where there is nothing else."""
    is_missing = np.isnan(values)
    # np.nanmedian warns about rows of nothing but NaN.
    filled = np.where(is_missing.all(axis=axis, keepdims=True), 0.0, values)
    return np.where(is_missing.all(axis=axis), np.nan, np.nanmedian(filled, axis=axis))


def _table(series: Sequence[Facts], names: list[str], field: str) -> NDArray[np.float64]:
    """Return (matrices, checkpoints); NaN where a change is not known."""
    rows = []
    for name in names:
        rows.append([getattr(facts, field).get(name, math.nan) for facts in series])
    return np.array(rows, dtype=float).reshape(len(names), len(series))


def _log_detours(series: Sequence[Facts], names: list[str]) -> NDArray[np.float64]:
    """Return log detours (matrices, checkpoints); the first and the last checkpoint have NaN."""
    change = _table(series, names, "change")
    change_over_two = _table(series, names, "change2")
    detours = np.full(change.shape, np.nan)
    with np.errstate(all="ignore"):
        both_steps = change[:, 1:-1] + change[:, 2:]
        detours[:, 1:-1] = np.log(both_steps / change_over_two[:, 2:])
    return np.where(np.isfinite(detours), detours, np.nan)


def _outliers(
    values: NDArray[np.float64], excess: float, limit: float = math.inf
) -> NDArray[np.bool_]:
    """Return which values are above the median by `excess`, and far out or above `limit`."""
    known_values = values[~np.isnan(values)]
    if known_values.size < 2:
        return np.zeros(values.shape, dtype=bool)
    centre = np.median(known_values)
    deviation = _NORMAL_DEVIATION * np.median(np.abs(known_values - centre))
    above = np.nan_to_num(values - centre, nan=-1.0)
    is_far = above > OUTLIER_DEVIATIONS * deviation
    is_impossible = np.nan_to_num(values) > limit
    return (above > excess) & (is_far | is_impossible)


def _places(flags: NDArray[np.bool_]) -> list[int]:
    return [int(place) for place in np.flatnonzero(flags)]


def _rows_by_file(series: Sequence[Facts], names: list[str]) -> dict[str, list[int]]:
    """Return file -> the rows of its matrices; nothing if there is a single file."""
    file_of = {}
    for facts in series:
        for name, tensor in facts.tensors.items():
            file_of[name] = tensor.file
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(file_of[name], []).append(row)
    if len(rows) == 1:
        return {}
    return rows
