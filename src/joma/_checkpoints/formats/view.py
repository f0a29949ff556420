"""A tensor of a checkpoint as a view, and the protocol that every format implements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._checkpoints.reading import BadCheckpoint


@dataclass(frozen=True)
class TensorView:
    """A tensor of a checkpoint, or a part of it, as `torch.as_strided` describes one.

    ``stride`` and ``offset`` count elements of the tensor as it would be without gaps. So they do
    not depend on the format: half of a quantised or sharded tensor is described like half of a
    plain one, and where its bytes are is the business of the format alone.
    """

    file: str  # empty for a tensor that is made from several files
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    # The type that the file names, if PyTorch does not have it. The view is then of the raw bytes.
    foreign_type: str = ""

    @classmethod
    def full(cls, file: str, name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorView:
        """Return the view of a whole tensor."""
        sizes = tuple(int(size) for size in shape)
        return cls(file, name, dtype, sizes, contiguous_stride(sizes))

    def part(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> TensorView:
        """Return a part of a whole tensor."""
        return TensorView(
            self.file, self.name, self.dtype, shape, stride, offset, self.foreign_type
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without what lies between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """True if the elements follow one another without gaps."""
        return self.stride == contiguous_stride(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first to the last one, including what lies between them."""
        if 0 in self.shape:
            return 0
        last = 0
        for size, stride in zip(self.shape, self.stride, strict=True):
            last += (size - 1) * stride
        return last + 1

    def blocks(self, max_bytes: int) -> Iterator[tuple[int, int, TensorView]]:
        """Yield parts of about ``max_bytes`` as (dimension, first index, part).

        The dimension is the outermost one in the file, so that the parts are read in file order.
        """
        if not self.shape:
            raise BadCheckpoint("a single number is no matrix")
        dimension = max(range(len(self.shape)), key=lambda n: self.stride[n])
        size = self.shape[dimension]
        others = self.shape[:dimension] + self.shape[dimension + 1 :]
        slice_bytes = math.prod(others) * self.dtype.itemsize
        step = max(1, max_bytes // max(1, slice_bytes))
        for start in range(0, size, step):
            length = min(step, size - start)
            shape = (*self.shape[:dimension], length, *self.shape[dimension + 1 :])
            offset = self.offset + start * self.stride[dimension]
            yield dimension, start, self.part(shape, self.stride, offset)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class TensorFormat(ABC):
    """The tensors of one file, or of one folder of chunks, by name.

    Attributes:
        bytes_read: of tensors, so far.
        note: what is special about the file, for the row of the checkpoint.
    """

    bytes_read: int = 0
    note: str = ""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of the file."""

    @abstractmethod
    def view(self, name: str) -> TensorView:
        """Return the whole tensor of this name, without reading it."""

    def announce(self, views: Iterable[TensorView]) -> None:  # noqa: B027
        """Prepare to read these views: in a remote file, neighbouring ranges become one request.

        `read_many` does this by itself. A caller does it who reads some views now and others later.
        """

    @abstractmethod
    def read_many(self, views: Iterable[TensorView]) -> Iterator[Tensor]:
        """Yield the views in the given order, in the type of the file.

        Only the tensor that is asked for next is read, so that memory holds one at a time.
        """

    def read(self, view: TensorView) -> Tensor:
        """Return one view."""
        (tensor,) = self.read_many([view])
        return tensor


class MaterializedFormat(TensorFormat):
    """Tensors that can only be made as a whole, such as B·A of an adapter; parts are its views."""

    def __init__(self, views: Iterable[TensorView]) -> None:
        self._views = {view.name: view for view in views}

    @abstractmethod
    def materialize(self, name: str) -> Tensor:
        """Return the whole tensor, without gaps."""

    def names(self) -> list[str]:
        return list(self._views)

    def view(self, name: str) -> TensorView:
        return self._views[name]

    def read_many(self, views: Iterable[TensorView]) -> Iterator[Tensor]:
        views = list(views)
        self.announce(views)
        # The last tensor stays until a view of another one comes: a tensor that is read block by
        # block is made once.
        name = None
        tensor = torch.empty(0)
        for view in views:
            if view.name != name:
                tensor = self.materialize(view.name)
                name = view.name
            yield tensor.as_strided(view.shape, view.stride, view.offset)
