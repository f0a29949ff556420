"""Measure all libraries, each in a process of its own, and write docs/watch-families.md.

python -m benchmarks.families.page --python .venv-families/bin/python --folders .venv-families
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.families.libraries import LIBRARIES, Coverage

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "watch-families.md"
FOLDERS = {"timm": "vision", "vit-pytorch": "vision", "torchtune": "tune", "torchtitan": "titan"}
LIMIT = 2 * 60 * 60  # seconds for one library
MEASURED = ("right", "layer only", "in part", "refused", "explained otherwise", "wrong")
HEAD = (
    "# Families and call styles\n\n"
    "Made by `make families`: small random models of public libraries under [a watch](watch.md). Their entropy per "
    "head is compared with brute force in float64, and the largest difference over layers and heads is given in nats. "
    "The truth is what the model itself returns with `output_attentions=True` (a), or what the harness records of its "
    "queries, keys and scores (r). Float32 counts as right up to 1e-5 and bfloat16 up to 1e-2. *Layer only* means that "
    "the layer's mean is right and its heads are not certain; *refused* is followed by the code of the reason. Each row "
    "also asks `joma.explain`: *explained otherwise* means that its heads, padded queries or refusals are not those of "
    "the watch and of the truth.\n"
)


@dataclass(frozen=True)
class Results:
    """Rows, and which part of each library they cover.

    Attributes:
        rows: as they were printed.
        coverages: of the libraries that ran to the end of their time.
        stopped: libraries that did not.
    """

    rows: Sequence[dict[str, Any]]
    coverages: Sequence[Coverage] = ()
    stopped: Sequence[str] = ()


def main() -> None:
    """Run the libraries that are asked for, and write the page from all results there are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families.page", description=__doc__)
    parser.add_argument("--python", default=".venv-families/bin/python")
    parser.add_argument("--folders", type=Path, default=Path(".venv-families"))
    parser.add_argument("--results", type=Path, default=Path("runs/families"))
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of processor time for each library"
    )
    parser.add_argument(
        "--only-write", action="store_true", help="write the page from earlier results"
    )
    parser.add_argument("libraries", nargs="*", help=f"{', '.join(LIBRARIES)}; all by default")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    if not arguments.only_write:
        for library in arguments.libraries or LIBRARIES:
            _run(library, arguments)
    PAGE.write_text(text_of(read(arguments.results)), encoding="utf-8")
    print(PAGE)


def _run(library: str, arguments: argparse.Namespace) -> None:
    paths = [str(ROOT / "src"), str(ROOT)]
    if library in FOLDERS:
        paths.insert(0, str((arguments.folders / FOLDERS[library]).resolve()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [arguments.python, "-m", "benchmarks.families", library]
    command += ["--minutes", str(arguments.minutes)]
    print(f"{library} …", flush=True)
    with (
        (arguments.results / f"{library}.jsonl").open("w") as out,
        (arguments.results / f"{library}.log").open("w") as log,
    ):
        try:
            subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=log,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"{library}: stopped after {LIMIT} s")


def read(folder: Path) -> Results:
    """Read all results; other lines that a library printed are left out."""
    rows: list[dict[str, Any]] = []
    coverages: list[Coverage] = []
    stopped: list[str] = []
    for library in LIBRARIES:
        path = folder / f"{library}.jsonl"
        if not path.exists():
            continue
        is_complete = False
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith('{"library"') and line.endswith("}"):
                rows.append(json.loads(line))
            elif line.startswith('{"coverage"') and line.endswith("}"):
                coverages.append(Coverage(**json.loads(line)))
                is_complete = True
        if not is_complete:
            stopped.append(library)
    return Results(rows, coverages, stopped)


def text_of(results: Results) -> str:
    """Return the page: counts, a table per library, and what is not in the counts."""
    measured = []
    for row in results.rows:
        if row["variant"] != "training" and row["verdict"] in MEASURED:
            measured.append(row)
    counts = Counter(row["verdict"] for row in measured)
    models = {(row["library"], row["model"]) for row in measured}
    tally = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MEASURED if counts[verdict])
    parts = [HEAD, *_coverage_notes(results)]
    parts.append(f"{len(measured)} variants of {len(models)} models: {tally}.\n")
    for library in dict.fromkeys(row["library"] for row in measured):
        parts.append(_table(library, [row for row in measured if row["library"] == library]))
    parts += _trainings(results.rows)
    parts += _gaps(results.rows)
    parts += _not_built(results.rows, models)
    return "\n".join(parts) + "\n"


def _coverage_notes(results: Results) -> list[str]:
    """Return what is to be known before the numbers: samples, and libraries that are missing."""
    notes = []
    samples = []
    for coverage in results.coverages:
        if coverage.measured < coverage.available:
            samples.append(
                f"{coverage.measured} of {coverage.available} models of {coverage.coverage}"
            )
    if samples:
        notes.append(
            "**Not all models were measured.** The time for a library was limited, and its models "
            "are taken in a random order with a fixed seed. The tables show "
            f"{', '.join(samples)}. `make families MINUTES=inf` measures all.\n"
        )
    if results.stopped:
        notes.append(
            f"**Some runs did not come to their end:** {', '.join(results.stopped)}. Their rows "
            "are a part of what should be here.\n"
        )
    ran = {coverage.coverage for coverage in results.coverages} | set(results.stopped)
    missing = [library for library in LIBRARIES if library not in ran]
    if missing:
        notes.append(f"**Not run:** {', '.join(missing)}.\n")
    if len({coverage.code for coverage in results.coverages}) > 1:
        notes.append(
            "**The libraries were measured with different versions of the code.** `make families` "
            "measures them all with the same one.\n"
        )
    return notes


def _trainings(rows: Sequence[dict[str, Any]]) -> list[str]:
    trainings = [row for row in rows if row["variant"] == "training"]
    if not trainings:
        return []
    lines = ["## Training with a watch\n\n| library | training | parameters |\n|---|---|---|"]
    lines += [f"| {row['library']} | {row['model']} | {row['verdict']} |" for row in trainings]
    return lines


def _gaps(rows: Sequence[dict[str, Any]]) -> list[str]:
    gaps = [row for row in rows if row["verdict"] == "not compared"]
    if not gaps:
        return []
    lines = ["\n## Compared in part\n\nThese rows are not counted:\n"]
    for model in sorted({row["model"] for row in gaps}):
        of_model = [row for row in gaps if row["model"] == model]
        variants = "; ".join(row["variant"] for row in of_model)
        reasons = "; ".join(dict.fromkeys(row["detail"] for row in of_model))
        lines.append(f"- {model} ({variants}): {reasons}.")
    return lines


def _not_built(rows: Sequence[dict[str, Any]], measured: set[tuple[str, str]]) -> list[str]:
    """Return the models of which no variant ran, each with the first line of its error."""
    reasons: dict[tuple[str, str], str] = {}
    for row in rows:
        model = (row["library"], row["model"])
        is_training = row["variant"] == "training"  # these have a table of their own
        if row["verdict"] == "not built" and not is_training and model not in measured:
            reasons.setdefault(model, row["detail"].partition("\n")[0])
    if not reasons:
        return []
    lines = ["\n## Not built\n\nThese did not run with tiny settings, and count as nothing:\n"]
    for (library, model), reason in sorted(reasons.items()):
        lines.append(f"- {library}: {model} (`{reason.replace('`', '')}`)")
    return lines


def _table(library: str, rows: list[dict[str, Any]]) -> str:
    """Return one row per model, and one column per kernel and type."""
    columns = sorted({_column(row) for row in rows}, reverse=True)
    lines = [
        f"## {library}\n",
        f"| model | truth | {' | '.join(columns)} |",
        "|---|---|" + "---|" * len(columns),
    ]
    # Models were measured in a random order.
    for model in sorted({row["model"] for row in rows}, key=str.lower):
        of_model = [row for row in rows if row["model"] == model]
        truth = ", ".join(sorted({row["truth"][:1] for row in of_model}))
        cells = [_cell([row for row in of_model if _column(row) == column]) for column in columns]
        lines.append(f"| {model} | {truth} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _column(row: dict[str, Any]) -> str:
    kernel, dtype, _ = row["variant"].split(", ")
    return f"{kernel}, {dtype}"


def _cell(rows: list[dict[str, Any]]) -> str:
    """Unpadded and padded variants of one kernel and type; one entry if they agree."""
    if not rows:
        return "–"
    results: dict[str, list[str]] = {}
    for row in rows:
        padding = row["variant"].split(", ")[2]
        verdict = row["verdict"]
        if verdict in ("refused", "in part", "layer only"):
            verdict += f" ({row['code']})"
        results.setdefault(verdict, []).append(padding)
    entries = []
    for verdict, paddings in results.items():
        error = max(row["error"] for row in rows if row["verdict"] == verdict.partition(" (")[0])
        size = f" ({error:.0e})" if verdict in ("right", "wrong") else ""
        where = "" if len(results) == 1 else f"{', '.join(paddings)}: "
        entries.append(f"{where}{verdict}{size}")
    return "; ".join(entries)


if __name__ == "__main__":
    main()
