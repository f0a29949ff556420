"""`joma.watch` in trainers: `joma.integrations.transformers`, `joma.integrations.lightning`.

Each module needs its library, and is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"joma.integrations.{name}")
    raise AttributeError(
        f"module 'joma.integrations' has no attribute {name!r}; it has {', '.join(__all__)}"
    )


def __dir__() -> list[str]:
    return list(__all__)
