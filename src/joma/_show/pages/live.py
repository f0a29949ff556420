"""``joma report --live``: the page of runs in training, served to this machine only, made anew when there is more.

Nothing is written, and no lock is taken: the server reads what the training has written, when a browser asks for it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from joma._runs import Run, RunError
from joma._show.pages.document import Page
from joma._show.pages.render import STATUS, render
from joma._show.pages.runs import check_clock, collect, runs_page

HOST = "127.0.0.1"
EVERY = 3.0  # seconds between two pages at least, and between two requests of the browser
FILES = ("run.json", "metrics.jsonl", "alerts.jsonl", "patterns.json")


class LivePage:
    """The page as it is now; made when asked for, and at most every so many seconds.

    Attributes:
        version: of the page that was made last; it changes with the files of the runs.
        done: whether all runs have ended.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        title: str | None = None,
        *,
        clock: bool = False,
        every: float = EVERY,
    ) -> None:
        self._paths = list(paths)
        self._title = title
        self._clock = clock
        self._every = every
        self._lock = threading.Lock()
        self._text = ""
        self._made = -float("inf")
        self.version = ""
        self.done = False
        self._refresh()  # an error now is the caller's

    def current(self) -> tuple[str, str]:
        """Return version and text, made anew if the runs have changed and the last page is old enough."""
        with self._lock:
            if time.monotonic() - self._made >= self._every:
                try:
                    self._refresh()
                except (RunError, OSError, ValueError):
                    # A run is being replaced: the last page stays.
                    self._made = time.monotonic()
            return self.version, self._text

    def _refresh(self) -> None:
        runs = collect(self._paths)
        version = _version(runs)
        if version != self.version:
            if self._clock:
                check_clock(runs)
            page = Page(self._paths[0] / "live.html", live=True)  # nothing is written there
            self.done = all(run.status != "running" for run in runs)
            header = render(
                "live.html", version=version, runs=[_state(run) for run in runs], every=self._every
            )
            self._text = runs_page(page, runs, self._title, self._clock, header)
            self.version = version
        self._made = time.monotonic()


def _version(runs: Sequence[Run]) -> str:
    """Return a hash of the sizes and times of the files that a page is made from, and of the states of the runs."""
    digest = hashlib.sha256()
    for run in runs:
        digest.update(run.status.encode())  # a kill changes no file
        for path in (run.path, *run.members):
            for name in FILES:
                file = path / name
                facts = None
                if file.exists():
                    facts = (file.stat().st_size, file.stat().st_mtime_ns)
                digest.update(f"{file}{facts}".encode())
    return digest.hexdigest()[:16]


def _state(run: Run) -> dict[str, str]:
    """The name of a run, its status, and when it last wrote."""
    metrics = run.path / "metrics.jsonl"
    written = ""
    if metrics.exists():
        written = datetime.fromtimestamp(metrics.stat().st_mtime).strftime("%H:%M:%S")
    state = run.state
    return {
        "name": str(run.info.get("name") or run.path.name),
        "status": state.status,
        "tone": STATUS.get(state.status, "fair"),
        "written": written,
        "remark": state.remark,
    }


class Server(ThreadingHTTPServer):
    """Serves one page, and its version, on the loopback address; anything else is not found."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page = page
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunError(
                f"cannot serve on port {port} ({reason}): give another --port, or 0 for a free one"
            ) from None
        self.url = f"http://{HOST}:{self.server_port}/"
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that went away in the middle of an answer is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # a page of another site that had its name resolved to this machine has another Host
        if self.headers.get("Host") not in self.server.names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"This is {self.server.url}\n")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.page.current()[1])
        elif self.path == "/version":
            self._answer(HTTPStatus.OK, "text/plain", self.server.page.current()[0])
        else:
            self._answer(
                HTTPStatus.NOT_FOUND, "text/plain", f"There is nothing but {self.server.url}\n"
            )

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal is for what matters."""


def wait_for(paths: Sequence[Path], say: Callable[[str], None], pause: float = 1.0) -> None:
    """Return when there is a run in each of these folders; say once which one is waited for."""
    for path in paths:
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file: name the folder of a run")
        has_spoken = False
        while True:
            try:
                collect([path])
                break
            except RunError:
                if (path / "run.json").exists():  # there is a run, and it is damaged
                    raise
            if not has_spoken:
                say(f"waiting for a run in {path} (Ctrl-C to give up)")
            has_spoken = True
            time.sleep(pause)


def serve(
    paths: Sequence[Path], title: str | None = None, *, port: int = 0, clock: bool = False,
    say: Callable[[str], None] = print, ready: Callable[[str], None] = lambda url: None,
) -> None:  # fmt: skip
    """Serve the page of these runs until Ctrl-C.

    Arguments:
        paths: run folders, or folders of them; waited for if they are not there yet.
        title: the heading.
        port: of this machine; 0 for any that is free.
        clock: draw over τ instead of steps.
        say: prints a line for the user.
        ready: called with the address.
    """
    if not 0 <= port <= 65535:
        raise ValueError(
            f"port {port} is none: give one from 1 to 65535, or 0 for any that is free"
        )
    try:
        wait_for(paths, say)
        with Server(LivePage(paths, title, clock=clock), port) as server:
            say(f"live page: {server.url} (Ctrl-C ends it; the training does not notice)")
            if server.page.done:
                say("the run is over: the page will not change, unless it is resumed")
            ready(server.url)
            server.serve_forever()
    except KeyboardInterrupt:
        say("ended; the page in the browser stays as it is")
