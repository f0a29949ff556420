"""The machine that a benchmark ran on, and how busy other programs kept it meanwhile."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch

# Share of one processor that other programs may take on a quiet machine.
QUIET_SHARE = 0.1


@dataclass(frozen=True)
class _Reading:
    """Seconds: of the clock; that all processors were busy; that this program kept them busy."""

    clock: float
    busy: float | None
    own: float


class Load:
    """How many processors other programs kept busy, from the time that this object was made."""

    def __init__(self) -> None:
        self._start = _read()

    def of_others(self) -> float | None:
        """Return the mean number of processors; None where the system does not say."""
        now = _read()
        if now.busy is None or self._start.busy is None:
            return None
        others = (now.busy - self._start.busy) - (now.own - self._start.own)
        return max(0.0, others / (now.clock - self._start.clock))


def describe(load: Load) -> str:
    """Return the machine and its state in a sentence."""
    threads = torch.get_num_threads()
    machine = (
        f"{_processor()}, {os.cpu_count()} processors; {threads} "
        f"{'thread' if threads == 1 else 'threads'}; Python {platform.python_version()}, "
        f"PyTorch {torch.__version__}"
    )
    others = load.of_others()
    if others is None:
        return f"{machine}. How busy the machine was is not known."
    state = "quiet"
    if others > QUIET_SHARE:
        state = "busy"
    return f"{machine}. The machine was {state}: other programs took {others:.2f} processors."


def _read() -> _Reading:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return _Reading(time.monotonic(), _busy_seconds(), own)


def _busy_seconds() -> float | None:
    """Return for how long processors have worked since the start, summed over all; Linux only."""
    statistics = Path("/proc/stat")
    if not statistics.exists():
        return None
    numbers = [int(field) for field in statistics.read_text().splitlines()[0].split()[1:]]
    user, nice, system = numbers[:3]
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    """Return the model and the instruction set of the processor, as far as they are known."""
    name = platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
