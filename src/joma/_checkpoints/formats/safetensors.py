"""safetensors: a JSON table of offsets, then the elements of all tensors.

The library's `safe_open` maps the file into memory. Reading the up-projections and the fused
queries of 12 layers (252 MB of 554 MB, cold cache) took 554 MB from the disk with it, and 253 MB
with positioned reads (`python -m benchmarks.partial_reads`). A file that is cut off while it is
mapped ends the process, and a file on the hub cannot be mapped at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from joma._checkpoints.formats.plain import PlainFile, StoredTensor
from joma._checkpoints.formats.view import TensorView
from joma._checkpoints.reading import BadCheckpoint, Reader, parse_json, read_bytes

# Names of types in a safetensors file. Others are kept as bytes (`TensorView.foreign_type`).
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8  # the file begins with the length of its table
_MAX_TABLE_BYTES = 16 << 20  # enough for more than 100,000 tensors


class SafetensorsFile(PlainFile):
    """A safetensors file."""

    def __init__(self, reader: Reader) -> None:
        head = read_bytes(reader, 0, min(_LENGTH_BYTES, reader.size))
        length = int.from_bytes(head, "little")
        if len(head) < _LENGTH_BYTES or length > min(_MAX_TABLE_BYTES, reader.size - len(head)):
            raise BadCheckpoint(
                f"{reader.name} is cut off or no safetensors file ({reader.size:,} bytes)"
            )
        try:
            table = parse_json(read_bytes(reader, _LENGTH_BYTES, length))
            stored = dict(_stored_tensors(reader.name, table, _LENGTH_BYTES + length))
            _check_disjoint(stored)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BadCheckpoint(
                f"{reader.name} is no safetensors file: its header is damaged ({error})"
            ) from error
        super().__init__(reader, stored)


def _stored_tensors(
    file: str, table: Mapping[str, Any], data_start: int
) -> Iterator[tuple[str, StoredTensor]]:
    for name, item in table.items():
        if name == "__metadata__":
            continue
        shape = tuple(int(size) for size in item["shape"])
        begin, end = item["data_offsets"]
        if not isinstance(begin, int) or not isinstance(end, int):
            raise ValueError(f"{name} lies between bytes {begin!r} and {end!r}")
        dtype = _DTYPES.get(item["dtype"])
        if dtype is None:
            # A packed 4-bit type, say, that no gauge measures: its bytes are all we know of it.
            if end < begin or begin < 0:
                raise ValueError(f"{name} lies between bytes {begin} and {end}")
            view = TensorView(
                file, name, torch.uint8, (end - begin,), (1,), foreign_type=str(item["dtype"])
            )
        else:
            # A shape of negative sizes can have the right product.
            has_its_bytes = end - begin == math.prod(shape) * dtype.itemsize
            if not has_its_bytes or begin < 0 or min(shape, default=0) < 0:
                raise ValueError(f"{name} has {end - begin} bytes, but shape {shape}")
            view = TensorView.full(file, name, dtype, shape)
        yield name, StoredTensor(view, view.stride, data_start + begin)


def _check_disjoint(stored: Mapping[str, StoredTensor]) -> None:
    """Check that no two tensors share bytes. (`torch.save` lets them do so, for tied weights.)"""
    spans = []
    for name, tensor in stored.items():
        if tensor.end > tensor.start:
            spans.append((tensor.start, tensor.end, name))
    spans.sort()
    for (_, end, name), (start, _, next_name) in pairwise(spans):
        if start < end:
            raise ValueError(f"{name} and {next_name} overlap")
