"""A page from any runs: what they were, the same gauges over each other, and the figure of each."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from joma._report.document import Page, check_place, document, figure, write_page
from joma._report.page import exhibit_section, versions, write_report
from joma._report.render import STATUS, render
from joma._run import Run, RunError, RunNotFound

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


def report(paths: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write the page of the runs in ``paths`` to ``out``; of a folder that `joma reproduce` wrote, the paper's page."""
    runs = collect(paths)
    check_place(out)
    if title is None and len(paths) == 1 and _of_the_paper(paths[0], runs):
        return _paper(paths[0], runs, out)
    page = Page(out)
    page.id("summary")
    page.contents.append(("summary", "Runs", ""))
    labels = _labels(runs)
    comparable = {label: run for label, run in zip(labels, runs, strict=True) if not _is_exhibit(run)}
    many = len(comparable) > MOST_RUNS
    sections = [_table(page, runs, labels, links=many)]
    if len(comparable) > 1:
        sections.append(_comparison(page, comparable))
    for label, run in zip(labels, runs, strict=True):
        if not (many and label in comparable):
            sections.append(_section(page, run, label, page.id(label)))
    heading = title or (labels[0] if len(runs) == 1 else f"{len(runs)} runs")
    return write_page(page, document(page, heading, sections, "joma report"))


def _is_exhibit(run: Run) -> bool:
    return bool(run.info["kind"] == "exhibit")


def _of_the_paper(folder: Path, runs: list[Run]) -> bool:
    """Whether `joma reproduce` wrote the folder, which may hold other runs too."""
    if (folder / "run.json").exists() or not any(map(_is_exhibit, runs)):
        return False
    return all(map(_is_exhibit, runs)) or (folder / "claims.json").exists()


def _paper(folder: Path, runs: list[Run], out: Path) -> Path:
    from joma._exhibits import exhibits
    from joma._exhibits.runner import read_claims

    info = next(run.info for run in runs if _is_exhibit(run))
    shown = {run.path.name for run in runs if _is_exhibit(run)}
    failed = {file.name.removesuffix(".error.txt") for file in folder.glob("*.error.txt")}
    chosen = [exhibit for exhibit in exhibits().values() if exhibit.id in shown | failed]
    rest = [run for run in runs if run.path.name not in exhibits() or not _is_exhibit(run)]

    def others(page: Page) -> list[str]:
        return [_section(page, run, label, page.id(label)) for label, run in zip(_labels(rest), rest, strict=True)]

    return write_report(
        folder, chosen, read_claims(folder), preset=info["config"].get("preset", "?"), seed=info["seed"], path=out,
        others=others,
    )  # fmt: skip


def _labels(runs: list[Run]) -> list[str]:
    """Names that tell the runs apart: of the runs, with the folder before it where two are the same."""
    names = [str(run.info.get("name") or run.path.resolve().name) for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    full = [f"{run.path.resolve().parent.name}/{n}" if n in twice else n for run, n in zip(runs, names, strict=True)]
    return [f"{name} ({full[:n].count(name) + 1})" if full.count(name) > 1 else name for n, name in enumerate(full)]


def _table(page: Page, runs: list[Run], labels: list[str], *, links: bool) -> str:
    """Kind, status, and the settings in which the runs differ; if asked, with links to what is in their folders."""
    configs = [_flat(run.info["config"]) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    values = {key: {json.dumps(config[key]) for config in configs if key in config} for key in keys}
    rows = [
        {"label": label, "info": run.info, "config": config, "files": _files(page, run)}
        for run, label, config in zip(runs, labels, configs, strict=True)
    ]
    return render("runs.html", rows=rows, settings=[key for key in keys if len(values[key]) > 1][:8], many=links)


def _files(page: Page, run: Run) -> list[tuple[str, str]]:
    """Name and address of the numbers of a run, and of its pictures if they are of these numbers."""
    names = ["metrics.jsonl", *(["figure.svg", "figure.pdf"] if _drawn_since(run) else [])]
    return [(name, page.link(run.path / name)) for name in names if (run.path / name).exists()]


def _drawn_since(run: Run) -> bool:
    """Whether the pictures in the folder were made after its last number."""
    pictures = [file for ending in ("svg", "pdf") if (file := run.path / f"figure.{ending}").exists()]
    numbers = run.path / "metrics.jsonl"
    if not (run.done and pictures and numbers.exists()):
        return False
    return all(file.stat().st_mtime_ns > numbers.stat().st_mtime_ns for file in pictures)


def _flat(config: dict[str, Any], before: str = "") -> dict[str, Any]:
    items: dict[str, Any] = {}
    for key, value in config.items():
        items |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return items


def _comparison(page: Page, runs: dict[str, Run]) -> str:
    from joma._figures import specification
    from joma._figures.compare import draw

    page.contents.append(("comparison", "Over each other", ""))
    page.id("comparison")
    alt = f"The gauges of {len(runs)} runs over each other: {', '.join(runs)}"
    try:
        drawn = figure(page, "comparison", json.loads(specification(draw(runs))), alt, None)
    except RunError as error:
        return render("comparison.html", error=error)
    return render("comparison.html", figure=drawn, error=None)


def _section(page: Page, run: Run, label: str, id: str) -> str:
    from joma._figures import specification
    from joma._report.plot import chart

    info = run.info
    if info["kind"] == "exhibit" and (run.path / "verdict.json").exists():
        from joma._exhibits import exhibits

        if (exhibit := exhibits().get(str(info["config"].get("exhibit")))) is not None:
            preset, title = str(info["config"]["preset"]), label if label != exhibit.id else None
            return exhibit_section(page, exhibit, run.path, preset, info["seed"], id=id, label=title)[1]
    page.contents.append((id, label, STATUS.get(str(info["status"]), "fair")))
    keys = ("kind", "status", "reason", "seed", "created", "finished")
    facts = _flat(info["config"]) | {key: info[key] for key in keys if info.get(key) is not None} | versions(run)
    try:
        spec = json.loads(specification(chart(run)))
    except RunError as error:
        return render("run.html", id=id, label=label, facts=facts, error=error)
    alt = f"{info['kind']} run {label}: each gauge over its steps"
    drawn = figure(page, id, spec, alt, run.frame().to_csv(index=False), run.path, pictures=_drawn_since(run))
    path = shlex.quote(str(run.path))
    return render(
        "run.html", id=id, label=label, facts=facts, figure=drawn, curves=_curves(run), path=path, error=None
    )  # fmt: skip


def _curves(run: Run) -> dict[str, str]:
    """What entropy and stable rank of each layer did, in words, and the rules that tell it; {} if there is neither."""
    from joma._figures.watch import titled
    from joma._run.curve import CHECKPOINTS, TRAINING, describe_all

    scan, frame = run.info["kind"] == "scan", run.frame()
    if "layer" not in frame:
        return {}
    last = frame[frame.gauge == "phase"].groupby("layer").value.last()
    phases = {(layer,): run.info["phases"][int(code)] for layer, code in last.items()}
    collapsed = [layer for layer, phase in phases.items() if phase == "collapsed"]
    items: dict[str, str] = {}
    for gauge, rule in (CHECKPOINTS if scan else TRAINING).items():
        curves = describe_all(frame[frame.gauge == gauge], rule, collapsed=collapsed if gauge == "entropy" else ())
        items |= {f"{titled(gauge)}, layer {n}": f"{curve}: {curve.pattern}" for (n,), curve in curves.items()}
        if curves:
            items[f"rule for {titled(gauge)}"] = f"{rule.smoothed('checkpoints' if scan else 'measurements')}{rule}"
    return items
