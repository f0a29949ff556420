"""Which modules of a model are its blocks.

Blocks are the elements of the lists that a Transformer is made of (``model.layers.3``): the
outermost lists that hold attention or MLPs, or, if these hold lists of blocks themselves (stages of
a Swin), those. All elements of such a list that have matrices are blocks, also the ones without
attention in a hybrid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from joma.models.names import ancestors, is_below


@dataclass(frozen=True)
class Contents:
    """Which modules hold attention, MLPs, and matrices of any kind, at any depth."""

    attention: frozenset[str]
    mlps: frozenset[str]
    matrices: frozenset[str]

    @classmethod
    def of(cls, attention: Iterable[str], mlps: Iterable[str], matrices: Iterable[str]) -> Contents:
        """Take the names of the modules with attention, MLPs and matrices themselves."""
        return cls(_with_ancestors(attention), _with_ancestors(mlps), _with_ancestors(matrices))


def _with_ancestors(names: Iterable[str]) -> frozenset[str]:
    modules: set[str] = set()
    for name in names:
        path = name.partition("[")[0]
        modules.add(path)
        modules.update(ancestors(path))
    return frozenset(modules)


def find_blocks(top: str, modules: Sequence[str], contents: Contents) -> list[str]:
    """Return the names of the blocks below a module, outermost lists first."""
    blocks: list[str] = []
    for elements in _outermost_lists(top, modules):
        blocks += _blocks_of_list(elements, modules, contents)
    return blocks


def _blocks_of_list(
    elements: Sequence[str], modules: Sequence[str], contents: Contents
) -> list[str]:
    holders = [
        element for element in elements if element in contents.attention or element in contents.mlps
    ]
    if not holders:
        return []
    inner_blocks: dict[str, list[str]] = {}
    stages = set()
    for element in holders:
        below = [name for name in modules if is_below(name, element)]
        inner_blocks[element] = find_blocks(element, below, contents)
        # A list of complete blocks inside an element makes the element a stage.
        complete = contents.attention.intersection(inner_blocks[element]) & contents.mlps
        if complete:
            stages.add(element)
    if not stages:
        return [element for element in elements if element in contents.matrices]
    blocks = []
    for element in holders:
        if element in stages:
            blocks += inner_blocks[element]
        elif element in contents.attention:
            blocks.append(element)
    return blocks


def _outermost_lists(top: str, modules: Sequence[str]) -> list[list[str]]:
    """Return the elements of each list below a module that lies in no other list below it."""
    depth = 0
    if top:
        depth = len(top.split("."))
    lists: dict[str, dict[str, None]] = {}  # list -> its elements, each once and in order
    for name in modules:
        parts = name.split(".")
        for place in range(depth, len(parts)):
            if not parts[place].isdigit():
                continue
            elements = lists.setdefault(".".join(parts[:place]), {})
            elements[".".join(parts[: place + 1])] = None
            break
    return [list(elements) for elements in lists.values()]
