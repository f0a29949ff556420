"""Every command and every Python block of the README runs, and what it prints of itself is true."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.S)
COMMANDS = [line[2:] for kind, block in BLOCKS if kind == "console" for line in block.splitlines() if line[:2] == "$ "]
PYTHON = [block for kind, block in BLOCKS if kind == "python"]


def run(command, cwd):
    words = shlex.split(command)
    if words[0] == "joma":
        words = [sys.executable, "-m", *words]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_something_to_run():
    assert {"make reproduce", "make test", "joma claims"} <= set(COMMANDS)
    assert len(PYTHON) >= 2


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("joma")])
def test_joma_command(command, tmp_path):
    assert run(command, tmp_path)


def test_make_reproduce(tmp_path):
    # the environment this test runs in is the one that make would build
    make = f"make -o {sys.prefix}/.ready VENV={sys.prefix} OUT={tmp_path}/out REPORT={tmp_path}/report.html reproduce"
    out = run(make, ROOT)
    shown = re.search(r"```text\n(exhibit .*?)```", TEXT, flags=re.S).group(1)
    for line in shown.splitlines()[1:]:
        id, verdict = re.match(r"(\w+)\s+(holds(?: as corrected| under)?|fails)\b", line).groups()
        assert re.search(rf"^{id}\s+{verdict}\b", out, flags=re.M), f"the README shows {line!r}"
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_make_test_runs_this_suite():
    # running it from within itself would not end: look at what it would do
    assert "-m pytest" in run(f"make -n -o {sys.prefix}/.ready VENV={sys.prefix} test", ROOT)


def test_make_help_lists_every_target():
    out = run("make help", ROOT)
    assert all(f"make {target}" in out for target in ("reproduce", "test", "lint", "bench", "help"))


def test_python_blocks(tmp_path):
    done = subprocess.run([sys.executable, "-c", "\n".join(PYTHON)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("done (201, 6, 4)")


def test_every_picture_and_page_it_points_to_is_there():
    targets = re.findall(r"\]\(([^)]+)\)", TEXT)
    missing = [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()]
    assert targets
    assert missing == []
