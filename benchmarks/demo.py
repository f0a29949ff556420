"""``python -m benchmarks.demo``: `joma demo` on five seeds: time from the command to the page, dip and rise.

The settings were looked for on seeds 10 to 14; these are 0 to 4. Writes the table of ``docs/getting-started.md``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from joma import Run
from joma._runs.curve import ENTROPY, Curve, describe_all

SEEDS = range(5)
DIP, RISE = 0.3, 0.2  # nats, to be reached on every seed
PAGE = Path(__file__).parent.parent / "docs/getting-started.md"
sys.path.insert(0, str(PAGE.parent / "_build"))

from marks import between  # noqa: E402


def measure(seed: int, folder: Path) -> tuple[Curve, float, float]:
    """The curve of the attention entropy, and the seconds of wall clock and of processor until the page is there."""
    out, before, began = folder / f"seed-{seed}", os.times(), time.perf_counter()
    command = [sys.executable, "-m", "joma", "demo", "--no-open", f"--seed={seed}", f"--out={out}"]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        env={**os.environ, "JOMA_CACHE": str(folder / "cache")},
    )
    wall, after = time.perf_counter() - began, os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    frame = Run(out).frame()
    (curve,) = describe_all(frame[frame.gauge == "entropy"], ENTROPY).values()
    return curve, wall, used


def main() -> None:
    """Measure, write the table, and exit with 1 if a seed misses the figure."""
    lines = [
        "| seed | start | trough | end | dip | rise | seconds | of processor |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            curve, wall, used = measure(seed, Path(folder))
            if curve.depth < DIP or curve.bounce < RISE:
                missed.append(seed)
            lines.append(
                f"| {seed} | {curve.start:.2f} | {curve.trough:.2f} (step {curve.trough_step}) | {curve.end:.2f} "
                f"| {curve.depth:.2f} | {curve.bounce:.2f} | {wall:.0f} | {used:.0f} |"
            )
            print(lines[-1], flush=True)
    PAGE.write_text(between(PAGE.read_text(), "demo", "\n".join(lines)))
    reached = len(SEEDS) - len(missed)
    print(f"dip of {DIP} and rise of {RISE} nats on {reached} of {len(SEEDS)} seeds")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
