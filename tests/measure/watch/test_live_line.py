"""The live line leaves the terminal to others: no stream is taken over, and a progress bar goes first."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
from types import ModuleType

import pytest
import torch

import joma
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT

MODEL = """
import sys
import torch, joma
from torch import nn
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
streams = sys.stdout, sys.stderr
w = joma.watch(model, every=1, live={live})

def step(n):
    model(torch.randn(2, 5, 8))
    w.step(loss=1.0 / (1 + n))
    assert (sys.stdout, sys.stderr) == streams, "a stream was replaced"
"""


def in_a_terminal(tmp_path, script):
    """Run a script with a terminal as its standard error; return what the terminal was sent."""
    file = tmp_path / "script.py"
    file.write_text(script)
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))  # rows, columns
    environment = os.environ | {"TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, file], stdout=subprocess.DEVNULL, stderr=terminal, env=environment
    )
    os.close(terminal)
    sent = b""
    while True:
        try:
            block = os.read(screen, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not block:
            break
        sent += block
    os.close(screen)
    text = sent.decode()
    assert child.wait() == 0, text
    return text


@pytest.mark.parametrize("live", [None, True])
def test_a_bar_of_tqdm_stays_on_its_line(tmp_path, live):
    script = MODEL.format(live=live) + (
        "from tqdm import tqdm\nfor n in tqdm(range(50), mininterval=0, miniters=1):\n    step(n)\nw.close()\n"
    )
    sent = in_a_terminal(tmp_path, script)
    assert "50/50" in sent
    assert sent.count("\r") > 50  # refreshes
    assert sent.count("\n") == 1  # of tqdm, when the bar is closed
    assert "joma" not in sent


def test_without_a_bar_the_line_is_written_over(tmp_path):
    script = MODEL.format(live=None) + "for n in range(3):\n    step(n)\nw.close()\n"
    sent = in_a_terminal(tmp_path, script)
    assert sent.count("\n") == 2
    assert sent.count("joma measures the lower MLP matrix: layers.0.linear1") == 1
    for n in (1, 2, 3):
        assert f"step {n}" in sent
    last = sent.split("\r")[-2]  # then the end of the line, "\r\n" on a terminal
    assert "loss" in last


def test_the_line_comes_back_when_the_bar_is_gone(tmp_path):
    script = MODEL.format(live=True) + (
        "from tqdm import tqdm\nfor n in tqdm(range(2), mininterval=0):\n    step(n)\nstep(7)\nw.close()\n"
    )
    sent = in_a_terminal(tmp_path, script)
    assert "step 2" not in sent
    assert "step 3" in sent
    assert sent.count("\n") == 3  # of tqdm, of the introduction, of the line


def test_bars_and_displays_are_noticed_while_they_are_open():
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress
    from tqdm import tqdm

    from joma._measure.watch.display import shows_progress_bar

    assert not shows_progress_bar()
    with tqdm(total=3, file=io.StringIO()):
        assert shows_progress_bar()
    assert not shows_progress_bar()
    with tqdm(total=3, disable=True):
        assert not shows_progress_bar()
    with Progress():
        assert shows_progress_bar()
    assert not shows_progress_bar()
    with Live(console=Console(file=io.StringIO(), force_terminal=True)):  # a console of one's own
        assert shows_progress_bar()
    assert not shows_progress_bar()


def test_the_loop_of_keras_is_noticed(monkeypatch):
    from joma._measure.watch.display import shows_progress_bar

    trainer = ModuleType("keras.src.trainers.trainer")
    trainer.shows_progress_bar = shows_progress_bar
    exec("def fit(): return shows_progress_bar()", vars(trainer))
    monkeypatch.setitem(sys.modules, "keras", ModuleType("keras"))
    assert trainer.fit()
    assert not shows_progress_bar()


def test_a_stream_that_is_no_terminal_gets_the_last_line_at_the_end(capfd):
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, every=1, live=True) as w:
        for loss in (3.25, 4.5):
            model(torch.randint(VOCABULARY, (2, LENGTH)))
            w.step(loss=loss)
    (line,) = capfd.readouterr().err.splitlines()
    assert "loss 4.5" in line
