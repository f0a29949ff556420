"""Both sides alternately in one run, so that whatever else the machine does hits both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def alternate(one: Callable[[], Any], other: Callable[[], Any], rounds: int) -> tuple[float, float, Any, Any]:
    """Median seconds of both over alternating rounds (after one warm-up each), and their last results."""
    times: tuple[list[float], list[float]] = ([], [])
    results = [one(), other()]
    for _ in range(rounds):
        for n, function in enumerate((one, other)):
            start = time.perf_counter()
            results[n] = function()
            times[n].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1]), results[0], results[1]
