"""Make all exhibits and check the claims, side by side.

What is there is kept, and one that fails stops no other.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._jobs import Engine, Job, JobEnd, Progress, check_engine, open_engine, run_jobs
from joma._runs import RunError, tidy, write_atomic, write_json
from joma.paper.exhibits.base import FRESH_SEED, Exhibit
from joma.paper.exhibits.making import ExhibitOutcome, ExhibitPlan, check_output, plan
from joma.paper.records import DamagedRecord, load
from joma.paper.verdict import Verdict

if TYPE_CHECKING:
    from joma.paper.claims import Result

CLAIMS = "claims"
CLAIMS_SECONDS = 60.0  # roughly, on one slow core
SPOT_CHECK_SECONDS = 10.0  # to show a record and check its slices, roughly
# How many times slower than the default preset, roughly.
SLOWER = {"default": 1.0, "laptop": 10.0, "paper": 60.0}
_TIMES = "times.json"
# Imported once, in the process from which those of the exhibits are forked.
_PRELOAD = (
    "torch",
    "pandas",
    "vl_convert",
    "scipy.integrate",
    "scipy.stats",
    "joma._show.plots.panels",
)
# The conclusion names what has one of these verdicts, and counts the others.
_NAMED = (Verdict.FAILS, Verdict.ERROR, Verdict.INCONCLUSIVE)
_PREDICATES = {
    Verdict.HOLDS: ("holds", "hold"),
    Verdict.CORRECTED: ("is wrong as printed, corrected", "are wrong as printed, corrected"),
    Verdict.UNDER: ("holds under a condition", "hold under a condition"),
    Verdict.INDISTINCT: (
        "reproduces but does not discriminate",
        "reproduce but do not discriminate",
    ),
    Verdict.FAILS: ("fails", "fail"),
    Verdict.ERROR: ("could not be made", "could not be made"),
    Verdict.INCONCLUSIVE: ("is inconclusive", "are inconclusive"),
}


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

    @property
    def conclusion(self) -> str:
        """What holds, what is wrong as printed, what fails and what is inconclusive, in a line."""
        verdicts: dict[str, Verdict] = {}
        for outcome in self.outcomes:
            made = outcome.verdict
            verdicts[outcome.exhibit.id] = Verdict.ERROR if made is None else made.verdict
        for result in self.claims or ():
            verdicts[result.id] = result.verdict
        counts = Counter(verdicts.values())
        parts = []
        for verdict, (singular, plural) in _PREDICATES.items():
            if not counts[verdict]:
                continue
            part = f"{counts[verdict]} {singular if counts[verdict] == 1 else plural}"
            if verdict in _NAMED:
                part += f" ({', '.join(id for id, one in verdicts.items() if one is verdict)})"
            parts.append(part)
        statements = "statement" if len(verdicts) == 1 else "statements"
        text = f"{len(verdicts)} {statements}: {'; '.join(parts)}"
        if self.claims_error:
            text += "; the claims could not be checked"
        return text


class ExhibitObserver:
    """User interface of a `Runner`, which calls these methods; this one shows nothing."""

    def planned(self, entries: list[Entry], seconds: float) -> None:
        """Show what has to be made, and about how many seconds that takes."""

    def tick(self, entries: list[Entry], seconds: float) -> None:
        """Show how the entries stand, and the seconds left; called a few times per second."""

    def finished(self, entry: Entry) -> None:
        """Show an entry that is done or has failed."""

    def ended(self) -> None:
        """Stop showing entries: all are done, or an error or Ctrl-C ended the run."""

    def concluded(self, reproduction: Reproduction) -> None:
        """Show the results; the page is not yet written."""


@dataclass
class Runner:
    """Makes exhibits, and checks the claims with them, into ``out``.

    Arguments:
        exhibits: which ones.
        claims: check the claims, too.
        jobs: how many at a time; as many as there are cores by default.
        engine: "processes" (on this machine) or "ray".
        address: of a Ray cluster; a local one is started without.
        report: where the page will be written, to refuse a bad place before any work is done.
        observer: is told how the entries stand.
    """

    exhibits: list[Exhibit]
    preset: str = "default"
    out: Path = Path("runs/reproduce")
    seed: int = FRESH_SEED
    claims: bool = False
    force: bool = False
    jobs: int | None = None
    engine: str = "processes"
    address: str | None = None
    report: Path | None = None
    observer: ExhibitObserver = field(default_factory=ExhibitObserver)
    _entries: dict[str, Entry] = field(default_factory=dict, init=False)
    _plans: dict[str, ExhibitPlan] = field(default_factory=dict, init=False)
    # An ExhibitOutcome per exhibit, and the list of results of the claims.
    _values: dict[str, Any] = field(default_factory=dict, init=False)
    _errors: dict[str, str] = field(default_factory=dict, init=False)

    def run(self) -> Reproduction:
        """Do what is not done; KeyboardInterrupt leaves nothing half-made."""
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"at least one job at a time is needed, got {self.jobs}")
        self.engine = check_engine(self.engine, self.address)
        check_output(self.out, self.report)
        self.out = self.out.absolute()
        stored = self._stored()
        folders = [self.out / exhibit.id for exhibit in self.exhibits]
        tidy(folders)
        self._take_stored(stored)
        waiting = [entry for entry in self._entries.values() if entry.state == "waiting"]
        waiting.sort(key=lambda entry: -entry.expected)
        if waiting:
            try:
                with open_engine(self.engine, self.jobs, self.address, preload=_PRELOAD) as engine:
                    self.observer.planned(waiting, time_left(waiting, engine.workers, 0.0))
                    self._make(waiting, engine)
            finally:
                self.observer.ended()
                tidy(folders)  # of those that had to be killed
        return self._result()

    def _stored(self) -> dict[str, Any]:
        """Plan all exhibits and return what is there already; nothing is written.

        A record that is missing or cannot be read is the error of its exhibit alone.
        """
        times = _read(self.out / _TIMES).get(self.preset, {})
        stored: dict[str, Any] = {}
        for exhibit in self.exhibits:
            entry = Entry(exhibit, SPOT_CHECK_SECONDS)
            self._entries[exhibit.id] = entry
            try:
                planned = plan(exhibit, self.preset, self.out, self.seed)
            except (DamagedRecord, RunError) as error:
                self._errors[exhibit.id] = str(error)
                continue
            if planned.record is None:
                entry.expected = expected_seconds(exhibit, self.preset)
            entry.expected = times.get(exhibit.id, entry.expected)
            self._plans[exhibit.id] = planned
            if not self.force:
                stored[exhibit.id] = planned.stored()
        if self.claims:
            self._entries[CLAIMS] = Entry(None, times.get(CLAIMS) or CLAIMS_SECONDS)
            if not self.force:
                stored[CLAIMS] = stored_claims(self.out)
        return stored

    def _take_stored(self, stored: dict[str, Any]) -> None:
        for id, entry in self._entries.items():
            if id in self._errors:
                entry.fresh = False
                self._take(entry, JobEnd(id, None, self._errors[id]))
            elif stored.get(id) is not None:
                entry.fresh = False
                self._take(entry, JobEnd(id, stored[id]))

    def _make(self, waiting: list[Entry], engine: Engine) -> None:
        """Make what is not there, the longest first."""

        def started(id: str) -> None:
            entry = self._entries[id]
            entry.state = "running"
            entry.started = time.monotonic()

        def progress(id: str, share: float, what: str) -> None:
            entry = self._entries[id]
            entry.share = max(entry.share, min(share, 1.0))
            entry.what = what

        def tick() -> None:
            entries = list(self._entries.values())
            self.observer.tick(entries, time_left(entries, engine.workers, time.monotonic()))

        jobs = [Job(entry.id, self._call(entry)) for entry in waiting]
        for end in run_jobs(jobs, engine, started=started, progress=progress, tick=tick):
            self._take(self._entries[end.id], end)

    def _call(self, entry: Entry) -> Callable[[Progress], Any]:
        if entry.exhibit is None:
            return check_claims
        return partial(self._plans[entry.id].make, force=self.force)

    def _take(self, entry: Entry, end: JobEnd) -> None:
        """Keep the result of an entry that is done or has failed."""
        error_file = self.out / f"{entry.id}.error.txt"
        entry.seconds = time.monotonic() - entry.started if entry.fresh else 0.0
        if end.error:
            entry.state = "failed"
            entry.verdict = "error"
            entry.what = end.error
            self._errors[entry.id] = end.error
            write_atomic(error_file, f"{end.error}\n\n{end.details}".rstrip() + "\n")
        else:
            error_file.unlink(missing_ok=True)
            entry.state = "done"
            entry.share = 1.0
            entry.verdict, entry.what = _words(end.value)
            self._values[entry.id] = end.value
            if entry.fresh:
                self._store(entry)
        self.observer.finished(entry)

    def _store(self, entry: Entry) -> None:
        """Keep the claims' results, and the time that an entry took."""
        if entry.exhibit is None:
            results = [result.as_dict() for result in self._values[CLAIMS]]
            write_json(self.out / "claims.json", {**_basis(), "results": results})
        times = _read(self.out / _TIMES)
        times.setdefault(self.preset, {})[entry.id] = round(entry.seconds, 2)
        write_json(self.out / _TIMES, times)

    def _result(self) -> Reproduction:
        result = Reproduction([])
        for entry in self._entries.values():
            if entry.exhibit is None:
                result.claims = self._values.get(CLAIMS)
                result.claims_error = self._errors.get(CLAIMS)
                result.claims_seconds = entry.seconds
                result.claims_fresh = entry.fresh
            elif entry.id in self._values:
                result.outcomes.append(self._values[entry.id])
            else:
                folder = self.out / entry.id
                error = self._errors[entry.id]
                result.outcomes.append(
                    ExhibitOutcome(entry.exhibit, folder, None, entry.seconds, error=error)
                )
        return result


def check_claims(progress: Progress) -> list[Result]:
    """Return the results of all claims."""
    from joma.paper import claims as registry

    results = []
    claims = registry.claims()
    for number, claim in enumerate(claims):
        progress(number / len(claims), claim.id)
        results.append(registry.check(claim))
    return results


def expected_seconds(exhibit: Exhibit, preset: str) -> float:
    """Return about how long an exhibit is computed on one core, by its record if that has the preset."""
    try:
        record = load(exhibit.id)
    except DamagedRecord:
        record = None
    if record is not None and record.preset == preset and record.core_minutes is not None:
        return 60.0 * record.core_minutes
    return exhibit.seconds * SLOWER[preset]


def _words(value: Any) -> tuple[str, str]:
    """Return the verdict and what decided it, in a line."""
    if isinstance(value, ExhibitOutcome):
        assert value.verdict is not None
        return value.verdict.verdict, value.verdict.measured
    wrong = [result.id for result in value if not result.ok]
    if wrong:
        return "error", f"wrong: {', '.join(wrong)}"
    return "checked", f"{len(value)} claims"


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _basis() -> dict[str, Any]:
    """Return what the results of claims depend on."""
    from joma._runs.fingerprint import fingerprint
    from joma.paper.claims import claims

    listed = claims()
    statements = {claim.id: [claim.statement, claim.tolerance] for claim in listed}
    modules = {claim.check.__module__ for claim in listed}
    return {"fingerprint": fingerprint(modules, statements)}


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
