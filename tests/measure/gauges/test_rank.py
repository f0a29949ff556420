"""Stable rank and its kin against LAPACK: random, low-rank and graded spectra, stacks, types, degenerate input."""

import math
import time

import numpy as np
import pytest
import torch

from joma._measure.gauges.rank import (
    _Projection,
    effective_rank,
    spectral_norm,
    stable_rank,
    top_singular,
)


def matrix(kind, m, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(m, n, generator=generator)
    if kind == "low rank":
        w = torch.randn(m, 3, generator=generator) @ torch.randn(3, n, generator=generator)
    elif kind == "graded":
        w = w * torch.logspace(0, -8, n)
    elif kind == "spiked":
        w = w + 3 * torch.outer(
            torch.randn(m, generator=generator), torch.randn(n, generator=generator)
        )
    return w


@pytest.mark.parametrize("kind", ["random", "low rank", "graded", "spiked"])
@pytest.mark.parametrize("shape", [(1200, 400), (400, 1200), (600, 600), (50, 20), (1, 7)])
def test_against_lapack(kind, shape):
    w = matrix(kind, *shape)
    sigma = torch.linalg.svdvals(w.double())
    assert float(stable_rank(w)) == pytest.approx(float((sigma**2).sum() / sigma[0] ** 2), rel=1e-5)
    assert float(spectral_norm(w)) == pytest.approx(float(sigma[0]), rel=1e-5)
    p = sigma / sigma.sum()
    assert float(effective_rank(w)) == pytest.approx(
        float(torch.special.entr(p).sum().exp()), rel=1e-6
    )


def test_two_equal_leading_singular_values():
    q, _ = torch.linalg.qr(matrix("random", 500, 300).double())
    w = (q * torch.cat([torch.tensor([5.0, 5.0]), torch.ones(298)])).float()
    assert float(stable_rank(w)) == pytest.approx((50 + 298) / 25, rel=1e-5)


def truth(w):
    """Stable rank by LAPACK in float64."""
    sigma = torch.linalg.svdvals(w.double())
    return float((sigma**2).sum() / sigma[0] ** 2)


@pytest.mark.parametrize("kind", ["random", "low rank", "graded", "spiked"])
@pytest.mark.parametrize("shape", [(300, 150), (150, 300), (257, 257), (1000, 129), (129, 1000)])
@pytest.mark.parametrize("seed", range(5))
def test_stable_rank_is_right_to_one_in_a_million(kind, shape, seed):
    w = matrix(kind, *shape, seed)
    assert top_singular(w).stable_rank == pytest.approx(truth(w), rel=1e-6)
    assert top_singular(w.T).stable_rank == pytest.approx(truth(w), rel=1e-6)


@pytest.mark.parametrize("values", [2, 3, 4, 5, 10])
@pytest.mark.parametrize("distance", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("bulk", [0.3, 0.9])
def test_leading_values_that_are_close_together_are_told_apart(values, distance, bulk):
    left, _ = torch.linalg.qr(matrix("random", 200, 200).double())
    right, _ = torch.linalg.qr(matrix("random", 200, 200, seed=1).double())
    squares = torch.linspace(bulk, 0.01, 200).double()
    squares[:values] = 1 - torch.linspace(0, distance, values).double()
    w = ((left * squares.sqrt()) @ right).float()
    assert top_singular(w).stable_rank == pytest.approx(truth(w), rel=1e-6)


def test_the_same_matrix_gives_the_same_bits():
    w = matrix("random", 500, 300)
    first = top_singular(w)
    again = top_singular(w)
    assert first == again


def test_passes_count_how_often_the_matrix_is_read():
    w = matrix("random", 1000, 400)
    top = top_singular(w)
    assert top.passes == top.steps + 2  # the Frobenius norm, and the final product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_accumulated_in_float32_or_better(dtype):
    w = matrix("spiked", 500, 300).to(dtype)
    sigma = torch.linalg.svdvals(w.double())
    assert float(stable_rank(w)) == pytest.approx(float((sigma**2).sum() / sigma[0] ** 2), rel=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_sizes_whose_squares_leave_the_range_of_float32(size):
    w = matrix("random", 500, 300)
    assert float(stable_rank(w * size)) == pytest.approx(float(stable_rank(w)), rel=1e-5)


def test_a_stack_gives_one_value_a_matrix():
    w = torch.stack([matrix("random", 40, 30, s) for s in range(6)]).reshape(2, 3, 40, 30)
    assert stable_rank(w).shape == (2, 3)
    assert float(stable_rank(w)[1, 2]) == float(stable_rank(w[1, 2]))


def test_degenerate_matrices_have_a_defined_answer_and_a_reason():
    assert float(stable_rank(torch.zeros(300, 200))) == 0.0
    assert "zero" in top_singular(torch.zeros(300, 200)).reason
    bad = torch.ones(300, 200)
    bad[3, 4] = math.nan
    assert math.isnan(float(stable_rank(bad)))
    assert math.isnan(float(effective_rank(bad)))
    assert "not finite" in top_singular(bad).reason
    assert "empty" in top_singular(torch.ones(0, 5)).reason
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        stable_rank(torch.ones(3))


def test_the_users_random_state_is_not_touched():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    stable_rank(matrix("random", 500, 300))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("values", [2, 4, 6, 12])
@pytest.mark.parametrize("distance", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_clusters_with_distances_of_all_sizes_do_not_end_the_iteration_early(values, distance):
    # neighbours of the leading value at geometric distances: the estimate of the error must not be trusted here
    left, _ = torch.linalg.qr(matrix("random", 200, 200).double())
    right, _ = torch.linalg.qr(matrix("random", 200, 200, seed=1).double())
    squares = torch.linspace(0.3, 0.01, 200).double()
    squares[0] = 1.0
    exponents = torch.linspace(math.log10(distance) - 2, math.log10(distance), values - 1)
    squares[1:values] = 1 - 10.0 ** exponents.double()
    w = ((left * squares.sqrt()) @ right).float()
    assert top_singular(w).stable_rank == pytest.approx(truth(w), rel=1e-6)


@pytest.mark.parametrize("shape", [(4096, 256), (256, 4096), (1024, 1024), (3000, 700)])
def test_a_gaussian_matrix_without_a_gap_is_right_to_one_in_a_million(shape):
    w = matrix("random", *shape)
    assert top_singular(w).stable_rank == pytest.approx(truth(w), rel=1e-6)


def block_tridiagonal(blocks, size=4):
    """Return a random positive matrix (k, k) as block Lanczos makes it, and its `_Projection`."""
    generator = np.random.default_rng(0)
    k = blocks * size
    factor = np.zeros((k, k))  # block bidiagonal: its product with its transpose is tridiagonal
    for start in range(0, k, size):
        rows = slice(start, start + size)
        factor[rows, max(0, start - size) : start + size] = generator.standard_normal(
            (size, min(start, size) + size)
        )
    T = factor @ factor.T
    projection = _Projection(size, blocks)
    for start in range(0, k, size):
        projection.append(T[start : start + size, : start + size])
    return T, projection


@pytest.mark.parametrize("blocks", [1, 2, 3, 6, 7, 10, 34])
def test_ritz_pairs_are_those_of_the_full_decomposition(blocks):
    T, projection = block_tridiagonal(blocks)
    values, vectors = np.linalg.eigh(T)
    values, vectors = values[::-1], vectors.T[::-1]
    ritz = projection.ritz_pairs()
    assert ritz.values == pytest.approx(values)
    # The smallest eigenvalues may be so near to each other that their vectors are not unique.
    residuals = ritz.vectors @ T - ritz.values[:, None] * ritz.vectors
    assert np.abs(residuals).max() < 1e-12 * values[0]
    assert ritz.vectors @ ritz.vectors.T == pytest.approx(np.eye(len(T)), abs=1e-12)
    assert np.abs((ritz.vectors * vectors).sum(axis=1))[:4] == pytest.approx(np.ones(4))
    assert ritz.shares[:4] == pytest.approx(np.square(vectors[:4, -4:]).sum(axis=1))


def test_ritz_pairs_start_no_threads_that_would_spin_next_to_the_product():
    _, projection = block_tridiagonal(34)
    projection.ritz_pairs()  # the first call loads the library
    time.sleep(0.2)  # until threads of earlier work sleep
    process, thread = time.process_time(), time.thread_time()
    for _ in range(20):
        projection.ritz_pairs()
        time.sleep(0.01)
    others = time.process_time() - process - (time.thread_time() - thread)
    assert others < 0.05  # `numpy.linalg.eigh` of the same size: 0.01 s per call, 0.2 s


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 5)])
def test_a_matrix_without_rows_or_columns_is_refused(shape):
    with pytest.raises(ValueError, match="has no singular values, got shape"):
        stable_rank(torch.ones(shape))
