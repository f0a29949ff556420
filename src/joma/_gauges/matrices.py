"""Finding the weight matrices of a model that gauges are measured on.

The lower MLP matrix of a block (projection into the hidden neurons) is found by structure: of the linear maps of a
block that do not belong to attention, the first A (d → h) that is followed by some B (h → d), with h as large as
possible. Gated MLPs have two such A; the first defined is taken, which is the one under the activation in the usual
families (`gate_proj`, `wi_0`), and of a fused pair the first half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from joma._gauges.sharded import whole

_DIGITS = re.compile(r"^\d+$")
# a component of a module's name, or the name of its class, that says attention
_ATTENTION = re.compile(r"att(n|en)|^sa$|^(q|k|v|o|qkv|query|key|value)$|^(q|k|v|o|qkv|out|in)_proj$", re.IGNORECASE)
_NAMES = {
    "q": r"^(to_?q|w_?q|q|q_?proj|q_?lin|query(_proj)?)$",
    "k": r"^(to_?k|w_?k|k|k_?proj|k_?lin|key(_proj)?)$",
    "v": r"^(to_?v|w_?v|v|v_?proj|v_?lin|value(_proj)?)$",
    "o": r"^(to_?out|w_?o|o|o_?proj|out(_proj|_lin)?|dense|c_proj|proj|output\.dense)$",
    "fused": r"^(query_key_value|c_attn|w?_?qkv(_proj)?|in_proj)$",
}
_INTERLEAVED = "query_key_value"  # GPT-NeoX, BLOOM: (heads, 3, head size) rows


def _flat(view: Tensor) -> Tensor:
    """(rows, n) from (…, rows, n)."""
    return view if view.dim() == 2 else view.flatten(0, -2)


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a model, read when it is asked for.

    ``views`` are views of the model's parameters, also of one on the meta device: a scan reads their bytes from a file.
    """

    name: str
    views: Callable[[], list[Tensor]]  # (…, rows, n) each
    finish: Callable[[list[Tensor]], list[Tensor]] = lambda views: [_flat(view) for view in views]
    heads: int = 1

    def read(self) -> list[Tensor]:
        """One matrix, or one a head."""
        return self.finish(self.views())


@dataclass(frozen=True, eq=False)
class _Linear:
    name: str
    module: nn.Module
    inputs: int
    outputs: int

    @property
    def weight(self) -> Tensor:
        """(out, in)"""
        return _weight(self.module)


def find_matrices(model: nn.Module, part: str, names: str | Sequence[str] | None = None) -> list[Matrix]:
    """The matrices of ``part``, in the order of the layers; with ``names``, the modules or parameters named so.

    ``names`` is a list of names, or a regular expression that whole names must match.
    """
    if names is not None:
        return _named(model, names)
    if part in ("mlp_in", "mlp_out"):
        return [pair[part == "mlp_out"] for pair in _mlps(model)]
    return _projections(model, part)


def plain_name(name: str) -> str:
    """A module's name without what wrappers (DDP, compile, activation checkpointing) put into it."""
    wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def _linears(model: nn.Module) -> list[_Linear]:
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found.append(_Linear(plain_name(name), module, module.in_features, module.out_features))
        elif _is_conv1d(module):
            outputs, inputs = _weight(module).shape
            found.append(_Linear(plain_name(name), module, inputs, outputs))
    return found


def _scopes(name: str) -> list[str]:
    """The elements of lists that a module lies in, innermost first: "layers.3" of "layers.3.mlp.fc1"."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: n + 1]) for n in reversed(range(len(parts))) if _DIGITS.match(parts[n])]


def _mlps(model: nn.Module) -> list[tuple[Matrix, Matrix]]:
    """(lower, upper) of each MLP, in order."""
    linears = _linears(model)
    classes = {plain_name(name): type(module).__name__ for name, module in model.named_modules()}

    def of_attention(linear: _Linear) -> bool:
        scope = (_scopes(linear.name) or [""])[0]
        parts = linear.name.split(".")
        inner = range(len(scope.split(".")) if scope else 0, len(parts))
        return any(
            _ATTENTION.search(parts[n]) or re.search("att(n|en)", classes.get(".".join(parts[: n + 1]), ""), re.I)
            for n in inner
        )

    others = [linear for linear in linears if not of_attention(linear)]
    return _experts(model) or _pairs(others) or _pairs([x for x in linears if x.outputs != x.inputs])


def _pairs(linears: list[_Linear]) -> list[tuple[Matrix, Matrix]]:
    """The MLP of each innermost scope that has one; scopes are widened where there is none."""
    found: dict[str, tuple[_Linear, _Linear]] = {}
    depth = max((len(_scopes(x.name)) for x in linears), default=0)
    for level in range(depth):
        groups: dict[str, list[_Linear]] = {}
        for x in linears:
            if len(scopes := _scopes(x.name)) > level:
                groups.setdefault(scopes[level], []).append(x)
        for scope, members in groups.items():
            inside = any(done == scope or done.startswith(scope + ".") for done in found)
            if not inside and (pair := _pair(members)):
                found[scope] = pair
    if not found and (pair := _pair(linears)):
        found[""] = pair
    position = {x.name: n for n, x in enumerate(linears)}
    ordered = sorted(found.values(), key=lambda pair: position[pair[0].name])
    return [_as_matrices(*pair) for pair in ordered]


def _experts(model: nn.Module) -> list[tuple[Matrix, Matrix]]:
    """(lower, upper) of each expert where a layer's experts are stacks of matrices, (experts, …, …)."""
    found = []
    for name, module in model.named_modules():
        stacks = [(key, p) for key, p in module.named_parameters(recurse=False) if p.dim() == 3]
        for (low, a), (high, b) in pairwise(stacks):
            # (2h or h, d) and (d, h) as in Linear, or transposed
            by_row = a.shape[2] == b.shape[1] and a.shape[1] in (b.shape[2], 2 * b.shape[2])
            by_column = a.shape[1] == b.shape[2] and a.shape[2] in (b.shape[1], 2 * b.shape[1])
            if a.shape[0] != b.shape[0] or not (by_row or by_column):
                continue
            h = b.shape[2] if by_row else b.shape[1]

            def expert(module: nn.Module, key: str, e: int, axis: int, h: int) -> list[Tensor]:
                return [whole(getattr(module, key))[e].narrow(axis, 0, h)]

            path, axis = plain_name(name), 0 if by_row else 1
            for e in range(a.shape[0]):
                lower = Matrix(f"{path}.{low}[{e}]", partial(expert, module, low, e, axis, h))
                found.append((lower, Matrix(f"{path}.{high}[{e}]", partial(expert, module, high, e, 1 - axis, h))))
    return found


def _pair(linears: list[_Linear]) -> tuple[_Linear, _Linear] | None:
    """A (d → h, or → 2h for a fused gate) and a later B (h → d), the widest and first of those."""
    fits = [
        (a, b)
        for n, a in enumerate(linears)
        for b in linears[n + 1 :]
        if a.inputs == b.outputs and a.outputs in (b.inputs, 2 * b.inputs)
    ]
    return max(fits, key=lambda pair: pair[1].inputs) if fits else None  # max takes the first of equals


def _as_matrices(a: _Linear, b: _Linear) -> tuple[Matrix, Matrix]:
    if a.outputs == b.inputs:
        lower = Matrix(a.name, lambda: [a.weight])
    else:
        lower = Matrix(f"{a.name}[:{b.inputs}]", lambda: [whole(a.weight)[: b.inputs]])
    return lower, Matrix(b.name, lambda: [b.weight])


def _named(model: nn.Module, names: str | Sequence[str]) -> list[Matrix]:
    """Matrices by the names of modules (their ``weight``) or parameters."""
    known: dict[str, Callable[[], list[Tensor]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 2:
                path = plain_name(f"{name}.{key}" if name else key)
                known[path] = partial(lambda module, key: [getattr(module, key)], module, key)
    short = {name.removesuffix(".weight"): name for name in known}
    if isinstance(names, str):
        chosen = [name for name in short if re.fullmatch(names, name)]
        if not chosen:
            raise ValueError(f"no matrix matches {names!r}; there are {_some(short)}")
    else:
        chosen = [plain_name(name) for name in names]
    for name in chosen:
        if name not in short and name not in known:
            raise ValueError(f"the model has no matrix {name!r}; there are {_some(short)}")
    return [Matrix(name, known[short.get(name, name)]) for name in chosen]


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")


def _projections(model: nn.Module, part: str) -> list[Matrix]:
    """q, k, v, o or W_Q W_Kᵀ of every attention module that has them under a known name."""
    found = []
    for name, module in model.named_modules():
        name = plain_name(name)
        if getattr(module, "in_proj_weight", None) is not None or _child(module, "q") or _child(module, "fused"):
            matrix = _projection(model, name, module, part)
            if matrix is not None:
                found.append(matrix)
    return found


def _child(module: nn.Module, kind: str) -> nn.Module | None:
    for name, child in module.named_children():
        is_linear = isinstance(child, nn.Linear) or _is_conv1d(child)
        if is_linear and re.match(_NAMES[kind], name, re.IGNORECASE):
            return child
    return None


def _projection(model: nn.Module, name: str, module: nn.Module, part: str) -> Matrix | None:
    title = f"{name}.{part}" if name else part
    if part == "o":
        o = _child(module, "o") or _sibling_output(model, name)
        return None if o is None else Matrix(title, lambda: [_weight(o)])
    if part == "qk":
        heads = _heads(module)
        if heads is None:
            return None
        return Matrix(
            title,
            lambda: [_project(module, "q"), _project(module, "k")],
            lambda views: _cores(_flat(views[0]), _flat(views[1]), *heads),
            heads[0],
        )
    if _child(module, "q") is not None and _child(module, part) is None:
        return None
    return Matrix(title, lambda: [_project(module, part)])


def _sibling_output(model: nn.Module, name: str) -> nn.Module | None:
    """BERT keeps the output projection beside the attention proper: attention.self, attention.output.dense."""
    parent = name.rpartition(".")[0]
    for other, module in model.named_modules():
        if plain_name(other) == f"{parent}.output.dense":
            return module
    return None


def _weight(module: nn.Module) -> Tensor:
    w: Tensor = module.weight  # type: ignore[assignment]
    return w.T if _is_conv1d(module) else w


def _project(module: nn.Module, part: str) -> Tensor:
    """The (rows, d) or (heads, rows, d) projection q, k or v of an attention module, a part of a fused one maybe."""
    own = _child(module, part)
    if own is not None:
        return _weight(own)
    fused = _child(module, "fused")
    w = whole(module.in_proj_weight if fused is None else _weight(fused))  # type: ignore[arg-type]
    H, Hk = _heads(module) or (1, 1)
    n = "qkv".index(part)
    interleaved = fused is not None and _child_name(module, fused) == _INTERLEAVED
    if interleaved and Hk == H:
        return w.unflatten(0, (H, 3, -1))[:, n]
    size = w.shape[0] // (H + 2 * Hk)
    return w.split([H * size, Hk * size, Hk * size])[n]


def _child_name(module: nn.Module, child: nn.Module) -> str:
    return next(name for name, other in module.named_children() if other is child)


def _heads(module: nn.Module) -> tuple[int, int] | None:
    """(query heads, key heads)."""
    places: list[Any] = [module, getattr(module, "config", None)]

    def first(*names: str) -> int | None:
        for place in places:
            for name in names:
                if isinstance(value := getattr(place, name, None), int):
                    return value
        return None

    heads = first("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
    if heads is None:
        return None
    return heads, first("num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads


def _cores(q: Tensor, k: Tensor, H: int, Hk: int) -> list[Tensor]:
    """For each head a small matrix with the singular values of W_Qᵀ W_K (d × d, of rank head size at most).

    With W_Qᵀ = Q₁R₁ and W_Kᵀ = Q₂R₂ (columns of Q orthonormal) it is Q₁ (R₁R₂ᵀ) Q₂ᵀ.
    """
    qs, ks = (whole(x).detach().float().unflatten(0, (n, -1)) for x, n in ((q, H), (k, Hk)))
    Rq, Rk = (torch.linalg.qr(x.mT, mode="r").R for x in (qs, ks))
    Rk = Rk.repeat_interleave(H // Hk, dim=0)
    return list(Rq @ Rk.mT)
