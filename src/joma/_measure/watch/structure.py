"""What became of the structure of a watched model, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from joma.models.matrices import Matrix


def describe(
    before: Mapping[str, Iterable[Matrix]], after: Mapping[str, Iterable[Matrix]],
    modules_before: Mapping[nn.Module, str], modules_after: Mapping[nn.Module, str],
) -> list[str]:  # fmt: skip
    """Return what changed, in words: modules that are new, gone or replaced, and matrices that are measured now."""
    changes = []
    old = {name: module for module, name in modules_before.items()}
    new = {name: module for module, name in modules_after.items()}
    groups = {
        "removed": [name for name in old if name not in new],
        "added": [name for name in new if name not in old],
        "replaced": [name for name in new if name in old and new[name] is not old[name]],
    }
    for verb, names in groups.items():
        outermost = [name for name in names if not any(_is_inside(name, other) for other in names)]
        if outermost:
            changes.append(f"{verb}: {shorten(outermost)}")
    for part in dict.fromkeys((*before, *after)):
        names_before = [matrix.name for matrix in before.get(part, ())]
        names_after = [matrix.name for matrix in after.get(part, ())]
        if names_before != names_after:
            changes.append(
                f"{part} is measured on {shorten(names_after) if names_after else 'no matrix'}"
            )
    return changes


def shorten(names: list[str]) -> str:
    """Return how many there are, with the first and the last."""
    if len(names) <= 2:
        return ", ".join(names)
    return f"{len(names)}, {names[0]} … {names[-1]}"


def _is_inside(name: str, other: str) -> bool:
    return name != other and name.startswith(f"{other}.")
