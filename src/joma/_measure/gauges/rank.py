"""Stable rank, effective rank and spectral norm of weight matrices.

‖W‖_F²/σ_max² needs the largest singular value only. It comes from Lanczos on WᵀW, which multiplies W with vectors and
forms no Gram matrix. A full SVD spends almost all of its time on the other singular values.

Lanczos works on a block of vectors: one vector does not see a second singular value next to the first before its
residual is smaller than their distance, and a block needs fewer steps (39 instead of 98 for a Gaussian 8192 × 2048).
What a product of W with a block costs depends on the machine: with eight vectors at once it took from 2.3 to 19 times
as long as with one. So the products are taken vector by vector, on rows of W that are in cache. That costs 40 % of a
pass over W for each further vector, and the numbers of a run do not depend on a measured time.

From one training step to the next the leading directions hardly move. A measurement that follows another therefore
starts from the leading vectors of the one before, and needs a step or two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from joma.models.sharded import Shard

# The Gram matrix of a matrix with fewer rows or columns is decomposed directly: cheaper than a Lanczos loop.
DIRECT_SIZE = 128
# Rows of W are multiplied in chunks that stay in cache for the second product. 8192 × 2048: 6.1 ms at 2 MiB,
# 9.8 ms at 128 KiB, 7.4 ms at 16 MiB.
CHUNK_BYTES = 1 << 21
# Vectors of the block. Two would be faster (8192 × 2048, Gaussian: 0.50 s, 0.53 s with three, 0.61 s with four, 0.67 s
# with one), but four are the fewest whose error stayed below 1e-6 on clusters of leading values that are 1e-6 to 1e-2
# apart: with three, it was up to 3e-5.
BLOCK_SIZE = 4
# Range of row norms whose squares, and sums of squares, float32 can hold.
SMALLEST_NORM = 1e-12
LARGEST_NORM = 1e12


@dataclass(frozen=True, eq=False)
class TopSingular:
    """The largest singular value of a matrix.

    Attributes:
        sigma: the largest singular value; 0 or NaN if there is a `reason`.
        frobenius: the Frobenius norm.
        vectors: leading right singular vectors as rows, (BLOCK_SIZE, n) at most: start the next call from these.
        steps: steps of the iteration.
        passes: how often the matrix was read from memory.
        reason: why sigma is 0 or NaN.
    """

    sigma: float
    frobenius: float
    vectors: Tensor | None
    steps: int
    reason: str | None = None
    passes: float = 0.0

    @property
    def stable_rank(self) -> float:
        """‖W‖_F² / σ_max²; 0 for a zero matrix, NaN for one that is not finite."""
        return (self.frobenius / self.sigma) ** 2 if self.sigma > 0 else self.sigma


def top_singular(
    w: Tensor, start: Tensor | None = None, rtol: float = 5e-7, max_steps: int = 400
) -> TopSingular:
    """Return σ_max² of one matrix (m, n) to relative accuracy ``rtol`` (limited by float32 sums), by Lanczos.

    ``start`` are the ``vectors`` of an earlier call on a similar matrix. Low precision is accumulated in float32. If
    the matrix is sharded over processes, each process works on its shard, and only vectors are exchanged.
    """
    shard = Shard.of(w)
    w = _matrix(shard.local)
    if shard.size == 0:
        return TopSingular(0.0, 0.0, None, 0, "the matrix is empty")
    norms = torch.linalg.vector_norm(w, dim=1)  # (m,): row by row is fast, and exact to 1e-8
    largest = shard.maximum(_largest(norms))
    factor = 1.0
    passes = 1.0
    if not SMALLEST_NORM < largest < LARGEST_NORM:  # True also for NaN
        peak = shard.maximum(_peak(w))
        if not math.isfinite(peak):
            return TopSingular(
                math.nan, math.nan, None, 0, "the matrix has entries that are not finite"
            )
        if peak == 0.0:
            return TopSingular(0.0, 0.0, None, 0, "the matrix is zero")
        factor = peak
        w = w / factor
        norms = torch.linalg.vector_norm(w, dim=1)
        passes = 4.0
    frobenius = factor * math.sqrt(shard.sum(float(norms.double().square().sum())))
    if shard.is_complete and min(w.shape) <= DIRECT_SIZE:
        sigma = math.sqrt(_largest_eigenvalue(w))
        return TopSingular(factor * sigma, frobenius, None, 1, passes=passes + 1)
    if w.stride(0) == 1 and shard.is_complete:
        w = w.T  # chunks of rows must be contiguous; the transpose has the same singular values
    vectors, steps = _lanczos(w, start, rtol, max_steps, shard)
    # The product with the final vector, summed in float64, frees σ of what Lanczos has rounded: 8e-7 becomes 1e-7.
    image = (w @ vectors[0]).double()  # (m,)
    squared_length = float(vectors[0].double().square().sum())
    sigma = math.sqrt(shard.sum(float(image.square().sum())) / squared_length)
    return TopSingular(factor * sigma, frobenius, vectors, steps, passes=passes + steps + 1)


def _lanczos(
    w: Tensor, start: Tensor | None, rtol: float, max_steps: int, shard: Shard
) -> tuple[Tensor, int]:
    """Return leading eigenvectors of WᵀW as rows, and the number of steps.

    The basis is kept orthogonal, so that rounding adds no copies of an eigenvalue.
    """
    n = w.shape[1]
    if start is None or start.shape[1] != n:
        generator = torch.Generator().manual_seed(0)  # the user's random state is not touched
        start = torch.randn(min(BLOCK_SIZE, n), n, generator=generator)
    block = _orthonormal(start.to(w))  # (p, n)
    p = len(block)
    limit = max(1, min(max_steps, n // p))
    basis = w.new_empty(limit * p, n)
    T = torch.empty(limit * p, limit * p, dtype=torch.float64)  # WᵀW in the basis
    chunks = _chunks(w)
    steps = 0
    while True:
        steps += 1
        k = steps * p
        basis[k - p : k] = block
        Q = basis[:k]
        image = shard.sum_(_gram(block, chunks))  # (p, n)
        coefficients = image @ Q.T  # (p, k)
        rows = coefficients.double().cpu()
        T[k - p : k, :k] = rows
        T[:k, k - p : k] = rows.T
        # What is left of the image is the next block, and tells how far the Ritz vectors are from eigenvectors.
        block = image - coefficients @ Q
        if _is_checked(steps) or steps == limit:
            values, vectors = torch.linalg.eigh(T[:k, :k])  # ascending; (k,), (k, k)
            theta = float(values[-1])
            residual = float(torch.linalg.vector_norm(vectors[k - p :, -1].to(w) @ block))
            # Kato-Temple: the error of θ is at most residual² / gap, and at most the residual.
            gap = residual
            if p > 1:
                gap = max(gap, theta - float(values[-2]))
            if residual**2 <= rtol * theta * gap or steps == limit:
                leading = (
                    vectors[:, -BLOCK_SIZE:].flip(1).T.to(w)
                )  # (BLOCK_SIZE, k), the largest first
                return leading @ Q, steps
        for _ in range(
            2
        ):  # again after QR: where little is left, its rows are anything, also inside of Q
            block = _orthonormal(block - (block @ Q.T) @ Q)


def _is_checked(steps: int) -> bool:
    """True for the steps after which convergence is tested: a test decomposes T, which grows."""
    return steps % (1 + steps // 16) == 0


def _chunks(w: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return views of a few rows of W (r, n) at a time, each with its transpose (n, r)."""
    chunk_rows = max(16, CHUNK_BYTES // (w.element_size() * w.shape[1]))
    return [(rows, rows.T) for rows in w.split(chunk_rows)]


def _gram(block: Tensor, chunks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return X WᵀW for X (p, n), with W read from memory once: a chunk stays in cache for all products.

    Vector by vector: products of W with two to eight vectors run far below the speed of memory on some machines.
    """
    out = torch.zeros_like(block)
    pairs = list(zip(block, out, strict=True))
    for rows, columns in chunks:
        for x, total in pairs:
            total.addmv_(columns, rows.mv(x))
    return out


def _largest_eigenvalue(w: Tensor) -> float:
    """Return σ_max² from the smaller Gram matrix in float64, which is exact for the largest one."""
    w = w.double()
    w = w.T if w.shape[0] < w.shape[1] else w
    return float(torch.linalg.eigvalsh(w.T @ w)[-1])


def _largest(norms: Tensor) -> float:
    """Return the largest norm; NaN if one of them is, 0 if a shard has no rows."""
    return float(norms.max()) if norms.numel() else 0.0


def _peak(w: Tensor) -> float:
    """Return the largest entry by size, NaN if there is one; without a copy of the matrix."""
    if not w.numel():
        return 0.0
    low, high = torch.aminmax(w)
    return float(torch.maximum(-low, high))


def _orthonormal(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows.T)[0].T


def _matrix(w: Tensor) -> Tensor:
    if w.dim() != 2:
        raise ValueError(
            f"a matrix (m, n) is needed, got shape {tuple(w.shape)}; stacks go through stable_rank"
        )
    w = w.detach()
    return w if w.dtype in (torch.float32, torch.float64) else w.float()


def _over_stack(w: Tensor, function: object) -> Tensor:
    """``function`` of each matrix of (…, m, n), as float64 of the leading shape."""
    if w.dim() < 2:
        raise ValueError(
            f"a matrix or a stack of matrices (…, m, n) is needed, got shape {tuple(w.shape)}"
        )
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
