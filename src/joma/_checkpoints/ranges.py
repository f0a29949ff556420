"""A file on the hub as a `Reader`: HTTP ranges, one request for each stretch of neighbouring bytes that is expected.

An answer counts only if it is 206 and its ``Content-Range`` is the one asked for: a server that ignores ``Range``
would otherwise give the bytes of another place. Such a server's files are downloaded whole.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from joma._checkpoints.hub import library
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Span

GAP = 512 << 10  # bytes that are fetched and thrown away rather than asking twice
_KEPT = 16 << 20  # longest stretch of several spans
_WINDOW = (64 << 10, 1 << 20)  # least and most of what a small read that nobody expected fetches
_HELD = 4  # stretches in memory
_TRIES = 5  # in a row, without a byte in between
_BLOCK = 4 << 20  # bytes that are given out at a time
_SAID = 1 << 20  # bytes from one report to the next


@dataclass(frozen=True)
class Place:
    """A file on the hub, resolved: where its bytes are, and what they are known by."""

    url: str
    headers: dict[str, str]
    size: int
    etag: str | None = None


class Meter:
    """Bytes over the wire, counted and limited: those that were ``spent``, and those that are ``expected`` in all.

    Of a stretch that was asked for, more or fewer bytes may have come: how many is up to the network.

    Arguments:
        limit: how many there may be; no limit if None.
        report: called with the file, bytes so far and bytes in all.
    """

    def __init__(
        self, limit: int | None = None, report: Callable[[str, int, int], None] | None = None
    ) -> None:
        self.limit, self.spent, self.expected = limit, 0, 0
        self._report, self._said = report, 0

    def allow(self, name: str, count: int) -> None:
        """Refuse what would go over the limit, before it is asked for."""
        if self.limit is not None and self.spent + count > self.limit:
            raise BadCheckpoint(
                f"{name}: {(self.spent + count) / 1e6:,.1f} MB would be transferred of this checkpoint, and its share "
                f"of the budget is {self.limit / 1e6:,.1f} MB: give a larger one"
            )

    def count(self, name: str, count: int) -> None:
        """So many bytes came."""
        self.spent += count
        if self._report is not None and self.spent - self._said >= _SAID:
            self._said = self.spent
            self._report(name, self.spent, max(self.expected, self.spent))


@dataclass(eq=False)
class _Stretch:
    """Bytes that one request brings, in order; ``data`` are those from ``start`` on that have come and are kept."""

    start: int
    end: int
    kept: bool  # all of it stays in memory; of a long one, what was passed is dropped
    data: bytearray = field(default_factory=bytearray)

    @property
    def come(self) -> int:
        """How far it has come."""
        return self.start + len(self.data)

    def holds(self, begin: int, end: int) -> bool:
        """Whether these bytes have come, or will."""
        return self.start <= begin and end <= self.end


class HubFile:
    """A file on the hub, read by ranges.

    Arguments:
        name: for messages.
        resolve: asks the hub where the file is: an address may expire.
        whole: downloads the file.
        meter: counts the bytes.
    """

    def __init__(
        self, name: str, resolve: Callable[[], Place], whole: Callable[[], Path], meter: Meter
    ) -> None:
        self.name, self.suffix, self._meter = name, Path(name).suffix, meter
        self._resolve, self._place, self._download = resolve, resolve(), whole
        self.size = self._place.size
        self._local: LocalFile | None = None  # of a server that knows no ranges
        self._window = window_size(self.size)
        self._expected: list[_Stretch] = []  # not asked for yet
        self._held: list[_Stretch] = []  # come, or coming: the last is being read
        self._stream: tuple[_Stretch, Iterator[bytes], ExitStack] | None = None

    def whole(self) -> Path:
        """The file, downloaded."""
        return self._download()

    def expect(self, spans: Iterable[Span]) -> None:
        """Spans that lie close together become one stretch."""
        stretches: list[_Stretch] = []
        for begin, end in sorted(span for span in set(spans) if span[0] < span[1]):
            last = stretches[-1] if stretches else None
            if last and begin <= last.end + GAP and max(end, last.end) - last.start <= _KEPT:
                last.end = max(end, last.end)
            else:
                stretches.append(_Stretch(begin, end, kept=end - begin <= _KEPT))
        known = [*self._expected, *self._held]
        new = [s for s in stretches if not any(other.holds(s.start, s.end) for other in known)]
        self._expected += new
        self._meter.expected += sum(stretch.end - stretch.start for stretch in new)

    def fill(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from what has come, from the stretch that is expected there, or from a request of its own."""
        end = offset + len(buffer)
        if end > self.size:
            raise BadCheckpoint(
                f"{self.name} is cut off at byte {self.size:,}; {end:,} are asked for"
            )
        if len(buffer) >= self._window:
            self.expect([(offset, end)])
        for at in range(0, len(buffer), _BLOCK):
            part = buffer[at : at + _BLOCK]
            if self._local is not None or not self._fill(part, offset + at):
                assert self._local is not None
                self._local.fill(part, offset + at)

    def _fill(self, buffer: memoryview, offset: int) -> bool:
        """False if it turns out that the server knows no ranges."""
        end = offset + len(buffer)
        stretch = next((held for held in reversed(self._held) if held.holds(offset, end)), None)
        stretch = self._next(offset, end) if stretch is None else stretch
        if not self._advance(stretch, offset, end):
            return False
        at = offset - stretch.start
        buffer[:] = memoryview(stretch.data)[at : at + len(buffer)]
        return True

    def _next(self, offset: int, end: int) -> _Stretch:
        """The stretch that holds these bytes, before it is asked for; of what nobody expected, a window around them."""
        if self._stream is not None:
            coming = self._stream[0]
            if coming.kept or coming.end - coming.come <= GAP:  # comes to its end first
                self._advance(coming, coming.start, coming.end)
            self._close()
        stretch = next(
            (expected for expected in self._expected if expected.holds(offset, end)), None
        )
        if stretch is not None:
            self._expected.remove(stretch)
            stretch.start = stretch.start if stretch.kept else offset
        else:
            begin = max(0, min(offset, self.size - self._window))
            stretch = _Stretch(begin, max(end, min(begin + self._window, self.size)), kept=True)
            self._meter.expected += stretch.end - stretch.start
        self._held = [*self._held[1 - _HELD :], stretch]
        return stretch

    def _close(self) -> None:
        if self._stream is not None:
            self._stream[2].close()
            self._stream = None

    def _advance(self, stretch: _Stretch, offset: int, end: int) -> bool:
        """Let a stretch come as far as ``end``; False if the server knows no ranges."""
        tries = 0
        while stretch.come < end:
            if not stretch.kept:
                passed = min(offset, stretch.come) - stretch.start
                del stretch.data[:passed]
                stretch.start += passed
            if self._stream is None or self._stream[0] is not stretch:
                self._close()
                if not self._open(stretch):
                    return False
            assert self._stream is not None
            try:
                chunk = next(self._stream[1])
            except Exception as error:  # a connection that broke: go on where it was
                self._close()
                tries += 1
                if tries >= _TRIES:
                    raise BadCheckpoint(self._unread(error)) from error
                time.sleep(min(8.0, 2.0 ** (tries - 1)))
                continue
            tries = 0
            stretch.data += chunk
            self._meter.count(self.name, len(chunk))
        if stretch.come > stretch.end:
            raise BadCheckpoint(f"{self.name}: the hub sent more bytes than were asked for")
        if stretch.come == stretch.end and self._stream is not None and self._stream[0] is stretch:
            self._close()
        return True

    def _open(self, stretch: _Stretch) -> bool:
        """Ask for what is missing of a stretch."""
        first, last = stretch.come, stretch.end - 1
        self._meter.allow(self.name, last + 1 - first)
        for again in (False, True):
            headers = {
                **self._place.headers,
                "Range": f"bytes={first}-{last}",
                "Accept-Encoding": "identity",
            }
            stack = ExitStack()
            answer = library().utils.http_stream_backoff(
                "GET", self._place.url, headers=headers, follow_redirects=True
            )
            try:  # it asks again by itself, as often as a busy server wants
                response = stack.enter_context(answer)
            except Exception as error:
                raise BadCheckpoint(self._unread(error)) from error
            if response.status_code in (401, 403) and not again:  # the address has expired
                stack.close()
                self._place = self._same(self._resolve())
                continue
            break
        encoded = response.headers.get("Content-Encoding", "identity") != "identity"
        if response.status_code == 200 or (response.status_code == 206 and encoded):
            stack.close()
            self._local = LocalFile(self._download(), self.name)
            return False
        if response.status_code != 206:
            stack.close()
            raise BadCheckpoint(
                f"{self.name} cannot be read from the hub: it answers {response.status_code}"
            )
        said = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", said.strip())
        if (
            match is None
            or (int(match[1]), int(match[2])) != (first, last)
            or match[3] not in ("*", str(self.size))
        ):
            stack.close()
            raise BadCheckpoint(
                f"{self.name}: bytes {first}-{last} of {self.size} were asked for, and the hub sent "
                f"{said or 'a part that it does not name'}: refused"
            )
        self._stream = stretch, response.iter_raw(), stack
        return True

    def _unread(self, error: Exception) -> str:
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return f"{self.name} cannot be read from the hub: {said}; try again"

    def _same(self, place: Place) -> Place:
        if (place.size, place.etag) != (self._place.size, self._place.etag):
            raise BadCheckpoint(f"{self.name} changed on the hub while it was read: scan it again")
        return place


class CachedFile(HubFile):
    """A file on this machine whose reads are counted as if they were requests to the hub.

    An estimate reads through it, so that the estimate does not depend on what is in the cache.

    Arguments:
        name: for messages.
        path: the file.
        whole: called instead of a download of the whole file.
        meter: counts the bytes.
    """

    def __init__(self, name: str, path: Path, whole: Callable[[], Path], meter: Meter) -> None:
        self._path = path
        super().__init__(name, self._local_place, whole, meter)

    def _local_place(self) -> Place:
        return Place(str(self._path), {}, self._path.stat().st_size)

    def _open(self, stretch: _Stretch) -> bool:
        with self._path.open("rb") as file:
            file.seek(stretch.come)
            content = file.read(stretch.end - stretch.come)
        self._stream = stretch, iter([content]), ExitStack()
        return True


def window_size(file_size: int) -> int:
    """Return the bytes that a small unexpected read fetches of a file: its header is most often in them."""
    return min(max(_WINDOW[0], file_size // 2048), _WINDOW[1])


def resolved(url: str, commit: str | None) -> tuple[Place, str]:
    """Where the hub has a file, and the commit it is of; another commit than asked for is refused."""
    hf = library()
    about = hf.get_hf_file_metadata(url, retry_on_errors=True)
    of = about.commit_hash or commit
    if of is None or (commit is not None and of != commit):
        raise BadCheckpoint(
            f"the hub gives {url} of commit {of or 'unknown'} instead of {commit or 'a known one'}"
        )
    if about.size is None:
        raise BadCheckpoint(f"the hub does not tell the size of {url}")
    headers = hf.utils.build_hf_headers()
    if _host(about.location) != _host(url):
        headers.pop("authorization", None)  # for the hub only, not for where it stores files
    return Place(about.location, headers, int(about.size), about.etag), of


def _host(url: str) -> str:
    return urlsplit(url).netloc
