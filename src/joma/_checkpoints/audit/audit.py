"""`joma.audit`: is a series of checkpoints what its names say?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._checkpoints.audit.facts import Facts, Level, as_json, gather, transfer_of
from joma._checkpoints.audit.faults import Fault, find_faults
from joma._checkpoints.audit.fit import FEWEST
from joma._checkpoints.audit.gathered import Gathered, read_series, stamps_of
from joma._checkpoints.budget import allowance, parse_bytes
from joma._checkpoints.checkpoints import find_checkpoints
from joma._checkpoints.numbering import place_for
from joma._runs import Run
from joma._runs.names import harmless

if TYPE_CHECKING:
    import pandas as pd

    from joma._show.plots import Chart

AuditProgress = Callable[[int, int, str], None]  # checkpoints done, in all, what is being done


@dataclass(frozen=True)
class Audit:
    """What an audit found; made by `joma.audit`.

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
        """Whether nothing was found."""
        return not self.faults

    @property
    def not_judged(self) -> str:
        """What could not be judged, and why; "" if nothing."""
        if self.level == "hashes":
            return "what the files hold, and so how one step follows another: level slices reads a part of each tensor"
        readable = sum(not facts.problem for facts in self._facts)
        if readable < FEWEST:
            return f"how one step follows another: that takes {FEWEST} checkpoints, here are {readable}"
        return "; ".join(self._unknown)

    def checkpoints(self) -> pd.DataFrame:
        """One row per checkpoint: step, checkpoint, files, tensors, bytes, change (median), transferred, faults."""
        import pandas as pd

        rows = []
        for facts in self._facts:
            changes = pd.Series(facts.change, dtype=float)
            kinds = [fault.kind for fault in self.faults if facts.name in fault.checkpoints]
            rows.append(
                {"step": facts.step, "checkpoint": facts.name, "files": len(facts.files), "tensors": len(facts.tensors),
                 "bytes": sum(file.size for file in facts.files.values()), "change": changes.median(),
                 "transferred": facts.transferred, "faults": ", ".join(dict.fromkeys(kinds))}
            )  # fmt: skip
        return pd.DataFrame(rows)

    def changes(self) -> pd.DataFrame:
        """One row per tensor and checkpoint: step, checkpoint, tensor, file, relative change since the one before."""
        import pandas as pd

        columns = ["step", "checkpoint", "tensor", "file", "change"]
        rows = [
            (f.step, f.name, name, f.tensors[name].file, change)
            for f in self._facts
            for name, change in f.change.items()
        ]
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> Chart:
        """The change between neighbours over the steps, one line per tensor, faults marked."""
        from joma._show.plots.audit import draw

        at = [(name, fault.kind) for fault in self.faults for name in fault.checkpoints]
        return draw(self.changes(), self.checkpoints(), at, self.source)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain data: faults, and per checkpoint its files and tensors with their digests."""
        faults = [fault.as_json() for fault in self.faults]
        return {
            "source": self.source, "level": self.level, "faults": faults, "not_judged": self.not_judged,
            "checkpoints": as_json(list(self._facts)),
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"Audit({self.source!r}, {self.level}: {len(self._facts)} checkpoints, {len(self.faults)} faults)"


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
    """Check a series of checkpoints: duplicates, wrong shards, swapped steps, damaged and missing tensors.

    Arguments:
        source: as for `joma.scan`: a folder of checkpoints, or the id of a model on the hub.
        run: the run folder to keep what was gathered in: the same call again goes on where it stopped. Nothing is kept
            without one. If it holds the audit of another series or level, this one goes to ``run``-2,
            ``run``-3, …, and a line says so.
        revisions: which of them, as for `joma.scan`; all that have a step by default.
        level: "hashes" (of the hub no byte of a weight is transferred), "slices" (64 kB per tensor) or "full".
        budget: bytes that may be transferred from the hub, as "20GB": more is refused before it begins. Each
            checkpoint has an equal share of it.
        retry: also do again what could not be read before, and what follows it.
        overwrite: replace the run in the folder instead of going on with it.
        report: called with the progress: checkpoints done, in all, and what is being done.

    Returns:
        The audit: `faults`, `checkpoints()` its table, `changes()` between neighbours, `draw()` their picture.
    """
    if level not in list(Level):
        raise ValueError(f"there is no level {level!r}: give one of {', '.join(Level)}")
    limit = None if budget is None else parse_bytes(budget)
    name = os.fspath(source)
    remote = not os.path.exists(os.path.expanduser(name))
    checkpoints = find_checkpoints(name, "all" if revisions is None and remote else revisions)
    if len(checkpoints) < 2:
        raise ValueError(f"{name} has one checkpoint only: an audit compares those of a series")
    checkpoints = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    say = report or _silent
    total, stamps = (
        len(checkpoints),
        stamps_of(checkpoints) if run is not None else [""] * len(checkpoints),
    )
    config = {"source": harmless(name.rstrip("/")), "level": level}
    folder = None if run is None else Path(run)
    if folder is not None and not overwrite:
        folder = place_for(folder, "audit", config)
    with Gathered.open(
        folder, config, checkpoints, stamps, retry=retry, overwrite=overwrite
    ) as gathered:
        done = len(gathered.series)
        share = allowance(
            checkpoints[done:],
            partial(transfer_of, level=Level(level)),
            limit,
            partial(say, done, total),
        )
        for n in range(done, total):
            say(n, total, checkpoints[n].name)
            gathered.add(*gather(checkpoints[n], Level(level), share), stamps[n])
        say(total, total, "")
        faults, unknown = find_faults(gathered.series, gathered.sketches)
        gathered.conclude(faults, unknown)
    return Audit(harmless(name), level, tuple(faults), tuple(gathered.series), unknown, folder)


def read_audit(path: str | os.PathLike[str]) -> Audit:
    """Return the audit in a run folder; one that has not come to its end has no faults yet."""
    run = Run(path)
    info = run.info
    config = info["config"]
    faults = tuple(Fault.from_json(fault) for fault in info.get("faults") or ())
    series = tuple(read_series(run.path))
    unknown = tuple(info.get("unknown", ()))
    return Audit(config["source"], config["level"], faults, series, unknown, run.path)


def _silent(done: int, total: int, what: str) -> None:
    """Whoever does not ask for progress."""
