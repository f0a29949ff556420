"""Products X WᵀW: both ways against float64, on all shapes of tiles, and independent of the number of threads."""

import numpy as np
import pytest
import torch

from joma._measure.gauges import gram
from joma._measure.gauges.rank import top_singular
from joma.models.sharded import Shard


def gaussian(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("way", [gram.VectorProduct, gram.StackedProduct])
@pytest.mark.parametrize("shape", [(1, 300), (63, 129), (1000, 400), (2500, 1031), (300, 70_000)])
def test_both_ways_agree_with_float64(way, shape):
    w = gaussian(*shape)
    block = gaussian(4, shape[1])
    exact = (block.double() @ w.double().T) @ w.double()
    with way(w, Shard.of(w)) as product:
        result = torch.from_numpy(product(block.numpy()))
    assert torch.allclose(result.double(), exact, atol=2e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_a_larger_matrix_are_not_copied(dtype):
    whole = gaussian(700, 900).to(dtype)
    w = whole[:, 100:500]
    with gram.StackedProduct(w, Shard.of(w)) as product:
        assert np.shares_memory(product.sections[0], whole.numpy())
        result = product(np.ones((4, 400), dtype=whole.numpy().dtype))
    exact = w.double().T @ w.double().sum(dim=1)
    assert torch.allclose(torch.from_numpy(result[0]).double(), exact, rtol=1e-4, atol=1e-2)


def test_the_bits_do_not_depend_on_the_number_of_threads():
    w = gaussian(4100, 600)  # more than SECTIONED_BYTES, and no multiple of anything
    block = gaussian(4, 600).numpy()
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            with gram.StackedProduct(w, Shard.of(w)) as product:
                results.append(product(block))
    finally:
        torch.set_num_threads(threads)
    assert len(product.sections) == gram.SECTIONS
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("has_small", [True, False])
def test_lanczos_is_right_on_processors_with_and_without_kernels_for_small_products(
    monkeypatch, has_small
):
    monkeypatch.setattr(gram, "has_small_products", lambda: has_small)
    w = gaussian(900, 500)
    sigma = torch.linalg.svdvals(w.double())
    expected = float((sigma**2).sum() / sigma[0] ** 2)
    assert top_singular(w).stable_rank == pytest.approx(expected, rel=1e-6)
