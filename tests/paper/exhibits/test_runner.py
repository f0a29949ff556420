"""Many exhibits at a time: failures, deaths, restarts, threads, claims, tables, and bad folders before any work."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import altair as alt
import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from joma import Run
from joma._jobs import InProcess
from joma._runs import RunError, write_json
from joma._show.pages.page import write_report
from joma.cli import main
from joma.cli import reproduce as reproduce_command
from joma.paper import claims as registry
from joma.paper.claims import Claim
from joma.paper.exhibits import exhibits, get
from joma.paper.exhibits.base import Exhibit, Experiment
from joma.paper.exhibits.judgement import Judgement
from joma.paper.exhibits.making import ExhibitOutcome
from joma.paper.exhibits.runner import (
    Entry,
    ExhibitObserver,
    Reproduction,
    Runner,
    stored_claims,
    time_left,
)
from joma.paper.verdict import Verdict


@dataclass(frozen=True)
class Fake:
    """A run that does what its id says; found again by name in the processes."""

    id: str

    def run(self, writer, settings, seed, progress):
        import torch

        if self.id == "broken":
            raise ZeroDivisionError("no <number>\nbut details")
        writer.write(
            0, {"threads": torch.get_num_threads(), "omp": int(os.environ["OMP_NUM_THREADS"])}
        )
        progress(0.5, "half")
        if self.id == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(200, 200, generator=torch.Generator().manual_seed(seed))
        writer.write(
            1, {"value": float((x @ x).sum()), "blas": float((x.numpy() @ x.numpy()).sum())}
        )


def draw(run):
    return alt.Chart(pd.DataFrame({"x": [1, 2]})).mark_point().encode(x="x:Q")


def judge(run):
    return Judgement(Verdict.HOLDS, {"one": 1.0}, "all of it", "one {one}")


def fakes(*ids):
    made = []
    for id in ids:
        experiment = Experiment({"default": {"n": 3}}, Fake(id).run, draw, judge)
        made.append(
            Exhibit(
                id=id,
                title=f"Title of {id}",
                statement=f"The paper says {id}.",
                rule="none",
                paper="0.5",
                experiment=experiment,
            )
        )
    return made


class Kept(ExhibitObserver):
    """Keep what a runner shows."""

    def __init__(self):
        self.entries = []
        self.left = []
        self.states = []
        self.forecast = None

    def planned(self, entries, seconds):
        self.forecast = seconds

    def tick(self, entries, seconds):
        self.states.append(entries[0].state)
        self.left.append(seconds)

    def finished(self, entry):
        self.entries.append(entry)


def metrics(out):
    return {path.parent.name: path.read_bytes() for path in out.glob("*/metrics.jsonl")}


def test_one_that_raises_and_one_that_is_killed_stop_no_other_and_are_tried_again(tmp_path):
    exhibits = fakes("broken", "killed", "good", "fine")
    observer = Kept()
    found = Runner(exhibits, out=tmp_path, jobs=2, observer=observer).run()
    assert [outcome.exhibit.id for outcome in found.outcomes] == [
        "broken",
        "killed",
        "good",
        "fine",
    ]
    assert {entry.id for entry in observer.entries} == {"broken", "killed", "good", "fine"}
    assert not found.ok
    broken, killed, good, fine = found.outcomes
    assert broken.error == "ZeroDivisionError: no <number>"
    assert "SIGKILL" in killed.error
    assert good.verdict == fine.verdict == judge(None)
    assert "Traceback" in (tmp_path / "broken.error.txt").read_text()
    page = write_report(tmp_path, exhibits, None, preset="default", seed=0).read_text()
    assert "no &lt;number&gt;" in page
    assert "SIGKILL" in page
    assert [
        p.name for p in tmp_path.iterdir() if p.name.startswith(".")
    ] == []  # the killed one's staging folder
    rows = {row["gauge"]: row["value"] for row in Run(good.path).rows()}
    assert rows["threads"] == rows["omp"] == 1

    before = {id: (tmp_path / id / "run.json").stat().st_mtime_ns for id in ("good", "fine")}
    again = Runner(exhibits[1:], out=tmp_path, jobs=1).run()
    assert [outcome.fresh for outcome in again.outcomes] == [True, False, False]
    assert {id: (tmp_path / id / "run.json").stat().st_mtime_ns for id in before} == before

    other = tmp_path / "one at a time"
    assert Runner(exhibits[2:], out=other, jobs=1).run().ok
    assert metrics(other) == metrics(tmp_path)


def test_on_ray(ray_cluster, tmp_path):
    observer = Kept()
    found = Runner(
        get(["fig3"]),
        out=tmp_path,
        engine="ray",
        jobs=1,
        observer=observer,
    ).run()
    assert found.ok
    assert found.outcomes[0].verdict.verdict == "holds"
    assert "running" in observer.states
    assert Run(tmp_path / "fig3").done


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jobs": 0}, "at least one job at a time is needed, got 0"),
        ({"engine": "rya"}, "unknown engine 'rya'. Did you mean 'ray'"),
        ({"address": "ray://head:10001"}, "say --engine ray"),
    ],
)
def test_bad_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Runner(fakes("good"), out=tmp_path / "out", **options).run()
    assert not (tmp_path / "out").exists()


def test_a_missing_ray_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'joma\[ray\]'"):
        Runner(fakes("good"), out=tmp_path, engine="ray").run()


@pytest.mark.parametrize("which", ["out", "report"])
@pytest.mark.parametrize("fault", ["a file", "no room", "read-only", "almost full"])
def test_a_bad_folder_is_refused_before_any_work(which, fault, tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "_make", lambda *args: pytest.fail("work was begun"))
    folder, message = (
        tmp_path / "there",
        {"a file": "Not a directory", "no room": "No space left on device"}.get(fault),
    )
    if fault == "a file":
        (tmp_path / "file").touch()
        folder = tmp_path / "file" / "there"
    elif fault == "almost full":
        usage, message = shutil.disk_usage(tmp_path), "3 MB are free"
        low = usage._replace(free=3_000_000)
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: low if folder in (path, *path.parents) else usage
        )
    else:
        number = errno.ENOSPC if fault == "no room" else errno.EROFS
        message = os.strerror(number)
        real = type(tmp_path).open

        def refuse(self, *args, **kwargs):
            if self.parent == folder:
                raise OSError(number, message)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(type(tmp_path), "open", refuse)
    places = (
        {"out": folder}
        if which == "out"
        else {"out": tmp_path / "out", "report": folder / "report.html"}
    )
    with pytest.raises(RunError, match=f"cannot write to {folder}: {message}.*another --{which}"):
        Runner(fakes("good"), **places).run()


def test_a_report_that_is_a_folder(tmp_path):
    with pytest.raises(RunError, match="is a folder; name a file"):
        Runner(fakes("good"), out=tmp_path / "out", report=tmp_path).run()


CLAIM = {"source": "", "statement": "s", "measures": "", "control": "", "tolerance": 0.5}


def test_claims_are_checked_once_and_again_when_something_changed(tmp_path, monkeypatch):
    checked = []

    def check(variant):
        checked.append(variant)
        return np.inf if variant == "control" else 0.0

    some = [Claim(id=id, check=check, **CLAIM) for id in ("A", "B")]
    monkeypatch.setattr(registry, "claims", lambda: tuple(some))

    monkeypatch.setattr(
        "joma.paper.exhibits.runner.open_engine", lambda *args, **kwargs: nullcontext(InProcess())
    )
    for expected in (4, 0):
        checked.clear()
        found = Runner([], out=tmp_path, claims=True).run()
        assert found.ok
        assert len(checked) == expected
        assert [result.control_value for result in found.claims] == [np.inf, np.inf]
        assert found.claims_fresh == (expected > 0)
    assert stored_claims(tmp_path) == found.claims
    some[1] = Claim(id="B", check=check, **{**CLAIM, "tolerance": 0.25})
    assert stored_claims(tmp_path) is None
    assert Runner([], out=tmp_path, claims=True).run().claims_fresh
    checked.clear()
    assert Runner([], out=tmp_path, claims=True, force=True).run().ok
    assert len(checked) == 4
    some[0] = Claim(id="A", check=lambda variant: 0.0, **CLAIM)  # accepts its control
    assert not Runner([], out=tmp_path, claims=True, force=True).run().ok
    assert stored_claims(tmp_path) is None  # what is wrong is not kept
    (tmp_path / "claims.json").write_text("[]")
    assert stored_claims(tmp_path) is None


def test_without_names_all_exhibits_and_the_claims_are_asked_for(tmp_path, monkeypatch, capsys):
    asked = {}

    def run(self):
        asked.update(vars(self))
        broken = ExhibitOutcome(self.exhibits[0], self.out, None, 0.0, error="ValueError: no")
        return Reproduction(
            [broken],
            [registry.check(Claim(id="A", check=lambda variant: variant == "control", **CLAIM))],
        )

    monkeypatch.setattr(Runner, "run", run)
    out = tmp_path / "[a]"  # would be a style, were it markup
    out.mkdir()
    monkeypatch.setattr(
        sys, "argv", ["joma", "reproduce", "--out", str(out), "--jobs", "3", "--seed", "2"]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1  # one was not made
    assert asked["claims"]
    assert asked["exhibits"] == list(exhibits().values())
    assert (asked["preset"], asked["jobs"], asked["seed"], asked["force"]) == (
        "default",
        3,
        2,
        False,
    )
    said = capsys.readouterr().out
    assert "ValueError: no" in said
    assert "1 claims" in said
    assert f"report: {out}/report.html" in said
    assert (out / "report.html").exists()


def entry(id, expected, state="waiting", share=0.0, started=0.0, seconds=0.0, what="at it"):
    return Entry(fakes(id)[0], expected, state, share, what, started, seconds, "holds")


def test_time_left():
    assert (
        time_left([entry("a", 10), entry("b", 6), entry("c", 5)], 2, 0.0) == 11
    )  # b and c share a worker
    assert time_left([entry("a", 10), entry("b", 6), entry("c", 5)], 1, 0.0) == 21
    assert time_left([entry("a", 10, "running")], 1, 4.0) == 6
    assert time_left([entry("a", 10, "running")], 1, 40.0) == 0
    assert (
        time_left([entry("a", 10, "done", seconds=20), entry("b", 5)], 1, 0.0) == 10
    )  # this machine is half as fast
    assert time_left([entry("a", 8, "running", share=0.5)], 1, 4.0) == 4  # just as expected
    assert (
        time_left([entry("a", 8, "running", share=0.5)], 1, 40.0) == 30
    )  # half of what lies between 40 (spent) and 80
    assert time_left([entry("a", 8, "done")], 2, 0.0) == 0


def printed(width, what, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, **options)
    what(console)
    return stream.getvalue()


def reproduction():
    good, broken, long = fakes("good", "broken", "parameterised")
    verdict = Judgement(Verdict.CORRECTED, {"gap": 0.123}, "all", "gap of {gap} [nats]")
    wordy = Judgement(Verdict.FAILS, {}, "a summary of many words that goes on and on " * 3)
    return Reproduction(
        [
            ExhibitOutcome(good, None, verdict, 12.3),
            ExhibitOutcome(broken, None, None, 0.1, error="ValueError: [red]no"),
            ExhibitOutcome(long, None, wordy, 0.0, fresh=False),
        ],
        claims_error="its process was killed",
    )


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_last_table_is_readable_at_any_width(width):
    text = printed(
        width, lambda console: reproduce_command._print(console, reproduction()), no_color=True
    )
    assert "\x1b" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text  # nothing is cut off
    for piece in ("The paper says good.", "gap of 0.123 [nats]", "0.5", "wrong as printed, corrected", "12 s", "cached", "killed",
                  "ValueError: [red]no"):  # fmt: skip
        assert piece in text
    (line,) = [line for line in lines if line.startswith("good")]
    assert "wrong as printed, corrected" in line
    assert "12 s" in line


@pytest.mark.parametrize("width", [60, 100])
def test_the_live_table_has_one_line_per_entry(width):
    entries = [
        entry("fig3", 5),
        entry("parameterised", 5, "running", 0.43),
        entry("fig9", 5, "done", seconds=3, what="words " * 40),
    ]
    text = printed(
        width, lambda console: console.print(reproduce_command.live_table(entries, 75.0, 9.0))
    )
    lines = text.splitlines()
    assert len(lines) == len(entries) + 2
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines[:3]] == ["fig3", "parameterised", "fig9"]
    assert "waiting" in lines[0]
    assert "43%" in lines[1]
    assert "9.0 s" in lines[1]
    assert "holds" in lines[2]
    assert lines[-1] == "1 of 3 done, about 75 s left"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pipe_gets_a_plain_line_for_each_and_a_terminal_a_live_table(terminal, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    out, err = Stream(), Stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    observer = reproduce_command._observer(as_json=False)
    observer.planned([entry("fig3", 5)], 5.0)
    for state in ("running", "done"):
        now = entry("fig3", 5, state, started=time.monotonic(), seconds=3.0)
        observer.tick([now], 1.0)
    observer.finished(now)
    observer.ended()
    assert ("\x1b[" in err.getvalue()) == terminal
    if not terminal:
        assert err.getvalue() == "fig3: holds (3.0 s): at it\n"
    assert out.getvalue() == ""


def test_times(tmp_path):
    assert [reproduce_command._clock(s) for s in (0.04, 9.94, 12, 99.4, 100, 3725, 36000)] == [
        "0.0 s", "9.9 s", "12 s", "99 s", "1:40 min", "62:05 min", "10:00 h",
    ]  # fmt: skip
    write_json(tmp_path / "times.json", {"default": {"good": 1234.5}})
    observer = Kept()
    Runner(fakes("good"), out=tmp_path, jobs=1, observer=observer).run()
    assert observer.forecast == 1234.5  # as long as the last time
    assert 1000 < observer.left[0] <= 1234.5
    assert observer.left[-1] == 0
