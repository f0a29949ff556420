"""``make bench``: every benchmark, both sides alternately in one run, as a Markdown table and JSON."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks import (
    block,
    bounce,
    charges,
    encoding,
    figure2,
    folders,
    gauges,
    hierarchy,
    language,
    paths,
    report,
    scan,
    superpose,
    table1,
    watch,
)

BENCHMARKS = {
    "figure2": figure2.run,
    "bounce": bounce.run,
    "gauges": gauges.run,
    "paths": paths.run,
    "watch": watch.run,
    "folders": folders.run,
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
    measured: dict[str, Any] = json.loads(record.read_text())["rows"] if record.exists() else {}
    failed = []
    for name in arguments.names or BENCHMARKS:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            measured[name] = BENCHMARKS[name]()
        except Exception as error:  # the others are worth having all the same
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(name)
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        record.write_text(json.dumps({"machine": machine, "rows": measured}, indent=2) + "\n")
    table = markdown([row for name in BENCHMARKS for row in measured.get(name, [])])
    (arguments.out / "benchmarks.md").write_text(table)
    print(table)
    sys.exit(1 if failed else 0)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of all rows."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`: all sides alternately in one run, medians. Times depend on the machine; the ratio is "
        "what counts (how many times as long the other side takes). `python -m benchmarks NAME` measures one again.",
        "",
        "| what | joma | against | time | time | ratio | accuracy, memory |",
        "|---|---|---|--:|--:|--:|---|",
    ]
    lines += [
        f"| {r['what']} | {r['joma']} | {r['against']} | {r['joma_seconds']:.3g} s | {r['against_seconds']:.3g} s "
        f"| **{r['ratio']:.3g} ×** | {r['accuracy']} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
