"""Fingerprints of stored results: a hash of everything that decides their numbers.

It covers joma's source, the source of the user's modules, the versions of the libraries, and the
settings. Packages that only draw or print (`UNSEEN`) decide no number and are left out. Imports are not
followed: all of joma's source is hashed, and all of the user's package.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

UNSEEN = ("_show", "cli")
PACKAGES = ("numpy", "scipy", "pandas", "torch", "transformers", "tokenizers")
_JOMA = Path(__file__).parents[1]
_LIBRARIES = ("site-packages", "dist-packages")


def fingerprint(modules: Iterable[str], settings: Any = None) -> str:
    """Return the hash of everything that decides a result.

    Arguments:
        modules: names of the modules that measure and judge. A module without a file, such as that
            of a notebook, cannot be checked. It gives a new fingerprint every time, so that its
            results never count as done.
        settings: anything that JSON can hold.
    """
    digest = hashlib.blake2b(digest_size=12)
    digest.update(json.dumps([_versions(), settings], sort_keys=True).encode())
    digest.update(_joma_digest())
    for name in sorted(modules):
        digest.update(f"{name};".encode())
        if name.partition(".")[0] != "joma":
            digest.update(_user_digest(name))
    return digest.hexdigest()


@lru_cache(maxsize=1)
def _joma_digest() -> bytes:
    """Return the hash of joma's source, read once per process."""
    files = []
    for file in _python_files(_JOMA):
        if file.relative_to(_JOMA).parts[0] not in UNSEEN:
            files.append(file)
    return _digest_of(files, _JOMA)


def _user_digest(module: str) -> bytes:
    """Return the hash of the user's code around a module, or random bytes if it has no file."""
    file_name = getattr(sys.modules.get(module), "__file__", None)
    if file_name is None or not os.path.isfile(file_name):
        return os.urandom(16)
    file = Path(file_name)
    folder = file.parent
    is_package = (folder / "__init__.py").is_file()
    if is_package:
        while (folder.parent / "__init__.py").is_file():
            folder = folder.parent
        files = set(_python_files(folder))
    elif folder.name in _LIBRARIES:
        # An installed module without a package: its neighbours belong to other projects.
        files = set()
    else:
        # A script, with the modules next to it.
        files = set(folder.glob("*.py"))
    return _digest_of(files | {file}, folder)


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder.

    Subfolders without any are not searched further: they hold data, which may be many files.
    """
    for parent, folders, names in os.walk(folder):
        python_names = [name for name in names if name.endswith(".py")]
        for name in python_names:
            yield Path(parent, name)
        searched = []
        if python_names:
            for name in folders:
                if not name.startswith(".") and name not in _LIBRARIES:
                    searched.append(name)
        folders[:] = searched  # os.walk goes on with these


def _digest_of(files: Iterable[Path], folder: Path) -> bytes:
    """Return the hash of the files' places below a folder and of their content."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        content = b""  # a broken link counts by its name
        if file.is_file():
            content = file.read_bytes()
        digest.update(f"{os.path.relpath(file, folder)} {len(content)};".encode())
        digest.update(content)
    return digest.digest()


@lru_cache(maxsize=1)
def _versions() -> dict[str, str | None]:
    """Return the versions of Python, whose documentation is a corpus, and of the numeric libraries."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
