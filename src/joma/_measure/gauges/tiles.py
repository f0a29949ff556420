"""Statistics of rows of scores, a tile at a time that fits the cache.

With d = s − max s and Z = Σ exp d, the entropy is ln Z − Σ d exp(d)/Z: no two large numbers are subtracted, so that
float32 is exact to about 1e-7. Where the probabilities are there already (eager attention), Z = Σ p / max p saves the
exponentials: H = ln Z − Σ p d / Σ p.

Sinks are kept apart from the start: the sums are over all other keys, and `combined` puts the sinks back. So what is
next to a sink that takes nearly everything has all its digits; as a difference from the whole it would have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from joma._measure.gauges.kernels import widened
from joma._measure.gauges.masks import (
    count,
    first_seen,
    hidden_scores,
    key_columns,
    lowest_seen,
    sinks,
)

_TILE = 1 << 17  # entries of a tile: 512 KiB in float32
# exp of it is nothing beside 1, and still a normal number: exp of what is lower takes 16 times as long
_NOTHING = -80.0
_TINY = 1e-30  # probabilities below have fewer digits in float32, or none


def combined(nonsink: Tensor, others: Tensor, *at_sinks: Tensor) -> Tensor:
    """Entropy, logsumexp, mass on sinks and entropy of the rest, (4, …).

    Arguments:
        nonsink: entropy of the keys that are no sinks.
        others: their logsumexp, −inf if there are none.
        at_sinks: the scores of sinks, −inf where they are not seen.
    """
    nonsink, logs = widened(nonsink), widened(torch.stack([others, *at_sinks]))
    largest = logs.amax(dim=0)
    largest = torch.where(largest == -math.inf, 0.0, largest)
    logs = logs - largest
    logsumexp = logs.logsumexp(dim=0)
    below = torch.where(logs == -math.inf, 0.0, logsumexp - logs)  # −ln of a share
    shares = torch.where(logs == -math.inf, 0.0, (-below).exp())
    entropy = (shares * below).sum(dim=0) + shares[0] * nonsink
    return torch.stack([entropy, logsumexp + largest, shares[1:].sum(dim=0), nonsink])


def stats_of_scores(
    q: Tensor, k: Tensor, additive: Tensor | None, is_causal: bool, scale: float, softcap: float | None,
    sink: Tensor | int,
) -> Tensor:  # fmt: skip
    """(4, Tq): what `combined` gives, of one head q (Tq, d), k (Tk, d), computed in their type.

    Arguments:
        additive: (Tq or 1, Tk), added to the scores after soft-capping.
        sink: the key that is one, or one per query (Tq or 1, 1).
    """
    nonsink, others, at_sink = torch.empty((3, len(q)), dtype=q.dtype, device=q.device)
    for rows, s in tiles(q, k, additive, is_causal, scale, softcap):
        at_sink[rows] = _taken(s, sink if isinstance(sink, int) or len(sink) == 1 else sink[rows])
        nonsink[rows], others[rows], _ = _rest(s, kind=torch.float32)
    return combined(nonsink, others, at_sink).float()


def tiles(
    q: Tensor,
    k: Tensor,
    additive: Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> Iterator[tuple[slice, Tensor]]:
    """The scores of one head q (Tq, d), k (Tk, d), computed in their type, some rows at a time.

    Arguments:
        additive: (Tq or 1, Tk), added to the scores after soft-capping.

    Returns:
        Which rows, and their scores (rows, keys): of the first keys only, where no row sees a later one. Whoever gets
        them may spoil them.
    """
    Tq, Tk = len(q), len(k)
    keys = (k * scale).T.contiguous()
    rows = max(1, _TILE // Tk)
    for start in range(0, Tq, rows):
        stop = min(Tq, start + rows)
        added = additive if additive is None or len(additive) == 1 else additive[start:stop]
        visible = min(Tk, stop) if is_causal else _reach(added, Tk)
        s = q[start:stop] @ keys[:, :visible]
        if softcap is not None:
            s = s.div_(softcap).tanh_().mul_(softcap)
        if added is not None:
            s += added[:, :visible]
        if is_causal and visible > start:
            position = torch.arange(start, stop, device=q.device)
            s[:, start:].masked_fill_(position[: visible - start] > position[:, None], -math.inf)
        yield slice(start, stop), s


def _reach(added: Tensor | None, keys: int) -> int:
    """How many of the first keys some query of a tile sees, at least one: what lies beyond need not be computed."""
    if added is None or added.device.type != "cpu":
        return keys
    seen = (added.amax(dim=0) > lowest_seen(added.dtype)).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 1


def _taken(s: Tensor, sink: Tensor | int) -> Tensor:
    """The scores (rows,) of sinks in s (rows, keys), where −inf is put in their place."""
    if isinstance(sink, int):
        at_sink = s[:, sink].clone()
        s[:, sink] = -math.inf
        return at_sink
    sink = sink.expand(len(s), 1)
    at_sink = s.gather(-1, sink)[:, 0]
    s.scatter_(-1, sink, -math.inf)
    return at_sink


def _rest(
    s: Tensor, p: Tensor | None = None, kind: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, logsumexp and largest (rows,) of scores s (rows, keys); where no key is seen, 0, −inf and −inf.

    Arguments:
        p: all of one factor times exp(s).
        kind: a narrower type than that of the scores, for what is left when a row's largest is taken away.
    """
    if not s.shape[-1]:
        nothing = s.new_full((len(s),), -math.inf)
        return s.new_zeros(len(s)), nothing, nothing
    top_score = s.amax(dim=-1)
    empty = top_score == -math.inf
    largest = torch.where(empty, 0.0, top_score)
    d = below(s, largest, kind or s.dtype)
    top = None if p is None else p.amax(dim=-1)
    if (
        p is None or top is None or bool((top < _TINY).any())
    ):  # too small for all digits: from the scores
        p = d.exp()
        total = p.sum(dim=-1)
        logarithm = total.log()
    else:
        p = p.to(d.dtype)
        total = p.sum(dim=-1)
        logarithm = (total / top).log()
    entropy = logarithm - torch.linalg.vecdot(p, d) / total
    return (
        torch.where(empty, 0.0, entropy),
        torch.where(empty, -math.inf, largest + logarithm),
        top_score,
    )


def below(s: Tensor, largest: Tensor, kind: torch.dtype) -> Tensor:
    """Scores (rows, keys) less the largest of their rows, in this type, fit for `exp`."""
    return torch.sub(s, largest[:, None], out=s.new_empty(s.shape, dtype=kind)).clamp_(min=_NOTHING)


def stats_of_softmax(
    scores: Tensor, probabilities: Tensor | None, lowest: float, learned: int | None
) -> tuple[Tensor, Tensor]:
    """Of scores (N, Tq, columns) and their softmax, which is worked out where it is not there in float32 or wider.

    Arguments:
        lowest: what is not above this is masked, and so is what lies far below its row (`hidden_scores`).
        learned: the first or the last column, if it is no key but a learned sink.

    Returns:
        What `combined` gives, (4, N, Tq), and how many columns each query sees (N, Tq).
    """
    N, Tq, columns = scores.shape
    if probabilities is not None and torch.finfo(probabilities.dtype).bits < 32:
        probabilities = None
    exact = probabilities is None and scores.device.type in (
        "cpu",
        "cuda",
    )  # then nobody waits: as exact as it goes
    kind = torch.float64 if exact or scores.dtype == torch.float64 else torch.float32
    nonsink, others, *at_sinks = torch.empty(
        (3 + (learned is not None), N, Tq), dtype=kind, device=scores.device
    )
    visible = torch.empty((N, Tq), dtype=torch.int64, device=scores.device)
    first = torch.zeros((N, Tq), dtype=torch.int64, device=scores.device)
    keys = key_columns(learned)
    start = keys.start or 0
    after = slice(start + 1, keys.stop)
    rows = max(1, min(Tq, _TILE // columns))
    parts = [(n, slice(begin, begin + rows)) for n in range(N) for begin in range(0, Tq, rows)]

    for n, part in parts:  # the first key is the sink, mostly
        s = scores[n, part].to(kind)
        if learned is not None:
            at_sinks[1][n, part] = s[:, learned]
        p = None if probabilities is None else probabilities[n, part, after]
        nonsink[n, part], others[n, part], largest = _rest(s[:, after], p)
        at_sinks[0][n, part] = s[:, start]  # as low as can be, where it is not seen: no share
        seen = ~hidden_scores(s, torch.maximum(largest, s[:, start])[:, None], lowest)
        if not bool(seen[:, start].all()):
            first[n, part] = first_seen(seen[:, keys].contiguous())
        visible[n, part] = count(seen)
    sink = sinks(first, columns - (learned is not None))
    if sink is None:
        return combined(nonsink, others, *at_sinks), visible
    for n, part in parts:
        at = sink[n] if sink.shape[1] == 1 else sink[n, part]
        if not bool(at.any()):
            continue
        s = scores[n, part, keys].to(kind)
        s = s.masked_fill(hidden_scores(s, s.amax(dim=-1, keepdim=True), lowest), -math.inf)
        at_sinks[0][n, part] = _taken(s, at)
        nonsink[n, part], others[n, part], _ = _rest(s)
    return combined(nonsink, others, *at_sinks), visible
