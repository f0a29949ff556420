"""The one table: against a reader that takes one number after the other; padding; runs that refer to others."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from joma._runs import Run, RunError, RunNotFound, RunWriter
from joma._runs.table import long_table

AXES = {"entropy": ["layer", "head"], "rank": ["layer"], "rank.qk": ["layer", "head"]}
numbers = st.floats(allow_subnormal=False, width=32)


@st.composite
def measured(draw):
    """Layers with different numbers of heads, padded with NaN, some real NaN; steps with different gauges."""
    heads = {
        gauge: draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        for gauge in ("entropy", "rank.qk")
    }
    steps = []
    for _ in range(draw(st.integers(0, 4))):
        values = {}
        for gauge, counts in heads.items():
            if draw(st.booleans()):
                values[gauge] = np.full((len(counts), max(counts)), np.nan)
                for layer, count in enumerate(counts):
                    values[gauge][layer, :count] = draw(
                        st.lists(numbers, min_size=count, max_size=count)
                    )
        if draw(st.booleans()):
            values["rank"] = np.array(draw(st.lists(numbers, max_size=3)))
        if draw(st.booleans()):
            values["loss"] = draw(numbers)
        extra = draw(
            st.dictionaries(st.sampled_from(["t", "case"]), st.sampled_from([0.5, "x", 3, None]))
        )
        steps.append((values, extra))
    return heads, steps


def plant(path, heads, steps, kind="watch"):
    with RunWriter.create(path, kind=kind, config={}, axes=AXES) as writer:
        layers = {
            gauge: [f"{gauge}.{n}" for n in range(len(counts))] for gauge, counts in heads.items()
        }
        writer.note(layers=layers, heads=heads)
        for step, (values, extra) in enumerate(steps):
            writer.write(step, values, **extra)
    return Run(path)


def naive(path, gauges=None, **columns):
    """The rows of a run folder, one number after the other."""
    info = json.loads((path / "run.json").read_text())
    rows = []
    for text in (path / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        gauge, value = line.pop("gauge"), line.pop("value")
        line.pop("end", None)
        if gauges is not None and gauge not in gauges:
            continue
        array = np.array(value, dtype=float)
        for place in np.ndindex(array.shape):
            index = dict(zip(info["axes"].get(gauge, []), place, strict=True))
            if "head" in index and index["head"] >= info["heads"][gauge][index["layer"]]:
                continue
            modules = info.get("layers", {}).get(gauge)
            module = modules[index["layer"]] if modules and "layer" in index else None
            rows.append(
                {
                    **columns,
                    **line,
                    **index,
                    "gauge": gauge,
                    "value": float(array[place]),
                    "module": module,
                }
            )
    return rows


def same(table, rows):
    """Row by row; what a column does not have is missing in some way."""
    assert len(table) == len(rows)
    for row, expected in zip(table.to_dict("records"), rows, strict=True):
        for name in {*row, *expected}:
            here, there = row.get(name), expected.get(name)
            assert (pd.isna(here) and (there is None or pd.isna(there))) or here == there, (
                name,
                here,
                there,
            )


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=measured())
def test_the_table_is_that_of_a_naive_reader(tmp_path: Path, data):
    run = plant(tmp_path / os.urandom(6).hex(), *data)
    table, rows = run.frame(), naive(run.path)
    same(table, rows)
    for gauge in AXES:
        same(run.frame(gauge), [row for row in rows if row["gauge"] == gauge])
    last = {row["gauge"]: row["step"] for row in rows}
    same(run.latest(), [row for row in rows if row["step"] == last[row["gauge"]]])


def test_rows_of_heads_that_a_layer_does_not_have_are_dropped_and_its_own_nan_stay(tmp_path: Path):
    nan = math.nan
    values = {"entropy": np.array([[1.0, 2.0, 3.0], [nan, nan, nan]]), "loss": 4.0}
    table = plant(tmp_path / "a", {"entropy": [3, 2]}, [(values, {})]).frame()
    assert table["head"].tolist() == [0, 1, 2, 0, 1, pd.NA]
    np.testing.assert_array_equal(table.value, [1, 2, 3, nan, nan, 4])
    assert table.module.tolist()[:5] == ["entropy.0"] * 3 + ["entropy.1"] * 2
    assert list(table.columns) == ["step", "layer", "head", "gauge", "value", "module"]


def test_a_number_is_never_taken_for_padding(tmp_path: Path):
    """A scan over models with different heads: what is known of one must not cost a number of another."""
    table = plant(
        tmp_path / "a", {"entropy": [1]}, [({"entropy": np.array([[1.0, 2.0]])}, {})]
    ).frame()
    assert table.value.tolist() == [1.0, 2.0]


def test_runs_of_before_have_one_list_of_heads(tmp_path: Path):
    with RunWriter.create(tmp_path / "a", kind="watch", config={}, axes=AXES) as writer:
        writer.note(heads=[2, 1])
        writer.write(0, {"entropy": [[1.0, 2.0], [3.0, math.nan]]})
    assert Run(tmp_path / "a").frame().value.tolist() == [1.0, 2.0, 3.0]


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=measured(), second=measured())
def test_a_run_that_refers_to_others_has_their_rows(tmp_path: Path, first, second):
    home = tmp_path / os.urandom(6).hex()
    members = {
        lr: plant(home / f"runs/{n}", *data)
        for n, (lr, data) in enumerate([(1e-3, first), (1e-2, second)])
    }
    with RunWriter.create(home / "exhibit", kind="exhibit", config={}) as writer:
        writer.write(7, {"own": 1.0})
        for lr, member in members.items():
            writer.refer(member, ["entropy", "loss"], lr=lr)
    run = Run(home / "exhibit")
    rows = [{"step": 7, "gauge": "own", "value": 1.0}]
    for lr, member in members.items():
        rows += naive(member.path, ["entropy", "loss"], lr=lr)
    same(run.frame(), rows)
    assert len(list(run.rows())) == 1 + sum(
        row["gauge"] in ("entropy", "loss") for member in members.values() for row in member.rows()
    )
    moved = home.rename(
        home.with_name(f"{home.name}-moved")
    )  # references hold wherever the folders are
    same(Run(moved / "exhibit").frame(), rows)


def test_each_number_is_on_disk_once(tmp_path: Path):
    member = plant(
        tmp_path / "runs/a", {"entropy": [1]}, [({"entropy": np.array([[0.123456789]])}, {})]
    )
    with RunWriter.create(tmp_path / "exhibit", kind="exhibit", config={}) as writer:
        writer.refer(member, ["entropy"], lr=0.1)
    assert Run(tmp_path / "exhibit").frame().value.tolist() == [0.123456789]
    holders = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and b"0.123456789" in path.read_bytes()
    ]
    assert holders == [member.path / "metrics.jsonl"]


def test_a_reference_that_cannot_be_followed_or_written_says_so(tmp_path: Path):
    member = plant(tmp_path / "a", {"entropy": [1]}, [({"loss": 1.0}, {})])
    with RunWriter.create(tmp_path / "b", kind="exhibit", config={}) as writer:
        with pytest.raises(RunError, match=r"\['layer'\] have names of other columns"):
            writer.refer(member, ["entropy"], layer=3)
        writer.refer(member, ["loss"], lr=0.1)
    run = Run(tmp_path / "b")
    with pytest.raises(RunError, match=r"no gauge 'rnk'; it has .*entropy, loss, rank"):
        run.frame("rnk")
    member.path.rename(tmp_path / "elsewhere")
    for read in (run.frame, lambda: list(run.rows())):
        with pytest.raises(
            RunNotFound, match=r"b refers to the measurements in .*a, which is not there.*again"
        ):
            read()
    assert run.members == [tmp_path / "a"]
    assert run.info["kind"] == "exhibit"


def write_run(path, arrays):
    axes = {"entropy": ["layer", "head"]}
    writer = RunWriter.create(path, kind="watch", config={}, axes=axes)
    for step, array in enumerate(arrays):
        writer.write(step, {"loss": 0.1 * step, "entropy": array})
    writer.finish()


@pytest.mark.parametrize("digits", [3, 7, 9, 15, 17])
@pytest.mark.parametrize("scale", [1e-300, 1e-7, 1.0, 1e5, 1e22])
def test_numbers_of_any_length_are_read_to_the_bit(tmp_path, digits, scale):
    generator = np.random.default_rng(digits)
    arrays = generator.normal(size=(20, 3, 4)) * scale
    arrays = np.array([float(f"{x:.{digits}g}") for x in arrays.flat]).reshape(arrays.shape)
    write_run(tmp_path / "run", arrays)
    table = Run(tmp_path / "run").frame("entropy")
    assert table.value.to_numpy().tobytes() == arrays.tobytes()


def test_a_value_that_is_damaged_is_named(tmp_path):
    write_run(tmp_path / "run", np.ones((3, 2, 2)))
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("[[1.0,1.0]", "[[1.0,1.0,", 1))
    with pytest.raises(RunError, match="is damaged"):
        Run(tmp_path / "run").frame()
    with pytest.raises(RunError, match="is damaged"):
        list(Run(tmp_path / "run").rows())


def test_a_run_is_parsed_once_until_its_files_change(tmp_path, monkeypatch):
    write_run(tmp_path / "run", np.ones((3, 2, 2)))
    parses = []
    monkeypatch.setattr(
        "joma._runs.reader.long_table", lambda *a: parses.append(1) or long_table(*a)
    )
    run = Run(tmp_path / "run")
    first = run.frame()
    first["value"] = 0.0  # the caller's own copy
    second = run.frame()
    assert (second.value == 0).sum() < len(second)
    assert len(parses) == 1
    with RunWriter.resume(tmp_path / "run", {}) as writer:
        writer.write(9, {"entropy": np.ones((2, 2))})
    assert run.frame().step.max() == 9
    assert len(parses) == 2
