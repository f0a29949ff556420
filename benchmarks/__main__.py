"""``make bench``: every benchmark, both sides alternately in one run, as Markdown and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    block,
    bounce,
    charges,
    encoding,
    figure2,
    gauges,
    hierarchy,
    language,
    paths,
    pythia,
    report,
    scan,
    superpose,
    table1,
    watch,
)
from benchmarks._machine import Load, describe

BENCHMARKS = {
    "figure2": figure2.run,
    "bounce": bounce.run,
    "gauges": gauges.run,
    "paths": paths.run,
    "watch": watch.run,
    "pythia": pythia.run,
    "charges": charges.run,
    "hierarchy": hierarchy.run,
    "encoding": encoding.run,
    "language": language.run,
    "table1": table1.run,
    "superpose": superpose.run,
    "scan": scan.run,
    "report": report.run,
    "block": block.run,
}


def main() -> None:
    """Run the chosen benchmarks and write ``docs/benchmarks.md`` and ``docs/benchmarks.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all by default"
    )
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    arguments.out.mkdir(exist_ok=True)
    record = arguments.out / "benchmarks.json"
    measured: dict[str, Any] = {}
    if record.exists():
        measured = json.loads(record.read_text())["benchmarks"]
    failed = []
    for name in arguments.names or BENCHMARKS:
        print(f"{name} …", file=sys.stderr, flush=True)
        load = Load()
        try:
            rows = BENCHMARKS[name]()
        except Exception as error:  # the others are worth having all the same
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(name)
            continue
        measured[name] = {"machine": describe(load), "rows": rows}
        record.write_text(json.dumps({"benchmarks": measured}, indent=2) + "\n")
    page = markdown(measured)
    (arguments.out / "benchmarks.md").write_text(page)
    print(page)
    sys.exit(1 if failed else 0)


INTRODUCTION = """\
# Benchmarks

`make bench` measures all of them, `python -m benchmarks NAME` one. All sides take turns in one run;
times are medians. They depend on the machine. The ratio says how many times as long the other side
takes. Below each name is the state of the machine: it is busy if other programs took more than a
tenth of a processor meanwhile. Times by the clock are too long then, on both sides.
"""
COLUMNS = """\
| what | joma | against | time | time | ratio | accuracy, memory |
|---|---|---|--:|--:|--:|---|"""


def markdown(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page: a table per benchmark, with the state of the machine."""
    sections = [INTRODUCTION]
    for name in BENCHMARKS:
        if name in measured:
            table = "\n".join([COLUMNS, *_lines(measured[name]["rows"])])
            sections.append(f"## {name}\n\n{measured[name]['machine']}\n\n{table}\n")
    return "\n".join(sections)


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        cells = [
            row["what"],
            row["joma"],
            row["against"],
            f"{row['joma_seconds']:.3g} s",
            f"{row['against_seconds']:.3g} s",
            f"**{row['ratio']:.3g} ×**",
            row["accuracy"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
