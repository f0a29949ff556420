"""Results of longer runs without data: small, complete, of exhibits that exist, and next to no record."""

import json
import re
import zipfile

import pytest

from joma.paper.exhibits.index import ORDER
from joma.paper.recorded import FORMAT, longer_run, longer_runs
from joma.paper.records import FOLDER

RUNS = list(longer_runs())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.exhibit)
def test_a_result_names_its_exhibit_command_and_origin(run):
    assert run.exhibit in ORDER
    assert f"reproduce {run.exhibit} --preset={run.preset}" in run.command
    assert len(run.commit) == 40
    assert run.summary
    assert run.measured


def test_a_result_has_a_version_of_its_format_and_no_fingerprint_of_the_source():
    """So that it stays good when the source changes."""
    for file in FOLDER.glob("*.json"):
        stored = json.loads(file.read_text())
        assert stored["format"] == FORMAT, file.name
        assert "fingerprint" not in stored, file.name


def test_a_result_of_another_format_is_refused(tmp_path):
    stored = json.loads((FOLDER / "fig3.json").read_text())
    (tmp_path / "fig3.json").write_text(json.dumps(stored))
    assert [run.exhibit for run in longer_runs(tmp_path)] == ["fig3"]
    (tmp_path / "fig3.json").write_text(json.dumps({**stored, "format": FORMAT + 1}))
    with pytest.raises(
        ValueError, match=r"fig3\.json has the data format 2, and this version of joma reads 1"
    ):
        list(longer_runs(tmp_path))


def test_next_to_a_record_an_older_result_is_not_shown(tmp_path):
    (tmp_path / "fig3.json").write_text((FOLDER / "fig3.json").read_text())
    assert longer_run("fig3", tmp_path).measured == longer_run("fig3").measured
    with zipfile.ZipFile(tmp_path / "fig3.zip", "w") as archive:
        archive.writestr("record.json", "{}")
    assert longer_run("fig3", tmp_path) is None
    assert longer_run("no such exhibit", tmp_path) is None


def test_all_together_are_small():
    assert RUNS
    assert sum(file.stat().st_size for file in FOLDER.glob("*.json")) <= 300_000


def test_results_hold_no_paths_of_a_machine():
    for file in FOLDER.glob("*.json"):
        command = json.loads(file.read_text())["command"]
        assert not re.search(r"(^|[\s=\"'])[/~]", command), file.name
