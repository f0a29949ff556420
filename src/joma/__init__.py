"""joma: the training dynamics of Transformers (Tian et al., JoMA, ICLR 2024).

The public API, loaded on first use so that ``import joma`` stays fast.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> the private module that defines it
_API = {
    "Run": "joma._run",
}

__all__ = ["Run", "__version__", "theory"]


def __getattr__(name: str) -> Any:
    if name in _API:
        value = getattr(importlib.import_module(_API[name]), name)
    elif name == "theory":
        value = importlib.import_module("joma.theory")
    else:
        raise AttributeError(f"module 'joma' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
