"""`joma.reproduce`: exhibits and claims, made side by side, and the page that shows all there are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.paper.exhibits.base import Exhibit, ExhibitOutcome
    from joma.paper.exhibits.runner import Reproduction, Runner


def reproduce(
    exhibits: str | Sequence[str] | None = None,
    out: str | os.PathLike[str] = "runs/reproduce",
    *,
    preset: str = "default",
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    report: str | os.PathLike[str] | None = None,
    force: bool = False,
    jobs: int | None = None,
    engine: str = "processes",
    address: str | None = None,
) -> Reproduction:
    """Reproduce the paper's figures with a verdict for each, and write one page that shows them all.

    What is there already, of the same code and settings, is not made again.

    Arguments:
        exhibits: ids (see `joma.exhibits`), one or several; by default all of them, and the claims.
        out: folder for the exhibits, one folder each.
        preset: "default" (minutes in all), "laptop", or "paper" (the paper's own scale).
        seed: of everything random.
        settings: other values for settings of the preset, of one exhibit.
        report: where to write the page; ``out``/report.html by default.
        force: make exhibits again that are there already.
        jobs: exhibits at a time, as many as there are cores by default; results do not depend on it.
        engine: "processes" (this machine) or "ray".
        address: of a Ray cluster, "ray://HOST:PORT".

    Returns:
        What was made: ``outcomes``, one per exhibit with its ``verdict`` and ``path``; ``claims``; ``ok``, whether all
        could be made; ``page``.

    >>> import joma, tempfile
    >>> made = joma.reproduce("fig3", tempfile.mkdtemp(), jobs=1)
    >>> str(made.outcomes[0].verdict.verdict)
    'holds'
    """
    texts = [f"{key}={_as_typed(value)}" for key, value in (settings or {}).items()]
    names = [exhibits] if isinstance(exhibits, str) else exhibits
    runner = runner_of(
        names, Path(out), preset=preset, seed=seed, settings=texts, report=None if report is None else Path(report),
        force=force, jobs=jobs, engine=engine, address=address,
    )  # fmt: skip
    return with_page(runner, runner.run())


def runner_of(
    ids: Sequence[str] | None, out: Path, *, preset: str, seed: int, settings: Sequence[str], report: Path | None,
    force: bool, jobs: int | None, engine: str, address: str | None,
) -> Runner:  # fmt: skip
    """What makes these exhibits, or all of them and the claims; ``settings`` are texts "key=value"."""
    from joma.paper.exhibits import PRESETS, exhibits, get
    from joma.paper.exhibits.runner import Runner

    if preset not in PRESETS:
        from joma.theory.setting import nearest

        raise ValueError(nearest(preset, PRESETS, "preset"))
    if seed < 0:
        raise ValueError(f"the seed must be a whole number of at least 0, got {seed}")
    chosen = get(ids) if ids else list(exhibits().values())
    if settings:
        from joma.paper.exhibits.choices import with_settings

        if len(chosen) != 1:
            raise ValueError(
                "--set changes the settings of one exhibit: name it, as in joma reproduce fig6 --set …"
            )
        chosen = [with_settings(chosen[0], preset, settings)]
    return Runner(
        chosen,
        preset,
        out,
        seed,
        claims=not ids,
        force=force,
        jobs=jobs,
        engine=engine,
        address=address,
        report=report,
    )


def with_page(runner: Runner, reproduction: Reproduction) -> Reproduction:
    """Write the page of all exhibits that are there: one that shows less would be a loss."""
    from joma._show.pages.page import write_report
    from joma.paper.exhibits.base import is_there
    from joma.paper.exhibits.index import get, names
    from joma.paper.exhibits.runner import read_claims

    outcomes = {outcome.exhibit.id: outcome for outcome in reproduction.outcomes}
    all_there: list[Exhibit | ExhibitOutcome] = []
    for name in names():
        if name in outcomes:
            all_there.append(outcomes[name])
        elif (runner.out / name).exists():
            (exhibit,) = get([name])
            if is_there(exhibit, runner.preset, runner.out, runner.seed):
                all_there.append(exhibit)
    page = write_report(
        runner.out, all_there, reproduction.claims or read_claims(runner.out), preset=runner.preset, seed=runner.seed,
        path=runner.report, claims_error=reproduction.claims_error,
    )  # fmt: skip
    return replace(reproduction, page=page)


def _as_typed(value: Any) -> str:
    """A value as `--set` has it."""
    import json

    if isinstance(value, (list, tuple)) and not any(
        isinstance(item, (list, tuple, Mapping)) for item in value
    ):
        return ",".join(map(_as_typed, value))
    return value if isinstance(value, str) else json.dumps(value) if value is not None else "none"
