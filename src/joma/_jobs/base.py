"""What a job is, how jobs are run, and what an engine must do for that.

A job is a name and a function. Whatever happens to it is an ending: its value, the error it raised, or the death of its
worker, which costs this job an attempt and no other job anything.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

ENGINES = ("processes", "ray")
Progress = Callable[[float, str], None]  # the share done, and what is being done
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
_TICK = 0.25  # seconds after which a caller that draws a clock is called, whether something happened or not


@dataclass(frozen=True)
class Job:
    """One piece of work: a function of a `Progress`, picklable, and a name that no other job of the same call has."""

    id: str
    call: Callable[[Progress], Any]


@dataclass(frozen=True)
class JobEnd:
    """How a job ended."""

    id: str
    value: Any = None
    error: str = ""  # what went wrong, in one line; empty if nothing did
    details: str = ""  # the traceback
    died: bool = False  # its worker ended before the job did


class Engine(Protocol):
    """Where jobs run. Nothing but Ctrl-C may raise here: whatever happens to a job is a `JobEnd`."""

    workers: int  # how many jobs at a time

    def start(self, job: Job) -> None:
        """Start a job."""

    def wait(self, timeout: float, progress: Callable[[str, float, str], None]) -> list[JobEnd]:
        """The jobs that have ended; waits for ``timeout`` seconds at most. ``progress`` has the job's id first."""

    def stop(self) -> None:
        """End what runs, cleanly if it lets us."""


def run_jobs(
    jobs: Iterable[Job],
    engine: Engine,
    *,
    attempts: int = 2,
    started: Callable[[str], None] = lambda id: None,
    progress: Callable[[str, float, str], None] = lambda id, share, what: None,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[JobEnd]:
    """One ending per job, as they come; jobs are started in the order given.

    Arguments:
        jobs: with ids that differ.
        engine: as `open_engine` gives it.
        attempts: how often the worker of a job may die until the job is given up. Its next attempt is the last in the
            queue: memory that was too little for many jobs at a time may do then.
        started: called with the id of each job that is started.
        progress: called with an id, the share done and what is being done.
        tick: called a few times per second.
    """
    waiting, running, deaths = deque(jobs), dict[str, Job](), Counter[str]()
    while waiting or running:
        while waiting and len(running) < engine.workers:
            job = waiting.popleft()
            engine.start(job)
            running[job.id] = job
            started(job.id)
        tick()
        for end in engine.wait(_TICK, progress):
            job = running.pop(end.id)
            deaths[job.id] += end.died
            if end.died and deaths[job.id] < attempts:
                waiting.append(job)
            else:
                yield replace(end, error=f"{end.error}; attempts: {attempts}") if end.died else end
    tick()


def check_engine(name: str, address: str | None = None) -> str:
    """The name of an engine, "processes" also for its old name "loky"; a ValueError if there is none like it."""
    name = "processes" if name == "loky" else name
    if name not in ENGINES:
        from joma._suggest import unknown_name

        raise ValueError(unknown_name(name, ENGINES, "engine"))
    if address is not None and name != "ray":
        raise ValueError(f"--address {address} is that of a Ray cluster: say --engine ray, too")
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("engine 'ray' needs Ray: pip install 'joma[ray]'")
    return name


@contextmanager
def open_engine(
    name: str, workers: int | None = None, address: str | None = None, *, reuse: bool = False, threads: int = 1,
    preload: tuple[str, ...] = (), inline: bool = False,
) -> Iterator[Engine]:  # fmt: skip
    """The engine of a name, for as long as it is needed.

    Arguments:
        name: "processes" (of this machine) or "ray".
        workers: how many jobs at a time; as many as there are cores by default.
        address: of a Ray cluster; a local one is started without.
        reuse: a worker does one job after the other, until it has grown too large; by default it does one.
        threads: of each worker.
        preload: modules that are imported once for all workers of this machine.
        inline: one worker on this machine is this process itself.
    """
    name = check_engine(name, address)
    engine: Engine
    if name == "ray":
        from joma._jobs.cluster import RayEngine

        engine = RayEngine(workers, address, reuse=reuse, threads=threads)
    elif inline and workers == 1:
        engine = InProcess()
    else:
        from joma._jobs.local import LocalEngine
        from joma._jobs.machine import cores

        engine = LocalEngine(workers or cores(), reuse=reuse, threads=threads, preload=preload)
    try:
        yield engine
    finally:
        engine.stop()


class InProcess:
    """One job after the other, in this process."""

    workers = 1

    def start(self, job: Job) -> None:
        """Keep the job: it is done by `wait`."""
        self._job = job

    def wait(self, timeout: float, progress: Callable[[str, float, str], None]) -> list[JobEnd]:
        """Do the job."""
        return [attempt(self._job, partial(progress, self._job.id))]

    def stop(self) -> None:
        """Nothing runs."""


def attempt(
    job: Job, progress: Progress, caught: tuple[type[BaseException], ...] = (Exception,)
) -> JobEnd:
    """Do a job here and now; what it raises is its ending."""
    try:
        return JobEnd(job.id, job.call(progress))
    except caught as error:
        return failure(job.id, error)


def attempt_in_worker(payload: bytes, progress: Progress, every: float) -> bytes:
    """The pickled ending of a pickled job, done in another process.

    Arguments:
        payload: the job.
        progress: called once in ``every`` seconds at most.
    """
    last = -every

    def sometimes(share: float, what: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= every:
            last = now
            progress(share, what)

    try:
        return pickle.dumps(attempt(pickle.loads(payload), sometimes, (Exception, SystemExit)))
    except Exception as error:  # the job cannot be read here, or its result cannot be sent
        return pickle.dumps(failure("", error))


def read_end(id: str, data: bytes) -> JobEnd:
    """The ending of the job ``id`` that a worker sent; one that cannot be read is a failure, too."""
    try:
        return replace(pickle.loads(data), id=id)
    except Exception as error:
        return failure(id, error)


def failure(id: str, error: BaseException, *, died: bool = False) -> JobEnd:
    """The ending of a job that an error made impossible."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return JobEnd(id, error=text, details="".join(traceback.format_exception(error)), died=died)


def thread_variables(threads: int) -> dict[str, str]:
    """The environment in which libraries that are loaded use so many threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def use_threads(threads: int) -> None:
    """Have libraries use so many threads, whether they are loaded already or will be."""
    os.environ.update(thread_variables(threads))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
