"""What charges need to know of a model besides its structure: layers, rotary embeddings, ties, dropout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from joma.models.matrices import LinearMap
from joma.models.mlps import MLPStructure
from joma.models.names import family_of, is_inside, plain_name, words
from joma.models.norms import Normalisation, Placement, placement_of
from joma.models.projections import AttentionStructure
from joma.models.structure import EmbeddingWeight, ModelStructure, find

# Families whose rotary embedding turns coordinate i with i + R/2. Others pair neighbours, or it is
# not known.
_HALVES_FAMILIES = (
    "gemma", "gemma2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2",
    "persimmon", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
_ROTARY_CLASS = re.compile("rotary|rope", re.IGNORECASE)
_NORM_CLASS = re.compile("norm", re.IGNORECASE)
# Dropout of attention weights ("att_drop", "GPT2Attention.dropout") leaves the stream alone.
_OF_ATTENTION = re.compile("att", re.IGNORECASE)
_SOFT_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary embedding of one attention module.

    Attributes:
        size: R, how many coordinates of each head are rotated; 0 without a rotary embedding.
        is_by_halves: True if coordinate i is rotated with i + R/2.
    """

    size: int
    is_by_halves: bool


@dataclass(frozen=True, eq=False)
class HeadProjections:
    """Projections and heads of an attention module that has all of q, k and v."""

    name: str
    query: LinearMap
    key: LinearMap
    value: LinearMap
    output: LinearMap | None
    heads: int
    key_heads: int
    rotary: Rotary
    has_norms: bool  # queries and keys are normalised
    has_gate: bool  # a gate multiplies the heads' outputs before the output projection
    has_learned_key: bool  # one more key and value are parameters: nn.MultiheadAttention's bias_k
    has_zero_key: bool  # one more key and value are zeros: its add_zero_attn


@dataclass(frozen=True, eq=False)
class ChargedLayer:
    """One attention module with the MLP and the normalisations of its layer.

    Attributes:
        name: The layer.
        index: Number of the attention module.
        attention: The attention module.
        mlp: The MLP; of a layer with experts that are modules, the widest.
        has_experts: True if the layer has other MLPs, so that a router reads the stream as well.
        norms: Normalisations of the stream.
        placement: Where they stand, before or after their sublayers.
    """

    name: str
    index: int
    attention: HeadProjections
    mlp: MLPStructure | None
    has_experts: bool
    norms: tuple[Normalisation, ...]
    placement: Placement | None


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A model, as far as its charges are concerned."""

    layers: tuple[ChargedLayer, ...]
    embeddings: tuple[EmbeddingWeight, ...]
    embedding_norm: Normalisation | None
    final_norm: Normalisation | None
    head: LinearMap | None
    parameter_names: Mapping[int, str]  # by id
    tied: frozenset[int]  # ids of parameters with several names
    has_padding: bool  # some embedding has a padding_idx
    has_dropout: bool  # of activations that were written to the stream
    is_capped: bool  # final or attention logits go through a soft cap
    has_other_blocks: bool  # blocks without such attention, as in a hybrid: they read and write too

    def name_of(self, parameter: Tensor, otherwise: str) -> str:
        """Return the name of a parameter in the model."""
        return self.parameter_names.get(id(parameter), otherwise)

    def is_tied(self, parameter: Tensor) -> bool:
        """True if a parameter has several names."""
        return id(parameter) in self.tied


def anatomy(model: nn.Module, placement: Placement | None = None) -> Anatomy:
    """Take a model apart. ``placement`` states where norms stand if the model does not show it."""
    structure = find(model)
    layers = _layers(structure, placement)
    last_placement = layers[-1].placement if layers else None
    parameter_names, tied = _parameter_names(model)
    modules = structure.modules.values()
    return Anatomy(
        layers=layers,
        embeddings=structure.embeddings,
        embedding_norm=structure.embedding_norm,
        final_norm=structure.closing_norm(last_placement),
        head=structure.reading_head(last_placement),
        parameter_names=parameter_names,
        tied=tied,
        has_padding=any(_has_padding(module) for module in modules),
        has_dropout=_has_dropout(structure.modules),
        has_other_blocks=_has_other_blocks(structure, layers),
        is_capped=any(_config(module, key) for module in modules for key in _SOFT_CAPS),
    )


def degree_of(mlp: MLPStructure) -> int | None:
    """Return p if the activation has φ(2a) = 2^p φ(a), by trying it out; None if it has not."""
    if mlp.is_gated:
        return 1  # of the factor, which is linear
    if mlp.activation is None:
        return None
    inputs = torch.tensor([-1.7, -0.6, -0.1, 0.2, 0.9, 2.3], dtype=torch.float64)
    with torch.no_grad():
        outputs = mlp.activation(inputs)
        outputs_of_doubled = mlp.activation(2 * inputs)
    for degree in (1, 2, 3):
        if torch.allclose(outputs_of_doubled, 2**degree * outputs, rtol=1e-12, atol=0):
            return degree
    return None


def _layers(structure: ModelStructure, placement: Placement | None) -> tuple[ChargedLayer, ...]:
    attentions = []
    for attention in structure.attentions:
        projections = _head_projections(structure, attention)
        if projections is not None:
            attentions.append((attention, projections))
    scopes = [attention.scope for attention, _ in attentions]
    layers = []
    for index, (attention, projections) in enumerate(attentions):
        scope = attention.scope
        norms: tuple[Normalisation, ...] = ()
        mlps: list[MLPStructure] = []
        # With cross-attention next to self-attention, what reads which norm is not known.
        if scopes.count(scope) == 1:
            norms = _norms_of(structure, scope, projections)
            mlps = [mlp for mlp in structure.mlps if mlp.lower.name.startswith(f"{scope}.")]
        holder = structure.modules.get(scope, attention.module)
        layers.append(
            ChargedLayer(
                name=scope,
                index=index,
                attention=projections,
                mlp=_charged_mlp(mlps, projections.query.inputs),
                has_experts=len(mlps) > 1,
                norms=norms,
                placement=placement or placement_of(holder, attention.module),
            )
        )
    return tuple(layers)


def _head_projections(
    structure: ModelStructure, attention: AttentionStructure
) -> HeadProjections | None:
    query = attention.query
    key = attention.key
    value = attention.value
    heads = attention.heads
    key_heads = attention.key_heads
    if query is None or key is None or value is None or heads is None or key_heads is None:
        return None
    if not (query.is_plain and key.is_plain and value.is_plain):
        return None
    if query.outputs % heads != 0 or key.outputs % key_heads != 0 or heads % key_heads != 0:
        return None
    output = attention.output
    if output is not None and not output.is_plain:
        output = None
    inner_modules = list(attention.module.modules())[1:]
    return HeadProjections(
        name=attention.name,
        query=query,
        key=key,
        value=value,
        output=output,
        heads=heads,
        key_heads=key_heads,
        rotary=_rotary(structure.modules, attention.module, query.outputs // heads),
        has_norms=any(_NORM_CLASS.search(type(module).__name__) for module in inner_modules),
        has_gate=_has_gate(attention.module, query.outputs // heads, key.outputs // key_heads),
        has_learned_key=getattr(attention.module, "bias_k", None) is not None,
        has_zero_key=bool(getattr(attention.module, "add_zero_attn", False)),
    )


def _has_gate(attention: nn.Module, query_size: int, key_size: int) -> bool:
    """True if attention is gated, by a map of its own (Afmoe) or in the queries (Qwen3-Next)."""
    for name, _ in attention.named_children():
        if "gate" in words(name):
            return True
    return query_size != key_size


def _norms_of(
    structure: ModelStructure, scope: str, attention: HeadProjections
) -> tuple[Normalisation, ...]:
    norms = []
    for norm in structure.norms:
        is_in_layer = norm.name.startswith(f"{scope}.")
        is_in_attention = norm.name.startswith(f"{attention.name}.")
        has_width = norm.weight.shape[0] == attention.query.inputs
        if is_in_layer and not is_in_attention and has_width:
            norms.append(norm)
    return tuple(norms)


def _charged_mlp(mlps: Sequence[MLPStructure], width: int) -> MLPStructure | None:
    """Return the widest MLP whose maps are modules that read the stream."""
    candidates = []
    for mlp in mlps:
        maps = (*mlp.readers, mlp.upper)
        if mlp.lower.inputs == width and all(_is_module(linear) for linear in maps):
            candidates.append(mlp)
    if not candidates:
        return None
    widest = max(candidates, key=lambda mlp: mlp.neurons)
    if len(widest.readers) > 2:
        return None
    return widest


def _is_module(linear: LinearMap) -> bool:
    """True for a linear map of its own: neither a convolution nor one expert of a stack."""
    is_expert = linear.weight_name != "weight"
    return linear.is_plain and not linear.is_convolution and not is_expert


def _rotary(modules: Mapping[str, nn.Module], attention: nn.Module, head_size: int) -> Rotary:
    is_by_halves = family_of(attention) in _HALVES_FAMILIES
    dimension = _config(attention, "rotary_dim")
    if isinstance(dimension, int):
        return Rotary(dimension, is_by_halves)
    for module in modules.values():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, Tensor) and frequencies.dim() == 1:
            return Rotary(min(2 * len(frequencies), head_size), is_by_halves)
    if any(_ROTARY_CLASS.search(type(module).__name__) for module in modules.values()):
        return Rotary(head_size, is_by_halves)
    return Rotary(0, is_by_halves)


def _parameter_names(model: nn.Module) -> tuple[dict[int, str], frozenset[int]]:
    """Return the first name of each parameter by its id, and the ids of those with several."""
    names: dict[int, str] = {}
    tied: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied.add(id(parameter))
        else:
            names[id(parameter)] = plain_name(name)
    return names, frozenset(tied)


def _has_other_blocks(structure: ModelStructure, layers: Sequence[ChargedLayer]) -> bool:
    for block in structure.block_names:
        if not any(is_inside(layer.attention.name, block) for layer in layers):
            return True
    return False


def _has_padding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and module.padding_idx is not None


def _has_dropout(modules: Mapping[str, nn.Module]) -> bool:
    """True if anything but attention weights is dropped."""
    for name, module in modules.items():
        own_name = name.rpartition(".")[2]
        if isinstance(module, nn.Dropout) and module.p > 0 and not _OF_ATTENTION.search(own_name):
            return True
        probability = getattr(module, "dropout", None)
        is_dropping = isinstance(probability, float) and probability > 0
        if is_dropping and not _OF_ATTENTION.search(type(module).__name__):
            return True
    return False


def _config(module: nn.Module, key: str) -> Any:
    return getattr(getattr(module, "config", None), key, None)
