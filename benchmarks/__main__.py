"""``make bench``: every benchmark, both sides alternately in one run, as a Markdown table and JSON."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

from benchmarks import bounce, encoding, figure2, gauges, hierarchy, table1, watch

BENCHMARKS = {
    "figure2": figure2.run,
    "bounce": bounce.run,
    "gauges": gauges.run,
    "watch": watch.run,
    "hierarchy": hierarchy.run,
    "encoding": encoding.run,
    "table1": table1.run,
}


def main() -> None:
    """Run the chosen benchmarks and write ``docs/benchmarks.md`` and ``docs/benchmarks.json``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    rows = [row for name in arguments.names or BENCHMARKS for row in BENCHMARKS[name]()]
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`: both sides alternately in one run, medians. Times depend on the machine; the ratio is "
        "what counts.",
        "",
        "| what | joma | against | time | time | ratio | accuracy |",
        "|---|---|---|--:|--:|--:|---|",
    ]
    lines += [
        f"| {r['what']} | {r['joma']} | {r['against']} | {r['joma_seconds']:.3g} s | {r['against_seconds']:.3g} s "
        f"| **{r['ratio']:.3g} ×** | {r['accuracy']} |"
        for r in rows
    ]
    arguments.out.mkdir(exist_ok=True)
    (arguments.out / "benchmarks.md").write_text("\n".join(lines) + "\n")
    record = {"machine": f"{platform.machine()}, Python {platform.python_version()}", "rows": rows}
    (arguments.out / "benchmarks.json").write_text(json.dumps(record, indent=2) + "\n")
    print("\n".join(lines[4:]))


if __name__ == "__main__":
    main()
