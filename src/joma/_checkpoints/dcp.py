"""Checkpoints of `torch.distributed.checkpoint` (DCP): a table of chunks, `.metadata`, and files that hold them.

The table is a pickle, and PyTorch's own reader unpickles it with all that it asks for. Here every class that it names
becomes an inert record: nothing is imported, nothing is called. Each chunk is a small file of `torch.save`, which is
loaded with ``weights_only``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.entry import Entry
from joma._checkpoints.formats import CHUNK, METADATA, check_inside
from joma._checkpoints.inert import Record, inert
from joma._checkpoints.pickles import load_tensor
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Reader, Span, read_bytes
from joma._checkpoints.sources import WorkedOut, virtual

_LARGEST = 256 << 20  # bytes of the table
_WEIGHTS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMISER = re.compile(
    r"(.*\.)?(optim\w*|opt|chained_\d+)\..*|.*\.(exp_avg|exp_avg_sq|momentum_buffer)"
)


class Dcp(WorkedOut):
    """The weights in a folder that `torch.distributed.checkpoint` wrote; what belongs to optimisers is left out.

    Arguments:
        name: for messages.
        open: gives its files, None for one that is not there.
        room: bytes of all files of chunks.
    """

    def __init__(self, name: str, open: Callable[[str], Reader | None], room: int) -> None:
        self._name, self._open, self._read = name, open, 0
        self._files: dict[str, Reader] = {}
        try:
            table = _table(self._file(METADATA))
            self._chunks = dict(_chunks(table))
            places = dict(_places(table))
        except BadCheckpoint:
            raise
        except Exception as error:  # a damaged pickle can fail in any way
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise BadCheckpoint(
                f"{METADATA} of {name} is damaged or no table of chunks: {why}"
            ) from None
        self._places = places
        names = {full: _short(full, list(self._chunks)) for full in self._chunks}
        self._full = {short: full for full, short in names.items() if short is not None}
        self.entries = {}
        for short, full in self._full.items():
            dtype, shape, _ = self._chunks[full]
            if math.prod(shape) * dtype.itemsize > room:
                raise BadCheckpoint(
                    f"{name} is cut off: {full} of shape {shape} is more than its files hold"
                )
            self.entries[short] = virtual(shape)

    @classmethod
    def local(cls, folder: Path) -> Dcp:
        """A folder of this machine."""
        room = sum(file.stat().st_size for file in folder.glob(f"*{CHUNK}"))
        return cls(folder.name, lambda file: LocalFile(folder / file, file), room)

    @property
    def bytes_read(self) -> int:
        """Of chunks."""
        return self._read

    def expect(self, views: Iterable[tuple[str, Entry]]) -> None:
        """These will be read: of files elsewhere, neighbouring chunks are then fetched together."""
        spans: dict[str, list[Span]] = {}
        for name in dict.fromkeys(name for name, _ in views):
            for _, (file, offset, length) in self._parts(name):
                spans.setdefault(file, []).append((offset, offset + length))
        for file, inside in spans.items():
            self._file(file).expect(inside)

    def _parts(self, name: str) -> Iterator[tuple[Any, tuple[str, int, int]]]:
        """The chunks of a tensor, (offsets, sizes), and where they are: file, first byte, bytes."""
        full = self._full[name]
        for number, chunk in enumerate(self._chunks[full][2]):
            place = self._places.get((full, chunk[0])) or self._places.get((full, number))
            if place is None:
                raise BadCheckpoint(f"{self._name} does not say where a part of {full} is")
            yield chunk, place

    def whole(self, name: str) -> Tensor:
        """The tensor, put together from its chunks."""
        full = self._full[name]
        dtype, shape, _ = self._chunks[full]
        out = torch.full(shape, math.nan)  # what no chunk covers is told
        for (offsets, sizes), place in self._parts(name):
            part = self._part(full, *place)
            if tuple(part.shape) != sizes or part.dtype != dtype:
                raise BadCheckpoint(
                    f"{self._name}: a part of {full} has shape {tuple(part.shape)}, not {sizes}"
                )
            out[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = part.float()
        return out

    def _part(self, name: str, file: str, offset: int, length: int) -> Tensor:
        reader = self._file(file)
        if not 0 <= offset <= offset + length <= reader.size:
            raise BadCheckpoint(
                f"{file} is cut off: {name} ends at byte {offset + length:,}, the file at {reader.size:,}"
            )
        self._read += length
        return load_tensor(read_bytes(reader, offset, length), f"{name} in {file}")

    def _file(self, name: str) -> Reader:
        if name not in self._files:
            if name != METADATA:
                check_inside(name, METADATA, (CHUNK,))
            if (reader := self._open(name)) is None:
                raise BadCheckpoint(f"{name} cannot be read: {self._name} does not have it")
            self._files[name] = reader
        return self._files[name]


def _table(file: Reader) -> Record:
    if file.size > _LARGEST:
        raise BadCheckpoint(f"{METADATA} has {file.size:,} bytes, more than {_LARGEST:,}: refused")
    table = inert(io.BytesIO(read_bytes(file, 0, file.size)))
    if not isinstance(table, Record) or not isinstance(table.get("state_dict_metadata"), dict):
        raise BadCheckpoint(f"{METADATA} is no table of chunks")
    return table


def _chunks(table: Record) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...], list[Any]]]]:
    """Floating-point tensors: type, shape, and (offsets, sizes) of each chunk."""
    for name, item in table.get("state_dict_metadata").items():
        properties = item.get("properties") if isinstance(item, Record) else None
        dtype = properties.get("dtype", 0) if isinstance(properties, Record) else None
        if (
            not isinstance(name, str)
            or not isinstance(dtype, torch.dtype)
            or not dtype.is_floating_point
        ):
            continue
        shape = _sizes(item.get("size"))
        chunks = [
            (_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes")))
            for chunk in item.get("chunks")
        ]
        for offsets, sizes in chunks:
            if len(offsets) != len(shape) or any(
                o + n > m for o, n, m in zip(offsets, sizes, shape, strict=True)
            ):
                raise BadCheckpoint(
                    f"{METADATA}: a part of {name} lies outside of its shape {shape}"
                )
        yield name, (dtype, shape, chunks)


def _places(table: Record) -> Iterator[tuple[tuple[str, Any], tuple[str, int, int]]]:
    """(Name, offsets of a chunk), or (name, number of a chunk) -> file, first byte, bytes."""
    for index, info in table.get("storage_data").items():
        if info.get("transform_descriptors"):
            raise BadCheckpoint(
                f"its parts are compressed ({info.get('transform_descriptors')}): save it without"
            )
        place = str(info.get("relative_path")), int(info.get("offset")), int(info.get("length"))
        offset = index.get("offset")
        yield (
            (str(index.get("fqn")), index.get("index") if offset is None else _sizes(offset)),
            place,
        )


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if len(sizes) > 16 or any(not isinstance(n, int) or not 0 <= n < 1 << 48 for n in sizes):
        raise BadCheckpoint(f"{METADATA} is damaged: {sizes[:16]} is no shape")
    return sizes


def _short(name: str, names: list[str]) -> str | None:
    """A weight's name without that of the dict of weights; None of what is no weight."""
    if _OPTIMISER.fullmatch(name):
        return None
    front = next(
        (f"{w}." for w in _WEIGHTS if any(other.startswith(f"{w}.") for other in names)), ""
    )
    return name.removeprefix(front) if name.startswith(front) else None
