"""All exhibits and the claims, side by side: what is there is kept, one that fails stops no other."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._exhibits.base import Exhibit, Outcome, check_output, ready
from joma._jobs.engines import Cluster, Engine, Event, Processes, Task
from joma._run import tidy, write_atomic, write_json

if TYPE_CHECKING:
    from joma.theory.claims import Result

ENGINES = ("processes", "ray")
# seconds at the quick preset on one slow core: what to begin with, and when it will end, until there are measured ones
SECONDS = {
    "fig8": 190.0, "fig6": 130.0, "claims": 60.0, "table1": 22.0, "orthogonality": 20.0, "parameterised": 20.0,
    "realtext": 20.0, "cdag": 15.0, "fig5": 5.0, "folding": 5.0, "fig9": 4.0, "fig4": 3.0, "saliency": 3.0, "fig2": 3.0,
    "fig3": 1.0,
}  # fmt: skip
_OTHERS = {"quick": 60.0, "laptop": 600.0, "paper": 3600.0}  # of exhibits without a measured time
_TIMES = "times.json"


@dataclass
class Job:
    """One piece of work and how it stands."""

    task: Task
    expected: float  # seconds
    state: str = "waiting"  # running, done, failed
    share: float = 0.0
    what: str = ""
    started: float = 0.0
    seconds: float = 0.0
    verdict: str = ""
    fresh: bool = True  # False if it was there already

    @property
    def id(self) -> str:
        """The exhibit's, or "claims"."""
        return self.task.id


@dataclass
class Reproduction:
    """All that was made or found."""

    outcomes: list[Outcome]
    claims: list[Result] | None = None  # None if they were not asked for, or not to be had
    claims_error: str | None = None
    claims_seconds: float = 0.0
    claims_fresh: bool = True

    @property
    def ok(self) -> bool:
        """Whether everything was made, and every claim's check ran and rejected its control."""
        broken = any(outcome.error for outcome in self.outcomes) or self.claims_error
        return not broken and all(result.ok for result in self.claims or ())


@dataclass
class Runner:
    """Makes exhibits, and the claims' results with them, into ``out``.

    Arguments:
        exhibits: which ones.
        claims: check the claims, too.
        jobs: how many at a time; as many as there are cores by default.
        engine: "processes" (on this machine) or "ray".
        address: of a Ray cluster; a local one is started without.
        show: told of the jobs whenever something happens, and a few times a second.
        finished: told of each job that has ended.
    """

    exhibits: list[Exhibit]
    preset: str = "quick"
    out: Path = Path("runs/reproduce")
    seed: int = 0
    claims: bool = False
    force: bool = False
    jobs: int | None = None
    engine: str = "processes"
    address: str | None = None
    report: Path | None = None
    show: Callable[[list[Job], float], None] = lambda jobs, left: None
    finished: Callable[[Job], None] = lambda job: None
    _jobs: list[Job] = field(default_factory=list, init=False)
    _made: dict[str, Any] = field(default_factory=dict, init=False)  # Outcome, or list[Result]
    _errors: dict[str, str] = field(default_factory=dict, init=False)

    def run(self) -> Reproduction:
        """Do what is not done; KeyboardInterrupt leaves nothing half-made."""
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"at least one job at a time is needed, got {self.jobs}")
        if self.engine not in ENGINES:
            from joma.theory.setting import nearest

            raise ValueError(nearest(self.engine, ENGINES, "engine"))
        if self.address is not None and self.engine != "ray":
            raise ValueError(f"--address {self.address} is that of a Ray cluster: say --engine ray, too")
        check_output(self.exhibits, self.preset, self.out, self.seed, force=self.force, report=self.report)
        self.out = self.out.absolute()
        tidy(self.out / exhibit.id for exhibit in self.exhibits)
        times = _read(self.out / _TIMES).get(self.preset, {})
        tasks = [Task(exhibit, self.preset, self.out, self.seed, self.force) for exhibit in self.exhibits]
        tasks += [Task(None, self.preset, self.out, self.seed, self.force)] if self.claims else []
        self._jobs = [Job(task, times.get(task.id) or _guess(task.id, self.preset)) for task in tasks]
        self._find()
        if any(job.state == "waiting" for job in self._jobs):
            engine = self._engine()
            try:
                self._loop(engine)
            finally:
                engine.stop()
                tidy(self.out / exhibit.id for exhibit in self.exhibits)  # of those that had to be killed
        return self._result()

    def _engine(self) -> Engine:
        if self.engine == "processes":
            from joma._jobs.machine import cores

            return Processes(self.jobs or cores())
        try:
            return Cluster(self.address, self.jobs)
        except ImportError as error:
            raise ValueError(str(error)) from None

    def _find(self) -> None:
        """What is there already, from an earlier start."""
        if self.force:
            return
        for job in self._jobs:
            exhibit = job.task.exhibit
            value: Any = None
            if exhibit is None:
                value = stored_claims(self.out)
            elif (verdict := ready(exhibit, self.preset, self.out, self.seed)) is not None:
                value = Outcome(exhibit, self.out / exhibit.id, verdict, 0.0, fresh=False)
            if value is not None:
                job.fresh = False
                self._take(job, Event(job.id, "done", value=value))

    def _loop(self, engine: Engine) -> None:
        waiting = sorted((job for job in self._jobs if job.state == "waiting"), key=lambda job: -job.expected)
        running: dict[str, Job] = {}
        while waiting or running:
            while waiting and len(running) < engine.workers:
                job = waiting.pop(0)
                engine.start(job.task)
                job.state, job.started = "running", time.monotonic()
                running[job.id] = job
            self.show(self._jobs, time_left(self._jobs, engine.workers, time.monotonic()))
            for event in engine.events(0.25):
                job = running[event.id]
                if event.kind == "progress":
                    job.share, job.what = max(job.share, min(event.share, 1.0)), event.text
                else:
                    del running[event.id]
                    self._take(job, event)
            self.show(self._jobs, time_left(self._jobs, engine.workers, time.monotonic()))

    def _take(self, job: Job, event: Event) -> None:
        """A job has ended."""
        complaint = self.out / f"{job.id}.error.txt"
        job.seconds = time.monotonic() - job.started if job.fresh else 0.0
        if event.kind == "failed":
            job.state, job.verdict, job.what = "failed", "error", event.text
            self._errors[job.id] = event.text
            write_atomic(complaint, f"{event.text}\n\n{event.details}".rstrip() + "\n")
        else:
            complaint.unlink(missing_ok=True)
            job.state, job.share, self._made[job.id] = "done", 1.0, event.value
            job.verdict, job.what = _words(event.value)
            if job.fresh:
                if job.task.exhibit is None:
                    write_json(self.out / "claims.json", {**_basis(), "results": [r.as_dict() for r in event.value]})
                times = _read(self.out / _TIMES)
                times.setdefault(self.preset, {})[job.id] = round(job.seconds, 2)
                write_json(self.out / _TIMES, times)
        self.finished(job)

    def _result(self) -> Reproduction:
        found = Reproduction([])
        for job in self._jobs:
            exhibit = job.task.exhibit
            if exhibit is None:
                found.claims, found.claims_error = self._made.get(job.id), self._errors.get(job.id)
                found.claims_seconds, found.claims_fresh = job.seconds, job.fresh
            elif job.id in self._made:
                found.outcomes.append(self._made[job.id])
            else:
                error = self._errors[job.id]
                found.outcomes.append(Outcome(exhibit, self.out / exhibit.id, None, job.seconds, error=error))
        return found


def _words(value: Any) -> tuple[str, str]:
    """The verdict and what decided it, in a line."""
    if isinstance(value, Outcome):
        assert value.verdict is not None
        return value.verdict.verdict, value.verdict.measured or value.verdict.summary
    wrong = [result.id for result in value if not result.ok]
    return ("error", f"wrong: {', '.join(wrong)}") if wrong else ("checked", f"{len(value)} claims")


def _guess(id: str, preset: str) -> float:
    """Seconds that something may take of which no time is known."""
    if id == "claims":
        return SECONDS[id]
    return SECONDS.get(id, _OTHERS["quick"]) * _OTHERS[preset] / _OTHERS["quick"]


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _basis() -> dict[str, Any]:
    """What the results of claims depend on."""
    from joma._run.fingerprint import fingerprint
    from joma.theory.claims import claims

    listed = claims()
    said = {claim.id: [claim.statement, claim.tolerance] for claim in listed}
    return {"fingerprint": fingerprint({claim.check.__module__ for claim in listed}, said)}


def read_claims(out: Path) -> list[Result] | None:
    """The results in ``claims.json``, whatever they say and whenever they were made; None if there are none."""
    from joma._run.table import unspell
    from joma.theory.claims import Result

    try:
        rows = _read(out / "claims.json")["results"]
        return [Result.from_dict({name: unspell(value) for name, value in row.items()}) for row in rows]
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def stored_claims(out: Path) -> list[Result] | None:
    """The results in ``claims.json`` if all checks ran, of these claims, by this code; else None."""
    stored, results = _read(out / "claims.json"), read_claims(out)
    if results is None or any(stored.get(name) != value for name, value in _basis().items()):
        return None
    return results if all(result.ok for result in results) else None


def time_left(jobs: Iterable[Job], workers: int, now: float) -> float:
    """Seconds until all is done: the rest, longest first, on whichever worker is free next.

    What is known is scaled by how fast this machine has been; a running job also goes by its own progress.
    """
    jobs = list(jobs)
    done = [job for job in jobs if job.state == "done" and job.fresh]
    pace = sum(job.seconds for job in done) / sum(job.expected for job in done) if done else 1.0
    free = []
    for job in (job for job in jobs if job.state == "running"):
        spent = now - job.started
        whole = max(job.expected * pace, spent)
        if job.share > 0.02:  # the more is done, the more its own pace (spent / share) counts
            free.append((1 - job.share) * ((1 - job.share) * whole + spent))
        else:
            free.append(whole - spent)
    free += [0.0] * (workers - len(free))
    heapq.heapify(free)
    for job in sorted((job for job in jobs if job.state == "waiting"), key=lambda job: -job.expected):
        heapq.heappush(free, heapq.heappop(free) + job.expected * pace)
    return max(free)
