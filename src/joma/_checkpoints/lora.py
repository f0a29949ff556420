"""LoRA adapters (peft's files): base + scaling·B A as the tensors of a model, and the updates alone.

The base is the one that the user names. An adapter's own settings name one, too, but a checkpoint does not decide what
else is read.
"""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor

from joma._checkpoints.entry import Entry
from joma._checkpoints.formats import SETTINGS
from joma._checkpoints.model import open_tensors
from joma._checkpoints.plan import matcher
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.sources import WorkedOut, virtual
from joma._checkpoints.tensors import Tensors

_FRONT = "base_model.model."
_PAIR = re.compile(r"(.*)\.lora_([AB])(\.\w+)?\.weight")
_OTHERS = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
)


def with_base(tensors: Tensors, base: str | None) -> Tensors:
    """The tensors of a model with its adapter; of an adapter without its base, the updates; others as they are."""
    if tensors.adapter is None:
        return tensors
    under = None if base is None else open_tensors(base)
    updates = Updates(tensors, tensors.adapter, under)
    if under is None:
        result = Tensors.of(updates, None)
        result.incomplete = _alone(tensors.adapter)
    else:
        result = Tensors.of(Adapted(under, updates), under.config)
    result.updates = Tensors.of(updates, result.config)
    result.updates.not_finite = result.not_finite  # one list for both
    return result


def _alone(settings: dict[str, Any]) -> str:
    name = settings.get("base_model_name_or_path")
    return (
        f"it is a LoRA adapter, which adds to {name if isinstance(name, str) and name else 'a base model'}: name that "
        "with --base FOLDER or ID (base= in Python), or measure what it adds, by stable_rank.mlp_in_update, "
        "stable_rank.q_update, …"
    )


class Updates(WorkedOut):
    """What an adapter adds, by the names of the weights: as the base has them, or (out, in) without one.

    Attributes:
        replaced: weights that the adapter has as a whole: name -> its name there.
    """

    def __init__(self, adapter: Tensors, settings: dict[str, Any], base: Tensors | None) -> None:
        self.adapter, self._settings = adapter, _checked(settings)
        self._match = (lambda name: name) if base is None else matcher(base.names)
        self.entries: dict[str, Entry] = {}
        self.replaced: dict[str, str] = {}
        self._pairs: dict[str, dict[str, str]] = {}
        self._turned: set[str] = set()
        for name in adapter.names:
            if match := _PAIR.fullmatch(name):
                self._pairs.setdefault(self._known(f"{match[1]}.weight"), {})[match[2]] = name
            elif "lora_" in name:
                raise BadCheckpoint(f"it is a LoRA adapter of a kind that is not known ({name})")
            else:
                self.replaced[self._known(name)] = name
        for name, pair in self._pairs.items():
            shapes = [adapter.entry(pair[side]).shape for side in "AB" if side in pair]
            if (
                len(shapes) != 2
                or any(len(shape) != 2 for shape in shapes)
                or shapes[0][0] != shapes[1][1]
            ):
                raise BadCheckpoint(
                    f"the LoRA adapter's matrices for {name} do not fit one another"
                )
            shape = (shapes[1][0], shapes[0][1])  # (out, in)
            there = shape if base is None else base.entry(name).shape
            if there == shape[::-1] and (settings.get("fan_in_fan_out") or shape != there):
                self._turned.add(name)
            elif there != shape:
                raise BadCheckpoint(
                    f"the adapter adds {shape} to {name} of shape {there}: is it another model's?"
                )
            self.entries[name] = virtual(there)

    def _known(self, name: str) -> str:
        if (known := self._match(name.removeprefix(_FRONT))) is None:
            raise BadCheckpoint(
                f"the adapter adds to {name}, which the base does not have: is it another model's?"
            )
        return known

    @property
    def bytes_read(self) -> int:
        """Of the adapter."""
        return self.adapter.bytes_read

    def whole(self, name: str) -> Tensor:
        """scaling·B A"""
        a, b = (self.adapter.read(self._pairs[name][side]).float() for side in "AB")
        update = self._scaling(name.removesuffix(".weight"), len(a)) * (b @ a)
        return update.T.contiguous() if name in self._turned else update

    def _scaling(self, module: str, rank: int) -> float:
        """alpha/r, or alpha/√r; alpha may differ from module to module."""
        alpha = self._settings.get("lora_alpha")
        patterns = self._settings.get("alpha_pattern") or {}
        for key, value in patterns.items() if isinstance(patterns, dict) else ():
            if not re.fullmatch(r"[\w.]+", key):  # a regular expression of a file is not run
                raise BadCheckpoint(
                    f"the adapter's alpha_pattern {key!r} is no plain name: save it merged"
                )
            alpha = value if f".{module}".endswith(f".{key.removeprefix('.')}") else alpha
        if (
            isinstance(alpha, bool)
            or not isinstance(alpha, (int, float))
            or not math.isfinite(alpha)
        ):
            raise BadCheckpoint(f"the adapter's lora_alpha is {alpha!r}, no number")
        return alpha / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("peft_type") != "LORA":
        kind = (
            f"of the type {settings['peft_type']!r}"
            if "peft_type" in settings
            else f"without {SETTINGS}"
        )
        raise BadCheckpoint(
            f"it is an adapter {kind}: only LoRA's can be measured, with their settings"
        )
    if special := [key for key in _OTHERS if settings.get(key)]:
        raise BadCheckpoint(
            f"it is a LoRA adapter with {special[0]}: save model.merge_and_unload() and scan that"
        )
    return settings


class Adapted(WorkedOut):
    """The tensors of a base with an adapter's updates added."""

    def __init__(self, base: Tensors, updates: Updates) -> None:
        self.base, self.updates = base, updates
        floats = [name for name in base.names if base.entry(name).dtype.is_floating_point]
        self.entries = {name: virtual(base.entry(name).shape) for name in floats}

    @property
    def bytes_read(self) -> int:
        """Of base and adapter."""
        return self.base.bytes_read + self.updates.bytes_read

    def read(self, name: str, entry: Entry | None = None) -> Tensor:
        """What the adapter does not touch is read from the base, and no more of it than is asked for."""
        if entry is None or name in self.updates.entries or name in self.updates.replaced:
            return super().read(name, entry)
        return self.base.read(
            name, self.base.entry(name).view(entry.shape, entry.stride, entry.offset // 4)
        ).float()

    def whole(self, name: str) -> Tensor:
        """base + scaling·B A"""
        if name in self.updates.replaced:
            return self.updates.adapter.read(self.updates.replaced[name]).float().contiguous()
        weight = self.base.read(name).float()
        return weight + self.updates.whole(name) if name in self.updates.entries else weight
