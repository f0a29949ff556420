"""Checkpoints that do not lie on the way from the one before to the one after.

With d for the relative change of a tensor between two checkpoints, its *detour* over checkpoint i is

    (d(i-1, i) + d(i, i+1)) / d(i-1, i+1):

1 on a straight way, √2 on a random walk, 2 where weights only jitter around a point, whatever the steps between; and
much more if i is another model's, another step's or damaged. A checkpoint is a misfit if its detour is far from those
of the other checkpoints of the series, by medians: of all matrices (a step), of those in one file (a shard), of one
matrix. A misfit spoils the detours of its neighbours, too: where several checkpoints stand out, the one without which
the others fit best is the first, and the rest is judged without it. The first and the last have no detour: a shard
there is judged by how its change compares with that of the others. Whether checkpoints are exchanged is asked first
(`order.py`), and such are put back before this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joma._checkpoints.audit.facts import Facts

_FAR = 6.0  # robust standard deviations
_STEP, _SHARD, _TENSOR, _END = (
    math.log(1.6),
    math.log(2.5),
    math.log(4.0),
    math.log(8.0),
)  # and at least so much more
_JITTER = math.log(2.1)  # more is no training, whatever the other checkpoints do
FEWEST = 4  # checkpoints: of fewer it cannot be said what is usual
LEAST = 256  # numbers: of smaller tensors nothing can be said


@dataclass(frozen=True)
class Misfit:
    """A checkpoint that does not fit, all of it or the tensors named."""

    checkpoint: str
    text: str
    tensors: tuple[str, ...] = ()


def misfits(
    series: Sequence[Facts], without: Callable[[Container[str]], Sequence[Facts]] | None = None
) -> list[Misfit]:
    """The checkpoints of a series, in the order of steps, that do not fit to their neighbours.

    ``without`` gives the series without those of these names, if the changes over them are known.
    """
    names = matrices(series)
    if len(series) < FEWEST or not names:
        return []
    found: list[Misfit] = []
    detour = _detours(series, names)  # (matrices, checkpoints), logarithms
    usual = middle(detour, 0)  # of each checkpoint
    wrong = _outliers(usual, _STEP, _JITTER)
    while without is not None and wrong.sum() > 1 and len(series) > FEWEST:
        gone = {misfit.checkpoint for misfit in found}
        worst = min(_places(wrong), key=lambda n: _largest(without({*gone, series[n].name}), names))
        found.append(_step(series, worst, usual))
        series = without({*gone, series[worst].name})
        detour = _detours(series, names)
        usual = middle(detour, 0)
        wrong = _outliers(usual, _STEP, _JITTER)
    found += [_step(series, n, usual) for n in _places(wrong)]
    rest = np.where(
        wrong, np.nan, detour - usual
    )  # what a file or a matrix has more than the checkpoint
    by_file = _by_file(series, names)
    for file, rows in by_file.items():
        excess = middle(rest[rows], 0)
        for n in _places(_outliers(excess, _SHARD)):
            found.append(_part(series, n, file, [names[row] for row in rows], excess[n]))
            rest[rows, n] = np.nan
    for row, name in enumerate(names):
        odd = _places(_outliers(rest[row], _TENSOR))
        found += [_part(series, n, name, [name], rest[row, n]) for n in odd]
    return found + _ends(series, names, by_file, {misfit.checkpoint for misfit in found})


def _largest(series: Sequence[Facts], names: list[str]) -> float:
    """The largest detour over a checkpoint."""
    usual = middle(_detours(series, names), 0)
    return float(np.nanmax(usual, initial=0.0))


def _step(series: Sequence[Facts], n: int, usual: NDArray[np.float64]) -> Misfit:
    text = (
        f"{series[n].name} does not lie between {series[n - 1].name} and {series[n + 1].name}: "
        + (
            f"the detour over it is {math.exp(usual[n]):.3g}, {math.exp(np.nanmedian(usual)):.3g} is usual"
        )
    )
    return Misfit(series[n].name, text)


def _part(series: Sequence[Facts], n: int, what: str, names: list[str], excess: float) -> Misfit:
    text = f"{what} of {series[n].name} does not fit: its detour is {math.exp(excess):.3g} × that of the rest"
    return Misfit(series[n].name, text, tuple(names))


def matrices(series: Sequence[Facts]) -> list[str]:
    """The tensors that the rule is about: matrices that move."""
    shapes = {name: tensor.shape for facts in series for name, tensor in facts.tensors.items()}
    moving = {name for facts in series for name, change in facts.change.items() if change > 0}
    return sorted(
        name for name in moving if len(shapes[name]) > 1 and math.prod(shapes[name]) >= LEAST
    )


def _table(series: Sequence[Facts], names: list[str], which: str) -> NDArray[np.float64]:
    rows = [[getattr(facts, which).get(name, math.nan) for facts in series] for name in names]
    return np.array(rows, dtype=float).reshape(len(names), len(series))


def _detours(series: Sequence[Facts], names: list[str]) -> NDArray[np.float64]:
    change, change2 = _table(series, names, "change"), _table(series, names, "change2")
    detour = np.full(change.shape, np.nan)
    with np.errstate(all="ignore"):
        detour[:, 1:-1] = np.log((change[:, 1:-1] + change[:, 2:]) / change2[:, 2:])
    return np.where(np.isfinite(detour), detour, np.nan)


def middle(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Medians, NaN where there is nothing."""
    filled = np.where(np.isnan(values).all(axis=axis, keepdims=True), 0.0, values)
    return np.where(np.isnan(values).all(axis=axis), np.nan, np.nanmedian(filled, axis=axis))


def _outliers(
    values: NDArray[np.float64], least: float, limit: float = math.inf
) -> NDArray[np.bool_]:
    """Values far above the others by their median and median deviation, or by ``least`` and above ``limit``."""
    known = values[~np.isnan(values)]
    if known.size < 2:
        return np.zeros(values.shape, dtype=bool)
    centre = np.median(known)
    spread = 1.4826 * np.median(np.abs(known - centre))
    above = np.nan_to_num(values - centre, nan=-1.0)
    return (above > least) & ((above > _FAR * spread) | (np.nan_to_num(values) > limit))


def _places(flags: NDArray[np.bool_]) -> list[int]:
    return [int(n) for n in np.flatnonzero(flags)]


def _by_file(series: Sequence[Facts], names: list[str]) -> dict[str, list[int]]:
    """File -> the rows of its matrices, where there are several files."""
    places: dict[str, list[int]] = {}
    last = {name: tensor.file for facts in series for name, tensor in facts.tensors.items()}
    for row, name in enumerate(names):
        places.setdefault(last[name], []).append(row)
    return places if len(places) > 1 else {}


def _ends(
    series: Sequence[Facts], names: list[str], by_file: dict[str, list[int]], known: set[str]
) -> list[Misfit]:
    """A shard of the first or the last checkpoint whose change is out of proportion to that of the others."""
    with np.errstate(all="ignore"):
        change = np.log(_table(series, names, "change"))
    change = np.where(np.isfinite(change), change, np.nan)
    rest = change - middle(change, 0)
    rest = rest - middle(rest, 1)[:, None]
    found = []
    for end, gap, neighbour in ((0, 1, 1), (len(series) - 1, len(series) - 1, len(series) - 2)):
        if {series[end].name, series[neighbour].name} & known:
            continue
        for file, rows in by_file.items():
            excess = middle(rest[rows], 0)
            if _outliers(excess, _END)[gap]:
                text = f"{file} of {series[end].name} does not fit: it differs from that of {series[neighbour].name} by "
                text += (
                    f"{math.exp(excess[gap]):.3g} × what the change of the others makes one expect"
                )
                found.append(Misfit(series[end].name, text, tuple(names[row] for row in rows)))
    return found
