"""The queue of long runs: killed it goes on, it stands still while tests run, and counts its processor time."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from joma._runs.lock import take

SCRIPT = Path(__file__).parents[1] / "docs" / "record.py"
# counts to 5 in a file, one number per start of 0.2 s of work, and goes on from what is there
COUNT = """
import json, pathlib, sys, time
file = pathlib.Path(sys.argv[1]) / "count.json"
file.parent.mkdir(parents=True, exist_ok=True)
n = json.loads(file.read_text())["n"] if file.exists() else 0
while n < int(sys.argv[2]):
    end = time.process_time() + 0.2
    while time.process_time() < end: pass
    n += 1
    file.write_text(json.dumps(dict(n=n)))
"""


def load(monkeypatch, tests_lock):
    spec = importlib.util.spec_from_file_location("record", SCRIPT)
    record = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "record", record)
    spec.loader.exec_module(record)
    assert record.tests_run()  # these
    record.TESTS, record.POLL = tests_lock, 0.05
    return record


@pytest.fixture
def record(monkeypatch, tmp_path):
    return load(monkeypatch, tmp_path / "tests.lock")


def counting(record, name, n=5):
    return record.Item(name, 1, "counts", ("-c", COUNT.replace("{", "{{").replace("}", "}}"), "{out}", str(n)),
                       files=("count.json",))  # fmt: skip


def test_items_run_and_are_recorded_and_not_done_twice(record, tmp_path):
    failing = record.Item(
        "fails", 1, "fails", ("-c", "import sys; sys.exit('no data')"), files=("x.json",)
    )
    items = (counting(record, "a"), failing, counting(record, "b"))
    queue = record.Queue(items, tmp_path / "out", tmp_path / "recorded")
    queue.run()
    state = json.loads((tmp_path / "out/record.json").read_text())["items"]
    assert {name: entry["status"] for name, entry in state.items()} == {
        "a": "done",
        "fails": "failed",
        "b": "done",
    }
    assert "no data" in state["fails"]["reason"]
    recorded = json.loads((tmp_path / "recorded/a.json").read_text())
    assert recorded["count.json"] == {"n": 5}
    assert len(recorded["commit"]) == 40
    assert state["a"]["cpu_seconds"] > 0
    before = (tmp_path / "recorded/a.json").stat().st_mtime_ns
    record.Queue(items, tmp_path / "out", tmp_path / "recorded").run()
    assert (tmp_path / "recorded/a.json").stat().st_mtime_ns == before


def test_killed_it_goes_on_and_ends_what_was_left(record, tmp_path):
    """SIGKILL leaves the item's process; the next start ends it, and the item goes on from its last number."""
    out, count = tmp_path / "out", tmp_path / "out/a/count.json"
    script = f"""
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("record", {str(SCRIPT)!r})
record = importlib.util.module_from_spec(spec); sys.modules["record"] = record; spec.loader.exec_module(record)
record.TESTS, record.POLL = pathlib.Path({str(tmp_path / "tests.lock")!r}), 0.05
item = record.Item("a", 1, "counts", ("-c", {COUNT.replace("{", "{{").replace("}", "}}")!r}, "{{out}}", "1000"))
record.Queue((item,), pathlib.Path({str(out)!r}), pathlib.Path({str(tmp_path / "recorded")!r})).run()
"""
    first = subprocess.Popen([sys.executable, "-c", script.replace("{{out}}", "{out}")])
    wait(lambda: count.exists() and psutil.Process(first.pid).children())
    (item,) = psutil.Process(first.pid).children()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert item.is_running()
    reached = json.loads(count.read_text())["n"]
    queue = record.Queue((counting(record, "a", reached + 3),), out, tmp_path / "recorded")
    queue.run()
    assert not item.is_running()
    assert json.loads(count.read_text())["n"] >= reached + 3
    assert queue.state.items["a"]["status"] == "done"


def test_it_stands_still_while_tests_run(record, tmp_path):
    queue = record.Queue((counting(record, "a", 1000),), tmp_path / "out", tmp_path / "recorded")
    queue._start()
    (job,) = queue.jobs
    try:
        held = take(record.TESTS, shared=True)
        assert record.tests_run()
        queue._pause(record.tests_run())
        wait(lambda: psutil.Process(job.process.pid).status() == psutil.STATUS_STOPPED)
        os.close(held)
        assert not record.tests_run()
        queue._pause(record.tests_run())
        wait(lambda: psutil.Process(job.process.pid).status() != psutil.STATUS_STOPPED)
    finally:
        job.stop()
    assert job.process.returncode is not None


def test_the_budget_ends_it(record, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "BUDGET", 0.3 / 3600)
    queue = record.Queue((counting(record, "a", 1000),), tmp_path / "out", tmp_path / "recorded")
    queue.run()
    assert queue.state.items["a"]["status"] == "waiting"
    assert queue.state.hours >= 0.3 / 3600
    assert not queue.jobs[0].tree()


def test_the_table_is_the_one_of_the_queue(record):
    """And all of it fits into the budget."""
    assert (SCRIPT.parent / "record.md").read_text() == record.budget_table(record.ITEMS)
    assert sum(item.minutes for item in record.ITEMS) / 60 < record.BUDGET


def wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
