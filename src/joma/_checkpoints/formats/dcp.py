"""`torch.distributed.checkpoint` (DCP): a table of chunks, `.metadata`, and files that hold them.

PyTorch's own reader unpickles the table with everything that it asks for (`pickle.load`): a table
that calls `os.mkdir` made the folder. Here the table is read by `load_inert`, and each chunk, which
is a small file of `torch.save`, with ``weights_only``.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.folder import DCP_CHUNK, DCP_TABLE, check_inside
from joma._checkpoints.formats.pickles import WEIGHT_DICTS, load_tensor
from joma._checkpoints.formats.unpickling import InertObject, load_inert
from joma._checkpoints.formats.view import MaterializedFormat, TensorView
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Reader, Span, read_bytes

# Bounds on what a table may claim, far above what real ones have.
_MAX_TABLE_BYTES = 256 << 20
_MAX_DIMENSIONS = 16
_MAX_SIZE = 1 << 48  # of one dimension
# Names of optimisers' states, which are as large as the weights and are not read.
_OPTIMIZER = re.compile(
    r"(.*\.)?(optim\w*|opt|chained_\d+)\..*|.*\.(exp_avg|exp_avg_sq|momentum_buffer)"
)

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Chunk:
    """A box in a tensor."""

    offsets: Sizes
    sizes: Sizes

    @property
    def slices(self) -> tuple[slice, ...]:
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(offset, offset + size) for offset, size in pairs)


@dataclass(frozen=True)
class _ChunkedTensor:
    dtype: torch.dtype
    shape: Sizes
    chunks: list[_Chunk]


@dataclass(frozen=True)
class _Location:
    """Where the file of `torch.save` that holds a chunk lies in a file of chunks."""

    file: str
    offset: int
    length: int


# A chunk is known by the name of its tensor, and by its offsets or its number.
_Locations = dict[tuple[str, Any], _Location]


class DcpFolder(MaterializedFormat):
    """The weights in a folder of `torch.distributed.checkpoint`, without the state of optimisers.

    Arguments:
        name: for messages.
        open_file: returns a reader of one of its files, None if there is no such file.
        chunk_bytes: of all files of chunks. A tensor that claims more is refused.
    """

    def __init__(
        self, name: str, open_file: Callable[[str], Reader | None], chunk_bytes: int
    ) -> None:
        self._name = name
        self._open_file = open_file
        self._readers: dict[str, Reader] = {}
        try:
            table = _read_table(self._reader(DCP_TABLE))
            self._tensors = dict(_chunked_tensors(table))
            self._locations: _Locations = dict(_locations(table))
        except BadCheckpoint:
            raise
        except Exception as error:  # a damaged pickle can fail in any way
            reason = type(error).__name__
            if str(error):
                reason = str(error).splitlines()[0][:200]
            raise BadCheckpoint(
                f"{DCP_TABLE} of {name} is damaged or no table of chunks: {reason}"
            ) from None
        self._full_names = _short_names(self._tensors)
        views = []
        for short_name, full_name in self._full_names.items():
            tensor = self._tensors[full_name]
            if math.prod(tensor.shape) * tensor.dtype.itemsize > chunk_bytes:
                raise BadCheckpoint(
                    f"{name} is cut off: {full_name} of shape {tensor.shape} is more than its "
                    "files hold"
                )
            views.append(TensorView.full("", short_name, torch.float32, tensor.shape))
        super().__init__(views)

    @classmethod
    def local(cls, folder: Path) -> DcpFolder:
        """Open a folder of this machine."""
        chunk_bytes = sum(file.stat().st_size for file in folder.glob(f"*{DCP_CHUNK}"))
        return cls(folder.name, lambda file: LocalFile(folder / file, file), chunk_bytes)

    def announce(self, views: Iterable[TensorView]) -> None:
        spans: dict[str, list[Span]] = {}
        for name in dict.fromkeys(view.name for view in views):
            for _, location in self._located_chunks(name):
                span = (location.offset, location.offset + location.length)
                spans.setdefault(location.file, []).append(span)
        for file, file_spans in spans.items():
            self._reader(file).expect(file_spans)

    def materialize(self, name: str) -> Tensor:
        full_name = self._full_names[name]
        tensor = self._tensors[full_name]
        # NaN, so that elements that no chunk covers are reported as not finite.
        result = torch.full(tensor.shape, math.nan)
        for chunk, location in self._located_chunks(name):
            part = self._read_chunk(full_name, location)
            if tuple(part.shape) != chunk.sizes or part.dtype != tensor.dtype:
                raise BadCheckpoint(
                    f"{self._name}: a part of {full_name} has shape {tuple(part.shape)}, "
                    f"not {chunk.sizes}"
                )
            result[chunk.slices] = part.float()
        return result

    def _located_chunks(self, name: str) -> Iterator[tuple[_Chunk, _Location]]:
        full_name = self._full_names[name]
        for number, chunk in enumerate(self._tensors[full_name].chunks):
            location = self._locations.get((full_name, chunk.offsets))
            if location is None:  # an index without offsets numbers the chunks
                location = self._locations.get((full_name, number))
            if location is None:
                raise BadCheckpoint(f"{self._name} does not say where a part of {full_name} is")
            yield chunk, location

    def _read_chunk(self, name: str, location: _Location) -> Tensor:
        reader = self._reader(location.file)
        end = location.offset + location.length
        if not 0 <= location.offset <= end <= reader.size:
            raise BadCheckpoint(
                f"{location.file} is cut off: {name} ends at byte {end:,}, the file at "
                f"{reader.size:,}"
            )
        self.bytes_read += location.length
        data = read_bytes(reader, location.offset, location.length)
        return load_tensor(data, f"{name} in {location.file}")

    def _reader(self, file: str) -> Reader:
        if file not in self._readers:
            if file != DCP_TABLE:  # names of other files come from the table, and may lie
                check_inside(file, DCP_TABLE, (DCP_CHUNK,))
            reader = self._open_file(file)
            if reader is None:
                raise BadCheckpoint(f"{file} cannot be read: {self._name} does not have it")
            self._readers[file] = reader
        return self._readers[file]


def _read_table(file: Reader) -> InertObject:
    if file.size > _MAX_TABLE_BYTES:
        raise BadCheckpoint(
            f"{DCP_TABLE} has {file.size:,} bytes, more than {_MAX_TABLE_BYTES:,}: refused"
        )
    table = load_inert(io.BytesIO(read_bytes(file, 0, file.size)))
    if isinstance(table, InertObject) and isinstance(table.get("state_dict_metadata"), dict):
        return table
    raise BadCheckpoint(f"{DCP_TABLE} is no table of chunks")


def _chunked_tensors(table: InertObject) -> Iterator[tuple[str, _ChunkedTensor]]:
    """Yield the floating-point tensors by name."""
    for name, item in table.get("state_dict_metadata").items():
        if not isinstance(name, str) or not isinstance(item, InertObject):
            continue
        properties = item.get("properties")
        if not isinstance(properties, InertObject):
            continue
        dtype = properties.get("dtype", 0)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            continue
        shape = _sizes(item.get("size"))
        chunks = []
        for entry in item.get("chunks"):
            chunk = _Chunk(_sizes(entry.get("offsets")), _sizes(entry.get("sizes")))
            _check_chunk(chunk, shape, name)
            chunks.append(chunk)
        yield name, _ChunkedTensor(dtype, shape, chunks)


def _check_chunk(chunk: _Chunk, shape: Sizes, name: str) -> None:
    is_inside = len(chunk.offsets) == len(shape)
    if is_inside:
        for offset, size, limit in zip(chunk.offsets, chunk.sizes, shape, strict=True):
            is_inside = is_inside and offset + size <= limit
    if not is_inside:
        raise BadCheckpoint(f"{DCP_TABLE}: a part of {name} lies outside of its shape {shape}")


def _locations(table: InertObject) -> Iterator[tuple[tuple[str, Any], _Location]]:
    for index, info in table.get("storage_data").items():
        if info.get("transform_descriptors"):
            raise BadCheckpoint(
                f"its parts are compressed ({info.get('transform_descriptors')}): save it without"
            )
        location = _Location(
            str(info.get("relative_path")), int(info.get("offset")), int(info.get("length"))
        )
        chunk_key = index.get("offset")
        if chunk_key is not None:
            chunk_key = _sizes(chunk_key)
        else:
            chunk_key = index.get("index")
        yield (str(index.get("fqn")), chunk_key), location


def _sizes(value: Any) -> Sizes:
    sizes = tuple(value)
    is_valid = len(sizes) <= _MAX_DIMENSIONS
    for size in sizes[:_MAX_DIMENSIONS]:
        is_valid = is_valid and isinstance(size, int) and 0 <= size < _MAX_SIZE
    if not is_valid:
        raise BadCheckpoint(f"{DCP_TABLE} is damaged: {sizes[:_MAX_DIMENSIONS]} is no shape")
    return sizes


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of weights without that of their dict -> the names in the table."""
    names = list(names)
    prefix = ""
    for weight_dict in WEIGHT_DICTS:
        if any(name.startswith(f"{weight_dict}.") for name in names):
            prefix = f"{weight_dict}."
            break
    short_names = {}
    for name in names:
        if name.startswith(prefix) and not _OPTIMIZER.fullmatch(name):
            short_names[name.removeprefix(prefix)] = name
    return short_names
