"""The header of a GGUF file (llama.cpp): keys with values, and where tensors are.

It is walked through here, with bounds: the package `gguf` maps the file into memory, and its reader of headers goes on
for ever where an array claims to be longer than the file.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Container
from typing import Any

from joma._checkpoints.reading import BadCheckpoint, Reader, Stream

MAGIC = b"GGUF"
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_LONGEST, _MOST = (
    1 << 16,
    1 << 20,
)  # characters of a text; keys, tensors, and words of an array that is kept


class Header:
    """Keys and values, and where tensors are.

    Arguments:
        reader: of the file.
        arrays: keys whose arrays are kept; others are passed over, as are very long texts: their value is None.

    Attributes:
        keys: by name.
        tensors: (name, type, shape, first byte) of each.
    """

    def __init__(self, reader: Reader, arrays: Container[str] = ()) -> None:
        self._name, self._size = reader.name, reader.size
        self._stream = io.BufferedReader(Stream(reader), 1 << 16)
        try:
            self._read(arrays)
        except BadCheckpoint:
            raise
        except (ValueError, struct.error, MemoryError, OverflowError) as error:
            raise BadCheckpoint(f"{reader.name} is damaged or no GGUF file: {error}") from error

    def _read(self, arrays: Container[str]) -> None:
        if self._bytes(4) != MAGIC:
            raise BadCheckpoint(f"{self._name} is no GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise BadCheckpoint(
                f"{self._name} is GGUF of version {version}: 2 and 3 can be read, little-endian"
            )
        tensors, keys = self._count(), self._count()
        self.keys: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.keys[key] = self._value(self._number("I"), key in arrays)
        infos = []
        for _ in range(tensors):
            name, dimensions = self._string(), self._number("I")
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
            raise BadCheckpoint(
                f"{self._name} is cut off at byte {self._size:,}; download it again"
            )
        return self._stream.read(count)

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def _count(self) -> int:
        count = int(self._number("Q"))
        if count > _MOST:
            raise ValueError(f"it claims to have {count:,} tensors or keys")
        return count

    def _string(self) -> str:
        length = self._number("Q")
        if length > _LONGEST:
            raise ValueError(f"a name of {length:,} characters")
        return self._bytes(length).decode(errors="replace")

    def _value(self, kind: int, keep: bool, depth: int = 0) -> Any:
        """A number or a text; a list for an array that is kept, None for one that is passed over."""
        if kind in _FORMATS:
            return self._number(_FORMATS[kind])
        if kind == _STRING:
            return self._text(keep=keep or not depth)
        if kind != _ARRAY or depth >= 4:
            raise ValueError(f"a value of the type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if (keep and count > _MOST) or (inner not in _FORMATS and count > self._size):
            raise ValueError(f"an array of {count:,}")
        if keep:
            return [self._value(inner, keep, depth + 1) for _ in range(count)]
        if inner in _FORMATS:
            self._skip(count * struct.calcsize(f"<{_FORMATS[inner]}"))
        else:
            for _ in range(count):
                self._value(inner, keep, depth + 1)
        return None

    def _text(self, *, keep: bool) -> str | None:
        length = self._number("Q")
        if keep and length <= _LONGEST:
            return self._bytes(length).decode(errors="replace")
        self._skip(length)
        return None

    def _skip(self, count: int) -> None:
        if count > self._size - self._stream.tell():
            raise BadCheckpoint(
                f"{self._name} is cut off at byte {self._size:,}; download it again"
            )
        self._stream.seek(count, io.SEEK_CUR)
