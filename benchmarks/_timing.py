"""All sides alternately in one run, so that whatever else the machine does hits all of them; and peak memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def alternate(*functions: Callable[[], Any], rounds: int) -> list[tuple[float, Any]]:
    """(median seconds, last result) of each over alternating rounds, after one warm-up each."""
    times: list[list[float]] = [[] for _ in functions]
    results = [function() for function in functions]
    for _ in range(rounds):
        for n, function in enumerate(functions):
            start = time.perf_counter()
            results[n] = function()
            times[n].append(time.perf_counter() - start)
    return [(statistics.median(t), result) for t, result in zip(times, results, strict=True)]


def ratio(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int
) -> tuple[float, float, float]:
    """Median seconds of the processor for both, alternately, and the median of ratios, which load does not disturb."""
    first(), second()
    pairs = []
    for _ in range(rounds):
        start = time.process_time()
        first()
        middle = time.process_time()
        second()
        pairs.append((middle - start, time.process_time() - middle))
    times = [a / b for a, b in pairs]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(times),
    )


_MEASURE = """
import sys
{setup}
def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) / 1024
before = memory("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
{run}
print(memory("VmHWM:") - before)
"""


def peak_memory(setup: str, run: str) -> float | None:
    """MiB by which the resident memory of a fresh process peaks while ``run`` runs after ``setup``; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    code = _MEASURE.format(setup=setup, run=run)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def row(
    what: str,
    joma: str,
    against: str,
    seconds: float,
    other: float,
    accuracy: str = "",
    **more: Any,
) -> dict[str, Any]:
    """One line of the table; the ratio says how many times faster the left side is."""
    return {
        "what": what, "joma": joma, "against": against, "joma_seconds": seconds, "against_seconds": other,
        "ratio": other / seconds, "accuracy": accuracy, **more,
    }  # fmt: skip
