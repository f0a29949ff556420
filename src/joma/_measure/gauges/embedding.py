"""Cosines between the rows of an embedding (Section 7: "almost orthogonal", |u_l·u_l′| ≤ ε)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_BINS = 4096
# Rows whose cosines with all later rows are computed together: 4 KiB per later row.
BLOCK_ROWS = 1024
# Rows whose pairs are computed together: small parts skip more of the lower triangle.
PAIR_ROWS = 256


@dataclass(frozen=True, eq=False)
class Coherence:
    """The distribution of |cos| between different rows (zero rows left out)."""

    maximum: float  # ε: no two rows are closer than this
    mean: float
    rms: float
    signed_mean: float  # of cos itself: far from 0 where all rows lean to one side
    pair: tuple[int, int] | None  # the two rows that are closest
    rows: int  # M, without zero rows
    dimension: int  # d
    zero_rows: int
    _histogram: Tensor = field(repr=False)  # (_BINS,) counts of |cos| in [0, 1]

    def quantile(self, q: float) -> float:
        """Return the q-quantile of |cos| over all pairs, to 1/4096."""
        total = float(self._histogram.sum())
        if total == 0:
            return math.nan
        index = int(torch.searchsorted(self._histogram.cumsum(0).double(), q * total))
        return min(index, _BINS - 1) / _BINS + 0.5 / _BINS

    def histogram(self, bins: int = 64) -> Tensor:
        """Return the number of pairs with |cos| in each of ``bins`` equal parts of [0, 1].

        ``bins`` is a divisor of 4096.
        """
        if bins < 1 or _BINS % bins:
            raise ValueError(f"bins is {bins}: give a divisor of {_BINS}, such as 64")
        return self._histogram.reshape(bins, -1).sum(dim=1)

    @property
    def sufficient_dimension(self) -> float:
        """8 ε⁻² ln M: with that many dimensions, M vectors with coherence ε exist (Johnson-Lindenstrauss)."""
        if self.maximum == 0:
            return math.inf
        return 8 * math.log(max(self.rows, 1)) / self.maximum**2

    @property
    def effective_number(self) -> float:
        """M²/Σ cos² over all pairs, a row and itself included: M for orthogonal rows, 1 for parallel ones, at most d.

        Independent Gaussian rows have M/(1 + (M − 1)/d).
        """
        if self.rows < 2:
            return self.rows
        return self.rows / (1 + (self.rows - 1) * self.rms**2)


def embedding_coherence(u: Tensor) -> Coherence:
    """Return the distribution of |cos| over all pairs of different rows of u, computed in float32.

    Arguments:
        u: (M, d), one row per token.

    Returns:
        The largest, the mean and the quantiles of |cos| over the M(M − 1)/2 pairs.
    """
    if u.dim() != 2:
        raise ValueError(
            f"embeddings must be (M, d), one row per token; got shape {tuple(u.shape)}"
        )
    u = u.detach().float()
    if not bool(u.isfinite().all()):
        bad = int((~u.isfinite()).any(dim=1).nonzero()[0])
        raise ValueError(f"row {bad} of the embedding is not finite")
    norm = torch.linalg.vector_norm(u, dim=1)
    nonzero = (norm > 0).nonzero()[:, 0]  # (M,)
    unit = u[nonzero] / norm[nonzero, None]  # (M, d)
    M = len(nonzero)
    histogram = torch.zeros(_BINS, dtype=torch.int64)
    total = 0.0
    square = 0.0
    maximum = 0.0
    pair = None
    for start in range(0, M, BLOCK_ROWS):
        block = unit[start : start + BLOCK_ROWS]
        cosines = (block @ unit[start:].T).abs_()  # (r, M − start): pairs above the diagonal
        above = torch.ones_like(cosines, dtype=torch.bool).triu_(1)
        values = cosines[above]
        if not values.numel():
            continue
        total += float(values.double().sum())
        square += float(values.double().square().sum())
        histogram += torch.histc(values.clamp(max=1.0), _BINS, 0.0, 1.0).long().cpu()
        largest = float(values.max())
        if pair is None or largest > maximum:
            position = int(cosines.masked_fill(~above, -1.0).argmax())
            row, column = divmod(position, cosines.shape[1])
            maximum = largest
            pair = (int(nonzero[start + row]), int(nonzero[start + column]))
    pairs = M * (M - 1) / 2
    mean = math.nan
    rms = math.nan
    signed_mean = math.nan
    if pairs:
        mean = total / pairs
        rms = math.sqrt(square / pairs)
        # Σ_{i≠j} cos = ‖Σ u_i‖² − M for unit rows
        signed_mean = (float(unit.double().sum(dim=0).square().sum()) - M) / (2 * pairs)
    return Coherence(
        maximum=min(maximum, 1.0),
        mean=mean,
        rms=rms,
        signed_mean=signed_mean,
        pair=pair,
        rows=M,
        dimension=u.shape[1],
        zero_rows=len(u) - M,
        _histogram=histogram,
    )


def effective_number(u: Tensor) -> float | None:
    """Return M²/Σ cos² over pairs of the M rows of u (M, d) that are not zero; None if M < 2.

    Σ cos² is the squared norm of UUᵀ, and of UᵀU, for rows U of length one. The smaller of both is
    enough: 1536 × 384 takes less than a tenth of the time of `embedding_coherence`, which looks at
    all pairs.
    """
    u = u.detach().float()
    lengths = torch.linalg.vector_norm(u, dim=1)  # (M,)
    is_nonzero = lengths > 0
    unit = u[is_nonzero] / lengths[is_nonzero, None]
    rows = len(unit)
    if rows < 2:
        return None
    if rows > unit.shape[1]:
        gram = unit.T @ unit  # (d, d)
    else:
        gram = unit @ unit.T  # (M, M)
    return rows**2 / float(gram.double().square().sum())


def correlated_share(u: Tensor, least: float = 0.5) -> float:
    """Return the share of rows (M, d) that have |cos| ≥ ``least`` with another row.

    Zero rows are correlated with none.
    """
    unit = torch.nn.functional.normalize(u.detach().float(), dim=1)
    is_correlated = torch.zeros(len(unit), dtype=torch.bool, device=unit.device)
    for start in range(0, len(unit), PAIR_ROWS):
        # Pairs are symmetric: the columns before ``start`` were rows of an earlier part.
        part = unit[start : start + PAIR_ROWS]
        cosines = (part @ unit[start:].T).abs_()  # (r, M − start)
        cosines.diagonal().zero_()
        is_close = cosines >= least
        is_correlated[start : start + PAIR_ROWS] |= is_close.any(dim=1)
        is_correlated[start:] |= is_close.any(dim=0)
    return int(is_correlated.sum()) / len(unit)


def centred(u: Tensor) -> Tensor:
    """Return rows (M, d) without their mean: the part that they do not have in common."""
    u = u.detach().float()
    return u - u.mean(dim=0)


def random_cosine(d: int) -> float:
    """Return E|cos| between independent Gaussian vectors in d dimensions.

    It is Γ(d/2) / (√π Γ((d + 1)/2)), about √(2/(πd)).
    """
    if d < 1:
        raise ValueError(f"the dimension is {d}: give at least 1")
    return math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)
