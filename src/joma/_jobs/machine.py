"""How many cores and threads there are to share, and how much memory a process has."""

from __future__ import annotations

import os
from pathlib import Path


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(workers: int = 1) -> int:
    """How many threads each of ``workers`` processes should have: OMP_NUM_THREADS, or its share of the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else max(1, cores() // workers)


def memory() -> int:
    """Bytes of memory that this process has now, or had at most where the system tells no more; 0 if not even that."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        try:
            import resource
        except ImportError:
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
