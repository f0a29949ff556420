"""All exhibits: joma's, in the order of the paper, and those that users register."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from joma._extras import require
from joma._runs import Run, RunWriter
from joma.paper.exhibits.base import PRESETS, Exhibit, Experiment, Progress
from joma.paper.exhibits.judgement import Judgement

if TYPE_CHECKING:
    from joma._show.plots import Chart
    from joma.paper.verdict import Verdict

# One module each, imported when the exhibit is asked for: together they bring torch and SciPy along.
ORDER = (
    "folding",
    "fig2",
    "saliency",
    "fig3",
    "frozen",
    "fig4",
    "contrast",
    "fig9",
    "fig5",
    "hierarchy",
    "cdag",
    "fig6",
    "fig7",
    "fig8",
    "fig10",
    "twoqueries",
    "embeddings",
    "table1",
    "orthogonality",
    "parameterised",
    "entering",
    "realtext",
    "block",
    "width",
    "softmax",
    "assumptions",
    "optimisers",
    "foretold",
    "clock",
    "sinks",
    "finetuning",
    "lowrank",
)
_registered: dict[str, Exhibit] = {}


def exhibit(
    id: str,
    title: str,
    statement: str,
    *,
    rule: str,
    run: Callable[[RunWriter, dict[str, Any], int, Progress], None],
    draw: Callable[[Run], Chart],
    judge: Callable[[Run], Judgement],
    settings: Mapping[str, dict[str, Any]] | None = None,
    axes: Mapping[str, list[str]] | None = None,
    tables: Callable[[Run], dict[str, str]] | None = None,
    messages: Mapping[Verdict, str] | None = None,
    would_decide: str = "",
    seconds: float = 60.0,
) -> Exhibit:
    """Register an exhibit of your own: `joma reproduce ID` makes it, and the page shows it.

    Arguments:
        id: an identifier, the name of its folder.
        title: for headings.
        statement: what is put to the test, in one line; the page counts it apart from the paper's statements.
        rule: how the numbers give the verdict, in words; write it before you look at results.
        run: measures: ``run(writer, settings, seed, progress)`` writes rows by ``writer.write(step, {gauge: value},
            **labels)`` and reports its progress by ``progress(share, words)``.
        draw: an Altair chart, from nothing but the run folder.
        judge: the verdict, from nothing but the run folder.
        settings: preset ("default", "laptop", "paper") -> the settings that ``run`` is given; none by default.
        axes: the axes of gauges that are arrays: gauge -> names.
        tables: the texts of further files: name -> text.
        messages: the heading for each verdict; title and verdict by default.
        would_decide: the settings, data or rule that would decide an inconclusive statement.
        seconds: roughly what the default preset takes; the longest is begun first.

    Returns:
        The exhibit. A package brings exhibits along by an entry point of the group ``joma.exhibits``.
    """
    if not id.isidentifier():
        raise ValueError(f"an exhibit's id must be an identifier such as 'fig3', got {id!r}")
    missing = set(PRESETS) - set(settings or PRESETS)
    if missing:
        names = ", ".join(sorted(missing))
        raise ValueError(f"exhibit {id!r} has no settings for the preset {names}")
    earlier = _registered.get(id)
    is_taken = earlier is not None and earlier.experiment.run.__module__ != run.__module__
    if id in ORDER or is_taken:
        raise ValueError(f"there is an exhibit {id!r} already; choose another id")
    per_preset = dict(settings) if settings else {preset: {} for preset in PRESETS}
    _registered[id] = Exhibit(
        id=id,
        title=title,
        statement=statement,
        rule=rule,
        experiment=Experiment(per_preset, run, draw, judge, axes or {}, tables),
        messages=messages or {},
        would_decide=would_decide,
        seconds=seconds,
    )
    return _registered[id]


def remove(id: str) -> None:
    """Remove an exhibit that was registered."""
    _registered.pop(id, None)


def exhibits() -> dict[str, Exhibit]:
    """All exhibits by id: joma's in the order of the paper, registered ones, and those that installed packages bring.

    Returns:
        Id -> exhibit, with its title, its statement and a rough cost.
    """
    return {id: _load(id) for id in names()}


def names() -> list[str]:
    """Return the ids of all exhibits; joma's own are not imported."""
    for entry in entry_points(group="joma.exhibits"):
        if entry.name not in _registered:
            entry.load()
    return [*ORDER, *_registered]


def get(ids: Iterable[str]) -> list[Exhibit]:
    """Return the exhibits with these ids; an unknown one is an error that names the nearest."""
    from joma._suggest import unknown_name

    known = names()
    wanted = list(dict.fromkeys(ids))
    for id in wanted:
        if id not in known:
            raise ValueError(unknown_name(id, known, "exhibit"))
    return [_load(id) for id in wanted]


def _load(id: str) -> Exhibit:
    if id in _registered:
        return _registered[id]
    require("paper", f"the exhibit {id}")
    listed = importlib.import_module(f"joma.paper.exhibits.{id}").EXHIBIT
    assert isinstance(listed, Exhibit)
    return listed
