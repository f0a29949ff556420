"""Stable rank, effective rank and spectral norm of weight matrices.

‖W‖_F²/σ_max² needs the largest singular value only. It comes from Lanczos on WᵀW, which multiplies W with vectors and
forms no Gram matrix. A full SVD spends almost all of its time on the other singular values.

Lanczos works on a block of vectors: one vector does not see a second singular value next to the first before its
residual is smaller than their distance, and a block needs fewer steps (33 instead of 79 for a Gaussian 8192 × 2048).
Each step is one product with WᵀW, which reads W once (`joma._measure.gauges.gram`).

Every measurement starts from the same random vectors. To start from the leading vectors of the measurement before
would save half of the steps in training. But where singular values move and singular vectors keep still, such a start
is blind to a direction that has overtaken them: in 49 of 108 series of matrices, one value of which grew past the
others, σ_max was wrong by up to 38 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from joma._measure.gauges.gram import GramProduct, gram_product, small_rows
from joma._measure.gauges.kernels import gram_matrix
from joma.models.sharded import Shard

# The Gram matrix of a matrix with fewer rows or columns is decomposed directly: cheaper than a
# Lanczos loop.
DIRECT_SIZE = 128
# Vectors of the block. Four are the fewest whose error stayed below 1e-6 on clusters of leading
# values that are 1e-6 to 1e-2 apart: with three, it was up to 3e-5. And a product with four costs
# hardly more than with one (8192 × 2048, one thread: 4.5 ms with one, 5.4 with two, 8.2 with three,
# 5.3 with four, 8.1 with eight).
BLOCK_SIZE = 4
# The bound over rtol from which on every step is checked: the true error is some twenty times
# smaller.
LOOSE_BOUND = 30
# Residual over gap up to which a Ritz vector counts as apart from the next one.
SEPARATION = 0.05
# Steps after each of which convergence is checked: with one large singular value, two or three are
# enough.
EAGER_CHECKS = 4
# Sine of the angle between the rows of a block below which one of them adds nothing but rounding.
SMALLEST_ANGLE = 1e-5
# Range of row norms whose squares, and sums of squares, float32 can hold.
SMALLEST_NORM = 1e-12
LARGEST_NORM = 1e12


@dataclass(frozen=True)
class TopSingular:
    """The largest singular value of a matrix.

    Attributes:
        sigma: the largest singular value; 0 or NaN if there is a `reason`.
        frobenius: the Frobenius norm.
        steps: steps of the iteration.
        passes: how often the matrix was read from memory.
        reason: why sigma is 0 or NaN.
    """

    sigma: float
    frobenius: float
    steps: int
    reason: str | None = None
    passes: float = 0.0

    @property
    def stable_rank(self) -> float:
        """‖W‖_F² / σ_max²; 0 for a zero matrix, NaN for one that is not finite."""
        if self.sigma > 0:
            return (self.frobenius / self.sigma) ** 2
        return self.sigma


def top_singular(w: Tensor, rtol: float = 5e-7, max_steps: int = 400) -> TopSingular:
    """Return σ_max² of one matrix (m, n) to relative accuracy ``rtol`` (limited by float32 sums), by Lanczos.

    Low precision is accumulated in float32. If the matrix is sharded over processes, each process works on its shard,
    and only vectors are exchanged.
    """
    shard = Shard.of(w)
    w = _matrix(shard.local)
    if shard.size == 0:
        return TopSingular(0.0, 0.0, 0, "the matrix is empty")
    norms = torch.linalg.vector_norm(w, dim=1)  # (m,): row by row is fast, and exact to 1e-8
    largest = shard.maximum(_largest(norms))
    factor = 1.0
    passes = 1.0
    if not SMALLEST_NORM < largest < LARGEST_NORM:  # True also for NaN
        peak = shard.maximum(_peak(w))
        if not math.isfinite(peak):
            return TopSingular(math.nan, math.nan, 0, "the matrix has entries that are not finite")
        if peak == 0.0:
            return TopSingular(0.0, 0.0, 0, "the matrix is zero")
        factor = peak
        w = w / factor
        norms = torch.linalg.vector_norm(w, dim=1)
        passes = 4.0
    frobenius = factor * math.sqrt(shard.sum(float(norms.double().square().sum())))
    if shard.is_complete and min(w.shape) <= DIRECT_SIZE:
        sigma = math.sqrt(_largest_eigenvalue(w))
        return TopSingular(factor * sigma, frobenius, 1, passes=passes + 1)
    if w.stride(0) == 1 and shard.is_complete:
        w = w.T  # chunks of rows must be contiguous; the transpose has the same singular values
    with gram_product(w, shard) as product:
        row, steps = _lanczos(product, _start(w), rtol, max_steps)
    vector = torch.from_numpy(row).to(w.device)  # (n,)
    # The product with the final vector, summed in float64, frees σ of what Lanczos has rounded:
    # 8e-7 becomes 1e-7.
    image = (w @ vector).double()  # (m,)
    squared_length = float(vector.double().square().sum())
    sigma = math.sqrt(shard.sum(float(image.square().sum())) / squared_length)
    return TopSingular(factor * sigma, frobenius, steps, passes=passes + steps + 1)


def _start(w: Tensor) -> np.ndarray:
    """Return the first block (p, n): the same random vectors every time."""
    generator = torch.Generator().manual_seed(0)  # the user's random state is not touched
    shape = (min(BLOCK_SIZE, w.shape[1]), w.shape[1])
    rows: np.ndarray = torch.randn(shape, generator=generator).to(w.dtype).numpy()
    return rows


def _lanczos(
    product: GramProduct, start: np.ndarray, rtol: float, max_steps: int
) -> tuple[np.ndarray, int]:
    """Return the leading eigenvector (n,) of WᵀW, and the number of steps.

    The basis is kept orthogonal, so that rounding adds no copies of an eigenvalue. All of this is
    small next to the product, but not nothing. No routine here may start threads of a library:
    threads that wait for the next call take the processors from the threads of the product.
    """
    block = _orthonormal(start)  # (p, n)
    p, n = block.shape
    limit = max(1, min(max_steps, n // p))
    basis = np.empty((limit * p, n), dtype=block.dtype)
    projection = _Projection(p, limit)
    convergence = _Convergence(rtol)
    steps = 0
    while True:
        steps += 1
        k = steps * p
        basis[k - p : k] = block
        Q = basis[:k]
        image = product(block)  # (p, n)
        coefficients = _coefficients(image, Q)  # (p, k)
        projection.append(coefficients)
        # The remainder of the image is the next block. Its size bounds the distance of the Ritz
        # vectors from eigenvectors.
        remainder = image - _combination(coefficients, Q)
        if convergence.is_checked(steps) or steps == limit:
            ritz = projection.ritz_pairs()
            # A block of them, though only the first is wanted: for a single row, BLAS has another
            # routine, which starts threads.
            leading = ritz.vectors[:BLOCK_SIZE].astype(block.dtype)  # (p, k)
            # Only the last block has an image outside of Q.
            outside = leading[:, k - p :] @ remainder  # (p, n)
            residual = float(np.linalg.norm(outside[0]))
            if convergence.is_reached(steps, ritz, residual) or steps == limit:
                return _combination(leading, Q)[0], steps
        # Where little is left of the image, rounding decides on its directions, and they may lie
        # inside of Q. So the basis is taken away from them once more.
        block = _orthonormal(remainder)
        block = _orthonormal(block - _combination(_coefficients(block, Q), Q))


@dataclass(frozen=True, eq=False)
class _RitzPairs:
    """Eigenvalues and eigenvectors of WᵀW in the basis, the largest first.

    Attributes:
        values: (k,).
        vectors: (k, k), as rows.
        shares: (k,) how much of each vector lies in the last block.
    """

    values: np.ndarray
    vectors: np.ndarray
    shares: np.ndarray


class _Projection:
    """WᵀW in the basis: a symmetric matrix (k, k), of which only a band is not zero.

    The image of a block lies in the blocks before, of the same step, and after. So 2p − 1 diagonals
    below the main one are all there is but rounding.
    """

    def __init__(self, block_size: int, max_steps: int) -> None:
        self.block_size = block_size
        self.size = 0
        # Entries above the last block of a row are not written.
        self.rows = np.empty((max_steps * block_size, max_steps * block_size))

    def append(self, coefficients: np.ndarray) -> None:
        """Add the rows (p, k) of the next block."""
        start = self.size
        self.size += self.block_size
        self.rows[start : self.size, : self.size] = coefficients

    def ritz_pairs(self) -> _RitzPairs:
        """Return all eigenvalues and eigenvectors.

        PyTorch's routine shares the threads of the products. One `numpy.linalg.eigh` of 32 × 32
        keeps a thread of another library spinning for 17 ms, next to the products.
        """
        k = self.size
        # Only the lower triangle is read.
        ascending, columns = torch.linalg.eigh(torch.from_numpy(self.rows[:k, :k]))
        values = ascending.numpy()[::-1]  # (k,)
        vectors = columns.numpy().T[::-1]  # (k, k)
        in_last_block = vectors[:, k - self.block_size :]  # (k, p)
        return _RitzPairs(values, vectors, np.square(in_last_block).sum(axis=1))


class _Convergence:
    """Decide when to look at the Ritz values, and whether the largest is good enough."""

    def __init__(self, rtol: float) -> None:
        self.rtol = rtol
        self.next_check = 1
        self.last_check = 0
        self.last_bound = math.inf

    def is_checked(self, steps: int) -> bool:
        return steps >= self.next_check

    def is_reached(self, steps: int, ritz: _RitzPairs, residual: float) -> bool:
        """True if the error of the largest Ritz value, whose vector has this residual, is below rtol."""
        theta = float(ritz.values[0])
        gap = residual
        if len(ritz.values) > 1:
            gap = max(gap, theta - float(ritz.values[1]))
        # Kato-Temple: the error of θ is at most residual² / gap, and at most the residual.
        bound = residual
        if gap > 0:
            bound = residual**2 / gap
        if bound <= self.rtol * theta:
            return True
        # The bound takes all of the residual to point to the second Ritz vector. It points to the
        # bulk of the spectrum mostly, as the last block does, and the error is some twenty times
        # smaller: a Gaussian 8192 × 2048 needs 34 steps instead of 39. In a cluster the estimate
        # knows no more than the block has seen of it, so it is trusted only where the first Ritz
        # vector is well apart from the second. 576 spectra with 2 to 20 leading values that are
        # 1e-8 to 1e-2 apart: the largest error is 6e-7, and 1e-5 without that condition.
        is_separated = residual <= SEPARATION * gap and len(ritz.values) > 1
        if is_separated and _estimated_error(ritz, residual) <= self.rtol / 2 * theta:
            return True
        self._plan(steps, bound / theta)
        return False

    def _plan(self, steps: int, bound: float) -> None:
        """Choose the next check: three quarters of the way to where the bound, falling as before, is near rtol.

        A check decomposes T, which grows: checking after every step would take as long as a third of the products.
        """
        self.next_check = steps + 1
        if steps >= EAGER_CHECKS and bound < self.last_bound:
            rate = math.log(self.last_bound / bound) / (steps - self.last_check)
            steps_left = math.log(bound / (LOOSE_BOUND * self.rtol)) / rate
            self.next_check += max(0, min(steps // 5, int(0.75 * steps_left)))
        self.last_check = steps
        self.last_bound = bound


def _estimated_error(ritz: _RitzPairs, residual: float) -> float:
    """Return the error of the largest Ritz value, if its residual points to where the last block does.

    That is residual² · Σ share/gap over the other pairs, over the sum of their shares.
    """
    gaps = np.maximum(ritz.values[0] - ritz.values[1:], residual)  # (k − 1,)
    shares = ritz.shares[1:]  # (k − 1,)
    return residual**2 * float((shares / gaps).sum()) / float(shares.sum())


def _coefficients(block: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return X Qᵀ (p, k) for X (p, n) and Q (k, n), in products small enough for their kernels."""
    size = small_rows(basis)
    parts = [block @ basis[start : start + size].T for start in range(0, len(basis), size)]
    return np.concatenate(parts, axis=1)


def _combination(coefficients: np.ndarray, basis: np.ndarray) -> np.ndarray:
    """Return C Q (p, n) for C (p, k) and Q (k, n), in products small enough for their kernels."""
    size = small_rows(basis)
    out = np.zeros((len(coefficients), basis.shape[1]), dtype=basis.dtype)
    for start in range(0, len(basis), size):
        out += coefficients[:, start : start + size] @ basis[start : start + size]
    return out


def _largest_eigenvalue(w: Tensor) -> float:
    """Return σ_max² from the smaller Gram matrix in float64, which is exact for the largest one."""
    w = w.double()
    if w.shape[0] < w.shape[1]:
        w = w.T
    return float(torch.linalg.eigvalsh(w.T @ w)[-1])


def _largest(norms: Tensor) -> float:
    """Return the largest norm; NaN if one of them is, 0 if a shard has no rows."""
    if not norms.numel():
        return 0.0
    return float(norms.max())


def _peak(w: Tensor) -> float:
    """Return the largest entry by size, NaN if there is one; without a copy of the matrix."""
    if not w.numel():
        return 0.0
    low, high = torch.aminmax(w)
    return float(torch.maximum(-low, high))


def _orthonormal(rows: np.ndarray) -> np.ndarray:
    """Return orthonormal rows that span the same space as rows (p, n), and zeros if it has fewer dimensions.

    Rows that are nearly parallel lose digits, so the iteration calls this twice for each block. Householder's QR needs
    no second call, but LAPACK starts threads for it, which then take the processors from the product.
    """
    # Two copies: NumPy multiplies an array with its own transpose by another routine of BLAS, which
    # starts threads.
    gram = rows.astype(np.float64) @ rows.astype(np.float64).T  # (p, p)
    lengths = np.sqrt(np.diag(gram))
    lengths[lengths == 0] = 1.0
    values, vectors = np.linalg.eigh(gram / np.outer(lengths, lengths))
    is_new = values > SMALLEST_ANGLE**2
    roots = np.sqrt(values, where=is_new, out=np.ones_like(values))
    transform = (vectors * (is_new / roots)).T / lengths  # (p, p)
    orthonormal: np.ndarray = transform.astype(rows.dtype) @ rows
    return orthonormal


def _matrix(w: Tensor) -> Tensor:
    if w.dim() != 2:
        raise ValueError(
            f"a matrix (m, n) is needed, got shape {tuple(w.shape)}; stacks go through stable_rank"
        )
    w = w.detach()
    if w.dtype in (torch.float32, torch.float64):
        return w
    return w.float()


def _over_stack(w: Tensor, function: Callable[[Tensor], float]) -> Tensor:
    """Return the function of each matrix of (…, m, n), as float64 of the leading shape."""
    if w.dim() < 2:
        raise ValueError(
            f"a matrix or a stack of matrices (…, m, n) is needed, got shape {tuple(w.shape)}"
        )
    if 0 in w.shape[-2:]:
        raise ValueError(
            f"a matrix without rows or columns has no singular values, got shape {tuple(w.shape)}"
        )
    flat = w.detach().reshape(-1, *w.shape[-2:])
    values = [function(matrix) for matrix in flat]
    return torch.tensor(values, dtype=torch.float64).reshape(w.shape[:-2])


def spectral_norm(w: Tensor) -> Tensor:
    """Return σ_max of a matrix, or of each one of a stack (…, m, n).

    Arguments:
        w: (m, n), or a stack (…, m, n); any floating type.

    Returns:
        A scalar, or (…) for a stack.
    """
    return _over_stack(w, lambda m: top_singular(m).sigma)


def stable_rank(w: Tensor) -> Tensor:
    """Return ‖W‖_F² / σ_max² of a matrix, or of each one of a stack.

    A zero matrix has 0, and one that is not finite NaN.

    Arguments:
        w: (m, n), or a stack (…, m, n); any floating type.

    Returns:
        A scalar, or (…) for a stack.
    """
    return _over_stack(w, lambda m: top_singular(m).stable_rank)


def effective_rank(w: Tensor) -> Tensor:
    """Return exp of the entropy of σ/Σσ (Roy and Vetterli), of a matrix or of each one of a stack.

    Arguments:
        w: (m, n), or a stack (…, m, n); any floating type.

    Returns:
        A scalar, or (…) for a stack.
    """
    return _over_stack(w, _effective_rank)


def _effective_rank(w: Tensor) -> float:
    w = _matrix(w).double()
    if w.numel() == 0:
        return 0.0
    if not bool(w.isfinite().all()):
        return math.nan
    sigma = _singular_values(w)
    if float(sigma.sum()) == 0.0:
        return 0.0
    shares = sigma / sigma.sum()
    return float(torch.special.entr(shares).sum().exp())


def _singular_values(w: Tensor) -> Tensor:
    """Return all singular values of a matrix in float64.

    A matrix that is much longer than wide is well conditioned unless training has made it
    degenerate. Then the eigenvalues of its Gram matrix are enough: they lose as many digits as the
    square of the condition number has, so that at most 1e6 leaves ten. 1536 × 384 takes about a
    third of the time of the SVD.
    """
    if w.shape[0] < w.shape[1]:
        w = w.T
    if w.shape[0] >= 2 * w.shape[1] and w.device.type == "cpu":
        squares = torch.linalg.eigvalsh(gram_matrix(w))  # ascending
        if float(squares[0]) > 1e-6 * float(squares[-1]):
            return squares.sqrt().flip(0)
    return torch.linalg.svdvals(w)
