"""What an audit has gathered of a series, checkpoint by checkpoint; in a run folder, so that a kill costs one of them.

    run.json, metrics.jsonl     one row per checkpoint, when all else of it is on the disk
    gathered/3.json             the facts of the fourth
    gathered/3.sketch           numbers of it, for the distances between all checkpoints
    gathered/3.samples          all numbers that changes are measured on; of the last two only

A row counts as long as its checkpoint is what it was: the files by their sizes and times, or the commit on the hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from joma._checkpoints import hub
from joma._checkpoints.audit.facts import Facts, FileFact, Samples, TensorFact, relative_change
from joma._checkpoints.audit.faults import Fault
from joma._checkpoints.audit.sketch import sketch
from joma._checkpoints.checkpoints import Checkpoint
from joma._runs import Run, RunWriter, write_atomic, write_json

_FOLDER = "gathered"


class Gathered:
    """The facts of a series, in the order of steps, as far as they are known.

    Attributes:
        series: of each checkpoint.
        sketches: of those that could be read.
    """

    def __init__(self, writer: RunWriter | None = None) -> None:
        self.series: list[Facts] = []
        self.sketches: list[Samples] = []
        self._recent: list[tuple[int, Samples]] = []  # of the last two that could be read
        self._writer = writer

    @classmethod
    def open(
        cls, run: Path | None, config: Mapping[str, object], checkpoints: Sequence[Checkpoint], stamps: Sequence[str],
        *, retry: bool, overwrite: bool,
    ) -> Self:  # fmt: skip
        """What a run folder has of these checkpoints; it is begun anew if it has not the first of them, as they are."""
        if run is None:
            return cls()
        if not overwrite and (run / "run.json").exists():
            writer = RunWriter.resume(run, config)
            try:
                gathered = cls(writer)
                if gathered._load(checkpoints, stamps, retry):
                    writer.note(faults=None)  # those of the last call are not those of this one
                    return gathered
            except BaseException:
                writer.leave()
                raise
            writer.leave()
            overwrite = True
        packages = ("joma", "torch", "huggingface_hub")
        return cls(
            RunWriter.create(
                run, kind="audit", config=config, packages=packages, overwrite=overwrite
            )
        )

    def _load(self, checkpoints: Sequence[Checkpoint], stamps: Sequence[str], retry: bool) -> bool:
        """Take what is there; False if it is not the beginning of this series, as it is now."""
        assert self._writer is not None
        rows, folder = list(Run(self._writer.path).rows()), self._writer.path / _FOLDER
        now = [(c.name, c.step, stamp) for c, stamp in zip(checkpoints, stamps, strict=True)]
        if [(row["checkpoint"], row["step"], row["stamp"]) for row in rows] != now[: len(rows)]:
            return False
        try:
            self.series = [
                _facts(json.loads((folder / f"{n}.json").read_text("utf-8")))
                for n in range(len(rows))
            ]
            readable = [n for n, facts in enumerate(self.series) if not facts.problem]
            self.sketches = [_read(folder / f"{n}.sketch") for n in readable]
            self._recent = [(n, _read(folder / f"{n}.samples")) for n in readable[-2:]]
        except (OSError, ValueError, TypeError, KeyError):  # some of it was deleted
            return False
        return not (retry and len(readable) < len(rows))

    def add(self, facts: Facts, samples: Samples, stamp: str) -> None:
        """The next checkpoint."""
        place, old = len(self.series), list[int]()
        thin = sketch(facts, samples)
        if not facts.problem:
            changes = [relative_change(samples, before) for _, before in reversed(self._recent)]
            facts.change, facts.change2 = [*changes, {}, {}][:2]
            old = [n for n, _ in self._recent[:-1]]
            self._recent = [*self._recent[-1:], (place, samples)]
            self.sketches.append(thin)
        self.series.append(facts)
        if self._writer is None:
            return
        folder = self._writer.path / _FOLDER
        folder.mkdir(exist_ok=True)
        if not facts.problem:
            _write(folder / f"{place}.sketch", thin)
            _write(folder / f"{place}.samples", samples)
        write_json(folder / f"{place}.json", asdict(facts))
        change = statistics.median(facts.change.values()) if facts.change else float("nan")
        self._writer.write(facts.step, {"change": change}, checkpoint=facts.name, stamp=stamp)
        for n in old:
            (folder / f"{n}.samples").unlink(missing_ok=True)

    def conclude(self, faults: Sequence[Fault], unknown: Sequence[str]) -> None:
        """Record what was found in the run folder: the page of the run shows it."""
        if self._writer is None:
            return
        self._writer.note(faults=[fault.as_json() for fault in faults], unknown=list(unknown))
        if faults:
            concerned = {name for fault in faults for name in fault.checkpoints}
            count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
            self._writer.finish(
                "done", f"{count} in {len(concerned)} of {len(self.series)} checkpoints"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(*error)


def read_series(run: Path) -> list[Facts]:
    """Return the facts of each checkpoint in the folder of an audit, as far as it has come."""
    count = sum(1 for _ in Run(run).rows())
    return [
        _facts(json.loads((run / _FOLDER / f"{n}.json").read_text("utf-8"))) for n in range(count)
    ]


def stamps_of(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """What tells whether a checkpoint is still the same: its commit on the hub, or sizes and times of its files."""
    repos = {checkpoint.repo for checkpoint in checkpoints if checkpoint.repo is not None}
    commits = {repo: hub.commits(repo) for repo in repos}
    stamps = []
    for checkpoint in checkpoints:
        if (revision := checkpoint.revision()) is not None:
            stamps.append(
                revision.commit() or commits[revision.repo].get(checkpoint.name, checkpoint.name)
            )
            continue
        path = Path(str(checkpoint.path))
        files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
        told = [
            (file.name, stat.st_size, stat.st_mtime_ns)
            for file in files
            for stat in [os.stat(file)]
        ]
        stamps.append(hashlib.sha256(json.dumps(told).encode()).hexdigest())
    return stamps


def _facts(row: dict[str, Any]) -> Facts:
    files = {name: FileFact(**file) for name, file in row.pop("files").items()}
    tensors = {
        name: TensorFact(**{**t, "shape": tuple(t["shape"])})
        for name, t in row.pop("tensors").items()
    }
    return Facts(**row, files=files, tensors=tensors)


def _write(path: Path, samples: Samples) -> None:
    from safetensors.torch import save

    write_atomic(path, save({name: sample.contiguous() for name, sample in samples.items()}))


def _read(path: Path) -> Samples:
    from safetensors.torch import load

    return load(path.read_bytes())
