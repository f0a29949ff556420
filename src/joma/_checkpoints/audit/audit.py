"""`joma.audit`: check that a series of checkpoints is what its names say."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._checkpoints.audit.facts import Facts, Level, as_json, gather, transfer_of
from joma._checkpoints.audit.faults import Fault, find_faults
from joma._checkpoints.audit.fit import MIN_CHECKPOINTS
from joma._checkpoints.audit.gathered import Gathered, read_series, stamps_of
from joma._checkpoints.budget import allowance
from joma._checkpoints.checkpoints import find_checkpoints
from joma._checkpoints.numbering import place_for
from joma._checkpoints.options import CheckpointOptions
from joma._runs import Run
from joma._runs.names import harmless

if TYPE_CHECKING:
    import pandas as pd

    from joma._show.plots import Chart

# Called with: checkpoints done, checkpoints in all, what is being done.
AuditProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Audit:
    """The result of an audit; made by `joma.audit`.

    Attributes:
        source: the series.
        level: how much of it was read.
        faults: what is wrong, `Fault`s with ``kind``, ``checkpoints``, ``text``, ``tensors`` and
            ``what_to_do``.
        path: the run folder; None if nothing is kept.
    """

    source: str
    level: str
    faults: tuple[Fault, ...]
    _facts: tuple[Facts, ...]
    _unknown: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def ok(self) -> bool:
        """True if there is no fault."""
        return not self.faults

    @property
    def not_judged(self) -> str:
        """A sentence about what could not be judged, and why; "" if all could."""
        if self.level == Level.HASHES:
            return (
                "what the files hold, and so how one step follows another: level slices reads a part "
                "of each tensor"
            )
        readable = sum(not facts.problem for facts in self._facts)
        if readable < MIN_CHECKPOINTS:
            return (
                f"how one step follows another: that takes {MIN_CHECKPOINTS} checkpoints, here are "
                f"{readable}"
            )
        return "; ".join(self._unknown)

    def checkpoints(self) -> pd.DataFrame:
        """Return one row per checkpoint.

        Columns: step, checkpoint, files, tensors, bytes, change (median), transferred, faults.
        """
        import pandas as pd

        rows = []
        for facts in self._facts:
            kinds = [fault.kind for fault in self.faults if facts.name in fault.checkpoints]
            rows.append(
                {
                    "step": facts.step,
                    "checkpoint": facts.name,
                    "files": len(facts.files),
                    "tensors": len(facts.tensors),
                    "bytes": sum(file.size for file in facts.files.values()),
                    "change": pd.Series(facts.change, dtype=float).median(),
                    "transferred": facts.transferred,
                    "faults": ", ".join(dict.fromkeys(kinds)),
                }
            )
        return pd.DataFrame(rows)

    def changes(self) -> pd.DataFrame:
        """Return one row per tensor and checkpoint: its relative change since the checkpoint before.

        Columns: step, checkpoint, tensor, file, change.
        """
        import pandas as pd

        rows = []
        for facts in self._facts:
            for name, change in facts.change.items():
                rows.append((facts.step, facts.name, name, facts.tensors[name].file, change))
        return pd.DataFrame(rows, columns=["step", "checkpoint", "tensor", "file", "change"])

    def draw(self) -> Chart:
        """Return the picture: the change between neighbours over steps, one line per tensor."""
        from joma._show.plots.audit import draw

        marks = []
        for fault in self.faults:
            marks += [(name, fault.kind) for name in fault.checkpoints]
        return draw(self.changes(), self.checkpoints(), marks, self.source)

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain data: faults, and the files and tensors of each checkpoint."""
        return {
            "source": self.source,
            "level": self.level,
            "faults": [fault.as_json() for fault in self.faults],
            "not_judged": self.not_judged,
            "checkpoints": as_json(list(self._facts)),
        }

    def __repr__(self) -> str:
        counts = f"{len(self._facts)} checkpoints, {len(self.faults)} faults"
        return f"Audit({self.source!r}, {self.level}: {counts})"


def audit(
    source: str | os.PathLike[str],
    *,
    run: str | os.PathLike[str] | None = None,
    revisions: str | Sequence[str] | None = None,
    level: str = "slices",
    budget: str | int | None = None,
    retry: bool = False,
    overwrite: bool = False,
    report: AuditProgress | None = None,
) -> Audit:
    """Check a series of checkpoints for duplicates, wrong shards, swapped steps and damage.

    Arguments:
        source: as for `joma.scan`: a folder of checkpoints, a run of ``joma train``, or the id of a
            model on the hub.
        run: the run folder that keeps what was gathered: the same call again continues where it
            stopped. Without one nothing is kept. If it holds the audit of another series or level,
            this one goes to ``run``-2, ``run``-3, …, and a line names the folder.
        revisions: which checkpoints, as for `joma.scan`; by default all that have a step.
        level: "hashes" (from the hub, no weight is transferred), "slices" (64 kB per tensor) or
            "full".
        budget: bytes that may be transferred from the hub, as "20GB": more is refused before it
            begins. Each checkpoint has an equal share of it.
        retry: repeat what could not be read before, and what follows it.
        overwrite: replace the run in the folder instead of continuing it.
        report: called with the progress: checkpoints done, in all, and what is being done.

    Returns:
        The audit: `faults`, `checkpoints()` its table, `changes()` between neighbours, `draw()` their
        picture.
    """
    if level not in list(Level):
        raise ValueError(f"there is no level {level!r}: give one of {', '.join(Level)}")
    name = os.fspath(source)
    is_remote = not os.path.exists(os.path.expanduser(name))
    if revisions is None and is_remote:
        revisions = "all"
    options = CheckpointOptions(
        revisions=revisions, budget=budget, retry=retry, overwrite=overwrite
    )
    checkpoints = find_checkpoints(name, options.revisions)
    if len(checkpoints) < 2:
        raise ValueError(f"{name} has one checkpoint only: an audit compares those of a series")
    checkpoints.sort(key=lambda checkpoint: checkpoint.step)
    total = len(checkpoints)
    stamps = [""] * total
    if run is not None:
        stamps = stamps_of(checkpoints)
    config = {"source": harmless(name.rstrip("/")), "level": level}
    folder = None if run is None else Path(run)
    if folder is not None and not overwrite:
        folder = place_for(folder, "audit", config)
    say = report or _silent
    with Gathered.open(
        folder, config, checkpoints, stamps, retry=options.retry, overwrite=options.overwrite
    ) as gathered:
        done = len(gathered.series)
        bytes_of = partial(transfer_of, level=Level(level))
        share = allowance(
            checkpoints[done:], bytes_of, options.max_bytes, partial(say, done, total)
        )
        for place in range(done, total):
            say(place, total, checkpoints[place].name)
            facts, samples = gather(checkpoints[place], Level(level), share)
            gathered.add(facts, samples, stamps[place])
        say(total, total, "")
        faults, unknown = find_faults(gathered.series, gathered.sketches)
        gathered.conclude(faults, unknown)
    return Audit(harmless(name), level, tuple(faults), tuple(gathered.series), unknown, folder)


def read_audit(path: str | os.PathLike[str]) -> Audit:
    """Return the audit in a run folder; one that is not finished has no faults yet."""
    run = Run(path)
    info = run.info
    config = info["config"]
    faults = tuple(Fault.from_json(fault) for fault in info.get("faults") or ())
    series = tuple(read_series(run.path))
    unknown = tuple(info.get("unknown", ()))
    return Audit(config["source"], config["level"], faults, series, unknown, run.path)


def _silent(done: int, total: int, what: str) -> None:
    pass
