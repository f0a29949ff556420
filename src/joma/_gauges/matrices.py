"""Finding the weight matrices of a model that gauges are measured on.

The lower MLP matrix of a block (projection into the hidden neurons) is found by structure: of the linear maps of a
block that do not belong to attention, the first A (d → h) that is followed by some B (h → d), with h as large as
possible. Gated MLPs have two such A; the first defined is taken, which is the one under the activation in the usual
families (`gate_proj`, `wi_0`), and of a fused pair the first half. Experts, be they modules or one stack of matrices
a layer, and shared experts beside them are MLPs of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from torch import Tensor, nn

from joma._gauges.lora import base_of, is_lora, update_of, with_update
from joma._gauges.registry import UPDATE
from joma._gauges.sharded import whole

_DIGITS = re.compile(r"^\d+$")
# a component of a module's name, or the name of its class, that says attention
_ATTENTION = re.compile(r"att(n|en)|^sa$|^(q|k|v|o|qkv|query|key|value)$|^(q|k|v|o|qkv|out|in)_proj$", re.IGNORECASE)


def flat(view: Tensor) -> Tensor:
    """(rows, n) from (…, rows, n)."""
    return view if view.dim() == 2 else view.flatten(0, -2)


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a model, read when it is asked for.

    ``views`` are views of the model's parameters, also of one on the meta device: a scan reads their bytes from a file.
    """

    name: str
    views: Callable[[], list[Tensor]]  # (…, rows, n) each
    finish: Callable[[list[Tensor]], list[Tensor]] = lambda views: [flat(view) for view in views]
    heads: int = 1
    update: Callable[[], list[Tensor]] | None = None  # what low-rank adapters add to it, if there are any

    def read(self) -> list[Tensor]:
        """One matrix, or one per head."""
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
        return weight_of(self.module)

    @property
    def update(self) -> Callable[[], Tensor] | None:
        """What low-rank adapters add, (out, in), if there are any."""
        return partial(update_of, self.module) if is_lora(self.module) else None


def find_matrices(model: nn.Module, part: str, names: str | Sequence[str] | None = None) -> list[Matrix]:
    """The matrices of ``part``, in the order of the layers; with ``names``, the modules or parameters named so.

    ``names`` is a list of names, or a regular expression that whole names must match.
    """
    if names is not None:
        return _named(model, names)
    if part.endswith(UPDATE):
        matrices = find_matrices(model, part.removesuffix(UPDATE))
        return [Matrix(f"{m.name} (update)", m.update) for m in matrices if m.update is not None]
    if part in ("mlp_in", "mlp_out"):
        return [pair[part == "mlp_out"] for pair in _mlps(model)]
    from joma._gauges.projections import projections

    return projections(model, part)


def plain_name(name: str) -> str:
    """A module's name without what wrappers (DDP, compile, activation checkpointing) put into it."""
    wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def _linears(model: nn.Module) -> list[_Linear]:
    linears, inside = [], ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):  # the base and the factors of an update are no maps of their own
            continue
        base = base_of(module)
        if is_lora(module):
            inside = f"{name}."
        if isinstance(base, nn.Linear):
            linears.append(_Linear(plain_name(name), module, base.in_features, base.out_features))
        elif is_conv1d(base):
            outputs, inputs = weight_of(base).shape
            linears.append(_Linear(plain_name(name), module, inputs, outputs))
    return linears


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
    experts = _experts(model)
    pairs = [*experts, *_pairs(others, anywhere=not experts)] or _pairs([x for x in linears if x.outputs != x.inputs])
    position = {name: n for n, name in enumerate(classes)}
    pairs.sort(key=lambda item: position[item[0]])
    return [pair for _, pair in pairs]


def _pairs(linears: list[_Linear], anywhere: bool = True) -> list[tuple[str, tuple[Matrix, Matrix]]]:
    """The MLP of each innermost scope that has one, with its module's name; scopes are widened where there is none.

    Beside the experts of a layer, which are scopes inside of it, there may be a shared one: a module with an MLP.
    ``anywhere``: without scopes, the whole model is one.
    """
    pair_of: dict[str, tuple[_Linear, _Linear]] = {}
    depth = max((len(_scopes(x.name)) for x in linears), default=0)
    for level in range(depth):
        groups: dict[str, list[_Linear]] = {}
        for x in linears:
            if len(scopes := _scopes(x.name)) > level:
                groups.setdefault(scopes[level], []).append(x)
        for scope, members in groups.items():
            if scope in pair_of:
                continue
            inside = any(done.startswith(scope + ".") for done in pair_of)
            rest = [x for x in members if not any(s in pair_of for s in _scopes(x.name))]
            for group in _by_parent(rest) if inside else [members]:
                if pair := _pair(group):
                    pair_of[scope] = pair
                    break
    if anywhere and not pair_of and (pair := _pair(linears)):
        pair_of[""] = pair
    return [(a.name, _as_matrices(a, b)) for a, b in pair_of.values()]


def _by_parent(linears: list[_Linear]) -> list[list[_Linear]]:
    groups: dict[str, list[_Linear]] = {}
    for x in linears:
        groups.setdefault(x.name.rpartition(".")[0], []).append(x)
    return list(groups.values())


def _experts(model: nn.Module) -> list[tuple[str, tuple[Matrix, Matrix]]]:
    """(lower, upper) of each expert where a layer's experts are stacks of matrices, (experts, …, …); by module.

    Of several stacks (gate, up, down) the first that fits a later one is the lower, the last that it fits the upper.
    """
    experts = []
    for name, module in model.named_modules():
        stacks = [(key, p) for key, p in module.named_parameters(recurse=False) if p.dim() == 3]
        fits = [(x, y, axis) for x, y in combinations(stacks, 2) if (axis := _hidden_axis(x[1], y[1])) is not None]
        if not fits:
            continue
        (low, a), _, _ = fits[0]
        _, (high, b), axis = [fit for fit in fits if fit[0][0] == low][-1]
        h, path = b.shape[2 - axis], plain_name(name)
        every = 2 if a.shape[1 + axis] == 2 * h and _gate_alternates(module, low) else 1

        def lower(module: nn.Module, key: str, e: int, axis: int, h: int, every: int) -> list[Tensor]:
            w = whole(getattr(module, key))[e].narrow(axis, 0, every * h)
            return [w[::every] if axis == 0 else w[:, ::every]]

        def upper(module: nn.Module, key: str, e: int) -> list[Tensor]:
            return [whole(getattr(module, key))[e]]

        for e in range(a.shape[0]):
            first = Matrix(f"{path}.{low}[{e}]", partial(lower, module, low, e, axis, h, every))
            experts.append((path, (first, Matrix(f"{path}.{high}[{e}]", partial(upper, module, high, e)))))
    return experts


def _hidden_axis(a: Tensor, b: Tensor) -> int | None:
    """Which axis of a's matrices is the hidden neurons, h or 2h of them, if b's map those back; None if not."""
    if a.shape[0] != b.shape[0]:
        return None
    if a.shape[2] == b.shape[1] and a.shape[1] in (b.shape[2], 2 * b.shape[2]):  # (2h or h, d) and (d, h)
        return 0
    if a.shape[1] == b.shape[2] and a.shape[2] in (b.shape[1], 2 * b.shape[1]):  # (d, 2h or h) and (h, d)
        return 1
    return None


def _gate_alternates(module: nn.Module, key: str) -> bool:
    """Whether gate and up of a stack take turns, as in gpt-oss, which alone has biases in stacks."""
    return kind_of(module) in ("gpt_oss", "openai_privacy_filter") or hasattr(module, f"{key}_bias")


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
    h, (a_update, b_update) = b.inputs, (a.update, b.update)
    if a.outputs == h:
        lower = Matrix(a.name, lambda: [a.weight], update=None if a_update is None else lambda: [a_update()])
    else:
        half = None if a_update is None else lambda: [whole(a_update())[:h]]
        lower = Matrix(f"{a.name}[:{h}]", lambda: [whole(a.weight)[:h]], update=half)
    return lower, Matrix(b.name, lambda: [b.weight], update=None if b_update is None else lambda: [b_update()])


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


def weight_of(module: nn.Module) -> Tensor:
    """(out, in): the matrix that acts, with what low-rank adapters add."""
    base = base_of(module)
    w: Tensor = base.weight  # type: ignore[assignment]
    w = w.T if is_conv1d(base) else w
    return with_update(module, w) if is_lora(module) else w


def kind_of(module: nn.Module) -> str:
    """The family of a module, as transformers calls it in ``model_type``; "" of others."""
    for cls in type(module).__mro__:
        if match := re.match(r"transformers\.models\.(\w+)\.", cls.__module__):
            return match[1]
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return kind if isinstance(kind, str) else ""
