"""report.html: findings, the explorer, the exhibits in the order of the paper, the claims."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from joma._runs import Run, RunNotFound
from joma._runs.curve import EXACT
from joma._show.pages.claims import claims_section
from joma._show.pages.document import Page, check_place, document, figure, write_page
from joma._show.pages.findings import Shown, findings_section
from joma._show.pages.place import PAPER, mark_of
from joma._show.pages.render import TONE, render
from joma._show.pages.typeset import markdown_table
from joma._show.plots.style import stored_drawing

if TYPE_CHECKING:
    from joma.paper.claims import Result
    from joma.paper.exhibits import Exhibit, ExhibitOutcome


def write_report(
    out: Path,
    exhibits: Iterable[Exhibit | ExhibitOutcome],
    claims: list[Result] | None,
    *,
    preset: str,
    seed: int,
    path: Path | None = None,
    claims_error: str | None = None,
    others: Callable[[Page], list[str]] = lambda page: [],
) -> Path:
    """Write the page atomically (to ``out/report.html`` by default) and return its path.

    Arguments:
        out: the folder with one folder per exhibit.
        exhibits: in the order of the page; of one that failed, the error is shown: an outcome's, or that in
            ``out/<id>.error.txt``.
        claims: the checked claims, or None for a page without them.
        preset: what was asked for, for the heading and for exhibits that are not there.
        seed: likewise.
        path: where to write the page.
        claims_error: why the claims could not be checked; by default what ``out/claims.error.txt`` says.
        others: makes more sections, for the end of the page.
    """
    from joma import __version__
    from joma.paper.exhibits import Exhibit

    page = Page(path or out / "report.html")
    page.mark = mark_of(PAPER, [out], page.path)
    check_place(page.path)
    page.ids |= {"findings", "claims", "explorer"}
    page.contents.append(("findings", "Findings", ""))
    claims_error = claims_error or _complaint(out, "claims")
    if claims_error:
        claims = None  # old ones would look as if they were new
    all_shown: list[Shown] = []
    sections = [_explorer(page)]
    for item in exhibits:
        undrawn = None
        if isinstance(item, Exhibit):
            exhibit = item
            error = _complaint(out, item.id)
        else:
            exhibit = item.exhibit
            error = item.error
            if not item.has_run:
                undrawn = item
            # An old error is not shown for what has been made since.
            if error is None and item.verdict is None:
                error = _complaint(out, exhibit.id)
        id = page.id(exhibit.id)
        if undrawn is not None:
            one, section = undrawn_section(page, undrawn, id)
        else:
            one, section = exhibit_section(
                page, exhibit, out / exhibit.id, preset, seed, error, id=id
            )
        all_shown.append(one)
        sections.append(section)
    if claims_error or claims is not None:
        sections.append(claims_section(page, claims, claims_error))
    sections.insert(0, findings_section(page, all_shown, claims, claims_error))
    sections += others(page)
    header = render(
        "header.html", version=__version__, preset=preset, seed=seed, today=date.today().isoformat(), commit=_commit(),
        claims=claims is not None,
    )  # fmt: skip
    return write_page(page, document(page, "JoMA, reproduced", sections, "joma reproduce", header))


def _commit() -> str | None:
    """The commit of the source that makes the page; None where that is no checkout."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "rev-parse", "--short=9", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def _explorer(page: Page) -> str:
    """The explorer of Eqn. 6: choose how spread μ is, let time run, see v(t), attention and its entropy move."""
    page.contents.append(("explorer", "Explore Eqn. 6", ""))
    rule = asdict(EXACT) | {"fall": EXACT.fall, "rise": EXACT.rise}
    return render("explorer.html", equation=r"$\dot v=(\mu-v)\circ e^{v^2/2}$", rule=rule)


def _complaint(out: Path, id: str) -> str | None:
    """The error of an exhibit, or of the claims: the first line of its error file, before the traceback."""
    path = out / f"{id}.error.txt"
    if not path.exists():
        return None
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0]:
        return f"It failed; {path.name} does not say why."
    return lines[0]


def exhibit_section(
    page: Page, exhibit: Exhibit, folder: Path, preset: str, seed: int, error: str | None = None, *, id: str,
    label: str | None = None,
) -> tuple[Shown, str]:  # fmt: skip
    """Return an exhibit as it is shown, and its part of the page; if it was not made, the section says so.

    Arguments:
        error: why it could not be made; what is left of an earlier time is not shown.
        id: of the section, unique in the page.
        label: added to the title, where the page has several runs of the exhibit.
    """
    from joma.paper.exhibits.base import FRESH_SEED
    from joma.paper.exhibits.making import load_checks, load_verdict
    from joma.paper.recorded import longer_run

    addition = ""
    if label:
        addition = f" ({label})"
    title = exhibit.title + addition
    is_left = (folder / "verdict.json").exists()
    judgement = run = provenance = longer = None
    settings: dict[str, Any] = {}
    if is_left and not error:
        judgement = load_verdict(folder)
        run = Run(folder)
        settings = run.info["config"]["settings"]
        provenance = run.info.get("record")
        longer = longer_run(exhibit.id)
        if longer is not None and longer.preset == run.info["config"]["preset"]:
            longer = None
    one = Shown(exhibit, id, folder, judgement, settings)
    page.contents.append((id, title, TONE[one.verdict]))
    common = {
        "id": id,
        "title": title,
        "heading": one.message + addition,
        "exhibit": exhibit,
        "shown": one,
        "verdict": judgement,
        "longer": longer,
        "provenance": provenance,
        "checks": load_checks(folder),
        "would_decide": exhibit.would_decide_it(one.verdict),
    }
    if judgement is None or run is None:
        return one, render(
            "exhibit.html",
            **common,
            error=error,
            left=is_left,
            folder=folder,
            preset=preset,
            seed=seed,
        )
    config = run.info["config"]
    table: str | None
    missing: RunNotFound | None
    try:
        table = run.frame().to_csv(index=False, float_format="%.7g")
        missing = None
    except RunNotFound as refusal:
        # Of a run that it refers to. Picture and verdict are here.
        table = None
        missing = refusal
    tables = [
        markdown_table(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.md"))
    ]
    origin = {
        "preset": config["preset"],
        "seed": run.info["seed"],
        "made": run.info.get("finished", ""),
    }
    if provenance is not None:
        origin |= {"preset": provenance["preset"], "seed": provenance["seed"]}
    alt = f"{title}. {judgement.verdict}: {judgement.summary}"
    return one, render(
        "exhibit.html",
        **common,
        tables=Markup("").join(tables),
        figure=figure(page, id, stored_drawing(folder), alt, table, folder),
        missing=missing,
        preset=config["preset"],
        seed=run.info["seed"],
        origin=origin,
        settings=config["settings"] | origin | versions(run),
        numbers=json.dumps(judgement.numbers, indent=2, ensure_ascii=False),
        fresh_seed=FRESH_SEED,
    )


def undrawn_section(page: Page, outcome: ExhibitOutcome, id: str) -> tuple[Shown, str]:
    """Return an exhibit that has neither a record nor a computation: what would decide it, and no figure."""
    from joma.paper.recorded import longer_run

    exhibit = outcome.exhibit
    one = Shown(exhibit, id, outcome.path, outcome.verdict, has_run=False)
    page.contents.append((id, exhibit.title, TONE[one.verdict]))
    section = render(
        "undrawn.html",
        id=id,
        exhibit=exhibit,
        heading=one.message,
        outcome=outcome,
        longer=longer_run(exhibit.id),
    )
    return one, section


def versions(run: Run) -> dict[str, str]:
    """Return the versions of the libraries that made a run, for its settings."""
    return {
        f"version of {name}": text for name, text in run.info.get("versions", {}).items() if text
    }
