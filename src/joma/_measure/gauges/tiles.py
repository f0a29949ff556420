"""Statistics of rows of scores, a tile at a time that fits the cache.

With d = s − max s and Z = Σ exp d, the entropy is ln Z − Σ d exp(d)/Z. No two large numbers are
subtracted, so that float32 is exact to about 1e-7. If the probabilities exist already (eager
attention), Z = Σ p / max p saves the exponentials: H = ln Z − Σ p d / Σ p.

Sinks are kept apart from the start: the sums are over all other keys, and `combined` adds the sinks.
So the attention next to a sink that takes nearly everything has all its digits. As a difference from
the total it would have none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from joma._measure.gauges.kernels import widened
from joma._measure.gauges.masks import (
    count,
    first_seen,
    hidden_scores,
    key_columns,
    sinks,
)
from joma._measure.gauges.scores import TILE_ELEMENTS, HeadScores

# exp of this is nothing next to 1, and still a normal number: exp of a lower one, which is
# subnormal, takes 16 times as long.
LOWEST_EXPONENT = -80.0
# Probabilities below this have fewer digits in float32, or none.
SMALLEST_PROBABILITY = 1e-30


def combined(nonsink: Tensor, others: Tensor, *at_sinks: Tensor) -> Tensor:
    """Return entropy, logsumexp, mass on sinks and entropy of the other keys, (4, …).

    Arguments:
        nonsink: entropy of the keys that are not sinks.
        others: their logsumexp, −inf if there are none.
        at_sinks: the scores of sinks, −inf where they are not seen.
    """
    nonsink = widened(nonsink)
    logs = widened(torch.stack([others, *at_sinks]))  # (1 + sinks, …)
    is_absent = logs == -math.inf
    largest = logs.amax(dim=0)
    largest.masked_fill_(largest == -math.inf, 0.0)
    logs -= largest
    # Nothing is larger than 0, so that no exponential overflows.
    logsumexp = logs.exp().sum(dim=0).log_()
    # −ln of each share, (1 + sinks, …)
    information = (logsumexp - logs).masked_fill_(is_absent, 0.0)
    shares = information.neg().exp_().masked_fill_(is_absent, 0.0)
    others_share = shares[0]
    sink_mass = shares[1]
    if len(at_sinks) > 1:
        sink_mass = shares[1:].sum(dim=0)
    entropy = (shares * information).sum(dim=0).add_(others_share * nonsink)
    return torch.stack([entropy, logsumexp.add_(largest), sink_mass, nonsink])


def stats_of_scores(head: HeadScores, sink: Tensor | int) -> Tensor:
    """Return the statistics of `combined`, (4, Tq), of one head.

    ``sink`` is the key that is the sink, or one per query (Tq or 1, 1).
    """
    q = head.q
    nonsink, others, at_sink = torch.empty((3, len(q)), dtype=q.dtype, device=q.device)
    for rows, scores in head.tiles():
        sink_in_tile = sink
        if isinstance(sink, Tensor) and len(sink) > 1:
            sink_in_tile = sink[rows]
        at_sink[rows] = _take_sinks(scores, sink_in_tile)
        nonsink[rows], others[rows], _ = _entropy(scores, narrow_type=torch.float32)
    return combined(nonsink, others, at_sink).float()


def _take_sinks(scores: Tensor, sink: Tensor | int) -> Tensor:
    """Return the scores (rows,) of sinks in scores (rows, keys), and put −inf there."""
    if isinstance(sink, int):
        at_sink = scores[:, sink].clone()
        scores[:, sink] = -math.inf
        return at_sink
    sink = sink.expand(len(scores), 1)
    at_sink = scores.gather(-1, sink)[:, 0]  # (rows, 1) -> (rows,)
    scores.scatter_(-1, sink, -math.inf)
    return at_sink


def _entropy(
    scores: Tensor,
    probabilities: Tensor | None = None,
    narrow_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return entropy, logsumexp and largest (rows,) of scores (rows, keys).

    Where no key is seen, they are 0, −inf and −inf.

    Arguments:
        probabilities: exp(scores), times any factor per row.
        narrow_type: the type of the distances from a row's largest score: a narrower one than that
            of the scores is enough for them.
    """
    if not scores.shape[-1]:
        nothing = scores.new_full((len(scores),), -math.inf)
        return scores.new_zeros(len(scores)), nothing, nothing
    top_score = scores.amax(dim=-1)
    is_empty = top_score == -math.inf
    largest = torch.where(is_empty, 0.0, top_score)
    distances = below(scores, largest, narrow_type or scores.dtype)  # (rows, keys)
    top_probability = None
    if probabilities is not None:
        top_probability = probabilities.amax(dim=-1)
    if (
        probabilities is None
        or top_probability is None
        or bool((top_probability < SMALLEST_PROBABILITY).any())
    ):
        probabilities = distances.exp()
        total = probabilities.sum(dim=-1)
        logarithm = total.log()
    else:
        probabilities = probabilities.to(distances.dtype)
        total = probabilities.sum(dim=-1)
        logarithm = (total / top_probability).log()
    entropy = logarithm - torch.linalg.vecdot(probabilities, distances) / total
    return (
        torch.where(is_empty, 0.0, entropy),
        torch.where(is_empty, -math.inf, largest + logarithm),
        top_score,
    )


def below(scores: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scores (rows, keys) less the largest (rows,) of their rows, not too low for `exp`."""
    distances = scores.new_empty(scores.shape, dtype=dtype)
    return torch.sub(scores, largest[:, None], out=distances).clamp_(min=LOWEST_EXPONENT)


def stats_of_softmax(
    scores: Tensor, probabilities: Tensor | None, lowest: float, learned: int | None
) -> tuple[Tensor, Tensor]:
    """Return the statistics of scores (N, Tq, columns) with or without their softmax.

    The softmax is computed again if it is missing or narrower than float32.

    Arguments:
        lowest: scores up to this are masked, and so are those far below their row (`hidden_scores`).
        learned: the first or the last column, if it is not a key but a learned sink.

    Returns:
        The statistics of `combined`, (4, N, Tq), and how many columns each query sees (N, Tq).
    """
    N, Tq, columns = scores.shape
    device = scores.device
    has_learned = learned is not None
    if probabilities is not None and torch.finfo(probabilities.dtype).bits < 32:
        probabilities = None
    dtype = torch.float32
    if scores.dtype == torch.float64:
        dtype = torch.float64
    elif probabilities is None and device.type in ("cpu", "cuda"):
        # No kernel of a model in training waits for this: as exact as possible.
        dtype = torch.float64
    nonsink, others, *at_sinks = torch.empty((3 + has_learned, N, Tq), dtype=dtype, device=device)
    visible = torch.empty((N, Tq), dtype=torch.int64, device=device)
    first = torch.zeros((N, Tq), dtype=torch.int64, device=device)
    keys = key_columns(learned)
    start = keys.start or 0
    after_first = slice(start + 1, keys.stop)
    tiles_of_rows = _row_tiles(N, Tq, columns)

    # Mostly the first key is the sink of all queries.
    for n, rows in tiles_of_rows:
        tile = scores[n, rows].to(dtype)  # (rows, columns)
        if learned is not None:
            at_sinks[1][n, rows] = tile[:, learned]
        softmax = None
        if probabilities is not None:
            softmax = probabilities[n, rows, after_first]
        nonsink[n, rows], others[n, rows], largest = _entropy(tile[:, after_first], softmax)
        # A masked first key is as low as can be: it gets no share.
        at_sinks[0][n, rows] = tile[:, start]
        largest = torch.maximum(largest, tile[:, start])
        is_visible = ~hidden_scores(tile, largest[:, None], lowest)  # (rows, columns)
        if not bool(is_visible[:, start].all()):
            first[n, rows] = first_seen(is_visible[:, keys].contiguous())
        visible[n, rows] = count(is_visible)
    sink = sinks(first, columns - has_learned)  # (N, Tq or 1, 1)
    if sink is None:
        return combined(nonsink, others, *at_sinks), visible

    # Tiles in which some query has another sink are computed again.
    for n, rows in tiles_of_rows:
        sink_in_tile = sink[n]
        if sink.shape[1] > 1:
            sink_in_tile = sink[n, rows]
        if not bool(sink_in_tile.any()):
            continue
        tile = scores[n, rows, keys].to(dtype)  # (rows, keys)
        is_hidden = hidden_scores(tile, tile.amax(dim=-1, keepdim=True), lowest)
        tile = tile.masked_fill(is_hidden, -math.inf)
        at_sinks[0][n, rows] = _take_sinks(tile, sink_in_tile)
        nonsink[n, rows], others[n, rows], _ = _entropy(tile)
    return combined(nonsink, others, *at_sinks), visible


def _row_tiles(matrices: int, rows: int, columns: int) -> list[tuple[int, slice]]:
    """Return (number of a matrix, some of its rows) for tiles of matrices (rows, columns)."""
    tile_rows = max(1, min(rows, TILE_ELEMENTS // columns))
    tiles_of_rows = []
    for number in range(matrices):
        for start in range(0, rows, tile_rows):
            tiles_of_rows.append((number, slice(start, start + tile_rows)))
    return tiles_of_rows
