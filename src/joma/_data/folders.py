"""Where data is kept. Nothing is imported here: `joma doctor` asks even where NumPy is broken."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of all that joma caches."""
    if chosen := os.environ.get("JOMA_CACHE"):
        return Path(chosen).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "joma"
