"""``make figures``: the pictures and tables of README and docs, made again by the program itself.

Makes the README's pictures of `joma demo`, runs all exhibits at the default preset, copies their pictures to
``docs/figures``, and writes the table of claims into ``docs/claims.md``, those that differ from the paper into
``docs/errata.md``, the index from the paper to the code into ``docs/paper-index.md``, and the exhibits' results, default
and recorded, into ``docs/results.md`` and the fields of all pages (``docs/_build/facts.py``). The part ``pages`` writes the
table of commands into ``docs/commands.md`` and the README's first parts into ``docs/index.md``.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from joma import Run
from joma._show.pages.plot import plot
from joma._train.simulate import simulate
from joma.paper.claims import check, claims
from joma.paper.exhibits import exhibits
from joma.paper.exhibits.runner import Entry, ExhibitObserver, Runner

ROOT = Path(__file__).parent.parent
PARTS = ["architecture", "demo", "pictures", "reading", "claims", "tables", "pages"]
sys.path.insert(0, str(ROOT / "docs/_build"))

import claim_pages  # noqa: E402
import command_page  # noqa: E402
import contrasted  # noqa: E402
import dataflow  # noqa: E402
import demo_pictures  # noqa: E402
import facts  # noqa: E402
import found  # noqa: E402
import front_page  # noqa: E402
import imports  # noqa: E402
import paper_index  # noqa: E402
import reading  # noqa: E402
import results  # noqa: E402
from marks import between  # noqa: E402


class Printed(ExhibitObserver):
    """Print each exhibit that is done."""

    def finished(self, entry: Entry) -> None:  # noqa: D102
        print(entry.id, entry.verdict, flush=True)


def pictures(folder: Path, keep: bool) -> None:
    """One PNG per exhibit, and the one of ``joma simulate``; ``keep`` takes what is there."""
    (ROOT / "docs/figures").mkdir(exist_ok=True)
    all_exhibits = list(exhibits().values())
    runner = Runner(
        all_exhibits,
        out=folder,
        force=not keep,
        observer=Printed(),
    )
    for outcome in runner.run().outcomes:
        if outcome.error:
            raise SystemExit(f"{outcome.exhibit.id}: {outcome.error}")
        if outcome.has_run:
            target = ROOT / "docs/figures" / f"{outcome.exhibit.id}.png"
            shutil.copy(outcome.path / "figure.png", target)
    members = [Run(path) for path in Run(folder / "fig6").members]
    trained = next(run for run in members if run.info["config"]["layers"] == 2)
    plot(trained.path, folder / "watch-figure")
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
        claim_tables()
    if "tables" in chosen:
        tables(folder)
        theory_table()
    if "pages" in chosen or "tables" in chosen:
        pages()


def architecture() -> None:
    """The pictures of data flow and imports, and the table of rooms."""
    (ROOT / "docs/figures/dataflow.svg").write_text(dataflow.svg())
    (ROOT / "docs/figures/imports.svg").write_text(imports.svg())
    page = ROOT / "docs/architecture.md"
    page.write_text(between(page.read_text(), "rooms", imports.table()))


def claim_tables() -> None:
    """Claims, errata and the index of the paper."""
    checked = [check(claim) for claim in claims()]
    wrong = [result.id for result in checked if not result.ok]
    if wrong:
        raise SystemExit(f"not written, since these claims are in error: {', '.join(wrong)}")
    (ROOT / "docs/claims.md").write_text(claim_pages.full_table(checked))
    (ROOT / "docs/errata.md").write_text(claim_pages.errata(checked))
    (ROOT / "docs/galore.md").write_text(claim_pages.galore(checked))
    index = ROOT / "docs/paper-index.md"
    by_claim = {result.id: result.verdict for result in checked}
    index.write_text(paper_index.page(by_claim, facts.verdicts()))


def pages() -> None:
    """The table of commands, and the front page from the README: this computes nothing."""
    page = ROOT / "docs/commands.md"
    page.write_text(between(page.read_text(), "commands", command_page.table()))
    index = ROOT / "docs/index.md"
    index.write_text(front_page.filled(index.read_text(), (ROOT / "README.md").read_text()))


def theory_table() -> None:
    """The tables of linear against nonlinear nodes."""
    page = ROOT / "docs/theory.md"
    text = between(page.read_text(), "contrast", contrasted.table())
    page.write_text(between(text, "contrast-labels", contrasted.label_table()))


def tables(folder: Path) -> None:
    """The guide to the exhibits, and their results."""
    facts.store(results.findings(folder))
    guide = ROOT / "docs/reproduce.md"
    guide.write_text(between(guide.read_text(), "exhibits", results.sections(facts.findings())))
    page = ROOT / "docs/results.md"
    page.write_text(between(page.read_text(), "results", results.table(facts.findings())))
    readme = ROOT / "README.md"
    readme.write_text(found.filled(readme.read_text()))
    index = ROOT / "docs/paper-index.md"
    index.write_text(paper_index.with_verdicts(index.read_text(), facts.verdicts()))
    facts.fill_all()


if __name__ == "__main__":
    main()
