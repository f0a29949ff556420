"""Jobs on every engine: whatever happens to a worker is an ending or another attempt, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from joma._jobs import Job, check_engine, cluster, local, open_engine, run_jobs
from joma._jobs.local import LocalEngine
from tests.jobs import calls

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["processes", "ray"])
def where(request):
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


def ends_of(name, jobs, workers=2, **options):
    """id -> ending."""
    attempts = {"attempts": options.pop("attempts")} if "attempts" in options else {}
    with open_engine(name, workers, **options) as engine:
        ends = list(run_jobs([Job(id, call) for id, call in jobs.items()], engine, **attempts))
    assert len(ends) == len(jobs)
    return {end.id: end for end in ends}


def test_whatever_happens_to_a_job_is_its_ending(where):
    endings(where, reuse=True, attempts=1)


def test_whatever_happens_to_a_process_of_its_own_is_the_ending_of_its_job():
    endings("processes", reuse=False, attempts=2)


def endings(where, reuse, attempts):
    jobs = {
        "good": partial(calls.value, {"a": 1}),
        "raises": calls.raises,
        "exits": calls.exits,
        "process ends": calls.ends_its_process,
        "killed": calls.kills_itself,
        "cannot be sent": calls.returns_what_cannot_be_sent,
        "cannot be read": calls.returns_what_cannot_be_read,
        "is no job": partial(calls.value, sys.stdout),
        "fine": partial(calls.value, 2),
    }
    ends = ends_of(where, jobs, reuse=reuse, attempts=attempts)
    assert (ends["good"].value, ends["good"].error) == ({"a": 1}, "")
    assert ends["fine"].value == 2
    assert ends["raises"].error == "ZeroDivisionError: no <number>"
    assert "but details" in ends["raises"].details
    assert "in raises" in ends["raises"].details  # where it was
    assert ends["exits"].error == "SystemExit: 3"
    assert {id for id, end in ends.items() if end.died} == {"process ends", "killed"}
    for id in ("process ends", "killed"):
        assert ends[id].error.endswith(f"attempts: {attempts}")
    if where == "processes":
        assert "its process ended with status 4" in ends["process ends"].error
        assert (
            "its process was killed (SIGKILL); was there too little memory?" in ends["killed"].error
        )
    for id in ("cannot be sent", "cannot be read", "is no job"):
        assert ends[id].error
        assert ends[id].value is None


def test_a_killed_worker_costs_its_job_one_attempt(where, tmp_path):
    jobs = {"unlucky": partial(calls.is_killed_once, tmp_path / "unlucky")}
    jobs |= {f"{n}": partial(calls.is_killed_once, tmp_path / f"{n}") for n in range(2)}
    for n in range(2):
        (tmp_path / f"{n}").write_text("begun\n" * 5)  # these are not killed
    ends = ends_of(where, jobs, reuse=True)
    assert {id: end.value for id, end in ends.items()} == dict.fromkeys(jobs, "done")
    assert {id: (tmp_path / id).read_text().count("\n") for id in jobs} == {
        "unlucky": 2,
        "0": 6,
        "1": 6,
    }


def test_a_job_whose_workers_always_die_is_given_up(tmp_path):
    for attempts in (1, 3):
        end = ends_of("processes", {"a": calls.kills_itself}, 1, attempts=attempts)["a"]
        assert end.error.endswith(f"attempts: {attempts}")


def test_a_leaking_worker_is_replaced(monkeypatch):
    monkeypatch.setattr(local, "_GROWTH", 20e6)
    jobs = {f"{n}": partial(calls.leaks, 30) for n in range(5)}
    pids = [end.value for end in ends_of("processes", jobs, 1, reuse=True).values()]
    assert pids[0] == pids[1] != pids[2]  # growth counts from the end of its first job on
    assert pids[2] == pids[3] != pids[4]
    assert len({end.value for end in ends_of("processes", jobs, 1).values()}) == 5


@pytest.mark.parametrize(
    ("reuse", "jobs", "most"), [(False, 2, 1), (True, 3, 2)], ids=["fresh", "pool"]
)
def test_on_ray_a_worker_is_replaced_after_so_many_jobs(
    ray_cluster, reuse, jobs, most, monkeypatch
):
    monkeypatch.setattr(cluster, "_CALLS", 2)
    ends = ends_of("ray", {f"{n}": calls.process for n in range(jobs)}, 1, reuse=reuse)
    assert max(Counter(end.value for end in ends.values()).values()) <= most


@pytest.mark.parametrize("failures", [2, 3])
def test_a_cluster_that_starts_too_slowly_is_started_once_more(failures, monkeypatch):
    import ray

    starts = []

    def init(**options):
        starts.append(options)
        if len(starts) <= failures:
            raise Exception("The current node timed out during startup.")  # as Ray says it

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with (
        pytest.raises(Exception, match="timed out") if failures == 3 else nullcontext(),
        cluster.cluster(None),
    ):
        pass
    assert len(starts) == 3


def test_a_worker_that_dies_while_idle_costs_no_job_anything():
    engine = LocalEngine(1, reuse=True)
    try:
        pids = []
        for n in range(2):
            engine.start(Job(f"{n}", calls.process))
            while not (ends := engine.wait(10.0, lambda id, share, what: None)):
                pass
            assert not ends[0].died
            pids.append(ends[0].value)
            os.kill(pids[-1], signal.SIGKILL)
            engine._idle[0].process.join()
        assert pids[0] != pids[1]
    finally:
        engine.stop()


def test_no_process_to_be_had_is_an_ending(monkeypatch):
    def none_left(self):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(LocalEngine, "_worker", none_left)
    (end,) = ends_of("processes", {"a": calls.process}).values()
    assert "Too many open files; attempts: 2" in end.error


def test_progress_and_starts_are_told(where):
    heard, started, ticks = [], [], []
    with open_engine(where, 1) as engine:
        jobs = [Job("a", partial(calls.value, 1)), Job("b", partial(calls.value, 2))]
        told = {
            "started": started.append,
            "progress": lambda *what: heard.append(what),
            "tick": lambda: ticks.append(0),
        }
        assert [end.value for end in run_jobs(jobs, engine, **told)] == [1, 2]
    assert started == ["a", "b"]
    assert ticks
    if (
        where == "processes"
    ):  # Ray's queue may be read after the job has ended, and then nobody wants to know
        assert heard == [("a", 0.5, "half"), ("b", 0.5, "half")]


def test_an_interruption_lets_jobs_clean_up_and_leaves_no_process(where, tmp_path):
    begun, cleaned = tmp_path / "begun", tmp_path / "cleaned"
    jobs = [Job("a", partial(calls.waits_until_interrupted, begun, cleaned))]

    def interrupt():
        if begun.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_engine(where, 1) as engine:
        list(run_jobs(jobs, engine, tick=interrupt))
    assert cleaned.exists()
    assert not engine._running


def test_an_error_of_whoever_listens_is_not_taken_for_a_death():
    def full(*_):
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"), open_engine("processes", 1) as engine:
        list(run_jobs([Job("a", partial(calls.value, 1))], engine, progress=full))


def test_jobs_have_the_environment_and_threads_of_now(monkeypatch):
    for text in ("one", "two"):  # though all are forked from one process
        monkeypatch.setenv("JOMA_TEST", text)
        jobs = {name: partial(calls.environment, name) for name in ("JOMA_TEST", "OMP_NUM_THREADS")}
        ends = ends_of("processes", jobs, 1, threads=3)
        assert {id: end.value for id, end in ends.items()} == {
            "JOMA_TEST": text,
            "OMP_NUM_THREADS": "3",
        }


SCRIPT = """
import sys, warnings
from functools import partial
from joma._jobs import Job, local, open_engine, run_jobs
from tests.jobs import calls

local._GROWTH = 1e6
jobs = [Job(f"{n}", partial(calls.leaks, 10)) for n in range(4)] + [Job("warns", calls.warns)]
with open_engine("processes", 2, reuse=True) as engine:
    for end in run_jobs(jobs, engine):  # outside of any `if __name__ == "__main__"`
        print(end.id, end.error or "done")
"""


def test_workers_are_replaced_with_warnings_as_errors(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "error", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        *(f"{n} done" for n in range(4)),
        "warns UserWarning: look",
    ]
    assert not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dask",), "unknown engine 'dask'"),
        (("processes", "ray://head:10001"), "say --engine ray, too"),
    ],
)
def test_engines_that_are_not_there(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_engine(*arguments)
    assert check_engine("loky") == "processes"  # its old name
