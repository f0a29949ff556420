"""Files that hold the elements of their tensors as they are: any view is read by its own bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from joma._checkpoints.formats.view import TensorFormat, TensorView
from joma._checkpoints.reading import BadCheckpoint, Reader, Span

# Runs of fewer bytes than _SHORT_RUN are not read one by one if there are more than _MAX_SHORT_RUNS
# of them and the bytes from the first to the last are at most _MAX_WASTE times those that are
# needed: a system call per element would take longer than to read every second column for nothing.
_SHORT_RUN = 64
_MAX_SHORT_RUNS = 4096
_MAX_WASTE = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and its place in the file."""

    view: TensorView  # of the whole tensor
    stride: tuple[int, ...]  # in the file: other than the view's if it was saved with gaps
    start: int  # byte of its first element

    @property
    def has_gaps(self) -> bool:
        """True if it was saved as a view of another tensor, so that its parts have no place."""
        return self.stride != self.view.stride

    @property
    def in_file(self) -> TensorView:
        """The whole tensor with its strides in the file."""
        return self.view.part(self.view.shape, self.stride, 0)

    @property
    def end(self) -> int:
        """The byte after its last element."""
        return self.start + self.in_file.extent * self.view.dtype.itemsize


@dataclass(frozen=True)
class _ByteRuns:
    """How a view is read: in runs of bytes without gaps, or in one piece that includes the gaps."""

    order: list[int]  # dimensions, outermost in the file first
    outer: list[tuple[int, int]]  # (length, stride in bytes) of the dimensions around a run
    run_bytes: int
    includes_gaps: bool

    @classmethod
    def of(cls, view: TensorView) -> _ByteRuns:
        item_bytes = view.dtype.itemsize
        order = sorted(range(len(view.shape)), key=lambda n: -view.stride[n])
        if 0 in view.shape:
            return cls(order, [(0, 0)], item_bytes, False)
        # A dimension belongs to the run if its elements follow one another in the file.
        run_bytes = item_bytes
        inner = len(order)
        while inner > 0:
            dimension = order[inner - 1]
            is_adjacent = view.stride[dimension] * item_bytes == run_bytes
            if not is_adjacent and view.shape[dimension] != 1:
                break
            run_bytes *= view.shape[dimension]
            inner -= 1
        extent_bytes = view.extent * item_bytes
        is_short = run_bytes < _SHORT_RUN and view.nbytes > _MAX_SHORT_RUNS * run_bytes
        if is_short and extent_bytes <= _MAX_WASTE * view.nbytes:
            return cls(order, [], extent_bytes, True)
        outer = [(view.shape[n], view.stride[n] * item_bytes) for n in order[:inner]]
        return cls(order, outer, run_bytes, False)

    @property
    def total_bytes(self) -> int:
        return self.run_bytes * math.prod(length for length, _ in self.outer)

    def starts(self) -> Iterator[int]:
        """Yield the first byte of each run, counted from the first element of the view."""
        ranges = [range(length) for length, _ in self.outer]
        strides = [stride for _, stride in self.outer]
        for indices in product(*ranges):
            yield sum(map(int.__mul__, indices, strides))


class PlainFile(TensorFormat):
    """A file of plain elements.

    Arguments:
        reader: of the file.
        stored: its tensors by name.
    """

    def __init__(self, reader: Reader, stored: Mapping[str, StoredTensor]) -> None:
        self._reader = reader
        # In file order, so that a reader of all tensors moves forwards only.
        in_file_order = sorted(stored.items(), key=lambda item: item[1].start)
        self._stored = dict(in_file_order)
        for name, tensor in self._stored.items():
            if not 0 <= tensor.start <= tensor.end <= reader.size:
                raise BadCheckpoint(
                    f"{reader.name} is cut off: the tensor {name} ends at byte {tensor.end:,}, "
                    f"the file at {reader.size:,}; download it again"
                )

    def names(self) -> list[str]:
        return list(self._stored)

    def view(self, name: str) -> TensorView:
        return self._stored[name].view

    def announce(self, views: Iterable[TensorView]) -> None:
        if self._reader.is_local:
            return
        spans: list[Span] = []
        for view in views:
            stored = self._stored[view.name]
            if stored.has_gaps:
                view = stored.in_file
            spans += self._spans(stored, view)
        self._reader.expect(spans)

    def _spans(self, stored: StoredTensor, view: TensorView) -> list[Span]:
        """Return the bytes that reading a view takes."""
        runs = _ByteRuns.of(view)
        origin = stored.start + view.offset * view.dtype.itemsize
        return [(origin + start, origin + start + runs.run_bytes) for start in runs.starts()]

    def _padding(self, name: str) -> int:
        """Return the bytes between the place in the table and the first element of a tensor."""
        return 0

    def read_many(self, views: Iterable[TensorView]) -> Iterator[Tensor]:
        views = list(views)
        self.announce(views)
        name = None
        tensor = torch.empty(0)
        for view in views:
            stored = self._stored[view.name]
            if not stored.has_gaps:
                yield self._read(stored, view)
                continue
            # Parts of a tensor with gaps have no place in the file: it is read as a whole, once for
            # all of its parts that follow one another.
            if view.name != name:
                tensor = self._read(stored, stored.in_file)
                name = view.name
            if view == stored.view:
                yield tensor
            else:
                yield tensor.contiguous().as_strided(view.shape, view.stride, view.offset)

    def _read(self, stored: StoredTensor, view: TensorView) -> Tensor:
        item_bytes = view.dtype.itemsize
        begin = stored.start + view.offset * item_bytes
        # A stride of 0 repeats an element: a small file could ask for any amount of memory.
        is_outside = begin + view.extent * item_bytes > self._reader.size
        if is_outside or view.nbytes > self._reader.size:
            raise BadCheckpoint(
                f"{self._reader.name}: the tensor {view.name} does not hold what is asked of it"
            )
        runs = _ByteRuns.of(view)
        begin += self._padding(view.name)
        # Filled in place: no second copy of a large matrix.
        flat = torch.empty(runs.total_bytes, dtype=torch.uint8)  # (bytes,)
        buffer = memoryview(flat.numpy())  # type: ignore[arg-type]
        filled = 0
        for start in runs.starts():
            self._reader.fill(buffer[filled : filled + runs.run_bytes], begin + start)
            filled += runs.run_bytes
        self.bytes_read += filled
        elements = flat.view(view.dtype)
        if runs.includes_gaps:
            return elements.as_strided(view.shape, view.stride)
        # The elements lie in the order of the file; permute them back to the order of the view.
        shape_in_file = [view.shape[n] for n in runs.order]
        back = [runs.order.index(n) for n in range(len(view.shape))]
        return elements.reshape(shape_in_file).permute(back)
