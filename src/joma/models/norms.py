"""Normalisations of a model: what they do is tried out, and where they stand is known by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor, nn

from joma.models.names import NORM_CLASS, OTHER_NORM_CLASS, family_of

Placement = Literal["pre", "post"]

# Modules do not show in which order they are called, so that families are listed. Before a sublayer:
_PRE_FAMILIES = (
    "bloom", "codegen", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
    "granite", "llama", "mistral", "mpt", "olmo", "persimmon", "phi", "phi3", "qwen2", "qwen3",
    "smollm3", "stablelm", "starcoder2", "vit",
)  # fmt: skip
# After the residual connection:
_POST_FAMILIES = (
    "albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm", "xlm_roberta",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Normalisation:
    """A normalisation over the width of the stream, with a scale γ."""

    name: str
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """γ (d,)."""
        return cast(Tensor, self.module.weight)

    @property
    def bias(self) -> Tensor | None:
        """β (d,)."""
        return cast("Tensor | None", getattr(self.module, "bias", None))

    @property
    def eps(self) -> float:
        """ε, the constant in the root."""
        for attribute in ("eps", "variance_epsilon"):
            value = getattr(self.module, attribute, None)
            if isinstance(value, (int, float)):
                return float(value)
        return 0.0

    @property
    def centres(self) -> bool:
        """True if it subtracts the mean: LayerNorm, not RMSNorm."""
        return self._behaviour[0]

    @property
    def offset(self) -> float:
        """It scales by offset + γ; 1 in Gemma, 0 elsewhere."""
        return self._behaviour[1]

    @cached_property
    def _behaviour(self) -> tuple[bool, float]:
        """Whether it centres, and its offset, tried out on random numbers."""
        if isinstance(self.module, nn.LayerNorm):
            return True, 0.0
        if isinstance(self.module, nn.RMSNorm) or self.weight.is_meta:
            return False, 0.0
        weight = self.weight
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(1, len(weight), generator=generator).to(weight)  # (1, d)
        with torch.no_grad():
            output = self.module(states)
            shifted_output = self.module(states + 3.0)
            if torch.allclose(output, shifted_output, rtol=1e-3, atol=1e-3):
                return True, 0.0
            root_mean_square = states.float().pow(2).mean(-1, keepdim=True).sqrt().to(states)
            scale = output / (states / root_mean_square)
            if torch.allclose(scale[0], weight.to(scale), rtol=1e-2, atol=1e-3):
                return False, 0.0
        return False, 1.0


def find_norms(modules: Mapping[str, nn.Module]) -> list[Normalisation]:
    """Return the normalisations with a scale among the modules of a model, in their order."""
    return [Normalisation(name, module) for name, module in modules.items() if is_norm(module)]


def is_norm(module: nn.Module) -> bool:
    """True for normalisations over the last axis with a scale."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    class_name = type(module).__name__
    return bool(NORM_CLASS.search(class_name)) and not OTHER_NORM_CLASS.search(class_name)


def placement_of(layer: nn.Module, attention: nn.Module) -> Placement | None:
    """Return where normalisation stands, before or after a sublayer; None if nothing shows it."""
    # torch.nn.TransformerEncoderLayer and OPT say so themselves.
    for attribute in ("norm_first", "do_layer_norm_before"):
        is_first = getattr(layer, attribute, None)
        if is_first is True:
            return "pre"
        if is_first is False:
            return "post"
    family = family_of(attention)
    if family in _PRE_FAMILIES:
        return "pre"
    if family in _POST_FAMILIES:
        return "post"
    return None
