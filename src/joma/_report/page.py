"""report.html: what the paper says and what was measured, in the order of the paper; then the claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from joma._report.claims import claims_section, tally
from joma._report.document import Page, check_place, document, figure, write_page
from joma._report.render import TONE, render
from joma._report.typeset import markdown_table
from joma._run import Run, RunNotFound
from joma._run.curve import EXACT

if TYPE_CHECKING:
    from joma._exhibits import Exhibit, Judgement, Outcome
    from joma.theory.claims import Result


def write_report(
    out: Path,
    exhibits: Iterable[Exhibit | Outcome],
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
    from joma._exhibits import Exhibit

    page = Page(path or out / "report.html")
    check_place(page.path)
    page.ids |= {"summary", "claims", "explorer"}
    page.contents.append(("summary", "Summary", ""))
    judged: list[tuple[Exhibit, Judgement | None]] = []
    sections = []
    for item in exhibits:
        if isinstance(item, Exhibit):
            exhibit, error = item, _complaint(out, item.id)
        else:  # an old error is not shown for what has been made since
            exhibit, error = item.exhibit, item.error or (None if item.verdict else _complaint(out, item.exhibit.id))
        id = page.id(exhibit.id)
        verdict, section = exhibit_section(page, exhibit, out / exhibit.id, preset, seed, error, id=id)
        judged.append((exhibit, verdict))
        sections.append(section)
        if exhibit.id == "fig4":
            sections.append(_explorer(page))
    claims_error = claims_error or _complaint(out, "claims")
    claims = None if claims_error else claims  # old ones would look as if they were new
    if claims is not None and not any(exhibit.id == "fig4" for exhibit, _ in judged):
        sections.append(_explorer(page))
    if claims_error or claims is not None:
        sections.append(claims_section(page, claims, claims_error))
    sections.insert(0, _summary(judged, claims, claims_error))
    sections += others(page)
    header = render("header.html", version=__version__, preset=preset, seed=seed)
    return write_page(page, document(page, "JoMA, reproduced", sections, "joma reproduce", header))


def _explorer(page: Page) -> str:
    """The explorer of Eqn. 6: choose how spread μ is, let time run, see v(t), attention and its entropy move."""
    page.contents.append(("explorer", "Explore Eqn. 6", ""))
    rule = asdict(EXACT) | {"fall": EXACT.fall, "rise": EXACT.rise}
    return render("explorer.html", equation=r"$\dot v=(\mu-v)\circ e^{v^2/2}$", rule=rule)


def _complaint(out: Path, id: str) -> str | None:
    """What went wrong with an exhibit, or the claims: the first line of its error file, before the traceback."""
    path = out / f"{id}.error.txt"
    if not path.exists():
        return None
    return next(iter(path.read_text(encoding="utf-8").splitlines()), "") or f"It failed; {path.name} does not say why."


def exhibit_section(
    page: Page, exhibit: Exhibit, folder: Path, preset: str, seed: int, error: str | None = None, *, id: str,
    label: str | None = None,
) -> tuple[Judgement | None, str]:  # fmt: skip
    """An exhibit's verdict and its part of the page; if it was not made, the section says so.

    Arguments:
        error: why it could not be made; what is left of an earlier time is not shown.
        id: of the section, unique in the page.
        label: added to the title, where the page has several runs of the exhibit.
    """
    from joma._exhibits.base import SEEN, load_verdict

    title = f"{exhibit.title} ({label})" if label else exhibit.title
    left = (folder / "verdict.json").exists()
    if error or not left:
        page.contents.append((id, title, "bad"))
        return None, render(
            "exhibit.html", id=id, title=title, exhibit=exhibit, verdict=None, error=error, left=left, folder=folder,
            preset=preset, seed=seed,
        )  # fmt: skip
    verdict, run = load_verdict(folder), Run(folder)
    page.contents.append((id, title, TONE[verdict.verdict]))
    config, seed = run.info["config"], run.info["seed"]
    alt = f"{title}. {verdict.verdict}: {verdict.summary}"
    spec = json.loads((folder / "figure.json").read_text(encoding="utf-8"))
    try:
        table, missing = run.frame().to_csv(index=False), None
    except RunNotFound as refusal:  # of a run that it refers to; picture and verdict are here
        table, missing = None, refusal
    tables = [markdown_table(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.md"))]
    origin = {"preset": config["preset"], "seed": seed, "made": run.info.get("finished", "")}
    return verdict, render(
        "exhibit.html", id=id, title=title, exhibit=exhibit, verdict=verdict, tables=Markup("").join(tables),
        figure=figure(page, id, spec, alt, table, folder), missing=missing, preset=config["preset"], seed=seed,
        facts=config["settings"] | origin | versions(run),
        numbers=json.dumps(verdict.numbers, indent=2, ensure_ascii=False), seen=SEEN,
    )  # fmt: skip


def versions(run: Run) -> dict[str, str]:
    """The versions of the libraries that made a run, for its settings."""
    return {f"version of {name}": text for name, text in run.info.get("versions", {}).items() if text}


def _summary(
    judged: list[tuple[Exhibit, Judgement | None]], claims: list[Result] | None, claims_error: str | None
) -> str:
    tallies = {
        "exhibits": tally(verdict.verdict if verdict else "error" for _, verdict in judged),
        "claims": tally(result.verdict for result in claims or []),
    }
    numbers = any(verdict and (verdict.measured or verdict.paper) for _, verdict in judged)
    return render("summary.html", tallies=tallies, made=judged, numbers=numbers, claims_error=claims_error)
