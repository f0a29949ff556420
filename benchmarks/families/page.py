"""Measure all libraries, each in a process of its own, and write docs/watch-families.md.

python -m benchmarks.families.page --python .venv-families/bin/python --folders .venv-families
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.families.__main__ import LIBRARIES

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "watch-families.md"
FOLDERS = {"timm": "vision", "vit-pytorch": "vision", "torchtune": "tune", "torchtitan": "titan"}
ASSEMBLED = (
    "**This page is not one complete run.** It was assembled from results of earlier runs: some libraries were stopped "
    "by a time limit, and rows may have been measured with different versions of the code. `make families` replaces "
    "it.\n"
)
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


def main() -> None:
    """Run the libraries that are asked for, and write the page from all results there are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families.page", description=__doc__)
    parser.add_argument("--python", default=".venv-families/bin/python")
    parser.add_argument("--folders", type=Path, default=Path(".venv-families"))
    parser.add_argument("--results", type=Path, default=Path("runs/families"))
    parser.add_argument(
        "--only-write", action="store_true", help="write the page from earlier results"
    )
    parser.add_argument("libraries", nargs="*", help=f"{', '.join(LIBRARIES)}; all by default")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    if not arguments.only_write:
        for library in arguments.libraries or LIBRARIES:
            _run(library, arguments.python, arguments.folders, arguments.results)
    rows = [row for path in sorted(arguments.results.glob("*.jsonl")) for row in _read(path)]
    is_assembled = arguments.only_write or bool(arguments.libraries)
    PAGE.write_text(text_of(rows, is_assembled), encoding="utf-8")
    print(PAGE)


def _run(library: str, python: str, folders: Path, results: Path) -> None:
    paths = [str(ROOT / "src"), str(ROOT)]
    if library in FOLDERS:
        paths.insert(0, str((folders / FOLDERS[library]).resolve()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    print(f"{library} …", flush=True)
    with (
        (results / f"{library}.jsonl").open("w") as out,
        (results / f"{library}.log").open("w") as log,
    ):
        command = [python, "-m", "benchmarks.families", library]
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


def _read(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; other lines that a library printed are left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        json.loads(line) for line in lines if line.startswith('{"library"') and line.endswith("}")
    ]


def text_of(rows: list[dict[str, Any]], is_assembled: bool = False) -> str:
    """Return the page: counts, one table per library with a row per model, and what training left unchanged."""
    gaps = [row for row in rows if row["verdict"] == "not compared"]
    trainings = [row for row in rows if row["variant"] == "training"]
    measured = [row for row in rows if row["variant"] != "training" and row["verdict"] in MEASURED]
    counts = Counter(row["verdict"] for row in measured)
    models = {(row["library"], row["model"]) for row in measured}
    tally = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MEASURED if counts[verdict])
    parts = [HEAD]
    if is_assembled:
        parts.append(ASSEMBLED)
    parts += [f"{len(measured)} variants of {len(models)} models: {tally}.\n"]
    libraries = dict.fromkeys(row["library"] for row in measured)
    parts += [
        _table(library, [row for row in measured if row["library"] == library])
        for library in libraries
    ]
    if trainings:
        parts.append(
            "## Training with a watch\n\n| library | training | parameters |\n|---|---|---|"
        )
        parts += [f"| {row['library']} | {row['model']} | {row['verdict']} |" for row in trainings]
    if gaps:
        parts.append(
            "\n## Not compared\n\nThe harness does not know the truth of these rows, and they are not counted:\n"
        )
        for model in dict.fromkeys(row["model"] for row in gaps):
            of_model = [row for row in gaps if row["model"] == model]
            variants = "; ".join(row["variant"] for row in of_model)
            parts.append(f"- {model} ({variants}): {of_model[0]['detail']}.")
    built = {(row["library"], row["model"]) for row in measured}
    others = {
        (row["library"], row["model"]) for row in rows if row["verdict"] == "not built"
    } - built
    names = sorted(f"{library}: {model}" for library, model in others if library not in ("TRL",))
    if names:
        parts.append(
            f"\n## Not built\n\nThese did not run with tiny settings here, and count as nothing: {', '.join(names)}."
        )
    return "\n".join(parts) + "\n"


def _table(library: str, rows: list[dict[str, Any]]) -> str:
    """One row per model, one column per kernel and type."""
    columns = sorted({_column(row) for row in rows}, reverse=True)
    lines = [
        f"## {library}\n",
        f"| model | truth | {' | '.join(columns)} |",
        "|---|---|" + "---|" * len(columns),
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        truth = ", ".join(sorted({row["truth"][:1] for row in mine}))
        cells = [_cell([row for row in mine if _column(row) == column]) for column in columns]
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
