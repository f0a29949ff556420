"""Run folders: what is written is read back, and what is on disk is whole whenever the writer dies."""

from __future__ import annotations

import doctest
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import joma._runs
from joma._runs import (
    Run,
    RunError,
    RunInUse,
    RunNotFound,
    RunWriter,
    staged,
    write_atomic,
    write_json,
)
from joma._runs.long_table import LongTable

CONFIG = {"lr": 0.1, "model": {"layers": 2, "act": "relu"}}


def make(path: Path, steps: int = 3) -> Path:
    axes = {"entropy": ["layer", "head"], "rank": ["layer"]}
    with RunWriter.create(path, kind="watch", config=CONFIG, seed=7, axes=axes) as writer:
        for step in range(steps):
            entropy = 100 * step + np.arange(6.0).reshape(2, 3)
            writer.write(
                step, {"entropy": entropy, "rank": [step, step + 1], "loss": -step}, t=step / 2
            )
    return path


def metrics(path: Path) -> Path:
    return path / "metrics.jsonl"


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


# what is read


def test_docstring_example() -> None:
    assert doctest.testmod(joma._runs).failed == 0


def test_rows_are_the_lines_that_were_written(tmp_path: Path) -> None:
    rows = list(Run(make(tmp_path / "a")).rows())
    assert [(row["step"], row["gauge"]) for row in rows[:4]] == [
        (0, "entropy"), (0, "rank"), (0, "loss"), (1, "entropy"),
    ]  # fmt: skip
    assert rows[4] == {"step": 1, "t": 0.5, "gauge": "rank", "value": [1, 2]}
    for line in metrics(tmp_path / "a").read_text().splitlines():
        assert ("end" in json.loads(line)) == (json.loads(line)["gauge"] == "loss")


def test_frame_against_a_table_made_by_hand(tmp_path: Path) -> None:
    with RunWriter.create(
        tmp_path / "a", kind="x", config={}, axes={"z": ["token", "node"], "v": ["node"]}
    ) as writer:
        writer.write(0, {"z": [[1, 2], [3, 4]], "loss": 0.5}, t=0.25, case="a")
        writer.write(5, {"v": np.float32([6, 7])}, seed=3)
    expected = pd.DataFrame(
        [
            (0, 0.25, "a", None, 0, 0, "z", 1.0),
            (0, 0.25, "a", None, 0, 1, "z", 2.0),
            (0, 0.25, "a", None, 1, 0, "z", 3.0),
            (0, 0.25, "a", None, 1, 1, "z", 4.0),
            (0, 0.25, "a", None, None, None, "loss", 0.5),
            (5, None, None, 3, None, 0, "v", 6.0),
            (5, None, None, 3, None, 1, "v", 7.0),
        ],
        columns=["step", "t", "case", "seed", "token", "node", "gauge", "value"],
    ).astype({"seed": "Int64", "token": "Int64", "node": "Int64"})
    run = Run(tmp_path / "a")
    pd.testing.assert_frame_equal(run.frame(), expected)
    only = expected.iloc[5:].reset_index(drop=True)[["step", "seed", "node", "gauge", "value"]]
    pd.testing.assert_frame_equal(run.frame("v"), only.astype({"seed": "int64", "node": "int64"}))


def test_frame_follows_shapes_that_change(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a", kind="x", config={}, axes={"v": ["i", "j"]}) as writer:
        for step, shape in enumerate([(2, 1), (1, 2), (0, 3), (2, 1)]):
            writer.write(step, {"v": np.full(shape, step)})
    frame = Run(tmp_path / "a").frame()
    assert frame[["step", "i", "j", "value"]].to_numpy().tolist() == [
        [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [1, 0, 1, 1], [3, 0, 0, 3], [3, 1, 0, 3],
    ]  # fmt: skip


def test_frame_of_a_run_without_rows(tmp_path: Path) -> None:
    run = Run(make(tmp_path / "a", steps=0))
    assert list(run.rows()) == []
    assert list(run.frame().columns) == ["step", "gauge", "value"]
    assert list(run.frame("rank").columns) == ["step", "layer", "gauge", "value"]
    metrics(run.path).unlink()
    assert run.frame().empty


def test_frame_of_an_unknown_gauge_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no gauge 'entrpy'; it has entropy, loss, rank"):
        Run(make(tmp_path / "a")).frame("entrpy")


def test_rows_and_frame_do_not_depend_on_the_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(make(tmp_path / "a"))
    rows, frame = list(run.rows()), run.frame()
    with metrics(run.path).open("ab") as stream:
        stream.write(b'{"step":9,"gauge":"lo')
    for block in (1, 7, 13, 100):
        monkeypatch.setattr("joma._runs.metric_lines._BLOCK_BYTES", block)
        monkeypatch.setattr("joma._runs.metric_lines._TAIL_BYTES", block)
        assert list(run.rows()) == rows
        pd.testing.assert_frame_equal(run.frame(), frame)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_survive_as_valid_json(tmp_path: Path, value: float) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    with RunWriter.create(
        tmp_path / "a", kind="x", config={"x": value}, axes={"v": ["i"]}
    ) as writer:
        writer.write(0, {"v": [1.0, value], "nan": np.float32(value)}, t=value)
    RunWriter.resume(tmp_path / "a", {"x": value}).finish()
    for line in metrics(tmp_path / "a").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    json.loads((tmp_path / "a" / "run.json").read_text(), parse_constant=refuse)
    run = Run(tmp_path / "a")
    np.testing.assert_equal([row["value"] for row in run.rows()], [[1.0, value], value])
    np.testing.assert_equal([row["t"] for row in run.rows()], [value, value])
    assert [row["gauge"] for row in run.rows()] == ["v", "nan"]
    np.testing.assert_array_equal(run.frame()["value"], [1.0, value, value])
    np.testing.assert_array_equal(run.frame()["t"], [value, value, value])


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arrays=st.lists(
        st.sampled_from([np.float64, np.float32, np.int64, np.bool_]).flatmap(
            lambda dtype: hnp.arrays(
                dtype,
                hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3),
                # a larger integer is refused: a table of numbers could not hold it exactly
                elements=st.integers(-(2**53), 2**53) if dtype is np.int64 else None,
            )
        ),
        min_size=1,
        max_size=4,
    ),
    name=st.text(max_size=8),
    case=st.text(max_size=8).filter(lambda text: text not in ("nan", "inf", "-inf")),
)
def test_arrays_round_trip(tmp_path: Path, arrays: list[np.ndarray], name: str, case: str) -> None:
    path = tmp_path / os.urandom(6).hex()
    gauges = {f"{name}{k}": array for k, array in enumerate(arrays)}
    axes = {gauge: [f"axis{k}" for k in range(array.ndim)] for gauge, array in gauges.items()}
    with RunWriter.create(path, kind="x", config={}, axes=axes) as writer:
        writer.write(3, gauges, case=case)
    run = Run(path)
    for row, (gauge, array) in zip(run.rows(), gauges.items(), strict=True):
        assert (row["step"], row["gauge"], row["case"]) == (3, gauge, case)
        np.testing.assert_array_equal(np.array(row["value"]).reshape(array.shape), array)
        frame = run.frame(gauge)
        np.testing.assert_array_equal(frame["value"], array.ravel().astype(float))
        if array.size:
            index = tuple(frame[axis].to_numpy() for axis in axes[gauge])
            np.testing.assert_array_equal(array[index].ravel(), array.ravel())
    assert len(run.frame()) == sum(array.size for array in arrays)


PRECISIONS = {"f": "float64", "i": "integer", "b": "boolean"}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    array=st.sampled_from([np.float64, np.float32, np.int64, np.bool_]).flatmap(
        lambda dtype: hnp.arrays(
            dtype,
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
            elements=st.integers(-(2**53), 2**53) if dtype is np.int64 else None,
        )
    ),
    data=st.data(),
)
def test_an_array_is_written_as_its_long_table_is(
    tmp_path: Path, array: np.ndarray, data: st.DataObject
) -> None:
    table = LongTable.of_array("g", array, precision=PRECISIONS[array.dtype.kind])
    value = array
    # An empty list has one axis, however many the array has.
    if array.dtype == np.float64 and array.ndim and array.size:
        measured = data.draw(hnp.arrays(np.bool_, array.shape))
        table = LongTable.of_array("g", array, measured, precision="float64")
        value = np.where(measured, array, None).tolist()
    if array.ndim == 0:
        value = array.item()
    path = tmp_path / os.urandom(6).hex()
    axes = {"g": [f"axis{k}" for k in range(array.ndim)]}
    with RunWriter.create(path, kind="x", config={}, axes=axes) as writer:
        writer.write(0, table)
        writer.write(0, {"g": value})
    by_table, by_value = metrics(path).read_text().splitlines()
    assert by_table == by_value


def test_no_run_says_what_is_missing_and_how_runs_are_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no run\.json.*RunWriter\.create"):
        Run(tmp_path)
    with pytest.raises(RunNotFound, match="does not exist"):
        Run(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RunError, match="is not JSON"):
        Run(tmp_path)
    (tmp_path / "run.json").write_text('{"scripts": 1}')
    with pytest.raises(RunError, match="not written by joma"):
        Run(tmp_path)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    run = Run(make(tmp_path / "a"))
    damaged = (
        metrics(run.path).read_bytes().replace(b'{"step":1,"t":0.5,"gauge":"rank"', b'{"step":1,,')
    )
    metrics(run.path).write_bytes(damaged)
    with pytest.raises(RunError, match=r"damaged.*step\":1,,.*delete that line"):
        list(run.rows())


def test_representations_are_small_and_safe(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "a", kind="x", config={"note": "<script>"}) as writer:
        assert "running" in repr(writer)
    run = Run(tmp_path / "a")
    assert "'a', done" in repr(run)
    assert "&lt;script&gt;" in run._repr_html_()
    assert "<script>" not in run._repr_html_()


def test_reading_imports_neither_numpy_nor_pandas() -> None:
    code = "import sys, joma._runs; sys.exit(bool({'numpy', 'pandas'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# what is written


def test_info_says_what_was_run(tmp_path: Path) -> None:
    info = Run(make(tmp_path / "a")).info
    assert (info["kind"], info["name"], info["seed"], info["status"]) == ("watch", "a", 7, "done")
    assert info["config"] == CONFIG
    assert info["axes"] == {"entropy": ["layer", "head"], "rank": ["layer"]}
    assert info["versions"]["numpy"] == np.__version__
    assert info["created"].endswith("+00:00")
    assert sorted(tree(tmp_path / "a")) == ["metrics.jsonl", "run.json"]


def test_an_exception_is_recorded_and_raised_again(tmp_path: Path) -> None:
    def fails() -> None:
        with RunWriter.create(tmp_path / "a", kind="x", config={}) as writer:
            writer.write(0, {"loss": 1.0})
            writer.write(1, {"loss": 1 / 0})

    with pytest.raises(ZeroDivisionError):
        fails()
    run = Run(tmp_path / "a")
    assert (run.done, run.info["status"]) == (False, "failed")
    assert run.info["reason"] == "ZeroDivisionError: division by zero"
    assert [row["step"] for row in run.rows()] == [0]
    with RunWriter.resume(run.path, {}) as writer:
        writer.write(1, {"loss": 2.0})
    assert run.done
    assert "reason" not in run.info
    assert len(run.info["resumed"]) == 1


@pytest.mark.parametrize(
    ("values", "extra", "message"),
    [
        ({"v": 1.0}, {}, r"'v' has shape \(\) but the axes \['i'\]"),
        ({"w": [1.0]}, {}, r"'w' has shape \(1,\) but the axes \[\]: declare"),
        ({"v": [[1], [1, 2]]}, {}, "ragged"),
        ({"v": ["a"]}, {}, "real numbers"),
        ({"w": None}, {}, "real numbers"),
        ({"w": 1j}, {}, "real numbers"),
        ({"w": 1}, {"i": 3}, r"\['i'\] have names of other columns"),
        ({"w": 1}, {"end": True}, r"\['end'\] have names"),
        ({"w": 1}, {"case": "inf"}, "would be read as a number"),
        ({"w": 1}, {"case": [1]}, r"case is \[1\]"),
    ],
)
def test_what_cannot_be_read_back_is_not_written(
    tmp_path: Path, values: dict[str, object], extra: dict[str, object], message: str
) -> None:
    with RunWriter.create(tmp_path / "a", kind="x", config={}, axes={"v": ["i"]}) as writer:
        with pytest.raises(RunError, match=message):
            writer.write(0, {"good": 1.0} | values, **extra)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            writer.write(0.5, {"good": 1.0})  # type: ignore[arg-type]
        writer.write(0, {})
    assert metrics(tmp_path / "a").read_bytes() == b""
    with pytest.raises(RunError, match=r"finished: go on with RunWriter\.resume"):
        writer.write(0, {"good": 1.0})


@pytest.mark.parametrize("axes", ["layer", ["layer", "layer"], ["value"]])
def test_axes_need_different_names_of_their_own(tmp_path: Path, axes: list[str]) -> None:
    with pytest.raises(RunError, match="axes of gauge 'v'"):
        RunWriter.create(tmp_path / "a", kind="x", config={}, axes={"v": axes})
    assert not (tmp_path / "a").exists()


def test_a_config_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"config\.model\[0\]\.act is .* of type object"):
        RunWriter.create(tmp_path / "a", kind="x", config={"model": [{"act": object()}]})
    assert not (tmp_path / "a").exists()


def test_a_write_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full_disk(descriptor: int, data: bytes) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return write(descriptor, bytes(data)[:40])

    writer = RunWriter.create(tmp_path / "a", kind="x", config={})
    writer.write(0, {"loss": 1.0})
    before = metrics(writer.path).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space"):
            writer.write(1, {"loss": 1.0, "a rather long name of a gauge": 3.0, "and another": 4.0})
    assert metrics(writer.path).read_bytes() == before
    writer.write(1, {"loss": 2.0})
    writer.finish()
    assert [row["value"] for row in Run(writer.path).rows()] == [1.0, 2.0]


def test_truncate_returns_to_a_checkpoint_and_nowhere_else(tmp_path: Path) -> None:
    path = make(tmp_path / "a", steps=0)
    with RunWriter.resume(path, CONFIG) as writer:
        writer.write(0, {"loss": 0.0, "grad": 1.0})
        checkpoint = writer.offset
        writer.write(1, {"loss": 1.0})
    with RunWriter.resume(path, CONFIG) as writer:
        for wrong in (-1, 1, checkpoint - 1, checkpoint + 1, writer.offset + 1):
            with pytest.raises(RunError, match=f"ends at byte {wrong} of"):
                writer.truncate(wrong)
        writer.truncate(checkpoint)
        writer.write(1, {"loss": -1.0})
    assert [row["value"] for row in Run(path).rows()] == [0.0, 1.0, -1.0]
    with RunWriter.resume(path, CONFIG) as writer:
        writer.truncate(0)
    assert list(Run(path).rows()) == []


# whose folder it is


def test_create_refuses_another_run_and_a_foreign_folder(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    before = tree(path)
    with pytest.raises(
        RunError, match=r"holds another run \(watch 'a', done.*choose another folder"
    ):
        RunWriter.create(path, kind="watch", config={"lr": 1})
    with pytest.raises(RunError, match=r"holds this run .*resume it"):
        RunWriter.create(path, kind="watch", config=CONFIG)
    assert tree(path) == before

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"scripts": {}}')
    for foreign in (tmp_path / "mine", tmp_path / "other", tmp_path / "mine" / "thesis.tex"):
        before = tree(tmp_path)
        with pytest.raises(RunError, match="choose another folder"):
            RunWriter.create(foreign, kind="x", config={}, overwrite=True)
        with (
            pytest.raises(RunError, match="choose another folder"),
            staged(foreign, overwrite=True),
        ):
            pass
        assert tree(tmp_path) == before


def test_overwrite_clears_the_old_run(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "3.pt").touch()
    with RunWriter.create(path, kind="scan", config={"new": 1}, overwrite=True):
        pass
    assert tree(path).keys() == {"run.json", "metrics.jsonl"}
    assert not (path / "checkpoints").exists()
    assert (Run(path).info["kind"], list(Run(path).rows())) == ("scan", [])


def test_create_after_a_kill_before_the_first_run_json(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("pid 1 on elsewhere")
    (tmp_path / ".run.json.0123abcd.tmp").write_text("{")
    make(tmp_path)
    assert tree(tmp_path).keys() == {"run.json", "metrics.jsonl"}


def test_resume_names_every_key_that_differs(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    before = tree(path)
    asked = {"lr": 0.2, "model": {"act": "relu", "heads": 4}, "seq": (1, 2)}
    with pytest.raises(RunError) as caught:
        RunWriter.resume(path, asked)
    for part in (
        "lr: 0.1 in the run, 0.2 asked",
        "model.layers: 2 in the run, not asked",
        "model.heads: not in the run, 4 asked",
        "seq: not in the run, [1, 2] asked",
    ):
        assert part in str(caught.value)
    assert "model.act" not in str(caught.value)
    assert tree(path) == before
    with pytest.raises(RunNotFound):
        RunWriter.resume(tmp_path / "b", asked)


def test_resume_takes_the_config_as_it_was_given(tmp_path: Path) -> None:
    config = {
        "betas": (0.9, np.float32(0.5)),
        "steps": np.int64(3),
        "data": Path("x"),
        "w": np.eye(2),
        1: None,
    }
    RunWriter.create(tmp_path / "a", kind="x", config=config).finish()  # type: ignore[arg-type]
    RunWriter.resume(tmp_path / "a", config).finish()  # type: ignore[arg-type]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    code = (
        "import sys, joma._runs as r\n"
        f"w = r.RunWriter.resume({str(path)!r}, {CONFIG!r})\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        attempts: list[Callable[[], object]] = [
            lambda: RunWriter.resume(path, CONFIG),
            lambda: RunWriter.create(path, kind="x", config={}, overwrite=True),
            lambda: staged(path, overwrite=True).__enter__(),
        ]
        for attempt in attempts:
            with pytest.raises(
                RunInUse, match=rf"{path} is in use by pid {other.pid} on \S+: wait"
            ):
                attempt()
        assert len(Run(path).frame()) == 27  # readers need no lock
        other.kill()
    RunWriter.resume(path, CONFIG).finish()


def test_a_second_writer_in_this_process_is_told_so(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "a", kind="x", config={})
    with pytest.raises(RunInUse, match=r"this process: call finish\(\)"):
        RunWriter.resume(tmp_path / "a", {})
    del writer  # dropped without finish: the folder is free, the run is not done
    assert not Run(tmp_path / "a").done
    RunWriter.resume(tmp_path / "a", {}).finish()


def test_finish_frees_the_folder_though_a_forked_worker_lives_on(tmp_path: Path) -> None:
    code = (
        "import os, signal, joma._runs as r\n"
        f"w = r.RunWriter.create({str(tmp_path / 'a')!r}, kind='x', config={{}})\n"
        "child = os.fork()\n"
        "if child == 0: signal.pause()\n"
        "try:\n"
        "    w.finish()\n"
        f"    r.RunWriter.resume({str(tmp_path / 'a')!r}, {{}}).finish()\n"
        "finally: os.kill(child, signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(Run(tmp_path / "a").info["resumed"]) == 1


def test_a_lock_that_was_removed_under_us_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    flock, calls = fcntl.flock, []

    def removed_once(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        calls.append(operation)
        if len(calls) == 1:  # the former holder finished between our open and our flock
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(fcntl, "flock", removed_once)
    writer = RunWriter.create(tmp_path, kind="x", config={})
    with pytest.raises(RunInUse):
        RunWriter.resume(tmp_path, {})
    writer.finish()


def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.warns(UserWarning, match="let only one process write"):
        make(tmp_path / "a")
    assert Run(tmp_path / "a").done


# kills


def test_a_tail_torn_at_any_byte_is_ignored_and_cut_off(tmp_path: Path) -> None:
    path = make(tmp_path / "a", steps=2)
    whole = metrics(path).read_bytes()
    with RunWriter.resume(path, CONFIG) as writer:
        writer.write(2, {"rank": [math.nan, 2.0], "loss": 0.5}, case='tricky ,"end":true}\n')
    full = metrics(path).read_bytes()
    before = list(Run(path).rows())[:6]
    for size in range(len(whole), len(full)):
        metrics(path).write_bytes(full[:size])
        assert list(Run(path).rows()) == before
    for size in range(len(whole), len(full), 9):
        metrics(path).write_bytes(full[:size])
        with RunWriter.resume(path, CONFIG) as writer:
            assert writer.offset == len(whole)
            writer.write(2, {"loss": 7.0})
        assert list(Run(path).rows()) == [*before, {"step": 2, "gauge": "loss", "value": 7.0}]


WRITER = """
import sys
from pathlib import Path
from joma._runs import Run, RunWriter
path = Path(sys.argv[1])
if (path / "run.json").exists():
    step = 1 + max((row["step"] for row in Run(path).rows()), default=-1)
    writer = RunWriter.resume(path, {})
else:
    step = 0
    writer = RunWriter.create(path, kind="x", config={}, axes={"big": ["i"]})
while True:
    writer.write(step, {"big": [step] * 10_000, "loss": step})
    step += 1
"""


def test_kills_cost_at_most_the_measurement_that_was_being_written(tmp_path: Path) -> None:
    path, written = tmp_path / "a", 0
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            deadline = time.monotonic() + 60
            target = (metrics(path).stat().st_size if metrics(path).exists() else 0) + 200_000
            while not metrics(path).exists() or metrics(path).stat().st_size < target:
                assert child.poll() is None, "the writer must not end by itself"
                assert time.monotonic() < deadline, "the writer does not write"
                time.sleep(0.001)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        rows = list(Run(path).rows())
        assert len(rows) > written
        written = len(rows)
        assert [row["step"] for row in rows] == [k // 2 for k in range(written)]
        assert [row["gauge"] for row in rows] == ["big", "loss"] * (written // 2)
        assert all(row["value"] == [row["step"]] * 10_000 for row in rows[::2])
        assert not Run(path).done


# files and staged folders


def test_write_atomic_replaces_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    write_atomic(file, "ξ")
    write_atomic(file, b"new")
    (tmp_path / "b").touch()
    assert (
        file.stat().st_mode == (tmp_path / "b").stat().st_mode
    )  # as readable for others as any file

    def fail(*paths: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_atomic(file, "newer")
    assert tree(tmp_path) == {"a.txt": b"new", "b": b""}


def test_write_json_keeps_order_and_takes_numpy(tmp_path: Path) -> None:
    write_json(
        tmp_path / "a.json", {"b": np.arange(3), "a": np.float64(0.5), "ξ": (True, None, np.nan)}
    )
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"b": [0, 1, 2], "a": 0.5, "ξ": [True, None, "nan"]}
    assert text.index('"b"') < text.index('"a"') < text.index('"ξ"')


def test_staged_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    with staged(tmp_path / "deep" / "a") as folder:
        make(folder)
        (folder / "figure.svg").touch()
        assert not (tmp_path / "deep" / "a").exists()
    assert os.listdir(tmp_path / "deep") == ["a"]
    run = Run(tmp_path / "deep" / "a")
    assert (run.done, run.info["name"], len(run.frame())) == (True, "a", 27)
    assert tree(run.path).keys() == {"run.json", "metrics.jsonl", "figure.svg"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("old", [False, True])
def test_staged_leaves_nothing_behind_on_failure(
    tmp_path: Path, error: type[BaseException], old: bool
) -> None:
    if old:
        make(tmp_path / "a")
    before = tree(tmp_path)

    def interrupted() -> None:
        with (
            staged(tmp_path / "a", overwrite=old) as folder,
            RunWriter.create(folder, kind="x", config={}),
        ):
            raise error

    with pytest.raises(error):
        interrupted()
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == (["a"] if old else [])


def test_staged_replaces_a_run_only_when_asked(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    with pytest.raises(RunError, match=r"holds watch 'a', done.*overwrite=True"), staged(path):
        pass
    with staged(path, overwrite=True) as folder:
        make(folder, steps=1)
        assert len(Run(path).frame()) == 27  # the old one, until the new one is whole
    assert len(Run(path).frame()) == 9
    assert os.listdir(tmp_path) == ["a"]


def test_staged_takes_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with staged(tmp_path / "a") as folder:
        make(folder)
    assert os.listdir(tmp_path) == ["a"]
    assert Run(tmp_path / "a").done


def test_staged_does_not_replace_what_came_meanwhile(tmp_path: Path) -> None:
    def late() -> None:
        with staged(tmp_path / "a") as folder:
            make(folder, steps=1)
            make(tmp_path / "a", steps=3)

    with pytest.raises(RunError, match="holds watch"):
        late()
    assert len(Run(tmp_path / "a").frame()) == 27
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_exchange_brings_the_old_run_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], failing: int
) -> None:
    path = make(tmp_path / "a")
    before = tree(tmp_path)
    rename, calls = os.rename, []

    def fail(source: object, target: object) -> None:
        calls.append(source)
        if len(calls) == failing + 1:
            raise error
        rename(source, target)  # type: ignore[arg-type]

    def replaced() -> None:
        with staged(path, overwrite=True) as folder:
            make(folder, steps=1)
            monkeypatch.setattr(os, "rename", fail)

    with pytest.raises(error):
        replaced()
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["a"]


def remains(parent: Path, pid: int, what: str, host: str = joma._runs.folder.this_host()) -> Path:
    """Make what a process killed inside `staged(parent / "a")` leaves behind."""
    return make(parent / f".a.{what}-{pid}-{host}-0123abcd")


def test_staged_clears_what_dead_processes_left(tmp_path: Path) -> None:
    dead = dead_pid()
    gone = remains(tmp_path, dead, "partial")
    alive = remains(tmp_path, os.getpid(), "partial")
    distant = remains(tmp_path, dead, "partial", host="elsewhere")
    with staged(tmp_path / "a") as folder:
        make(folder)
    assert not gone.exists()
    assert alive.exists()
    assert distant.exists()


def test_staged_brings_back_a_run_that_a_kill_left_aside(tmp_path: Path) -> None:
    before = tree(remains(tmp_path, dead_pid(), "old"))

    def fails() -> None:
        with staged(tmp_path / "a", overwrite=True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert tree(tmp_path / "a") == before
    assert os.listdir(tmp_path) == ["a"]


def test_run_json_has_a_schema_and_a_newer_one_is_refused(tmp_path):
    with RunWriter.create(tmp_path / "run", kind="test", config={}) as writer:
        writer.write(1, {"loss": 2.0})
    info = json.loads((tmp_path / "run/run.json").read_text())
    assert info["schema"] == 1
    (tmp_path / "run/run.json").write_text(json.dumps(info | {"schema": 2}))
    with pytest.raises(RunError, match=r"has schema 2, .* up to 1"):
        Run(tmp_path / "run")
    with pytest.raises(RunError, match="has schema 2"):
        RunWriter.resume(tmp_path / "run", {})
    del info["schema"]
    (tmp_path / "run/run.json").write_text(json.dumps(info))
    with pytest.raises(RunError, match=r"was not written by joma"):
        Run(tmp_path / "run")
