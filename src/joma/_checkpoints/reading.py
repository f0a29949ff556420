"""Positioned reads of one file, wherever it is; here those of a file of this machine."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

Span = tuple[int, int]  # first byte, and the one after the last


class BadCheckpoint(ValueError):
    """A checkpoint that cannot be read; the message is for its row."""


class Reader(Protocol):
    """The bytes of a file by position.

    Attributes:
        name: for messages.
        suffix: of the file's name.
        size: in bytes.
    """

    name: str
    suffix: str
    size: int

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the bytes from ``offset`` on, or raise `BadCheckpoint`."""

    def expect(self, spans: Iterable[Span]) -> None:
        """What will be read next, in the order of the file: where a read is a request, neighbours become one."""

    def whole(self) -> Path:
        """The file on this machine, for formats that have no offsets."""


class LocalFile:
    """A file of this machine, as a `Reader`."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path, self.name, self.suffix = path, name or path.name, path.suffix
        try:
            self._descriptor = os.open(
                path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
            )
            weakref.finalize(self, os.close, self._descriptor)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise BadCheckpoint(f"{self.name} cannot be read: {error.strerror or error}") from error
        if hasattr(
            os, "posix_fadvise"
        ):  # the kernel reads ahead otherwise, up to twice of what is asked for
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Positioned reads until the buffer is full."""
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise BadCheckpoint(
                    f"{self.name} cannot be read: {error.strerror or error}"
                ) from error
            if got == 0:
                raise BadCheckpoint(
                    f"{self.name} is cut off at byte {offset + done:,}; download it again"
                )
            done += got

    def expect(self, spans: Iterable[Span]) -> None:
        """A read is no request here: nothing to do."""

    def whole(self) -> Path:
        """The file itself."""
        return self.path


def read_bytes(reader: Reader, offset: int, length: int) -> bytes:
    """So many bytes from ``offset`` on."""
    buffer = bytearray(length)
    reader.fill(memoryview(buffer), offset)
    return bytes(buffer)


class Stream(io.RawIOBase):
    """A reader as a file object, for libraries that take one."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader, self._at = reader, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position, as for any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.size}[whence]
        if base + offset < 0:
            raise OSError(f"{self._reader.name} has no byte {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer as far as the file goes."""
        count = max(0, min(len(buffer), self._reader.size - self._at))
        self._reader.fill(memoryview(buffer).cast("B")[:count], self._at)
        self._at += count
        return count
