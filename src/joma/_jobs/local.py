"""Jobs in processes of this machine: one process per job, or a pool that does one job after the other.

Each worker has a pipe, and a sentinel that the system sets when the process ends, however it does: `LocalEngine.wait`
looks at both, in the caller's thread. So there is no thread that could die unnoticed, and nothing is waited for that
cannot come any more.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import connection
from types import ModuleType
from typing import Any

from joma._jobs.base import (
    Job,
    JobEnd,
    Progress,
    attempt_in_worker,
    failure,
    read_end,
    thread_variables,
    use_threads,
)
from joma._jobs.machine import memory

_PROGRESS, _END, _GONE = (
    "progress",
    "end",
    "gone",
)  # what comes out of a pipe: two kinds of messages, or its end
_GRACE = 10.0  # seconds in which an interrupted process must have cleaned up
_EVERY = 0.1  # seconds between two messages of progress
_GROWTH = 500e6  # bytes that a worker of a pool may grow after its first job before another takes its place


class LocalEngine:
    """Workers on this machine, forked (where the system can) from a process that has the large libraries loaded."""

    def __init__(
        self, workers: int, *, reuse: bool = False, threads: int = 1, preload: tuple[str, ...] = ()
    ) -> None:
        self.workers, self._reuse, self._threads, self._preload = workers, reuse, threads, preload
        self._running: dict[str, _Worker] = {}
        self._idle: list[_Worker] = []
        self._leaving: list[_Worker] = []  # told to end; nobody waits for them
        self._ends: list[JobEnd] = []  # of jobs that could not even be started

    def start(self, job: Job) -> None:
        """Give a job to a worker."""
        try:
            payload = pickle.dumps(job)
        except Exception as error:
            self._ends.append(failure(job.id, error))
            return
        try:
            worker = self._worker()
        except Exception as error:  # no process to be had: too little memory, too many open files
            self._ends.append(failure(job.id, error, died=True))
            return
        self._running[job.id] = worker
        with suppress(OSError):  # it has just died: `wait` will see it
            worker.pipe.send_bytes(payload)

    def _worker(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.is_alive():
                return worker
            worker.leave()
        return _Worker(self._threads, self._preload)

    def wait(self, timeout: float, progress: Callable[[str, float, str], None]) -> list[JobEnd]:
        """The jobs that have ended; waits for ``timeout`` seconds at most."""
        ends, self._ends = self._ends, []
        signs: list[Any] = [
            sign
            for worker in self._running.values()
            for sign in (worker.pipe, worker.process.sentinel)
        ]
        ready = connection.wait(signs, 0.0 if ends else timeout)
        for id, worker in list(self._running.items()):
            if worker.pipe in ready or worker.process.sentinel in ready:
                end = worker.read(id, partial(progress, id))
                if end is not None:
                    del self._running[id]
                    self._release(worker, end)
                    ends.append(end)
        self._leaving = [worker for worker in self._leaving if worker.process.is_alive()]
        return ends

    def _release(self, worker: _Worker, end: JobEnd) -> None:
        if self._reuse and not end.died and worker.growth <= _GROWTH:
            self._idle.append(worker)
        else:
            worker.leave()
            self._leaving.append(worker)

    def stop(self) -> None:
        """Interrupt what runs and wait for it; kill what does not listen."""
        workers = [*self._running.values(), *self._idle, *self._leaving]
        try:
            for worker in self._running.values():
                worker.process.terminate()
            for worker in workers:
                worker.leave()
            until = time.monotonic() + _GRACE
            for worker in workers:
                worker.process.join(max(0.0, until - time.monotonic()))
        finally:  # also if Ctrl-C is pressed once more
            for worker in workers:
                worker.process.kill()
                worker.process.join(_GRACE)
            self._running, self._idle, self._leaving = {}, [], []


class _Worker:
    """A process, and our end of the pipe to it."""

    growth = 0  # bytes since its first job

    def __init__(self, threads: int, preload: tuple[str, ...]) -> None:
        method = (
            "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        )
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["joma._jobs.preload"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, dict(os.environ), threads))
        self._first: int | None = None
        loading = {**thread_variables(1), "JOMA_PRELOAD": ",".join(preload)}
        try:
            with _environment(loading), _hidden_main():
                self.process.start()
        finally:
            theirs.close()

    def read(self, id: str, progress: Progress) -> JobEnd | None:
        """Pass on the progress of the job; its ending, or None if it goes on."""
        alive = (
            self.process.is_alive()
        )  # asked first: what the process sent before its end is in the pipe by then
        while (message := self._message()) is not None:
            kind, content = message
            if kind == _END:
                end, memory_now = content
                self._first = memory_now if self._first is None else self._first
                self.growth = memory_now - self._first
                return read_end(id, end)
            if kind == _GONE:
                alive = False
                break
            progress(*content)
        if alive:
            return None
        self.process.join(_GRACE)
        self.process.kill()  # one that has closed its pipe and goes on
        return JobEnd(id, error=_death(self.process.exitcode), died=True)

    def _message(self) -> tuple[str, Any] | None:
        """What the process has sent, None if there is nothing."""
        try:
            return self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError):
            return _GONE, None

    def leave(self) -> None:
        """Close the pipe: an idle worker ends by that."""
        self.pipe.close()


def _serve(pipe: connection.Connection, environment: dict[str, str], threads: int) -> None:
    """A worker's life: jobs come and endings go through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us: the parent decides
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.clear()  # it is that of the process we are forked from
    os.environ.update(environment)
    use_threads(threads)

    def progress(share: float, what: str) -> None:
        pipe.send((_PROGRESS, (share, what)))  # fails where the parent is gone: nobody waits

    with suppress(KeyboardInterrupt, EOFError, OSError):  # interrupted, or nobody is there any more
        while True:
            end = attempt_in_worker(pipe.recv_bytes(), progress, _EVERY)
            pipe.send((_END, (end, memory())))


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        hint = (
            "; was there too little memory? Run fewer at a time" if -code == signal.SIGKILL else ""
        )
        return f"its process was killed ({signal.Signals(-code).name}){hint}"
    return f"its process ended with status {code}"


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep new processes from running the main script once more: it may start jobs outside of ``if __name__ == …``."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
