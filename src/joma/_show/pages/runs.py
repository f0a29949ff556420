"""A page from any runs: a table of them, the same gauges over each other, and the figure of each."""

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
from joma._runs.story import by_block, figures, story
from joma._show.pages.audits import faults_table
from joma._show.pages.checkpoints import checkpoints_table
from joma._show.pages.document import Page, check_place, document, figure, write_page
from joma._show.pages.outcomes import TONES, LayerTable, by_layer, numbers, worst
from joma._show.pages.page import exhibit_section, versions, write_report
from joma._show.pages.place import PAPER, RUNS, check_replaceable, default_place, mark_of
from joma._show.pages.render import render, tone_of

if TYPE_CHECKING:
    import pandas as pd

    from joma._show.plots import Chart

PAGES = (".html", ".htm", "")  # endings of the names of pages
EXPORTS = (".svg", ".png", ".pdf", ".json", ".csv")  # of pictures, and of tables of numbers
MOST_LAYERS_IN_WORDS = 4  # whose numbers stand below the sentence of a run
MOST_RUNS = 12  # that get a figure each
MOST_SETTINGS = 8  # columns of the table of runs


def collect(paths: Sequence[Path]) -> list[Run]:
    """Return the runs in ``paths``: run folders, or folders that hold run folders, as a sweep's."""
    runs: dict[Path, Run] = {}
    for path in paths:
        inside = [path]
        if not (path / "run.json").exists():
            inside = _below(path)
        if not inside:
            try:
                Run(path)  # its error names what is missing
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
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    title: str | None = None,
    *,
    clock: bool = False,
) -> Path:
    """Write one interactive page from any runs, or the picture or the numbers of one run.

    Several runs are drawn over each other. The page of a folder of `joma reproduce` is the paper's.

    Arguments:
        runs: run folders, or folders of them: of train, sweep, scan, watch, simulate, …; one or several.
        out: the file to write: a page (.html), which needs no network to be viewed; a picture (.svg,
            .png, .pdf, or .json for Vega-Lite) or the numbers (.csv) of one run. By default a page,
            ``report.html`` in the folder that is given; of several, ``report-A+B.html`` in the folder
            that holds them. A file there that is no earlier page of the same runs is not replaced.
        title: heading of the page.
        clock: draw over τ, the sum of learning rates, instead of steps; a run without it is refused.

    Returns:
        The path of the file.

    >>> import joma, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> path = joma.simulate("two-tokens", f"{folder}/run", t_end=1.0, times=11)
    >>> joma.report(f"{folder}/run", f"{folder}/page.html").name
    'page.html'
    """
    if isinstance(runs, (str, os.PathLike)):
        runs = [runs]
    folders = [Path(path) for path in runs]
    if not folders:
        raise ValueError("no run folder was given: name at least one, as runs/mine")
    collected = collect(folders)
    if out is not None:
        _check_ending(Path(out))
    if out is not None and Path(out).suffix.lower() in EXPORTS:
        return _export(collected, Path(out), title, clock)
    is_paper = (
        not clock and title is None and len(folders) == 1 and _of_the_paper(folders[0], collected)
    )
    kind = RUNS
    if is_paper:
        kind = PAPER
    if out is None:
        place = default_place(folders)
        mark = mark_of(kind, folders, place)
        check_replaceable(place, mark)
    else:
        place = Path(out)
        mark = mark_of(kind, folders, place)
    check_place(place)
    if is_paper:
        return _paper(folders[0], collected, place)
    if clock:
        check_clock(collected)
    page = Page(place, mark=mark)
    return write_page(page, runs_page(page, collected, title, clock))


def _check_ending(file: Path) -> None:
    """Refuse names that promise something else than what can be written, as report.jpg."""
    if file.suffix.lower() not in (*PAGES, *EXPORTS):
        endings = ", ".join((".html", *EXPORTS))
        raise ValueError(f"{file} cannot be written: the name has to end in one of {endings}")


def _export(runs: list[Run], file: Path, title: str | None, clock: bool) -> Path:
    from joma._show.pages.plot import export

    if len(runs) > 1:
        raise ValueError(
            f"{file} is of one run, and there are {len(runs)}: give one, or a page (.html)"
        )
    if title is not None:
        raise ValueError(f"a page has a title, {file} has none: leave out the title")
    check_place(file)
    return export(runs[0], file, clock)


def runs_page(
    page: Page, runs: list[Run], title: str | None = None, clock: bool = False, header: str = ""
) -> str:
    """Return the text of the page of these runs."""
    page.id("summary")
    page.contents.append(("summary", "Runs", ""))
    labels = _labels(runs)
    comparable = {label: run for label, run in zip(labels, runs, strict=True) if _has_steps(run)}
    many = len(comparable) > MOST_RUNS
    now = {label: outcome(run) for label, run in comparable.items()}
    is_alone = len(runs) == 1
    table = _table(page, runs, labels, now, links=many)
    sections = [table]
    if len(comparable) > 1:  # the picture first
        sections = [_comparison(page, comparable, now, clock, many), table]
    for label, run in zip(labels, runs, strict=True):
        if not (many and label in comparable):
            id = page.id(label)
            outcome_now = now.get(label)
            sections.append(_section(page, run, label, id, clock, outcome_now, is_alone=is_alone))
    if is_alone:  # its sentence and figure, then the table
        sections.reverse()
        page.contents.reverse()
    if not title and is_alone:
        title = labels[0]
    return document(page, title or f"{len(runs)} runs", sections, "joma report", header)


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
    """True if `joma reproduce` wrote the folder, which may hold other runs too."""
    if (folder / "run.json").exists() or not any(map(_is_exhibit, runs)):
        return False
    return all(map(_is_exhibit, runs)) or (folder / "claims.json").exists()


def _paper(folder: Path, runs: list[Run], out: Path) -> Path:
    from joma.paper.exhibits.index import get, names
    from joma.paper.exhibits.runner import read_claims

    info = next(run.info for run in runs if _is_exhibit(run))
    made = {run.path.name for run in runs if _is_exhibit(run)}
    failed = {file.name.removesuffix(".error.txt") for file in folder.glob("*.error.txt")}
    listed = names()
    exhibits = get(name for name in listed if name in made | failed)
    rest = [run for run in runs if run.path.name not in listed or not _is_exhibit(run)]

    def others(page: Page) -> list[str]:
        return [
            _section(page, run, label, page.id(label))
            for label, run in zip(_labels(rest), rest, strict=True)
        ]

    return write_report(
        folder,
        exhibits,
        read_claims(folder),
        preset=info["config"].get("preset", "?"),
        seed=info["seed"],
        path=out,
        others=others,
    )


def _labels(runs: list[Run]) -> list[str]:
    """Names that tell the runs apart: the folder is added where two are the same, then a number."""
    names = [str(run.info.get("name") or run.path.resolve().name) for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    for place, run in enumerate(runs):
        if names[place] in twice:
            names[place] = f"{run.path.resolve().parent.name}/{names[place]}"
    labels = list(names)
    for place, name in enumerate(names):
        if names.count(name) > 1:
            labels[place] = f"{name} ({names[:place].count(name) + 1})"
    return labels


def _table(
    page: Page, runs: list[Run], labels: list[str], now: dict[str, Outcome], *, links: bool
) -> str:
    """Kind, status, outcome, and the settings in which the runs differ; if asked, links to their folders."""
    configs = [_flat({"seed": run.info.get("seed"), **run.info["config"]}) for run in runs]
    values: dict[str, set[str]] = {}
    for config in configs:
        for key, value in config.items():
            values.setdefault(key, set()).add(json.dumps(value))
    settings = [key for key, different in values.items() if len(different) > 1]
    rows: list[dict[str, Any]] = []
    headings: dict[str, None] = {}
    for run, label, config in zip(runs, labels, configs, strict=True):
        texts: dict[str, str] = {}
        level = ""
        if label in now:
            texts = numbers(now[label])
            level = worst(now[label])
        headings |= {name: None for name, text in texts.items() if text}
        rows.append(
            {
                "label": label,
                "info": run.info,
                "config": config,
                "files": _files(page, run),
                "numbers": texts,
                "worst": level,
                "state": run.state,
                "tone": tone_of(run.info, run.state, level or None),
            }
        )
    return render(
        "runs.html",
        rows=rows,
        settings=settings[:MOST_SETTINGS],
        many=links,
        numbers=list(headings),
        TONES=TONES,
    )


def _files(page: Page, run: Run) -> list[tuple[str, str]]:
    """Name and address of the numbers of a run, and of its pictures if they are of these numbers."""
    names = ["metrics.jsonl"]
    if _has_new_pictures(run):
        names += ["figure.svg", "figure.pdf"]
    return [(name, page.link(run.path / name)) for name in names if (run.path / name).exists()]


def _has_new_pictures(run: Run) -> bool:
    """True if the pictures in the folder were made after its last number."""
    pictures = [run.path / f"figure.{ending}" for ending in ("svg", "pdf")]
    pictures = [picture for picture in pictures if picture.exists()]
    numbers = run.path / "metrics.jsonl"
    if not (run.done and pictures and numbers.exists()):
        return False
    return all(file.stat().st_mtime_ns > numbers.stat().st_mtime_ns for file in pictures)


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Settings with the names of their groups: {"a": {"b": 1}} as {"a.b": 1}."""
    items: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            items |= _flat(value, f"{before}{key}.")
        else:
            items[before + key] = value
    return items


def _comparison(
    page: Page, runs: dict[str, Run], now: dict[str, Outcome], clock: bool, many: bool
) -> str:
    """The runs over each other, and what each layer did unless there are too many runs."""
    from joma._show.plots import drawing
    from joma._show.plots.clock import why_not
    from joma._show.plots.compare import draw

    page.contents.append(("comparison", "Over each other", ""))
    page.id("comparison")
    alt = f"The gauges of {len(runs)} runs over each other: {', '.join(runs)}"
    tables: list[LayerTable] = []
    if not many:
        tables = by_layer(list(now.values()))
    common = {
        "tables": tables,
        "labels": list(runs),
        "caution": not_alike({label: run.info for label, run in runs.items()}),
    }
    try:
        drawn = draw(runs, clock)
    except RunError as error:
        return render("comparison.html", **common, error=error, reason=None, switch=False)
    reason = None
    for label, run in runs.items():
        if run.info["kind"] in ("watch", "train"):
            reason = reason or why_not(run, bool(now[label].clock))
    return render(
        "comparison.html",
        **common,
        figure=figure(page, "comparison", drawing(drawn), alt, None),
        error=None,
        clock=clock,
        switch=has_both_clocks(drawn),
        reason=reason,
    )


def has_both_clocks(chart: Chart) -> bool:
    """True if the reader can switch a figure between steps and τ."""
    about = getattr(chart, "usermeta", None)
    return isinstance(about, dict) and "clocks" in about


def _section(
    page: Page,
    run: Run,
    label: str,
    id: str,
    clock: bool = False,
    now: Outcome | None = None,
    *,
    is_alone: bool = False,
) -> str:
    """A run's part of the page; ``now`` is its outcome, if that was read already.

    The heading of a run that is alone is that of the page.
    """
    from joma._show.pages.plot import chart
    from joma._show.plots import drawing

    if _is_exhibit(run):
        section = _exhibit(page, run, label, id)
        if section is not None:
            return section
    info = run.info
    alerts = read_alerts(run.path)
    page.contents.append((id, label, tone_of(info, run.state, worst_level(alerts))))
    common = {
        "id": id,
        "label": label,
        "is_alone": is_alone,
        "facts": _facts(run),
        "checkpoints": _table_of(run),
        "explanation": _explanation(run),
    }
    try:
        drawn = chart(run, clock)
    except RunError as error:
        return render("run.html", **common, error=error, switch=False)
    axis = "its steps"
    command = f"joma report {shlex.quote(str(run.path))} --out figure.svg"
    if clock:
        axis = "τ"
        command += " --clock"
    curves: dict[str, str] = {}
    lead = ""
    behind: list[str] = []
    if _has_steps(run):
        now = now or outcome(run)
        curves = _curves(run, now)
        lead = story(now, info["kind"])
        behind = [
            f"Layer {layer}: {figures(now, layer)}." for layer in now.curves.get("entropy", {})
        ]
    else:
        axis = "the layers, one line per model"
    alt = f"{info['kind']} run {label}: each gauge over {axis}"
    table_of_run = run.frame()
    table = table_of_run.to_csv(index=False)
    return render(
        "run.html",
        **common,
        curves=curves,
        lead=lead,
        behind=behind[:MOST_LAYERS_IN_WORDS],
        heads=_heads(page, run, id, label, table_of_run),
        figure=figure(page, id, drawing(drawn), alt, table, run.path),
        command_line=command,
        error=None,
        clock=clock,
        switch=has_both_clocks(drawn),
        alerts=by_block(alerts),
        is_critical=worst_level(alerts) == "critical",
        TONES=TONES,
        attention=_attention(page, run, id, label),
    )


def _exhibit(page: Page, run: Run, label: str, id: str) -> str | None:
    """The part of the page of an exhibit; None if it has no verdict, or is not registered."""
    from joma.paper.exhibits.index import get, names

    config = run.info["config"]
    name = str(config.get("exhibit"))
    if name not in names() or not (run.path / "verdict.json").exists():
        return None
    (exhibit,) = get([name])
    title = None
    if label != exhibit.id:
        title = label
    _, section = exhibit_section(
        page, exhibit, run.path, str(config["preset"]), run.info["seed"], id=id, label=title
    )
    return section


def _facts(run: Run) -> dict[str, Any]:
    """The settings of a run, when and how it was made, and the versions of its libraries."""
    info = run.info
    state = run.state
    about = {key: info.get(key) for key in ("kind", "status", "reason", "seed")}
    about |= {"status": state.status, "reason": state.remark or None}
    about |= {key: info.get(key) for key in ("created", "finished")}
    if info.get("measured"):
        about["measured on"] = "; ".join(measured_on(info))
    if info.get("missing"):
        about["not written"] = missing_in_words(info["missing"])
    present = {key: value for key, value in about.items() if value is not None}
    return _flat(info["config"]) | present | versions(run)


def _table_of(run: Run) -> str:
    """The checkpoints of a scan, the faults of an audit; "" for other runs."""
    if run.info["kind"] == "scan":
        return checkpoints_table(run)
    if run.info["kind"] == "audit":
        return faults_table(run)
    return ""


def _explanation(run: Run) -> str:
    """The table of the attention and MLPs that the watch found, if the run recorded it."""
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
    """The part of the page with attention patterns, if the run recorded them."""
    patterns = run.patterns()
    if patterns is None or not patterns.kept:
        return ""
    from joma._show.plots import drawing
    from joma._show.plots.patterns import draw, shown_layers

    steps = ", ".join(f"{one.step:,}" for one in patterns.kept)
    alt = f"{label}: attention of each token to each, at steps {steps}"
    drawn = figure(page, page.id(f"{id}-attention"), drawing(draw(patterns)), alt, None)
    sequence = " ".join(patterns.words or [])
    left_out = len(patterns.layers) > len(shown_layers(patterns))
    return render(
        "attention.html", figure=drawn, patterns=patterns, sequence=sequence, left_out=left_out
    )


def _heads(page: Page, run: Run, id: str, label: str, table: pd.DataFrame) -> str:
    """The part of the page with each gauge of heads over the steps, if the run has several heads."""
    from joma._show.plots import drawing
    from joma._show.plots.heads import draw

    drawn = draw(table, run.info.get("largest", ()))
    if drawn is None:
        return ""
    alt = f"{label}: each head over the steps, one heat map per gauge"
    return render(
        "heads.html", figure=figure(page, page.id(f"{id}-heads"), drawing(drawn), alt, None)
    )


def _curves(run: Run, now: Outcome) -> dict[str, str]:
    """Entropy and stable rank of each layer in words, and the rules for dips; {} if there is neither."""
    from joma._show.plots.watch import titled

    items: dict[str, str] = {}
    points = "measurements"
    if run.info["kind"] == "scan":
        points = "checkpoints"
    for gauge, curves in now.curves.items():
        rule = now.rules[gauge]
        items |= {
            f"{titled(gauge)}, layer {n}": f"{curve}: {curve.pattern}"
            for n, curve in curves.items()
        }
        items[f"rule for {titled(gauge)}"] = f"{rule.smoothed(points)}{rule}"
    return items
