"""Where data is kept. Nothing large is imported: `joma doctor` asks even where NumPy is broken."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """Return the folder of all that joma caches: $JOMA_CACHE, or where the system keeps caches."""
    if chosen := os.environ.get("JOMA_CACHE"):
        return Path(chosen).expanduser()
    return user_cache_path("joma", appauthor=False)
