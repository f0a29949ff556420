"""Stable rank, effective rank and spectral norm of weight matrices.

‖W‖_F²/σ_max² needs the largest singular value only. It comes from Lanczos on the smaller Gram matrix, two products with
W a step, no Gram matrix formed; what a full SVD spends on all the other singular values is saved. The start vector can
be handed over from one training step to the next, where the leading direction has hardly moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._gauges.sharded import Shard

# matrices up to this size are decomposed directly: cheaper than a Lanczos loop
_DIRECT = 128
_ROWS = 512  # of W at a time
_BLOCK = 8  # vectors a step; a product with eight costs hardly more than with one, memory being the limit


@dataclass(frozen=True, eq=False)
class TopSingular:
    """The largest singular value, the Frobenius norm, leading singular vectors, and how many steps it took."""

    sigma: float
    frobenius: float
    vectors: Tensor | None  # (_BLOCK, min(m, n)): start the next call from these
    steps: int
    reason: str | None = None  # why sigma is 0 or NaN

    @property
    def stable_rank(self) -> float:
        """‖W‖_F² / σ_max²; 0 for a zero matrix, NaN for one that is not finite."""
        return (self.frobenius / self.sigma) ** 2 if self.sigma > 0 else self.sigma


def top_singular(w: Tensor, start: Tensor | None = None, rtol: float = 1e-6, max_steps: int = 400) -> TopSingular:
    """σ_max of one matrix (m, n) to relative accuracy ``rtol`` (limited by float32 sums), by block Lanczos.

    ``start`` are the ``vectors`` of an earlier call on a similar matrix. Low precision is accumulated in float32. Of a
    matrix that is sharded over processes, each works on its shard, and vectors are all that is exchanged.
    """
    shard = Shard.of(w)
    w = _matrix(shard.local)
    if shard.size == 0:
        return TopSingular(0.0, 0.0, None, 0, "the matrix is empty")
    peak = shard.maximum(_peak(w))
    if not math.isfinite(peak):
        return TopSingular(math.nan, math.nan, None, 0, "the matrix has entries that are not finite")
    if peak == 0.0:
        return TopSingular(0.0, 0.0, None, 0, "the matrix is zero")
    factor = 1.0 if 1e-12 < peak < 1e12 else peak  # squares must stay in range
    w = w if factor == 1.0 else w / factor
    squares = torch.linalg.vector_norm(w, dim=1).double().square()  # row by row: fast, and exact to 1e-8
    frobenius = factor * math.sqrt(shard.sum(float(squares.sum())))
    if shard.whole:
        w = w.T if w.shape[0] < w.shape[1] else w
        if w.shape[1] <= _DIRECT:
            return TopSingular(factor * float(torch.linalg.svdvals(w.double())[0]), frobenius, None, 1)
    sigma2, vectors, steps = _block_lanczos(w, start, rtol, max_steps, shard)
    return TopSingular(factor * math.sqrt(sigma2), frobenius, vectors, steps)


def _block_lanczos(
    w: Tensor, start: Tensor | None, rtol: float, max_steps: int, shard: Shard
) -> tuple[float, Tensor, int]:
    """Largest eigenvalue of WᵀW, a block of leading Ritz vectors as rows, and the number of steps.

    Vectors are rows throughout: X Wᵀ and Y W run at memory speed for a few rows, W X and Wᵀ Y do not.
    """
    n = w.shape[1]
    p = min(_BLOCK, n)
    if start is None or start.shape != (p, n):
        generator = torch.Generator().manual_seed(0)  # of our own: the user's random state is not touched
        start = torch.randn(p, n, generator=generator)
    block = _orthonormal(start.to(w))
    limit = max(1, min(max_steps, n // p))
    Q = w.new_empty(limit * p, n)  # the basis
    A = w.new_empty(limit * p, n)  # its image under WᵀW
    T = torch.empty(limit * p, limit * p, dtype=torch.float64)  # Q Aᵀ
    theta, ritz, steps = 0.0, block, 0
    for steps in range(1, limit + 1):
        k = steps * p
        Q[k - p : k] = block
        A[k - p : k] = shard.sum_(_gram(block, w))
        rows = (A[k - p : k] @ Q[:k].T).double().cpu()
        T[k - p : k, :k], T[:k, k - p : k] = rows, rows.T
        values, vectors = torch.linalg.eigh(T[:k, :k])
        theta = float(values[-1])
        top = vectors[:, -p:].flip(1).T.to(w)  # (p, k), the leading one first
        ritz = top @ Q[:k]
        residual = float(torch.linalg.vector_norm(top[0] @ A[:k] - theta * ritz[0]))
        gap = max(theta - float(values[-2]), residual)
        # Kato-Temple: the error of θ is at most residual² / gap
        if residual**2 / gap <= rtol * theta or residual <= 2e-6 * theta:
            break
        block = A[k - p : k]
        for _ in range(3):  # again after QR: where little is left, its rows are anything, also inside Q
            block = _orthonormal(block - (block @ Q[:k].T) @ Q[:k])
    return theta, ritz, steps


def _peak(w: Tensor) -> float:
    """The largest entry by size, NaN if there is one; without a copy of the matrix."""
    if not w.numel():
        return 0.0
    low, high = torch.aminmax(w)
    return float(torch.maximum(-low, high))


def _gram(block: Tensor, w: Tensor) -> Tensor:
    """X WᵀW with W read from memory once, which is what it costs: a few rows of W stay in cache for both products."""
    out = torch.zeros_like(block)
    for rows in w.split(_ROWS):
        out.addmm_(block @ rows.T, rows)
    return out


def _orthonormal(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows.T)[0].T


def _matrix(w: Tensor) -> Tensor:
    if w.dim() != 2:
        raise ValueError(f"a matrix (m, n) is needed, got shape {tuple(w.shape)}; stacks go through stable_rank")
    w = w.detach()
    return w if w.dtype in (torch.float32, torch.float64) else w.float()


def _over_stack(w: Tensor, function: object) -> Tensor:
    """``function`` of each matrix of (…, m, n), as float64 of the leading shape."""
    if w.dim() < 2:
        raise ValueError(f"a matrix or a stack of matrices (…, m, n) is needed, got shape {tuple(w.shape)}")
    flat = w.detach().reshape(-1, *w.shape[-2:])
    values = [function(matrix) for matrix in flat]  # type: ignore[operator]
    return torch.tensor(values, dtype=torch.float64).reshape(w.shape[:-2])


def spectral_norm(w: Tensor) -> Tensor:
    """σ_max of a matrix, or of each one of a stack (…, m, n).

    Arguments:
        w: (m, n), or a stack (…, m, n); any floating type.

    Returns:
        A scalar, or (…) for a stack.
    """
    return _over_stack(w, lambda m: top_singular(m).sigma)


def stable_rank(w: Tensor) -> Tensor:
    """‖W‖_F² / σ_max² of a matrix, or of each one of a stack; 0 for a zero matrix, NaN for one that is not finite.

    Arguments:
        w: (m, n), or a stack (…, m, n); any floating type.

    Returns:
        A scalar, or (…) for a stack.
    """
    return _over_stack(w, lambda m: top_singular(m).stable_rank)


def effective_rank(w: Tensor) -> Tensor:
    """exp of the entropy of σ/Σσ (Roy and Vetterli), of a matrix or of each one of a stack.

    Arguments:
        w: (m, n), or a stack (…, m, n); any floating type.

    Returns:
        A scalar, or (…) for a stack.
    """

    def one(m: Tensor) -> float:
        m = _matrix(m).double()
        if m.numel() == 0 or not bool(m.isfinite().all()):
            return 0.0 if m.numel() == 0 else math.nan
        sigma = torch.linalg.svdvals(m)
        if float(sigma.sum()) == 0.0:
            return 0.0
        p = sigma / sigma.sum()
        return float(torch.special.entr(p).sum().exp())

    return _over_stack(w, one)
