"""The picture of a run folder, from nothing but what is in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs import Run, RunError, write_atomic

if TYPE_CHECKING:
    from joma._show.plots import Chart


def plot(
    path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, clock: bool = False
) -> Path:
    """Draw a run: of a watched training, each gauge over the steps, one line per layer, with phases and the loss.

    Arguments:
        path: the run folder, finished or not.
        out: the folder for the figure, by default the run folder.
        clock: draw over τ, the sum of learning rates, instead of steps.

    Returns:
        The folder that figure.svg, figure.png, figure.pdf and figure.json (Vega-Lite) are in.

    >>> import joma, tempfile
    >>> run = tempfile.mkdtemp() + "/run"
    >>> path = joma.simulate("two-tokens", run, t_end=1.0, times=11)
    >>> sorted(file.name for file in joma.plot(run, tempfile.mkdtemp()).iterdir())
    ['figure.json', 'figure.pdf', 'figure.png', 'figure.svg']
    """
    from joma._show import plots

    drawn = chart(Run(path), clock)
    if out is None:
        out = path
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    plots.save(drawn, folder)
    return folder


def export(run: Run, file: Path, clock: bool = False) -> Path:
    """Write the picture or the numbers of a run; the ending of the file's name says which."""
    if file.suffix.lower() == ".csv":
        write_atomic(file, run.frame().to_csv(index=False))
        return file
    from joma._show import plots

    plots.write(chart(run, clock), file)
    return file


def chart(run: Run, clock: bool = False) -> Chart:
    """Return the figure of a run, by its kind; over τ instead of steps if ``clock``."""
    kind = str(run.info["kind"])
    if kind not in _DRAW:
        raise RunError(f"{run.path} is a run of kind {kind!r}; pictures are of {', '.join(_DRAW)}")
    if run.frame().empty:
        raise RunError(f"{run.path} has no measurements yet (status: {run.status})")
    return _watch(run, clock) if clock else _DRAW[kind](run)


def _watch(run: Run, clock: bool = False) -> Chart:
    from joma._show.plots import watch

    return watch.draw(run, clock)


def _scan(run: Run) -> Chart:
    from joma._checkpoints.scan import Scan

    return Scan(run.path).draw()


def _simulation(run: Run) -> Chart:
    from joma._show.plots import simulation

    return simulation.draw_run(run)


def _audit(run: Run) -> Chart:
    from joma._checkpoints.audit.audit import read_audit

    return read_audit(run.path).draw()


def _exhibit(run: Run) -> Chart:
    from joma.paper.exhibits import get

    return get([run.info["config"]["exhibit"]])[0].experiment.draw(run)


_DRAW: dict[str, Callable[[Run], Any]] = {
    "watch": _watch,
    "train": _watch,
    "scan": _scan,
    "audit": _audit,
    "simulate": _simulation,
    "exhibit": _exhibit,
}
