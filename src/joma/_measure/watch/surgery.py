"""Changes of a watched model's structure, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from joma.models.matrices import Matrix


def describe_modules(before: Mapping[nn.Module, str], after: Mapping[nn.Module, str]) -> list[str]:
    """Return which modules were removed, added and replaced, from the names of all modules."""
    modules_before = {name: module for module, name in before.items()}
    modules_after = {name: module for module, name in after.items()}
    removed = [name for name in modules_before if name not in modules_after]
    added = []
    replaced = []
    for name, module in modules_after.items():
        if name not in modules_before:
            added.append(name)
        elif module is not modules_before[name]:
            replaced.append(name)
    changes = []
    for verb, names in (("removed", removed), ("added", added), ("replaced", replaced)):
        outermost = [name for name in names if not _is_inside_another(name, names)]
        if outermost:
            changes.append(f"{verb}: {shorten(outermost)}")
    return changes


def describe_matrices(
    before: Mapping[str, Iterable[Matrix]], after: Mapping[str, Iterable[Matrix]]
) -> list[str]:
    """Return which parts are measured on other matrices now, from the matrices by part."""
    changes = []
    for part in dict.fromkeys((*before, *after)):
        names_before = [matrix.name for matrix in before.get(part, ())]
        names_after = [matrix.name for matrix in after.get(part, ())]
        if names_before != names_after:
            changes.append(f"{part} is measured on {shorten(names_after) or 'no matrix'}")
    return changes


def shorten(names: list[str]) -> str:
    """Return the names; of more than two, their number with the first and the last."""
    if len(names) <= 2:
        return ", ".join(names)
    return f"{len(names)}, {names[0]} … {names[-1]}"


def _is_inside_another(name: str, names: Iterable[str]) -> bool:
    return any(name != other and name.startswith(f"{other}.") for other in names)
