"""Recorded results: what longer runs of the exhibits gave, kept with the source. None of them is made again by itself.

One JSON file per item of the queue of long runs (``docs/record.py``), which writes them: numbers, verdict, settings,
versions, date, commit and processor time. No raw measurements. A record stays good when joma's source changes: it has a
version of its data format instead of a fingerprint.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from joma.paper.exhibits.judgement import Judgement
from joma.paper.records import ExhibitRecord, load
from joma.paper.verdict import Verdict

FOLDER = Path(__file__).parent
# Raise it when the fields of a record change their meaning, and convert or repeat the records.
FORMAT = 1


@dataclass(frozen=True)
class StoredJudgement:
    """A judgement in a record without data: its sentences are stored, and cannot be rendered again."""

    verdict: Verdict
    summary: str
    measured: str
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The result of one long run of an exhibit."""

    item: str  # of the queue; usually the exhibit's id
    exhibit: str
    preset: str
    what: str  # the settings, in words
    command: str
    date: str  # UTC, ISO 8601
    commit: str
    core_minutes: float | None  # processor time; None where it was not measured
    settings: dict[str, Any]
    judgement: StoredJudgement | Judgement

    @property
    def day(self) -> str:
        """The date alone."""
        return self.date[:10]


def records(folder: Path = FOLDER) -> Iterator[Recorded]:
    """All recorded results of exhibits, in the order of their names."""
    for file in sorted(folder.glob("*.json")):
        stored = json.loads(file.read_text())
        if stored.get("format") != FORMAT:
            raise ValueError(
                f"{file} has the data format {stored.get('format')!r}, and this version of joma reads {FORMAT}: "
                "make it again with `make record`"
            )
        if "exhibit" not in stored:  # a study of ours that is no exhibit
            continue
        summary = stored["summary"]
        judgement = StoredJudgement(
            Verdict(stored["verdict"]),
            summary,
            stored.get("measured") or summary,
            stored["numbers"],
        )
        own = {item.name: stored[item.name] for item in fields(Recorded) if item.name in stored}
        yield Recorded(**own, judgement=judgement)


def recorded(exhibit: str) -> Recorded | None:
    """Return the recorded result of an exhibit at the laptop preset; None if there is none.

    A record with data is judged anew, and a result without data no longer counts once an exhibit
    shows its record. A `DamagedRecord` is raised.
    """
    from joma.paper.exhibits.index import get, names

    if exhibit not in names():
        return None
    if get([exhibit])[0].experiment.is_recorded:
        record = load(exhibit)
        return None if record is None else _judged(record)
    return next((record for record in records() if record.exhibit == record.item == exhibit), None)


def _judged(record: ExhibitRecord) -> Recorded:
    from joma.paper.exhibits.index import get

    (exhibit,) = get([record.exhibit])
    with tempfile.TemporaryDirectory() as folder:
        judgement = exhibit.judge(record.unpack(Path(folder)))
    return Recorded(
        item=record.exhibit,
        exhibit=record.exhibit,
        preset=record.preset,
        what=exhibit.title,
        command=record.command,
        date=record.date,
        commit="",
        core_minutes=record.core_minutes,
        settings=record.settings,
        judgement=judgement,
    )
