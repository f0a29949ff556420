"""report.html: what the paper says and what was measured, in the order of the paper; then the claims."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from joma._report.claims import claims_failure, claims_section
from joma._report.document import (
    LABELS,
    TONE,
    Page,
    badge,
    check_place,
    command,
    document,
    facts,
    figure,
    more,
    write_page,
)  # fmt: skip
from joma._report.explorer import explorer_section
from joma._report.typeset import markdown_table, typeset
from joma._run import Run, RunNotFound

if TYPE_CHECKING:
    from joma._exhibits import Exhibit, Judgement, Outcome
    from joma.theory.claims import Result

PAPER = """<p class="lead">Tian, Wang, Zhang, Chen and Du: <em>JoMA: Demystifying Multilayer Transformers via Joint Dynamics of
MLP and Attention</em>, ICLR 2024. What the paper says, and what was measured.</p>"""


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
        out: the folder with one folder an exhibit.
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
    made: list[tuple[Exhibit, Judgement | None]] = []
    sections = []
    for item in exhibits:
        if isinstance(item, Exhibit):
            exhibit, error = item, _complaint(out, item.id)
        else:  # what went wrong once is not told of what has been made or found since
            exhibit, error = item.exhibit, item.error or (None if item.verdict else _complaint(out, item.exhibit.id))
        id = page.id(exhibit.id)
        verdict, section = exhibit_section(page, exhibit, out / exhibit.id, preset, seed, error, id=id)
        made.append((exhibit, verdict))
        sections.append(section)
        if exhibit.id == "fig4":
            sections.append(explorer_section(page))
    claims_error = claims_error or _complaint(out, "claims")
    claims = None if claims_error else claims  # old ones would look as if they were new
    if claims_error:
        sections.append(claims_failure(page, claims_error))
    elif claims is not None:
        if not any(exhibit.id == "fig4" for exhibit, _ in made):
            sections.append(explorer_section(page))
        sections.append(claims_section(page, claims))
    header = f'{PAPER}<p class="meta">joma {__version__}, preset {escape(preset)}, seed {seed}.</p>'
    sections.insert(0, _summary(made, claims, claims_error))
    sections += others(page)
    footer = "Made by <code>joma reproduce</code>. This file needs no network and no other file."
    return write_page(page, document(page, "JoMA, reproduced", header, sections, footer))


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
    """An exhibit's verdict and its part of the page; one that is not there is said to be missing.

    Arguments:
        error: why it could not be made; what is left of an earlier time is not shown.
        id: of the section, unique in the page.
        label: beside the title, where the page has several runs of the exhibit.
    """
    from joma._exhibits.base import load_verdict

    title = f"{exhibit.title} ({label})" if label else exhibit.title
    head = f'<section id="{id}" aria-labelledby="{id}-title"><h2 id="{id}-title">{escape(title)}</h2>'
    says = f"<div><h3>The paper says</h3><p>{typeset(exhibit.statement)}</p></div>"
    if error or not (folder / "verdict.json").exists():
        page.contents.append((id, title, "bad"))
        again = command(f"joma reproduce {exhibit.id} --preset {preset} --seed {seed}")
        what = escape(error or "It was not made in this run.")
        if error and (folder / "verdict.json").exists():
            what += f" What an earlier run left in {escape(folder.name)}/ is not shown."
        return (
            None,
            f'{head}<div class="pair">{says}<div><h3>Measured</h3><p>{badge("error")} {what}</p></div></div>{again}</section>',
        )
    verdict, run = load_verdict(folder), Run(folder)
    page.contents.append((id, title, TONE[verdict.verdict]))
    config = run.info["config"]
    alt = f"{title}. {verdict.verdict}: {verdict.summary}"
    spec = json.loads((folder / "figure.json").read_text(encoding="utf-8"))
    try:
        table, missing = run.frame().to_csv(index=False), ""
    except RunNotFound as error:  # of a run that it refers to; picture and verdict are here
        table, missing = None, f'<p class="meta">There is no table of the numbers: {escape(str(error))}.</p>'
    drawn = figure(page, id, spec, alt, table, folder) + missing
    tables = "".join(markdown_table(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.md")))
    numbers = {"measured": verdict.measured, "the paper": verdict.paper}
    beside = "".join(f"<span>{name} <b>{typeset(text)}</b></span>" for name, text in numbers.items() if text)
    origin = {"preset": config["preset"], "seed": run.info["seed"], "made": run.info.get("finished", "")}
    versions = {f"version of {name}": text for name, text in run.info.get("versions", {}).items() if text}
    json_numbers = escape(json.dumps(verdict.numbers, indent=2, ensure_ascii=False))
    body = f"""{head}
<div class="pair">{says}<div><h3>Measured</h3><p>{badge(verdict.verdict)} {typeset(verdict.summary)}</p>
{f'<p class="beside">{beside}</p>' if beside else ""}</div></div>
{drawn}{more("Table", tables) if tables else ""}
<p class="rule">Rule: {typeset(verdict.rule.rstrip("."))}.</p>
{command(f"joma reproduce {exhibit.id} --preset {config['preset']} --seed {run.info['seed']}")}
{more("Settings", facts(config["settings"] | origin | versions))}
{more("All numbers", f'<pre tabindex="0">{json_numbers}</pre>') if verdict.numbers else ""}
</section>"""
    return verdict, body


def _summary(
    made: list[tuple[Exhibit, Judgement | None]], claims: list[Result] | None, claims_error: str | None
) -> str:
    words = [verdict.verdict if verdict else "error" for _, verdict in made]
    parts = [("exhibits", words)] + ([("claims", [r.verdict for r in claims])] if claims is not None else [])
    counts = "".join(_tally(name, found) for name, found in parts if found)
    counts += f"<p>{badge('error')} The claims could not be checked: {escape(claims_error)}</p>" if claims_error else ""
    numbers = any(verdict and (verdict.measured or verdict.paper) for _, verdict in made)
    rows = "".join(_row(exhibit, verdict, numbers) for exhibit, verdict in made)
    columns = ["exhibit", "the paper says", "verdict", *(("measured", "the paper’s number") if numbers else ())]
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return f"""<section id="summary" aria-labelledby="summary-title" class="first"><h2 id="summary-title">Summary</h2>{counts}
<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></section>"""


def _tally(name: str, verdicts: list[str]) -> str:
    count = Counter(verdicts)
    bar = "".join(f'<span class="{TONE[v]}" style="flex:{count[v]}"></span>' for v in TONE if count[v])
    items = "".join(f"<li><b>{count[v]}</b> {LABELS.get(v, v)}</li>" for v in TONE if count[v])
    return f'<div class="tally" aria-hidden="true">{bar}</div><ul class="counts"><li><b>{len(verdicts)} {name}</b></li>{items}</ul>'


def _row(exhibit: Exhibit, verdict: Judgement | None, numbers: bool) -> str:
    measured, paper = (verdict.measured, verdict.paper) if verdict else ("", "")
    cells = "".join(
        f'<td data-label="{label}"{"" if text else " class=none"}>{typeset(text) if text else "–"}</td>'
        for label, text in (("measured", measured), ("the paper’s number", paper))
    )
    return (
        f'<tr><th scope="row"><a href="#{exhibit.id}">{escape(exhibit.title)}</a></th><td>{typeset(exhibit.statement)}</td>'
        f"<td>{badge(verdict.verdict if verdict else 'error')}</td>{cells if numbers else ''}</tr>"
    )
