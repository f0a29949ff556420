"""A server that speaks as much of the hub's protocol as joma needs: refs, trees with hashes, files with ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Hub:
    """Revisions are folders; what was asked for is in ``log``, one name per answer with a file in it."""

    def __init__(self, repo: str, revisions: dict[str, Path]) -> None:
        self.repo, self.revisions = repo, revisions
        self.log: list[str] = []
        self.heads = 0
        self.sent = 0  # bytes of files
        self.refuses = 0  # a status to answer everything with
        self.ranges = True  # whether Range is honoured
        self.stored = (
            False  # whether files of weights are stored elsewhere, under addresses that expire
        )
        self.fresh = 0  # the addresses that are good
        self.busy: list[int] = []  # statuses of the next answers for files of weights
        self.breaks = 0  # so many of the next answers end after half of their bytes
        self.lies = 0  # bytes that a range's beginning is off by
        self.piece = 1 << 16  # bytes that are sent at a time
        self.pause = 0.0  # seconds before each piece

    @contextmanager
    def serving(self) -> Iterator[str]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(head=True)

            def do_GET(self) -> None:
                self.answer(head=False)

            def answer(self, head: bool) -> None:
                if hub.refuses:
                    return self.send(hub.refuses, b"", {})
                path = self.path.partition("?")[0]
                path = path.strip("/")
                if path.startswith("stored/"):
                    _, number, revision, name = path.split("/", 3)
                    if int(number) != hub.fresh:
                        return self.send(403, b"expired", {})
                    return self.file(revision, name, head, {})
                if not path.startswith((f"api/models/{hub.repo}", f"{hub.repo}/resolve/")):
                    return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
                if path.startswith("api/"):
                    return self.api(path.removeprefix(f"api/models/{hub.repo}").strip("/"))
                revision, _, name = path.removeprefix(f"{hub.repo}/resolve/").partition("/")
                if (revision := hub.name(revision)) not in hub.revisions:
                    return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                file, facts = hub.revisions[revision] / name, {"X-Repo-Commit": commit(revision)}
                if not file.is_file():
                    return self.send(404, b"", {**facts, "X-Error-Code": "EntryNotFound"})
                if hub.stored and weights(file):
                    hub.heads += head
                    facts |= {
                        "X-Linked-Size": str(file.stat().st_size),
                        "X-Linked-Etag": f'"{sha256(file)}"',
                    }
                    host = self.headers["Host"].replace("127.0.0.1", "localhost")
                    where = f"http://{host}/stored/{hub.fresh}/{revision}/{name}"
                    return self.send(302, b"", {**facts, "Location": where})
                return self.file(revision, name, head, facts)

            def api(self, rest: str) -> None:
                if rest == "refs":
                    branches = [
                        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit(name)}
                        for name in hub.revisions
                    ]
                    return self.json({"branches": branches, "converts": [], "tags": []})
                if rest.startswith("tree/"):
                    revision = hub.name(rest.split("/")[1])
                    if revision not in hub.revisions:
                        return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                    return self.json(
                        [entry(file) for file in sorted(hub.revisions[revision].iterdir())]
                    )
                if rest.startswith("revision/"):
                    revision = hub.name(rest.split("/")[1])
                    if revision not in hub.revisions:
                        return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                    return self.json({"id": hub.repo, "sha": commit(revision)})
                return self.json({"id": hub.repo})

            def file(self, revision: str, name: str, head: bool, facts: dict[str, str]) -> None:
                file = hub.revisions[revision] / name
                size, status = file.stat().st_size, 200
                facts = facts | {"ETag": f'"{sha256(file)}"', "Accept-Ranges": "bytes"}
                first, last = 0, size - 1
                if not head:
                    if hub.busy and weights(file):
                        return self.send(hub.busy.pop(0), b"", {"Retry-After": "0"})
                    hub.log.append(f"{revision}/{name}")
                    asked = self.headers.get("Range", "") if hub.ranges else ""
                    if asked:
                        first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
                        first, status = first + hub.lies, 206
                        facts["Content-Range"] = f"bytes {first}-{last}/{size}"
                else:
                    hub.heads += weights(file)
                self.send_response(status)
                for key, value in {**facts, "Content-Length": str(last + 1 - first)}.items():
                    self.send_header(key, value)
                self.end_headers()
                if head:
                    return
                count = last + 1 - first
                if hub.breaks and weights(file):
                    hub.breaks -= 1
                    count //= 2
                    self.close_connection = True
                with file.open("rb") as stream:
                    stream.seek(first)
                    while count:
                        if hub.pause:
                            threading.Event().wait(hub.pause)  # tests replace time.sleep
                        part = stream.read(min(hub.piece, count))
                        hub.sent += len(
                            part
                        )  # before they arrive, so that who has them finds them counted
                        try:
                            self.wfile.write(part)
                        except OSError:  # the other side has left
                            hub.sent -= len(part)
                            self.close_connection = True
                            return
                        count -= len(part)

            def json(self, body: object) -> None:
                self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

            def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def name(self, revision: str) -> str:
        """The branch of a commit."""
        return {commit(key): key for key in self.revisions}.get(revision, revision)


def commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".gguf", ".distcp")


def entry(file: Path) -> dict[str, object]:
    """A file as the hub's API lists it: those of weights are in its large-file storage, with their hashes."""
    size = file.stat().st_size
    fields: dict[str, object] = {
        "type": "file",
        "path": file.name,
        "size": size,
        "oid": sha256(file)[:40],
    }
    if weights(file):
        fields["lfs"] = {"oid": sha256(file), "size": size, "pointerSize": 134}
    return fields


def sha256(file: Path) -> str:
    state = file.stat()
    return _sha256(str(file), state.st_size, state.st_mtime_ns)


@cache
def _sha256(file: str, size: int, time: int) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
