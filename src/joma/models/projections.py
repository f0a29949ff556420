"""The projections of attention modules, split out of fused ones as each family's own code splits them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from joma.models.lora import base_of, is_lora, update_of
from joma.models.matrices import Matrix, flat, is_conv1d, kind_of, plain_name, weight_of
from joma.models.sharded import whole

_NAMES = {
    "q": r"^(to_?q|w_?q|q|q_?proj|q_?lin|query(_proj)?)$",
    "k": r"^(to_?k|w_?k|k|k_?proj|k_?lin|key(_proj)?)$",
    "v": r"^(to_?v|w_?v|v|v_?proj|v_?lin|value(_proj)?)$",
    "o": r"^(to_?out|w_?o|o|o_?proj|out(_proj|_lin)?|dense|c_proj|proj|output\.dense)$",
    "fused": r"^(query_key_value|c_attn|w?_?qkv(_proj)?|in_proj)$",
}
# families whose fused projection is known without their code; others are refused where there are only names
_FUSED = (
    "bloom", "codegen", "deberta", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "minimax",
    "modernbert", "mpt", "persimmon", "phi3",
)  # fmt: skip


def projections(model: nn.Module, part: str) -> list[Matrix]:
    """q, k, v, o, W_Q W_Kᵀ or W_O W_V of every attention module that has them under a known name."""
    matrices = (_projection(model, name, module, part) for name, module in _attentions(model))
    return [matrix for matrix in matrices if matrix is not None]


def attention_writers(model: nn.Module) -> list[nn.Module]:
    """The modules whose output is what attention writes: output projections, as far as they have a known name."""
    writers = []
    for name, module in _attentions(model):
        # nn.MultiheadAttention uses the weight of its projection without calling it
        writer = (
            module if isinstance(module, nn.MultiheadAttention) else _output(model, name, module)
        )
        writers += [] if writer is None else [writer]
    return writers


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every attention that has projections under a known name."""
    for name, module in model.named_modules():
        if (
            getattr(module, "in_proj_weight", None) is not None
            or _child(module, "q")
            or _child(module, "fused")
        ):
            yield plain_name(name), module


def _output(model: nn.Module, name: str, module: nn.Module) -> nn.Module | None:
    """The output projection of an attention module."""
    return _child(module, "o") or _sibling_output(model, name)


def _child(module: nn.Module, kind: str) -> nn.Module | None:
    for name, child in module.named_children():
        base = base_of(child)
        is_linear = isinstance(base, nn.Linear) or is_conv1d(base) or is_lora(base)
        if is_linear and re.match(_NAMES[kind], name, re.IGNORECASE):
            return child
    return None


def _projection(model: nn.Module, name: str, module: nn.Module, part: str) -> Matrix | None:
    title = f"{name}.{part}" if name else part
    if part == "o":
        o = _output(model, name, module)
        return None if o is None else Matrix(title, lambda: [weight_of(o)], update=_update(o))
    if _layout(module) is None:
        return None
    if part == "qk":
        heads = _heads(module)
        if heads is None:
            return None
        return Matrix(
            title,
            lambda: [_project(module, "q"), _project(module, "k")],
            lambda views: _cores(flat(views[0]), flat(views[1]), *heads),
            heads[0],
        )
    if part == "vo":
        return _values_and_outputs(model, name, module, title)
    if _child(module, "q") is not None and _child(module, part) is None:
        return None
    child = _child(module, part)
    update = _update(child or _child(module, "fused"))
    if child is None and update is not None:
        whole_update = update
        update = lambda: [split_fused(module, part, whole(whole_update()[0]))]  # noqa: E731
    return Matrix(title, lambda: [_project(module, part)], update=update)


def _values_and_outputs(
    model: nn.Module, name: str, module: nn.Module, title: str
) -> Matrix | None:
    """W_O W_V per head, where the output projection takes what the heads give one after the other, and no more."""
    heads, o = _heads(module), _output(model, name, module)
    separate = _child(module, "q") is not None
    if heads is None or o is None or (separate and _child(module, "v") is None):
        return None
    with torch.no_grad():
        rows, columns = flat(_project(module, "v")).shape[0], weight_of(o).shape[-1]
    if rows * heads[0] != columns * heads[1]:
        return None
    return Matrix(
        title,
        lambda: [weight_of(o).mT, _project(module, "v")],
        lambda views: _cores(flat(views[0]), flat(views[1]), *heads),
        heads[0],
    )


def _update(module: nn.Module | None) -> Callable[[], list[Tensor]] | None:
    """What low-rank adapters add to a linear map, if there are any."""
    return None if module is None or not is_lora(module) else lambda: [update_of(module)]


def _sibling_output(model: nn.Module, name: str) -> nn.Module | None:
    """BERT keeps the output projection beside the attention proper: attention.self, attention.output.dense."""
    parent = name.rpartition(".")[0]
    for other, module in model.named_modules():
        if plain_name(other) == f"{parent}.output.dense":
            return module
    return None


def _project(module: nn.Module, part: str) -> Tensor:
    """The (rows, d) or (…, rows, d) projection q, k or v of an attention module, a part of a fused one maybe."""
    separate = _child(module, part)
    if separate is not None:
        return weight_of(separate)
    fused = _child(module, "fused")
    w = whole(module.in_proj_weight if fused is None else weight_of(fused))  # type: ignore[arg-type]
    return split_fused(module, part, w)


def query_bias(module: nn.Module) -> Tensor | None:
    """b_Q (rows,) of an attention module, a part of a fused bias maybe; None if it has none."""
    separate, fused = (_child(module, kind) for kind in ("q", "fused"))
    linear = separate or fused
    bias: Any = (
        getattr(module, "in_proj_bias", None)
        if linear is None
        else getattr(base_of(linear), "bias", None)
    )
    if bias is None:
        return None
    bias = whole(bias)
    return bias if separate is not None else split_fused(module, "q", bias[:, None]).reshape(-1)


def split_fused(module: nn.Module, part: str, w: Tensor) -> Tensor:
    """The rows of q, k or v out of a fused projection's weight, bias or gradient w (rows, …)."""
    H, Hk = _heads(module) or (1, 1)
    n, layout = "qkv".index(part), _layout(module)
    if layout == "heads":
        return w.unflatten(0, (H, 3, -1))[:, n]
    if layout == "groups":
        groups = w.unflatten(0, (Hk, H // Hk + 2, -1))
        return groups[:, :-2] if part == "q" else groups[:, n - 3]
    if layout == "quarters":
        return w.unflatten(0, (4, 3, -1))[:, "qvk".index(part)]
    size = w.shape[0] // (H + 2 * Hk)
    return w.split([H * size, Hk * size, Hk * size])[n]


def _layout(module: nn.Module) -> str | None:
    """How the rows of a fused projection are ordered; None if there is one and nothing tells.

    "parts": all of q, then k, then v. "heads": (heads, q k v, head size). "groups" of heads that share keys and values:
    (key heads, their queries and k and v, head size). "quarters": (4, q v k, …).
    """
    fused = _child(module, "fused")
    if fused is None or is_conv1d(
        base_of(fused)
    ):  # q, k and v are modules of their own, or as in nn.MultiheadAttention, GPT-2
        return "parts"
    kind, heads = kind_of(module), _heads(module)
    if type(module) is nn.Module and (
        kind not in _FUSED or heads is None
    ):  # of a file: names and shapes only
        return None
    if kind == "falcon" and _fact(module, "new_decoder_architecture"):
        return "groups"
    if kind == "codegen":
        return "quarters"
    one_each = heads is None or heads[0] == heads[1]
    by_head = fused is getattr(module, "query_key_value", None) or kind in (
        "deberta",
        "minimax",
        "gpt_bigcode",
    )
    return "heads" if by_head and one_each else "parts"


def _fact(module: nn.Module, name: str) -> Any:
    """What a module, or else its config, says."""
    value = getattr(module, name, None)
    return getattr(getattr(module, "config", None), name, None) if value is None else value


def _heads(module: nn.Module) -> tuple[int, int] | None:
    """(query heads, key heads)."""

    def first(*names: str) -> int | None:
        for place in (module, getattr(module, "config", None)):
            for name in names:
                if isinstance(value := getattr(place, name, None), int):
                    return value
        return None

    heads = first("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
    if heads is None:
        return None
    if kind_of(module) in ("falcon", "gpt_bigcode") and not _fact(
        module, "new_decoder_architecture"
    ):
        return heads, heads if _fact(module, "multi_query") is False else 1
    return heads, first("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv") or heads


def _cores(q: Tensor, k: Tensor, H: int, Hk: int) -> list[Tensor]:
    """For each head a small matrix with the singular values of W_Qᵀ W_K (d × d, of rank head size at most).

    So, too, of W_O W_V, with W_Oᵀ in place of W_Q. With W_Qᵀ = Q₁R₁ and W_Kᵀ = Q₂R₂ (columns of Q orthonormal) it is
    Q₁ (R₁R₂ᵀ) Q₂ᵀ.
    """
    qs, ks = (whole(x).detach().float().unflatten(0, (n, -1)) for x, n in ((q, H), (k, Hk)))
    Rq, Rk = (torch.linalg.qr(x.mT, mode="r").R for x in (qs, ks))
    Rk = Rk.repeat_interleave(H // Hk, dim=0)
    return list(Rq @ Rk.mT)
