"""Statistics of rows of scores, a tile at a time that fits the cache.

With d = s − max s and Z = Σ exp d, the entropy is ln Z − Σ d exp(d)/Z: no two large numbers are subtracted, so that
float32 is exact to about 1e-7. Where the probabilities are there already (eager attention), max p = 1/Z saves the
exponentials: H = −ln max p − Σ p d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from joma._gauges.masks import count, first_seen

_TILE = 1 << 17  # entries of a tile: 512 KiB in float32
_LOWEST = -1e30  # in the place of −inf, where it is multiplied with a probability of 0


def stats_of_scores(
    q: Tensor, k: Tensor, additive: Tensor | None, is_causal: bool, scale: float, softcap: float | None,
    sink: Tensor | int,
) -> Tensor:  # fmt: skip
    """(3, Tq): entropy, logsumexp and sink mass of one head q (Tq, d), k (Tk, d), computed in their type.

    Arguments:
        additive: (Tq or 1, Tk), added to the scores after soft-capping.
        sink: the key that is one, or one per query (Tq or 1, 1).
    """
    out = torch.empty((3, len(q)), dtype=torch.float32, device=q.device)
    for rows, scores in tiles(q, k, additive, is_causal, scale, softcap):
        s, shift = scores, None
        if s.dtype == torch.float64:  # what a row has in common is taken away before digits are
            shift = s.amax(dim=-1, keepdim=True).clamp_(min=_LOWEST)
            s = (s - shift).float()
        part = out[:, rows]
        _tile(s, part, sink if isinstance(sink, int) or len(sink) == 1 else sink[rows])
        if shift is not None:
            part[1] += shift[:, 0]
    return out


def tiles(
    q: Tensor, k: Tensor, additive: Tensor | None, is_causal: bool, scale: float, softcap: float | None
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
    seen = (added.amax(dim=0) > torch.finfo(added.dtype).min / 2).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 1


def _tile(s: Tensor, out: Tensor, sink: Tensor | int) -> None:
    """Write the three statistics of rows s (rows, keys), which are spoilt, to out (3, rows)."""
    largest = s.amax(dim=-1)
    largest = torch.where(largest == -math.inf, 0.0, largest)
    on_sink = s[:, sink].clone() if isinstance(sink, int) else s.gather(-1, sink.expand(len(s), 1))[:, 0]
    d = s.sub_(largest[:, None]).clamp_(min=_LOWEST)
    e = d.exp()
    total = e.sum(dim=-1)
    out[0] = total.log() - torch.linalg.vecdot(e, d) / total
    out[1] = largest + total.log()
    out[2] = (on_sink - largest).exp() / total


def stats_of_softmax(
    scores: Tensor, probabilities: Tensor | None, lowest: float, keys: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Of scores (N, Tq, columns) and their softmax, which is worked out where it is not there in float32 or wider.

    Arguments:
        lowest: what is not above this is masked; what is not a number is not.
        keys: the columns that are keys.

    Returns:
        Entropy and logsumexp (2, N, Tq), how many columns each query sees (N, Tq), and the first key of them.
    """
    N, Tq, columns = scores.shape
    if probabilities is not None and torch.finfo(probabilities.dtype).bits < 32:
        probabilities = None
    exact = probabilities is None and scores.device.type in ("cpu", "cuda")  # then nobody waits: as exact as it goes
    out = torch.empty((2, N, Tq), dtype=torch.float64 if exact else torch.float32, device=scores.device)
    visible = torch.empty((N, Tq), dtype=torch.int64, device=scores.device)
    first = torch.zeros((N, Tq), dtype=torch.int64, device=scores.device)
    rows = max(1, min(Tq, _TILE // columns))
    for n in range(N):
        for start in range(0, Tq, rows):
            part = slice(start, start + rows)
            s = scores[n, part]
            if exact:
                s = s.double()
            elif torch.finfo(s.dtype).bits < 32:
                s = s.float()
            seen = s > lowest
            if bool((~seen[:, keys.start or 0]).any()):
                seen |= s.isnan()  # what is not a number is not masked: it must show
                first[n, part] = first_seen(seen[:, keys].contiguous())
            visible[n, part] = count(seen)
            largest = s.amax(dim=-1, keepdim=True)
            d = (s - largest).clamp_(min=_LOWEST)
            if probabilities is not None:
                p = probabilities[n, part]
                log_total = -p.amax(dim=-1).log()
                out[0, n, part] = log_total - torch.linalg.vecdot(p.to(d.dtype), d)
            else:
                e = d.exp()
                total = e.sum(dim=-1)
                log_total = total.log()
                out[0, n, part] = log_total - torch.linalg.vecdot(e, d) / total
            out[1, n, part] = largest[:, 0] + log_total
    return out, visible, first
