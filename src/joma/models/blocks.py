"""One numbering of a model's blocks for all gauges.

Blocks are the elements of the lists that a Transformer is made of (``model.layers.3``): the outermost lists that hold
attention or MLPs, or, where these hold lists of blocks themselves (stages of a Swin), those. All elements of such a
list that have matrices are numbered, in the order of the model, whether a gauge has something to measure there or not
(blocks without attention in a hybrid). What a block has more than one of (cross-attention, shared weights that are
called again) and what is in no block is numbered after all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from torch import nn

from joma.models.matrices import find_matrices, plain_name
from joma.models.roles import holds_projections

_ATTENTION = re.compile(r"(?<!fl)atten|attn", re.IGNORECASE)
_NUMBERS = re.compile(r"\.\d+(?=\.|$)|\[\d+\]")  # of elements of a list, and of a stack
T = TypeVar("T", bound=Hashable)


class Blocks:
    """The blocks of a model.

    Attributes:
        names: of the blocks, by number.
        modules: the blocks, by number; None for one that was removed.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {plain_name(name): module for name, module in model.named_modules()}
        attention = [
            name for name, module in modules.items()
            if _ATTENTION.search(type(module).__name__) or _ATTENTION.search(name.rpartition(".")[2])
            or holds_projections(module)
        ]  # fmt: skip
        mlps = [matrix.name for matrix in find_matrices(model, "mlp_in")]
        wide = [
            plain_name(name).rpartition(".")[0]
            for name, p in model.named_parameters()
            if p.dim() >= 2
        ]
        self.names = _chosen("", list(modules), attention, mlps, wide)
        self.modules: list[nn.Module | None] = [modules[name] for name in self.names]

    def renew(self, model: nn.Module, when: str) -> None:
        """Find the blocks of a model that was changed; a block keeps its number, and a new one gets a new number.

        ``when`` is added to the name of a block that is gone, whose number stays empty.
        """
        now = Blocks(model)
        name_of = dict(zip(now.modules, now.names, strict=True))
        old = set(self.modules)
        successors = {name: module for module, name in name_of.items() if module not in old}
        for n, (module, name) in enumerate(zip(list(self.modules), list(self.names), strict=True)):
            if module in name_of:
                self.names[n] = name_of[module]
            elif module is not None and name in successors:
                self.modules[n] = successors[name]
            elif module is not None:
                self.modules[n] = None
                self.names[n] = f"{name} ({when})"
        numbered = set(self.modules)
        for module, name in name_of.items():
            if module not in numbered:
                self.modules.append(module)
                self.names.append(name)

    def number(self, name: str) -> int | None:
        """The block that a module or matrix lies in; None if in none."""
        return next((n for n, block in enumerate(self.names) if _inside(name, block)), None)

    def rows(
        self, items: Iterable[T], names: Iterable[str], experts: bool = False
    ) -> list[list[T]]:
        """Items by number: one per block, empty where it has none, the others after all blocks.

        ``experts``: items of a block that are elements of one list or stack share a row.
        """
        rows: list[list[T]] = [[] for _ in self.names]
        more: dict[Hashable, list[T]] = {}
        kinds: dict[int, str] = {}
        for item, name in zip(items, names, strict=True):
            n = self.number(name)
            kind = _NUMBERS.sub("*", name if n is None else name[len(self.names[n]) :])
            if n is not None and (not rows[n] or (experts and kinds[n] == kind)):
                kinds[n] = kind
                rows[n].append(item)
            else:
                more.setdefault((n, kind) if experts and n is not None else len(more), []).append(
                    item
                )
        return [*rows, *more.values()]

    def name_of(self, number: int, names: Sequence[str]) -> str:
        """What a row with items of these names is called: a star counts experts; an empty block has its own name."""
        if not names:
            return self.names[number]
        return names[0] if len(names) == 1 else _starred(names)


def _starred(names: Sequence[str]) -> str:
    """Names that differ in one number, with a star in its place."""
    parts = [_NUMBERS.split(name) for name in names]
    numbers = [_NUMBERS.findall(name) for name in names]
    fixed = [here[0] if len(set(here)) == 1 else here[0].replace(re.sub(r"\D", "", here[0]), "*")
             for here in zip(*numbers, strict=True)]  # fmt: skip
    return "".join(text + number for text, number in zip(parts[0], [*fixed, ""], strict=True))


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith((f"{block}.", f"{block}["))


def _chosen(
    prefix: str,
    modules: Sequence[str],
    attention: Sequence[str],
    mlps: Sequence[str],
    wide: Sequence[str],
) -> list[str]:
    """The blocks below a module, outermost lists first."""
    lists: dict[str, list[str]] = {}
    for name in modules:
        below = (
            name[len(prefix) + 1 :]
            if prefix and name.startswith(f"{prefix}.")
            else ""
            if prefix
            else name
        )
        parts = below.split(".")
        for n, part in enumerate(parts):
            if part.isdigit():
                path = ".".join([*([prefix] if prefix else []), *parts[:n]])
                element = f"{path}.{part}" if path else part
                elements = lists.setdefault(path, [])
                if element not in elements:
                    elements.append(element)
                break
    blocks: list[str] = []
    for elements in lists.values():
        held = [e for e in elements if any(_inside(x, e) for x in (*attention, *mlps))]
        if not held:
            continue
        deeper = {e: _chosen(e, modules, attention, mlps, wide) for e in held}
        complete = {
            e: [b for b in below if _both(b, attention, mlps)] for e, below in deeper.items()
        }  # blocks with attention and MLP
        if any(complete.values()):
            for e in held:
                blocks += (
                    deeper[e]
                    if complete[e]
                    else [e]
                    if any(_inside(x, e) for x in attention)
                    else []
                )
        else:
            blocks += [e for e in elements if any(_inside(x, e) for x in wide)]
    return blocks


def _both(block: str, attention: Sequence[str], mlps: Sequence[str]) -> bool:
    return all(any(_inside(x, block) for x in group) for group in (attention, mlps))
