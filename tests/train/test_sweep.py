"""Sweeps: grids, what is done already, failures, and workers that are killed, on processes and on a Ray cluster."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import joma
from joma._run.folder import LOCK
from joma._train.cli import _values
from joma._train.settings import Settings, threads
from joma._train.sweep import grid, status, sweep

TINY = Settings(vocabulary=300, width=16, hidden=24, heads=2, length=12, batch=4, every=5, valid_windows=2,
                probe_windows=1, steps=12)  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_grid_and_values():
    runs = grid(TINY, {"layers": [1, 2], "lr": [1e-4, 1e-3], "data": ["pydoc"]})
    assert list(runs) == ["layers=1,lr=0.0001", "layers=1,lr=0.001", "layers=2,lr=0.0001", "layers=2,lr=0.001"]
    assert runs["layers=2,lr=0.001"].lr == 1e-3
    assert _values("seed", "0..2,7", int) == [0, 1, 2, 7]
    assert _values("lr", "1e-5,1e-4", float) == [1e-5, 1e-4]
    assert _values("vocabulary", "4000", int | None) == [4000]
    with pytest.raises(ValueError, match=r"--layers: '1.5' is not a whole number"):
        _values("layers", "1.5", int)


def test_a_sweep(tmp_path):
    runs = grid(TINY, {"seed": [0, 1], "lr": [1e-3, 1e18], "clip": [0.0]})
    reported = []
    outcomes = sweep(runs, tmp_path, workers=2, report=lambda outcome, n, total: reported.append((n, total)))
    assert [o.status for o in outcomes] == ["done", "diverged", "done", "diverged"]
    assert reported == [(n, 4) for n in range(1, 5)]
    table = status(tmp_path)
    assert sorted(table["status"]) == ["diverged", "diverged", "done", "done"]
    assert table[table.status == "done"].step.tolist() == [12, 12]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")}
    again = sweep(runs, tmp_path, workers=2)
    assert [o.status for o in again] == [o.status for o in outcomes]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/metrics.jsonl")} == times


def test_a_failed_run_is_reported_and_can_be_retried(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("too short")
    runs = grid(TINY, {"data": [str(text), "pydoc"]})
    outcomes = sweep(runs, tmp_path / "out")
    assert [o.status for o in outcomes] == ["failed", "done"]
    assert "token" in outcomes[0].reason
    text.write_text("one two three four five six seven eight nine ten " * 400)
    assert [o.status for o in sweep(runs, tmp_path / "out", retry=True)] == ["done", "done"]


def kill_one_worker(folder: Path, killed: list[int]) -> None:
    """SIGKILL the process that holds the lock of some run, once it has a checkpoint."""
    for _ in range(2400):
        time.sleep(0.05)
        for lock in folder.glob(f"*/{LOCK}"):
            try:
                pid = int(lock.read_text().split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if pid != os.getpid() and any((lock.parent / "checkpoints").glob("step-*")):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return


@pytest.mark.filterwarnings("ignore::Warning")  # of Ray and of the dying pool
@pytest.mark.parametrize("engine", ["loky", "ray"])
def test_a_killed_worker_loses_no_run(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    runs = grid(TINY, {"seed": [0, 1, 2], "steps": [400]})
    alone = sweep({"alone": runs["seed=1"]}, tmp_path)[0]
    killed: list[int] = []
    killer = threading.Thread(target=kill_one_worker, args=(tmp_path / "out", killed), daemon=True)
    killer.start()
    outcomes = sweep(runs, tmp_path / "out", workers=2, engine=engine, checkpoint_every=20)
    killer.join(timeout=1)
    assert killed
    assert [o.status for o in outcomes] == ["done"] * 3
    mine, other = (
        [row for row in joma.Run(path).rows() if row["gauge"] == "loss"]
        for path in (alone.path, tmp_path / "out/seed=1")
    )
    assert [row["step"] for row in mine] == [row["step"] for row in other]  # nothing lost, nothing twice
    assert [row["value"] for row in mine] == pytest.approx([row["value"] for row in other], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"), [({"workers": 0}, "at least one worker"), ({"engine": "dask"}, "unknown engine")]
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep(grid(TINY, {}), tmp_path, **options)


@pytest.mark.parametrize(("asked", "workers", "expected"), [("3", 2, 3), ("", 2, 4), ("", 16, 1), ("none", 1, 8)])
def test_threads_are_those_asked_for_or_a_share_of_the_cores(asked, workers, expected, monkeypatch):
    monkeypatch.setattr("joma._train.settings.cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads(workers) == expected
