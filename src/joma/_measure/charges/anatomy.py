"""The anatomy of a Transformer, as far as charges need it: blocks, what reads and writes the stream, normalisations.

Modules are found by structure and names; where a normalisation stands (before or after its sublayer) is known of the
families below and of PyTorch's own layers, since modules do not show in which order they are called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from joma._measure.charges.charge import Side
from joma.models.matrices import is_conv1d, kind_of, plain_name
from joma.models.projections import _child, _heads, _layout, _sibling_output, split_fused

Placement = Literal["pre", "post"]

_PRE = (
    "bloom", "codegen", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "llama",
    "mistral", "mpt", "olmo", "persimmon", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2", "vit",
)  # fmt: skip
_POST = ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm", "xlm_roberta")
# families whose rotary embedding turns coordinate i with i + R/2
_HALVES = (
    "gemma", "gemma2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "persimmon", "phi",
    "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
_ACTIVATIONS = (
    "act",
    "act_fn",
    "activation",
    "activation_fn",
    "intermediate_act_fn",
    "nonlinearity",
    "activation_function",
)


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map, or its part in a fused one: rows (outputs, inputs) of a tensor shaped as its weight or bias."""

    name: str
    weight: Tensor
    bias: Tensor | None
    rows: Callable[[Tensor], Tensor]  # weight-shaped → (outputs, inputs)
    bias_rows: Callable[[Tensor], Tensor]  # bias-shaped → (outputs,)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, inputs = self.rows(self.weight.detach()).shape
        return int(outputs), int(inputs)


@dataclass(frozen=True, eq=False)
class Norm:
    """A normalisation with a scale, and what it does, tried out on random numbers."""

    name: str
    module: nn.Module
    centres: bool  # subtracts the mean: LayerNorm, not RMSNorm
    offset: float  # scales by offset + γ

    @property
    def eps(self) -> float:
        """ε, the constant in the root."""
        for attribute in ("eps", "variance_epsilon"):
            value = getattr(self.module, attribute, None)
            if isinstance(value, (int, float)):
                return float(value)
        return 0.0

    @property
    def weight(self) -> Tensor:
        """γ."""
        return cast(Tensor, self.module.weight)

    @property
    def bias(self) -> Tensor | None:
        """β."""
        return cast("Tensor | None", getattr(self.module, "bias", None))


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention module: its projections, heads, and what happens to queries and keys."""

    name: str
    module: nn.Module
    q: Projection
    k: Projection
    v: Projection
    o: Projection | None
    heads: int
    key_heads: int
    rotary: int  # R, how many of each head's coordinates are rotated; 0 without a rotary embedding
    halves: bool  # coordinate i is rotated with i + R/2
    normed: bool  # queries and keys are normalised


@dataclass(frozen=True, eq=False)
class MLP:
    """One MLP: the map that the activation acts on, or the factor beside it if gated, and the map back."""

    name: str
    lower: tuple[Projection, ...]  # all maps that read the stream
    scaled: Projection | None  # whose rows can be scaled against the columns of ``upper``
    upper: Projection
    degree: int | None  # φ(2a) = 2^degree φ(a); 1 for a gated MLP's factor
    gated: bool


@dataclass(frozen=True, eq=False)
class Block:
    """One layer of the model."""

    name: str
    index: int
    attention: Attention
    mlp: MLP | None
    norms: tuple[Norm, ...]
    placement: Placement | None


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A model, taken apart."""

    blocks: tuple[Block, ...]
    embeddings: tuple[
        tuple[str, Tensor, int], ...
    ]  # what writes to the stream before the blocks: name, tensor, its d axis
    embedding_norm: Norm | None
    final_norm: Norm | None
    head: Projection | None  # the only map that reads what the last normalisation gives out
    tied: frozenset[int]  # ids of parameters with several names
    padding: bool  # some embedding has a padding_idx
    dropout: bool  # of activations that were written to the stream
    names: dict[int, str]
    capped: bool  # final or attention logits go through a soft cap


def side_of(
    projection: Projection,
    anatomy_names: dict[int, str],
    view: Callable[[Tensor], Tensor],
    weight: float,
) -> Side:
    """A side that sees a projection's weight through ``view`` of its (outputs, inputs) rows."""
    rows = projection.rows
    name = anatomy_names.get(id(projection.weight), projection.name)
    return Side(name, projection.weight, lambda t: view(rows(t)), weight)


def bias_side(
    projection: Projection, names: dict[int, str], view: Callable[[Tensor], Tensor], weight: float
) -> list[Side]:
    """The same for its bias, seen as a column (outputs, 1); empty without one."""
    if projection.bias is None:
        return []
    rows = projection.bias_rows
    name = names.get(id(projection.bias), projection.name)
    return [Side(name, projection.bias, lambda t: view(rows(t)[:, None]), weight)]


def anatomy(model: nn.Module, placement: Placement | None = None) -> Anatomy:
    """Take a model apart."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
    names: dict[int, str] = {}
    tied: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied.add(id(parameter))
        else:
            names[id(parameter)] = plain_name(name)
    attentions = list(_attentions(model, modules))
    scopes = [_scope(a.name) for a in attentions]
    norms = [n for name, module in modules.items() if (n := _norm(name, module)) is not None]
    blocks = []
    for index, (scope, attention) in enumerate(zip(scopes, attentions, strict=True)):
        norms_inside = tuple(
            n
            for n in norms
            if n.name.startswith(scope + ".")
            and not n.name.startswith(attention.name + ".")
            and n.weight.shape[0] == attention.q.shape[1]
        )
        if scopes.count(scope) > 1:  # cross-attention beside self-attention
            norms_inside = ()
        stands = placement or _placement(modules.get(scope, attention.module), attention.module)
        mlp = None if scopes.count(scope) > 1 else _mlp(scope, modules, attention)
        blocks.append(Block(scope, index, attention, mlp, norms_inside, stands))
    in_block = tuple(scope + "." for scope in scopes)
    outside = [n for n in norms if not n.name.startswith(in_block)]
    width = attentions[0].q.shape[1] if attentions else 0
    before, after = _around(modules, in_block)
    embedding_norm = next((n for n in outside if re.search("emb", n.name, re.IGNORECASE)), None)
    last = [n for n in outside if n is not embedding_norm and n.weight.shape[0] == width]
    post = bool(blocks) and blocks[-1].placement == "post"
    final = (
        (blocks[-1].norms[-1] if len(blocks[-1].norms) == 2 else None)
        if post
        else (last[0] if len(last) == 1 else None)
    )
    readers = [
        p
        for name in after
        if (p := _linear(name, modules[name])) is not None and p.shape[1] == width
    ]
    head = readers[0] if len(readers) == 1 or (post and readers) else None
    return Anatomy(
        blocks=tuple(blocks),
        embeddings=tuple(_written(modules, before, width)),
        embedding_norm=embedding_norm,
        final_norm=final,
        head=head,
        tied=frozenset(tied),
        padding=any(
            isinstance(m, nn.Embedding) and m.padding_idx is not None for m in modules.values()
        ),
        dropout=_drops(modules),
        names=names,
        capped=any(
            _config(m, key)
            for m in modules.values()
            for key in ("final_logit_softcapping", "attn_logit_softcapping")
        ),
    )


# -- attention ---------------------------------------------------------------------------------------------


def _attentions(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[Attention]:
    for name, module in modules.items():
        fused = _child(module, "fused")
        direct = getattr(module, "in_proj_weight", None)
        if direct is None and fused is None and _child(module, "q") is None:
            continue
        heads = _heads(module)
        if heads is None or _layout(module) is None:
            continue
        parts = [_part(name, module, part) for part in "qkv"]
        if any(part is None for part in parts):
            continue
        q, k, v = cast("list[Projection]", parts)
        if q.shape[0] % heads[0] or k.shape[0] % heads[1] or heads[0] % heads[1]:
            continue
        o = _child(module, "o") or _sibling_output(model, name)
        rotary, halves = _rotary(modules, module, q.shape[0] // heads[0])
        yield Attention(
            name=name,
            module=module,
            q=q,
            k=k,
            v=v,
            o=None if o is None else _linear(_name_of(modules, o), o),
            heads=heads[0],
            key_heads=heads[1],
            rotary=rotary,
            halves=halves,
            normed=any(
                re.search("norm", type(m).__name__, re.IGNORECASE)
                for m in list(module.modules())[1:]
            ),
        )


def _part(name: str, module: nn.Module, part: str) -> Projection | None:
    child = _child(module, part)
    if child is not None:
        return _linear(f"{name}.{part}", child)
    fused = _child(module, "fused")
    if fused is None and getattr(module, "in_proj_weight", None) is None:
        return None
    weight = cast(Tensor, module.in_proj_weight if fused is None else fused.weight)
    bias = cast("Tensor | None", module.in_proj_bias if fused is None else fused.bias)
    turned = fused is not None and is_conv1d(fused)

    def rows(tensor: Tensor) -> Tensor:
        tensor = split_fused(module, part, tensor.T if turned else tensor)
        return tensor.reshape(-1, tensor.shape[-1])

    return Projection(
        f"{name}.{part}",
        weight,
        bias,
        rows,
        lambda t: split_fused(module, part, t[:, None]).reshape(-1),
    )


def _linear(name: str, module: nn.Module) -> Projection | None:
    if not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return None
    turned = is_conv1d(module)
    bias = cast("Tensor | None", getattr(module, "bias", None))
    return Projection(
        name,
        cast(Tensor, module.weight),
        bias,
        (lambda t: t.T) if turned else (lambda t: t),
        lambda t: t,
    )


def _rotary(modules: dict[str, nn.Module], module: nn.Module, size: int) -> tuple[int, bool]:
    """How many coordinates of a head are rotated, and whether i goes with i + R/2."""
    halves = kind_of(module) in _HALVES
    dimension = _config(module, "rotary_dim")
    if isinstance(dimension, int):
        return dimension, halves
    for rotary in modules.values():
        frequencies = getattr(rotary, "inv_freq", None)
        if isinstance(frequencies, Tensor) and frequencies.dim() == 1:
            return min(2 * len(frequencies), size), halves
    if any(re.search("rotary|rope", type(m).__name__, re.IGNORECASE) for m in modules.values()):
        return size, halves
    return 0, halves


# -- MLP ---------------------------------------------------------------------------------------------------


def _mlp(scope: str, modules: dict[str, nn.Module], attention: Attention) -> MLP | None:
    """The MLP of a block: the widest A (d → h) with a later B (h → d), and a second A if it is gated."""
    of_attention = {
        id(p.weight) for p in (attention.q, attention.k, attention.v, attention.o) if p is not None
    }
    linears = [
        p
        for name, module in modules.items()
        if name.startswith(scope + ".")
        and (p := _linear(name, module)) is not None
        and id(p.weight) not in of_attention
    ]
    width = attention.q.shape[1]
    pairs = [
        (a, b)
        for n, a in enumerate(linears)
        for b in linears[n + 1 :]
        if a.shape[1] == b.shape[0] == width and a.shape[0] in (b.shape[1], 2 * b.shape[1])
    ]
    if not pairs:
        return None
    first, upper = max(pairs, key=lambda pair: pair[1].shape[1])
    hidden = upper.shape[1]
    parent = first.name.rpartition(".")[0]
    lower = tuple(
        p
        for p in linears
        if p.shape == first.shape and p.name.rpartition(".")[0] == parent and p is not upper
    )
    if first.shape[0] == 2 * hidden:  # gate and factor in one matrix, the gate first
        rows, bias_rows = first.rows, first.bias_rows
        half = Projection(
            f"{first.name}[{hidden}:]",
            first.weight,
            first.bias,
            lambda t: rows(t)[hidden:],
            lambda t: bias_rows(t)[hidden:],
        )
        return MLP(parent or scope, (first,), half, upper, 1, True)
    if len(lower) == 2:
        gates = [p for p in lower if re.search(r"gate|wi_0$|w1$", p.name.rpartition(".")[2])]
        factor = next(p for p in lower if p is not gates[0]) if len(gates) == 1 else None
        return MLP(parent or scope, lower, factor, upper, 1, True)
    if len(lower) > 2:
        return None
    return MLP(parent or scope, (first,), first, upper, _degree(modules, parent), False)


def _degree(modules: dict[str, nn.Module], parent: str) -> int | None:
    """p if the activation has φ(2a) = 2^p φ(a), None if not or if none is found; by trying it out."""
    owner = modules[parent]
    candidates: list[Any] = [
        getattr(owner, key) for key in _ACTIVATIONS if callable(getattr(owner, key, None))
    ]
    pattern = re.compile("relu|gelu|silu|activation|tanh|sigmoid|mish", re.IGNORECASE)
    candidates += [module for module in owner.children() if pattern.search(type(module).__name__)]
    if not candidates:
        return None
    a = torch.tensor([-1.7, -0.6, -0.1, 0.2, 0.9, 2.3], dtype=torch.float64)
    with torch.no_grad():
        once, twice = candidates[0](a), candidates[0](2 * a)
    return next(
        (p for p in (1, 2, 3) if torch.allclose(twice, 2**p * once, rtol=1e-12, atol=0)), None
    )


# -- normalisations, embeddings, facts ----------------------------------------------------------------------


def _norm(name: str, module: nn.Module) -> Norm | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    if not re.search("norm", type(module).__name__, re.IGNORECASE) or re.search(
        "batch|group", type(module).__name__, re.I
    ):
        return None
    if isinstance(module, nn.LayerNorm):
        return Norm(name, module, True, 0.0)
    if isinstance(module, nn.RMSNorm) or weight.is_meta:
        return Norm(name, module, False, 0.0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, len(weight), generator=generator).to(weight)
    with torch.no_grad():
        y, shifted = module(x), module(x + 3.0)
        centres = bool(torch.allclose(y, shifted, rtol=1e-3, atol=1e-3))
        scale = y / (x / x.float().pow(2).mean(-1, keepdim=True).sqrt().to(x))
        offset = (
            0.0
            if centres or torch.allclose(scale[0], weight.to(scale), rtol=1e-2, atol=1e-3)
            else 1.0
        )
    return Norm(name, module, centres, offset)


def _placement(block: nn.Module, attention: nn.Module) -> Placement | None:
    first = getattr(block, "norm_first", None)
    if isinstance(first, bool):
        return "pre" if first else "post"
    before = getattr(block, "do_layer_norm_before", None)
    if isinstance(before, bool):
        return "pre" if before else "post"
    kind = kind_of(attention)
    return "pre" if kind in _PRE else "post" if kind in _POST else None


def _scope(name: str) -> str:
    """The layer that a module lies in: up to the last number of its name, or its parent."""
    parts = name.split(".")
    numbers = [n for n, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ".".join(parts[:-1])


def _around(
    modules: dict[str, nn.Module], in_block: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """The names of modules before and after the blocks, in the order of definition."""
    names = list(modules)
    places = [n for n, name in enumerate(names) if name.startswith(in_block)] if in_block else []
    if not places:
        return [], []
    before = names[: places[0]]
    after = [name for name in names[places[-1] + 1 :] if not name.startswith(in_block)]
    return before, after


def _written(
    modules: dict[str, nn.Module], before: list[str], width: int
) -> Iterator[tuple[str, Tensor, int]]:
    """Parameters that write to the stream before the first block, each with the axis of the stream."""
    for name in before:
        module = modules[name]
        if _norm(name, module) is not None:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{key}" if name else key
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                if parameter.shape[0] == width:
                    yield path, parameter, 0
            elif parameter.shape[-1] == width:
                yield path, parameter, parameter.dim() - 1


def _drops(modules: dict[str, nn.Module]) -> bool:
    """Whether anything but attention weights is dropped."""
    for name, module in modules.items():
        if (
            isinstance(module, nn.Dropout)
            and module.p > 0
            and not re.search("att", name.rpartition(".")[2], re.I)
        ):
            return True
        p = getattr(module, "dropout", None)
        if (
            isinstance(p, float)
            and p > 0
            and not re.search("att", type(module).__name__, re.IGNORECASE)
        ):
            return True
    return False


def _config(module: nn.Module, key: str) -> Any:
    return getattr(getattr(module, "config", None), key, None)


def _name_of(modules: dict[str, nn.Module], wanted: nn.Module) -> str:
    return next(
        (name for name, module in modules.items() if module is wanted), type(wanted).__name__
    )
