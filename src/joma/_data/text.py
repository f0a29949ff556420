"""Text of any length, read in blocks: parts of files or of strings, never all of it in memory.

>>> text = Text((Span("a", b"One line.\\nAnother.\\n"),))
>>> list(text.blocks())
['One line.\\nAnother.\\n']
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 18  # bytes per block: small enough that a block's words stay in cache
LINE = (
    1 << 16
)  # a block ends at the end of a line if that is within so many bytes, else between two words
WORD = 1 << 24  # bytes without a space that are still taken for text
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Span:
    """Bytes `start` to `stop` of a file, or of `data` if the text is not a file; UTF-8.

    Arguments:
        source: the file, or a name for errors.
        data: the text itself, or None for a file.
    """

    source: Path | str
    data: bytes | None = None
    start: int = 0
    stop: int | None = None

    def open(self) -> BinaryIO:
        """Return a stream at byte 0 of the whole source."""
        return Path(self.source).open("rb") if self.data is None else io.BytesIO(self.data)

    def end(self) -> int:
        """Return `stop`, or the length of the source."""
        if self.stop is not None:
            return self.stop
        return Path(self.source).stat().st_size if self.data is None else len(self.data)

    def blocks(self) -> Iterator[bytes]:
        """Give the bytes in blocks that end at the end of a line, or of a word where lines are very long."""
        with self.open() as stream:
            stream.seek(self.start)
            left, carried = self.end() - self.start, b""
            while left > 0:
                block = stream.read(min(BLOCK, left))
                block += stream.readline(min(LINE, left - len(block))) if left > len(block) else b""
                if not block:  # the file has become shorter
                    break
                left -= len(block)
                block = carried + block
                cut = len(block) if left <= 0 or block.endswith(b"\n") else _between_words(block)
                if len(block) - cut > WORD:
                    raise ValueError(
                        f"{self.source} is not text: it has {WORD >> 20} MB without a space"
                    )
                if cut:
                    yield block[:cut]
                carried = block[cut:]
            if carried:
                yield carried


@dataclass(frozen=True)
class Text:
    """A text made of spans; words do not continue from one span into the next."""

    spans: tuple[Span, ...]

    @property
    def sources(self) -> str:
        """Where the text comes from, for messages."""
        names = list(dict.fromkeys(str(span.source) for span in self.spans))
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def size(self) -> int:
        """Return the length in bytes."""
        return sum(span.end() - span.start for span in self.spans)

    def blocks(self) -> Iterator[str]:
        """Give the text in blocks that end between two words; the blocks depend on nothing but the text."""
        for span in self.spans:
            position = span.start
            for block in span.blocks():
                try:
                    yield block.removeprefix(BOM).decode() if position == 0 else block.decode()
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{span.source} is not UTF-8 text: byte 0x{block[error.start]:02x} at position "
                        f"{position + error.start}. Convert it (iconv -t UTF-8) or move it out of the folder"
                    ) from None
                position += len(block)

    def hash_into(self, digest: hashlib.blake2b) -> None:
        """Add all bytes, and where spans end, to a digest."""
        digest.update(b"text %d;" % len(self.spans))
        for span in self.spans:
            digest.update(b"%d:" % (span.end() - span.start))
            for block in span.blocks():
                digest.update(block)

    def split(self, share: float) -> tuple[Text, Text]:
        """Return the text up to the first line end after `share` of its bytes, and the rest."""
        left = int(share * self.size())
        for i, span in enumerate(self.spans):
            length = span.end() - span.start
            if left < length:
                cut = _cut(span, span.start + left, first=i == 0, last=i == len(self.spans) - 1)
                head = Span(span.source, span.data, span.start, cut)
                tail = Span(span.source, span.data, cut, span.end())
                return Text((*self.spans[:i], head)), Text((tail, *self.spans[i + 1 :]))
            left -= length
        return self, Text(())


def _cut(span: Span, position: int, first: bool, last: bool) -> int:
    """Return the place after the next end of a line, else the next space, else the last space before `position`.

    The first span is not left empty, and the last one not taken whole, if there is another way.
    """
    begin, end = max(span.start, position - LINE), min(position + LINE, span.end())
    with span.open() as stream:
        stream.seek(begin)
        near = stream.read(end - begin)
    for white in (b"\n", b" "):
        at = near.find(white, position - begin) + 1
        if at and begin + at < span.end():
            return begin + at
    if not last:
        return span.end()
    before = max(near.rfind(white, 0, position - begin) for white in (b"\n", b" ")) + 1
    return begin + before if before else span.end() if first else span.start


def _between_words(block: bytes) -> int:
    """Return the last place where a long line can be cut, or 0: not inside `<br />`, which is one separator."""
    at = len(block) - 1
    while (at := block.rfind(b" ", 0, at)) >= 0:
        if block[at + 1] not in b'/"':  # quotes are dropped before `<br />` is looked for
            return at + 1
    return 0
