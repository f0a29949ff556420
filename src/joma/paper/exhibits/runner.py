"""All exhibits and the claims, side by side: what is there is kept, one that fails stops no other."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._jobs import Engine, Job, JobEnd, Progress, check_engine, open_engine, run_jobs
from joma._runs import tidy, write_atomic, write_json
from joma.paper.exhibits.base import (
    Exhibit,
    ExhibitOutcome,
    check_output,
    load_checks,
    ready,
    reproduce,
)

if TYPE_CHECKING:
    from joma.paper.claims import Result

CLAIMS = "claims"
CLAIMS_SECONDS = 60.0  # roughly, on one slow core
SPOT_CHECK_SECONDS = 10.0  # to show a record and check its slices, roughly
SLOWER = {
    "default": 1.0,
    "laptop": 10.0,
    "paper": 60.0,
}  # how many times slower than the default, roughly
_TIMES = "times.json"
# imported once, in the process that those of the exhibits are forked from
_PRELOAD = (
    "torch",
    "pandas",
    "vl_convert",
    "scipy.integrate",
    "scipy.stats",
    "joma._show.plots.panels",
)


@dataclass
class Entry:
    """One line of the table: an exhibit, or all claims, and how it stands."""

    exhibit: Exhibit | None  # None: the claims
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
        return self.exhibit.id if self.exhibit else CLAIMS


@dataclass
class Reproduction:
    """All that was made, now or earlier."""

    outcomes: list[ExhibitOutcome]
    claims: list[Result] | None = None  # None if they were not asked for, or not to be had
    claims_error: str | None = None
    claims_seconds: float = 0.0
    claims_fresh: bool = True
    page: Path | None = None  # that shows them, if it was written

    @property
    def ok(self) -> bool:
        """True if everything was made, records pass their spot checks, and claims reject their controls."""
        if self.claims_error or self.failed_checks:
            return False
        if any(outcome.error for outcome in self.outcomes):
            return False
        return all(result.ok for result in self.claims or ())

    @property
    def failed_checks(self) -> list[str]:
        """One sentence per spot check that disagrees with its record."""
        failed = []
        for outcome in self.outcomes:
            for check in outcome.checks:
                if check.has_failed:
                    failed.append(f"{outcome.exhibit.id}: {check}")
        return failed


@dataclass
class Runner:
    """Makes exhibits, and the claims' results with them, into ``out``.

    Arguments:
        exhibits: which ones.
        claims: check the claims, too.
        jobs: how many at a time; as many as there are cores by default.
        engine: "processes" (on this machine) or "ray".
        address: of a Ray cluster; a local one is started without.
        show: called with all entries and the seconds left, a few times per second.
        finished: called with each entry that is done or has failed.
    """

    exhibits: list[Exhibit]
    preset: str = "default"
    out: Path = Path("runs/reproduce")
    seed: int = 0
    claims: bool = False
    force: bool = False
    jobs: int | None = None
    engine: str = "processes"
    address: str | None = None
    report: Path | None = None
    show: Callable[[list[Entry], float], None] = lambda entries, left: None
    finished: Callable[[Entry], None] = lambda entry: None
    _entries: dict[str, Entry] = field(default_factory=dict, init=False)
    _values: dict[str, Any] = field(
        default_factory=dict, init=False
    )  # ExhibitOutcome, or list[Result]
    _errors: dict[str, str] = field(default_factory=dict, init=False)

    def run(self) -> Reproduction:
        """Do what is not done; KeyboardInterrupt leaves nothing half-made."""
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"at least one job at a time is needed, got {self.jobs}")
        self.engine = check_engine(self.engine, self.address)
        check_output(
            self.exhibits, self.preset, self.out, self.seed, force=self.force, report=self.report
        )
        self.out = self.out.absolute()
        tidy(self.out / exhibit.id for exhibit in self.exhibits)
        times = _read(self.out / _TIMES).get(self.preset, {})
        for exhibit in (*self.exhibits, *([None] if self.claims else [])):
            entry = Entry(exhibit, 0.0)
            entry.expected = times.get(entry.id) or _guess(entry.exhibit, self.preset)
            self._entries[entry.id] = entry
        self._find()
        waiting = sorted(
            (e for e in self._entries.values() if e.state == "waiting"), key=lambda e: -e.expected
        )
        if waiting:
            try:
                with self._engine() as engine:
                    self._make(waiting, engine)
            finally:
                tidy(
                    self.out / exhibit.id for exhibit in self.exhibits
                )  # of those that had to be killed
        return self._result()

    def _engine(self) -> AbstractContextManager[Engine]:
        return open_engine(self.engine, self.jobs, self.address, preload=_PRELOAD)

    def _find(self) -> None:
        """What is there already, from an earlier start."""
        if self.force:
            return
        for entry in self._entries.values():
            value: Any = None
            if entry.exhibit is None:
                value = stored_claims(self.out)
            elif (verdict := ready(entry.exhibit, self.preset, self.out, self.seed)) is not None:
                path = self.out / entry.id
                checks = load_checks(path)
                value = ExhibitOutcome(
                    entry.exhibit, path, verdict, 0.0, fresh=False, checks=checks
                )
            if value is not None:
                entry.fresh = False
                self._take(entry, JobEnd(entry.id, value))

    def _make(self, waiting: list[Entry], engine: Engine) -> None:
        """What is not there, the longest first."""

        def started(id: str) -> None:
            self._entries[id].state, self._entries[id].started = "running", time.monotonic()

        def progress(id: str, share: float, what: str) -> None:
            entry = self._entries[id]
            entry.share, entry.what = max(entry.share, min(share, 1.0)), what

        def tick() -> None:
            entries = list(self._entries.values())
            self.show(entries, time_left(entries, engine.workers, time.monotonic()))

        jobs = [Job(entry.id, self._call(entry.exhibit)) for entry in waiting]
        for end in run_jobs(jobs, engine, started=started, progress=progress, tick=tick):
            self._take(self._entries[end.id], end)

    def _call(self, exhibit: Exhibit | None) -> Callable[[Progress], Any]:
        if exhibit is None:
            return check_claims
        return partial(_reproduce, exhibit, self.preset, self.out, self.seed, self.force)

    def _take(self, entry: Entry, end: JobEnd) -> None:
        """An entry is done, or has failed."""
        complaint = self.out / f"{entry.id}.error.txt"
        entry.seconds = time.monotonic() - entry.started if entry.fresh else 0.0
        if end.error:
            entry.state, entry.verdict, entry.what = "failed", "error", end.error
            self._errors[entry.id] = end.error
            write_atomic(complaint, f"{end.error}\n\n{end.details}".rstrip() + "\n")
        else:
            complaint.unlink(missing_ok=True)
            entry.state, entry.share, self._values[entry.id] = "done", 1.0, end.value
            entry.verdict, entry.what = _words(end.value)
            if entry.fresh:
                if entry.exhibit is None:
                    write_json(
                        self.out / "claims.json",
                        {**_basis(), "results": [r.as_dict() for r in end.value]},
                    )
                times = _read(self.out / _TIMES)
                times.setdefault(self.preset, {})[entry.id] = round(entry.seconds, 2)
                write_json(self.out / _TIMES, times)
        self.finished(entry)

    def _result(self) -> Reproduction:
        result = Reproduction([])
        for entry in self._entries.values():
            if entry.exhibit is None:
                result.claims, result.claims_error = (
                    self._values.get(CLAIMS),
                    self._errors.get(CLAIMS),
                )
                result.claims_seconds, result.claims_fresh = entry.seconds, entry.fresh
            elif entry.id in self._values:
                result.outcomes.append(self._values[entry.id])
            else:
                error = self._errors[entry.id]
                result.outcomes.append(
                    ExhibitOutcome(
                        entry.exhibit, self.out / entry.id, None, entry.seconds, error=error
                    )
                )
        return result


def _reproduce(
    exhibit: Exhibit, preset: str, out: Path, seed: int, force: bool, progress: Progress
) -> ExhibitOutcome:
    return reproduce(exhibit, preset, out, seed, force=force, progress=progress)


def check_claims(progress: Progress) -> list[Result]:
    """The results of all claims."""
    from joma.paper import claims as registry

    results = []
    chosen = registry.claims()
    for n, claim in enumerate(chosen):
        progress(n / len(chosen), claim.id)
        results.append(registry.check(claim))
    return results


def _words(value: Any) -> tuple[str, str]:
    """The verdict and what decided it, in a line."""
    if isinstance(value, ExhibitOutcome):
        assert value.verdict is not None
        return value.verdict.verdict, value.verdict.measured or value.verdict.summary
    wrong = [result.id for result in value if not result.ok]
    return ("error", f"wrong: {', '.join(wrong)}") if wrong else ("checked", f"{len(value)} claims")


def _guess(exhibit: Exhibit | None, preset: str) -> float:
    """Seconds that something may take of which no time is known."""
    if exhibit is None:
        return CLAIMS_SECONDS
    if preset not in exhibit.experiment.settings:
        return SPOT_CHECK_SECONDS
    return exhibit.seconds * SLOWER[preset]


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _basis() -> dict[str, Any]:
    """What the results of claims depend on."""
    from joma._runs.fingerprint import fingerprint
    from joma.paper.claims import claims

    listed = claims()
    said = {claim.id: [claim.statement, claim.tolerance] for claim in listed}
    return {"fingerprint": fingerprint({claim.check.__module__ for claim in listed}, said)}


def read_claims(out: Path) -> list[Result] | None:
    """The results in ``claims.json``, whatever they say and whenever they were made; None if there are none."""
    from joma._runs.encoding import unspell
    from joma.paper.claims import Result

    try:
        rows = _read(out / "claims.json")["results"]
        return [
            Result.from_dict({name: unspell(value) for name, value in row.items()}) for row in rows
        ]
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def stored_claims(out: Path) -> list[Result] | None:
    """The results in ``claims.json`` if all checks ran, of these claims, by this code; else None."""
    stored, results = _read(out / "claims.json"), read_claims(out)
    if results is None or any(stored.get(name) != value for name, value in _basis().items()):
        return None
    return results if all(result.ok for result in results) else None


def time_left(entries: Iterable[Entry], workers: int, now: float) -> float:
    """Seconds until all is done: the rest, longest first, on whichever worker is free next.

    What is known is scaled by how fast this machine has been; a running one also goes by its own progress.
    """
    entries = list(entries)
    done = [entry for entry in entries if entry.state == "done" and entry.fresh]
    pace = (
        sum(entry.seconds for entry in done) / sum(entry.expected for entry in done)
        if done
        else 1.0
    )
    free = []
    for entry in (entry for entry in entries if entry.state == "running"):
        spent = now - entry.started
        total = max(entry.expected * pace, spent)
        if entry.share > 0.02:  # the more is done, the more its own pace (spent / share) counts
            free.append((1 - entry.share) * ((1 - entry.share) * total + spent))
        else:
            free.append(total - spent)
    free += [0.0] * (workers - len(free))
    heapq.heapify(free)
    for entry in sorted(
        (entry for entry in entries if entry.state == "waiting"), key=lambda entry: -entry.expected
    ):
        heapq.heappush(free, heapq.heappop(free) + entry.expected * pace)
    return max(free)
