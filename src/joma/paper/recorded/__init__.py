"""Records of exhibits (`<exhibit>.zip`, read by `joma.paper.records`) and results of older longer runs.

An older result (`<exhibit>.json`) has a verdict and sentences without the data behind them. It cannot be
judged anew, so it decides nothing: it is shown as "a longer run found" next to what is computed. It is
not shown for an exhibit that has a record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from joma.paper.records import FOLDER, path_of
from joma.paper.verdict import Verdict

# Raise it when the fields of a result change their meaning.
FORMAT = 1


@dataclass(frozen=True)
class LongerRun:
    """Result of a longer run of an exhibit, without its data.

    Attributes:
        exhibit: id of the exhibit.
        preset: preset of the run.
        what: the settings, in words.
        command: the command that made the run.
        date: UTC, ISO 8601.
        commit: commit of the source that judged it.
        core_minutes: processor time; None if it was not measured.
        settings: settings of the run.
        verdict: verdict under the rule of that commit.
        summary: findings with their numbers.
        measured: deciding number, with its name.
        numbers: everything that the verdict rests on, by name.
    """

    exhibit: str
    preset: str
    what: str
    command: str
    date: str
    commit: str
    core_minutes: float | None
    settings: dict[str, Any]
    verdict: Verdict
    summary: str
    measured: str
    numbers: dict[str, Any]

    @property
    def day(self) -> str:
        """Date without the time."""
        return self.date[:10]


def longer_runs(folder: Path = FOLDER) -> Iterator[LongerRun]:
    """Yield the results of longer runs of exhibits, in the order of their names."""
    for file in sorted(folder.glob("*.json")):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored.get("format") != FORMAT:
            raise ValueError(
                f"{file} has the data format {stored.get('format')!r}, and this version of joma reads "
                f"{FORMAT}: make a record of the exhibit with `make record EXHIBIT={file.stem}`"
            )
        # There are studies that are no exhibits.
        if "exhibit" in stored:
            stored["verdict"] = Verdict(stored["verdict"])
            yield LongerRun(**{item.name: stored[item.name] for item in fields(LongerRun)})


def longer_run(exhibit: str, folder: Path = FOLDER) -> LongerRun | None:
    """Return the result of a longer run of an exhibit; None if there is none, or a record."""
    if path_of(exhibit, folder).exists():
        return None
    return next((run for run in longer_runs(folder) if run.exhibit == exhibit), None)
