"""One tensor in a file: its type, its shape, and where its elements lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from joma._checkpoints.reading import BadCheckpoint


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: element ``i`` of dimension ``n`` lies ``stride[n]·i`` elements after ``offset`` (bytes)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    stored: str = ""  # the type in the file, if it is none of PyTorch's: then this is its bytes

    def view(self, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> Entry:
        """Of a contiguous tensor, the part that a view with this shape, stride and storage offset shows."""
        return Entry(self.dtype, shape, stride, self.offset + start * self.dtype.itemsize)

    def blocks(self, size: int) -> Iterator[tuple[int, int, Entry]]:
        """Parts of about ``size`` bytes along the dimension that is outermost in the file: (dimension, start, part)."""
        if not self.shape:
            raise BadCheckpoint("a single number is no matrix")
        dim = max(range(len(self.shape)), key=lambda n: self.stride[n])
        rest = math.prod(self.shape[:dim] + self.shape[dim + 1 :]) * self.dtype.itemsize
        step = max(1, size // max(1, rest))
        for start in range(0, self.shape[dim], step):
            shape = (*self.shape[:dim], min(step, self.shape[dim] - start), *self.shape[dim + 1 :])
            yield dim, start, self.view(shape, self.stride, start * self.stride[dim])

    @property
    def end(self) -> int:
        """The byte after the last one."""
        if 0 in self.shape:
            return self.offset
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * self.dtype.itemsize


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))
