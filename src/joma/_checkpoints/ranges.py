"""Read a file on the hub by HTTP ranges: one request per stretch of neighbouring expected bytes.

An answer counts only if it is 206 and its ``Content-Range`` is the range that was asked for: a
server that ignores ``Range`` would otherwise deliver the bytes of another place. The files of such
a server are downloaded. The file system of `huggingface_hub` checks neither, and asks once per
read; its HTTP client and its retries are used. (Numbers: `joma docs architecture`.)
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from joma._checkpoints.hub import library
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Span

# Bytes between two spans that are fetched and thrown away rather than asking twice: at 50 ms per
# request and 10 MB/s, they take as long as a request.
GAP_BYTES = 512 << 10
# The longest stretch that joins several spans, and that stays in memory as a whole. Of a longer
# one, which is a single span, the bytes that were read are dropped.
_MAX_JOINED_BYTES = 16 << 20
_MAX_STRETCHES = 4  # in memory
# A small read that was not announced fetches a window: the header of a file is most often in it.
_MIN_WINDOW = 64 << 10
_MAX_WINDOW = 1 << 20
_WINDOWS_PER_FILE = 2048
_BLOCK_BYTES = 4 << 20  # given out at a time, so that a long stretch does not stay in memory
_MAX_FAILURES = 5  # of a connection in a row, without a byte in between
_MAX_WAIT = 8.0  # seconds before the next try
_REPORT_BYTES = 1 << 20  # from one report of progress to the next

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class HubLocation:
    """Where the bytes of a file on the hub are, and how to recognise that it has changed."""

    url: str
    headers: dict[str, str]
    size: int
    etag: str | None = None


class TransferMeter:
    """Bytes over the wire, counted and limited.

    Arguments:
        limit: how many there may be; no limit if None.
        report: called with the file, the bytes so far and the bytes in all.

    Attributes:
        spent: bytes that came.
        expected: bytes of all requests that were announced. More or fewer may come: how many of an
            interrupted request is up to the network.
    """

    def __init__(
        self, limit: int | None = None, report: Callable[[str, int, int], None] | None = None
    ) -> None:
        self.limit = limit
        self.spent = 0
        self.expected = 0
        self._report = report
        self._reported = 0

    def allow(self, name: str, count: int) -> None:
        """Refuse a request that would exceed the limit, before it is made."""
        if self.limit is not None and self.spent + count > self.limit:
            total = (self.spent + count) / 1e6
            raise BadCheckpoint(
                f"{name}: {total:,.1f} MB would be transferred of this checkpoint, and its share "
                f"of the budget is {self.limit / 1e6:,.1f} MB: give a larger one"
            )

    def count(self, name: str, count: int) -> None:
        """Add bytes that came."""
        self.spent += count
        if self._report is not None and self.spent - self._reported >= _REPORT_BYTES:
            self._reported = self.spent
            self._report(name, self.spent, max(self.expected, self.spent))


@dataclass(eq=False)
class _Stretch:
    """Bytes that one request brings, in order."""

    start: int  # of ``data``; it moves on when bytes that were read are dropped
    end: int
    is_kept: bool  # all of it stays in memory
    data: bytearray = field(default_factory=bytearray)

    @property
    def received_end(self) -> int:
        """The byte after the last one that came."""
        return self.start + len(self.data)

    def covers(self, begin: int, end: int) -> bool:
        """True if these bytes have come, or will."""
        return self.start <= begin and end <= self.end

    def drop_before(self, offset: int) -> None:
        """Forget bytes that came and that will not be read again."""
        count = min(offset, self.received_end) - self.start
        del self.data[:count]
        self.start += count


@dataclass
class _Download:
    """An open request."""

    stretch: _Stretch
    chunks: Iterator[bytes]
    resources: ExitStack


class _NoRanges(Exception):
    """The server answers a request for a range with the whole file."""


class HubFile:
    """A file on the hub, as a `Reader`.

    Arguments:
        name: for messages.
        resolve: asks the hub where the file is. An address may expire, so it may be called again.
        download: downloads the whole file.
        meter: counts the bytes.
    """

    is_local = False

    def __init__(
        self,
        name: str,
        resolve: Callable[[], HubLocation],
        download: Callable[[], Path],
        meter: TransferMeter,
    ) -> None:
        self.name = name
        self.suffix = Path(name).suffix
        self._meter = meter
        self._resolve = resolve
        self._location = resolve()
        self._download_file = download
        self.size = self._location.size
        self._downloaded: LocalFile | None = None  # if the server knows no ranges
        self._window = window_size(self.size)
        self._expected: list[_Stretch] = []  # not asked for yet
        self._recent: list[_Stretch] = []  # in memory; the last one is being read
        self._download: _Download | None = None

    def download(self) -> Path:
        return self._download_file()

    def expect(self, spans: Iterable[Span]) -> None:
        """Join spans that lie close together into stretches, which will be one request each."""
        stretches: list[_Stretch] = []
        for begin, end in sorted(set(spans)):
            if begin >= end:
                continue
            if stretches:
                last = stretches[-1]
                joined_end = max(end, last.end)
                is_near = begin <= last.end + GAP_BYTES
                if is_near and joined_end - last.start <= _MAX_JOINED_BYTES:
                    last.end = joined_end
                    continue
            is_kept = end - begin <= _MAX_JOINED_BYTES
            stretches.append(_Stretch(begin, end, is_kept))
        earlier = [*self._expected, *self._recent]
        for stretch in stretches:
            if not any(other.covers(stretch.start, stretch.end) for other in earlier):
                self._expected.append(stretch)
                self._meter.expected += stretch.end - stretch.start

    def fill(self, buffer: memoryview, offset: int) -> None:
        end = offset + len(buffer)
        if end > self.size:
            raise BadCheckpoint(
                f"{self.name} is cut off at byte {self.size:,}; {end:,} are asked for"
            )
        # A large read that was not announced is a stretch of its own; a small one gets a window.
        if len(buffer) >= self._window:
            self.expect([(offset, end)])
        for start in range(0, len(buffer), _BLOCK_BYTES):
            block = buffer[start : start + _BLOCK_BYTES]
            if self._downloaded is None:
                try:
                    self._fill_block(block, offset + start)
                    continue
                except _NoRanges:
                    self._downloaded = LocalFile(self._download_file(), self.name)
            self._downloaded.fill(block, offset + start)

    def _fill_block(self, buffer: memoryview, offset: int) -> None:
        end = offset + len(buffer)
        stretch = None
        for candidate in self._recent:
            if candidate.covers(offset, end):
                stretch = candidate
        if stretch is None:
            stretch = self._next_stretch(offset, end)
        self._receive(stretch, offset, end)
        position = offset - stretch.start
        buffer[:] = memoryview(stretch.data)[position : position + len(buffer)]

    def _next_stretch(self, offset: int, end: int) -> _Stretch:
        """Return the expected stretch that covers these bytes, or a window around them."""
        if self._download is not None:
            current = self._download.stretch
            # What is kept, or nearly complete, is received to its end before the next request.
            if current.is_kept or current.end - current.received_end <= GAP_BYTES:
                self._receive(current, current.start, current.end)
            self._close()
        stretch = None
        for candidate in self._expected:
            if candidate.covers(offset, end):
                stretch = candidate
                break
        if stretch is not None:
            self._expected.remove(stretch)
            if not stretch.is_kept:
                stretch.start = offset  # the bytes before would be dropped at once
        else:
            begin = max(0, min(offset, self.size - self._window))
            window_end = max(end, min(begin + self._window, self.size))
            stretch = _Stretch(begin, window_end, is_kept=True)
            self._meter.expected += stretch.end - stretch.start
        self._recent = [*self._recent[1 - _MAX_STRETCHES :], stretch]
        return stretch

    def _close(self) -> None:
        if self._download is not None:
            self._download.resources.close()
            self._download = None

    def _receive(self, stretch: _Stretch, offset: int, end: int) -> None:
        """Receive a stretch as far as ``end``; bytes before ``offset`` may be dropped."""
        failures = 0
        while stretch.received_end < end:
            if not stretch.is_kept:
                stretch.drop_before(offset)
            if self._download is None or self._download.stretch is not stretch:
                self._close()
                self._download = self._open(stretch)
            try:
                chunk = next(self._download.chunks)
            except Exception as error:  # the connection broke: ask for the rest
                self._close()
                failures += 1
                if failures >= _MAX_FAILURES:
                    raise BadCheckpoint(self._unreadable(error)) from error
                time.sleep(min(_MAX_WAIT, 2.0 ** (failures - 1)))
                continue
            failures = 0
            stretch.data += chunk
            self._meter.count(self.name, len(chunk))
        if stretch.received_end > stretch.end:
            raise BadCheckpoint(f"{self.name}: the hub sent more bytes than were asked for")
        is_complete = stretch.received_end == stretch.end
        if is_complete and self._download is not None and self._download.stretch is stretch:
            self._close()

    def _open(self, stretch: _Stretch) -> _Download:
        """Ask for what is missing of a stretch."""
        first = stretch.received_end
        last = stretch.end - 1
        self._meter.allow(self.name, last + 1 - first)
        resources, response = self._request(first, last)
        if response.status_code in (401, 403):  # the address has expired
            resources.close()
            self._location = self._resolve_again()
            resources, response = self._request(first, last)
        try:
            self._check(response, first, last)
        except BaseException:
            resources.close()
            raise
        return _Download(stretch, response.iter_raw(), resources)

    def _request(self, first: int, last: int) -> tuple[ExitStack, Any]:
        headers = {
            **self._location.headers,
            "Range": f"bytes={first}-{last}",
            "Accept-Encoding": "identity",  # ranges are of the file, not of a compressed answer
        }
        # It asks again by itself, as often as a busy server wants.
        answer = library().utils.http_stream_backoff(
            "GET", self._location.url, headers=headers, follow_redirects=True
        )
        resources = ExitStack()
        try:
            return resources, resources.enter_context(answer)
        except Exception as error:
            raise BadCheckpoint(self._unreadable(error)) from error

    def _check(self, response: Any, first: int, last: int) -> None:
        """Check that an answer is the range that was asked for."""
        status = response.status_code
        is_encoded = response.headers.get("Content-Encoding", "identity") != "identity"
        if status == 200 or (status == 206 and is_encoded):
            raise _NoRanges
        if status != 206:
            raise BadCheckpoint(f"{self.name} cannot be read from the hub: it answers {status}")
        answered = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(answered.strip())
        is_asked_for = match is not None and (int(match[1]), int(match[2])) == (first, last)
        if match is None or not is_asked_for or match[3] not in ("*", str(self.size)):
            raise BadCheckpoint(
                f"{self.name}: bytes {first}-{last} of {self.size} were asked for, and the hub "
                f"sent {answered or 'a part that it does not name'}: refused"
            )

    def _resolve_again(self) -> HubLocation:
        location = self._resolve()
        if (location.size, location.etag) != (self._location.size, self._location.etag):
            raise BadCheckpoint(f"{self.name} changed on the hub while it was read: scan it again")
        return location

    def _unreadable(self, error: Exception) -> str:
        first_line = next(iter(str(error).splitlines()), "")
        reason = first_line[:200] or type(error).__name__
        return f"{self.name} cannot be read from the hub: {reason}; try again"


class CachedFile(HubFile):
    """A file on this machine whose reads are counted as if they were requests to the hub.

    An estimate reads through it, so that it does not depend on what is in the cache.

    Arguments:
        name: for messages.
        path: the file.
        download: called instead of a download of the whole file.
        meter: counts the bytes.
    """

    def __init__(
        self, name: str, path: Path, download: Callable[[], Path], meter: TransferMeter
    ) -> None:
        self._path = path
        super().__init__(name, self._local_location, download, meter)

    def _local_location(self) -> HubLocation:
        return HubLocation(str(self._path), {}, self._path.stat().st_size)

    def _open(self, stretch: _Stretch) -> _Download:
        with self._path.open("rb") as file:
            file.seek(stretch.received_end)
            content = file.read(stretch.end - stretch.received_end)
        return _Download(stretch, iter([content]), ExitStack())


def window_size(file_size: int) -> int:
    """Return the bytes that a small read fetches of a file if it was not announced."""
    return min(max(_MIN_WINDOW, file_size // _WINDOWS_PER_FILE), _MAX_WINDOW)


def locate(url: str, commit: str | None) -> tuple[HubLocation, str]:
    """Return where the hub has a file, and its commit; refuse another commit than asked for."""
    hf = library()
    metadata = hf.get_hf_file_metadata(url, retry_on_errors=True)
    actual_commit = metadata.commit_hash or commit
    if actual_commit is None or (commit is not None and actual_commit != commit):
        raise BadCheckpoint(
            f"the hub gives {url} of commit {actual_commit or 'unknown'} instead of "
            f"{commit or 'a known one'}"
        )
    if metadata.size is None:
        raise BadCheckpoint(f"the hub does not tell the size of {url}")
    headers = hf.utils.build_hf_headers()
    # The token is for the hub, not for the servers where it stores files.
    if urlsplit(metadata.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)
    location = HubLocation(metadata.location, headers, int(metadata.size), metadata.etag)
    return location, actual_commit
