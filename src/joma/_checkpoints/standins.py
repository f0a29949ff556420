"""Metadata in files of `torch.save`: what is no weight gets an inert stand-in, and no code of it runs.

Lightning and Megatron put arguments (`argparse.Namespace`), paths and configs beside the weights. PyTorch's loader
refuses names that it does not know, unless it is told what to use for them: here it is told an empty class. A file that
asks for functions that no metadata needs (`os.system`, `builtins.eval`) is refused, though they would not run either.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_PROGRAMS = {
    "_io", "_operator", "_pickle", "_thread", "asyncio", "bdb", "builtins", "cProfile", "cloudpickle", "code",
    "codeop", "commands", "concurrent", "ctypes", "dill", "imaplib", "importlib", "inspect", "io", "joblib",
    "linecache", "marshal", "multiprocessing", "nt", "ntpath", "operator", "os", "pdb", "pickle", "pip", "platform",
    "posix", "posixpath", "profile", "pty", "pydoc", "runpy", "setuptools", "shelve", "shutil", "signal", "site",
    "smtplib", "socket", "ssl", "subprocess", "sys", "tempfile", "test", "threading", "timeit", "trace", "urllib",
    "venv", "webbrowser", "zipimport",
}  # fmt: skip
_ALLOWED = {
    "io.BytesIO",
    "_io.BytesIO",
    "builtins.object",
    "builtins.type",
    "builtins.frozenset",
    "builtins.slice",
}


class StandIn:
    """Stands for an object of a class that the file names; keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Containers are plain ones, since PyTorch fills no others."""
        if cls.__name__.endswith(("dict", "Dict")):
            return {}
        return [] if cls.__name__.endswith(("list", "List")) else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        """Nothing."""


@contextmanager
def stand_ins(file: Path | io.BytesIO) -> Iterator[list[str]]:
    """While it lasts, `torch.load` takes the metadata of the file; gives the names that have stand-ins."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # no zip, or damaged: torch.load will say so
        names = []
    if isinstance(file, io.BytesIO):
        file.seek(0)
    if any(name.split(".")[0] in _PROGRAMS and name not in _ALLOWED for name in names):
        names = []
    with torch.serialization.safe_globals([(type(name, (StandIn,), {}), name) for name in names]):
        yield names
