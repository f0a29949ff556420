"""LoRA adapters (peft's files): base + scaling·B·A as tensors of a model, and the updates alone.

The base is the one that the user names. The settings of an adapter name one, too, but a checkpoint
does not decide what else is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.folder import ADAPTER_SETTINGS
from joma._checkpoints.formats.view import MaterializedFormat, TensorView
from joma._checkpoints.model import open_tensors
from joma._checkpoints.plan import matcher
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors

_PREFIX = "base_model.model."
_LOW_RANK_NAME = re.compile(r"(.*)\.lora_([AB])(\.\w+)?\.weight")
# Settings under which an update is more than scaling·B·A.
_UNSUPPORTED_SETTINGS = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "target_parameters",
    "layer_replication",
    "trainable_token_indices",
)


def with_base(tensors: Tensors, base: str | None) -> Tensors:
    """Return the tensors of a model with its adapter.

    Without a base, these are the updates. Tensors that are no adapter are returned as they are.
    """
    if tensors.adapter is None:
        return tensors
    base_tensors = None
    if base is not None:
        base_tensors = open_tensors(base)
    updates = AdapterUpdates(tensors, tensors.adapter, base_tensors)
    if base_tensors is None:
        result = Tensors.of(updates, None)
        result.incomplete = _base_is_missing(tensors.adapter)
    else:
        result = Tensors.of(AdaptedModel(base_tensors, updates), base_tensors.config)
    result.updates = Tensors.of(updates, result.config)
    result.updates.not_finite = result.not_finite  # one list for both
    return result


def _base_is_missing(settings: dict[str, Any]) -> str:
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        base = "a base model"
    return (
        f"it is a LoRA adapter, which adds to {base}: name that with --base FOLDER or ID "
        "(base= in Python), or measure what it adds, by stable_rank.mlp_in_update, "
        "stable_rank.q_update, …"
    )


@dataclass
class _LowRankPair:
    """The names of the two factors of an update, in the file of the adapter."""

    a: str | None = None  # (rank, in)
    b: str | None = None  # (out, rank)
    is_transposed: bool = False  # the base stores its weight as (in, out)


class AdapterUpdates(MaterializedFormat):
    """The updates of an adapter by the names of the weights, as the base stores them or (out, in).

    Attributes:
        replaced: weights that the adapter has as a whole: their name -> its name in the adapter.
    """

    def __init__(self, adapter: Tensors, settings: dict[str, Any], base: Tensors | None) -> None:
        _check_settings(settings)
        self.adapter = adapter
        self._settings = settings
        self._match = None  # without a base, the names are as the adapter has them
        if base is not None:
            self._match = matcher(base.names())
        self.replaced: dict[str, str] = {}
        self._pairs: dict[str, _LowRankPair] = {}
        for name in adapter.names():
            match = _LOW_RANK_NAME.fullmatch(name)
            if match is not None:
                pair = self._pairs.setdefault(
                    self._weight_name(f"{match[1]}.weight"), _LowRankPair()
                )
                if match[2] == "A":
                    pair.a = name
                else:
                    pair.b = name
            # DoRA's magnitudes, embeddings and the like: without them, the update would be wrong.
            elif "lora_" in name:
                raise BadCheckpoint(f"it is a LoRA adapter of a kind that is not known ({name})")
            else:
                self.replaced[self._weight_name(name)] = name
        views = []
        for name, pair in self._pairs.items():
            shape = self._update_shape(name, pair)  # (out, in)
            base_shape: tuple[int, ...] = shape
            if base is not None:
                base_shape = base.view(name).shape
            # GPT-2 stores (in, out). A square matrix does not show that; the settings do.
            fits_transposed = base_shape == shape[::-1]
            if fits_transposed and (settings.get("fan_in_fan_out") or shape != base_shape):
                pair.is_transposed = True
            elif base_shape != shape:
                raise BadCheckpoint(
                    f"the adapter adds {shape} to {name} of shape {base_shape}: "
                    "is it another model's?"
                )
            views.append(TensorView.full("", name, torch.float32, base_shape))
        super().__init__(views)

    def _weight_name(self, name: str) -> str:
        weight_name: str | None = name.removeprefix(_PREFIX)
        if self._match is not None:
            weight_name = self._match(name.removeprefix(_PREFIX))
        if weight_name is None:
            raise BadCheckpoint(
                f"the adapter adds to {name}, which the base does not have: is it another model's?"
            )
        return weight_name

    def _update_shape(self, name: str, pair: _LowRankPair) -> tuple[int, int]:
        if pair.a is not None and pair.b is not None:
            a_shape = self.adapter.view(pair.a).shape
            b_shape = self.adapter.view(pair.b).shape
            is_product = len(a_shape) == len(b_shape) == 2 and a_shape[0] == b_shape[1]
            if is_product and a_shape[0] > 0:  # the scaling divides by the rank
                return b_shape[0], a_shape[1]
        raise BadCheckpoint(f"the LoRA adapter's matrices for {name} do not fit one another")

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.adapter.bytes_read

    def materialize(self, name: str) -> Tensor:
        """Return scaling·B·A."""
        pair = self._pairs[name]
        assert pair.a is not None
        assert pair.b is not None
        a = self.adapter.read(pair.a).float()  # (rank, in)
        b = self.adapter.read(pair.b).float()  # (out, rank)
        update = self._scaling(name.removesuffix(".weight"), len(a)) * (b @ a)  # (out, in)
        if pair.is_transposed:
            return update.T.contiguous()  # (in, out)
        return update

    def _scaling(self, module: str, rank: int) -> float:
        """Return alpha/rank, or alpha/√rank; alpha may differ from module to module."""
        alpha: Any = self._settings.get("lora_alpha")
        patterns = self._settings.get("alpha_pattern")
        if isinstance(patterns, dict):
            for key, value in patterns.items():
                # peft takes the key for a regular expression. One from a file is not run.
                if not re.fullmatch(r"[\w.]+", key):
                    raise BadCheckpoint(
                        f"the adapter's alpha_pattern {key!r} is no plain name: save it merged"
                    )
                if f".{module}".endswith(f".{key.removeprefix('.')}"):
                    alpha = value
        is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
        if not is_number or not math.isfinite(alpha):
            raise BadCheckpoint(f"the adapter's lora_alpha is {alpha!r}, no number")
        # Rank-stabilised LoRA, whose updates keep their size when the rank grows.
        if self._settings.get("use_rslora"):
            return float(alpha / math.sqrt(rank))
        return float(alpha / rank)


def _check_settings(settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        kind = f"without {ADAPTER_SETTINGS}"
        if "peft_type" in settings:
            kind = f"of the type {settings['peft_type']!r}"
        raise BadCheckpoint(
            f"it is an adapter {kind}: only LoRA's can be measured, with their settings"
        )
    for key in _UNSUPPORTED_SETTINGS:
        if settings.get(key):
            raise BadCheckpoint(
                f"it is a LoRA adapter with {key}: save model.merge_and_unload() and scan that"
            )


class AdaptedModel(MaterializedFormat):
    """The tensors of a base with an adapter's updates added."""

    def __init__(self, base: Tensors, updates: AdapterUpdates) -> None:
        self.base = base
        self.updates = updates
        views = []
        for name in base.names():
            base_view = base.view(name)
            if base_view.dtype.is_floating_point:
                views.append(TensorView.full("", name, torch.float32, base_view.shape))
        super().__init__(views)
        # Names of tensors that differ from those of the base.
        self._changed = {*updates.names(), *updates.replaced}

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        return self.base.bytes_read + self.updates.bytes_read

    def read_many(self, views: Iterable[TensorView]) -> Iterator[Tensor]:
        for view in views:
            if view.name in self._changed:
                yield from super().read_many([view])
            else:
                # Of what the adapter does not touch, no more is read than is asked for.
                base_view = self.base.view(view.name)
                part = base_view.part(view.shape, view.stride, view.offset)
                yield self.base.read(part).float()

    def materialize(self, name: str) -> Tensor:
        """Return base + scaling·B·A."""
        if name in self.updates.replaced:
            replacement = self.updates.adapter.read(self.updates.replaced[name])
            return replacement.float().contiguous()
        weight = self.base.read(name).float()
        return weight + self.updates.materialize(name)
