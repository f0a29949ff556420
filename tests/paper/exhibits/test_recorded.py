"""Recorded results: small, complete, of exhibits that exist, and never made again by themselves."""

import json
import re

import pytest

from joma.paper.exhibits.fig10 import verdict_of
from joma.paper.exhibits.index import ORDER
from joma.paper.recorded import FOLDER, FORMAT, recorded, records

RECORDS = list(records())


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.item)
def test_a_record_names_its_exhibit_command_and_origin(record):
    assert record.exhibit in ORDER
    assert f"reproduce {record.exhibit} --preset={record.preset}" in record.command
    assert len(record.commit) == 40
    assert record.judgement.summary
    if record.item == record.exhibit:
        assert recorded(record.exhibit) == record


def test_a_record_has_a_version_of_its_format_and_no_fingerprint_of_the_source():
    """So that it stays good when the source changes."""
    for file in FOLDER.glob("*.json"):
        stored = json.loads(file.read_text())
        assert stored["format"] == FORMAT, file.name
        assert "fingerprint" not in stored, file.name


def test_a_record_of_another_format_is_refused(tmp_path):
    stored = json.loads((FOLDER / "fig3.json").read_text())
    (tmp_path / "fig3.json").write_text(json.dumps(stored))
    assert [record.exhibit for record in records(tmp_path)] == ["fig3"]
    (tmp_path / "fig3.json").write_text(json.dumps({**stored, "format": FORMAT + 1}))
    with pytest.raises(
        ValueError, match=r"fig3\.json has the data format 2, and this version of joma reads 1"
    ):
        list(records(tmp_path))


def test_all_together_are_small():
    assert RECORDS
    assert sum(file.stat().st_size for file in FOLDER.glob("*.json")) <= 300_000


def test_what_was_never_recorded_is_none():
    assert recorded("no such exhibit") is None


def test_records_hold_no_paths_of_a_machine():
    for file in FOLDER.glob("*.json"):
        assert not re.search(r"(^|[\s=\"'])[/~]", json.loads(file.read_text())["command"]), (
            file.name
        )


def test_the_recorded_verdict_of_figure_10_is_what_its_rule_makes_of_its_numbers():
    said = recorded("fig10").judgement
    assert [verdict_of(numbers) for numbers in said.numbers.values()] == [said.verdict]
    (numbers,) = said.numbers.values()
    assert numbers["merged neurons found"] < 0.5
    assert said.verdict == "inconclusive"
