"""Sweeps: grids, what is done already, failures, and workers that are killed, on processes and on a Ray cluster."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import joma
from joma._jobs.machine import threads
from joma._runs import RunError, RunWriter
from joma._train import sweep as sweeps
from joma._train.settings import Settings
from joma._train.step import Stepper
from joma._train.sweep import grid, status, sweep
from joma.cli import main
from joma.cli.train import _values
from tests.jobs import calls

TINY = Settings(vocabulary=300, width=16, hidden=24, heads=2, length=12, batch=4, every=5, valid_windows=2,
                probe_windows=1, steps=12)  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_grid_and_values():
    runs = grid(TINY, {"layers": [1, 2], "lr": [1e-4, 1e-3], "data": ["pydoc"]})
    assert list(runs) == [
        "layers=1,lr=0.0001",
        "layers=1,lr=0.001",
        "layers=2,lr=0.0001",
        "layers=2,lr=0.001",
    ]
    assert runs["layers=2,lr=0.001"].lr == 1e-3
    assert _values("seed", "0..2,7", int) == [0, 1, 2, 7]
    assert _values("lr", "1e-5,1e-4", float) == [1e-5, 1e-4]
    assert _values("vocabulary", "4000", int | None) == [4000]
    assert _values("data", "../a..b,hblt:rho=0.9,depth=4,pydoc", str) == [
        "../a..b",
        "hblt:rho=0.9,depth=4",
        "pydoc",
    ]
    assert _values("norm_first", "true,false", bool) == [True, False]
    for name, text, kind, message in (
        ("layers", "1.5", int, r"--layers: '1.5' is not a whole number"),
        ("seed", "3..1", int, r"--seed: '3..1' is not a whole number, or a range"),
        ("lr", "1..3", float, r"--lr: '1..3' is not a number"),
    ):
        with pytest.raises(ValueError, match=message):
            _values(name, text, kind)


@pytest.mark.parametrize(
    "choices",
    [{"lr": [1e-4, 1.0000001e-4]}, {"data": ["a/b", "a_b"]}, {"seed": [0, 0]}],
    ids=["lr", "data", "seed"],
)
def test_two_runs_never_share_a_folder(choices):
    with pytest.raises(ValueError, match="two runs would share the folder"):
        grid(TINY, choices)


def test_threads_as_asked_and_as_a_run_began(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr("joma._jobs.machine.cores", lambda: 3)
    before = torch.get_num_threads()
    runs = grid(replace(TINY, steps=1), {"threads": [2, 0]})
    runs = {name: settings for name, settings in runs.items() if name == "threads=2"} | {
        "free": runs["threads=0"]
    }
    sweep(runs, tmp_path)
    assert [joma.Run(tmp_path / name).info["config"]["threads"] for name in runs] == [2, 3]
    monkeypatch.setattr("joma._jobs.machine.cores", lambda: 1)  # now each would have one
    assert [o.status for o in sweep(runs, tmp_path)] == ["done", "done"]
    torch.set_num_threads(before)


def test_results_of_other_settings_are_refused(tmp_path):
    runs = grid(TINY, {"seed": [0, 1]})
    sweep({"seed=1": runs["seed=1"]}, tmp_path)
    other = grid(replace(TINY, steps=13, gauges=("entropy",)), {"seed": [0, 1]})
    with pytest.raises(
        RunError, match=r"seed=1 was .* \(steps: 12 in the run, 13 asked; gauges: .* \['entropy'\]"
    ):
        sweep(other, tmp_path)
    assert not (tmp_path / "seed=0").exists()  # before any work


def test_an_interrupted_sweep_goes_on(tmp_path, monkeypatch):
    runs = grid(TINY, {"seed": [0, 1]})
    step, steps = Stepper.step, []

    def interrupted(self, *window):
        steps.append(0)
        if len(steps) == 17:  # in the second run
            raise KeyboardInterrupt
        return step(self, *window)

    monkeypatch.setattr(Stepper, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep(runs, tmp_path)
    assert status(tmp_path)["status"].tolist() == ["done", "interrupted"]
    assert [o.status for o in sweep(runs, tmp_path)] == ["done", "done"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed=0", "seed=1"]


def test_a_run_whose_worker_always_dies_is_given_up_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(sweeps, "_train_one", calls.train_killed)
    runs = grid(TINY, {"seed": [0]})
    (end,) = sweep(runs, tmp_path / "out", workers=2)
    assert end.status == "failed"
    assert end.reason.startswith("its process was killed (SIGKILL)")
    assert (tmp_path / "attempts").read_text().count("\n") == 3


def test_the_command_prints_brackets_as_they_are(tmp_path, monkeypatch, capsys):
    options = {
        key: getattr(TINY, key)
        for key in ("vocabulary", "width", "hidden", "length", "batch", "valid_windows")
    }
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    out = tmp_path / "[a]"
    command = [
        "joma",
        "sweep",
        *arguments,
        "--steps=2",
        "--data=pydoc,no[/x]such",
        f"--out={out}",
    ]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = capsys.readouterr()
    assert "unknown corpus 'no[/x]such'" in said.err
    with RunWriter.create(out / "[b]", kind="train", config={}) as writer:
        writer.finish("failed", "no [/x] here")
    monkeypatch.setattr(sys, "argv", ["joma", "status", str(out)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    said = capsys.readouterr()
    assert "[b]" in said.out
    assert "no [/x] here" in said.out


def test_a_sweep(fork_server, tmp_path):
    runs = grid(TINY, {"seed": [0, 1], "lr": [1e-3, 1e18], "clip": [0.0]})
    reported = []
    outcomes = sweep(
        runs, tmp_path, workers=2, report=lambda end, n, total: reported.append((n, total))
    )
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


@pytest.fixture(params=["processes", "ray"])
def engine(request):
    """With warnings as errors, as everywhere in these tests."""
    request.getfixturevalue({"processes": "fork_server", "ray": "ray_cluster"}[request.param])
    return request.param


@pytest.mark.timeout(600)  # three processes that import torch, on Ray one after the other
def test_a_killed_worker_loses_no_run_and_what_one_leaks_is_gone_with_it(
    engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(sweeps, "_train_one", calls.train_killed_once)
    runs = grid(replace(TINY, steps=40), {"seed": [0, 1]})
    ends = sweep(runs, tmp_path / "out", workers=2, engine=engine, checkpoint_every=20)
    assert (tmp_path / "killed").read_text().count("\n") > 1  # it was killed, and went on
    assert [end.status for end in ends] == ["done"] * 2
    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) == len(set(processes)) == 3  # each attempt in one of its own
    monkeypatch.undo()
    alone = sweep({"alone": runs["seed=1"]}, tmp_path)[0]
    whole, resumed = (
        [row for row in joma.Run(path).rows() if row["gauge"] == "loss"]
        for path in (alone.path, tmp_path / "out/seed=1")
    )
    assert [row["step"] for row in whole] == [
        row["step"] for row in resumed
    ]  # nothing lost, nothing twice
    assert [row["value"] for row in whole] == pytest.approx(
        [row["value"] for row in resumed], rel=1e-4
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "at least one worker"),
        ({"engine": "dask"}, "unknown engine"),
        ({"checkpoint_every": 0}, "checkpoint every must be a whole number of at least 1"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep(grid(TINY, {}), tmp_path, **options)


@pytest.mark.parametrize(
    ("asked", "workers", "expected"), [("3", 2, 3), ("", 2, 4), ("", 16, 1), ("none", 1, 8)]
)
def test_threads_are_those_asked_for_or_a_share_of_the_cores(asked, workers, expected, monkeypatch):
    monkeypatch.setattr("joma._jobs.machine.cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads(workers) == expected
