"""The structure of a Transformer: embeddings, blocks, final norm and head, with views of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from joma.models.block_lists import Contents, find_blocks
from joma.models.matrices import (
    LinearMap,
    Matrix,
    flatten_all,
    linear_maps,
    matrices_by_name,
)
from joma.models.mlps import MLPStructure, find_mlps
from joma.models.names import (
    ATTENTION,
    has_projections,
    is_inside,
    join,
    last_part,
    looks_like_attention,
    named_modules,
    parent_of,
    plain_name,
)
from joma.models.norms import Normalisation, Placement, find_norms, is_norm, placement_of
from joma.models.parts import PARTS, UPDATE
from joma.models.projections import AttentionStructure, find_attentions
from joma.models.roles import Roles


@dataclass(frozen=True, eq=False)
class EmbeddingWeight:
    """A parameter that writes to the residual stream before the first block.

    Attributes:
        name: Name of the parameter: ``wte.weight``, ``patch_embed.proj.bias``, ``cls_token``.
        parameter: The parameter itself.
        axis: Its axis with the width of the stream.
    """

    name: str
    parameter: Tensor
    axis: int


@dataclass(frozen=True, eq=False)
class BlockStructure:
    """One block of a model.

    Attributes:
        index: Number of the block, as in every gauge.
        name: Name of the module.
        module: The module.
        attentions: Attention modules: none in a block with another mixer, two with cross-attention.
        mlps: One MLP, or one per expert and shared expert.
        norms: Normalisations of the stream; those of queries and keys are not among them.
        placement: "pre" if norms stand before their sublayers, "post" if after, None if unknown.
    """

    index: int
    name: str
    module: nn.Module
    attentions: tuple[AttentionStructure, ...]
    mlps: tuple[MLPStructure, ...]
    norms: tuple[Normalisation, ...]
    placement: Placement | None

    @property
    def attention(self) -> AttentionStructure | None:
        """The first attention module; None if the block has none."""
        if not self.attentions:
            return None
        return self.attentions[0]

    @property
    def mlp(self) -> MLPStructure | None:
        """The first MLP; None if the block has none."""
        if not self.mlps:
            return None
        return self.mlps[0]


class ModelStructure:
    """The parts of a Transformer, as `joma.models.find` found them.

    Parts are found when they are first asked for, and belong to the model as it was then: call
    `find` again after changing its modules. Weights are read from the model each time.

    Attributes:
        model: The model.
        modules: Its modules by name, without the names of wrappers (DDP, compile, FSDP).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: Mapping[str, nn.Module] = named_modules(model)

    def __repr__(self) -> str:
        embeddings = ", ".join(embedding.name for embedding in self.embeddings)
        lines = [
            f"{type(self.model).__name__}: {len(self.blocks)} blocks, width {self.width}",
            f"embeddings  {embeddings or self.missing['embeddings']}",
        ]
        for block in self.blocks:
            lines.append(f"block {block.index:<4}  {block.name}: {_describe(block)}")
        if self.final_norm is not None:
            lines.append(f"final norm  {self.final_norm.name}")
        else:
            lines.append(f"final norm  none: {self.missing['final_norm']}")
        if self.head is not None:
            lines.append(f"head        {self.head.name}")
        else:
            lines.append(f"head        none: {self.missing['head']}")
        return "\n".join(lines)

    # -- what weight gauges measure ---------------------------------------------------------------

    def matrices(self, part: str, names: str | Sequence[str] | None = None) -> list[Matrix]:
        """Return the matrices of one part, in the order of the layers.

        Arguments:
            part: A name of `joma.models.PARTS`: "mlp_in", "q", "qk", "mlp_in_update", ….
            names: Take these modules or parameters instead: a list of names, or one regular
                expression that complete names must match.
        """
        if names is not None:
            if not isinstance(names, str):
                names = [plain_name(name) for name in names]
            return matrices_by_name(self.modules, names)
        if part not in PARTS:
            raise ValueError(f"there is no part {part!r}; parts are {', '.join(PARTS)}")
        if part.endswith(UPDATE):
            return self._updates(part.removesuffix(UPDATE))
        if part == "mlp_in":
            return [mlp.lower.matrix() for mlp in self.mlps]
        if part == "mlp_out":
            return [mlp.upper.matrix() for mlp in self.mlps]
        matrices = []
        for attention in self.attentions:
            matrix = attention.matrix(part)
            if matrix is not None:
                matrices.append(matrix)
        return matrices

    def _updates(self, part: str) -> list[Matrix]:
        """Return what low-rank adapters add to the matrices of a part."""
        updates = []
        for matrix in self.matrices(part):
            if matrix.update is not None:
                updates.append(Matrix(f"{matrix.name} (update)", matrix.update, flatten_all))
        return updates

    @cached_property
    def unnamed_pairs(self) -> list[tuple[str, str]]:
        """The names of (lower, upper) maps that are taken for an MLP by their shapes alone."""
        pairs = []
        for mlp in self.mlps:
            lower = mlp.lower.name.partition("[")[0]
            if lower in self.maps and not self._roles.is_evident(lower):
                pairs.append((lower, mlp.upper.name))
        return pairs

    @property
    def attention_writers(self) -> list[nn.Module]:
        """The modules whose outputs attention writes to the residual stream."""
        writers = []
        for attention in self.attentions:
            if attention.writer is not None:
                writers.append(attention.writer)
        return writers

    # -- parts ------------------------------------------------------------------------------------

    @cached_property
    def maps(self) -> dict[str, LinearMap]:
        """All linear maps by name."""
        return linear_maps(self.modules)

    @cached_property
    def attentions(self) -> tuple[AttentionStructure, ...]:
        """All attention modules, in the order of the model."""
        return tuple(find_attentions(self.modules))

    @cached_property
    def mlps(self) -> tuple[MLPStructure, ...]:
        """All MLPs and experts, in the order of the model."""
        return tuple(find_mlps(self.modules, self.maps, self._roles))

    @cached_property
    def norms(self) -> tuple[Normalisation, ...]:
        """All normalisations with a scale, in the order of the model."""
        return tuple(find_norms(self.modules))

    @cached_property
    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks, by number."""
        attention = []
        for name, module in self.modules.items():
            is_called_attention = looks_like_attention(type(module).__name__) or ATTENTION.search(
                last_part(name)
            )
            if is_called_attention or has_projections(module):
                attention.append(name)
        matrices = []
        for name, parameter in self.model.named_parameters():
            if parameter.dim() >= 2:
                matrices.append(parent_of(plain_name(name)))
        contents = Contents.of(attention, [mlp.lower.name for mlp in self.mlps], matrices)
        return tuple(find_blocks("", list(self.modules), contents))

    @cached_property
    def blocks(self) -> tuple[BlockStructure, ...]:
        """The blocks, by number."""
        return tuple(self._block(index, name) for index, name in enumerate(self.block_names))

    @cached_property
    def width(self) -> int | None:
        """The width of the residual stream, which queries read; None without attention."""
        for attention in self.attentions:
            if attention.query is not None:
                return attention.query.inputs
        return None

    @cached_property
    def embeddings(self) -> tuple[EmbeddingWeight, ...]:
        """The parameters that write to the residual stream before the first block."""
        weights = []
        for name in self._names_before_blocks:
            module = self.modules[name]
            if is_norm(module):
                continue
            for key, parameter in module.named_parameters(recurse=False):
                axis = parameter.dim() - 1
                if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                    axis = 0
                if parameter.shape[axis] == self.width:
                    weights.append(EmbeddingWeight(join(name, key), parameter, axis))
        return tuple(weights)

    @cached_property
    def embedding_norm(self) -> Normalisation | None:
        """The normalisation of the embeddings, as in BERT; None if there is none."""
        for norm in self._norms_outside_blocks:
            if re.search("emb", norm.name, re.IGNORECASE):
                return norm
        return None

    @property
    def final_norm(self) -> Normalisation | None:
        """The last normalisation of the stream; None with a reason in `missing`."""
        return self.closing_norm(self._last_placement)

    @property
    def head(self) -> LinearMap | None:
        """The only map that reads the last normalisation; None with a reason in `missing`."""
        return self.reading_head(self._last_placement)

    def closing_norm(self, placement: Placement | None) -> Normalisation | None:
        """Return the last normalisation of the stream under a placement of norms."""
        if placement == "post":
            if not self.blocks:
                return None
            norms = self.blocks[-1].norms
            if len(norms) != 2:
                return None
            return norms[-1]
        if len(self._final_norm_candidates) != 1:
            return None
        return self._final_norm_candidates[0]

    def reading_head(self, placement: Placement | None) -> LinearMap | None:
        """Return the map that reads the last normalisation under a placement of norms."""
        readers = self._head_candidates
        if len(readers) == 1 or (placement == "post" and readers):
            return readers[0]
        return None

    @cached_property
    def missing(self) -> dict[str, str]:
        """Part -> why it was not found; also names of attention modules without some projections."""
        reasons: dict[str, str] = {}
        if not self.blocks:
            reasons["blocks"] = "no list of modules holds attention or MLPs"
        if not self.embeddings:
            reasons["embeddings"] = "no parameter before the blocks has the width of the stream"
        if self.final_norm is None:
            count = len(self._final_norm_candidates)
            reasons["final_norm"] = f"{count} normalisations outside the blocks could be it"
        if self.head is None:
            count = len(self._head_candidates)
            reasons["head"] = f"{count} linear maps after the blocks read the stream"
        for attention in self.attentions:
            if attention.reason:
                reasons[attention.name] = attention.reason
        return reasons

    # -- how parts are found ----------------------------------------------------------------------

    @property
    def _last_placement(self) -> Placement | None:
        if not self.blocks:
            return None
        return self.blocks[-1].placement

    @cached_property
    def _roles(self) -> Roles:
        return Roles(self.modules, self.maps)

    def _block(self, index: int, name: str) -> BlockStructure:
        module = self.modules[name]
        attentions = tuple(a for a in self.attentions if is_inside(a.name, name))
        mlps = tuple(mlp for mlp in self.mlps if is_inside(mlp.lower.name, name))
        norms = []
        for norm in self.norms:
            is_of_attention = any(norm.name.startswith(f"{a.name}.") for a in attentions)
            is_of_stream = len(norm.weight) == self.width and not is_of_attention
            if is_inside(norm.name, name) and is_of_stream:
                norms.append(norm)
        mixer = module
        if attentions:
            mixer = attentions[0].module
        placement = placement_of(module, mixer)
        return BlockStructure(index, name, module, attentions, mlps, tuple(norms), placement)

    @cached_property
    def _places_in_blocks(self) -> list[int]:
        """Places of the modules inside blocks, in the order of all modules."""
        prefixes = tuple(f"{name}." for name in self.block_names)
        return [n for n, name in enumerate(self.modules) if name.startswith(prefixes)]

    @cached_property
    def _names_before_blocks(self) -> list[str]:
        if not self._places_in_blocks:
            return []
        return list(self.modules)[: self._places_in_blocks[0]]

    @cached_property
    def _norms_outside_blocks(self) -> list[Normalisation]:
        prefixes = tuple(f"{name}." for name in self.block_names)
        return [norm for norm in self.norms if not norm.name.startswith(prefixes)]

    @cached_property
    def _final_norm_candidates(self) -> list[Normalisation]:
        candidates = []
        for norm in self._norms_outside_blocks:
            if norm is not self.embedding_norm and len(norm.weight) == self.width:
                candidates.append(norm)
        return candidates

    @cached_property
    def _head_candidates(self) -> list[LinearMap]:
        if not self._places_in_blocks:
            return []
        candidates = []
        for name in list(self.modules)[self._places_in_blocks[-1] + 1 :]:
            linear = self.maps.get(name)
            if linear is not None and linear.is_plain and linear.inputs == self.width:
                candidates.append(linear)
        return candidates


def _describe(block: BlockStructure) -> str:
    """Return what a block holds, in one line."""
    parts = []
    for attention in block.attentions:
        parts.append(f"{_below(attention.name, block.name)} ({_describe_heads(attention)})")
    if block.mlp is not None:
        size = f"{block.mlp.lower.inputs} → {block.mlp.neurons}"
        if block.mlp.is_gated:
            size += ", gated"
        if len(block.mlps) > 1:
            size += f", {len(block.mlps)} experts"
        lower = _below(block.mlp.lower.name, block.name)
        upper = _below(block.mlp.upper.name, block.name)
        parts.append(f"{lower} → {upper} ({size})")
    if block.norms:
        norms = ", ".join(_below(norm.name, block.name) for norm in block.norms)
        parts.append(f"{norms} ({block.placement or 'placement unknown'})")
    return "; ".join(parts) or "nothing found"


def _describe_heads(attention: AttentionStructure) -> str:
    if attention.heads is None:
        return "number of heads unknown"
    if attention.heads == attention.key_heads:
        return f"{attention.heads} heads"
    return f"{attention.heads} heads, {attention.key_heads} key heads"


def _below(name: str, block: str) -> str:
    return name.removeprefix(f"{block}.")


def find(model: nn.Module) -> ModelStructure:
    """Find the structure of a Transformer.

    Nothing is guessed: a part that names, shapes and modules do not show is None or empty, and
    `ModelStructure.missing` has the reason. No pass is made and no weight is read.

    Arguments:
        model: Any PyTorch module, also on the meta device, wrapped, sharded or with adapters; or
            the skeleton of a checkpoint (`joma.models.skeleton.skeleton`).

    Returns:
        The parts of the model, with views of their weights.

    Example:
        >>> import joma.models
        >>> from torch import nn
        >>> layer = nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=48)
        >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        >>> structure = joma.models.find(model)
        >>> structure.blocks[1].attention.heads
        2
        >>> [matrix.name for matrix in structure.matrices("mlp_in")]
        ['layers.0.linear1', 'layers.1.linear1']
    """
    return ModelStructure(model)
