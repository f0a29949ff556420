"""The state of a run: as it ended, or killed if its process is gone; from another machine, when it was written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

import joma
from joma._runs import Run, RunError, RunWriter, staged
from joma._runs.folder import LOCK
from joma.cli import app

SCRIPT = """
import sys, time
import torch, joma
from torch import nn

model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
w = joma.watch(model, run=sys.argv[1], every=1, live=False)
for n in range(100_000):
    model(torch.randn(2, 5, 8))
    w.step(loss=1.0)
    if n == 2:
        print("trains", flush=True)
    time.sleep(0.01)
"""


def ended_by(signal_number: int, folder: Path) -> Run:
    """Return the run of a training that was sent this signal while it trained."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "trains\n"
        assert Run(folder).status == "running"
        child.send_signal(signal_number)
        child.communicate()
        assert child.returncode == -signal_number
    finally:
        child.kill()  # whatever failed above, nothing goes on training
        child.communicate()
    return Run(folder)


def status_command(folder: Path) -> dict[str, object]:
    done = CliRunner().invoke(app, ["status", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return ended_by(signal.SIGKILL, tmp_path_factory.mktemp("state") / "killed")


def test_a_training_that_was_killed_is_not_running(killed: Run) -> None:
    assert killed.status == "killed"
    assert "ended without recording an end" in killed.state.remark
    assert status_command(killed.path)["status"] == "killed"
    text = CliRunner().invoke(app, ["status", str(killed.path)]).stdout
    assert "killed: killed (its process ended" in text
    assert "killed" in repr(killed)


def test_the_page_of_a_killed_run_says_so(killed: Run, tmp_path: Path) -> None:
    page = joma.report([killed.path], out=tmp_path / "page.html")
    text = Path(page).read_text(encoding="utf-8")
    assert (
        '<span class="badge bad">killed</span> its process ended without recording an end' in text
    )
    assert "running" not in text.partition("<section")[2].partition("</section>")[0]


def test_a_live_page_hears_of_a_kill_which_changes_no_file(tmp_path: Path) -> None:
    from joma._show.pages.live import LivePage

    writer = RunWriter.create(tmp_path / "run", kind="watch", config={})
    page = LivePage([tmp_path / "run"], every=0.0)
    version = page.version
    assert not page.done
    writer.leave()  # as the end of a process does
    page.current()
    assert page.version != version
    assert page.done


def test_ctrl_c_is_an_interruption_and_no_failure(tmp_path: Path) -> None:
    run = ended_by(signal.SIGINT, tmp_path / "run")
    assert run.info["status"] == run.status == "interrupted"
    assert run.info["reason"].startswith("KeyboardInterrupt")
    assert not (run.path / LOCK).exists()
    assert status_command(run.path)["status"] == "interrupted"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_writer_tells_an_interruption_from_a_failure(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def ends() -> None:
        with RunWriter.create(tmp_path / "run", kind="x", config={}):
            raise error

    with pytest.raises(error):
        ends()
    assert Run(tmp_path / "run").status == (
        "interrupted" if error is KeyboardInterrupt else "failed"
    )


def abandoned(folder: Path, **changes: object) -> Run:
    """Return a run whose writer is gone, with some entries of its `run.json` changed; None takes one out."""
    RunWriter.create(folder, kind="watch", config={}).leave()
    info = json.loads((folder / "run.json").read_text())
    info = {key: value for key, value in (info | changes).items() if value is not None}
    (folder / "run.json").write_text(json.dumps(info))
    return Run(folder)


def test_of_a_run_on_another_machine_it_is_said_when_it_was_written(tmp_path: Path) -> None:
    run = abandoned(tmp_path / "run", host="gpu-7")
    written = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
    for file in run.path.iterdir():
        os.utime(file, (written.timestamp(), written.timestamp()))
    assert run.status == "running"
    assert run.state.written == written
    assert "on gpu-7, last written 2026-03-04 05:06:07" in str(run.state)
    answer = status_command(run.path)
    assert (answer["host"], answer["written"]) == ("gpu-7", "2026-03-04T05:06:07+00:00")


def test_a_lock_that_is_held_counts_more_than_the_name_of_the_machine(tmp_path: Path) -> None:
    """Containers of one machine have different names, and see each other's locks."""
    writer = RunWriter.create(tmp_path / "run", kind="watch", config={})
    writer.note(host="container-1")
    assert str(Run(tmp_path / "run").state) == "running"
    writer.finish()


def test_a_run_of_an_earlier_version_names_no_machine_but_in_its_lock(tmp_path: Path) -> None:
    assert abandoned(tmp_path / "a", host=None).status == "killed"
    run = abandoned(tmp_path / "b", host=None)
    (run.path / LOCK).write_text("pid 3 on gpu-7")
    assert run.status == "running"
    assert "on gpu-7, last written" in run.state.remark


def test_without_locks_the_process_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    run = abandoned(tmp_path / "run")
    monkeypatch.setattr("joma._runs.state.is_free", lambda file: None)
    (run.path / LOCK).write_text(f"pid {os.getpid()} on {run.info['host']}")
    assert run.status == "running"
    (run.path / LOCK).write_text(f"pid {child.pid} on {run.info['host']}")
    assert run.status == "killed"


def test_a_look_at_the_state_does_not_turn_a_writer_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader holds the lock for a moment; the writer that comes in this moment waits for it."""
    import fcntl

    run = abandoned(tmp_path / "run")
    reader = os.open(run.path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(reader, fcntl.LOCK_SH)
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        fcntl.flock(reader, fcntl.LOCK_UN)  # the reader has seen what it wanted

    monkeypatch.setattr("joma._runs.folder.time.sleep", sleep)
    RunWriter.resume(run.path, {}).finish()
    os.close(reader)
    assert len(waits) == 1
    assert run.status == "done"


def test_messages_about_a_folder_call_a_killed_run_killed(tmp_path: Path) -> None:
    run = abandoned(tmp_path / "run")
    with pytest.raises(RunError, match="watch 'run', killed"):
        RunWriter.create(run.path, kind="watch", config={})
    with pytest.raises(RunError, match="watch 'run', killed"), staged(run.path):
        pass


def test_a_watch_can_be_closed_with_the_states_that_there_are(tmp_path: Path) -> None:
    from torch import nn

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    w = joma.watch(model, run=tmp_path / "run", every=1)
    with pytest.raises(
        ValueError, match="status must be one of done, failed, interrupted, diverged; got 'broken'"
    ):
        w.close("broken")
    w.close("interrupted", "the queue wanted the machine")
    assert str(Run(tmp_path / "run").state) == "interrupted (the queue wanted the machine)"
