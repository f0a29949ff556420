"""Extras of the installation: which are installed, and one sentence about one that is missing.

The core of joma watches and scans models. Everything else is an extra, as in `pyproject.toml`.
Needs the standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

_THEORY = ("scipy", "networkx")
_REPORT = ("altair", "vl_convert", "jinja2", "latex2mathml")

# Extra -> the modules that joma imports of it.
MODULES: dict[str, tuple[str, ...]] = {
    "theory": _THEORY,
    "report": _REPORT,
    "paper": _THEORY + _REPORT,
    "hf": ("transformers", "huggingface_hub", "accelerate", "datasets", "tokenizers"),
    "gguf": ("gguf",),
    "lightning": ("lightning",),
    "ray": ("ray",),
}


class MissingExtra(ImportError):
    """A part of joma needs an extra that is not installed."""


def pip_command(*extras: str) -> str:
    """Return the command that installs extras.

    >>> pip_command("report")
    "pip install 'joma[report]'"
    """
    return f"pip install 'joma[{','.join(extras)}]'"


def missing_modules(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed; none of them is imported."""
    return [name for name in MODULES[extra] if not _is_installed(name)]


def has(extra: str) -> bool:
    """True if all modules of an extra are installed."""
    return not missing_modules(extra)


def require(extra: str, subject: str) -> None:
    """Raise `MissingExtra` unless an extra is installed.

    Arguments:
        extra: a name in `MODULES`.
        subject: what needs it, in the singular: the sentence starts with it.
    """
    missing = missing_modules(extra)
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise MissingExtra(
            f"{subject} needs {_joined(missing)}, which {are} not installed: {pip_command(extra)}"
        )


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None  # None: somebody forbids to import it
    try:
        return find_spec(module) is not None
    except ImportError:  # a finder that refuses
        return False


def _joined(names: Sequence[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
