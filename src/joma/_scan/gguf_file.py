"""GGUF files (llama.cpp): the tensors that are needed, dequantised by blocks of rows with the package `gguf`.

The header is walked through here, with bounds: the package maps the file into memory, and its reader of headers goes on
for ever where an array claims to be longer than the file.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma._scan.entry import Entry, contiguous
from joma._scan.reading import BadCheckpoint, Reader, Stream, read_bytes
from joma._scan.sources import WorkedOut, virtual

MAGIC = b"GGUF"
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST, _MOST = 1 << 16, 1 << 20  # characters of a name; keys and tensors of a file
_BLOCK = 1 << 20  # bytes that are dequantised at a time
_NAMES = {  # llama.cpp's names -> those of the hub's models
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp": "mlp.router", "token_embd": "embed_tokens",
    "output": "lm_head",
}  # fmt: skip
_STACKS = {
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip


def library() -> Any:
    """`gguf`, or how to get it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise BadCheckpoint(f"GGUF files need the package gguf ({error}): pip install 'joma[gguf]'") from error
    return gguf


class GgufFile(WorkedOut):
    """The tensors of a GGUF file, named as in models of the hub.

    Attributes:
        config: what its header says of heads.
        note: how its tensors are quantised.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader, self._read, self._gguf = reader, 0, library()
        self.entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[Any, int]] = {}  # type, and where it begins
        try:
            head = _Header(reader)
            kinds = self._gguf.GGMLQuantizationType
            placed = [(name, kinds(kind), shape, begin) for name, kind, shape, begin in head.tensors]
        except BadCheckpoint:
            raise
        except (ValueError, struct.error, MemoryError, OverflowError) as error:
            raise BadCheckpoint(f"{reader.name} is damaged or no GGUF file: {error}") from error
        if int(head.keys.get("split.count") or 0) > 1:
            raise BadCheckpoint(f"{reader.name} is one of several parts: join them with `llama-gguf-split --merge`")
        ends: list[tuple[int, int, str]] = []
        for name, kind, shape, begin in placed:
            block, size = self._gguf.GGML_QUANT_SIZES[kind]
            count = math.prod(shape)
            if count % block or (shape and shape[-1] % block):
                raise BadCheckpoint(f"{reader.name} is damaged: {name} of shape {shape} is no whole number of blocks")
            if begin + count // block * size > reader.size:
                raise BadCheckpoint(f"{reader.name} is cut off: {name} ends after the file; download it again")
            ends.append((begin, begin + count // block * size, name))
            known = _known(name)
            if known in self.entries:
                raise BadCheckpoint(f"{reader.name} has the tensor {name} twice")
            self.entries[known], self._places[known] = virtual(shape), (kind, begin)
        for (_, end, name), (start, _, other) in pairwise(sorted(ends)):
            if start < end:
                raise BadCheckpoint(f"{reader.name} is damaged: {name} and {other} overlap")
        self.config = _config(head.keys)
        kinds = sorted({kind.name for _, kind, shape, _ in placed if len(shape) > 1})
        self.note = f"{reader.name} is GGUF ({', '.join(kinds)}): the numbers that its blocks stand for were measured"

    @property
    def bytes_read(self) -> int:
        """Of tensors."""
        return self._read

    def read(self, name: str, entry: Entry | None = None) -> Tensor:
        """A tensor; of whole rows one after another, as those of one expert, no others are read."""
        width = self.entries[name].shape[-1] if self.entries[name].shape else 0
        if entry is None or not width or entry.stride != contiguous(entry.shape) or (entry.offset // 4) % width:
            return super().read(name, entry)
        count = math.prod(entry.shape)
        if count % width:
            return super().read(name, entry)
        return self._rows(name, entry.offset // 4 // width, count // width).reshape(entry.shape)

    def whole(self, name: str) -> Tensor:
        """All rows."""
        shape = self.entries[name].shape
        return self._rows(name, 0, math.prod(shape[:-1])).reshape(shape)

    def _rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows from ``first`` on, (count, width)."""
        (kind, begin), width = self._places[name], self.entries[name].shape[-1] if self.entries[name].shape else 1
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        row = width // block * size
        out, step = torch.empty(count, width), max(1, _BLOCK // max(1, row))
        for start in range(0, count, step):
            rows = min(step, count - start)
            data = np.frombuffer(read_bytes(self._reader, begin + (first + start) * row, rows * row), dtype=np.uint8)
            self._read += data.nbytes
            out[start : start + rows] = torch.from_numpy(self._dequantised(data.reshape(rows, row), kind, name))
        return out

    def _dequantised(self, data: Any, kind: Any, name: str) -> Any:
        if kind.name == "F64":
            return data.view(np.float64).astype(np.float32)
        try:
            with np.errstate(all="ignore"):
                return np.array(self._gguf.quants.dequantize(data, kind), dtype=np.float32)
        except NotImplementedError:
            raise BadCheckpoint(
                f"{name} is of the type {kind.name}, which the package gguf cannot dequantise"
            ) from None


class _Header:
    """Keys and values, and where tensors are; arrays are passed over."""

    def __init__(self, reader: Reader) -> None:
        self._name, self._size = reader.name, reader.size
        self._stream = io.BufferedReader(Stream(reader), 1 << 16)
        if self._bytes(4) != MAGIC:
            raise BadCheckpoint(f"{reader.name} is no GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise BadCheckpoint(f"{reader.name} is GGUF of version {version}: 2 and 3 can be read, little-endian")
        tensors, keys = self._count(), self._count()
        self.keys: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string(_LONGEST)
            self.keys[key] = self._value(self._number("I"))
        infos = []
        for _ in range(tensors):
            name, dimensions = self._string(_LONGEST), self._number("I")
            if dimensions > 4:
                raise ValueError(f"{name} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            infos.append((name, self._number("I"), shape, self._number("Q")))
        alignment = self.keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise ValueError(f"its alignment is {alignment}")
        data = -(-self._stream.tell() // alignment) * alignment
        self.tensors = [(name, kind, shape, data + offset) for name, kind, shape, offset in infos]

    def _bytes(self, count: int) -> bytes:
        if count > self._size - self._stream.tell():
            raise BadCheckpoint(f"{self._name} is cut off at byte {self._size:,}; download it again")
        return self._stream.read(count)

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def _count(self) -> int:
        count = int(self._number("Q"))
        if count > _MOST:
            raise ValueError(f"it claims to have {count:,} tensors or keys")
        return count

    def _string(self, longest: int) -> str:
        length = self._number("Q")
        if length > longest:
            raise ValueError(f"a name of {length:,} characters")
        return self._bytes(length).decode(errors="replace")

    def _value(self, kind: int, depth: int = 0) -> Any:
        """A number or a text; None for an array, which is passed over."""
        if kind in _FORMATS:
            return self._number(_FORMATS[kind])
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY and depth < 4:
            inner, count = self._number("I"), self._number("Q")
            if inner in _FORMATS:
                self._skip(count * struct.calcsize(f"<{_FORMATS[inner]}"))
            elif count > self._size:
                raise ValueError(f"an array of {count:,}")
            else:
                for _ in range(count):
                    self._value(inner, depth + 1)
        else:
            raise ValueError(f"a value of the type {kind}")
        return None

    def _skip(self, count: int) -> None:
        if count > self._size - self._stream.tell():
            raise BadCheckpoint(f"{self._name} is cut off at byte {self._size:,}; download it again")
        self._stream.seek(count, io.SEEK_CUR)


def _known(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None:
        return name
    front = f"layers.{match[1]}." if match[1] else ""
    if match[2] in _STACKS:
        return front + _STACKS[match[2]]
    return f"{front}{_NAMES.get(match[2], match[2])}.weight"


def _config(keys: Mapping[str, Any]) -> dict[str, Any]:
    """How many heads there are, where all layers have equally many."""
    found = {
        "num_attention_heads": [v for k, v in keys.items() if k.endswith(".attention.head_count")],
        "num_key_value_heads": [v for k, v in keys.items() if k.endswith(".attention.head_count_kv")],
    }
    return {name: values[0] for name, values in found.items() if len(values) == 1 and isinstance(values[0], int)}
