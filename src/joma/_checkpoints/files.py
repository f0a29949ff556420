"""Where the tensors of one checkpoint file lie, and reading exactly their bytes.

A safetensors file begins with a JSON table of offsets. A zip that `torch.save` wrote stores each tensor's bytes as they
are, in a record of its own (`pickles.py`). Files of before PyTorch 1.6 are no zips: they are read whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.entry import Entry, contiguous
from joma._checkpoints.guard import parsed
from joma._checkpoints.pickles import Record, load, stored_tensors
from joma._checkpoints.reading import BadCheckpoint as BadCheckpoint
from joma._checkpoints.reading import LocalFile, Reader, Span, read_bytes

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_FEW = 4096  # reads of a tensor
_MAX_HEADER = 16 << 20  # bytes: 100,000 tensors and more
_PADDING = 128  # bytes: what a record of a zip may have between its header and its data, usually


@dataclass(frozen=True)
class _Layout:
    """How a view is read: in runs of bytes without gaps, or, where these are many and short, all from first to last."""

    order: list[int]  # of the dimensions, outermost in the file first
    outer: list[tuple[int, int]]  # (length, stride in bytes) of those that a run does not span
    run: int  # bytes
    dense: bool

    @classmethod
    def of(cls, entry: Entry) -> _Layout:
        order = sorted(range(len(entry.shape)), key=lambda n: -entry.stride[n])
        size, run, inner = entry.dtype.itemsize, entry.dtype.itemsize, len(order)
        if 0 in entry.shape:
            return cls(order, [(0, 0)], size, False)
        while inner and (
            entry.stride[order[inner - 1]] * size == run or entry.shape[order[inner - 1]] == 1
        ):
            inner -= 1
            run *= entry.shape[order[inner]]
        count, span = math.prod(entry.shape) * size, entry.end - entry.offset
        if run < 64 and span <= 4 * count and count > _FEW * run:  # every second column, say
            return cls(order, [], span, True)
        return cls(
            order, [(entry.shape[n], entry.stride[n] * size) for n in order[:inner]], run, False
        )

    @property
    def bytes(self) -> int:
        """Of all runs."""
        return self.run * math.prod(length for length, _ in self.outer)

    def runs(self) -> Iterator[Span]:
        """Where each begins, and its length."""
        for places in product(*(range(length) for length, _ in self.outer)):
            yield (
                sum(n * stride for n, (_, stride) in zip(places, self.outer, strict=True)),
                self.run,
            )


class TensorFile:
    """One file of a checkpoint: its tensors by name, read on request.

    Attributes:
        entries: name -> where it is.
        bytes_read: of tensors, so far.
        note: what is special about the file, for the row of the checkpoint.
    """

    def __init__(self, file: Path | Reader, display: str | None = None) -> None:
        self._reader = reader = LocalFile(file, display) if isinstance(file, Path) else file
        self.name, self.size = reader.name, reader.size
        self.bytes_read, self.note = 0, ""
        self._tensors: dict[str, Tensor] = {}
        self._records: dict[
            str, Record
        ] = {}  # of a zip: a tensor's offset is as if its record were not padded
        self._shift: dict[Record, int] = {}  # and so far it is
        if reader.suffix == ".safetensors":
            self.entries = self._safetensors()
        elif (magic := read_bytes(reader, 0, min(4, self.size))) == b"PK\x03\x04":
            self.entries = self._zip()
        else:
            self.entries = self._legacy(magic)
        for key, entry in self.entries.items():
            if key not in self._tensors and not 0 <= entry.offset <= entry.end <= self.size:
                raise BadCheckpoint(
                    f"{self.name} is cut off: the tensor {key} ends at byte {entry.end:,}, the file at {self.size:,}; "
                    "download it again"
                )

    def _safetensors(self) -> dict[str, Entry]:
        head = read_bytes(self._reader, 0, min(8, self.size))
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(_MAX_HEADER, self.size - 8):
            raise BadCheckpoint(
                f"{self.name} is cut off or no safetensors file ({self.size:,} bytes)"
            )
        try:
            entries = dict(_entries(parsed(read_bytes(self._reader, 8, length)), 8 + length))
            _check_apart(entries)
            return entries
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadCheckpoint(
                f"{self.name} is no safetensors file: its header is damaged ({error})"
            ) from error

    def _zip(self) -> dict[str, Entry]:
        found, self.note = stored_tensors(self._reader)
        if found is None:
            return self._keep()
        entries = {}
        for key, (tensor, record) in found.items():
            start = record.nominal + int(tensor.storage_offset()) * tensor.dtype.itemsize
            entries[key] = Entry(tensor.dtype, tuple(tensor.shape), tensor.stride(), start)
            self._records[key] = record
        return entries

    def _legacy(self, magic: bytes) -> dict[str, Entry]:
        if self._reader.suffix not in (".bin", ".pt", ".pth", ".ckpt"):
            raise BadCheckpoint(
                f"{self.name} is neither safetensors nor a PyTorch file (it begins with {magic!r})"
            )
        return self._keep()

    def _keep(self) -> dict[str, Entry]:
        loaded, note = load(self._reader.whole(), "cpu", self.name)
        for key, tensor in loaded.items():
            if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
                raise BadCheckpoint(
                    f"{self.name}: the tensor {key} repeats its numbers and is refused"
                )
        self._tensors = {key: tensor.contiguous() for key, tensor in loaded.items()}
        self.note = "; ".join(
            [f"{self.name} is of an old format and was read whole"] + [note] * bool(note)
        )
        self.bytes_read += self.size
        return {k: Entry(t.dtype, tuple(t.shape), t.stride(), 0) for k, t in self._tensors.items()}

    def expect(self, views: Iterable[tuple[str, Entry]]) -> None:
        """These parts of tensors will be read: of a file elsewhere, neighbours are then fetched together."""
        if isinstance(self._reader, LocalFile):
            return
        spans: list[Span] = []
        for name, view in views:
            if name in self._tensors:
                continue
            place, record = self.entries[name], self._records.get(name)
            view = view if place.stride == contiguous(place.shape) else place  # see `read`
            runs = [
                (view.offset + start, view.offset + start + length)
                for start, length in _Layout.of(view).runs()
            ]
            if record is not None and runs:  # its header comes first, and what is behind is shifted
                runs = [(begin, min(end + _PADDING, self.size)) for begin, end in runs]
                near = runs[0][0] - record.header <= _FEW
                runs = (
                    [(record.header, runs[0][1]), *runs[1:]]
                    if near
                    else [(record.header, record.nominal), *runs]
                )
            spans += runs
        self._reader.expect(spans)

    def read(self, name: str, entry: Entry | None = None) -> Tensor:
        """The tensor, or that part of it which ``entry`` (a view of it) describes; as stored."""
        place = self.entries[name]
        entry = place if entry is None else entry
        gaps = place.stride != contiguous(
            place.shape
        )  # saved as a view of something: views of it are not in the file
        if name in self._tensors or (gaps and entry != place):
            tensor = (
                self._tensors[name]
                if name in self._tensors
                else self._read(name, place).contiguous()
            )
            return tensor.as_strided(
                entry.shape, entry.stride, (entry.offset - place.offset) // entry.dtype.itemsize
            )
        return self._read(name, entry)

    def _read(self, name: str, entry: Entry) -> Tensor:
        if (
            entry.end > self.size or math.prod(entry.shape) * entry.dtype.itemsize > self.size
        ):  # stride 0 repeats
            raise BadCheckpoint(f"{self.name}: the tensor {name} does not hold what is asked of it")
        layout, begin, at = _Layout.of(entry), entry.offset + self._padding(name), 0
        flat = torch.empty(layout.bytes, dtype=torch.uint8)
        buffer = memoryview(flat.numpy())  # type: ignore[arg-type]
        for start, length in layout.runs():
            self._reader.fill(buffer[at : at + length], begin + start)
            at += length
        self.bytes_read += at
        if layout.dense:
            return flat.view(entry.dtype).as_strided(entry.shape, entry.stride)
        shape, back = (
            [entry.shape[n] for n in layout.order],
            [layout.order.index(n) for n in range(len(entry.shape))],
        )
        return flat.view(entry.dtype).reshape(shape).permute(back)

    def _padding(self, name: str) -> int:
        """Bytes between the header of a tensor's record and its data, in a zip."""
        if (record := self._records.get(name)) is None:
            return 0
        if record not in self._shift:
            self._shift[record] = record.data(self._reader) - record.nominal
        return self._shift[record]


def _entries(table: Mapping[str, Any], data: int) -> Iterator[tuple[str, Entry]]:
    for name, item in table.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(int(n) for n in item["shape"]), item["data_offsets"]
        dtype = _DTYPES.get(item["dtype"])
        if dtype is None:  # packed 4-bit and the like, which no gauge measures
            if end < begin or begin < 0:
                raise ValueError(f"{name} lies between bytes {begin} and {end}")
            yield name, Entry(torch.uint8, (end - begin,), (1,), data + begin, str(item["dtype"]))
            continue
        if (
            end - begin != math.prod(shape) * dtype.itemsize
            or begin < 0
            or min(shape, default=0) < 0
        ):
            raise ValueError(f"{name} has {end - begin} bytes, but shape {shape}")
        yield name, Entry(dtype, shape, contiguous(shape), data + begin)


def _check_apart(entries: Mapping[str, Entry]) -> None:
    """Tensors of a safetensors file share no bytes; torch.save does that on purpose, for tied weights."""
    filled = sorted(
        (entry.offset, entry.end, name)
        for name, entry in entries.items()
        if entry.end > entry.offset
    )
    for (_, end, name), (start, _, other) in pairwise(filled):
        if start < end:
            raise ValueError(f"{name} and {other} overlap")
