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


STEPS = [
    step
    for kind, block in BLOCKS
    for step in (
        [block] if kind == "python" else [line for line in block.splitlines() if line.startswith("$ joma")]
        if kind == "console" else []
    )
]  # fmt: skip

# one process for all: importing torch takes longer than most commands
SCRIPT = """
import shlex, sys
from joma.cli import main
space = {{"__name__": "__main__"}}
for step in {steps!r}:
    if not step.startswith("$ "):
        exec(compile(step, "README", "exec"), space)
        continue
    print(step, flush=True)
    sys.argv = shlex.split(step[2:])
    try:
        main()
    except SystemExit as end:
        if end.code:
            sys.exit(f"{{step}}: {{end.code}}")
"""


def run(command, cwd):
    words = command if isinstance(command, list) else shlex.split(command)
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100", "MAKEFLAGS": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_is_something_to_run():
    assert {"make reproduce", "make test", "joma claims"} <= set(COMMANDS)
    assert len(PYTHON) >= 2


def smaller(command):
    """The same command with fewer steps and words, where it trains; tests/theory checks all claims."""
    if command == "$ joma claims":
        return f"{command} L6 L7 L8"
    if not command.startswith("$ joma train "):
        return command
    return re.sub(r"--steps \d+", "--steps 10", command) + " --vocabulary 500"


@pytest.mark.timeout(600)  # half a minute of one core, and more than it looks on a busy machine
def test_python_blocks_and_joma_commands(tmp_path):
    # in the order of the README: each may use what those before it wrote
    steps = [smaller(step) for step in STEPS]
    out = run([sys.executable, "-c", SCRIPT.format(steps=steps)], tmp_path)
    assert "done (201, 6, 4)" in out
    said = re.split(r"^\$ .*\n", out, flags=re.M)[1:]
    assert len(said) == sum(step.startswith("$ ") for step in steps)
    assert all(said)  # each says something


def test_make_reproduce(tmp_path):
    # the environment this test runs in is the one that make would build
    # and two exhibits stand for all, whose verdicts tests/exhibits looks at
    chosen = ("folding", "fig3")
    make = f"make -o {sys.prefix}/.ready VENV={sys.prefix} OUT={tmp_path}/out REPORT={tmp_path}/report.html"
    out = run(f"{make} 'EXHIBITS={' '.join(chosen)}' reproduce", ROOT)
    shown = dict(re.findall(r"^\| `(\w+)` \| .*? \| (holds(?: as corrected| under)?|fails) \|", TEXT, flags=re.M))
    assert set(chosen) <= set(shown)
    for id in chosen:
        assert re.search(rf"^{id}\s+{shown[id]}\b", out, flags=re.M), f"the README says {id}: {shown[id]}"
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_make_test_runs_this_suite():
    # running it from within itself would not end: look at what it would do
    assert "-m pytest" in run(f"make -n -o {sys.prefix}/.ready VENV={sys.prefix} test", ROOT)


def test_make_help_lists_every_target():
    out = run("make help", ROOT)
    assert all(f"make {target}" in out for target in ("reproduce", "test", "lint", "bench", "docs", "help"))


def test_every_picture_and_page_it_points_to_is_there():
    targets = re.findall(r"\]\(([^)]+)\)", TEXT)
    missing = [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()]
    assert targets
    assert missing == []
