"""One numbering of a model's blocks for all gauges.

Blocks are numbered in the order of the model (see `joma.models.block_lists`). The second of two in
a block (cross-attention, shared weights that are called twice) and everything outside the blocks is
numbered after all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from torch import nn

from joma.models.names import is_inside
from joma.models.structure import find

# Numbers of elements of a list (".3") and of a stack ("[3]").
_NUMBER = re.compile(r"\.\d+(?=\.|$)|\[\d+\]")
T = TypeVar("T", bound=Hashable)


class Blocks:
    """The numbers of a model's blocks, which stay the same if the model changes.

    Attributes:
        names: Names of the blocks, by number.
        modules: The blocks, by number; None for a block that was removed.
    """

    def __init__(self, model: nn.Module) -> None:
        structure = find(model)
        self.names = list(structure.block_names)
        self.modules: list[nn.Module | None] = [structure.modules[name] for name in self.names]

    def renew(self, model: nn.Module, when: str) -> None:
        """Take over the blocks of a model that was changed.

        A block keeps its number, and a new block gets a new number. The number of a removed block
        stays empty, and ``when`` is added to its name.
        """
        structure = find(model)
        new_names = {structure.modules[name]: name for name in structure.block_names}
        old_modules = set(self.modules)
        successors = {
            name: module for module, name in new_names.items() if module not in old_modules
        }
        for number, module in enumerate(list(self.modules)):
            name = self.names[number]
            if module in new_names:
                self.names[number] = new_names[module]
            elif module is not None and name in successors:
                self.modules[number] = successors[name]
            elif module is not None:
                self.modules[number] = None
                self.names[number] = f"{name} ({when})"
        numbered = set(self.modules)
        for module, name in new_names.items():
            if module not in numbered:
                self.modules.append(module)
                self.names.append(name)

    def number(self, name: str) -> int | None:
        """Return the number of the block that a module or matrix lies in; None outside all blocks."""
        for number, block in enumerate(self.names):
            if is_inside(name, block):
                return number
        return None

    def rows(
        self, items: Iterable[T], names: Iterable[str], experts: bool = False
    ) -> list[list[T]]:
        """Return the items by row: one row per block, empty without items, and others after them.

        With ``experts``, items of a block that are elements of one list or stack share a row.
        """
        rows: list[list[T]] = [[] for _ in self.names]
        later_rows: dict[Hashable, list[T]] = {}
        pattern_of_row: dict[int, str] = {}
        for item, name in zip(items, names, strict=True):
            number = self.number(name)
            if number is None:
                later_rows[len(later_rows)] = [item]
                continue
            pattern = _NUMBER.sub("*", name[len(self.names[number]) :])
            is_first = not rows[number]
            if is_first or (experts and pattern_of_row[number] == pattern):
                pattern_of_row[number] = pattern
                rows[number].append(item)
            elif experts:
                later_rows.setdefault((number, pattern), []).append(item)
            else:
                later_rows[len(later_rows)] = [item]
        return [*rows, *later_rows.values()]

    def name_of(self, number: int, names: Sequence[str]) -> str:
        """Return the name of a row with these items: ``experts.*.up`` for several experts."""
        if not names:
            return self.names[number]
        if len(names) == 1:
            return names[0]
        return _starred(names)


def _starred(names: Sequence[str]) -> str:
    """Return names that differ in one number as one name, with a star for the number."""
    texts = _NUMBER.split(names[0])
    numbers_of_names = [_NUMBER.findall(name) for name in names]
    starred = texts[0]
    for text, numbers in zip(texts[1:], zip(*numbers_of_names, strict=True), strict=True):
        number = numbers[0]
        if len(set(numbers)) > 1:
            number = re.sub(r"\d+", "*", number)
        starred += number + text
    return starred
