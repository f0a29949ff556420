"""The folder of a scan or an audit: one config each, numbered where a name is taken."""

from __future__ import annotations

import glob
import itertools
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from joma._runs import RunError
from joma._runs.config import config_differences
from joma._runs.files import plain
from joma._runs.folder import describe, existing


def place_for(path: Path, kind: str, config: Mapping[str, Any]) -> Path:
    """Return the folder for a run of this kind and config: `path`, or one of `path`-2, `path`-3, ….

    That is the folder in which the same config was begun, so that the same call goes on there, or
    else the first that is free. If it is not `path` itself, a line on standard error names it, and
    what is in `path`. A folder with anything else than a run of this kind is refused.
    """
    old = existing(path)
    if old is None:
        return path
    if old["kind"] != kind:
        raise RunError(f"{path} holds {describe(old)}, and no {kind}: choose another folder")
    asked = plain(config, "config")
    if old["config"] == asked:
        return path
    following, is_begun = _following(path, kind, asked)
    differences = "; ".join(config_differences(old["config"], asked))
    verb = "goes to"
    if is_begun:
        verb = "goes on in"
    print(
        f"joma.{kind}: {path} holds the {kind} of another config ({differences}): "
        f"this one {verb} {following}; overwrite=True (--force) replaces the old one",
        file=sys.stderr,
    )
    return following


def _following(path: Path, kind: str, config: Mapping[str, Any]) -> tuple[Path, bool]:
    """Return the numbered folder for this config, and True if a run of it was begun there."""
    if path.name in ("", ".."):  # "." and ".." have no name that a number could be put behind
        path = path.resolve()
    numbers = []
    for entry in path.absolute().parent.glob(f"{glob.escape(path.name)}-*"):
        ending = entry.name.removeprefix(f"{path.name}-")
        if ending.isdecimal() and ending[0] != "0":
            numbers.append(int(ending))
    # A run of the same config goes on where it was begun, also behind folders that are free now.
    for number in sorted(numbers):
        following = path.with_name(f"{path.name}-{number}")
        with suppress(RunError):  # a folder that is not ours
            old = existing(following)
            if old is not None and old["kind"] == kind and old["config"] == config:
                return following, True
    for number in itertools.count(2):
        following = path.with_name(f"{path.name}-{number}")
        with suppress(RunError):
            if existing(following) is None:
                return following, False
    raise AssertionError  # numbers do not end
