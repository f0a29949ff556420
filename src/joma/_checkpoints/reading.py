"""Read the bytes of one file by position, wherever the file is; here for files of this machine."""

from __future__ import annotations

import io
import json
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

Span = tuple[int, int]  # first byte, and the byte after the last one

MAX_JSON_BYTES = 32 << 20  # the largest index of shards seen in practice has 15 MB
# A list or a dict takes at least 56 bytes of memory, also an empty one that takes 2 bytes in the
# file: without this bound a file of 32 MB would take 1 GB.
_MAX_JSON_CONTAINERS = 1_000_000


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be read. The message goes into its row."""


class Reader(Protocol):
    """The bytes of a file by position.

    Attributes:
        name: for messages.
        suffix: of the file's name.
        size: in bytes.
        is_local: True if a read is cheap, so that nothing is gained by announcing it.
    """

    name: str
    suffix: str
    size: int
    is_local: bool

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the bytes from ``offset`` on, or raise `BadCheckpoint`."""

    def expect(self, spans: Iterable[Span]) -> None:
        """Prepare to read these spans: where a read is a request, neighbours become one."""

    def download(self) -> Path:
        """Return the complete file on this machine, for formats without offsets."""


class LocalFile:
    """A file of this machine, as a `Reader`."""

    is_local = True

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = name or path.name
        self.suffix = path.suffix
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            self._descriptor = os.open(path, flags)
            # Closed with the last reference: nobody has to remember which files are open.
            weakref.finalize(self, os.close, self._descriptor)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise BadCheckpoint(f"{self.name} cannot be read: {error.strerror or error}") from error
        # Otherwise the kernel reads ahead, up to twice as much as is asked for.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def fill(self, buffer: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
            except OSError as error:
                reason = error.strerror or error
                raise BadCheckpoint(f"{self.name} cannot be read: {reason}") from error
            # The file has become shorter since it was opened.
            if count == 0:
                end = offset + filled
                raise BadCheckpoint(f"{self.name} is cut off at byte {end:,}; download it again")
            filled += count

    def expect(self, spans: Iterable[Span]) -> None:
        pass

    def download(self) -> Path:
        return self.path


def read_bytes(reader: Reader, offset: int, length: int) -> bytes:
    """Return ``length`` bytes from ``offset`` on."""
    buffer = bytearray(length)
    reader.fill(memoryview(buffer), offset)
    return bytes(buffer)


class ReaderStream(io.RawIOBase):
    """A reader as a file object, for libraries that take one."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {
            io.SEEK_SET: 0,
            io.SEEK_CUR: self._position,
            io.SEEK_END: self._reader.size,
        }
        position = origins[whence] + offset
        if position < 0:
            raise OSError(f"{self._reader.name} has no byte {position}")
        self._position = position
        return position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left = max(0, self._reader.size - self._position)
        count = min(len(buffer), left)
        self._reader.fill(memoryview(buffer).cast("B")[:count], self._position)
        self._position += count
        return count


def parse_json(text: bytes) -> dict[str, Any]:
    """Return the JSON object in ``text``.

    Raises:
        ValueError: it is not an object, it would take much more memory than it has bytes, or it has
            a key twice (two programs would then read two different checkpoints).
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"it has {len(text):,} bytes, more than {MAX_JSON_BYTES:,}")
    if text.count(b"[") + text.count(b"{") > _MAX_JSON_CONTAINERS:
        raise ValueError(f"it has more than {_MAX_JSON_CONTAINERS:,} lists and objects")
    try:
        content = json.loads(text, object_pairs_hook=_with_unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint."""
    try:
        with path.open("rb") as stream:
            # One byte more than allowed, so that a longer file is refused and not cut.
            return parse_json(stream.read(MAX_JSON_BYTES + 1))
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path.name} cannot be read: {error}") from error


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("it has a key twice")
    return content
