"""The config of a run: all that decides its outcome, compared when it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joma._runs.files import plain
from joma._runs.folder import RunError


def check_config(path: Path, old: Mapping[str, object], asked: Mapping[str, object]) -> None:
    """Refuse to go on with the run in ``path`` if another config is asked for."""
    differences = config_differences(old, asked)
    if differences:
        raise RunError(
            f"{path} was made with another config ({'; '.join(differences)}): "
            "ask for the same config or choose another folder"
        )


def config_differences(old: Mapping[str, object], asked: Mapping[str, object]) -> list[str]:
    """Return a phrase for each setting that differs between a run's config and another one."""
    return _differences(old, plain(asked, "config"), "")


def _differences(old: Any, new: Any, key: str) -> list[str]:
    """Return a phrase for each key below ``key`` whose value differs, with both values."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old == new:
            return []
        return [f"{key}: {old!r} in the run, {new!r} asked"]
    differences = []
    for name in dict.fromkeys((*old, *new)):
        name_in_config = f"{key}.{name}" if key else name
        if name not in new:
            differences.append(f"{name_in_config}: {old[name]!r} in the run, not asked")
        elif name not in old:
            differences.append(f"{name_in_config}: not in the run, {new[name]!r} asked")
        else:
            differences += _differences(old[name], new[name], name_in_config)
    return differences
