"""Finding the weight matrices of a model that gauges are measured on.

The lower MLP matrix of a block (projection into the hidden neurons) is found by structure: of the linear maps of a
block that may belong to an MLP (see `joma.models.roles`), the first A (d → h) that is followed by some B (h → d) in
the same module, with h as large as possible. Convolutions of kernel 1 are linear maps, too. Gated MLPs have two such A;
the first defined is taken, which is the one under the activation in the usual families (`gate_proj`, `wi_0`), and of a
fused pair the first half. Experts, be they modules or one stack of matrices a layer, and shared experts beside them are
MLPs of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from joma.models.lora import base_of, is_lora, is_readable, update_of, with_update
from joma.models.parts import UPDATE
from joma.models.roles import Roles, goes_back
from joma.models.sharded import whole


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
    update: Callable[[], list[Tensor]] | None = (
        None  # what low-rank adapters add to it, if there are any
    )

    def read(self) -> list[Tensor]:
        """One matrix, or one per head."""
        return self.finish(self.views())


@dataclass(frozen=True, eq=False)
class _Linear:
    name: str
    module: nn.Module
    inputs: int
    outputs: int
    groups: int = 1  # of a convolution: its matrix has blocks on the diagonal

    @property
    def is_convolution(self) -> bool:
        return is_convolution(base_of(self.module))

    @property
    def weight(self) -> Tensor:
        """(out, in)"""
        return weight_of(self.module)

    @property
    def update(self) -> Callable[[], Tensor] | None:
        """What low-rank adapters add, (out, in), if there are any."""
        return partial(update_of, self.module) if is_lora(self.module) else None


def find_matrices(
    model: nn.Module, part: str, names: str | Sequence[str] | None = None
) -> list[Matrix]:
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
    from joma.models.projections import projections

    return projections(model, part)


def unnamed_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """The names of (lower, upper) maps that are taken for an MLP by their shapes alone."""
    pairs = [(low.name.partition("[")[0], high.name) for low, high in _mlps(model)]
    linears = [linear.name for linear in _linears(model)]
    roles = Roles({plain_name(name): module for name, module in model.named_modules()}, linears)
    return [(low, high) for low, high in pairs if low in linears and not roles.is_evident(low)]


def plain_name(name: str) -> str:
    """A module's name without what wrappers (DDP, compile, activation checkpointing) put into it."""
    wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def is_conv1d(module: nn.Module) -> bool:
    """Return True for GPT-2's Conv1D of transformers, a linear map with its weight transposed."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), Tensor)


def is_convolution(module: nn.Module) -> bool:
    """True of a convolution of kernel 1, which is a linear map of the channels at each position."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.transposed:
        return False
    is_pointwise = all(size == 1 for size in (*module.kernel_size, *module.stride))
    return is_pointwise and module.groups < module.in_channels


def _linears(model: nn.Module) -> list[_Linear]:
    linears: list[_Linear] = []
    inside = ""
    for name, module in model.named_modules():
        if inside and name.startswith(
            inside
        ):  # the base and the factors of an update are no maps of their own
            continue
        base = base_of(module)
        if is_lora(module):
            inside = f"{name}."
            if not is_readable(module):
                continue
        path = plain_name(name)
        if isinstance(base, nn.Linear):
            linears.append(_Linear(path, module, base.in_features, base.out_features))
        elif isinstance(base, nn.modules.conv._ConvNd):
            if not is_convolution(base) or (base.groups > 1 and base is not module):
                continue
            linears.append(_Linear(path, module, base.in_channels, base.out_channels, base.groups))
        elif is_conv1d(base) or is_lora(base):  # the second has both base and update
            outputs, inputs = base_weight(base).shape
            linears.append(_Linear(path, module, inputs, outputs))
    return linears


def _mlps(model: nn.Module) -> list[tuple[Matrix, Matrix]]:
    """(lower, upper) of each MLP, in order."""
    linears = _linears(model)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    roles = Roles(modules, [linear.name for linear in linears])
    candidates = [linear for linear in linears if roles.may_be_mlp(linear.name)]
    experts = _experts(model, roles)
    pairs = [*experts, *_pairs(candidates, roles, anywhere=not experts)]
    position = {name: n for n, name in enumerate(modules)}
    pairs.sort(key=lambda item: position[item[0]])
    return [pair for _, pair in pairs]


def _pairs(
    linears: list[_Linear], roles: Roles, anywhere: bool = True
) -> list[tuple[str, tuple[Matrix, Matrix]]]:
    """The MLP of each innermost scope that has one, with its module's name; scopes are widened where there is none.

    Beside the experts of a layer, which are scopes inside of it, there may be a shared one: a module with an MLP.
    ``anywhere``: without scopes, the whole model is one.
    """
    pair_of: dict[str, tuple[_Linear, _Linear]] = {}
    scopes_of = {x.name: roles.scopes(x.name) for x in linears}
    groups: dict[str, list[_Linear]] = {}
    for x in linears:
        for scope in scopes_of[x.name]:
            groups.setdefault(scope, []).append(x)
    has_pair_inside: set[str] = set()
    for scope in sorted(groups, key=lambda scope: -scope.count(".")):
        members = groups[scope]
        is_around = scope in has_pair_inside
        rest = [x for x in members if not any(s in pair_of for s in scopes_of[x.name])]
        for group in [*_by_parent(rest), rest] if is_around else [rest]:
            if pair := _pair(group, roles):
                pair_of[scope] = pair
                break
        if is_around or scope in pair_of:
            parts = scope.split(".")
            has_pair_inside.update(".".join(parts[:n]) for n in range(1, len(parts)))
    if anywhere and not pair_of and (pair := _pair(linears, roles)):
        pair_of[""] = pair
    return [(a.name, _as_matrices(a, b)) for a, b in pair_of.values()]


def _by_parent(linears: list[_Linear]) -> list[list[_Linear]]:
    groups: dict[str, list[_Linear]] = {}
    for x in linears:
        groups.setdefault(x.name.rpartition(".")[0], []).append(x)
    return list(groups.values())


def _experts(model: nn.Module, roles: Roles) -> list[tuple[str, tuple[Matrix, Matrix]]]:
    """(lower, upper) of each expert where a layer's experts are stacks of matrices, (experts, …, …); by module.

    Of several stacks (gate, up, down) the first that fits a later one is the lower, the last that it fits the upper.
    """
    experts = []
    for name, module in model.named_modules():
        stacks = [(key, p) for key, p in module.named_parameters(recurse=False) if p.dim() == 3]
        fits = [
            (x, y, axis)
            for x, y in combinations(stacks, 2)
            if (axis := _hidden_axis(x[1], y[1])) is not None
        ]
        if not fits:
            continue
        if not roles.may_be_mlp(f"{plain_name(name)}.{fits[0][0][0]}"):
            continue
        (low, a), _, _ = fits[0]
        is_square = a.shape[1] == a.shape[2]
        if is_square and not roles.is_evident(f"{plain_name(name)}.{low}"):
            continue
        _, (high, b), axis = [fit for fit in fits if fit[0][0] == low][-1]
        h, path = b.shape[2 - axis], plain_name(name)
        every = 2 if a.shape[1 + axis] == 2 * h and _gate_alternates(module, low) else 1

        def lower(
            module: nn.Module, key: str, e: int, axis: int, h: int, every: int
        ) -> list[Tensor]:
            w = whole(getattr(module, key))[e].narrow(axis, 0, every * h)
            return [w[::every] if axis == 0 else w[:, ::every]]

        def upper(module: nn.Module, key: str, e: int) -> list[Tensor]:
            return [whole(getattr(module, key))[e]]

        for e in range(a.shape[0]):
            first = Matrix(f"{path}.{low}[{e}]", partial(lower, module, low, e, axis, h, every))
            experts.append(
                (path, (first, Matrix(f"{path}.{high}[{e}]", partial(upper, module, high, e))))
            )
    return experts


def _hidden_axis(a: Tensor, b: Tensor) -> int | None:
    """Which axis of a's matrices is the hidden neurons, h or 2h of them, if b's map those back; None if not."""
    if a.shape[0] != b.shape[0] or 1 in (*a.shape[1:], *b.shape[1:]):
        return None
    if a.shape[2] == b.shape[1] and a.shape[1] in (
        b.shape[2],
        2 * b.shape[2],
    ):  # (2h or h, d) and (d, h)
        return 0
    if a.shape[1] == b.shape[2] and a.shape[2] in (
        b.shape[1],
        2 * b.shape[1],
    ):  # (d, 2h or h) and (h, d)
        return 1
    return None


def _gate_alternates(module: nn.Module, key: str) -> bool:
    """Whether gate and up of a stack take turns, as in gpt-oss, which alone has biases in stacks."""
    return kind_of(module) in ("gpt_oss", "openai_privacy_filter") or hasattr(module, f"{key}_bias")


def _pair(linears: list[_Linear], roles: Roles) -> tuple[_Linear, _Linear] | None:
    """A (d → h, or → 2h for a fused gate) and a later B (h → d), the widest and first of those.

    Of several B, as in a gated MLP with as many neurons as inputs, the one whose name leads back is taken.
    """
    fits = [
        (a, b)
        for n, a in enumerate(linears)
        for b in linears[n + 1 :]
        if _fits(a, b) and _is_certain(a, b, roles)
    ]
    if not fits:
        return None
    lower, upper = max(fits, key=lambda pair: pair[1].inputs)  # max takes the first of equals
    others = [b for a, b in fits if a is lower and b.inputs == upper.inputs]
    return lower, next((b for b in others if goes_back(b.name)), upper)


def _fits(a: _Linear, b: _Linear) -> bool:
    """True if b maps back what a maps to, or half of it."""
    if a.inputs != b.outputs or a.is_convolution != b.is_convolution:
        return False
    return a.outputs == b.inputs or (a.outputs == 2 * b.inputs and a.groups == 1)


def _is_certain(a: _Linear, b: _Linear, roles: Roles) -> bool:
    """True if two maps that fit are an MLP: wider inside, or with a name or activation that shows it.

    Both are asked of convolutions: nets of convolutions have many of kernel 1.
    """
    is_wider = b.inputs > a.inputs
    is_evident = roles.is_evident(a.name)
    is_shown = (is_wider and is_evident) if a.is_convolution else (is_wider or is_evident)
    return is_shown and roles.can_pair(a.name, b.name)


def _as_matrices(a: _Linear, b: _Linear) -> tuple[Matrix, Matrix]:
    h = b.inputs
    if a.outputs == h:
        return _as_matrix(a), _as_matrix(b)
    update = a.update
    half = None if update is None else lambda: [whole(update())[:h]]
    return Matrix(f"{a.name}[:{h}]", lambda: [whole(a.weight)[:h]], update=half), _as_matrix(b)


def _as_matrix(linear: _Linear) -> Matrix:
    update = linear.update
    views = lambda: [linear.weight]  # noqa: E731
    if linear.groups > 1:
        return Matrix(linear.name, views, partial(_on_diagonal, linear.groups))
    return Matrix(linear.name, views, update=None if update is None else lambda: [update()])


def _on_diagonal(groups: int, views: list[Tensor]) -> list[Tensor]:
    """(out, in) of a grouped convolution, from (out, in / groups)."""
    return [torch.block_diag(*whole(view).chunk(groups)) for view in views]


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
    """(out, in): the matrix that acts, with what low-rank adapters add; (out, in / groups) of a convolution."""
    w = base_weight(base_of(module))
    return with_update(module, w) if is_lora(module) else w


def base_weight(module: nn.Module) -> Tensor:
    """(out, in) of a linear map without updates, as its next pass will compute it."""
    w: Tensor = module.weight  # type: ignore[assignment]
    # Before each pass, these compute the weight anew from parameters that an optimiser has stepped meanwhile.
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == "weight":
            w = hook.apply_mask(module)
        elif isinstance(hook, WeightNorm) and hook.name == "weight":
            w = hook.compute_weight(module)
        elif isinstance(hook, SpectralNorm) and hook.name == "weight":
            w = hook.compute_weight(module, do_power_iteration=False)
    if is_conv1d(module):
        return w.T
    return w.flatten(1) if w.dim() > 2 else w


def kind_of(module: nn.Module) -> str:
    """The family of a module, as transformers calls it in ``model_type``; "" of others."""
    for cls in type(module).__mro__:
        if match := re.match(r"transformers\.models\.(\w+)\.", cls.__module__):
            return match[1]
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return kind if isinstance(kind, str) else ""
