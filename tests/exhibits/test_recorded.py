"""Recorded results: small, complete, of exhibits that exist, and never made again by themselves."""

import json
import re

import pytest

from joma._exhibits.index import EXHIBITS
from joma._exhibits.recorded import FOLDER, recorded, records

RECORDS = list(records())


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.item)
def test_a_record_names_its_exhibit_command_and_origin(record):
    assert record.exhibit in EXHIBITS
    assert f"reproduce {record.exhibit} --preset={record.preset}" in record.command
    assert len(record.commit) == 40
    assert record.judgement.rule
    assert record.judgement.summary
    if record.item == record.exhibit:
        assert recorded(record.exhibit) == record


def test_all_together_are_small():
    assert RECORDS
    assert sum(file.stat().st_size for file in FOLDER.glob("*.json")) <= 300_000


def test_what_was_never_recorded_is_none():
    assert recorded("no such exhibit") is None


def test_records_hold_no_paths_of_a_machine():
    for file in FOLDER.glob("*.json"):
        assert not re.search(r"(^|[\s=\"'])[/~]", json.loads(file.read_text())["command"]), file.name
