"""The command line as a user meets it: exit codes, messages, and what is left on disk."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from joma import Run
from joma.cli import main


def process(*arguments, cwd=None, check=None):
    """A real process, for what may differ there; it imports everything anew."""
    done = subprocess.run(
        [sys.executable, "-m", "joma", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
    )
    assert "Traceback" not in done.stderr, done.stderr
    if check is not None:
        assert done.returncode == check, done.stderr
    return done


def joma(*arguments, cwd=None, check=None, columns=100):
    """The entry point, called here: the same words and exit codes without the imports."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        mock.patch.object(sys, "argv", ["joma", *map(str, arguments)]),
        mock.patch.dict(os.environ, COLUMNS=str(columns), NO_COLOR="1"),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()  # any other exception would be a traceback
        except SystemExit as end:
            code = end.code or 0
    done = subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())
    if check is not None:
        assert done.returncode == check, done.stderr
    return done


def test_help_names_the_commands():
    out = process("--help", check=0).stdout
    assert all(command in out for command in ("claims", "reproduce", "simulate", "watch", "gauges"))


def test_claims_as_json_carry_what_was_promised():
    rows = json.loads(joma("claims", "T4", "L6", "--json", check=0).stdout)
    assert {row["id"] for row in rows} >= {"T4.ratio", "T4.threshold", "L6"}
    promised = {
        "id",
        "statement",
        "verdict",
        "value",
        "tolerance",
        "correction",
        "control_rejected",
    }
    assert all(promised <= row.keys() and row["control_rejected"] for row in rows)


def test_one_claim_is_explained_in_full():
    out = joma("claims", "T2.invariant", check=0).stdout
    assert "wrong as printed, corrected" in out
    assert "erf(v_l/√2)" in out
    assert "rejected" in out


def test_output_into_a_pipe_has_no_control_characters():
    assert "\x1b" not in process("claims", "L6", "L7", check=0).stdout


def test_a_real_process_ends_with_a_message_and_2(tmp_path):
    done = process("reproduce", "fig11", cwd=tmp_path, check=2)
    assert "unknown exhibit 'fig11'. Did you mean 'fig" in done.stderr
    assert "Known: folding, fig2, saliency" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("claims", "T2.invariance"), "Did you mean 'T2.invariant'"),
        (("reproduce", "fig3", "--jobs", "0"), "at least one job at a time is needed, got 0"),
        (("reproduce", "fig3", "--preset", "defalt"), "Did you mean 'default'"),
        (("simulate", "two-tokens", "--attention", "sofmax"), "Did you mean 'softmax'"),
        (("simulate", "two-tokens", "--activation", "rleu"), "Did you mean 'relu'"),
        (("simulate", "two-tokens", "--t-end", "-1"), "t_end must be a positive number, got -1.0"),
        (
            ("simulate", "two-tokens", "--temperature", "0"),
            "temperature must be a positive number, got 0",
        ),
        (("simulate", "two-token"), "Did you mean 'two-tokens'"),
        (("simulate", "missing.npz"), "no file missing.npz"),
        (("simulate",), "which task?"),
        (("report", "nowhere"), "nowhere is not a run: it does not exist"),
        (("status", "nowhere"), "nowhere is not a run: it does not exist"),
        (("runs", "nowhere"), "there is no folder nowhere: name the folder that your runs are in"),
        (("runs",), "there is no folder runs"),
        (("gauges", "entrpy"), "Did you mean 'entropy'"),
        (("gauges", "stable_rank.x"), "there is no part 'x' of the gauge 'stable_rank'"),
        (("watch", "--in", "lop"), "Did you mean 'loop'"),
        (("hierarchy", "--objective", "leaf"), "objective must be class or token, got 'leaf'"),
        (("hierarchy", "--rho", "2"), "rho must be between 0 and 1, got 2.0"),
    ],
)
def test_bad_input_names_the_value_and_leaves_nothing(tmp_path, arguments, message):
    done = joma(*arguments, cwd=tmp_path, check=2)
    assert message in " ".join(done.stderr.split())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def write_npz(path: Path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.ones((3, 2)), "g": np.ones((4, 1))}, "x has 3 samples (rows) but g has 4"),
        ({"x": -np.ones((3, 2)), "g": np.ones((3, 1))}, "x[0, 0] = -1 is negative"),
        ({"x": np.full((3, 2), np.nan), "g": np.ones((3, 1))}, "x[0, 0] is nan"),
        ({"x": np.ones((0, 2)), "g": np.ones((0, 1))}, "the task is empty"),
        ({"x": np.ones((3, 2))}, "exactly one of g (gradients), labels"),
        (
            {"x": np.ones((3, 2)), "g": np.ones((3, 1)), "v0": np.ones((1, 1))},
            "v0 must have shape (2, 1), got (1, 1)",
        ),
    ],
)
def test_bad_task_files(tmp_path, arrays, message):
    done = joma(
        "simulate", write_npz(tmp_path / "task.npz", **arrays), "--out", tmp_path / "out", check=2
    )
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_pickled_npz_is_refused_and_not_run(tmp_path):
    class Boom:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "task.npz", x=np.array([Boom()], dtype=object))
    assert (
        "not a readable .npz"
        in joma("simulate", tmp_path / "task.npz", "--out", tmp_path / "out", check=2).stderr
    )
    assert not (tmp_path / "ran").exists()


def test_csv_and_npz_of_the_same_task_give_the_same_run(tmp_path):
    rng = np.random.default_rng(0)
    x, labels = rng.random((8, 3)), rng.integers(2, size=8)
    write_npz(tmp_path / "task.npz", x=x, labels=labels)
    lines = ["x0,x1,x2,label"] + [
        ",".join(repr(float(v)) for v in (*row, y)) for row, y in zip(x, labels, strict=True)
    ]
    (tmp_path / "task.csv").write_text("\n".join(lines) + "\n")
    frames = []
    for kind in ("npz", "csv"):
        joma(
            "simulate",
            tmp_path / f"task.{kind}",
            "--out",
            tmp_path / kind,
            "--t-end",
            "3",
            "--scale",
            "0.5",
            check=0,
        )
        frames.append(Run(tmp_path / kind).frame())
        assert (tmp_path / kind / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert frames[0].equals(frames[1])
    final = frames[0][(frames[0].gauge == "v") & (frames[0].t == 3.0)]
    assert len(final) == 3 * 2


def test_simulate_says_when_a_flow_blows_up(tmp_path):
    done = joma(
        "simulate",
        "two-tokens",
        "--attention",
        "exp",
        "--activation",
        "linear",
        "--scale",
        "0",
        "--out",
        tmp_path / "run",
        check=0,
    )
    assert "blow-up at t = 1.2533" in done.stdout  # √(π/2)


def test_a_folder_with_another_run_is_refused_until_forced(tmp_path):
    out = tmp_path / "[a]"  # would be a style, were it markup
    assert (
        f"{out}/  (run.json"
        in joma("simulate", "two-tokens", "--out", out, "--t-end", "1", check=0).stdout
    )
    before = (out / "run.json").read_bytes()
    done = joma("simulate", "two-tokens", "--out", out, "--t-end", "2", check=2)
    assert str(out) in done.stderr.replace("\n", "")
    assert (out / "run.json").read_bytes() == before
    joma("simulate", "two-tokens", "--out", out, "--t-end", "2", "--force", check=0)
    assert Run(out).info["config"]["t_end"] == 2.0
    figure = tmp_path / "picture.svg"
    assert str(figure) in joma("report", out, "--out", figure, check=0).stdout
    assert figure.read_text().startswith("<svg")


def test_a_pipe_gets_no_empty_line_from_a_progress_bar(tmp_path):
    (tmp_path / "empty").mkdir()
    for command in ("scan", "audit"):
        done = joma(command, "empty", cwd=tmp_path, check=2)
        assert done.stderr.startswith("joma: no checkpoints in"), done.stderr


def test_errors_of_the_system_are_told_without_their_numbers(tmp_path):
    (tmp_path / "file").write_text("")
    joma("simulate", "two-tokens", "--t-end", "1", "--out", "run", cwd=tmp_path, check=0)
    done = joma("report", "run", "--out", "file/table.csv", cwd=tmp_path, check=2)
    assert "Errno" not in done.stderr
    assert "Not a directory" in done.stderr or "File exists" in done.stderr


def test_a_scan_prints_brackets_as_they_are(tmp_path):
    from rich.console import Console

    from joma._runs import RunWriter
    from joma.cli.scan import _show

    RunWriter.create(tmp_path / "run", kind="scan", config={"gauges": ["stable_rank"]}).finish()
    row = {
        "step": 1,
        "checkpoint": "a[/x]",
        "status": "failed",
        "note": "no [/y] here",
        "same_as": "b[/z]",
    }
    result = SimpleNamespace(
        checkpoints=lambda: pd.DataFrame([row]), frame=pd.DataFrame, path=tmp_path / "run", asked=None,
        remarks=lambda: {row["note"]: [row["checkpoint"]]}, is_comparison=False,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    assert _show(result, console) == 1
    said = console.file.getvalue()
    assert said.count("a[/x]") == 3
    assert "identical to b[/z]" in said
    assert "no [/y] here" in said


def test_reproduce_writes_the_promised_files_skips_what_is_there_and_refuses_other_runs(tmp_path):
    out = tmp_path / "out"
    first = joma("reproduce", "fig3", "--out", out, check=0, columns=60)
    promised = {"run.json", "metrics.jsonl", "figure.svg", "figure.png", "verdict.json"}
    assert promised <= {path.name for path in (out / "fig3").iterdir()}
    stored = json.loads((out / "fig3/verdict.json").read_text())
    assert stored["verdict"] == "holds"
    assert stored["measured"] in " ".join(first.stdout.split())
    assert all(
        len(line) <= 60 for line in first.stdout.splitlines() if not line.startswith("report:")
    )
    assert "\x1b" not in first.stdout + first.stderr
    assert first.stderr.startswith("fig3: holds (")
    stamp = (out / "fig3/run.json").stat().st_mtime_ns
    assert "cached" in joma("reproduce", "fig3", "--out", out, check=0).stdout
    assert (out / "fig3/run.json").stat().st_mtime_ns == stamp
    refused = joma("reproduce", "fig3", "--out", out, "--seed", "1", check=2)
    assert "holds another run" in refused.stderr
    joma("reproduce", "saliency", "--out", out, check=0)
    assert {'id="fig3"', 'id="saliency"'} <= set(
        re.findall(r'id="\w+"', (out / "report.html").read_text())
    )
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_the_list_of_exhibits_is_readable_in_60_columns():
    out = joma("reproduce", "--list", check=0, columns=60).stdout
    assert max(map(len, out.splitlines())) <= 60
    assert "realtext" in out
    assert "…" not in out


# what `python` imports before anything else: it sends Ctrl-C to itself when a module begins to be imported
CTRL_C = """
import os, signal, sys, weakref

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # until Python has seen the signal
        pass

class Descriptor:
    def __set_name__(self, owner, name):
        interrupt()  # before 3.12, Python makes a RuntimeError of it

def in_class():
    class Owner:
        part = Descriptor()

def in_callback():
    class Owner: pass
    owner = Owner()
    reference = weakref.ref(owner, interrupt)  # Python prints and ignores it
    del owner

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["CTRL_C_AT"]:
            sys.meta_path.remove(self)
            place = os.environ["CTRL_C_IN"]
            exec(place) if place == "interrupt()" else globals()[place]()

sys.meta_path.insert(0, Finder())
"""
STARTS = {
    "python -m joma": ["-m", "joma"],
    "joma": ["-c", "import sys; from joma.cli import main; sys.exit(main())"],
}
AT_WORK = "joma: interrupted; what was complete is kept, nothing is half-written\n"


@pytest.mark.parametrize(
    ("start", "module", "place", "words"),
    [
        ("joma", "typer", "interrupt", "joma: interrupted\n"),
        ("python -m joma", "typer", "interrupt", "joma: interrupted\n"),
        ("python -m joma", "typer", "interrupt()", "joma: interrupted\n"),  # in a string
        ("joma", "typer", "in_class", "joma: interrupted\n"),
        ("joma", "typer", "in_callback", "joma: interrupted\n"),
        ("python -m joma", "joma.cli.train", "interrupt", "joma: interrupted\n"),
        ("joma", "joma._runs", "interrupt", "joma: interrupted\n"),
        ("joma", "joma._measure.gauges.stream", "interrupt", AT_WORK),
        ("python -m joma", "joma._measure.gauges.stream", "interrupt()", AT_WORK),
        (
            "joma",
            "joma._measure.gauges.stream",
            "in_class",
            AT_WORK if sys.version_info >= (3, 12) else "joma: interrupted\n",
        ),
    ],
)
def test_ctrl_c_while_modules_are_imported_ends_quietly(start, module, place, words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CTRL_C)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *STARTS[start], "gauges"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "CTRL_C_AT": module, "CTRL_C_IN": place},
    )
    assert (done.returncode, done.stderr) == (130, words)


def test_the_entry_point_imports_nothing_that_takes_time():
    """Before `main` is at work, Python itself shows a traceback for Ctrl-C."""
    script = "import sys; before = set(sys.modules); import joma.cli; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {script}"],
                         capture_output=True, text=True, check=True).stdout  # fmt: skip
    loaded = {name for name in out.split() if not name.startswith("importlib")}
    assert loaded <= {"__future__", "warnings", "joma", "joma.cli"}


@pytest.mark.timeout(600)
def test_ctrl_c_in_the_middle_leaves_no_half_written_exhibit_and_no_process(tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "joma",
            "reproduce",
            "fig2",
            "fig3",
            "--preset",
            "laptop",
            "--jobs",
            "2",
            "--out",
            out,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(1200):  # until it is at work in its staging folder
        if list(out.glob(".fig2.partial-*/metrics.jsonl")):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()  # two seconds; a minute was too short beside other work
    assert process.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert {path.name for path in out.iterdir()} <= {
        "fig3",
        "times.json",
    }  # fig3 may have been done by then
    for _ in range(600):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("something still runs")
