"""Products X WᵀW of a few vectors with a matrix that does not fit the cache.

Lanczos needs nothing else of a matrix. Both ways to compute the product read W from memory once: they take a tile of
rows W_t that stays in cache and add (X W_tᵀ) W_t to the result. They differ in how a tile is multiplied, because
matrix products with four vectors are what BLAS libraries are worst at. 8192 × 2048, float32, four vectors, one thread
of a Zen 4 processor, where reading W takes 2 ms:

    all of W at once, MKL          9.1 + 8.6 ms     the library copies W into its own layout, for a product of 4 rows
    vector by vector, in tiles     12.3 ms          W_t is read eight times from the cache
    stacks of tiles, OpenBLAS      5.3 ms           small products have kernels of their own; 3.5 ms with two threads

On Zen 5, for which OpenBLAS 0.3.31 has no such kernels, the three ways take 10.7, 9.0 and 8.0 ms, and the third 4.3 ms
with two threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma.models.sharded import Shard

# Bytes of a tile that is multiplied vector by vector. 8192 × 2048: 12.6 ms at 2 MiB, 13.4 ms at 256
# KiB.
VECTOR_TILE_BYTES = 1 << 21
# Bytes of a tile that OpenBLAS multiplies: four vectors take 2¹⁸ multiplications. That is the
# largest product for which OpenBLAS starts no threads on any processor. Where it has kernels for
# small products (AVX-512 of Intel, Zen 4), they would take up to 10⁶. Where it has none (Zen 5 with
# OpenBLAS 0.3.31), tiles of twice the size start threads, and one product of 8192 × 2048 takes 31
# to 500 ms on a busy machine instead of 9.
SMALL_TILE_BYTES = 1 << 18
# Rows of a tile that OpenBLAS multiplies: a multiple of 16. 384 × 384: 30 µs with 256 rows, 94 µs
# with 341.
SMALL_TILE_ROWS = 256
# Tiles per call. Python's threads hand over the interpreter between two calls: with two tiles per
# call two threads take 10.4 ms, with four to sixteen 4.4 ms. With more, tiles fall out of the cache
# before the second product.
STACKED_TILES = 8
# A matrix is summed in this many sections, whatever the number of threads, so that its bits do not
# depend on it.
SECTIONS = 8
# Smaller matrices are one section: threads cost more than they gain.
SECTIONED_BYTES = 1 << 23


class GramProduct(ABC):
    """Multiply rows with WᵀW; for a sharded W, with the sum over all shards."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.pool: ThreadPoolExecutor | None = None

    @abstractmethod
    def __call__(self, block: np.ndarray) -> np.ndarray:
        """Return X WᵀW (p, n) for X (p, n)."""

    def __enter__(self) -> GramProduct:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.pool is not None:
            self.pool.shutdown()


def gram_product(w: Tensor, shard: Shard) -> GramProduct:
    """Return the faster way to multiply blocks with WᵀW, for W (m, n) with contiguous rows."""
    is_plain = w.device.type == "cpu" and w.stride(1) == 1 and shard.is_complete
    if is_plain and has_small_products():
        return StackedProduct(w, shard)
    return VectorProduct(w, shard)


def small_rows(matrix: np.ndarray) -> int:
    """Return how many rows of a matrix (m, n) make a product with a block small."""
    rows = min(SMALL_TILE_ROWS, SMALL_TILE_BYTES // matrix[0].nbytes)
    if rows > 16:
        rows -= rows % 16
    return max(1, rows)


@cache
def has_small_products() -> bool:
    """True if NumPy's BLAS is OpenBLAS, and the processor has AVX-512: measured to be the faster way there.

    This asks for what was measured, and measures no time: the bits of a result must not depend on how busy a machine is.
    """
    configuration: Any = np.show_config(mode="dicts")
    library = configuration.get("Build Dependencies", {}).get("blas", {}).get("name", "")
    return "openblas" in library and torch.backends.cpu.get_cpu_capability() == "AVX512"


class VectorProduct(GramProduct):
    """Vector by vector, on any device."""

    def __init__(self, w: Tensor, shard: Shard) -> None:
        super().__init__(shard)
        self.w = w
        tile_rows = max(16, VECTOR_TILE_BYTES // (w.element_size() * w.shape[1]))
        self.tiles = [(rows, rows.T) for rows in w.split(tile_rows)]  # (r, n) and (n, r)

    def __call__(self, block: np.ndarray) -> np.ndarray:
        vectors = torch.from_numpy(block).to(self.w.device)  # (p, n)
        out = torch.zeros_like(vectors)
        pairs = list(zip(vectors, out, strict=True))
        for rows, columns in self.tiles:
            for vector, total in pairs:
                total.addmv_(columns, rows.mv(vector))
        return self.shard.sum_(out).cpu().numpy()


class StackedProduct(GramProduct):
    """Stacks of small tiles through NumPy, a section of the rows per thread."""

    def __init__(self, w: Tensor, shard: Shard) -> None:
        super().__init__(shard)
        array = w.numpy()  # (m, n), the same memory
        self.tile_rows = small_rows(array)
        count = 1
        if array.nbytes >= SECTIONED_BYTES:
            count = SECTIONS
        self.sections = np.array_split(array, count)
        self.workers = min(count, torch.get_num_threads())
        if self.workers > 1:
            self.pool = ThreadPoolExecutor(self.workers - 1)  # and this thread

    def __call__(self, block: np.ndarray) -> np.ndarray:
        share = -(-len(self.sections) // self.workers)
        shares = [self.sections[n : n + share] for n in range(0, len(self.sections), share)]
        pending = []
        if self.pool is not None:
            pending = [self.pool.submit(self._sections, block, others) for others in shares[1:]]
        totals = self._sections(block, shares[0])
        for future in pending:
            totals += future.result()
        out = np.zeros_like(block)
        for total in totals:
            out += total
        return out

    def _sections(self, block: np.ndarray, sections: list[np.ndarray]) -> list[np.ndarray]:
        return [self._section(block, section) for section in sections]

    def _section(self, block: np.ndarray, section: np.ndarray) -> np.ndarray:
        out = np.zeros_like(block)
        for tiles in self._stacks(section):
            if self.pool is not None:
                out += _add_tiles(block, tiles)
                continue
            # Without other threads, tile by tile is faster: 5.3 instead of 6.0 ms. The sum has the
            # same order.
            total = _add_tiles(block, tiles[:1])
            for n in range(1, len(tiles)):
                total += _add_tiles(block, tiles[n : n + 1])
            out += total
        return out

    def _stacks(self, section: np.ndarray) -> Iterator[np.ndarray]:
        """Yield views (tiles, r, n) that cover the rows of a section (m, n)."""
        stack_rows = self.tile_rows * STACKED_TILES
        even = len(section) // stack_rows * stack_rows
        yield from section[:even].reshape(-1, STACKED_TILES, self.tile_rows, section.shape[1])
        for start in range(even, len(section), self.tile_rows):
            yield section[None, start : start + self.tile_rows]


def _add_tiles(block: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """Return the sum of X W_tᵀ W_t over tiles (tiles, r, n) for X (p, n)."""
    images = np.matmul(block, tiles.swapaxes(1, 2))  # (tiles, p, r)
    total: np.ndarray = np.matmul(images, tiles).sum(axis=0)  # (tiles, p, n) -> (p, n)
    return total
