"""`joma.reproduce`: make exhibits and check claims, side by side, and write the page that shows all there are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.paper.exhibits.base import Exhibit
    from joma.paper.exhibits.making import ExhibitOutcome
    from joma.paper.exhibits.runner import ExhibitObserver, Reproduction, Runner

# Some of the generators hold a seed in 64 bits, and exhibits add the number of a draw to it.
LARGEST_SEED = 10**18


def reproduce(
    exhibits: str | Sequence[str] | None = None,
    out: str | os.PathLike[str] = "runs/reproduce",
    *,
    preset: str = "default",
    seed: int | None = None,
    settings: Mapping[str, Any] | Sequence[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    force: bool = False,
    jobs: int | None = None,
    engine: str = "processes",
    address: str | None = None,
    observer: ExhibitObserver | None = None,
) -> Reproduction:
    """Reproduce the paper's figures with a verdict for each, and write one page that shows them all.

    What is there already, of the same code and settings, is not made again.

    Arguments:
        exhibits: ids (see `joma.exhibits`), one or several; by default all of them, and the claims.
        out: folder for the exhibits, one folder each.
        preset: "default" computes what minutes decide, and shows and spot-checks records of longer
            runs; "laptop" computes everything, which takes hours; "paper" is the paper's own scale.
        seed: seed of everything random; by default 100, the first seed whose results no rule was changed
            after.
        settings: other values for settings of the preset, of one exhibit; a mapping, or texts "key=value".
        report: where to write the page; ``out``/report.html by default.
        force: make exhibits again that are there already.
        jobs: exhibits at a time, as many as there are cores by default; results do not depend on it.
        engine: "processes" (this machine) or "ray".
        address: address of a Ray cluster, "ray://HOST:PORT".
        observer: user interface that shows how the exhibits stand.

    Returns:
        What was made: ``outcomes``, one per exhibit with its ``verdict`` and ``path``; ``claims``; ``ok``, whether all
        could be made and agree with their records; ``conclusion``, in a line; ``page``.

    >>> import joma, tempfile
    >>> made = joma.reproduce("fig3", tempfile.mkdtemp(), jobs=1)
    >>> str(made.outcomes[0].verdict.verdict)
    'holds'
    """
    from joma._suggest import unknown_name
    from joma.paper.exhibits import PRESETS
    from joma.paper.exhibits import exhibits as registered
    from joma.paper.exhibits.base import FRESH_SEED
    from joma.paper.exhibits.index import get
    from joma.paper.exhibits.runner import ExhibitObserver, Runner

    if preset not in PRESETS:
        raise ValueError(unknown_name(preset, PRESETS, "preset"))
    if seed is None:
        seed = FRESH_SEED
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(
            f"the seed must be a whole number of at least 0 and at most {LARGEST_SEED:,}, got {seed}"
        )
    if isinstance(exhibits, str):
        exhibits = [exhibits]
    if exhibits:
        selection = get(exhibits)
    else:
        selection = list(registered().values())
    if settings:
        selection = [_changed(selection, preset, settings)]
    page = None
    if report is not None:
        page = Path(report)
    runner = Runner(
        selection,
        preset,
        Path(out),
        seed,
        claims=not exhibits,
        force=force,
        jobs=jobs,
        engine=engine,
        address=address,
        report=page,
        observer=observer or ExhibitObserver(),
    )
    reproduction = runner.run()
    runner.observer.concluded(reproduction)
    return replace(reproduction, page=_write_page(runner, reproduction))


def _changed(
    exhibits: Sequence[Exhibit], preset: str, settings: Mapping[str, Any] | Sequence[str]
) -> Exhibit:
    """Return the one exhibit, with changed settings."""
    from joma.paper.exhibits.choices import with_settings

    if len(exhibits) != 1:
        raise ValueError(
            "--set changes the settings of one exhibit: name it, as in joma reproduce fig6 --set …"
        )
    if isinstance(settings, Mapping):
        settings = [f"{key}={_as_typed(value)}" for key, value in settings.items()]
    return with_settings(exhibits[0], preset, settings)


def _write_page(runner: Runner, reproduction: Reproduction) -> Path:
    """Write the page of all exhibits in the folder, not only of those that were made now."""
    from joma._show.pages.page import write_report
    from joma.paper.exhibits.index import names
    from joma.paper.exhibits.runner import read_claims

    outcomes = {outcome.exhibit.id: outcome for outcome in reproduction.outcomes}
    present: list[Exhibit | ExhibitOutcome] = []
    for name in names():
        if name in outcomes:
            present.append(outcomes[name])
        elif (runner.out / name).exists():
            earlier = _earlier_outcome(name, runner)
            if earlier is not None:
                present.append(earlier)
    return write_report(
        runner.out,
        present,
        reproduction.claims or read_claims(runner.out),
        preset=runner.preset,
        seed=runner.seed,
        path=runner.report,
        claims_error=reproduction.claims_error,
    )


def _earlier_outcome(id: str, runner: Runner) -> ExhibitOutcome | None:
    """Return an exhibit that an earlier call made at this preset and seed; None if it did not."""
    from joma._runs import RunError
    from joma.paper.exhibits.index import get
    from joma.paper.exhibits.making import plan
    from joma.paper.records import DamagedRecord

    (exhibit,) = get([id])
    try:
        return plan(exhibit, runner.preset, runner.out, runner.seed).stored()
    except (RunError, DamagedRecord):
        return None


def _as_typed(value: Any) -> str:
    """Return a value as it is typed after `--set`."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        has_inner = any(isinstance(item, (list, tuple, Mapping)) for item in value)
        if not has_inner:
            return ",".join(map(_as_typed, value))
    return json.dumps(value)
