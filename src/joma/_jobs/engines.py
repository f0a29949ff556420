"""Where exhibits are made: processes on this machine, or tasks on a Ray cluster.

Each piece of work has a process of its own, and always one thread: the last bits of a result may depend on how many
there are. A process that dies takes no other with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Protocol

from joma._exhibits.base import Exhibit, Progress, reproduce

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
# imported once, in the process that the others are forked from
_PRELOAD = ("torch", "pandas", "altair", "vl_convert", "scipy.integrate", "scipy.stats", "joma._figures.style")
_GRACE = 10.0  # seconds in which an interrupted process must have cleaned up


@dataclass(frozen=True)
class Task:
    """One piece of work: an exhibit, or all claims."""

    exhibit: Exhibit | None
    preset: str
    out: Path  # absolute
    seed: int
    force: bool

    @property
    def id(self) -> str:
        """The exhibit's, or "claims"."""
        return self.exhibit.id if self.exhibit else "claims"


@dataclass(frozen=True)
class Event:
    """What became known about a task: ``progress``, ``done`` (with what was made) or ``failed``."""

    id: str
    kind: str
    share: float = 0.0
    text: str = ""  # what is being done, or what went wrong
    details: str = ""  # the traceback
    value: Any = None


class Engine(Protocol):
    """Starts tasks and tells of them."""

    workers: int

    def start(self, task: Task) -> None:
        """Start a task."""

    def events(self, timeout: float) -> list[Event]:
        """What has happened; waits for ``timeout`` seconds at most."""

    def stop(self) -> None:
        """End what runs, cleanly if it lets us."""


def work(task: Task, progress: Progress) -> Any:
    """Do a task here and now: an `Outcome`, or the results of the claims."""
    if task.exhibit is not None:
        return reproduce(task.exhibit, task.preset, task.out, task.seed, force=task.force, progress=progress)
    from joma.theory import claims as registry

    results = []
    chosen = registry.claims()
    for n, claim in enumerate(chosen):
        progress(n / len(chosen), claim.id)
        results.append(registry.check(claim))
    return results


def _seldom(progress: Progress, every: float) -> Progress:
    last = -every

    def sometimes(share: float, what: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= every:
            last = now
            progress(share, what)

    return sometimes


def _failure(id: str, error: BaseException) -> Event:
    words = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
    return Event(id, "failed", text=text, details=traceback.format_exc())


def _attempt(task: Task, progress: Progress) -> Event:
    """Whatever happens is an event."""
    os.environ.update(ONE_THREAD)
    try:
        import torch

        torch.set_num_threads(1)
        return Event(task.id, "done", value=work(task, progress))
    except Exception as error:
        return _failure(task.id, error)


class Processes:
    """One process a task, forked from one that has the large libraries loaded."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))
        self._running: dict[Any, tuple[str, ForkServerProcess]] = {}

    def start(self, task: Task) -> None:
        """Start a task."""
        receive, send = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_child, args=(send, task))
        with _environment(ONE_THREAD):  # read by libraries when they are loaded
            process.start()
        send.close()
        self._running[receive] = task.id, process

    def events(self, timeout: float) -> list[Event]:
        """What has happened; waits for ``timeout`` seconds at most."""
        found: list[Event] = []
        pipes: list[Any] = connection.wait(list(self._running), timeout)
        for pipe in pipes:
            id, process = self._running[pipe]
            try:
                event = pipe.recv()
            except (EOFError, OSError):
                process.join()
                event = Event(id, "failed", text=_death(process.exitcode))
            if event.kind != "progress":
                process.join()
                del self._running[pipe]
                pipe.close()
            found.append(event)
        return found

    def stop(self) -> None:
        """Interrupt what runs and wait for it; kill what does not listen."""
        for _, process in self._running.values():
            process.terminate()
        until = time.monotonic() + _GRACE
        for _, process in self._running.values():
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._running.clear()


def _child(send: Any, task: Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us: the parent decides
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:

        def progress(share: float, what: str) -> None:
            send.send(Event(task.id, "progress", share, what))  # fails where the parent is gone: nobody waits

        event = _attempt(task, _seldom(progress, 0.1))
        with suppress(OSError):
            send.send(event)
    except KeyboardInterrupt:
        pass


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = "; was there too little memory? Try --jobs 1" if -code == signal.SIGKILL else ""
        return f"its process was killed ({name}){hint}"
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


class Cluster:
    """Tasks on a Ray cluster; the output folder must be one that all its machines see."""

    def __init__(self, address: str | None, workers: int | None) -> None:
        from joma._jobs.cluster import cluster

        self._stack = ExitStack()
        self._ray = self._stack.enter_context(cluster(address))
        from ray.util.queue import Queue

        self.workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._queue = Queue(actor_options={"num_cpus": 0})
        self._work = self._ray.remote(num_cpus=1, max_retries=0)(_remote)
        self._running: dict[Any, str] = {}

    def start(self, task: Task) -> None:
        """Start a task."""
        self._running[self._work.remote(self._queue, task)] = task.id

    def events(self, timeout: float) -> list[Event]:
        """What has happened; waits for ``timeout`` seconds at most."""
        ready, _ = self._ray.wait(list(self._running), timeout=timeout)
        found: list[Event] = self._queue.get_nowait_batch(self._queue.qsize())
        found = [event for event in found if event.id in self._running.values()]
        for reference in ready:
            id = self._running.pop(reference)
            try:
                found.append(self._ray.get(reference))
            except Exception as error:  # its worker died
                found.append(_failure(id, error))
        return found

    def stop(self) -> None:
        """Interrupt what runs; leave the cluster."""
        for reference in self._running:
            self._ray.cancel(reference)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_GRACE)
        self._running.clear()
        self._stack.close()


def _remote(queue: Any, task: Task) -> Event:
    return _attempt(task, _seldom(lambda share, what: queue.put(Event(task.id, "progress", share, what)), 1.0))
