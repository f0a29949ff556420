"""The header of a GGUF file (llama.cpp): keys with values, and where the tensors are.

It is parsed here, within bounds. The reader of the package `gguf` maps the file into memory, so it
cannot read a file on the hub; it makes an array per word of the vocabulary; and it goes on for ever
where an array claims to be longer than the file. (Numbers in docs/architecture.md.)
"""

from __future__ import annotations

import io
import struct
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from joma._checkpoints.reading import BadCheckpoint, Reader, ReaderStream

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Types of values, by llama.cpp's numbers.
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_UINT32 = _NUMBERS[4]
_UINT64 = _NUMBERS[10]

_MAX_TEXT = 1 << 16  # characters of a name, or of a value that is kept
_MAX_ITEMS = 1 << 20  # keys, tensors, and words of an array that is kept
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_BUFFER_BYTES = 1 << 16


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the table of a GGUF file."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    start: int  # its first byte in the file


class GgufHeader:
    """Keys and values, and where the tensors are.

    Arguments:
        reader: of the file.
        kept_arrays: keys whose arrays are kept. The value of the others, and of very long texts, is
            None.

    Attributes:
        keys: values by key.
        tensors: all tensors.
    """

    def __init__(self, reader: Reader, kept_arrays: Container[str] = ()) -> None:
        self._name = reader.name
        self._size = reader.size
        self._stream = io.BufferedReader(ReaderStream(reader), _BUFFER_BYTES)
        self.keys: dict[str, Any] = {}
        self.tensors: list[GgufTensor] = []
        try:
            self._parse(kept_arrays)
        except BadCheckpoint:
            raise
        except (ValueError, struct.error, MemoryError, OverflowError) as error:
            raise BadCheckpoint(f"{reader.name} is damaged or no GGUF file: {error}") from error

    def _parse(self, kept_arrays: Container[str]) -> None:
        if self._read(len(_MAGIC)) != _MAGIC:
            raise BadCheckpoint(f"{self._name} is no GGUF file")
        version = self._number(_UINT32)
        if version not in _VERSIONS:
            raise BadCheckpoint(
                f"{self._name} is GGUF of version {version}: 2 and 3 can be read, little-endian"
            )
        tensor_count = self._count()
        key_count = self._count()
        for _ in range(key_count):
            key = self._short_text()
            type_number = self._number(_UINT32)
            self.keys[key] = self._value(type_number, key in kept_arrays)
        table = [self._table_row() for _ in range(tensor_count)]
        alignment = self.keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"its alignment is {alignment}")
        data_start = -(-self._stream.tell() // alignment) * alignment  # rounded up
        for name, type_number, shape, offset in table:
            self.tensors.append(GgufTensor(name, type_number, shape, data_start + offset))

    def _table_row(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._short_text()
        dimensions = self._number(_UINT32)
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        sizes = [self._number(_UINT64) for _ in range(dimensions)]
        type_number = self._number(_UINT32)
        offset = self._number(_UINT64)
        # llama.cpp names the fastest dimension first, PyTorch last.
        return name, type_number, tuple(reversed(sizes)), offset

    def _check_left(self, count: int) -> None:
        if count > self._size - self._stream.tell():
            raise BadCheckpoint(
                f"{self._name} is cut off at byte {self._size:,}; download it again"
            )

    def _read(self, count: int) -> bytes:
        self._check_left(count)
        return self._stream.read(count)

    def _skip(self, count: int) -> None:
        self._check_left(count)
        self._stream.seek(count, io.SEEK_CUR)

    def _number(self, number: struct.Struct) -> Any:
        return number.unpack(self._read(number.size))[0]

    def _count(self) -> int:
        count = int(self._number(_UINT64))
        if count > _MAX_ITEMS:
            raise ValueError(f"it claims to have {count:,} tensors or keys")
        return count

    def _short_text(self) -> str:
        length = self._number(_UINT64)
        if length > _MAX_TEXT:
            raise ValueError(f"a name of {length:,} characters")
        return self._read(length).decode(errors="replace")

    def _value(self, type_number: int, is_kept: bool, depth: int = 0) -> Any:
        """Return a number, a text, a list for an array that is kept, or None for another."""
        if type_number in _NUMBERS:
            return self._number(_NUMBERS[type_number])
        if type_number == _STRING:
            return self._text(is_kept=is_kept or depth == 0)
        if type_number != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise ValueError(f"a value of the type {type_number}")
        item_type = self._number(_UINT32)
        count = self._number(_UINT64)
        # An item of a text or an array has bytes of its own: there are no more than bytes.
        is_endless = item_type not in _NUMBERS and count > self._size
        if is_endless or (is_kept and count > _MAX_ITEMS):
            raise ValueError(f"an array of {count:,}")
        if is_kept:
            return [self._value(item_type, is_kept, depth + 1) for _ in range(count)]
        if item_type in _NUMBERS:
            self._skip(count * _NUMBERS[item_type].size)
        else:
            for _ in range(count):
                self._value(item_type, is_kept, depth + 1)
        return None

    def _text(self, *, is_kept: bool) -> str | None:
        length = self._number(_UINT64)
        if is_kept and length <= _MAX_TEXT:
            return self._read(length).decode(errors="replace")
        self._skip(length)
        return None
