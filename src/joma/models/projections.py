"""Attention of a model: its projections, split out of fused ones as each family's code splits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from joma.models.lora import base_of, is_lora
from joma.models.matrices import LinearMap, Matrix, linear_map
from joma.models.names import PROJECTIONS, family_of, join, parent_of
from joma.models.sharded import gather
from joma.models.weights import flat_rows, is_conv1d

# Families whose fused projection is understood without their code. Other fused projections of a
# file, which has only names and shapes, are refused.
_FUSED_FAMILIES = (
    "bloom", "codegen", "deberta", "falcon", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_neox_japanese", "minimax", "modernbert", "mpt", "persimmon", "phi3",
)  # fmt: skip
# Families that order the rows by heads although their fused projection is not `query_key_value`.
_BY_HEAD_FAMILIES = ("deberta", "minimax", "gpt_bigcode")
# Families in which one key head serves all queries unless `multi_query` is False.
_MULTI_QUERY_FAMILIES = ("falcon", "gpt_bigcode")
# Where modules and configs keep their number of heads, and of key heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")


class RowOrder(Enum):
    """Order of the rows of a fused projection."""

    PARTS = "all of q, then k, then v"
    HEADS = "(heads, q k v, head size)"
    # Heads that share keys and values: Falcon's new architecture.
    GROUPS = "(key heads, their queries and k and v, head size)"
    # CodeGen, trained on four cores.
    QUARTERS = "(4, q v k, …)"


@dataclass(frozen=True, eq=False)
class AttentionStructure:
    """One attention module: its projections and heads. Parts that were not found are None.

    Attributes:
        name: Name of the module.
        module: The module with the projections.
        query: Query projection.
        key: Key projection.
        value: Value projection.
        output: Output projection.
        heads: Number of query heads.
        key_heads: Number of key and value heads, smaller than ``heads`` if queries share keys.
        reason: Why projections or heads are missing; "" if nothing is.
    """

    name: str
    module: nn.Module
    query: LinearMap | None
    key: LinearMap | None
    value: LinearMap | None
    output: LinearMap | None
    heads: int | None
    key_heads: int | None
    reason: str = ""

    @property
    def scope(self) -> str:
        """The layer around the attention: up to the last number in its name, or its parent."""
        parts = self.name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            if parts[length - 1].isdigit():
                return ".".join(parts[:length])
        return parent_of(self.name)

    @property
    def writer(self) -> nn.Module | None:
        """The module whose output attention writes to the stream."""
        # nn.MultiheadAttention uses the weight of its output projection without calling it.
        if isinstance(self.module, nn.MultiheadAttention):
            return self.module
        if self.output is None:
            return None
        return self.output.module

    def matrix(self, part: str) -> Matrix | None:
        """Return the matrix of q, k, v, o, or of a product per head, qk (W_Q W_Kᵀ) or vo (W_O W_V)."""
        title = join(self.name, part)
        if part == "qk":
            return self._queries_and_keys(title)
        if part == "vo":
            return self._values_and_outputs(title)
        maps = {"q": self.query, "k": self.key, "v": self.value, "o": self.output}
        linear = maps[part]
        if linear is None:
            return None
        return linear.matrix(title)

    def _queries_and_keys(self, title: str) -> Matrix | None:
        query = self.query
        key = self.key
        if query is None or key is None or self.heads is None or self.key_heads is None:
            return None

        def views() -> list[Tensor]:
            return [query.weight, key.weight]

        cores = partial(_product_cores, heads=self.heads, key_heads=self.key_heads)
        return Matrix(title, views, cores, self.heads)

    def _values_and_outputs(self, title: str) -> Matrix | None:
        value = self.value
        output = self.output
        if value is None or output is None or self.heads is None or self.key_heads is None:
            return None
        # The output projection must take what the heads give one after the other, and no more.
        if value.outputs * self.heads != output.inputs * self.key_heads:
            return None

        def views() -> list[Tensor]:
            return [output.weight.mT, value.weight]

        cores = partial(_product_cores, heads=self.heads, key_heads=self.key_heads)
        return Matrix(title, views, cores, self.heads)


def find_attentions(modules: Mapping[str, nn.Module]) -> list[AttentionStructure]:
    """Return every module with projections of attention under usual names, in order."""
    name_of = {module: name for name, module in modules.items()}
    return [
        _attention(name, module, modules, name_of)
        for name, module in modules.items()
        if is_attention(module)
    ]


def is_attention(module: nn.Module) -> bool:
    """True if a module has queries, or a fused projection, under a usual name."""
    for weight_name in ("in_proj_weight", "q_proj_weight"):
        if getattr(module, weight_name, None) is not None:
            return True
    return _child(module, "q") is not None or _child(module, "fused") is not None


def query_bias(module: nn.Module) -> Tensor | None:
    """Return b_Q (rows,) of an attention module; None if it has none."""
    query = _projection("", module, "q")
    if query is None:
        return None
    return query.bias


def _attention(
    name: str,
    module: nn.Module,
    modules: Mapping[str, nn.Module],
    name_of: Mapping[nn.Module, str],
) -> AttentionStructure:
    # BERT keeps the output projection next to the attention proper: attention.self and
    # attention.output.dense.
    output_module = _child(module, "o") or modules.get(f"{parent_of(name)}.output.dense")
    output = None
    if output_module is not None:
        output = linear_map(name_of.get(output_module, type(output_module).__name__), output_module)
    query = _projection(name, module, "q")
    key = _projection(name, module, "k")
    value = _projection(name, module, "v")
    heads, key_heads = heads_of(module) or (None, None)
    reasons = []
    if row_order(module) is None:
        reasons.append("the order of the rows of its fused projection is not known")
    elif query is None or key is None or value is None:
        reasons.append("it has no query, key and value projection of its own")
    if output is None:
        reasons.append("no output projection has a usual name")
    if heads is None:
        reasons.append("neither it nor its config has a number of heads")
    return AttentionStructure(
        name=name,
        module=module,
        query=query,
        key=key,
        value=value,
        output=output,
        heads=heads,
        key_heads=key_heads,
        reason="; ".join(reasons),
    )


def _child(module: nn.Module, part: str) -> nn.Module | None:
    for name, child in module.named_children():
        if not PROJECTIONS[part].match(name):
            continue
        base = base_of(child)
        if isinstance(base, nn.Linear) or is_conv1d(base) or is_lora(base):
            return child
    return None


def _projection(name: str, module: nn.Module, part: str) -> LinearMap | None:
    """Return q, k or v of an attention module, as a map of its own or a part of a fused one."""
    order = row_order(module)
    if order is None:
        return None
    title = join(name, part)
    separate = _child(module, part)
    if separate is not None:
        return linear_map(title, separate)
    # Queries without keys or values of their own: shared with another layer, or compressed.
    if _child(module, "q") is not None:
        return None
    if getattr(module, "q_proj_weight", None) is not None:
        return _part_with_common_bias(title, module, part)
    return _part_of_fused(title, module, part, order)


def _part_with_common_bias(title: str, module: nn.Module, part: str) -> LinearMap | None:
    """Return q, k or v of nn.MultiheadAttention with ``kdim`` or ``vdim``: three weights, one bias."""
    weight_name = f"{part}_proj_weight"
    weight: Tensor | None = getattr(module, weight_name, None)
    if weight is None:
        return None
    outputs, inputs = weight.shape
    start = "qkv".index(part) * outputs
    return LinearMap(
        title,
        module,
        inputs,
        outputs,
        weight_name=weight_name,
        bias_name="in_proj_bias",
        bias_part=slice(start, start + outputs),
    )


def _part_of_fused(title: str, module: nn.Module, part: str, order: RowOrder) -> LinearMap | None:
    heads, key_heads = heads_of(module) or (1, 1)
    fused = _child(module, "fused")
    if fused is not None:
        all_rows = linear_map(title, fused)
        weight_name = "weight"
        bias_name = "bias"
        holder = fused
    else:
        weight: Tensor | None = getattr(module, "in_proj_weight", None)
        if weight is None:
            return None
        all_rows = LinearMap(title, module, weight.shape[1], weight.shape[0])
        weight_name = "in_proj_weight"
        bias_name = "in_proj_bias"
        holder = module
    if all_rows is None:
        return None
    outputs = _rows_of_part(all_rows.outputs, part, order, heads, key_heads)
    if outputs is None:
        return None
    return LinearMap(
        title,
        holder,
        inputs=all_rows.inputs,
        outputs=outputs,
        select=_split(part, order, heads, key_heads),
        weight_name=weight_name,
        bias_name=bias_name,
    )


def _rows_of_part(
    all_rows: int, part: str, order: RowOrder, heads: int, key_heads: int
) -> int | None:
    """Return how many rows of a fused projection are q, k or v; None if they cannot be split so."""
    if order is RowOrder.QUARTERS:
        parts = 12
        own_parts = 4
    elif order is RowOrder.HEADS:
        parts = 3 * heads
        own_parts = heads
    elif part == "q":
        parts = heads + 2 * key_heads
        own_parts = heads
    else:
        parts = heads + 2 * key_heads
        own_parts = key_heads
    # The in_proj of a state-space mixer has other parts.
    if all_rows % parts != 0:
        return None
    return all_rows // parts * own_parts


def _split(part: str, order: RowOrder, heads: int, key_heads: int) -> Callable[[Tensor], Tensor]:
    """Return a function that takes the rows of q, k or v out of a fused weight, bias or gradient."""
    place = "qkv".index(part)

    def by_parts(rows: Tensor) -> Tensor:
        size = rows.shape[0] // (heads + 2 * key_heads)
        return rows.split([heads * size, key_heads * size, key_heads * size])[place]

    def by_heads(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (heads, 3, -1))[:, place]  # (H, head size, …)

    def by_groups(rows: Tensor) -> Tensor:
        groups = rows.unflatten(0, (key_heads, heads // key_heads + 2, -1))
        if part == "q":
            return groups[:, :-2]  # (key heads, their queries, head size, …)
        return groups[:, place - 3]  # (key heads, head size, …)

    def by_quarters(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (4, 3, -1))[:, "qvk".index(part)]  # (4, rows / 12, …)

    splits = {
        RowOrder.PARTS: by_parts,
        RowOrder.HEADS: by_heads,
        RowOrder.GROUPS: by_groups,
        RowOrder.QUARTERS: by_quarters,
    }
    return splits[order]


def row_order(module: nn.Module) -> RowOrder | None:
    """Return how the rows of a fused projection are ordered; None if nothing shows it."""
    fused = _child(module, "fused")
    # q, k and v are modules of their own, or parts as in nn.MultiheadAttention and GPT-2.
    if fused is None or is_conv1d(base_of(fused)):
        return RowOrder.PARTS
    family = family_of(module)
    heads = heads_of(module)
    is_skeleton = type(module) is nn.Module
    if is_skeleton and (family not in _FUSED_FAMILIES or heads is None):
        return None
    if family == "falcon" and _setting(module, "new_decoder_architecture"):
        return RowOrder.GROUPS
    if family == "codegen":
        return RowOrder.QUARTERS
    has_one_key_per_head = heads is None or heads[0] == heads[1]
    is_by_head = fused is getattr(module, "query_key_value", None) or family in _BY_HEAD_FAMILIES
    if is_by_head and has_one_key_per_head:
        return RowOrder.HEADS
    return RowOrder.PARTS


def heads_of(module: nn.Module) -> tuple[int, int] | None:
    """Return (query heads, key heads), from the module or its config."""
    heads = _first_integer(module, _HEADS)
    if heads is None:
        return None
    is_new_falcon = bool(_setting(module, "new_decoder_architecture"))
    if family_of(module) in _MULTI_QUERY_FAMILIES and not is_new_falcon:
        if _setting(module, "multi_query") is False:
            return heads, heads
        return heads, 1
    return heads, _first_integer(module, _KEY_HEADS) or heads


def _first_integer(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for place in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int):
                return value
    return None


def _setting(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module, or else of its config."""
    value = getattr(module, name, None)
    if value is None:
        value = getattr(getattr(module, "config", None), name, None)
    return value


def _product_cores(views: list[Tensor], heads: int, key_heads: int) -> list[Tensor]:
    """Return for each head a small matrix with the singular values of W_Qᵀ W_K (d × d).

    Its rank is at most the head size. With W_Qᵀ = Q₁R₁ and W_Kᵀ = Q₂R₂ (columns of Q orthonormal)
    it is Q₁ (R₁R₂ᵀ) Q₂ᵀ, so that R₁R₂ᵀ has the same singular values. The same holds for W_O W_V
    with W_Oᵀ in place of W_Q.
    """
    query = gather(flat_rows(views[0])).detach().float().unflatten(0, (heads, -1))  # (H, h, d)
    key = gather(flat_rows(views[1])).detach().float().unflatten(0, (key_heads, -1))
    query_core = torch.linalg.qr(query.mT, mode="r").R  # (H, h, h)
    key_core = torch.linalg.qr(key.mT, mode="r").R
    key_core = key_core.repeat_interleave(heads // key_heads, dim=0)
    return list(query_core @ key_core.mT)
