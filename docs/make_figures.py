"""``make figures``: the pictures and tables of README and docs, made again by the program itself.

Makes the README's pictures of `joma demo`, runs all exhibits at the default preset, copies their pictures to
``docs/figures``, and writes the table of claims into ``docs/claims.md``, those that differ from the paper into
``docs/errata.md``, the index from the paper to the code into ``docs/paper-index.md``, and the exhibits' results, default
and recorded, into ``docs/results.md``.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from joma._show.pages.plot import plot
from joma._train.simulate import simulate
from joma.paper.claims import check, claims
from joma.paper.exhibits import ORDER, exhibits
from joma.paper.exhibits.making import load_verdict
from joma.paper.exhibits.runner import Runner
from joma.paper.recorded import recorded

ROOT = Path(__file__).parent.parent
SENTENCE = 240  # characters of a summary in the guide
PARTS = ["architecture", "demo", "pictures", "reading", "claims", "tables"]
sys.path.insert(0, str(ROOT / "docs/_build"))

import claim_pages  # noqa: E402
import contrasted  # noqa: E402
import dataflow  # noqa: E402
import demo_pictures  # noqa: E402
import imports  # noqa: E402
import paper_index  # noqa: E402
import reading  # noqa: E402
from claim_pages import cell  # noqa: E402
from marks import between  # noqa: E402


def pictures(folder: Path, keep: bool) -> None:
    """One PNG per exhibit, and the one of ``joma simulate``; ``keep`` takes what is there."""
    (ROOT / "docs/figures").mkdir(exist_ok=True)
    all_exhibits = list(exhibits().values())
    runner = Runner(
        all_exhibits,
        out=folder,
        force=not keep,
        finished=lambda job: print(job.id, job.verdict, flush=True),
    )
    for outcome in runner.run().outcomes:
        if outcome.error:
            raise SystemExit(f"{outcome.exhibit.id}: {outcome.error}")
        shutil.copy(
            outcome.path / "figure.png", ROOT / "docs/figures" / f"{outcome.exhibit.id}.png"
        )
    trained = max(
        (folder / "language-runs").glob("*layers=2,*"), key=lambda path: path.stat().st_mtime
    )
    plot(trained, folder / "watch-figure")
    shutil.copy(folder / "watch-figure/figure.png", ROOT / "docs/figures/watch.png")
    simulate(
        "smooth-classes",
        folder / "simulate",
        activation="linear",
        temperature=0.5,
        t_end=200.0,
        force=True,
    )
    shutil.copy(folder / "simulate/figure.png", ROOT / "docs/figures/simulate.png")


def main() -> None:
    """Make everything, or the parts named (``PARTS``); ``--keep`` takes exhibits made before."""
    keep = "--keep" in sys.argv
    chosen = [part for part in sys.argv[1:] if part != "--keep"] or PARTS
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"unknown part {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    folder = ROOT / "runs/figures"
    if "architecture" in chosen:
        architecture()
    if "demo" in chosen:
        demo_pictures.make(folder, ROOT / "docs/figures")
    if "pictures" in chosen:
        pictures(folder, keep)
    if "reading" in chosen:
        for name, made in reading.make(folder).items():
            shutil.copy(made / "figure.png", ROOT / f"docs/figures/{name}.png")
    if "claims" in chosen:
        claim_tables(folder)
    if "tables" in chosen:
        tables(folder)
        theory_table()


def architecture() -> None:
    """The pictures of data flow and imports, and the table of rooms."""
    (ROOT / "docs/figures/dataflow.svg").write_text(dataflow.svg())
    (ROOT / "docs/figures/imports.svg").write_text(imports.svg())
    page = ROOT / "docs/architecture.md"
    page.write_text(between(page.read_text(), "rooms", imports.table()))


def claim_tables(folder: Path) -> None:
    """Claims, errata and the index of the paper."""
    results = [check(claim) for claim in claims()]
    if wrong := [r.id for r in results if not r.ok]:
        raise SystemExit(f"not written, since these claims are in error: {', '.join(wrong)}")
    (ROOT / "docs/claims.md").write_text(claim_pages.full_table(results))
    (ROOT / "docs/errata.md").write_text(claim_pages.errata(results))
    (ROOT / "docs/galore.md").write_text(claim_pages.galore(results))
    index = ROOT / "docs/paper-index.md"
    # an exhibit that is not in the folder keeps the verdict that the page has
    exhibits = dict(re.findall(r"`joma reproduce (\w+)`: ([a-z ]+)", index.read_text()))
    exhibits = {id: verdict.strip() for id, verdict in exhibits.items()}
    exhibits |= {
        id: load_verdict(folder / id).verdict
        for id in ORDER
        if (folder / id / "verdict.json").exists()
    }
    index.write_text(paper_index.page({r.id: r.verdict for r in results}, exhibits))


def theory_table() -> None:
    """The table of linear against nonlinear nodes."""
    page = ROOT / "docs/theory.md"
    page.write_text(between(page.read_text(), "contrast", contrasted.table()))


def tables(folder: Path) -> None:
    """The guide to the exhibits, and their results."""
    guide = ROOT / "docs/reproduce.md"
    guide.write_text(between(guide.read_text(), "exhibits", exhibit_sections(folder)))
    page = ROOT / "docs/results.md"
    page.write_text(between(page.read_text(), "results", results_table(folder, page.read_text())))


def results_table(folder: Path, page: str) -> str:
    """What the default preset gave, beside what a longer run did; exhibits not in ``folder`` keep what the page has."""
    there = {
        row[1]: row[0].split(" | ")[2:5]
        for row in re.findall(r"^(\| `(\w+)` \| .*) \|$", page, flags=re.M)
    }
    lines = [
        "| exhibit | the paper says | its number | default | measured | longer | measured | date | core-minutes |",
        "|---|---|---|---|---|---|---|---|--:|",
    ]
    for id, exhibit in exhibits().items():
        if (folder / id / "verdict.json").exists():
            made = load_verdict(folder / id)
            there[id] = [cell(exhibit.paper), made.verdict, cell(made.measured)]
        longer = [""] * 4
        if (record := recorded(id)) is not None:
            told = record.judgement
            minutes = "" if record.core_minutes is None else f"{record.core_minutes:g}"
            longer = [told.verdict, cell(told.measured), record.day, minutes]
        if id in there:
            lines.append(
                " | ".join([f"| `{id}`", cell(exhibit.statement), *there[id], *longer]) + " |"
            )
    return "\n".join(lines)


def sentence(summary: str) -> str:
    """Return a summary as one sentence: its conclusion, or as many of its clauses as are easily read.

    >>> sentence("pairs: Laplace; none: Gaussian. So: under heavy tails")
    'Under heavy tails.'
    """
    _, concluded, conclusion = summary.rpartition(". So: ")
    text = conclusion if concluded else summary
    clauses = text.split("; ")
    shown = clauses[0]
    for clause in clauses[1:]:
        if len(shown) + len(clause) > SENTENCE:
            break
        shown = f"{shown}; {clause}"
    return f"{shown[:1].upper()}{shown[1:]}".rstrip(".") + "."


def exhibit_sections(folder: Path) -> str:
    """The part of docs/reproduce.md that shows each exhibit."""
    lines = []
    for id, exhibit in exhibits().items():
        lines += [
            "",
            f"### {exhibit.title}",
            "",
            f"`joma reproduce {id}`. *{exhibit.statement}*",
            "",
        ]
        is_recorded = exhibit.experiment.is_recorded
        if (folder / id / "verdict.json").exists() and not is_recorded:
            verdict = load_verdict(folder / id)
            lines += [f"**Default: {verdict.verdict}.** {sentence(verdict.summary)}", ""]
        record = recorded(id)
        if record is not None:
            name = "Recorded" if is_recorded else "Longer run"
            judgement = record.judgement
            lines += [
                f"**{name}: {judgement.verdict}.** {sentence(judgement.summary)} (`{record.preset}`, {record.day})",
                "",
            ]
        lines.append(f"![{exhibit.title}](figures/{id}.png)")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
