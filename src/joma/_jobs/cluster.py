"""Jobs on a Ray cluster, joined or started on this machine for as long as it is needed.

Files that jobs write must be on a file system that all machines of the cluster see.
"""

from __future__ import annotations

import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any

from joma._jobs.base import Job, JobEnd, attempt_in_worker, failure, read_end, use_threads

_GRACE = 15.0  # seconds in which an interrupted job must have cleaned up
_INTERRUPTIONS = 3  # in that time: one that arrives inside a library's compiled code can get lost
_EVERY = 1.0  # seconds between two messages of progress
_STARTS = 3  # attempts to start a cluster
_CALLS = (
    25  # jobs that a reused worker does before another takes its place: what it leaks is bounded
)


@contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """Ray's module, with the cluster at ``address`` joined, or with one started here without."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Ray's own are none of the user's: as errors they would end it halfway
        import ray

        started = not ray.is_initialized()
        if started and address:
            ray.init(address, log_to_driver=False)
        elif started:
            _start(ray)
    try:
        yield ray
    finally:
        if started:
            ray.shutdown()


def _start(ray: Any) -> None:
    """Start a cluster on this machine. Ray gives itself 30 s, which are too few on a machine that is very busy."""
    for left in reversed(range(_STARTS)):
        try:
            ray.init(include_dashboard=False, log_to_driver=False)
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


class RayEngine:
    """Workers of a Ray cluster. Ray decides where jobs run; deaths are counted by `joma._jobs.run_jobs`, not by Ray."""

    def __init__(
        self, workers: int | None, address: str | None, *, reuse: bool = False, threads: int = 1
    ) -> None:
        self._stack = ExitStack()
        self._ray = self._stack.enter_context(cluster(address))
        from ray.util.queue import Queue

        self.workers = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._threads = threads
        self._queue = Queue(actor_options={"num_cpus": 0})
        self._work = self._ray.remote(num_cpus=1, max_retries=0, max_calls=_CALLS if reuse else 1)(
            _remote
        )
        self._running: dict[Any, str] = {}
        self._ends: list[JobEnd] = []  # of jobs that could not even be started

    def start(self, job: Job) -> None:
        """Hand a job to Ray."""
        try:
            payload = pickle.dumps(job)
        except Exception as error:
            self._ends.append(failure(job.id, error))
        else:
            self._running[self._work.remote(self._queue, job.id, payload, self._threads)] = job.id

    def wait(self, timeout: float, progress: Callable[[str, float, str], None]) -> list[JobEnd]:
        """The jobs that have ended; waits for ``timeout`` seconds at most."""
        ends, self._ends = self._ends, []
        if not self._running:
            return ends
        ready, _ = self._ray.wait(list(self._running), timeout=0.0 if ends else timeout)
        running = set(self._running.values())
        with suppress(
            self._ray.exceptions.RayError
        ):  # without the queue, jobs are done all the same
            for id, share, what in self._queue.get_nowait_batch(self._queue.qsize()):
                if id in running:
                    progress(id, share, what)
        for reference in ready:
            id = self._running.pop(reference)
            try:
                ends.append(read_end(id, self._ray.get(reference)))
            except (
                Exception
            ) as error:  # its worker died, or the machine, or it was too large for it
                ends.append(failure(id, error, died=True))
        return ends

    def stop(self) -> None:
        """Interrupt what runs, kill what does not listen, leave the cluster."""
        try:
            for force in (*[False] * _INTERRUPTIONS, True):
                for reference in self._running:
                    self._ray.cancel(reference, force=force)
                if self._running:
                    left = list(self._running)
                    _, left = self._ray.wait(
                        left, num_returns=len(left), timeout=_GRACE / _INTERRUPTIONS
                    )
                    self._running = {reference: self._running[reference] for reference in left}
            self._queue.shutdown(force=True)
        finally:
            self._running = {}
            self._stack.close()


def _remote(queue: Any, id: str, payload: bytes, threads: int) -> bytes:
    """A job, in a worker of Ray.

    Progress is sent by a thread of its own: an interruption that arrives inside a call of Ray's gets lost, and it
    arrives in the main thread, which makes none while the job runs.
    """
    messages: SimpleQueue[tuple[str, float, str] | None] = SimpleQueue()

    def send() -> None:
        while (message := messages.get()) is not None:
            with suppress(Exception):
                queue.actor.put_nowait.remote(message)

    sender = Thread(target=send, daemon=True)
    sender.start()
    use_threads(threads)
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as under nohup: no interruption would ever be heard
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return attempt_in_worker(
            payload, lambda share, what: messages.put((id, share, what)), _EVERY
        )
    finally:
        messages.put(None)
        sender.join(_EVERY)
