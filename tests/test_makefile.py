"""Which Python `make` sets its environment up with: the newest on the path that runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")
# what a version manager leaves for a version that is not installed
SHIM = '#!/bin/sh\necho "python: command not found in this version" >&2\nexit 127\n'
TOO_OLD = "#!/bin/sh\nexit 1\n"  # as the check of its version ends
WORKS = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make where nothing but the programs of a folder is on the path."""
    return subprocess.run(
        [MAKE, "--no-print-directory", *arguments],
        cwd=ROOT,
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )


def put(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        path = folder / name.replace("python3", "python3.", 1).removesuffix(".")
        path.write_text(text)
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("programs", "chosen"),
    [
        ({"python313": WORKS, "python312": WORKS, "python311": WORKS}, "python3.13"),
        ({"python313": SHIM, "python312": WORKS, "python311": WORKS}, "python3.12"),
        ({"python313": SHIM, "python312": SHIM, "python311": WORKS}, "python3.11"),
        ({"python312": WORKS}, "python3.12"),
        ({"python311": SHIM, "python3": WORKS}, "python3"),
    ],
)
def test_the_newest_that_runs_is_taken(programs, chosen, tmp_path):
    put(tmp_path, **programs)
    # without VENV, make would find the environment that runs this test
    assert make(tmp_path, f"VENV={tmp_path}/venv", "which-python").stdout.strip() == chosen
    planned = make(tmp_path, "-n", f"VENV={tmp_path}/venv", "test").stdout
    assert f"\n{chosen} -m venv" in f"\n{planned}"


def test_an_environment_that_is_there_keeps_its_python(tmp_path):
    put(tmp_path, python313=WORKS)
    (tmp_path / "venv/bin").mkdir(parents=True)
    put(tmp_path / "venv/bin", python=WORKS)
    there = f"{tmp_path}/venv/bin/python"
    assert make(tmp_path, f"VENV={tmp_path}/venv", "which-python").stdout.strip() == there
    put(tmp_path, python312='#!/bin/sh\ntest -n "$2" && echo 3.99\nexit 0\n')
    refused = make(tmp_path, f"VENV={tmp_path}/venv", "PYTHON=python3.12", "test")
    assert refused.returncode != 0
    assert "not that of python3.12: make clean first" in refused.stdout


def test_the_one_that_is_named_decides(tmp_path):
    put(tmp_path, python313=WORKS, python311=WORKS)
    assert (
        make(tmp_path, "PYTHON=/somewhere/python", "which-python").stdout.strip()
        == "/somewhere/python"
    )
    planned = make(tmp_path, "-n", "PYTHON=python3.11", f"VENV={tmp_path}/venv", "test").stdout
    assert "\npython3.11 -m venv" in f"\n{planned}"


@pytest.mark.parametrize("programs", [{}, {"python313": SHIM, "python3": TOO_OLD}])
def test_without_any_it_is_said_what_is_needed(programs, tmp_path):
    put(tmp_path, **programs)
    done = make(tmp_path, f"VENV={tmp_path}/venv", "test")
    assert done.returncode != 0
    assert "joma needs Python 3.11, 3.12 or 3.13" in done.stdout + done.stderr
    assert "make PYTHON=" in done.stdout + done.stderr
    assert not (tmp_path / "venv").exists()
