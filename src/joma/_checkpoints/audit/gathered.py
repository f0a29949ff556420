"""The facts that an audit has gathered of a series, in a run folder: a kill costs one checkpoint.

    run.json, metrics.jsonl     one row per checkpoint, written when all else of it is on the disk
    gathered/3.json             the facts of the fourth checkpoint
    gathered/3.sketch           some of its numbers, for the distances between all checkpoints
    gathered/3.samples          all numbers that changes are measured on; of the last two only

A row counts as long as its checkpoint has not changed: sizes and times of the files, or the commit on
the hub.
"""

from __future__ import annotations

import hashlib
import json
import math
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
    """The facts of a series in the order of steps, as far as the audit has come.

    Attributes:
        series: the facts of each checkpoint.
        sketches: of the checkpoints that could be read.
    """

    def __init__(self, writer: RunWriter | None = None) -> None:
        self.series: list[Facts] = []
        self.sketches: list[Samples] = []
        self._recent: list[tuple[int, Samples]] = []  # of the last two that could be read
        self._writer = writer

    @classmethod
    def open(
        cls,
        run: Path | None,
        config: Mapping[str, object],
        checkpoints: Sequence[Checkpoint],
        stamps: Sequence[str],
        *,
        retry: bool,
        overwrite: bool,
    ) -> Self:
        """Return what a run folder has of these checkpoints; start anew if they have changed."""
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
        writer = RunWriter.create(
            run, kind="audit", config=config, packages=packages, overwrite=overwrite
        )
        return cls(writer)

    def _load(self, checkpoints: Sequence[Checkpoint], stamps: Sequence[str], retry: bool) -> bool:
        """Load the run folder; return False if it does not hold the beginning of this series."""
        assert self._writer is not None
        rows = list(Run(self._writer.path).rows())
        folder = self._writer.path / _FOLDER
        expected = []
        for checkpoint, stamp in zip(checkpoints, stamps, strict=True):
            expected.append((checkpoint.name, checkpoint.step, stamp))
        stored = [(row["checkpoint"], row["step"], row["stamp"]) for row in rows]
        if stored != expected[: len(rows)]:
            return False
        try:
            for place in range(len(rows)):
                text = (folder / f"{place}.json").read_text("utf-8")
                self.series.append(_facts(json.loads(text)))
            readable = [place for place, facts in enumerate(self.series) if not facts.problem]
            self.sketches = [_read(folder / f"{place}.sketch") for place in readable]
            self._recent = [(place, _read(folder / f"{place}.samples")) for place in readable[-2:]]
        except (OSError, ValueError, TypeError, KeyError):  # some of it was deleted
            return False
        has_failures = len(readable) < len(rows)
        return not (retry and has_failures)

    def add(self, facts: Facts, samples: Samples, stamp: str) -> None:
        """Add the next checkpoint."""
        place = len(self.series)
        outdated = []
        thin = sketch(facts, samples)
        if not facts.problem:
            changes = [relative_change(samples, before) for _, before in reversed(self._recent)]
            facts.change, facts.change2 = [*changes, {}, {}][:2]
            outdated = [earlier for earlier, _ in self._recent[:-1]]
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
        change = statistics.median(facts.change.values()) if facts.change else math.nan
        # The row comes last: it counts only if all files are there.
        self._writer.write(facts.step, {"change": change}, checkpoint=facts.name, stamp=stamp)
        for earlier in outdated:
            (folder / f"{earlier}.samples").unlink(missing_ok=True)

    def conclude(self, faults: Sequence[Fault], unknown: Sequence[str]) -> None:
        """Record the faults in the run folder: the page of the run shows them."""
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
    series = []
    for place in range(count):
        text = (run / _FOLDER / f"{place}.json").read_text("utf-8")
        series.append(_facts(json.loads(text)))
    return series


def stamps_of(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Return a text per checkpoint that changes with it: the commit, or sizes and times of its files."""
    repos = {checkpoint.repo for checkpoint in checkpoints if checkpoint.repo is not None}
    commits = {repo: hub.commits(repo) for repo in repos}
    stamps = []
    for checkpoint in checkpoints:
        revision = checkpoint.revision()
        if revision is None:
            stamps.append(_local_stamp(Path(str(checkpoint.path))))
            continue
        name = checkpoint.name
        stamps.append(revision.commit() or commits[revision.repo].get(name, name))
    return stamps


def _local_stamp(path: Path) -> str:
    files = []
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(path.iterdir())
    states = []
    for file in files:
        state = os.stat(file)
        states.append((file.name, state.st_size, state.st_mtime_ns))
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def _facts(row: dict[str, Any]) -> Facts:
    files = {name: FileFact(**file) for name, file in row.pop("files").items()}
    tensors = {}
    for name, tensor in row.pop("tensors").items():
        tensors[name] = TensorFact(**{**tensor, "shape": tuple(tensor["shape"])})
    return Facts(**row, files=files, tensors=tensors)


def _write(path: Path, samples: Samples) -> None:
    from safetensors.torch import save

    write_atomic(path, save({name: sample.contiguous() for name, sample in samples.items()}))


def _read(path: Path) -> Samples:
    from safetensors.torch import load

    return load(path.read_bytes())
