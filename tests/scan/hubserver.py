"""A server that speaks as much of the hub's protocol as downloads need: refs, model info, files with ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Hub:
    """Revisions are folders; what was asked for is in ``log``."""

    def __init__(self, repo: str, revisions: dict[str, Path]) -> None:
        self.repo, self.revisions = repo, revisions
        self.log: list[str] = []
        self.sent = 0
        self.refuses = 0  # a status to answer everything with

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
                path = self.path.split("?")[0].strip("/")
                if not path.startswith((f"api/models/{hub.repo}", f"{hub.repo}/resolve/")):
                    return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
                if path.startswith("api/"):
                    rest = path.removeprefix(f"api/models/{hub.repo}").strip("/")
                    branches = [
                        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit(name)}
                        for name in hub.revisions
                    ]
                    body = {"branches": branches, "converts": [], "tags": []} if rest == "refs" else {"id": hub.repo}
                    return self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
                revision, _, name = path.removeprefix(f"{hub.repo}/resolve/").partition("/")
                by_commit = {commit(key): key for key in hub.revisions}
                revision = by_commit.get(revision, revision)
                if revision not in hub.revisions:
                    return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
                file = hub.revisions[revision] / name
                facts = {"X-Repo-Commit": commit(revision)}
                if not file.is_file():
                    return self.send(404, b"", {**facts, "X-Error-Code": "EntryNotFound"})
                data = file.read_bytes()
                facts |= {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
                if not head:
                    hub.log.append(f"{revision}/{name}")
                    hub.sent += len(data)
                return self.send(200, data, facts, head)

            def send(self, status: int, body: bytes, headers: dict[str, str], head: bool = False) -> None:
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if not head and self.command != "HEAD":
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


def commit(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()
