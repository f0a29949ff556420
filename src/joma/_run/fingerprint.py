"""Is a stored result still that of the code? One hash of all that decides its numbers.

These are the source of the modules that measure and judge, of every module of joma and of the user's own that they
import, directly or not, the versions of the libraries, and the settings. What draws or prints (`UNSEEN`) decides no
number and is left out. Imports are read from the source, those inside of functions included: nothing is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

UNSEEN = ("joma._figures", "joma._report", "joma.cli")
PACKAGES = ("numpy", "scipy", "pandas", "torch", "transformers", "tokenizers")
_HOME = str(Path(__file__).parents[2])  # the folder that holds the package joma
_FOR_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)+", re.MULTILINE)
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^(\n]*)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+([\w., \t]+)", re.MULTILINE)
_LAZY = re.compile(r'^[ \t]+"(\w+)": "([\w.]+)",$', re.MULTILINE)  # a table of names that are loaded on first use
_LIBRARIES = ("site-packages", "dist-packages")
_Import = tuple[str, str]  # (module, name in it or "")


def fingerprint(modules: Iterable[str], settings: Any = None) -> str:
    """The hash of what decides a result.

    Arguments:
        modules: names of the modules that measure and judge. One without a file, as a notebook's, cannot be checked:
            it gives another fingerprint every time, so that its results never count as done.
        settings: anything that JSON can hold.
    """
    digest = hashlib.blake2b(digest_size=12)
    digest.update(json.dumps([_versions(), settings], sort_keys=True).encode())
    for name, file in sorted(sources(modules).items()):
        digest.update(f"{name} {_parsed(file)[0]};".encode() if file else os.urandom(8))
    return digest.hexdigest()


def sources(modules: Iterable[str]) -> dict[str, str | None]:
    """The modules and what they import of joma and of their own packages: name -> its file, or None if it has none."""
    files: dict[str, str | None] = {}
    waiting = [(name, *_start(name)) for name in modules]
    while waiting:
        name, file, home = waiting.pop()
        if name in files or name.startswith(UNSEEN):
            continue
        files[name] = file
        if file is not None:
            package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
            needed = {_resolved(_absolute(module, package), part, home, _HOME) for module, part in _parsed(file)[1]}
            waiting += [(target, _file(target, home, _HOME), home) for target in needed if target]
    return files


def _start(name: str) -> tuple[str | None, str]:
    """The file of a module, and the folder of the user's code: of an installed package, the package's own."""
    if name.partition(".")[0] == "joma":
        return _file(name, _HOME, _HOME), _HOME
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not os.path.exists(file):
        return None, _HOME
    above = name.count(".") + file.endswith("__init__.py")
    home = Path(file).parents[above]
    return file, str(home / name.partition(".")[0] if home.name in _LIBRARIES else home)


@lru_cache(maxsize=8192)
def _file(name: str, home: str, of_joma: str) -> str | None:
    """The file of a module, of joma or below ``home``; None for libraries."""
    top, *below = name.split(".")
    root = os.path.join(of_joma if top == "joma" else home, top)
    if top != "joma" and os.path.basename(os.path.dirname(home)) in _LIBRARIES:
        root = home if os.path.basename(home) == top else ""
    path = os.path.join(root, *below)
    candidates = (f"{path}.py", os.path.join(path, "__init__.py"))
    return next((file for file in candidates if os.path.isfile(file)), None)


def _absolute(module: str, package: str) -> str:
    """A relative import, as seen from ``package``."""
    below = module.lstrip(".")
    dots = len(module) - len(below)
    if not dots:
        return module
    above = package.split(".")
    return ".".join([*above[: len(above) - dots + 1], *([below] if below else [])])


@lru_cache(maxsize=8192)
def _resolved(module: str, part: str, home: str, of_joma: str) -> str | None:
    """The module that ``from module import part`` needs: through a package's ``__init__`` to where a name is made."""
    if part and _file(f"{module}.{part}", home, of_joma):
        return f"{module}.{part}"
    file = _file(module, home, of_joma)
    if part and file and file.endswith("__init__.py"):
        for source, name in _parsed(file)[2]:
            if name == part:
                return _resolved(_absolute(source, module), part, home, of_joma)
    return module if file else None


def _parsed(file: str) -> tuple[str, tuple[_Import, ...], tuple[_Import, ...]]:
    status = os.stat(file)
    return _read(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8192)
def _read(file: str, changed: int, size: int) -> tuple[str, tuple[_Import, ...], tuple[_Import, ...]]:
    """The hash of a file, what it imports when it runs, and the names that it hands on from other modules."""
    raw = Path(file).read_bytes()
    text = _FOR_TYPES.sub("", raw.decode())
    imports: list[_Import] = []
    for clause in ",".join(_IMPORT.findall(text)).split(","):
        module, _, alias = clause.strip().partition(" as ")
        # `import joma` needs what is used of it: joma.watch
        used = re.findall(rf"\b{alias or module}\.(\w+)", text) if module == "joma" else ()
        imports += [(module, part) for part in ("", *used)]
    for module, names in _FROM.findall(text):
        listed = re.sub(r"#.*", "", names).strip("() \t\n").split(",")
        imports += [(module, name.split()[0]) for name in listed if name.strip()]
    handed_on = imports + [(module, name) for name, module in _LAZY.findall(text)]
    return hashlib.blake2b(raw, digest_size=16).hexdigest(), tuple(dict.fromkeys(imports)), tuple(handed_on)


@lru_cache(maxsize=1)
def _versions() -> dict[str, str | None]:
    """Of Python, whose documentation is a corpus, and of the libraries that compute."""

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}}
