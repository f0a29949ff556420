"""A page from any runs: what they were, the same gauges over each other, and the figure of each."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs import Run, RunError, RunNotFound
from joma._runs.alerts import read_alerts, worst_level
from joma._runs.explanation import COLUMNS, read_explanation
from joma._runs.measured import measured_on, not_alike
from joma._runs.outcome import Outcome, outcome
from joma._runs.state import missing_in_words
from joma._show.pages.audits import faults_table
from joma._show.pages.checkpoints import checkpoints_table
from joma._show.pages.document import Page, check_place, document, figure, write_page
from joma._show.pages.outcomes import TONES, by_layer, numbers, worst
from joma._show.pages.page import exhibit_section, versions, write_report
from joma._show.pages.place import PAPER, RUNS, check_replaceable, default_place, mark_of
from joma._show.pages.render import render, tone_of

if TYPE_CHECKING:
    from joma._show.plots import Chart

MOST_RUNS = 12  # that get a figure each


def collect(paths: Sequence[Path]) -> list[Run]:
    """The runs in ``paths``: run folders, or folders that hold run folders, as a sweep's."""
    runs: dict[Path, Run] = {}
    for path in paths:
        inside = [path] if (path / "run.json").exists() else _below(path)
        if not inside:
            try:
                Run(path)  # says what is missing
            except RunNotFound as error:
                raise RunError(f"{error}. No folder inside it is a run either") from None
        for folder in inside:
            runs.setdefault(folder.resolve(), Run(folder))
    return list(runs.values())


def _below(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    entries = (entry for entry in path.iterdir() if not entry.name.startswith("."))
    return sorted(entry for entry in entries if (entry / "run.json").is_file())


def report(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    title: str | None = None,
    *,
    clock: bool = False,
) -> Path:
    """One interactive page from any runs, several drawn over each other; of what `joma reproduce` wrote, the paper's.

    Arguments:
        paths: run folders, or folders of them: of train, sweep, scan, watch, simulate, …; one or several.
        out: the page to write. It needs no network to be viewed. By default, ``report.html`` in the
            folder that is given; of several, ``report-A+B.html`` in the folder that holds them. A file
            there that is no earlier page of the same runs is not replaced.
        title: its heading.
        clock: draw over τ, the sum of learning rates, in the place of steps; a run without it is refused.

    Returns:
        The path of the page.

    >>> import joma, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> path = joma.simulate("two-tokens", f"{folder}/run", t_end=1.0, times=11)
    >>> joma.report(f"{folder}/run", f"{folder}/page.html").name
    'page.html'
    """
    folders = [Path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not folders:
        raise ValueError("no run folder was given: name at least one, as runs/mine")
    runs = collect(folders)
    is_paper = not clock and title is None and len(folders) == 1 and _of_the_paper(folders[0], runs)
    place = default_place(folders) if out is None else Path(out)
    page = Page(place, mark=mark_of(PAPER if is_paper else RUNS, folders, place))
    if out is None:
        check_replaceable(place, page.mark)
    check_place(place)
    if is_paper:
        return _paper(folders[0], runs, place)
    if clock:
        check_clock(runs)
    return write_page(page, runs_page(page, runs, title, clock))


def runs_page(
    page: Page, runs: list[Run], title: str | None = None, clock: bool = False, header: str = ""
) -> str:
    """The text of the page of these runs."""
    page.id("summary")
    page.contents.append(("summary", "Runs", ""))
    labels = _labels(runs)
    comparable = {label: run for label, run in zip(labels, runs, strict=True) if _has_steps(run)}
    many = len(comparable) > MOST_RUNS
    now = {label: outcome(run) for label, run in comparable.items()}
    sections = [_table(page, runs, labels, now, links=many)]
    if len(comparable) > 1:
        sections.append(_comparison(page, comparable, now, clock, many))
    for label, run in zip(labels, runs, strict=True):
        if not (many and label in comparable):
            sections.append(_section(page, run, label, page.id(label), clock, now.get(label)))
    heading = title or (labels[0] if len(runs) == 1 else f"{len(runs)} runs")
    return document(page, heading, sections, "joma report", header)


def check_clock(runs: list[Run]) -> None:
    """Refuse runs that cannot be drawn over τ, before anything is drawn."""
    from joma._show.plots.clock import check

    for run in runs:
        check(run, run.frame())


def _is_exhibit(run: Run) -> bool:
    return bool(run.info["kind"] == "exhibit")


def _has_steps(run: Run) -> bool:
    """True for runs that can be drawn over each other; exhibits and comparisons of models cannot."""
    return not _is_exhibit(run) and "models" not in run.info


def _of_the_paper(folder: Path, runs: list[Run]) -> bool:
    """Whether `joma reproduce` wrote the folder, which may hold other runs too."""
    if (folder / "run.json").exists() or not any(map(_is_exhibit, runs)):
        return False
    return all(map(_is_exhibit, runs)) or (folder / "claims.json").exists()


def _paper(folder: Path, runs: list[Run], out: Path) -> Path:
    from joma.paper.exhibits.index import get, names
    from joma.paper.exhibits.runner import read_claims

    info = next(run.info for run in runs if _is_exhibit(run))
    shown = {run.path.name for run in runs if _is_exhibit(run)}
    failed = {file.name.removesuffix(".error.txt") for file in folder.glob("*.error.txt")}
    listed = names()
    chosen = get(name for name in listed if name in shown | failed)
    rest = [run for run in runs if run.path.name not in listed or not _is_exhibit(run)]

    def others(page: Page) -> list[str]:
        return [
            _section(page, run, label, page.id(label))
            for label, run in zip(_labels(rest), rest, strict=True)
        ]

    return write_report(
        folder, chosen, read_claims(folder), preset=info["config"].get("preset", "?"), seed=info["seed"], path=out,
        others=others,
    )  # fmt: skip


def _labels(runs: list[Run]) -> list[str]:
    """Names that tell the runs apart: of the runs, with the folder before it where two are the same."""
    names = [str(run.info.get("name") or run.path.resolve().name) for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    full = [
        f"{run.path.resolve().parent.name}/{n}" if n in twice else n
        for run, n in zip(runs, names, strict=True)
    ]
    return [
        f"{name} ({full[:n].count(name) + 1})" if full.count(name) > 1 else name
        for n, name in enumerate(full)
    ]


def _table(
    page: Page, runs: list[Run], labels: list[str], now: dict[str, Outcome], *, links: bool
) -> str:
    """Kind, status, what they came to, and the settings in which they differ; if asked, with links to their folders."""
    configs = [_flat({"seed": run.info.get("seed"), **run.info["config"]}) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    values = {key: {json.dumps(config[key]) for config in configs if key in config} for key in keys}
    rows: list[dict[str, Any]] = []
    for run, label, config in zip(runs, labels, configs, strict=True):
        came_to = now.get(label)
        told = {} if came_to is None else numbers(came_to)
        worst_here = "" if came_to is None else worst(came_to)
        rows.append({
            "label": label, "info": run.info, "config": config, "files": _files(page, run), "numbers": told,
            "worst": worst_here, "state": run.state, "tone": tone_of(run.info, run.state, worst_here or None),
        })  # fmt: skip
    headings = dict.fromkeys(name for row in rows for name, text in row["numbers"].items() if text)
    settings = [key for key in keys if len(values[key]) > 1][:8]
    return render(
        "runs.html", rows=rows, settings=settings, many=links, numbers=list(headings), TONES=TONES
    )


def _files(page: Page, run: Run) -> list[tuple[str, str]]:
    """Name and address of the numbers of a run, and of its pictures if they are of these numbers."""
    names = ["metrics.jsonl", *(["figure.svg", "figure.pdf"] if _drawn_since(run) else [])]
    return [(name, page.link(run.path / name)) for name in names if (run.path / name).exists()]


def _drawn_since(run: Run) -> bool:
    """Whether the pictures in the folder were made after its last number."""
    pictures = [
        file for ending in ("svg", "pdf") if (file := run.path / f"figure.{ending}").exists()
    ]
    numbers = run.path / "metrics.jsonl"
    if not (run.done and pictures and numbers.exists()):
        return False
    return all(file.stat().st_mtime_ns > numbers.stat().st_mtime_ns for file in pictures)


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    items: dict[str, Any] = {}
    for key, value in config.items():
        items |= (
            _flat(value, f"{before}{key}.")
            if isinstance(value, dict)
            else {f"{before}{key}": value}
        )
    return items


def _comparison(
    page: Page, runs: dict[str, Run], now: dict[str, Outcome], clock: bool, many: bool
) -> str:
    from joma._show.plots import drawing
    from joma._show.plots.clock import why_not
    from joma._show.plots.compare import draw

    page.contents.append(("comparison", "Over each other", ""))
    page.id("comparison")
    alt = f"The gauges of {len(runs)} runs over each other: {', '.join(runs)}"
    tables = [] if many else by_layer(list(now.values()))
    caution = not_alike({label: run.info for label, run in runs.items()})
    try:
        drawn = draw(runs, clock)
    except RunError as error:
        return render(
            "comparison.html", error=error, tables=tables, labels=list(runs), reason=None, switch=False, caution=caution
        )  # fmt: skip
    trained = {label: run for label, run in runs.items() if run.info["kind"] in ("watch", "train")}
    reasons = [
        reason for label, run in trained.items() if (reason := why_not(run, bool(now[label].clock)))
    ]
    return render(
        "comparison.html", figure=figure(page, "comparison", drawing(drawn), alt, None), error=None, tables=tables,
        labels=list(runs), clock=clock, switch=has_both_clocks(drawn), reason=reasons[0] if reasons else None, caution=caution,
    )  # fmt: skip


def has_both_clocks(chart: Chart) -> bool:
    """True if the reader can switch a figure between steps and τ."""
    about = getattr(chart, "usermeta", None)
    return isinstance(about, dict) and "clocks" in about


def _section(
    page: Page, run: Run, label: str, id: str, clock: bool = False, now: Outcome | None = None
) -> str:  # fmt: skip
    """A run's part of the page; ``now`` is its outcome, if that is known already."""
    from joma._show.pages.plot import chart
    from joma._show.plots import drawing

    info = run.info
    if info["kind"] == "exhibit" and (run.path / "verdict.json").exists():
        from joma.paper.exhibits.index import get, names

        name = str(info["config"].get("exhibit"))
        if name in names():
            (exhibit,) = get([name])
            preset, title = str(info["config"]["preset"]), label if label != exhibit.id else None
            return exhibit_section(
                page, exhibit, run.path, preset, info["seed"], id=id, label=title
            )[1]
    alerts = read_alerts(run.path)
    state = run.state
    page.contents.append((id, label, tone_of(info, state, worst_level(alerts))))
    checkpoints = ""
    if info["kind"] == "scan":
        checkpoints = checkpoints_table(run)
    elif info["kind"] == "audit":
        checkpoints = faults_table(run)
    keys = ("kind", "status", "reason", "seed", "created", "finished", "measured on", "not written")
    known = info | {"status": state.status, "reason": state.remark or None}
    if info.get("measured"):
        known["measured on"] = "; ".join(measured_on(info))
    if info.get("missing"):
        known["not written"] = missing_in_words(info["missing"])
    facts = (
        _flat(info["config"])
        | {key: known[key] for key in keys if known.get(key) is not None}
        | versions(run)
    )
    explanation = _explanation(run)
    try:
        drawn = chart(run, clock)
    except RunError as error:
        return render(
            "run.html", id=id, label=label, facts=facts, error=error, switch=False, checkpoints=checkpoints,
            explanation=explanation,
        )  # fmt: skip
    alt = f"{info['kind']} run {label}: each gauge over {'τ' if clock else 'its steps'}"
    curves = {}
    if _has_steps(run):
        curves = _curves(run, now or outcome(run))
    else:
        alt = f"{info['kind']} run {label}: each gauge over the layers, one line per model"
    table = run.frame().to_csv(index=False)
    command = f"joma plot {shlex.quote(str(run.path))}{' --clock' * clock}"
    return render(
        "run.html", id=id, label=label, facts=facts, curves=curves,
        figure=figure(page, id, drawing(drawn), alt, table, run.path), command_line=command, error=None,
        checkpoints=checkpoints, clock=clock, switch=has_both_clocks(drawn),
        alerts=alerts, TONES=TONES, attention=_attention(page, run, id, label), explanation=explanation,
    )  # fmt: skip


def _explanation(run: Run) -> str:
    """Return the table of what the watch saw of the model, if the run recorded it."""
    try:
        explanation = read_explanation(run.path)
    except RunError as error:
        return render("explanation.html", error=error, rows=[], columns=[], notes=[])
    if explanation is None:
        return ""
    rows = [(row.status, row.cells()) for row in explanation.rows]
    titles = [column.replace("_", " ") for column in COLUMNS]
    return render(
        "explanation.html", error=None, rows=rows, columns=titles, notes=explanation.notes
    )


def _attention(page: Page, run: Run, id: str, label: str) -> str:
    """Who attends to whom, if the run recorded it."""
    patterns = run.patterns()
    if patterns is None or not patterns.kept:
        return ""
    from joma._show.plots import drawing
    from joma._show.plots.patterns import draw, shown_layers

    alt = f"{label}: attention of each token to each, at steps {', '.join(f'{one.step:,}' for one in patterns.kept)}"
    drawn = figure(page, page.id(f"{id}-attention"), drawing(draw(patterns)), alt, None)
    sequence = " ".join(patterns.words) if patterns.words else ""
    left_out = len(patterns.layers) > len(shown_layers(patterns))
    return render(
        "attention.html", figure=drawn, patterns=patterns, sequence=sequence, left_out=left_out
    )


def _curves(run: Run, now: Outcome) -> dict[str, str]:
    """What entropy and stable rank of each layer did, in words, and the rules that tell it; {} if there is neither."""
    from joma._show.plots.watch import titled

    items: dict[str, str] = {}
    points = "checkpoints" if run.info["kind"] == "scan" else "measurements"
    for gauge, curves in now.curves.items():
        rule = now.rules[gauge]
        items |= {
            f"{titled(gauge)}, layer {n}": f"{curve}: {curve.pattern}"
            for n, curve in curves.items()
        }
        items[f"rule for {titled(gauge)}"] = f"{rule.smoothed(points)}{rule}"
    return items
