"""A watch that cannot write, is given nonsense or is restarted says so in one sentence, and training goes on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from typer.testing import CliRunner

import joma
from joma._runs import Run, RunError, RunInUse
from joma.cli import app
from joma.integrations._deferred_watch import DeferredWatch
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def train(w, steps, **options):
    """Make steps (numbers, or None where the watch counts) with a loss of 1."""
    for step in steps:
        w.model(tokens())
        w.step(loss=1.0, step=step, **options)


def steps_of(path):
    return sorted(Run(path).frame("loss").step.unique())


# A full disk


@pytest.fixture
def disk(monkeypatch):
    """A switch that fills the disk: then no file can be written, but those that are there can be read and cut."""
    full = {"on": False}
    write, truncate = os.write, os.truncate

    def no_room(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def limited(descriptor, data):
        return no_room() if full["on"] else write(descriptor, data)

    path_open = Path.open

    def opened(self, mode="r", *arguments, **options):
        if full["on"] and set(mode) & set("wax"):
            no_room()
        return path_open(self, mode, *arguments, **options)

    monkeypatch.setattr(os, "write", limited)
    monkeypatch.setattr(os, "truncate", truncate)
    monkeypatch.setattr(Path, "open", opened)
    return full


def test_a_full_disk_loses_measurements_and_says_which(tmp_path, disk):
    model = HandWrittenGPT("sdpa")
    w = joma.watch(model, run=tmp_path / "run", every=1)
    train(w, [None] * 2)
    disk["on"] = True
    with pytest.warns(joma.JomaWarning) as recorded:
        train(w, [None] * 4)
    (warning,) = recorded  # once, however many steps there are
    assert "run cannot be written (No space left on device)" in str(warning.message)
    assert "the measurements of step 3 are lost" in str(warning.message)
    assert "Training goes on" in str(warning.message)
    disk["on"] = False
    train(w, [None] * 2)
    assert Run(tmp_path / "run").info["missing"] == [
        {"first": 3, "last": 6, "measurements": 4, "reason": "No space left on device"}
    ]  # as soon as there is room
    with pytest.warns(
        joma.JomaWarning, match=r"lacks 4 measurements of steps 3 to 6 \(No space left on device\)$"
    ):
        w.close()
    assert steps_of(tmp_path / "run") == [1, 2, 7, 8]
    assert Run(tmp_path / "run").done


def test_what_is_small_waits_for_room(tmp_path, disk):
    """Phases and alerts are a line per measurement: they are written when there is room again."""
    model = HandWrittenGPT("sdpa")
    w = joma.watch(model, run=tmp_path / "run", every=1)
    train(w, [None])
    disk["on"] = True
    with pytest.warns(joma.JomaWarning):
        train(w, [None] * 2)
    disk["on"] = False
    train(w, [None])
    kept = [
        json.loads(line)[0] for line in (tmp_path / "run/phases.jsonl").read_text().splitlines()
    ]
    assert kept == [1, 2, 3, 4]
    with pytest.warns(joma.JomaWarning):
        w.close()


def test_a_disk_that_is_full_to_the_end_is_no_error(tmp_path, disk):
    model = HandWrittenGPT("sdpa")
    w = joma.watch(model, run=tmp_path / "run", every=1, gauges=["entropy", "attention_drift"])
    train(w, [None])
    disk["on"] = True
    with pytest.warns(joma.JomaWarning):
        train(w, [None] * 3)
    with pytest.warns(joma.JomaWarning) as recorded:
        w.close()
    (warning,) = recorded
    assert "lacks 3 measurements of steps 2 to 4" in str(warning.message)
    assert "phases.jsonl (No space left on device)" in str(warning.message)
    assert "run.json (No space left on device)" in str(warning.message)
    disk["on"] = False
    assert Run(tmp_path / "run").status == "killed"  # the end could not be recorded


def test_status_and_page_name_what_is_missing(tmp_path, disk):
    model = HandWrittenGPT("sdpa")
    w = joma.watch(model, run=tmp_path / "run", every=1)
    train(w, [None])
    disk["on"] = True
    with pytest.warns(joma.JomaWarning):
        train(w, [None] * 3)
    disk["on"] = False
    train(w, [None])
    with pytest.warns(joma.JomaWarning):
        w.close()
    phrase = "3 measurements of steps 2 to 4 (No space left on device)"
    assert (
        f"not written: {phrase}"
        in CliRunner().invoke(app, ["status", str(tmp_path / "run")]).stdout
    )
    assert phrase in Path(joma.report([tmp_path / "run"], out=tmp_path / "page.html")).read_text()


def test_half_a_line_of_a_full_disk_does_not_spoil_the_next_one(tmp_path, monkeypatch):
    from joma._measure.watch.line_files import append_whole

    path = tmp_path / "phases.jsonl"
    append_whole(path, "[1]\n")
    write = os.write
    room = [2]

    def cut(descriptor, data):
        """Write to a disk with room for two more bytes."""
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", cut)
    with pytest.raises(OSError, match="No space"):
        append_whole(path, "[2]\n")
    monkeypatch.undo()
    append_whole(path, "[3]\n")
    assert path.read_text() == "[1]\n[3]\n"


# What cannot be written to, and nonsense


def test_a_folder_that_cannot_be_written_to_is_refused_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    model = HandWrittenGPT("sdpa")
    with pytest.raises(RunError, match=r"cannot write a run to .*file/run: .*; give run= a folder"):
        joma.watch(model, run=tmp_path / "file" / "run")

    def refused(self, *arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(
        RunError, match=r"cannot write a run to .*mine: Read-only file system; give run= a folder"
    ):
        joma.watch(model, run=tmp_path / "mine")
    monkeypatch.undo()
    joma.watch(model, run=tmp_path / "mine").close()  # the model is as it was


@pytest.mark.parametrize("make", [lambda run: joma.watch(HandWrittenGPT("sdpa"), run=run),
                                  lambda run: DeferredWatch(run, None, None, {})])  # fmt: skip
def test_a_run_that_is_no_path_is_refused(make):
    with pytest.raises(
        TypeError, match=r"run must be the path of a folder to write.*got 3 of type int"
    ):
        make(3)


@pytest.mark.parametrize("resume", [True, "auto"])
def test_overwrite_and_resume_contradict_each_other(tmp_path, resume):
    with pytest.raises(
        ValueError,
        match=f"overwrite=True replaces .* resume={resume!r} goes on .*: give one of them",
    ):
        joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", overwrite=True, resume=resume)
    with pytest.raises(ValueError, match="give one of them"):
        DeferredWatch(tmp_path / "run", None, None, {"overwrite": True, "resume": resume})
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="resume must be True, False or 'auto'; got 'always'"):
        joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", resume="always")


# The probe


class Raw(HandWrittenGPT):
    """Looks ids up without a module."""

    def forward(self, x):
        x = functional.embedding(x, self.embed.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Hashed(HandWrittenGPT):
    """Any id is fine."""

    def forward(self, x):
        return super().forward(x % VOCABULARY)


@pytest.mark.parametrize("kind", [HandWrittenGPT, Raw])
@pytest.mark.parametrize("wrong", [VOCABULARY, 50256, -1])
def test_ids_of_another_vocabulary_are_refused_before_training(tmp_path, kind, wrong):
    probe = tokens()
    probe[1, 2] = wrong
    bound = f"{wrong} to" if wrong < 0 else f"to {wrong}"
    with pytest.raises(
        ValueError,
        match=rf"probe: its ids are .*{bound}.*a vocabulary of {VOCABULARY} \(ids 0 to 60\)",
    ):
        joma.watch(kind("sdpa"), run=tmp_path / "run", probe=probe)
    assert not (tmp_path / "run").exists()


def test_ids_that_the_model_can_use_are_not_refused():
    model = Hashed("sdpa", dropout=0.5).train()
    state = torch.get_rng_state()
    with joma.watch(model, probe=1000 + tokens(), every=1, gauges="entropy") as w:
        assert torch.equal(
            torch.get_rng_state(), state
        )  # the check draws nothing, and leaves the modes
        assert all(module.training for module in model.modules())
        assert w.step()


def test_a_probe_that_fails_in_training_is_a_warning():
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, probe={"no_such_argument": tokens()}, every=1) as w:
        model(tokens())
        with pytest.warns(
            joma.JomaWarning,
            match="the pass of the probe failed with TypeError: .*no_such_argument",
        ):
            metrics = w.step(loss=1.0)
        assert metrics.keys() == {
            f"joma/stable_rank/layer_0{n}" for n in range(2)
        }  # of weights, without a pass
        assert w.step(loss=1.0)  # said once


# Steps


@pytest.mark.parametrize("again", [3, 2])
def test_a_step_that_does_not_increase_is_warned_of_and_not_recorded(tmp_path, again):
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, run=tmp_path / "run", every=1) as w:
        train(w, [1, 2, 3])
        with pytest.warns(joma.JomaWarning) as recorded:
            train(w, [again, again])
        (warning,) = recorded
        assert f"step {again} was given after step 3: steps must increase" in str(warning.message)
        assert w.last_step == 3
        train(w, [4, None])
    assert Run(tmp_path / "run").frame("loss").step.tolist() == [1, 2, 3, 4, 5]


def test_steps_may_be_counted_from_0():
    with joma.watch(HandWrittenGPT("sdpa"), every=1) as w:
        train(w, [0, 1, 2])
        assert sorted(w.frame().step.unique()) == [0, 1, 2]


def test_a_state_that_is_loaded_takes_the_run_back_to_its_step(tmp_path):
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, run=tmp_path / "run", every=1) as w:
        train(w, [1, 2, 3], lr=0.5)
        state = w.state_dict()
        train(w, [4, 5, 6], lr=0.5)
        w.load_state_dict(state)
        train(w, [4, 5], lr=0.25)
        table = w.frame().query("gauge == 'loss'")
        assert table.step.tolist() == [1, 2, 3, 4, 5]
        assert table.tau.tolist() == [0.5, 1.0, 1.5, 1.75, 2.0]
    kept = [
        json.loads(line)[0] for line in (tmp_path / "run/phases.jsonl").read_text().splitlines()
    ]
    assert kept == [1, 2, 3, 4, 5]


# A restart


def killed(path, steps, **options):
    """Leave a run whose process is gone."""
    model = HandWrittenGPT("sdpa")
    w = joma.watch(model, run=path, **{"every": 1, **options})
    train(w, steps)
    w._loop.detach()
    w._closed = True
    w._loop.record.writer.leave()


def test_a_second_run_of_a_name_is_a_warning_with_the_way_out(tmp_path):
    killed(tmp_path / "run", [1, 2])
    with pytest.warns(joma.JomaWarning) as recorded:
        w = joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1)
    w.close()
    (warning,) = recorded
    assert warning.filename == __file__
    text = str(warning.message)
    assert f"{tmp_path / 'run'} holds a run already (killed, created " in text
    assert f"this one goes to {tmp_path / 'run-2'}" in text
    assert "resume='auto'" in text
    assert "overwrite=True" in text
    assert w.path == tmp_path / "run-2"


@pytest.mark.parametrize("end", ["killed", "interrupted", "failed"])
def test_auto_goes_on_with_a_run_that_did_not_come_to_its_end(tmp_path, end):
    if end == "killed":
        killed(tmp_path / "run", [1, 2])
    else:
        w = joma.watch(
            HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1, resume="auto"
        )  # there is none yet
        train(w, [1, 2])
        w.close(end)
    with joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1, resume="auto") as w:
        assert w.path == tmp_path / "run"
        train(w, [None, None])
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert Run(tmp_path / "run").done


def test_auto_goes_on_where_the_run_was_begun_on_another_machine(tmp_path):
    """A scheduler restarts a job on any node that is free."""
    killed(tmp_path / "run", [1, 2])
    info = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps(info | {"host": "node-3"}))
    with joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1, resume="auto") as w:
        train(w, [None])
    assert steps_of(tmp_path / "run") == [1, 2, 3]


def test_auto_starts_a_new_run_where_the_old_one_is_done_or_another(tmp_path):
    with joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1, resume="auto") as w:
        train(w, [1])
    with pytest.warns(
        joma.JomaWarning,
        match=r"run-2\. resume='auto' did not go on with .*run, since it came to its",
    ):
        killed(tmp_path / "run", [1], resume="auto")
    with joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1, resume="auto") as w:
        assert w.path == tmp_path / "run-2"  # the newest of this name was killed
        train(w, [None])
        w.close("interrupted")
    with pytest.warns(
        joma.JomaWarning,
        match=r"run-3\. .* its config is another one: every: 1 in the run, 2 asked",
    ):
        w = joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=2, resume="auto")
    w.close()
    assert steps_of(tmp_path / "run") == [1]
    assert steps_of(tmp_path / "run-2") == [1, 2]


def test_auto_does_not_take_a_run_from_its_process(tmp_path):
    with joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1), pytest.raises(RunInUse):
        joma.watch(HandWrittenGPT("sdpa"), run=tmp_path / "run", every=1, resume="auto")
