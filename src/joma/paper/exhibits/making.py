"""Make one exhibit: run, draw and judge it, or show its record.

`plan` works out once what decides an exhibit, its fingerprint included; everything else takes the plan.
There are three cases:

- At the default preset, an exhibit with a record shows it: its data are judged and drawn anew, and its
  slices are computed again.
- An exhibit with settings for the preset is computed.
- An exhibit with neither is inconclusive, and nothing is written.

The folder of an exhibit appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from joma._jobs import Progress
from joma._runs import (
    Run,
    RunError,
    RunInUse,
    RunWriter,
    check_writable,
    staged,
    write_atomic,
    write_json,
)
from joma._runs.files import file_hash
from joma._runs.fingerprint import fingerprint
from joma._runs.folder import lock, unlock
from joma.paper.exhibits.base import DEFAULT, FRESH_SEED, LONGER, Exhibit
from joma.paper.exhibits.judgement import Judgement
from joma.paper.exhibits.spot_check import SpotCheck, spot_checks, why_unchecked
from joma.paper.records import DamagedRecord, ExhibitRecord, damaged, load
from joma.paper.verdict import Verdict

# Bytes that must be free. All exhibits and training runs take less at the default preset.
ROOM = 200_000_000
PACKAGES = ("joma", "numpy", "scipy", "torch", "altair")
VERDICT = "verdict.json"
CHECKS = "checks.json"
NO_EVIDENCE = Judgement(
    Verdict.INCONCLUSIVE,
    template="this installation has no record of a longer run, and a short run does not decide",
    short_template="no record of a longer run",
)


@dataclass(frozen=True)
class ExhibitOutcome:
    """One exhibit, made or found.

    Attributes:
        exhibit: the exhibit.
        path: its folder.
        verdict: its judgement; None if it could not be made.
        seconds: how long it took.
        fresh: False if it was there already.
        error: why it could not be made.
        checks: the spot checks of an exhibit that shows a record.
        recorded: date and cost of the record that it shows; "" if it was computed.
        unchecked: why there are no spot checks of the record.
        has_run: False if there is neither a record nor a computation, and so no figure.
    """

    exhibit: Exhibit
    path: Path
    verdict: Judgement | None
    seconds: float
    fresh: bool = True
    error: str | None = None
    checks: tuple[SpotCheck, ...] = ()
    recorded: str = ""
    unchecked: str = ""
    has_run: bool = True

    @property
    def would_decide(self) -> str:
        """What would decide an inconclusive statement; "" if it is decided."""
        if self.verdict is None:
            return ""
        if not self.has_run:
            return f"joma reproduce {self.exhibit.id} --preset {LONGER}"
        return self.exhibit.would_decide_it(self.verdict.verdict)


@dataclass(frozen=True)
class ExhibitPlan:
    """One exhibit at one preset and seed, and the folder in which it is made.

    Attributes:
        exhibit: the exhibit.
        preset: the preset.
        seed: the seed.
        path: the folder.
        config: what the folder's `run.json` says of it: settings, and the fingerprint of everything
            that decides the result.
        record: the record to show; None if the exhibit is computed.
    """

    exhibit: Exhibit
    preset: str
    seed: int
    path: Path
    config: dict[str, Any]
    record: ExhibitRecord | None = None

    @property
    def has_evidence(self) -> bool:
        """True if the exhibit has a record or can be computed at this preset."""
        return self.record is not None or self.preset in self.exhibit.experiment.settings

    def stored(self) -> ExhibitOutcome | None:
        """Return the exhibit if it is there already, made by this code; None if it has to be made.

        A folder that holds something else is a `RunError`.
        """
        if not self.has_evidence:
            return self._without_evidence()
        if not self._is_made():
            return None
        record = Run(self.path).info.get("record", {})
        return ExhibitOutcome(
            self.exhibit,
            self.path,
            load_verdict(self.path),
            0.0,
            fresh=False,
            checks=load_checks(self.path),
            recorded=record.get("origin", ""),
            unchecked=record.get("unchecked", ""),
        )

    def make(self, progress: Progress, *, force: bool = False) -> ExhibitOutcome:
        """Make the exhibit; with ``force`` also the trainings and scans that it refers to."""
        if not self.has_evidence:
            return self._without_evidence()
        start = time.perf_counter()
        checks: tuple[SpotCheck, ...] = ()
        origin = ""
        unchecked = ""
        if self.record is not None:
            origin = self.record.origin
            unchecked = why_unchecked(self.exhibit, self.record)
            judgement, checks = self._show(self.record)
        else:
            if force and (self.path / "run.json").exists():
                _remove(Run(self.path).members)
            judgement = self._compute(progress)
        seconds = time.perf_counter() - start
        return ExhibitOutcome(
            self.exhibit,
            self.path,
            judgement,
            seconds,
            checks=checks,
            recorded=origin,
            unchecked=unchecked,
        )

    def _without_evidence(self) -> ExhibitOutcome:
        return ExhibitOutcome(self.exhibit, self.path, NO_EVIDENCE, 0.0, fresh=False, has_run=False)

    def _compute(self, progress: Progress) -> Judgement:
        experiment = self.exhibit.experiment
        with staged(self.path, overwrite=True) as folder:
            writer = RunWriter.create(
                folder,
                kind="exhibit",
                config=self.config,
                seed=self.seed,
                axes=dict(experiment.axes),
                name=self.exhibit.id,
                packages=PACKAGES,
            )
            with _explained(self.exhibit, self.preset):
                with writer:
                    experiment.run(writer, self.config["settings"], self.seed, progress)
                return _draw_and_judge(self.exhibit, Run(folder), folder)

    def _show(self, record: ExhibitRecord) -> tuple[Judgement, tuple[SpotCheck, ...]]:
        """Unpack a record, judge and draw it anew, and compute its slices."""
        with staged(self.path, overwrite=True) as folder:
            run = record.unpack(folder)
            try:
                judgement = _draw_and_judge(self.exhibit, run, folder)
            except (OSError, DamagedRecord):  # of the disk
                raise
            except Exception as error:  # rule and figure do not find what they need
                raise damaged(record.path, f"{type(error).__name__}: {error}") from error
            checks = spot_checks(self.exhibit, record)
            write_json(folder / CHECKS, [asdict(check) for check in checks])
            # The seed that was asked for decides whether the folder is taken again; that of the
            # record stays in its own entry.
            recorded = {
                "origin": record.origin,
                "preset": record.preset,
                "seed": record.seed,
                "unchecked": why_unchecked(self.exhibit, record),
            }
            info = run.info | {"config": self.config, "seed": self.seed, "record": recorded}
            write_json(folder / "run.json", info)
        return judgement, checks

    def _is_made(self) -> bool:
        if not self.path.exists():
            return False
        if not (self.path / "run.json").exists():
            if not any(self.path.iterdir()):
                return False
            raise RunError(f"{self.path} exists and is not a run; choose another --out")
        run = Run(self.path)
        stored = run.info.get("config", {})
        same_settings = all(
            stored.get(key) == self.config[key] for key in ("exhibit", "preset", "settings")
        )
        if run.info.get("seed") != self.seed or not same_settings:
            raise RunError(
                f"{self.path} holds another run ({self._differences(run.info)}, seed "
                f"{run.info.get('seed')}); choose another --out, or --force to replace it"
            )
        # Results of other code are made again, and so are those that lost the runs they refer to.
        if stored.get("fingerprint") != self.config["fingerprint"]:
            return False
        files = [self.path / VERDICT, *(member / "run.json" for member in run.members)]
        return all(file.exists() for file in files)

    def _differences(self, info: dict[str, Any]) -> str:
        """Return what another run in the folder is, and which of its settings differ."""
        stored = info.get("config", {})
        words = [
            str(stored.get("exhibit", info.get("kind"))),
            f"preset {stored.get('preset', '?')}",
        ]
        is_same_preset = stored.get("preset") == self.config["preset"]
        if stored.get("exhibit") == self.config["exhibit"] and is_same_preset:
            earlier = stored.get("settings", {})
            for key, value in self.config["settings"].items():
                if earlier.get(key) != value:
                    words.append(f"{key} {earlier.get(key)}")
        return ", ".join(words)


def plan(exhibit: Exhibit, preset: str, out: Path, seed: int) -> ExhibitPlan:
    """Return the plan to make an exhibit in ``out/<id>``.

    Raises `DamagedRecord` for a record that cannot be read.
    """
    experiment = exhibit.experiment
    record = None
    basis: dict[str, Any] = {}
    # Settings that a user changed are computed.
    if preset == DEFAULT and not exhibit.changed:
        record = load(exhibit.id)
    if record is not None:
        settings = record.settings
        basis["record"] = file_hash(record.path)
    else:
        # As they will be read again: lists instead of tuples.
        settings = json.loads(json.dumps(experiment.settings.get(preset, {})))
    # A function that `exec` made may have no module.
    modules = {str(function.__module__) for function in (experiment.run, experiment.judge)}
    config = {
        "exhibit": exhibit.id,
        "preset": preset,
        "settings": settings,
        "fingerprint": fingerprint(modules, settings | basis),
    }
    return ExhibitPlan(exhibit, preset, seed, out / exhibit.id, config, record)


def make_exhibit(
    exhibit: Exhibit,
    preset: str = "default",
    out: Path = Path("runs/reproduce"),
    seed: int = FRESH_SEED,
    *,
    force: bool = False,
) -> ExhibitOutcome:
    """Make one exhibit in this process, or return it if it is there already."""
    planned = plan(exhibit, preset, out, seed)
    if not force:
        stored = planned.stored()
        if stored is not None:
            return stored
    return planned.make(lambda share, label: None, force=force)


def check_output(out: Path, report: Path | None = None) -> None:
    """Refuse a bad output folder, or a bad place for the page, before any work is done."""
    if (out / "run.json").exists():
        raise RunError(f"{out} is itself a run folder; choose another --out")
    if report is not None and report.is_dir():
        raise RunError(f"--report {report} is a folder; name a file, as {report / 'report.html'}")
    check_writable(out, ROOM, "--out")
    if report is not None:
        check_writable(report.parent, ROOM, "--report")


def load_verdict(path: Path) -> Judgement:
    """Return the judgement stored with an exhibit, its sentences rendered again."""
    stored = json.loads((path / VERDICT).read_text(encoding="utf-8"))
    try:
        return Judgement.from_dict(stored)
    except KeyError as error:
        raise RunError(
            f"{path / VERDICT} was written by another version of joma (it has no {error}): make the "
            "exhibit again with joma reproduce"
        ) from error


def load_checks(path: Path) -> tuple[SpotCheck, ...]:
    """Return the spot checks stored with an exhibit; none if it was computed."""
    file = path / CHECKS
    if not file.exists():
        return ()
    return tuple(SpotCheck(**stored) for stored in json.loads(file.read_text(encoding="utf-8")))


def judge_record(exhibit: Exhibit, record: ExhibitRecord) -> Judgement:
    """Judge the data of a record by the rule."""
    with tempfile.TemporaryDirectory() as folder:
        return exhibit.judge(record.unpack(Path(folder)))


def _draw_and_judge(exhibit: Exhibit, run: Run, folder: Path) -> Judgement:
    """Write figure, tables and verdict of a run into ``folder``."""
    from joma._show import plots

    experiment = exhibit.experiment
    plots.save(experiment.draw(run), folder)
    if experiment.tables is not None:
        for name, text in experiment.tables(run).items():
            write_atomic(folder / name, text)
    judgement = exhibit.judge(run)
    constants = {name: getattr(exhibit, name) for name in ("statement", "rule", "paper", "revised")}
    constants["would_decide"] = exhibit.would_decide_it(judgement.verdict)
    write_json(folder / VERDICT, {"exhibit": exhibit.id, **judgement.as_dict(), **constants})
    return judgement


@contextmanager
def _explained(exhibit: Exhibit, preset: str) -> Iterator[None]:
    """Name the settings that were changed in an error which may come from them."""
    try:
        yield
    except (RunError, OSError):  # of the disk, or of another process
        raise
    except Exception as error:
        if not exhibit.changed:
            raise
        start = f"{exhibit.id} could not be made with {', '.join(exhibit.changed)}"
        if isinstance(error, ValueError):  # written for users
            raise ValueError(f"{start}: {error}") from error
        raise ValueError(
            f"{start} ({type(error).__name__}: {error}): choose values nearer to those of the "
            f"preset {preset}"
        ) from error


def _remove(runs: Iterable[Path]) -> None:
    """Remove runs; one that another process is writing is new anyway."""
    for path in runs:
        if not (path / "run.json").exists():
            continue
        try:
            descriptor = lock(path)
        except RunInUse:
            continue
        try:
            shutil.rmtree(path)
        finally:
            unlock(descriptor, path)
