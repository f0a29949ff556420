"""The numbers of attention layers.

A layer is numbered by the block that it lies in, so that layer 3 of attention, of an MLP and of the
residual stream is the same block. A module that runs several times in a pass (ALBERT calls one
block twelve times) is one layer per call. Attention that only a later pass reveals follows after
all layers that have a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from joma._measure.events.events import Place
from joma.models.blocks import Blocks


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        name: of its module; that of its block if it has no attention.
        keys: the calls whose heads, one after the other, are the heads of the layer. Modules with
            one head each that run in parallel are one layer.
    """

    name: str
    keys: tuple[Place, ...]


class AttentionCalls(Protocol):
    """What the numbering needs to know of the attention of one place."""

    @property
    def heads(self) -> int:
        """The number of heads."""

    @property
    def input_address(self) -> int | None:
        """Where the module's input lies in memory; modules in parallel share it."""


class LayerNumbering:
    """Which calls each layer has; a layer keeps its number for as long as a watch exists.

    Attributes:
        layers: by number; empty before the first measurement.
    """

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []
        self._layers_in_blocks = 0

    @property
    def names(self) -> list[str]:
        """The names of the layers, by number."""
        return [layer.name for layer in self.layers]

    def settle(
        self,
        calls: Mapping[Place, AttentionCalls],
        order: Iterable[str],
        skipped: Iterable[str],
        blocks: Blocks,
    ) -> list[int]:
        """Number the layers once; return the numbers of layers that a later pass adds.

        Arguments:
            calls: the attention of this step.
            order: the names of all modules, in the order of the model.
            skipped: modules that are layers though the pass may have left them out.
            blocks: of the model; a block without attention is a layer without calls.
        """
        if not self.layers:
            self._number(calls, order, skipped, blocks)
            return []
        numbered: set[Place] = set()
        for layer in self.layers:
            numbered.update(layer.keys)
        fresh = [key for key in calls if key not in numbered]
        return [self._add(key, blocks.number(module_of(key))) for key in fresh]

    def _number(
        self,
        calls: Mapping[Place, AttentionCalls],
        order: Iterable[str],
        skipped: Iterable[str],
        blocks: Blocks,
    ) -> None:
        position = {name: number for number, name in enumerate(order)}
        keys = set(calls)
        for name in skipped:
            if name in position:
                keys.add((name, 0))

        def by_position(key: Place) -> tuple[int, Place]:
            return position.get(module_of(key), len(position)), key

        groups: dict[tuple[str, int, Any], list[Place]] = {}
        for key in sorted(keys, key=by_position):
            groups.setdefault(_group_of(key, calls.get(key)), []).append(key)
        layers = []
        for (name, call, _), members in groups.items():
            key = (name, call) if len(members) > 1 else members[0]
            layers.append(AttentionLayer(_title(key), tuple(members)))
        self._layers_in_blocks = len(blocks.names)
        rows = blocks.rows(layers, [module_of(layer.keys[0]) for layer in layers])
        for number, row in enumerate(rows):
            layer = row[0] if row else AttentionLayer(blocks.names[number], ())
            self.layers.append(layer)

    def _add(self, key: Place, number: int | None) -> int:
        """Give attention that was not seen before the number of its block, or else a new one."""
        layer = AttentionLayer(_title(key), (key,))
        is_in_block = number is not None and number < self._layers_in_blocks
        if is_in_block and number is not None and not self.layers[number].keys:
            self.layers[number] = layer
            return number
        self.layers.append(layer)
        return len(self.layers) - 1

    def rename(self, names: Mapping[str, str | None], when: str) -> None:
        """Follow modules whose names changed; a layer without its modules stays, and is empty.

        Arguments:
            names: old name -> new name, None for a module that is gone.
            when: in words, for the name of an empty layer.
        """
        for number, layer in enumerate(self.layers):
            keys = []
            for place, call in layer.keys:
                module, slash, rest = place.partition("/")
                new_name = names.get(module, module)
                if new_name is not None:
                    keys.append((f"{new_name}{slash}{rest}", call))
            if len(keys) == len(layer.keys) and layer.keys:
                name = layer.name if len(keys) > 1 else _title(keys[0])
                self.layers[number] = AttentionLayer(name, tuple(keys))
            elif layer.keys:
                self.layers[number] = AttentionLayer(f"{layer.name} ({when})", ())

    def state(self) -> list[Any]:
        """Return what `restore` needs."""
        return [[layer.name, layer.keys] for layer in self.layers]

    def restore(self, state: Iterable[Any]) -> None:
        """Take the numbers of a `state`."""
        layers = []
        for name, keys in state:
            places = tuple((module, int(call)) for module, call in keys)
            layers.append(AttentionLayer(name, places))
        self.layers = layers


def module_of(key: Place) -> str:
    """Return the module of a place, whose name has "/1" for a second attention in one call."""
    return key[0].split("/")[0]


def _group_of(key: Place, attention: AttentionCalls | None) -> tuple[str, int, Any]:
    """Return a key that modules of one layer share: elements of a list with one head each.

    ``heads.0``, ``heads.1``, … with the same input are heads of one layer. Everything else is a
    layer alone.
    """
    name, call = key
    parent, _, last = name.rpartition(".")
    if attention is None or attention.heads > 1 or not last.isdigit():
        return name, call, None
    if attention.input_address is None:
        return name, call, None
    return parent, call, attention.input_address


def _title(key: Place) -> str:
    name, call = key
    if call == 0:
        return name
    return f"{name}#{call}"
