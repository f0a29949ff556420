"""Warnings of joma have one category, and point to the line of the user that they are about."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import joma
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT

PACKAGE = Path(joma.__file__).parent


def tokens():
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def idle_step(w):
    """Make a step without a pass: a watch warns that there is nothing to measure."""
    return w.step(loss=1.0)


def line_of(function, words):
    """Return the number of the line of a function of this file that has these words."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = function.__code__.co_firstlineno
    return next(n for n, line in enumerate(lines[first:], first + 1) if words in line)


def test_a_warning_of_a_measurement_points_to_the_users_step():
    model = HandWrittenGPT("sdpa")
    with (
        joma.watch(model, every=1, gauges="entropy") as w,
        warnings.catch_warnings(record=True) as recorded,
    ):
        warnings.simplefilter("always")
        idle_step(w)
    (warning,) = recorded
    assert "did not run since the last step()" in str(warning.message)
    assert warning.category is joma.JomaWarning
    assert warning.filename == __file__
    assert warning.lineno == line_of(idle_step, "w.step(")


def watch_without_matrices(model):
    return joma.watch(model, every=1)


def test_a_warning_of_joma_watch_points_to_the_users_call():
    model = nn.Sequential(nn.MultiheadAttention(8, 2))  # no MLP
    with pytest.warns(joma.JomaWarning, match="no matrix found for 'mlp_in'") as recorded:
        watch_without_matrices(model).close()
    assert {warning.filename for warning in recorded} == {__file__}
    assert recorded[0].lineno == line_of(watch_without_matrices, "joma.watch(")


def call_model(model, x):
    return model(x)


def test_frames_of_torch_between_joma_and_the_user_are_passed_over():
    from joma._runs.warning import warn

    hooks = {"__name__": "joma.hooks", "warn": warn}
    exec("def hook(module, args): warn('joma: in a hook')", hooks)
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_pre_hook(hooks["hook"])
    with pytest.warns(joma.JomaWarning, match="in a hook") as recorded:
        call_model(model, torch.zeros(1, 2))
    assert recorded[0].filename == __file__
    assert recorded[0].lineno == line_of(call_model, "model(x)")


def test_one_filter_silences_all_of_them():
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=joma.JomaWarning)
        with joma.watch(HandWrittenGPT("sdpa"), every=1) as w:
            w.step(loss=1.0)
            w.step(loss=2.0, lr=0.1)
    assert recorded == []


def test_a_script_sees_the_sentence_at_its_own_line_unless_it_filters_the_category(tmp_path):
    # `python -W ignore::joma.JomaWarning` cannot work: Python reads -W before it knows site-packages.
    script = tmp_path / "script.py"
    speak = "import joma._runs.warning\njoma._runs.warning.warn('joma: hear me')\n"
    script.write_text(speak)
    loud = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert loud.stderr.splitlines()[0] == f"{script}:2: JomaWarning: joma: hear me"
    script.write_text(
        f"import warnings\nimport joma\nwarnings.simplefilter('ignore', joma.JomaWarning)\n{speak}"
    )
    quiet = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert quiet.stderr == ""


def test_nothing_in_joma_warns_by_another_way():
    """A call of `warnings.warn` elsewhere would have its own category, and point to a line of joma."""
    others = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and ast.unparse(node.func) in ("warnings.warn", "warnings.warn_explicit"):
                others.append(str(path.relative_to(PACKAGE)))
    assert others == ["_runs/warning.py"]


def test_a_command_prints_the_sentence_alone(tmp_path):
    """A user of the command line has no line of code that the warning could point to."""
    code = """
import sys
from joma import cli
from joma._runs.warning import warn

@cli.app.command("warns")
def warns():
    warn("joma: hear me")

sys.argv = ["joma", "warns"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "joma: hear me\n"
