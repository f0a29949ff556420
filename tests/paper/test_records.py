"""Records carry their data: judged anew, checked by a slice, refused if damaged."""

import dataclasses
import json
import math
import sys
import zipfile

import altair as alt
import pandas as pd
import pytest
import torch

from joma import Run
from joma.paper import records
from joma.paper.exhibits import Experiment, spot_check
from joma.paper.exhibits.base import FRESH_SEED, Exhibit
from joma.paper.exhibits.judgement import Judgement
from joma.paper.exhibits.making import make_exhibit
from joma.paper.exhibits.spot_check import SpotCheck, compare
from joma.paper.make_record import make_record
from joma.paper.records import DamagedRecord, load
from joma.paper.verdict import Verdict


def run(writer, settings, seed, progress):
    """Write a decaying curve, whose numbers depend on the settings, and a number per layer."""
    for step in range(settings["steps"]):
        value = math.exp(-step / settings["scale"]) + seed / 1000
        writer.write(step, {"value": value, "layers": [value / 3, value / 7]}, t=step / 10)


def draw(run):
    return alt.Chart(run.frame("value")).mark_line().encode(x="step", y="value")


def judge(run):
    curve = run.frame("value").value
    verdict = Verdict.HOLDS if curve.is_monotonic_decreasing else Verdict.FAILS
    return Judgement(verdict, {"start": curve.iloc[0]}, "from {start:.3f}")


EXPERIMENT = Experiment(
    {"laptop": {"steps": 50, "scale": 7.0}},
    run,
    draw,
    judge,
    axes={"layers": ["layer"]},
    code_slice={"steps": 5, "scale": 3.0},
    record_slice={"steps": 4},
)
DECAY = Exhibit(
    id="decay",
    title="Decay",
    statement="A curve falls.",
    rule="holds if the curve falls",
    experiment=EXPERIMENT,
)


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path / "recorded")
    monkeypatch.setattr(records.load, "__defaults__", (tmp_path / "recorded",))
    return make_record(DECAY, tmp_path / "runs", tmp_path / "recorded")


def rewrite(path, name, change):
    """Replace one member of a zip file."""
    with zipfile.ZipFile(path) as archive:
        members = {entry: archive.read(entry) for entry in archive.namelist()}
    members[name] = change(members[name])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for entry, content in members.items():
            archive.writestr(entry, content)


def test_a_record_has_the_data_of_its_run_to_six_digits(record, tmp_path):
    made = Run(tmp_path / "runs" / "decay").frame()
    unpacked = record.unpack(tmp_path / "unpacked").frame()
    pd.testing.assert_frame_equal(made, unpacked, rtol=1e-5)
    assert (made.value != unpacked.value).any()
    assert (record.preset, record.seed, record.settings) == (
        "laptop",
        FRESH_SEED,
        EXPERIMENT.settings["laptop"],
    )
    assert record.core_minutes > 0
    assert record.versions["torch"] == torch.__version__
    assert record.origin.startswith(f"recorded {record.day}, ")


def test_the_default_preset_shows_the_record_judged_anew_and_checked(record, tmp_path):
    outcome = make_exhibit(DECAY, "default", tmp_path / "out")
    assert outcome.verdict.verdict is Verdict.HOLDS
    assert [check.name for check in outcome.checks] == ["code", "record"]
    assert all(check.agrees and check.count >= 12 for check in outcome.checks)
    assert (outcome.path / "figure.json").exists()
    again = make_exhibit(DECAY, "default", tmp_path / "out")
    assert not again.fresh
    assert again.checks == outcome.checks


def test_doctored_data_change_the_verdict(record, tmp_path):
    def raise_last_value(metrics):
        lines = metrics.decode().splitlines()
        rows = [json.loads(line) for line in lines]
        last = max(index for index, row in enumerate(rows) if row["gauge"] == "value")
        rows[last]["value"] = 1e9
        return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()

    rewrite(record.path, "run/metrics.jsonl", raise_last_value)
    assert make_exhibit(DECAY, "default", tmp_path / "out").verdict.verdict is Verdict.FAILS


def test_a_damaged_record_is_named(record, tmp_path):
    content = record.path.read_bytes()
    middle = len(content) // 2
    for damaged in (
        b"",
        content[:middle],
        b"not a zip",
        content.replace(b"record.json", b"recorf.json"),
    ):
        record.path.write_bytes(damaged)
        with pytest.raises(
            DamagedRecord, match=r"decay\.zip is damaged .*make record EXHIBIT=decay"
        ):
            load("decay")
    for place in range(100, len(content) - 100, 97):
        record.path.write_bytes(
            content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]
        )
        try:
            reread = load("decay")
            frame = reread.unpack(tmp_path / f"unpacked-{place}").frame()
        except DamagedRecord:
            continue
        # Bytes that no reader needs, such as names repeated in a header, may change unnoticed.
        pd.testing.assert_frame_equal(frame, record.unpack(tmp_path / f"again-{place}").frame())


def test_a_record_of_another_format_is_named_and_never_shown(record, tmp_path):
    rewrite(
        record.path,
        "record.json",
        lambda text: json.dumps(json.loads(text) | {"format": 3}).encode(),
    )
    with pytest.raises(DamagedRecord, match="has data format 3, and this version of joma reads 2"):
        make_exhibit(DECAY, "default", tmp_path / "out")
    assert not (tmp_path / "out" / "decay").exists()


def with_details(change):
    """Return a change of `record.json`."""

    def rewritten(text):
        details = json.loads(text)
        return json.dumps(change(details)).encode()

    return rewritten


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda details: list(details), "record.json is no mapping"),
        (lambda details: details | {"colour": "red"}, "colour"),
        (lambda details: details | {"slices": None}, "NoneType"),
        (lambda details: {name: details[name] for name in details if name != "slices"}, "slices"),
        (lambda details: {name: details[name] for name in details if name != "date"}, "date"),
        (lambda details: details | {"date": 20261118}, "int"),
        (lambda details: details | {"settings": [1, 2]}, "sequence"),
        (lambda details: details | {"core_minutes": "many"}, "format code"),
    ],
)
def test_details_of_another_shape_are_named(record, change, reason):
    rewrite(record.path, "record.json", with_details(change))
    with pytest.raises(DamagedRecord, match=rf"decay\.zip is damaged \(.*{reason}.*make record"):
        load("decay")


def test_the_record_of_another_exhibit_is_not_shown(record):
    record.path.rename(record.path.with_name("growth.zip"))
    with pytest.raises(
        DamagedRecord, match=r"growth\.zip is of the exhibit 'decay': name it decay"
    ):
        load("growth")


def test_a_record_without_what_the_rule_needs_is_damaged(record, tmp_path):
    rewrite(record.path, "run/metrics.jsonl", lambda metrics: b"")
    with pytest.raises(DamagedRecord, match=r"decay\.zip is damaged .*make record EXHIBIT=decay"):
        make_exhibit(DECAY, "default", tmp_path / "out")
    assert not (tmp_path / "out/decay").exists()


def test_slices_that_need_a_missing_library_are_not_checked_and_it_is_said(
    record, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    needing = dataclasses.replace(EXPERIMENT, slice_modules=("transformers",))
    exhibit = dataclasses.replace(DECAY, experiment=needing)
    for _ in range(2):  # made, and found again
        outcome = make_exhibit(exhibit, "default", tmp_path / "out")
        assert outcome.verdict.verdict is Verdict.HOLDS
        assert outcome.checks == ()
        assert outcome.unchecked == (
            "not checked here, without transformers: pip install 'joma[hf]'"
        )


def test_an_exhibit_without_a_code_slice_is_not_recorded(tmp_path):
    unchecked = dataclasses.replace(EXPERIMENT, code_slice=None)
    exhibit = dataclasses.replace(DECAY, experiment=unchecked)
    with pytest.raises(ValueError, match="decay has no code_slice"):
        make_record(exhibit, tmp_path / "runs", tmp_path / "recorded")
    assert not (tmp_path / "runs").exists()


def test_a_record_cannot_write_outside_its_folder(record, tmp_path):
    with zipfile.ZipFile(record.path, "a") as archive:
        archive.writestr("run/../../outside.txt", b"x")
    with pytest.raises(DamagedRecord, match="outside"):
        record.unpack(tmp_path / "inner" / "unpacked")
    assert not (tmp_path / "inner" / "outside.txt").exists()
    assert not (tmp_path / "outside.txt").exists()


def test_a_slice_that_disagrees_is_an_error_with_both_numbers(record, tmp_path, monkeypatch):
    def biased(writer, settings, seed, progress):
        run(writer, settings, seed, progress)
        writer.write(99, {"value": 1.0}, t=9.9)

    changed = dataclasses.replace(EXPERIMENT, run=lambda *args: biased(*args))
    exhibit = dataclasses.replace(DECAY, experiment=changed)
    assert spot_check.spot_check(exhibit, record, "code").agrees  # rows that only one side has

    def other(writer, settings, seed, progress):
        run(writer, settings | {"scale": settings["scale"] * 1.5}, seed, progress)

    exhibit = dataclasses.replace(DECAY, experiment=dataclasses.replace(EXPERIMENT, run=other))
    check = spot_check.spot_check(exhibit, record, "code")
    assert check.has_failed
    assert str(check).startswith("spot check failed (code): ")
    assert f"is {check.here:.6g} here and {check.recorded:.6g} in the record" in str(check)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    check = spot_check.spot_check(exhibit, record, "code")
    assert not check.has_failed
    assert str(check).startswith("not comparable")


def test_a_number_that_is_not_finite_on_one_side_never_agrees():
    here = pd.DataFrame({"step": [1, 2], "gauge": ["loss"] * 2, "value": [1.0, math.nan]})
    recorded = here.assign(value=[1.0, 2.0])
    assert not compare("code", here, recorded).agrees
    assert not compare("code", recorded, here).agrees
    assert compare("code", here, here).agrees


def test_tables_without_a_common_row_are_an_error():
    here = pd.DataFrame({"step": [1], "gauge": ["loss"], "value": [1.0]})
    with pytest.raises(ValueError, match="no row in common"):
        compare("code", here, here.assign(step=2))


def test_differences_are_a_share_of_the_gauges_largest_value():
    here = pd.DataFrame({"step": [1, 2], "gauge": ["loss"] * 2, "value": [0.0, 10.0]})
    check = compare("code", here, here.assign(value=[0.005, 10.0]))
    assert check == SpotCheck("code", 2, 1, 2, 0.0005, "loss at step 1", 0.0, 0.005)
    assert check.agrees
